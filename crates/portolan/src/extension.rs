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
use std::sync::Arc;

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
use crate::process::installed::{self, Installed, NotInstalled};
use crate::qos::{Refused, ask_server, own_process, unexpected};
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

/// An installed extension. A server that follows another one is asked to install it again, with the same maps.
#[derive(Debug)]
pub struct Extension {
    installed: Arc<Installed>,
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
    let request = ExtensionRequest::Install(spec);
    let process = own_process()?;
    let mut answer = installed::ask(process, request.clone(), &[]).map_err(refused)?;
    let maps = shapes.into_iter().zip(std::mem::take(&mut answer.maps));
    let maps =
        maps.map(|((name, key, value), fd)| (name, Map::new(descriptors::hide(fd), key, value)));
    let what = (name.to_owned(), request);
    Ok(Extension {
        installed: installed::note(process, what, maps.collect(), answer),
    })
}

impl Extension {
    /// The number that `portolan ext list` shows; 0 if a server that has followed another one refuses the extension. That
    /// server may have given it another number.
    pub fn number(&self) -> u16 {
        self.installed.place().number.unwrap_or_default()
    }

    pub fn cost(&self) -> Cost {
        self.installed.cost
    }

    /// Returns a map by name; those of global variables are `.data`, `.bss` and `.rodata`.
    pub fn map(&self, name: &str) -> Option<&Map> {
        let mut maps = self.installed.maps.iter();
        let found = maps.find(|(known, _)| known == name);
        found.map(|(_, map)| map)
    }
}

impl Drop for Extension {
    fn drop(&mut self) {
        if let Some(number) = self
            .installed
            .place()
            .number
            .filter(|_| self.installed.is_own())
        {
            // Fails if the extension is gone already, which is harmless.
            let _ = ask(ExtensionRequest::Remove { number });
        }
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
fn announce(socket: RawFd, name: &str, priority: u8) -> Result<Arc<Installed>, Refused> {
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
    let process = own_process()?;
    let answer = installed::ask(process, request.clone(), &[]).map_err(refused)?;
    let what = (name.to_owned(), request);
    Ok(installed::note(process, what, Vec::new(), answer))
}

fn refused(why: NotInstalled) -> Refused {
    match why {
        NotInstalled::Refused(refusal) => refusal.into(),
        NotInstalled::Failed(errno) => Refused::new(errno, errno.to_string()),
        NotInstalled::Lost => Refused::new(Errno::NETDOWN, "the server has gone"),
    }
}

fn ask(request: ExtensionRequest) -> Result<(ExtensionReply, Vec<OwnedFd>), Refused> {
    match ask_server(RequestBody::Extension(request))? {
        (ReplyBody::Extension(ExtensionReply::Refused(refusal)), _) => Err(refusal.into()),
        (ReplyBody::Extension(reply), fds) => Ok((reply, fds)),
        _ => Err(unexpected()),
    }
}
