//! Protocol extensions of this program: handlers that run in the packet filter, for the packets of
//! its own sockets. They are written in C against `<portolan/extension.h>` and compiled by clang;
//! the server admits and links them.
//!
//! An extension lives until it is dropped here, its socket is closed, or the program ends. Its maps
//! are shared with the program by [`Map`].

mod object;
mod port;
pub mod thread;

use std::os::fd::{OwnedFd, RawFd};

use portolan_proto::control::{ReplyBody, RequestBody};
pub use portolan_proto::extension::Cost;
use portolan_proto::extension::{
    Code, Direction, Event, Extension as ExtensionSpec, ExtensionReply, ExtensionRequest, Guard,
};
pub use portolan_sys::map::Map;
use portolan_types::Protocol;
use rustix::io::Errno;

pub use self::object::ObjectError;
pub use self::port::Port;
use crate::descriptors;
use crate::posix::attach;
use crate::qos::{Refused, ask_server, unexpected};
use crate::socket::table;

/// An object file that was read.
#[derive(Clone, Debug)]
pub struct Object {
    code: Code,
}

impl Object {
    /// Reads what clang made.
    pub fn parse(bytes: &[u8]) -> Result<Object, ObjectError> {
        object::parse(bytes).map(|code| Object { code })
    }

    /// Is it for what comes, or for what is sent?
    pub(crate) fn direction(&self) -> Direction {
        self.code.direction
    }

    /// What the server is sent.
    pub fn into_code(self) -> Code {
        self.code
    }
}

/// An installed extension.
#[derive(Debug)]
pub struct Extension {
    number: u16,
    cost: Cost,
    /// By their names.
    maps: Vec<(String, Map)>,
}

/// Has the handler of an object called for what comes to the ports of some sockets, which are all of
/// UDP, or all listeners of TCP; or for what this program sends from there, if it is written for
/// that. Of several handlers the one with the lowest `priority` comes first.
pub fn install(
    sockets: &[RawFd],
    name: &str,
    priority: u8,
    object: Object,
) -> Result<Extension, Refused> {
    let (protocol, guards) = guards_of(sockets)?;
    let event = Event::of(protocol, object.code.direction);
    install_on(event, guards, (name, priority), object)
}

/// Has the server admit the handler of an object as [`install`] does, and forget it again.
pub fn check(object: Object) -> Result<Cost, Refused> {
    match ask(ExtensionRequest::Check(object.code))? {
        (ExtensionReply::Checked(cost), _) => Ok(cost),
        _ => Err(unexpected()),
    }
}

pub(crate) fn install_on(
    event: Event,
    guards: Vec<Guard>,
    (name, priority): (&str, u8),
    object: Object,
) -> Result<Extension, Refused> {
    let shapes: Vec<(String, u32, u32)> = object
        .code
        .maps
        .iter()
        .map(|map| (map.name.clone(), map.key, map.value))
        .collect();
    let spec = ExtensionSpec {
        name: name.to_owned(),
        event,
        guards,
        priority,
        code: object.code,
    };
    let (number, cost, fds) = match ask(ExtensionRequest::Install(spec))? {
        (ExtensionReply::Installed { number, cost }, fds) => (number, cost, fds),
        _ => return Err(unexpected()),
    };
    let maps = shapes.into_iter().zip(fds);
    let maps =
        maps.map(|((name, key, value), fd)| (name, Map::new(descriptors::hide(fd), key, value)));
    Ok(Extension {
        number,
        cost,
        maps: maps.collect(),
    })
}

impl Extension {
    /// As `portolan ext list` shows it.
    pub fn number(&self) -> u16 {
        self.number
    }

    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// One of its maps; those of global variables are called `.data`, `.bss` and `.rodata`.
    pub fn map(&self, name: &str) -> Option<&Map> {
        let found = self.maps.iter().find(|(known, _)| known == name);
        found.map(|(_, map)| map)
    }
}

impl Drop for Extension {
    fn drop(&mut self) {
        // One that is gone already needs no removal.
        let _ = ask(ExtensionRequest::Remove {
            number: self.number,
        });
    }
}

fn guards_of(sockets: &[RawFd]) -> Result<(Protocol, Vec<Guard>), Refused> {
    let mut protocol = Protocol::Udp;
    let mut guards = Vec::new();
    for &fd in sockets {
        if !descriptors::is_ours(fd) {
            attach(fd);
        }
        let socket = table::socket(fd);
        let session = socket.as_ref().and_then(|socket| socket.setup().session);
        let (Some(socket), Some(session)) = (socket, session) else {
            let reason = format!("descriptor {fd} is not a bound socket of Portolan's");
            return Err(Refused::new(Errno::INVAL, reason));
        };
        if socket.protocol == Protocol::Tcp {
            protocol = Protocol::Tcp;
        }
        guards.push(Guard::Session(session));
    }
    Ok((protocol, guards))
}

/// Tells the server of a handler in a thread, which `portolan ext list` shows from then on. Answers its number, and the
/// row in which to say what it did.
fn announce(socket: RawFd, name: &str, priority: u8) -> Result<(u16, u8), Refused> {
    let (protocol, guards) = guards_of(&[socket])?;
    let Some(&guard) = guards.first() else {
        return Err(unexpected());
    };
    let request = ExtensionRequest::Announce {
        name: name.to_owned(),
        event: Event::of(protocol, Direction::Receive),
        guard,
        priority,
    };
    match ask(request)? {
        (ExtensionReply::Announced { number, row }, _) => Ok((number, row)),
        _ => Err(unexpected()),
    }
}

fn ask(request: ExtensionRequest) -> Result<(ExtensionReply, Vec<OwnedFd>), Refused> {
    match ask_server(RequestBody::Extension(request))? {
        (ReplyBody::Extension(ExtensionReply::Refused(refusal)), _) => Err(refusal.into()),
        (ReplyBody::Extension(reply), fds) => Ok((reply, fds)),
        _ => Err(unexpected()),
    }
}
