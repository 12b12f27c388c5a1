//! TCP connections.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use super::buf::{Piece, Reserved, SendError};
use super::handle::Handle;
use crate::posix::{self, Chunk, Outcome};

/// A TCP connection, as [`std::net::TcpStream`]. It is closed when this is dropped.
#[derive(Debug)]
pub struct TcpStream(Handle<std::net::TcpStream>);

impl TcpStream {
    /// Connects to the first address of `address` that answers. Waits as long as the stack tries.
    ///
    /// # Errors
    /// As [`std::net::TcpStream::connect`]: of the last address. `NetworkDown` where `PORTOLAN=require` and there is no
    /// server.
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
        let mut last = None;
        for address in address.to_socket_addrs()? {
            let opened = Handle::open(address, libc::SOCK_STREAM);
            match opened.and_then(|handle| handle.connect(address).map(|()| handle)) {
                Ok(handle) => return Ok(TcpStream(handle)),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::InvalidInput.into()))
    }

    pub(super) fn of(handle: Handle<std::net::TcpStream>) -> TcpStream {
        TcpStream(handle)
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::peer_address, |std| std.peer_addr())
    }

    /// The address of this end.
    ///
    /// # Errors
    /// None that is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.call(posix::local_address, |std| std.local_addr())
    }

    /// Ends sending, receiving or both.
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

    /// Another handle of the same connection, which ends with the last of them.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn try_clone(&self) -> io::Result<TcpStream> {
        self.0.duplicate().map(TcpStream)
    }

    /// Reads, and leaves the bytes to be read again.
    ///
    /// # Errors
    /// As reading.
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

    /// How long reading waits; none: forever.
    ///
    /// # Errors
    /// `InvalidInput`: a time-out of zero.
    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.0.set_time(libc::SO_RCVTIMEO, time)
    }

    /// As [`TcpStream::set_read_timeout`] has set it, to the microsecond.
    ///
    /// # Errors
    /// None that is expected.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        self.0.time_option(libc::SO_RCVTIMEO)
    }

    /// How long writing waits for room in the send buffer; none: forever.
    ///
    /// # Errors
    /// `InvalidInput`: a time-out of zero.
    pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.0.set_time(libc::SO_SNDTIMEO, time)
    }

    /// As [`TcpStream::set_write_timeout`] has set it, to the microsecond.
    ///
    /// # Errors
    /// None that is expected.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        self.0.time_option(libc::SO_SNDTIMEO)
    }

    /// Small segments do not wait for acknowledgements (`TCP_NODELAY`).
    ///
    /// # Errors
    /// None that is expected.
    pub fn set_nodelay(&self, is_on: bool) -> io::Result<()> {
        self.0
            .set_number(libc::IPPROTO_TCP, libc::TCP_NODELAY, i32::from(is_on))
    }

    /// Is `TCP_NODELAY` set?
    ///
    /// # Errors
    /// None that is expected.
    pub fn nodelay(&self) -> io::Result<bool> {
        let value = self.0.number_option(libc::IPPROTO_TCP, libc::TCP_NODELAY)?;
        Ok(value != 0)
    }

    /// Calls that would wait fail with `WouldBlock` instead.
    ///
    /// # Errors
    /// None that is expected.
    pub fn set_nonblocking(&self, is_on: bool) -> io::Result<()> {
        self.0.set_nonblocking(is_on)
    }

    /// Takes the pending error (`SO_ERROR`).
    ///
    /// # Errors
    /// None that is expected.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.0.take_error()
    }

    /// Bytes that the receive buffer may have (`SO_RCVBUF`). Linux doubles what is asked for, and so does Portolan. Its size
    /// no longer follows the connection then.
    ///
    /// # Errors
    /// None that is expected: what is too large is cut.
    pub fn set_receive_buffer(&self, bytes: u32) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        self.0.set_number(libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)
    }

    /// Bytes that the send buffer may have (`SO_SNDBUF`); as [`TcpStream::set_receive_buffer`].
    ///
    /// # Errors
    /// None that is expected: what is too large is cut.
    pub fn set_send_buffer(&self, bytes: u32) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        self.0.set_number(libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)
    }

    /// Receives what has come, or the next that comes, by [shared buffers](super::buf): adds pieces to `pieces`, in the
    /// stream's order, and returns how many bytes they have. 0 bytes, and no piece: the peer has ended the stream.
    ///
    /// Pieces are given back by being dropped, in any order. Until then their bytes count against the receive window, so
    /// that who keeps them is sent no more.
    ///
    /// # Errors
    /// As reading: `WouldBlock` after the read time-out or where nothing may be waited for, `ConnectionReset`, `TimedOut`.
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

    /// An empty piece of a send buffer, to be filled and [sent](TcpStream::send).
    pub fn reserve(&self) -> Reserved {
        Reserved::new()
    }

    /// Sends what `reserved` was filled with, from where it lies, if that is at least 64 KiB; less is copied. Waits until it is
    /// in the send buffer, which it may exceed. It may be sent by any stream.
    ///
    /// # Errors
    /// As writing: `WouldBlock` after the write time-out or where nothing may be waited for, `BrokenPipe`, `ConnectionReset`.
    /// With the error comes what has not been sent.
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

/// The bytes that a call has received.
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

impl Read for TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self).read_vectored(buffers)
    }
}

impl Write for TcpStream {
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
