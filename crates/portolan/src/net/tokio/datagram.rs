//! UDP sockets.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::task::{Context, Poll};

use ::bytes::BufMut;
use ::tokio::io::{Interest, ReadBuf};
use ::tokio::net::ToSocketAddrs;

use super::addresses::{first_of, with_first_of};
use super::buffers::{appended, poll_fill};
use super::readiness::{Readiness, readiness_methods};
use super::wrapped::wraps;
use crate::net;
use crate::net::buf::Piece;
use crate::net::options::{group_options, service_options, ttl_option};

/// No datagram is longer.
const DATAGRAM_MAX: usize = 64 * 1024;

/// A UDP socket, as [`tokio::net::UdpSocket`](https://docs.rs/tokio/latest/tokio/net/struct.UdpSocket.html). Any number
/// of tasks can use it at once. Calls that are cancelled have neither sent nor lost a datagram.
#[derive(Debug)]
pub struct UdpSocket {
    // Dropped before the socket is closed.
    readiness: Readiness,
    socket: net::UdpSocket,
}

wraps!(UdpSocket, "a socket");

impl UdpSocket {
    /// Binds to the first address of `address` that is available. Port 0 means any free port. Waits only while a name
    /// is resolved.
    ///
    /// ```no_run
    /// # async fn serve() -> std::io::Result<()> {
    /// let socket = portolan::net::tokio::UdpSocket::bind("0.0.0.0:7").await?;
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
    pub async fn bind(address: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        let bound = with_first_of(address, net::UdpSocket::bind);
        UdpSocket::from_blocking(bound.await?)
    }

    /// Sets the peer for sending and receiving to the first address of `address` that has a route. Waits only while a
    /// name is resolved.
    ///
    /// # Errors
    /// As [`net::UdpSocket::connect`].
    pub async fn connect(&self, address: impl ToSocketAddrs) -> io::Result<()> {
        with_first_of(address, |address| self.socket.connect(address)).await
    }

    /// Returns the address of the peer.
    ///
    /// # Errors
    /// `NotConnected`: the socket is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    readiness_methods!();

