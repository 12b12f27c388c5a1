//! Halves of a connection, for a task that reads and another one that writes.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::bytes::BufMut;
use ::tokio::io::{Interest, ReadBuf, Ready};

use super::TcpStream;

/// The reading half of a connection, from [`TcpStream::split`].
#[derive(Debug)]
pub struct ReadHalf<'a>(&'a TcpStream);

/// The writing half of a connection, from [`TcpStream::split`].
#[derive(Debug)]
pub struct WriteHalf<'a>(&'a TcpStream);

/// The reading half of a connection, from [`TcpStream::into_split`].
#[derive(Debug)]
pub struct OwnedReadHalf(Arc<TcpStream>);

/// The writing half of a connection, from [`TcpStream::into_split`]. Dropping it ends the stream to the peer.
#[derive(Debug)]
pub struct OwnedWriteHalf {
    stream: Arc<TcpStream>,
    ends_when_dropped: bool,
}

/// Two halves that are not of the same connection.
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl std::fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the halves belong to different connections")
    }
}

impl std::error::Error for ReuniteError {}

pub(super) fn borrowed(stream: &mut TcpStream) -> (ReadHalf<'_>, WriteHalf<'_>) {
    (ReadHalf(stream), WriteHalf(stream))
}

pub(super) fn owned(stream: TcpStream) -> (OwnedReadHalf, OwnedWriteHalf) {
    let stream = Arc::new(stream);
    (
        OwnedReadHalf(Arc::clone(&stream)),
        OwnedWriteHalf::of(stream),
    )
}

impl OwnedReadHalf {
    /// Puts both halves together again.
    ///
    /// # Errors
    /// They belong to different connections.
    pub fn reunite(self, write: OwnedWriteHalf) -> Result<TcpStream, ReuniteError> {
        if !Arc::ptr_eq(&self.0, &write.stream) {
            return Err(ReuniteError(self, write));
        }
        write.forget();
        Arc::try_unwrap(self.0).map_err(|stream| {
            // Each half had one of the only two references.
            let read = OwnedReadHalf(Arc::clone(&stream));
            ReuniteError(read, OwnedWriteHalf::of(stream))
        })
    }
}

impl OwnedWriteHalf {
    fn of(stream: Arc<TcpStream>) -> OwnedWriteHalf {
        OwnedWriteHalf {
            stream,
            ends_when_dropped: true,
        }
    }

    /// Puts both halves together again.
    ///
    /// # Errors
    /// They belong to different connections.
    pub fn reunite(self, read: OwnedReadHalf) -> Result<TcpStream, ReuniteError> {
        read.reunite(self)
    }

    /// Drops the half without ending the stream to the peer.
    pub fn forget(mut self) {
        self.ends_when_dropped = false;
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        if self.ends_when_dropped {
            // The connection may have ended.
            let _ = self.stream.end();
        }
    }
}

impl AsRef<TcpStream> for ReadHalf<'_> {
    fn as_ref(&self) -> &TcpStream {
        self.0
    }
}

impl AsRef<TcpStream> for WriteHalf<'_> {
    fn as_ref(&self) -> &TcpStream {
        self.0
    }
}

impl AsRef<TcpStream> for OwnedReadHalf {
    fn as_ref(&self) -> &TcpStream {
        &self.0
    }
}

impl AsRef<TcpStream> for OwnedWriteHalf {
    fn as_ref(&self) -> &TcpStream {
        &self.stream
    }
}

/// The methods of [`TcpStream`] that all halves have.
macro_rules! half {
    ($half:ty) => {
        impl $half {
            /// As [`TcpStream::ready`].
            ///
            /// # Errors
            /// As [`TcpStream::ready`].
            pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
                self.as_ref().ready(interest).await
            }

            /// Returns the peer's address.
            ///
            /// # Errors
            /// `NotConnected`: the connection has ended.
            pub fn peer_addr(&self) -> io::Result<SocketAddr> {
                self.as_ref().peer_addr()
            }

            /// Returns the local address.
            ///
            /// # Errors
            /// None is expected.
            pub fn local_addr(&self) -> io::Result<SocketAddr> {
                self.as_ref().local_addr()
            }
        }
    };
}

