//! A port for programs that only install extensions.

use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use portolan_types::Protocol;
use rustix::io::Errno;

use super::{Extension, Object, announce, guards_of, install};
use crate::posix::{self, CallError, Outcome};
use crate::process::installed::Installed;
use crate::qos::Refused;

/// A bound socket.
#[derive(Debug)]
pub struct Port {
    fd: RawFd,
}

impl Port {
    /// Opens a UDP port of Portolan's; fails rather than use a kernel socket.
    pub fn open(local: SocketAddr) -> Result<Port, Refused> {
        Port::take(local, libc::SOCK_DGRAM)
    }

    /// Opens a TCP port, and listens on it.
    pub fn listen(local: SocketAddr) -> Result<Port, Refused> {
        let port = Port::take(local, libc::SOCK_STREAM)?;
        match posix::listen(port.fd, 0) {
            Ok(()) => Ok(port),
            Err(CallError::NotOurs) => Err(Refused::new(Errno::NETDOWN, "the server has gone")),
            Err(error) => Err(refused(error, &format!("cannot listen on {local}"))),
        }
    }

    /// Takes over a socket of this program that is bound to a UDP port of Portolan's.
    pub fn of_socket(socket: RawFd) -> Result<Port, Refused> {
        match guards_of(&[socket])? {
            (Protocol::Udp, _) => Ok(Port { fd: socket }),
            (Protocol::Tcp, _) => Err(Refused::new(Errno::INVAL, "the socket is none of UDP")),
        }
    }

    pub(super) fn announce(&self, name: &str, priority: u8) -> Result<Arc<Installed>, Refused> {
        announce(self.fd, name, priority)
    }

    fn take(local: SocketAddr, kind: i32) -> Result<Port, Refused> {
        let domain = match local {
            SocketAddr::V4(_) => libc::AF_INET,
            SocketAddr::V6(_) => libc::AF_INET6,
        };
        let fd = match posix::socket(domain, kind | libc::SOCK_CLOEXEC, 0) {
            Ok(fd) => fd,
            Err(CallError::NotOurs) => {
                return Err(Refused::new(Errno::CONNREFUSED, "there is no server"));
            }
            Err(error) => return Err(refused(error, "cannot open a socket")),
        };
        let port = Port { fd };
        match posix::bind(fd, local) {
            Ok(()) => Ok(port),
            Err(CallError::NotOurs) => Err(Refused::new(
                Errno::ADDRNOTAVAIL,
                format!("{local} is not on a device of Portolan's"),
            )),
            Err(error) => Err(refused(error, &format!("cannot bind {local}"))),
        }
    }

    /// Installs an extension on this port, as [`install`].
    pub fn install(&self, name: &str, priority: u8, object: Object) -> Result<Extension, Refused> {
        install(&[self.fd], name, priority, object)
    }

    /// Installs one extension on several ports.
    pub fn install_on(
        ports: &[Port],
        name: &str,
        priority: u8,
        object: Object,
    ) -> Result<Extension, Refused> {
        let sockets: Vec<RawFd> = ports.iter().map(|port| port.fd).collect();
        install(&sockets, name, priority, object)
    }

    /// Has sent payloads cut into datagrams of `size` bytes (`UDP_SEGMENT`); 0 disables it.
    pub fn cut(&self, size: u16) -> Result<(), Errno> {
        self.set(libc::SOL_UDP, libc::UDP_SEGMENT, size.into())
    }

    /// Sends datagrams without checksums, which IPv4 allows (`SO_NO_CHECK`).
    pub fn leave_checksums(&self) -> Result<(), Errno> {
        self.set(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)
    }

    /// Has [`Port::receive`] fail with `EAGAIN` if nothing arrives for `time` (`SO_RCVTIMEO`).
    pub(super) fn receive_within(&self, time: Duration) -> Result<(), Errno> {
        let seconds = time.as_secs().to_ne_bytes();
        let rest = u64::from(time.subsec_micros()).to_ne_bytes();
        let value = [seconds, rest];
        self.set_bytes(libc::SOL_SOCKET, libc::SO_RCVTIMEO, value.as_flattened())
    }

    fn set(&self, level: i32, name: i32, value: i32) -> Result<(), Errno> {
        self.set_bytes(level, name, &value.to_ne_bytes())
    }

    fn set_bytes(&self, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
        done(posix::set_option(self.fd, level, name, value))
    }

    /// Sends a datagram from the port.
    pub fn send(&self, payload: &[u8], to: SocketAddr) -> Result<(), Errno> {
        let pieces = [IoSlice::new(payload)];
        done(posix::send(self.fd, &pieces, Some(to), 0)).map(drop)
    }

    /// Waits for the next datagram that extensions pass to the owner. Returns its length.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.receive_from(buffer).map(|(length, _)| length)
    }

    /// As [`Port::receive`], and returns the sender.
    pub fn receive_from(&self, buffer: &mut [u8]) -> Result<(usize, Option<SocketAddr>), Errno> {
        let received = done(posix::receive(self.fd, &mut [IoSliceMut::new(buffer)], 0))?;
        Ok((received.length, received.from))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // Errors have no receiver here.
        let _ = posix::close(self.fd);
    }
}

/// Converts an outcome: the port is Portolan's, so "not ours" means that the server is gone.
fn done<T>(outcome: Outcome<T>) -> Result<T, Errno> {
    outcome.map_err(|error| error.errno_or(Errno::NETDOWN))
}

fn refused(error: CallError, what: &str) -> Refused {
    let errno = error.errno_or(Errno::NETDOWN);
    Refused::new(errno, format!("{what}: {errno}"))
}