    /// As [`UdpSocket::readable`]. Of several tasks that use functions of this kind to receive, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::readable`].
    pub fn poll_recv_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.readiness.poll_wait(Interest::READABLE, context)
    }

    /// As [`UdpSocket::writable`]. Of several tasks that use functions of this kind to send, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::writable`].
    pub fn poll_send_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.readiness.poll_wait(Interest::WRITABLE, context)
    }

    /// Sends a datagram to the connected peer, and returns its length in bytes.
    ///
    /// # Errors
    /// As [`net::UdpSocket::send`].
    pub async fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let send = || self.socket.send(bytes);
        self.readiness.run(Interest::WRITABLE, send).await
    }

    /// As [`UdpSocket::send`]. Of several tasks that use functions of this kind to send, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::send`].
    pub fn poll_send(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let send = || self.socket.send(bytes);
        self.readiness.poll(Interest::WRITABLE, context, send)
    }

    /// As [`UdpSocket::send`], without waiting.
    ///
    /// # Errors
    /// `WouldBlock`: the device's queue is full. Else as [`UdpSocket::send`].
    pub fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        let send = || self.socket.send(bytes);
        self.readiness.attempt(Interest::WRITABLE, send)
    }

    /// Sends a datagram to the first address of `address`, and returns its length in bytes.
    ///
    /// # Errors
    /// As [`net::UdpSocket::send_to`].
    pub async fn send_to(&self, bytes: &[u8], address: impl ToSocketAddrs) -> io::Result<usize> {
        let address = first_of(address).await?;
        let send = || self.socket.send_to(bytes, address);
        self.readiness.run(Interest::WRITABLE, send).await
    }

    /// As [`UdpSocket::send_to`]. Of several tasks that use functions of this kind to send, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub fn poll_send_to(
        &self,
        context: &mut Context<'_>,
        bytes: &[u8],
        address: SocketAddr,
    ) -> Poll<io::Result<usize>> {
        let send = || self.socket.send_to(bytes, address);
        self.readiness.poll(Interest::WRITABLE, context, send)
    }

    /// As [`UdpSocket::send_to`], without waiting.
    ///
    /// # Errors
    /// As [`UdpSocket::try_send`].
    pub fn try_send_to(&self, bytes: &[u8], address: SocketAddr) -> io::Result<usize> {
        let send = || self.socket.send_to(bytes, address);
        self.readiness.attempt(Interest::WRITABLE, send)
    }

    /// Receives a datagram, and returns its length in bytes. Bytes that do not fit into the buffer are lost.
    ///
    /// # Errors
    /// As [`net::UdpSocket::recv`], but never `WouldBlock`.
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let receive = || self.socket.recv(buffer);
        self.readiness.run(Interest::READABLE, receive).await
    }

    /// As [`UdpSocket::recv`]. Of several tasks that use functions of this kind to receive, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let receive = |bytes: &mut [u8]| Ok((self.socket.recv(bytes)?, ()));
        self.poll_fill(context, buffer, receive)
    }

    /// As [`UdpSocket::recv`], without waiting.
    ///
    /// # Errors
    /// `WouldBlock`: there is no datagram. Else as [`UdpSocket::recv`].
    pub fn try_recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let receive = || self.socket.recv(buffer);
        self.readiness.attempt(Interest::READABLE, receive)
    }

    /// As [`UdpSocket::recv`], and appends to `buffer`.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn recv_buf(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        self.recv_buf_from(buffer).await.map(|(length, _)| length)
    }

    /// As [`UdpSocket::try_recv`], and appends to `buffer`.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_recv_buf(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        self.try_recv_buf_from(buffer).map(|(length, _)| length)
    }

    /// As [`UdpSocket::recv`], and returns the sender's address.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let receive = || self.socket.recv_from(buffer);
        self.readiness.run(Interest::READABLE, receive).await
    }

    /// As [`UdpSocket::recv_from`]. Of several tasks that use functions of this kind to receive, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn poll_recv_from(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<SocketAddr>> {
        let receive = |bytes: &mut [u8]| self.socket.recv_from(bytes);
        self.poll_fill(context, buffer, receive)
    }

    /// As [`UdpSocket::recv_from`], without waiting.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let receive = || self.socket.recv_from(buffer);
        self.readiness.attempt(Interest::READABLE, receive)
    }

    /// As [`UdpSocket::recv_from`], and appends to `buffer`.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn recv_buf_from(&self, buffer: &mut impl BufMut) -> io::Result<(usize, SocketAddr)> {
        let mut receive = |bytes: &mut [u8]| self.socket.recv_from(bytes);
        let receive = || appended(buffer, &mut receive);
        self.readiness.run(Interest::READABLE, receive).await
    }

    /// As [`UdpSocket::try_recv_from`], and appends to `buffer`.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_recv_buf_from(&self, buffer: &mut impl BufMut) -> io::Result<(usize, SocketAddr)> {
        let mut receive = |bytes: &mut [u8]| self.try_recv_from(bytes);
        appended(buffer, &mut receive)
    }

    /// As [`UdpSocket::recv`], without removing the datagram.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let peek = || self.socket.peek(buffer);
        self.readiness.run(Interest::READABLE, peek).await
    }

    /// As [`UdpSocket::peek`]. Of several tasks that use functions of this kind to receive, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn poll_peek(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let peek = |bytes: &mut [u8]| Ok((self.socket.peek(bytes)?, ()));
        self.poll_fill(context, buffer, peek)
    }

    /// As [`UdpSocket::peek`], without waiting.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let peek = || self.socket.peek(buffer);
        self.readiness.attempt(Interest::READABLE, peek)
    }

    /// As [`UdpSocket::peek`], and returns the sender's address.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let peek = || self.socket.peek_from(buffer);
        self.readiness.run(Interest::READABLE, peek).await
    }

    /// As [`UdpSocket::peek_from`]. Of several tasks that use functions of this kind to receive, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn poll_peek_from(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<SocketAddr>> {
        let peek = |bytes: &mut [u8]| self.socket.peek_from(bytes);
        self.poll_fill(context, buffer, peek)
    }

    /// As [`UdpSocket::peek_from`], without waiting.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let peek = || self.socket.peek_from(buffer);
        self.readiness.attempt(Interest::READABLE, peek)
    }

    /// Waits for a datagram, and returns its sender's address, without removing it.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn peek_sender(&self) -> io::Result<SocketAddr> {
        self.peek_from(&mut []).await.map(|(_, from)| from)
    }

    /// As [`UdpSocket::peek_sender`]. Of several tasks that use functions of this kind to receive, the last one is woken.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn poll_peek_sender(&self, context: &mut Context<'_>) -> Poll<io::Result<SocketAddr>> {
        self.poll_peek_from(context, &mut ReadBuf::new(&mut []))
    }

    /// As [`UdpSocket::peek_sender`], without waiting.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_peek_sender(&self) -> io::Result<SocketAddr> {
        self.try_peek_from(&mut []).map(|(_, from)| from)
    }

    fn poll_fill<T>(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
        call: impl FnMut(&mut [u8]) -> io::Result<(usize, T)>,
    ) -> Poll<io::Result<T>> {
        let filled = poll_fill(&self.readiness, context, buffer, DATAGRAM_MAX, call);
        filled.map_ok(|(_, more)| more)
    }

    /// Receives a datagram as a [piece](net::buf), as [`net::UdpSocket::receive`].
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub async fn receive(&self) -> io::Result<(Piece, SocketAddr)> {
        let receive = || self.socket.receive();
        self.readiness.run(Interest::READABLE, receive).await
    }

    ttl_option!();
    service_options!();
    group_options!();

    /// Joins an IPv4 group, as [`net::UdpSocket::join_multicast_v4`].
    ///
    /// # Errors
    /// As [`net::UdpSocket::join_multicast_v4`].
    pub fn join_multicast_v4(&self, group: Ipv4Addr, interface: Ipv4Addr) -> io::Result<()> {
        self.socket.join_multicast_v4(&group, &interface)
    }

    /// Leaves an IPv4 group, as [`net::UdpSocket::leave_multicast_v4`].
    ///
    /// # Errors
    /// As [`net::UdpSocket::leave_multicast_v4`].
    pub fn leave_multicast_v4(&self, group: Ipv4Addr, interface: Ipv4Addr) -> io::Result<()> {
        self.socket.leave_multicast_v4(&group, &interface)
    }

    /// Joins an IPv6 group, as [`net::UdpSocket::join_multicast_v6`].
    ///
    /// # Errors
    /// As [`net::UdpSocket::join_multicast_v6`].
    pub fn join_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        self.socket.join_multicast_v6(group, interface)
    }

    /// Leaves an IPv6 group, as [`net::UdpSocket::leave_multicast_v6`].
    ///
    /// # Errors
    /// As [`net::UdpSocket::leave_multicast_v6`].
    pub fn leave_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        self.socket.leave_multicast_v6(group, interface)
    }
}
