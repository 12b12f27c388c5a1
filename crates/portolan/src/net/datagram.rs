//! UDP sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use super::buf::Piece;
use super::handle::{Handle, with_first};
use super::options::{group_options, service_options, ttl_option};
use crate::posix::{self, CallError, Chunk};

/// A UDP socket, as [`std::net::UdpSocket`].
#[derive(Debug)]
pub struct UdpSocket(Handle<std::net::UdpSocket>);

impl UdpSocket {
    /// Binds to the first address of `address` that is available. Port 0 means any free port.
    ///
    /// # Errors
    /// As [`std::net::UdpSocket::bind`]: `AddrInUse`, `AddrNotAvailable`, `PermissionDenied`. `NetworkDown` where
    /// `PORTOLAN=require` and there is no server.
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        with_first(address.to_socket_addrs()?, |address| {
            let handle = Handle::open(address, libc::SOCK_DGRAM)?;
            handle.bind(address)?;
            Ok(UdpSocket(handle))
        })
    }

    pub(super) fn handle(&self) -> &Handle<std::net::UdpSocket> {
        &self.0
    }

    /// Sets the peer for sending and receiving to the first address of `address` that has a route.
    ///
    /// # Errors
    /// `NetworkUnreachable`: there is no route.
    pub fn connect(&self, address: impl ToSocketAddrs) -> io::Result<()> {
        with_first(address.to_socket_addrs()?, |address| {
            self.0.connect(address)
        })
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::local_address, |std| std.local_addr())
    }

    /// Returns the address of the peer.
    ///
    /// # Errors
    /// `NotConnected`: the socket is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::peer_address, |std| std.peer_addr())
    }

    /// Sends a datagram to the connected peer. The tap's write gathers the bytes from the program's memory, without a
    /// copy.
    ///
    /// # Errors
    /// `NotConnected`; `InvalidInput` or `EMSGSIZE`: the datagram is too long; an error that ICMP reported for an
    /// earlier datagram.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.call(
            |fd| posix::send(fd, &[IoSlice::new(bytes)], None, libc::MSG_NOSIGNAL),
            |std| std.send(bytes),
        )
    }

    /// Sends a datagram to the first address of `address`, as [`UdpSocket::send`].
    ///
    /// # Errors
    /// As [`UdpSocket::send`]; `NetworkUnreachable`: there is no route.
    pub fn send_to(&self, bytes: &[u8], address: impl ToSocketAddrs) -> io::Result<usize> {
        let first = address.to_socket_addrs()?.next();
        let to = first.ok_or(io::ErrorKind::InvalidInput)?;
        self.0.call(
            |fd| posix::send(fd, &[IoSlice::new(bytes)], Some(to), libc::MSG_NOSIGNAL),
            |std| std.send_to(bytes, to),
        )
    }

    /// Receives a datagram. Bytes that do not fit into the buffer are lost.
    ///
    /// # Errors
    /// `WouldBlock`: no datagram arrived within the read time-out, or none is pending on a non-blocking
    /// socket; an error that ICMP reported for an earlier datagram, such as `ConnectionRefused`.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive_into(buffer, 0).map(|(count, _)| count)
    }

    /// As [`UdpSocket::recv`], and returns the sender's address.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        with_sender(self.receive_into(buffer, 0)?)
    }

    /// As [`UdpSocket::recv`], without removing the datagram.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let peeked = self.receive_into(buffer, libc::MSG_PEEK);
        peeked.map(|(count, _)| count)
    }

    /// As [`UdpSocket::recv_from`], without removing the datagram.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        with_sender(self.receive_into(buffer, libc::MSG_PEEK)?)
    }

    fn receive_into(
        &self,
        buffer: &mut [u8],
        flags: i32,
    ) -> io::Result<(usize, Option<SocketAddr>)> {
        let mut buffers = [IoSliceMut::new(buffer)];
        if let Some(received) = self.0.ours(|fd| posix::receive(fd, &mut buffers, flags))? {
            return Ok((received.length, received.from));
        }
        let (count, from) = match flags {
            libc::MSG_PEEK => self.0.std().peek_from(buffer)?,
            _ => self.0.std().recv_from(buffer)?,
        };
        Ok((count, Some(from)))
    }

    /// Receives a datagram as a [piece](super::buf) of its size, and the sender's address. The
    /// payload is copied once, from the ring; [`UdpSocket::recv`] copies it twice.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn receive(&self) -> io::Result<(Piece, SocketAddr)> {
        let mut pieces = Vec::with_capacity(1);
        let taken = self
            .0
            .ours(|fd| match posix::receive_shared(fd, 1, &mut pieces) {
                // The socket was shut down during the wait.
                Ok(taken) if taken.from.is_none() => {
                    Err(CallError::Errno(rustix::io::Errno::SHUTDOWN))
                }
                other => other,
            })?;
        match (taken.and_then(|taken| taken.from), pieces.pop()) {
            (Some(from), Some(piece)) => Ok((piece, from)),
            _ => self.receive_from_kernel(),
        }
    }

    fn receive_from_kernel(&self) -> io::Result<(Piece, SocketAddr)> {
        let mut chunk = Chunk::new();
        chunk.resize_unspecified(Chunk::CAPACITY);
        let (length, from) = self.0.std().recv_from(chunk.bytes_mut())?;
        chunk.resize_unspecified(length);
        Ok((Piece::of_chunk(chunk), from))
    }

    /// Sets how long receiving waits; `None` means without limit.
    ///
    /// # Errors
    /// `InvalidInput`: a time-out of zero.
    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.0.set_time(libc::SO_RCVTIMEO, time)
    }

    /// Returns the time set by [`UdpSocket::set_read_timeout`], in whole microseconds.
    ///
    /// # Errors
    /// None is expected.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        self.0.time_option(libc::SO_RCVTIMEO)
    }

    ttl_option!();
    service_options!();
    group_options!();

    /// Joins an IPv4 group on the device that has the address `interface`; the unspecified address stands for the
    /// device of the route.
    ///
    /// # Errors
    /// `ENODEV`: there is no such device. `AddrInUse`: the socket is a member already.
    pub fn join_multicast_v4(&self, group: &Ipv4Addr, interface: &Ipv4Addr) -> io::Result<()> {
        let option = (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP);
        let (group, interface) = (group.octets(), interface.octets());
        self.0.set_membership(option, group, interface)
    }

    /// Leaves a group, by the arguments of [`UdpSocket::join_multicast_v4`].
    ///
    /// # Errors
    /// `AddrNotAvailable`: the socket is not a member.
    pub fn leave_multicast_v4(&self, group: &Ipv4Addr, interface: &Ipv4Addr) -> io::Result<()> {
        let option = (libc::IPPROTO_IP, libc::IP_DROP_MEMBERSHIP);
        let (group, interface) = (group.octets(), interface.octets());
        self.0.set_membership(option, group, interface)
    }

    /// Joins an IPv6 group on the device with the index `interface`; 0 stands for the device of the route.
    ///
    /// # Errors
    /// As [`UdpSocket::join_multicast_v4`].
    pub fn join_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        let option = (libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP);
        let (group, interface) = (group.octets(), interface.to_ne_bytes());
        self.0.set_membership(option, group, interface)
    }

    /// Leaves a group, by the arguments of [`UdpSocket::join_multicast_v6`].
    ///
    /// # Errors
    /// `AddrNotAvailable`: the socket is not a member.
    pub fn leave_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        let option = (libc::IPPROTO_IPV6, libc::IPV6_DROP_MEMBERSHIP);
        let (group, interface) = (group.octets(), interface.to_ne_bytes());
        self.0.set_membership(option, group, interface)
    }

    /// Sets whether calls fail with `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// None is expected.
    pub fn set_nonblocking(&self, is_on: bool) -> io::Result<()> {
        self.0.set_nonblocking(is_on)
    }

    /// Returns another handle to the same socket.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn try_clone(&self) -> io::Result<UdpSocket> {
        self.0.duplicate().map(UdpSocket)
    }

    /// Takes the pending error (`SO_ERROR`).
    ///
    /// # Errors
    /// None is expected.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.0.take_error()
    }
}

/// A datagram without a sender is none: the socket was shut down.
fn with_sender(received: (usize, Option<SocketAddr>)) -> io::Result<(usize, SocketAddr)> {
    let (count, from) = received;
    Ok((count, from.ok_or(io::ErrorKind::NotConnected)?))
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for UdpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.number()
    }
}
