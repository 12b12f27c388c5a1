//! Sockets in the shape of [`std::net`], for programs that are written for Portolan, and [shared buffers](buf). No library needs
//! to be preloaded: the first socket registers the process with the server of its network namespace.
//!
//! Sockets that Portolan does not serve are the kernel's: without a server, or with `PORTOLAN=off`, these types behave
//! like `std::net`'s. Without a server and with `PORTOLAN=require`, opening a socket fails
//! ([`ErrorKind::NetworkDown`]). A session that the server relays (one that is shared with a program without the
//! library) is used through its descriptor.
//!
//! ```no_run
//! use std::io::{Read, Write};
//!
//! use portolan::net::TcpStream;
//!
//! let mut stream = TcpStream::connect("192.0.2.7:7")?;
//! stream.write_all(b"anybody there?")?;
//! let mut answer = [0; 64];
//! let length = stream.read(&mut answer)?;
//! # std::io::Result::Ok(())
//! ```
//!
//! # Limits
//! The descriptor of a socket ([`AsFd`]) is one end of a UNIX socket pair, as for any Portolan socket: the kernel's
//! `poll` does not report its state. Use [`posix::poll`](crate::posix::poll) and
//! [`posix::epoll_wait`](crate::posix::epoll_wait) instead, or the types of the features `tokio` (`net::tokio`) and `mio`
//! (`net::mio`). Do not close the descriptor behind the library's back. A
//! child of `fork` inherits the sockets; each session moves to the process that uses it. Signal handlers must not call
//! into this module, unless the program runs under the preload library.
//!
//! [`AsFd`]: std::os::fd::AsFd
//! [`ErrorKind::NetworkDown`]: std::io::ErrorKind::NetworkDown
#![warn(missing_docs)]

pub mod buf;
mod datagram;
mod handle;
mod listener;
#[cfg(feature = "mio")]
pub mod mio;
mod options;
#[cfg(any(feature = "mio", feature = "tokio"))]
mod reactor;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;

pub use datagram::UdpSocket;
pub use listener::{Incoming, TcpListener};
pub use stream::TcpStream;
