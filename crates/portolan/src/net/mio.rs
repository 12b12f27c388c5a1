//! Sockets that a [`mio::Poll`](https://docs.rs/mio/latest/mio/struct.Poll.html) waits for, beside other event sources.
//! Needs the feature `mio`.
//!
//! ```no_run
//! use std::io::Read;
//!
//! use mio::{Events, Interest, Poll, Token};
//! use portolan::net::mio::TcpStream;
//!
//! let mut poll = Poll::new()?;
//! let mut stream = TcpStream::connect("192.0.2.7:7".parse().unwrap())?;
//! poll.registry().register(&mut stream, Token(0), Interest::READABLE)?;
//! let mut events = Events::with_capacity(16);
//! poll.poll(&mut events, None)?;
//! let mut bytes = [0; 1024];
//! match stream.read(&mut bytes) {
//!     Ok(length) => println!("{length} bytes"),
//!     Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
//!     Err(error) => return Err(error),
//! }
//! # std::io::Result::Ok(())
//! ```
//!
//! # Readiness
//! As for mio's own sockets, an event is reported once when a socket becomes ready, and again only after a call has
//! failed with `WouldBlock`. Calls have to be made through these types for that; [`get_ref`](TcpStream::get_ref) is for
//! options. The two directions are reported by separate events of the same token, and the ends of a stream as readiness
//! (`is_read_closed` and `is_write_closed` are always false): the call tells.
//!
//! A thread of the library waits for all sockets, runs the protocol while no other thread is in the library, and
//! notifies the kernel's epoll set behind the `Poll` by an eventfd per socket and direction. Programs that can wait in
//! Portolan itself ([`posix::epoll_wait`](crate::posix::epoll_wait)) do with fewer system calls.

mod datagram;
mod listener;
mod registration;
mod stream;

pub use datagram::UdpSocket;
pub use listener::TcpListener;
pub use stream::TcpStream;

/// Implements [`event::Source`](::mio::event::Source) by a field `registration`, and access to the descriptor by a field
/// `socket`.
macro_rules! event_source {
    ($socket:ty) => {
        impl ::mio::event::Source for $socket {
            fn register(
                &mut self,
                registry: &::mio::Registry,
                token: ::mio::Token,
                interests: ::mio::Interest,
            ) -> ::std::io::Result<()> {
                self.registration.register(registry, token, interests)
            }

            fn reregister(
                &mut self,
                registry: &::mio::Registry,
                token: ::mio::Token,
                interests: ::mio::Interest,
            ) -> ::std::io::Result<()> {
                self.registration.deregister(registry)?;
                self.registration.register(registry, token, interests)
            }

            fn deregister(&mut self, registry: &::mio::Registry) -> ::std::io::Result<()> {
                self.registration.deregister(registry)
            }
        }

        impl ::std::os::fd::AsFd for $socket {
            fn as_fd(&self) -> ::std::os::fd::BorrowedFd<'_> {
                self.socket.as_fd()
            }
        }

        impl ::std::os::fd::AsRawFd for $socket {
            fn as_raw_fd(&self) -> ::std::os::fd::RawFd {
                self.socket.as_raw_fd()
            }
        }
    };
}
use event_source;
