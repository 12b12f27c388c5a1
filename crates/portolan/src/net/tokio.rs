//! Sockets for asynchronous programs, in the shape of [`tokio::net`](https://docs.rs/tokio/latest/tokio/net): TCP streams
//! are [`AsyncRead`] and [`AsyncWrite`], so that `hyper` and other libraries on tokio's traits can use them. Needs the
//! feature `tokio`.
//!
//! ```no_run
//! use portolan::net::tokio::TcpListener;
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # async fn serve() -> std::io::Result<()> {
//! let listener = TcpListener::bind("0.0.0.0:7")?;
//! let (mut stream, _) = listener.accept().await?;
//! let mut buffer = [0; 1024];
//! let length = stream.read(&mut buffer).await?;
//! stream.write_all(&buffer[..length]).await?;
//! # Ok(()) }
//! ```
//!
//! # Readiness
//! Any runtime can poll these types, since they do not use tokio's own driver (`enable_io` is not needed). One thread of
//! the library waits for all of them and wakes their tasks. That thread also runs the protocol while no other thread is
//! in the library. A server does better with [`drive`], which waits in the runtime itself. Tasks may be cancelled at any time: a call that was dropped while it waited has transferred nothing,
//! except where its documentation says otherwise.
//!
//! # Limits
//! Names are not resolved: addresses are [`SocketAddr`](std::net::SocketAddr)s, or resolved by
//! [`ToSocketAddrs`](std::net::ToSocketAddrs) where a program starts to listen. The thread does not exist in a child of
//! `fork`, as a runtime's own threads do not.
//!
//! [`AsyncRead`]: ::tokio::io::AsyncRead
//! [`AsyncWrite`]: ::tokio::io::AsyncWrite

mod datagram;
mod drive;
mod listener;
mod readiness;
mod split;
mod stream;

pub use datagram::UdpSocket;
pub use drive::drive;
pub use listener::TcpListener;
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
pub use stream::TcpStream;
