//! TCP connections.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::task::{Context, Poll};

use ::bytes::BufMut;
use ::tokio::io::{Interest, ReadBuf};
use ::tokio::net::{ToSocketAddrs, lookup_host};

use super::buffers::{appended, poll_fill};
use super::readiness::{Readiness, readiness_methods};
use super::split::{self, OwnedReadHalf, OwnedWriteHalf, ReadHalf, WriteHalf, reads, writes};
use super::wrapped::wraps;
use crate::net;
use crate::net::buf::{Piece, Reserved, SendError};
use crate::net::handle::no_address;
use crate::net::options::connection_options;

/// Bytes that are read at a time at most: a reader's buffer has to be initialised before.
const READ_MAX: usize = 256 * 1024;

/// A TCP connection, as [`tokio::net::TcpStream`](https://docs.rs/tokio/latest/tokio/net/struct.TcpStream.html). Dropping
/// it closes the connection.
#[derive(Debug)]
pub struct TcpStream {
    // Dropped before the socket is closed.
    readiness: Readiness,
    socket: net::TcpStream,
}

wraps!(TcpStream, "a connection");

impl TcpStream {
    /// Connects to the first address of `address` that answers. Dropping the call gives up.
    ///
    /// ```no_run
    /// # async fn ask() -> std::io::Result<()> {
    /// use portolan::net::tokio::TcpStream;
    /// use tokio::io::AsyncWriteExt;
    ///
    /// let mut stream = TcpStream::connect("192.0.2.7:7").await?;
    /// stream.write_all(b"anybody there?").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`net::TcpStream::connect`].
    pub async fn connect(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
        let mut last = None;
        for address in lookup_host(address).await? {
            match TcpStream::connect_to(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(no_address))
    }

    async fn connect_to(address: SocketAddr) -> io::Result<TcpStream> {
        TcpStream::opened(net::TcpStream::begin_to_connect(address)?).await
    }

    /// Waits for the outcome of an open.
    pub(super) async fn opened(begun: net::TcpStream) -> io::Result<TcpStream> {
        let stream = TcpStream::of_nonblocking(begun)?;
        let outcome = || stream.outcome();
        stream.readiness.run(Interest::WRITABLE, outcome).await?;
        Ok(stream)
    }

    /// The outcome of an open; `WouldBlock` while it has none.
    fn outcome(&self) -> io::Result<()> {
        match self.socket.take_error()? {
            Some(error) => Err(error),
            None => match self.socket.peer_addr() {
                Ok(_) => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                    Err(io::ErrorKind::WouldBlock.into())
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Takes over a connection that a listener has accepted: a client usually sends first.
    pub(super) fn accepted(
        (socket, peer): (net::TcpStream, SocketAddr),
    ) -> io::Result<(TcpStream, SocketAddr)> {
        let stream = TcpStream::of_nonblocking(socket)?;
        stream.readiness.assume();
        Ok((stream, peer))
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    readiness_methods!();

    /// As [`TcpStream::readable`]. Of several tasks that use functions of this kind to read, the last one is woken.
    ///
    /// # Errors
    /// As [`TcpStream::readable`].
    pub fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.readiness.poll_wait(Interest::READABLE, context)
    }

    /// As [`TcpStream::writable`]. Of several tasks that use functions of this kind to write, the last one is woken.
    ///
    /// # Errors
    /// As [`TcpStream::writable`].
    pub fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.readiness.poll_wait(Interest::WRITABLE, context)
    }

    /// Reads what is there, without waiting. Returns 0 if the peer has ended the stream.
    ///
    /// # Errors
    /// `WouldBlock`: there is nothing. Else as for reading.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = || (&self.socket).read(buffer);
        self.readiness.attempt(Interest::READABLE, read)
    }

    /// As [`TcpStream::try_read`], into several buffers in turn.
    ///
    /// # Errors
    /// As [`TcpStream::try_read`].
    pub fn try_read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let read = || (&self.socket).read_vectored(buffers);
        self.readiness.attempt(Interest::READABLE, read)
    }

    /// As [`TcpStream::try_read`], and appends to `buffer`: at most 64 KiB at a time.
    ///
    /// # Errors
    /// As [`TcpStream::try_read`].
    pub fn try_read_buf(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        let mut read = |bytes: &mut [u8]| Ok((self.try_read(bytes)?, ()));
        appended(buffer, &mut read).map(|(length, ())| length)
    }

    /// Writes what fits into the send buffer, without waiting.
    ///
    /// # Errors
    /// `WouldBlock`: the send buffer is full. Else as for writing.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let write = || (&self.socket).write(bytes);
        self.readiness.attempt(Interest::WRITABLE, write)
    }

