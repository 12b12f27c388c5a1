//! UDP sockets.

use std::io;
use std::net::SocketAddr;

use super::event_source;
use super::registration::{Direction, Registration};
use crate::net;

/// A non-blocking UDP socket, as [`mio::net::UdpSocket`](https://docs.rs/mio/latest/mio/net/struct.UdpSocket.html).
#[derive(Debug)]
pub struct UdpSocket {
    // Dropped before the socket is closed.
    registration: Registration,
    socket: net::UdpSocket,
}

impl UdpSocket {
    /// Binds, as [`net::UdpSocket::bind`].
    ///
    /// ```no_run
    /// let socket = portolan::net::mio::UdpSocket::bind("0.0.0.0:7".parse().unwrap())?;
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Errors
    /// As [`net::UdpSocket::bind`].
    pub fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
        UdpSocket::from_blocking(net::UdpSocket::bind(address)?)
    }

    /// Takes over a socket, and makes it non-blocking.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn from_blocking(socket: net::UdpSocket) -> io::Result<UdpSocket> {
        socket.set_nonblocking(true)?;
        let registration = Registration::of(&socket)?;
        Ok(UdpSocket {
            registration,
            socket,
        })
    }

    /// Sets the peer for sending and receiving.
    ///
    /// # Errors
    /// As [`net::UdpSocket::connect`].
    pub fn connect(&self, address: SocketAddr) -> io::Result<()> {
        self.socket.connect(address)
    }

    /// Sends a datagram to the connected peer, and returns its length in bytes.
    ///
    /// # Errors
    /// As [`net::UdpSocket::send`]; `WouldBlock`: the device's queue is full.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let send = || self.socket.send(bytes);
        self.registration.call(Direction::Write, send)
    }

    /// Sends a datagram to `address`, and returns its length in bytes.
    ///
    /// # Errors
    /// As [`UdpSocket::send`].
    pub fn send_to(&self, bytes: &[u8], address: SocketAddr) -> io::Result<usize> {
        let send = || self.socket.send_to(bytes, address);
        self.registration.call(Direction::Write, send)
    }

    /// Receives a datagram, and returns its length in bytes. Bytes that do not fit into the buffer are lost.
    ///
    /// # Errors
    /// As [`net::UdpSocket::recv`].
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let receive = || self.socket.recv(buffer);
        self.registration.call(Direction::Read, receive)
    }

    /// As [`UdpSocket::recv`], and returns the sender's address.
    ///
    /// # Errors
    /// As [`UdpSocket::recv`].
    pub fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let receive = || self.socket.recv_from(buffer);
        self.registration.call(Direction::Read, receive)
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the socket itself, for its options. It must stay non-blocking.
    pub fn get_ref(&self) -> &net::UdpSocket {
        &self.socket
    }
}

event_source!(UdpSocket);
