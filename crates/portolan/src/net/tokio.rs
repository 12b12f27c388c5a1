//! Sockets for asynchronous programs, in the shape of [`tokio::net`](https://docs.rs/tokio/latest/tokio/net): TCP streams
//! are [`AsyncRead`] and [`AsyncWrite`], so that `hyper` and other libraries on tokio's traits can use them. Needs the
//! feature `tokio`.
//!
//! ```no_run
//! use portolan::net::tokio::TcpListener;
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # async fn serve() -> std::io::Result<()> {
//! let listener = TcpListener::bind("0.0.0.0:7").await?;
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
//! in the library. A server does better with [`drive`], which waits in the runtime itself. Tasks may be cancelled at any
//! time: a call that was dropped while it waited has transferred nothing, except where its documentation says otherwise.
//! In tokio, calls use up the task's budget ([`coop`](::tokio::task::coop)).
//!
//! # Limits
//! Names are resolved by tokio, in its pool of blocking threads: that needs its runtime, addresses do not. A socket does
//! not belong to a runtime: one whose runtime has ended can be used in another. The thread does not exist in a child of
//! `fork`, as a runtime's own threads do not. Instead of `from_std` and `into_std` there are `from_blocking` and
//! `into_blocking`, whose blocking types are those of [`net`](crate::net): the descriptor alone ([`AsFd`]) is of no use
//! to the standard library's.
//!
//! [`AsFd`]: std::os::fd::AsFd
//! [`AsyncRead`]: ::tokio::io::AsyncRead
//! [`AsyncWrite`]: ::tokio::io::AsyncWrite

mod addresses;
mod buffers;
mod datagram;
mod drive;
mod listener;
mod readiness;
mod socket;
mod split;
mod stream;
mod wrapped;

pub use datagram::UdpSocket;
pub use drive::drive;
pub use listener::TcpListener;
pub use socket::TcpSocket;
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
pub use stream::TcpStream;

/// The halves of connections, where tokio has them.
pub mod tcp {
    pub use super::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
}
