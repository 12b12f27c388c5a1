//! Listening for TCP connections.

use std::io;
use std::net::SocketAddr;

use super::registration::{Direction, Registration};
use super::{TcpStream, event_source};
use crate::net;

/// A non-blocking TCP listener, as
/// [`mio::net::TcpListener`](https://docs.rs/mio/latest/mio/net/struct.TcpListener.html).
#[derive(Debug)]
pub struct TcpListener {
    // Dropped before the socket is closed.
    registration: Registration,
    socket: net::TcpListener,
}

impl TcpListener {
    /// Listens, as [`net::TcpListener::bind`].
    ///
    /// ```no_run
    /// let listener = portolan::net::mio::TcpListener::bind("0.0.0.0:7".parse().unwrap())?;
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Errors
    /// As [`net::TcpListener::bind`].
    pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
        TcpListener::from_blocking(net::TcpListener::bind(address)?)
    }

    /// Takes over a listener, and makes it non-blocking.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn from_blocking(socket: net::TcpListener) -> io::Result<TcpListener> {
        socket.set_nonblocking(true)?;
        let registration = Registration::of(&socket)?;
        Ok(TcpListener {
            registration,
            socket,
        })
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// As [`net::TcpListener::accept`]: `WouldBlock` if none is pending.
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let accept = || self.socket.accept_with(libc::SOCK_NONBLOCK);
        let (stream, peer) = self.registration.call(Direction::Read, accept)?;
        Ok((TcpStream::of_nonblocking(stream)?, peer))
    }

    /// Returns the address that the listener is bound to.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the listener itself, for its options. It must stay non-blocking.
    pub fn get_ref(&self) -> &net::TcpListener {
        &self.socket
    }
}

event_source!(TcpListener);
