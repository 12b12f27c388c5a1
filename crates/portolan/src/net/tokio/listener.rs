//! Listening for TCP connections.

use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use ::tokio::io::Interest;
use ::tokio::net::ToSocketAddrs;

use super::TcpStream;
use super::addresses::with_first_of;
use super::readiness::Readiness;
use super::wrapped::wraps;
use crate::net;
use crate::net::options::ttl_option;

/// A TCP listener, as [`tokio::net::TcpListener`](https://docs.rs/tokio/latest/tokio/net/struct.TcpListener.html).
#[derive(Debug)]
pub struct TcpListener {
    // Dropped before the socket is closed.
    readiness: Readiness,
    socket: net::TcpListener,
}

wraps!(TcpListener, "a listener");

impl TcpListener {
    /// Listens on the first address of `address` that is available, with `SO_REUSEADDR`. Port 0 means any free port.
    /// Waits only while a name is resolved.
    ///
    /// ```no_run
    /// # async fn serve() -> std::io::Result<()> {
    /// let listener = portolan::net::tokio::TcpListener::bind("[::]:0").await?;
    /// println!("{}", listener.local_addr()?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`net::TcpListener::bind`].
    pub async fn bind(address: impl ToSocketAddrs) -> io::Result<TcpListener> {
        let bound = with_first_of(address, net::TcpListener::bind);
        TcpListener::from_blocking(bound.await?)
    }

    /// Waits for the next connection. No connection is lost if the call is cancelled.
    ///
    /// # Errors
    /// As [`net::TcpListener::accept`], but never `WouldBlock`.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let accept = || self.try_accept();
        TcpStream::accepted(self.readiness.run(Interest::READABLE, accept).await?)
    }

    /// As [`TcpListener::accept`]. Of several tasks that use it, the last one is woken.
    ///
    /// # Errors
    /// As [`TcpListener::accept`].
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let accept = || self.try_accept();
        let accepted = self.readiness.poll(Interest::READABLE, context, accept);
        accepted.map(|accepted| TcpStream::accepted(accepted?))
    }

    fn try_accept(&self) -> io::Result<(net::TcpStream, SocketAddr)> {
        self.socket.accept_with(libc::SOCK_NONBLOCK)
    }

    ttl_option!();
}
