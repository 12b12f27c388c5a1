//! TCP connections.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use super::buf::{Piece, Reserved, SendError};
use super::handle::{Handle, with_first};
use super::options::connection_options;
use crate::posix::{self, Chunk, Outcome};

/// Reads and writes a stream as its reference does.
macro_rules! io_by_reference {
    ($stream:ty) => {
        impl Read for $stream {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                (&*self).read(buffer)
            }

            fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                (&*self).read_vectored(buffers)
            }
        }

        impl Write for $stream {
            fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
                (&*self).write(buffer)
            }

            fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
                (&*self).write_vectored(buffers)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
    };
}

#[cfg(feature = "mio")]
pub(super) use io_by_reference;

/// A TCP connection, as [`std::net::TcpStream`]. Dropping it closes the connection.
#[derive(Debug)]
pub struct TcpStream(Handle<std::net::TcpStream>);

impl TcpStream {
    /// Connects to the first address of `address` that answers. Waits as long as the stack tries.
    ///
    /// # Errors
    /// As [`std::net::TcpStream::connect`], for the last address. `NetworkDown` where
    /// `PORTOLAN=require` and there is no server.
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
        with_first(address.to_socket_addrs()?, |address| {
            let handle = Handle::open(address, libc::SOCK_STREAM)?;
            handle.connect(address)?;
            Ok(TcpStream(handle))
        })
    }

    /// Starts to connect a non-blocking socket. Once it is writable, [`TcpStream::take_error`] has the outcome.
    #[cfg(any(feature = "mio", feature = "tokio"))]
    pub(super) fn begin_to_connect(address: SocketAddr) -> io::Result<TcpStream> {
        let handle = Handle::open(address, libc::SOCK_STREAM | libc::SOCK_NONBLOCK)?;
        TcpStream::begin_to_connect_by(handle, address)
    }

    /// As [`TcpStream::begin_to_connect`], with a non-blocking socket that exists.
    #[cfg(any(feature = "mio", feature = "tokio"))]
    pub(super) fn begin_to_connect_by(
        handle: Handle<std::net::TcpStream>,
        address: SocketAddr,
    ) -> io::Result<TcpStream> {
        match handle.connect(address) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(TcpStream(handle)),
        }
    }

    pub(super) fn of(handle: Handle<std::net::TcpStream>) -> TcpStream {
        TcpStream(handle)
    }

    pub(super) fn handle(&self) -> &Handle<std::net::TcpStream> {
        &self.0
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::peer_address, |std| std.peer_addr())
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::local_address, |std| std.local_addr())
    }

    /// Shuts down sending, receiving or both.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let number = match how {
            Shutdown::Read => libc::SHUT_RD,
            Shutdown::Write => libc::SHUT_WR,
            Shutdown::Both => libc::SHUT_RDWR,
        };
        self.0
            .call(|fd| posix::shutdown(fd, number), |std| std.shutdown(how))
    }

    /// Returns another handle to the same connection, which is closed with the last one.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn try_clone(&self) -> io::Result<TcpStream> {
        self.0.duplicate().map(TcpStream)
    }

    /// Reads bytes without removing them from the receive buffer.
    ///
    /// # Errors
    /// As for reading.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut buffers = [IoSliceMut::new(buffer)];
        match self
            .0
            .ours(|fd| received(fd, &mut buffers, libc::MSG_PEEK))?
        {
            Some(count) => Ok(count),
            None => self.0.std().peek(buffer),
        }
    }

    /// Sets how long reading waits; `None` means without limit.
    ///
    /// # Errors
    /// `InvalidInput`: a time-out of zero.
    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.0.set_time(libc::SO_RCVTIMEO, time)
    }

    /// Returns the time set by [`TcpStream::set_read_timeout`], in whole microseconds.
    ///
    /// # Errors
    /// None is expected.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        self.0.time_option(libc::SO_RCVTIMEO)
    }

    /// Sets how long writing waits for room in the send buffer; `None` means without limit.
    ///
    /// # Errors
    /// `InvalidInput`: a time-out of zero.
    pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.0.set_time(libc::SO_SNDTIMEO, time)
    }

    /// Returns the time set by [`TcpStream::set_write_timeout`], in whole microseconds.
    ///
    /// # Errors
    /// None is expected.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        self.0.time_option(libc::SO_SNDTIMEO)
    }

    connection_options!();

    /// Sets whether calls fail with `WouldBlock` instead of waiting.
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

    /// Sets the size of the receive buffer in bytes (`SO_RCVBUF`). Portolan doubles the value, as
    /// Linux does, and no longer adapts the size to the connection.
    ///
    /// # Errors
    /// None is expected: a value above the limit is reduced to it.
    pub fn set_receive_buffer(&self, bytes: u32) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        self.0.set_number(libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)
    }

    /// Sets the size of the send buffer in bytes (`SO_SNDBUF`); as [`TcpStream::set_receive_buffer`].
    ///
    /// # Errors
    /// None is expected: a value above the limit is reduced to it.
    pub fn set_send_buffer(&self, bytes: u32) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        self.0.set_number(libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)
    }

    /// Receives the pending data, or waits for the next, by [shared buffers](super::buf). Appends
    /// pieces to `pieces`, in the stream's order, and returns their length in bytes. It is 0, and
    /// no piece is added, if the peer has ended the stream.
    ///
    /// Pieces are returned by dropping them, in any order. Until then bytes that were not copied count against the
    /// receive window, so that the peer of a program that keeps them stops sending.
    /// # Errors
    /// As for reading: `WouldBlock` after the read time-out or on a non-blocking socket, `ConnectionReset`, `TimedOut`.
    pub fn receive(&self, pieces: &mut Vec<Piece>) -> io::Result<usize> {
        match self
            .0
            .ours(|fd| posix::receive_shared(fd, usize::MAX, pieces))?
        {
            Some(taken) => Ok(taken.length),
            None => self.receive_from_kernel(pieces),
        }
    }

    fn receive_from_kernel(&self, pieces: &mut Vec<Piece>) -> io::Result<usize> {
        let mut chunk = Chunk::new();
        chunk.resize_unspecified(Chunk::CAPACITY);
        let length = self.0.std().read(chunk.bytes_mut())?;
        chunk.resize_unspecified(length);
        if length > 0 {
            pieces.push(Piece::of_chunk(chunk));
        }
        Ok(length)
    }

    /// Returns an empty piece of a send buffer, to be filled and [sent](TcpStream::send).
    pub fn reserve(&self) -> Reserved {
        Reserved::new()
    }

    /// Sends the contents of `reserved`: without a copy if they are at least 64 KiB, else copied. Waits until
    /// they are in the send buffer, which they may exceed. Any stream may send the piece.
    ///
    /// # Errors
    /// As for writing: `WouldBlock` after the write time-out or on a non-blocking socket,
    /// `BrokenPipe`, `ConnectionReset`. The error contains the unsent rest.
    pub fn send(&self, reserved: Reserved) -> Result<(), SendError> {
        let mut chunk = Some(reserved.into_chunk());
        let sent = match self.0.ours(|fd| posix::send_shared(fd, &mut chunk)) {
            Ok(Some(())) => Ok(()),
            Ok(None) => self.send_by_kernel(&mut chunk),
            Err(error) => Err(error),
        };
        sent.map_err(|error| SendError {
            error,
            unsent: chunk.map(Reserved::of_chunk),
        })
    }

    fn send_by_kernel(&self, chunk: &mut Option<Chunk>) -> io::Result<()> {
        while let Some(rest) = chunk {
            let sent = self.0.std().write(rest.bytes())?;
            rest.drop_front(sent);
            if rest.bytes().is_empty() {
                *chunk = None;
            }
        }
        Ok(())
    }
}

/// Receives, and returns only the number of bytes.
pub(super) fn received(fd: RawFd, buffers: &mut [IoSliceMut<'_>], flags: i32) -> Outcome<usize> {
    posix::receive(fd, buffers, flags).map(|received| received.length)
}

impl Read for &TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buffer)])
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self.0.ours(|fd| received(fd, buffers, 0))? {
            Some(count) => Ok(count),
            None => self.0.std().read_vectored(buffers),
        }
    }
}

impl Write for &TcpStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.call(
            |fd| posix::send(fd, buffers, None, libc::MSG_NOSIGNAL),
            |mut std| std.write_vectored(buffers),
        )
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

io_by_reference!(TcpStream);

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for TcpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.0.number()
    }
}
