//! Listening for TCP connections.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use super::TcpStream;
use super::handle::{Handle, with_first};
use super::options::ttl_option;
use crate::posix;

/// Maximum number of connections that wait to be accepted; the kernel's `somaxconn` limits it, too.
const BACKLOG: i32 = 4096;

/// A TCP listener, as [`std::net::TcpListener`].
#[derive(Debug)]
pub struct TcpListener(Handle<std::net::TcpListener>);

impl TcpListener {
    /// Listens on the first address of `address` that is available, with `SO_REUSEADDR`. Port 0 means any free port.
    ///
    /// # Errors
    /// As [`std::net::TcpListener::bind`]: `AddrInUse`, `AddrNotAvailable`, `PermissionDenied`. `NetworkDown` where
    /// `PORTOLAN=require` and there is no server.
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<TcpListener> {
        with_first(address.to_socket_addrs()?, TcpListener::listen_at)
    }

    fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
        let handle: Handle<std::net::TcpListener> = Handle::open(address, libc::SOCK_STREAM)?;
        handle.set_number(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        handle.bind(address)?;
        TcpListener::listen_on(handle, BACKLOG)
    }

    /// Listens on a bound socket. At most `backlog` connections wait to be accepted.
    pub(super) fn listen_on(
        handle: Handle<std::net::TcpListener>,
        backlog: i32,
    ) -> io::Result<TcpListener> {
        handle.call(
            |fd| posix::listen(fd, backlog),
            |std| Ok(rustix::net::listen(std, backlog)?),
        )?;
        Ok(TcpListener(handle))
    }

    pub(super) fn handle(&self) -> &Handle<std::net::TcpListener> {
        &self.0
    }

    ttl_option!();

    /// Returns the address that the listener is bound to.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::local_address, |std| std.local_addr())
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// `WouldBlock`: no connection is pending on a non-blocking listener. `ConnectionAborted`: the peer has
    /// closed the connection again, or the server has stopped. The process has no free descriptor.
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accept_with(0)
    }

    /// As [`TcpListener::accept`]. `flags` may have `SOCK_NONBLOCK`.
    pub(super) fn accept_with(&self, flags: i32) -> io::Result<(TcpStream, SocketAddr)> {
        let accepted = |fd| posix::accept(fd, libc::SOCK_CLOEXEC | flags);
        match self.0.ours(accepted)? {
            Some((fd, peer)) => Ok((TcpStream::of(Handle::of_number(fd)?), peer)),
            None => {
                let (stream, peer) = self.0.std().accept()?;
                stream.set_nonblocking(flags & libc::SOCK_NONBLOCK != 0)?;
                let handle = Handle::of_kernel(OwnedFd::from(stream));
                Ok((TcpStream::of(handle), peer))
            }
        }
    }

    /// Returns an iterator over accepted connections, which never ends.
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming(self)
    }

    /// Returns another handle to the same listener.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn try_clone(&self) -> io::Result<TcpListener> {
        self.0.duplicate().map(TcpListener)
    }

    /// Sets whether `accept` fails with `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// None is expected.
    pub fn set_nonblocking(&self, is_on: bool) -> io::Result<()> {
        self.0.set_nonblocking(is_on)
    }

    /// Takes the pending error (`SO_ERROR`).
    ///
    /// # Errors
    /// None is expected.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.0.take_error()
    }
}

/// The iterator returned by [`TcpListener::incoming`].
#[derive(Debug)]
pub struct Incoming<'a>(&'a TcpListener);

impl Iterator for Incoming<'_> {
    type Item = io::Result<TcpStream>;

    fn next(&mut self) -> Option<io::Result<TcpStream>> {
        Some(self.0.accept().map(|(stream, _)| stream))
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for TcpListener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.number()
    }
}