    /// As [`TcpStream::try_write`], from several buffers in turn.
    ///
    /// # Errors
    /// As [`TcpStream::try_write`].
    pub fn try_write_vectored(&self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let write = || (&self.socket).write_vectored(buffers);
        self.readiness.attempt(Interest::WRITABLE, write)
    }

    /// Reads bytes without removing them from the receive buffer. Waits until there are some, or the stream has ended.
    ///
    /// # Errors
    /// As for reading.
    pub async fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let peek = || self.socket.peek(buffer);
        self.readiness.run(Interest::READABLE, peek).await
    }

    /// As [`TcpStream::peek`]. Of several tasks that use functions of this kind to read, the last one is woken.
    ///
    /// # Errors
    /// As for reading.
    pub fn poll_peek(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        let peek = |bytes: &mut [u8]| Ok((self.socket.peek(bytes)?, ()));
        let peeked = poll_fill(&self.readiness, context, buffer, READ_MAX, peek);
        peeked.map_ok(|(length, ())| length)
    }

    connection_options!();

    /// Receives by [shared buffers](net::buf), as [`net::TcpStream::receive`].
    ///
    /// # Errors
    /// As [`net::TcpStream::receive`], but never `WouldBlock`.
    pub async fn receive(&self, pieces: &mut Vec<Piece>) -> io::Result<usize> {
        let receive = || self.socket.receive(pieces);
        self.readiness.run(Interest::READABLE, receive).await
    }

    /// Sends a [shared buffer](net::buf), as [`net::TcpStream::send`]. A part may have been sent when the call is cancelled.
    ///
    /// # Errors
    /// As [`net::TcpStream::send`], but never `WouldBlock`.
    pub async fn send(&self, reserved: Reserved) -> Result<(), SendError> {
        let mut unsent = Some(reserved);
        let sent = self.readiness.run(Interest::WRITABLE, || {
            let Some(reserved) = unsent.take() else {
                return Ok(());
            };
            self.socket.send(reserved).map_err(|failed| {
                unsent = failed.unsent;
                failed.error
            })
        });
        match sent.await {
            Ok(()) => Ok(()),
            Err(error) => Err(SendError { error, unsent }),
        }
    }

    /// Splits the connection into halves that borrow it.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        split::borrowed(self)
    }

    /// Splits the connection into halves that different tasks can own.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        split::owned(self)
    }

    pub(super) fn poll_read_here(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.readiness.take_drained() {
            let nothing = || Err(io::ErrorKind::WouldBlock.into());
            return self.readiness.poll(Interest::READABLE, context, nothing);
        }
        let room = buffer.remaining().min(READ_MAX);
        let read = |bytes: &mut [u8]| Ok(((&self.socket).read(bytes)?, ()));
        let filled = poll_fill(&self.readiness, context, buffer, READ_MAX, read);
        if let Poll::Ready(Ok((length, ()))) = filled
            && (1..room).contains(&length)
        {
            self.readiness.note_drained();
        }
        filled.map_ok(drop)
    }

    pub(super) fn poll_write_here(
        &self,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = || (&self.socket).write_vectored(bytes);
        self.readiness.poll(Interest::WRITABLE, context, write)
    }

    pub(super) fn end(&self) -> io::Result<()> {
        match self.socket.shutdown(Shutdown::Write) {
            // The peer has ended it already.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            other => other,
        }
    }
}

impl AsRef<TcpStream> for TcpStream {
    fn as_ref(&self) -> &TcpStream {
        self
    }
}

reads!(TcpStream);
writes!(TcpStream);
