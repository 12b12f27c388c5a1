//! BSD socket calls on descriptor numbers. Each says [`Answer::NotOurs`] if the kernel should
//! have the call: for descriptors that are not Portolan's, and for sockets that the server relays
//! or that fell back.

mod addresses;
mod asking;
mod bind;
mod blocking;
mod connect;
mod data;
mod datagram;
mod fallback;
mod flags;
mod fork;
mod groups;
mod lifecycle;
mod listen;
mod multiplex;
mod oob;
mod socket_options;
mod tcp_info;
mod twin;

pub use crate::inside::{Passage, enter};
pub use addresses::{local_address, peer_address};
pub use bind::bind;
pub use connect::connect;
pub use data::{Received, receive, send, send_message};
pub use datagram::{Control, Destination, ExtendedError, SendControl};
pub use flags::{fcntl, ioctl};
pub use fork::{after_fork_in_child, after_fork_in_parent, before_exit, before_fork};
pub use lifecycle::{Duplicate, close, duplicate, forget, shutdown, socket};
pub use listen::{accept, listen};
pub use multiplex::{epoll_control, epoll_create, epoll_wait, poll};
pub use socket_options::{get_option, set_option};

use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_types::Instant;
use rustix::io::Errno;

use crate::process::Process;
use crate::socket::Socket;
use crate::table;
use crate::wait::Waiter;

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<T> {
    Done(T),
    Failed(Errno),
    /// Have the kernel do it.
    NotOurs,
}

impl<T> From<Result<T, Errno>> for Answer<T> {
    fn from(result: Result<T, Errno>) -> Answer<T> {
        match result {
            Ok(value) => Answer::Done(value),
            Err(errno) => Answer::Failed(errno),
        }
    }
}

/// Why a call of ours goes no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Failed(Errno),
    NotOurs,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Failed(errno)
    }
}

impl<T> From<Result<T, Stop>> for Answer<T> {
    fn from(result: Result<T, Stop>) -> Answer<T> {
        match result {
            Ok(value) => Answer::Done(value),
            Err(Stop::Failed(errno)) => Answer::Failed(errno),
            Err(Stop::NotOurs) => Answer::NotOurs,
        }
    }
}

/// Is the descriptor one of Portolan's sockets or epoll sets? One atomic load.
pub fn is_ours(fd: RawFd) -> bool {
    table::is_ours(fd)
}

/// Is the descriptor one that the library uses itself? Programs are to leave it alone.
pub fn is_internal(fd: RawFd) -> bool {
    table::is_internal(fd)
}

/// Does Portolan serve this process? It is looked for now if that was not done yet. What could
/// carry sockets past it (io_uring) is closed then.
pub fn is_active() -> bool {
    Process::start().is_ok()
}

/// The socket behind a descriptor, and the process that holds its session.
fn find(fd: RawFd) -> Result<(Arc<Socket>, &'static Process), Stop> {
    let socket = table::socket(fd).ok_or(Stop::NotOurs)?;
    let process = Process::running().ok_or(Stop::NotOurs)?;
    Ok((socket, process))
}

/// The calling thread watches sockets for as long as this lives.
struct Watching<'a> {
    sockets: Vec<&'a Arc<Socket>>,
    waiter: Arc<Waiter>,
}

impl<'a> Watching<'a> {
    fn new(sockets: Vec<&'a Arc<Socket>>) -> Result<Watching<'a>, Errno> {
        let waiter = Waiter::mine()?;
        for socket in &sockets {
            // As in the kernel, a call under way keeps the socket open.
            socket.add_reference();
            socket.watch(&waiter);
        }
        Ok(Watching { sockets, waiter })
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        for socket in &self.sockets {
            socket.unwatch(&self.waiter);
            lifecycle::drop_reference(socket);
        }
    }
}

/// Does Linux begin a call again that a signal has interrupted? Not one with a time-out, nor if a
/// handler does without (signal(7), "Interruption of system calls").
fn restarts(deadline: Option<Instant>) -> bool {
    deadline.is_none() && portolan_sys::signals::handlers_restart()
}

/// `SO_RCVTIMEO` and friends, from now on.
fn deadline_after(timeout: Option<std::time::Duration>) -> Option<Instant> {
    timeout.map(|timeout| portolan_sys::clock::now() + timeout)
}
