//! TCP connections.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};

use super::event_source;
use super::registration::{Direction, Registration};
use crate::net;
use crate::net::stream::io_by_reference;

/// A non-blocking TCP connection, as [`mio::net::TcpStream`](https://docs.rs/mio/latest/mio/net/struct.TcpStream.html).
#[derive(Debug)]
pub struct TcpStream {
    // Dropped before the socket is closed.
    registration: Registration,
    socket: net::TcpStream,
}

impl TcpStream {
    /// Starts to connect to `address`. Once the socket is writable, [`TcpStream::take_error`] returns the error of an open that
    /// has failed, and [`TcpStream::peer_addr`] succeeds after one that has not.
    ///
    /// ```no_run
    /// let stream = portolan::net::mio::TcpStream::connect("192.0.2.7:7".parse().unwrap())?;
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Errors
    /// `NetworkUnreachable`: there is no route. `NetworkDown` where `PORTOLAN=require` and there is no server.
    pub fn connect(address: SocketAddr) -> io::Result<TcpStream> {
        TcpStream::of_nonblocking(net::TcpStream::begin_to_connect(address)?)
    }

    /// Takes over a connection, and makes it non-blocking.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn from_blocking(socket: net::TcpStream) -> io::Result<TcpStream> {
        socket.set_nonblocking(true)?;
        TcpStream::of_nonblocking(socket)
    }

    pub(super) fn of_nonblocking(socket: net::TcpStream) -> io::Result<TcpStream> {
        let registration = Registration::of(&socket)?;
        Ok(TcpStream {
            registration,
            socket,
        })
    }

    /// Returns the connection itself, for its options. It must stay non-blocking.
    pub fn get_ref(&self) -> &net::TcpStream {
        &self.socket
    }

    /// Takes the pending error (`SO_ERROR`).
    ///
    /// # Errors
    /// None is expected.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket.take_error()
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended, or is not open yet.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Sets whether small segments are sent without waiting for acknowledgements (`TCP_NODELAY`).
    ///
    /// # Errors
    /// None is expected.
    pub fn set_nodelay(&self, is_on: bool) -> io::Result<()> {
        self.socket.set_nodelay(is_on)
    }

    /// Shuts down sending, receiving or both.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Reads bytes without removing them from the receive buffer.
    ///
    /// # Errors
    /// As for reading.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let peek = || self.socket.peek(buffer);
        self.registration.call(Direction::Read, peek)
    }
}

impl Read for &TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buffer)])
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let read = || (&self.socket).read_vectored(buffers);
        self.registration.call(Direction::Read, read)
    }
}

impl Write for &TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let write = || (&self.socket).write_vectored(buffers);
        self.registration.call(Direction::Write, write)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

io_by_reference!(TcpStream);

event_source!(TcpStream);
