//! TCP connections.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::readiness::{poll, run};
use super::split::{self, OwnedReadHalf, OwnedWriteHalf, ReadHalf, WriteHalf};
use crate::net;
use crate::net::buf::{Piece, Reserved, SendError};
use crate::net::reactor::{Direction, Source};

/// Bytes that are read at a time at most: a reader's buffer has to be initialised before.
const READ_MAX: usize = 256 * 1024;

/// A TCP connection, as [`tokio::net::TcpStream`](https://docs.rs/tokio/latest/tokio/net/struct.TcpStream.html). Dropping
/// it closes the connection.
#[derive(Debug)]
pub struct TcpStream {
    // Dropped before the socket is closed.
    source: Source,
    socket: net::TcpStream,
}

impl TcpStream {
    /// Connects to `address`. Dropping the call gives up.
    ///
    /// ```no_run
    /// # async fn ask() -> std::io::Result<()> {
    /// use portolan::net::tokio::TcpStream;
    /// use tokio::io::AsyncWriteExt;
    ///
    /// let mut stream = TcpStream::connect("192.0.2.7:7".parse().unwrap()).await?;
    /// stream.write_all(b"anybody there?").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`net::TcpStream::connect`].
    pub async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
        let stream = TcpStream::of_nonblocking(net::TcpStream::begin_to_connect(address)?)?;
        run(&stream.source, Direction::Write, || stream.outcome()).await?;
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

    /// Takes over a connection, and makes it non-blocking.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn from_blocking(socket: net::TcpStream) -> io::Result<TcpStream> {
        socket.set_nonblocking(true)?;
        TcpStream::of_nonblocking(socket)
    }

    pub(super) fn of_nonblocking(socket: net::TcpStream) -> io::Result<TcpStream> {
        let source = Source::new(socket.as_raw_fd())?;
        Ok(TcpStream { source, socket })
    }

    /// Returns the connection itself, for its options and addresses. It must stay non-blocking.
    pub fn get_ref(&self) -> &net::TcpStream {
        &self.socket
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected`: the connection has ended.
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

    /// Reads bytes without removing them from the receive buffer. Waits until there are some, or the stream has ended.
    ///
    /// # Errors
    /// As for reading.
    pub async fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let peek = || self.socket.peek(buffer);
        run(&self.source, Direction::Read, peek).await
    }

    /// Waits until there is something to read, or the stream has ended.
    ///
    /// # Errors
    /// An error of the connection.
    pub async fn readable(&self) -> io::Result<()> {
        self.peek(&mut [0]).await.map(drop)
    }

    /// Reads what is there.
    ///
    /// # Errors
    /// `WouldBlock`: there is nothing. Else as for reading.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.socket).read(buffer)
    }

    /// Writes what fits into the send buffer.
    ///
    /// # Errors
    /// `WouldBlock`: the send buffer is full. Else as for writing.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        (&self.socket).write(bytes)
    }

    /// Receives by [shared buffers](net::buf), as [`net::TcpStream::receive`].
    ///
    /// # Errors
    /// As [`net::TcpStream::receive`], but never `WouldBlock`.
    pub async fn receive(&self, pieces: &mut Vec<Piece>) -> io::Result<usize> {
        let receive = || self.socket.receive(pieces);
        run(&self.source, Direction::Read, receive).await
    }

    /// Sends a [shared buffer](net::buf), as [`net::TcpStream::send`]. A part may have been sent when the call is cancelled.
    ///
    /// # Errors
    /// As [`net::TcpStream::send`], but never `WouldBlock`.
    pub async fn send(&self, reserved: Reserved) -> Result<(), SendError> {
        let mut unsent = Some(reserved);
        let sent = run(&self.source, Direction::Write, || {
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
        context: &Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buffer.remaining().min(READ_MAX);
        let unfilled = buffer.initialize_unfilled_to(room);
        let read = poll(&self.source, Direction::Read, context, || {
            (&self.socket).read(unfilled)
        });
        read.map_ok(|length| buffer.advance(length))
    }

    pub(super) fn poll_write_here(
        &self,
        context: &Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        poll(&self.source, Direction::Write, context, || {
            (&self.socket).write_vectored(bytes)
        })
    }

    pub(super) fn end(&self) -> io::Result<()> {
        match self.socket.shutdown(Shutdown::Write) {
            // The peer has ended it already.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            other => other,
        }
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_read_here(context, buffer)
    }
}

/// Flushing does nothing, since written bytes are in the send buffer. Shutting down ends the stream to the peer.
impl AsyncWrite for TcpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_here(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_here(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.end())
    }
}

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for TcpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
