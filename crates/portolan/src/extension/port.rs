//! A port for programs that have nothing but extensions.

use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;

use rustix::io::Errno;

use super::{Extension, Object, install};
use crate::posix::{self, Answer};
use crate::qos::Refused;

/// A bound socket.
#[derive(Debug)]
pub struct Port {
    fd: RawFd,
}

impl Port {
    /// Takes a UDP port of Portolan's; one of the kernel's would not do.
    pub fn open(local: SocketAddr) -> Result<Port, Refused> {
        Port::take(local, libc::SOCK_DGRAM)
    }

    /// Takes a TCP port, and listens there.
    pub fn listen(local: SocketAddr) -> Result<Port, Refused> {
        let port = Port::take(local, libc::SOCK_STREAM)?;
        match posix::listen(port.fd, 0) {
            Answer::Done(()) => Ok(port),
            Answer::Failed(errno) => Err(refused(errno, &format!("cannot listen on {local}"))),
            Answer::NotOurs => Err(Refused::new(Errno::NETDOWN, "the server has gone")),
        }
    }

    fn take(local: SocketAddr, kind: i32) -> Result<Port, Refused> {
        let domain = match local {
            SocketAddr::V4(_) => libc::AF_INET,
            SocketAddr::V6(_) => libc::AF_INET6,
        };
        let fd = match posix::socket(domain, kind | libc::SOCK_CLOEXEC, 0) {
            Answer::Done(fd) => fd,
            Answer::Failed(errno) => return Err(refused(errno, "cannot open a socket")),
            Answer::NotOurs => return Err(Refused::new(Errno::CONNREFUSED, "there is no server")),
        };
        let port = Port { fd };
        match posix::bind(fd, local) {
            Answer::Done(()) => Ok(port),
            Answer::Failed(errno) => Err(refused(errno, &format!("cannot bind {local}"))),
            Answer::NotOurs => Err(Refused::new(
                Errno::ADDRNOTAVAIL,
                format!("{local} is not on a device of Portolan's"),
            )),
        }
    }

    /// As [`install`].
    pub fn install(&self, name: &str, priority: u8, object: Object) -> Result<Extension, Refused> {
        install(&[self.fd], name, priority, object)
    }

    /// Installs one for several ports.
    pub fn install_on(
        ports: &[Port],
        name: &str,
        priority: u8,
        object: Object,
    ) -> Result<Extension, Refused> {
        let sockets: Vec<RawFd> = ports.iter().map(|port| port.fd).collect();
        install(&sockets, name, priority, object)
    }

    /// Has what is sent be cut into datagrams of `size` octets (`UDP_SEGMENT`); 0: not.
    pub fn cut(&self, size: u16) -> Result<(), Errno> {
        self.set(libc::SOL_UDP, libc::UDP_SEGMENT, size.into())
    }

    /// Sends datagrams without checksums, which IPv4 allows (`SO_NO_CHECK`).
    pub fn leave_checksums(&self) -> Result<(), Errno> {
        self.set(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)
    }

    fn set(&self, level: i32, name: i32, value: i32) -> Result<(), Errno> {
        match posix::set_option(self.fd, level, name, &value.to_ne_bytes()) {
            Answer::Done(()) => Ok(()),
            Answer::Failed(errno) => Err(errno),
            Answer::NotOurs => Err(Errno::NETDOWN),
        }
    }

    /// Sends a datagram from the port.
    pub fn send(&self, payload: &[u8], to: SocketAddr) -> Result<(), Errno> {
        match posix::send(self.fd, &[IoSlice::new(payload)], Some(to), 0) {
            Answer::Done(_) => Ok(()),
            Answer::Failed(errno) => Err(errno),
            Answer::NotOurs => Err(Errno::NETDOWN),
        }
    }

    /// Waits for the next datagram that extensions leave to their owner; answers how long it is.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        match posix::receive(self.fd, &mut [IoSliceMut::new(buffer)], 0) {
            Answer::Done(received) => Ok(received.length),
            Answer::Failed(errno) => Err(errno),
            Answer::NotOurs => Err(Errno::NETDOWN),
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // Nothing is left to be told of.
        let _ = posix::close(self.fd);
    }
}

fn refused(errno: Errno, what: &str) -> Refused {
    Refused::new(errno, format!("{what}: {errno}"))
}
