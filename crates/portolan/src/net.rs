//! Sockets in the shape of [`std::net`], for programs that are written for Portolan, and [shared buffers](buf). No library needs
//! to be preloaded: the first socket registers the process with the server of its network namespace.
//!
//! What Portolan does not serve is the kernel's: without a server, or where `PORTOLAN=off`, these types are `std::net`'s under
//! another name. With `PORTOLAN=require` there are no sockets then ([`ErrorKind::NetworkDown`]). A session that the server
//! relays (one that is shared with a program without the library) is used through its descriptor.
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
//! The descriptor of a socket ([`AsFd`]) is one end of a UNIX socket pair, as that of any Portolan socket: the kernel's `poll`
//! on it says nothing. [`posix::poll`](crate::posix::poll) and [`posix::epoll_wait`](crate::posix::epoll_wait) do. Do not close it
//! behind the library's back. A child of `fork` has the sockets; the session goes to the process that uses it.
//! Signal handlers must not call in here, unless the preload library runs the program.
//!
//! [`AsFd`]: std::os::fd::AsFd
//! [`ErrorKind::NetworkDown`]: std::io::ErrorKind::NetworkDown

pub mod buf;
mod datagram;
mod handle;
mod listener;
mod stream;

pub use datagram::UdpSocket;
pub use listener::{Incoming, TcpListener};
pub use stream::TcpStream;