/// Those of halves that read.
macro_rules! reading_half {
    ($half:ty) => {
        half!($half);
        reads!($half);

        impl $half {
            /// As [`TcpStream::peek`].
            ///
            /// # Errors
            /// As for reading.
            pub async fn peek(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.as_ref().peek(buffer).await
            }

            /// As [`TcpStream::poll_peek`].
            ///
            /// # Errors
            /// As for reading.
            pub fn poll_peek(
                &mut self,
                context: &mut Context<'_>,
                buffer: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<usize>> {
                self.as_ref().poll_peek(context, buffer)
            }

            /// As [`TcpStream::readable`].
            ///
            /// # Errors
            /// As [`TcpStream::readable`].
            pub async fn readable(&self) -> io::Result<()> {
                self.as_ref().readable().await
            }

            /// As [`TcpStream::try_read`].
            ///
            /// # Errors
            /// As [`TcpStream::try_read`].
            pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
                self.as_ref().try_read(buffer)
            }

            /// As [`TcpStream::try_read_vectored`].
            ///
            /// # Errors
            /// As [`TcpStream::try_read`].
            pub fn try_read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                self.as_ref().try_read_vectored(buffers)
            }

            /// As [`TcpStream::try_read_buf`].
            ///
            /// # Errors
            /// As [`TcpStream::try_read`].
            pub fn try_read_buf(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
                self.as_ref().try_read_buf(buffer)
            }
        }
    };
}

/// Those of halves that write.
macro_rules! writing_half {
    ($half:ty) => {
        half!($half);
        writes!($half);

        impl $half {
            /// As [`TcpStream::writable`].
            ///
            /// # Errors
            /// As [`TcpStream::writable`].
            pub async fn writable(&self) -> io::Result<()> {
                self.as_ref().writable().await
            }

            /// As [`TcpStream::try_write`].
            ///
            /// # Errors
            /// As [`TcpStream::try_write`].
            pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
                self.as_ref().try_write(bytes)
            }

            /// As [`TcpStream::try_write_vectored`].
            ///
            /// # Errors
            /// As [`TcpStream::try_write`].
            pub fn try_write_vectored(&self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
                self.as_ref().try_write_vectored(buffers)
            }
        }
    };
}

/// Implements [`AsyncRead`](::tokio::io::AsyncRead).
macro_rules! reads {
    ($stream:ty) => {
        impl ::tokio::io::AsyncRead for $stream {
            fn poll_read(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                buffer: &mut ::tokio::io::ReadBuf<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                AsRef::<TcpStream>::as_ref(&*self).poll_read_here(context, buffer)
            }
        }
    };
}

/// Implements [`AsyncWrite`](::tokio::io::AsyncWrite).
macro_rules! writes {
    ($stream:ty) => {
        /// Flushing does nothing, since written bytes are in the send buffer. Shutting down ends the stream to the peer.
        impl ::tokio::io::AsyncWrite for $stream {
            fn poll_write(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                bytes: &[u8],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                self.poll_write_vectored(context, &[::std::io::IoSlice::new(bytes)])
            }

            fn poll_write_vectored(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                bytes: &[::std::io::IoSlice<'_>],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                AsRef::<TcpStream>::as_ref(&*self).poll_write_here(context, bytes)
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            fn poll_flush(
                self: ::std::pin::Pin<&mut Self>,
                _: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                ::std::task::Poll::Ready(Ok(()))
            }

            fn poll_shutdown(
                self: ::std::pin::Pin<&mut Self>,
                _: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                ::std::task::Poll::Ready(AsRef::<TcpStream>::as_ref(&*self).end())
            }
        }
    };
}
pub(super) use {reads, writes};

reading_half!(ReadHalf<'_>);
reading_half!(OwnedReadHalf);
writing_half!(WriteHalf<'_>);
writing_half!(OwnedWriteHalf);
