//! Protocol extensions of this program: handlers that run in the packet filter, for the packets of
//! its own sockets. They are written in C against `<portolan/extension.h>` and compiled by clang;
//! the server admits and links them.
//!
//! An extension is removed when it is dropped here, when its socket is closed, or when the program
//! ends. The program shares its maps through [`Map`].

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
use crate::migration::registration::register_at;
use crate::posix::attach;
use crate::qos::{Refused, ask_server, unexpected};
use crate::socket::table;

/// A parsed object file.
#[derive(Clone, Debug)]
pub struct Object {
    code: Code,
}

impl Object {
    /// Parses an object file compiled by clang.
    pub fn parse(bytes: &[u8]) -> Result<Object, ObjectError> {
        object::parse(bytes).map(|code| Object { code })
    }

    /// Does the handler see received or sent packets?
    pub(crate) fn direction(&self) -> Direction {
        self.code.direction
    }

    /// Returns the code that is sent to the server.
    pub fn into_code(self) -> Code {
        self.code
    }
}

/// An installed extension.
#[derive(Debug)]
pub struct Extension {
    number: u16,
    cost: Cost,
    /// By name.
    maps: Vec<(String, Map)>,
}

/// Installs the handler of an object for packets received on the ports of some sockets, which must
/// be all UDP, or all TCP listeners; or, if it is a send handler, for packets that this program
/// sends from there. Handlers are called in ascending order of `priority`.
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

/// Has the server admit the handler of an object as [`install`] does, without installing it.
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
    /// The number that `portolan ext list` shows.
    pub fn number(&self) -> u16 {
        self.number
    }

    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Returns a map by name; those of global variables are `.data`, `.bss` and `.rodata`.
    pub fn map(&self, name: &str) -> Option<&Map> {
        let found = self.maps.iter().find(|(known, _)| known == name);
        found.map(|(_, map)| map)
    }
}

impl Drop for Extension {
    fn drop(&mut self) {
        // Fails if the extension is gone already, which is harmless.
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
        register_at(fd);
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

/// Announces a handler that runs in a thread to the server, so that `portolan ext list` shows it.
/// Returns its number, and the row for its statistics.
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
