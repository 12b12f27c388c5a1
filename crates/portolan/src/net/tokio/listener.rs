//! Listening for TCP connections.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::{Context, Poll};

use super::TcpStream;
use super::readiness::{poll, run};
use crate::net;
use crate::net::reactor::{Direction, Source};

/// A TCP listener, as [`tokio::net::TcpListener`](https://docs.rs/tokio/latest/tokio/net/struct.TcpListener.html).
#[derive(Debug)]
pub struct TcpListener {
    // Dropped before the socket is closed.
    source: Source,
    socket: net::TcpListener,
}

impl TcpListener {
    /// Listens, as [`net::TcpListener::bind`]. Resolves names by blocking the thread: use addresses.
    ///
    /// ```no_run
    /// let listener = portolan::net::tokio::TcpListener::bind("[::]:0")?;
    /// println!("{}", listener.local_addr()?);
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Errors
    /// As [`net::TcpListener::bind`].
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<TcpListener> {
        TcpListener::from_blocking(net::TcpListener::bind(address)?)
    }

    /// Takes over a listener, and makes it non-blocking.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn from_blocking(socket: net::TcpListener) -> io::Result<TcpListener> {
        socket.set_nonblocking(true)?;
        let source = Source::new(socket.as_raw_fd())?;
        Ok(TcpListener { source, socket })
    }

    /// Waits for the next connection. No connection is lost if the call is cancelled.
    ///
    /// # Errors
    /// As [`net::TcpListener::accept`], but never `WouldBlock`.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, peer) = run(&self.source, Direction::Read, || self.try_accept()).await?;
        Ok((TcpStream::of_nonblocking(stream)?, peer))
    }

    /// As [`TcpListener::accept`]. Of several tasks that use it, the last one is woken.
    ///
    /// # Errors
    /// As [`TcpListener::accept`].
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        poll(&self.source, Direction::Read, context, || self.try_accept()).map(|accepted| {
            let (stream, peer) = accepted?;
            Ok((TcpStream::of_nonblocking(stream)?, peer))
        })
    }

    fn try_accept(&self) -> io::Result<(net::TcpStream, SocketAddr)> {
        self.socket.accept_with(libc::SOCK_NONBLOCK)
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

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for TcpListener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
