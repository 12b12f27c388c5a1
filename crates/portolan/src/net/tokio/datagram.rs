//! UDP sockets.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::{Context, Poll};

use ::tokio::io::ReadBuf;

use super::readiness::{poll, run};
use crate::net;
use crate::net::buf::Piece;
use crate::net::reactor::{Direction, Source};

/// A UDP socket, as [`tokio::net::UdpSocket`](https://docs.rs/tokio/latest/tokio/net/struct.UdpSocket.html). Any number
/// of tasks can use it at once. Calls that are cancelled have neither sent nor lost a datagram.
#[derive(Debug)]
pub struct UdpSocket {
    // Dropped before the socket is closed.
    source: Source,
    socket: net::UdpSocket,
}

impl UdpSocket {
    /// Binds, as [`net::UdpSocket::bind`]. Resolves names by blocking the thread: use addresses.
    ///
    /// ```no_run
    /// # async fn serve() -> std::io::Result<()> {
    /// let socket = portolan::net::tokio::UdpSocket::bind("0.0.0.0:7")?;
    /// let mut buffer = [0; 2048];
    /// loop {
    ///     let (length, from) = socket.recv_from(&mut buffer).await?;
    ///     socket.send_to(&buffer[..length], from).await?;
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`net::UdpSocket::bind`].
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        UdpSocket::from_blocking(net::UdpSocket::bind(address)?)
    }

    /// Takes over a socket, and makes it non-blocking.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn from_blocking(socket: net::UdpSocket) -> io::Result<UdpSocket> {
        socket.set_nonblocking(true)?;
        let source = Source::new(socket.as_raw_fd())?;
        Ok(UdpSocket { source, socket })
    }

    /// Sets the peer for sending and receiving. Does not wait.
    ///
    /// # Errors
    /// As [`net::UdpSocket::connect`].
    pub fn connect(&self, address: SocketAddr) -> io::Result<()> {
        self.socket.connect(address)
    }

    /// Sends a datagram to the connected peer, and returns its length in bytes.
    ///
    /// # Errors
    /// As [`net::UdpSocket::send`].
    pub async fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let send = || self.socket.send(bytes);
        run(&self.source, Direction::Write, send).await
    }

    /// Sends a datagram to `address`, and returns its length in bytes.
    ///
    /// # Errors
    /// As [`net::UdpSocket::send_to`].
    pub async fn send_to(&self, bytes: &[u8], address: SocketAddr) -> io::Result<usize> {
        let send = || self.socket.send_to(bytes, address);
        run(&self.source, Direction::Write, send).await
    }

    /// Receives a datagram, and returns its length in bytes. Bytes that do not fit into the buffer are lost.
    ///
    /// # Errors
    /// As [`net::UdpSocket::recv`], but never `WouldBlock`.
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let receive = || self.socket.recv(buffer);
        run(&self.source, Direction::Read, receive).await
    }

    /// As [`UdpSocket::recv`], and returns the sender's address.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let receive = || self.socket.recv_from(buffer);
        run(&self.source, Direction::Read, receive).await
    }

    /// As [`UdpSocket::recv_from`]. Of several tasks that use it, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn poll_recv_from(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<SocketAddr>> {
        let unfilled = buffer.initialize_unfilled();
        let received = poll(&self.source, Direction::Read, context, || {
            self.socket.recv_from(unfilled)
        });
        received.map_ok(|(length, from)| {
            buffer.advance(length);
            from
        })
    }

    /// As [`UdpSocket::send_to`]. Of several tasks that use it, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub fn poll_send_to(
        &self,
        context: &mut Context<'_>,
        bytes: &[u8],
        address: SocketAddr,
    ) -> Poll<io::Result<usize>> {
        poll(&self.source, Direction::Write, context, || {
            self.socket.send_to(bytes, address)
        })
    }

    /// Receives a datagram as a [piece](net::buf), as [`net::UdpSocket::receive`].
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn receive(&self) -> io::Result<(Piece, SocketAddr)> {
        let receive = || self.socket.receive();
        run(&self.source, Direction::Read, receive).await
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the address of the peer.
    ///
    /// # Errors
    /// `NotConnected`: the socket is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// Returns the socket itself, for its options. It must stay non-blocking.
    pub fn get_ref(&self) -> &net::UdpSocket {
        &self.socket
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for UdpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
