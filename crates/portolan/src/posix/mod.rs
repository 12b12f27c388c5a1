//! BSD socket calls on descriptor numbers. Each fails with [`CallError::NotOurs`] if the kernel has
//! to make the call: for descriptors that are not Portolan's, and for sockets that the server
//! relays or that fell back.

mod addresses;
mod asking;
mod attach;
mod bind;
mod blocking;
mod connect;
mod data;
mod datagram;
mod flags;
mod fork;
mod groups;
mod kernel_socket;
mod lifecycle;
mod listen;
mod multiplex;
mod oob;
mod shared;
mod socket_options;
mod tcp_info;

pub use crate::outcome::{CallError, Outcome};
pub use crate::process::cancel::{
    CancelDisabled, cancelled, expect as expect_cancel, hold, shelter, take_end,
};
pub use crate::process::inside::{ExitGuard, LibraryGuard, defer, enter, is_inside, leave};
pub use crate::process::start::has_one_thread;
pub use crate::process::vfork::shares_memory;
pub use crate::wait::outside;
pub use addresses::{local_address, peer_address};
pub use attach::{attach, attach_inherited};
pub use bind::bind;
pub use connect::connect;
pub use data::{Received, receive, send, send_message, send_space};
pub use datagram::{Control, Destination, ExtendedError, SendControl};
pub use flags::{fcntl, ioctl};
pub use fork::{
    after_fork_in_child, after_fork_in_parent, after_fork_to_namespace, before_chroot,
    before_confinement, before_exec, before_exit, before_fork, before_fork_to_namespace, freeze,
    give_away, while_moving, without_helper,
};
pub use lifecycle::{Duplicate, close, duplicate, forget, shutdown, socket};
pub use listen::{accept, listen};
pub use multiplex::{epoll_control, epoll_create, epoll_wait, poll};
pub use portolan_sys::memory;
pub use portolan_sys::signals::{LAST as LAST_SIGNAL, SignalInfo, is_of_memory, may_be_defer};
pub use shared::{Chunk, Moved, Piece, Taken, moved, receive_shared, send_shared};
pub use socket_options::{get_option, set_option};

use std::io::IoSlice;
use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_types::Instant;
use rustix::io::Errno;

use crate::descriptors;
use crate::migration;
use crate::process::Process;
use crate::process::start::{here, start};
use crate::settings::settings;
use crate::socket::table;
use crate::socket::{Socket, SocketPhase};
use crate::wait::waiter::Waiter;

/// Is the descriptor one of Portolan's sockets or epoll sets? One atomic load.
pub fn is_ours(fd: RawFd) -> bool {
    descriptors::is_ours(fd)
}

/// Is the descriptor used by the library itself? Programs must not use it.
pub fn is_internal(fd: RawFd) -> bool {
    descriptors::is_internal(fd)
}

/// Reads the settings from the environment, before the program can change it.
pub fn read_settings() {
    settings();
}

/// Does Portolan serve this process? Looks for a server if that was not done yet. Interfaces that
/// could bypass Portolan's sockets (io_uring) are closed then.
pub fn is_active() -> bool {
    start().is_ok()
}

/// Called before the descriptor is used by calls that the library does not see. Returns whether that works.
pub fn before_lending(fd: RawFd) -> bool {
    migration::before_lending(fd, here)
}

/// Returns the socket behind a descriptor, and this process.
fn find(fd: RawFd) -> Outcome<(Arc<Socket>, &'static Process)> {
    let socket = table::socket(fd).ok_or(CallError::NotOurs)?;
    Ok((socket, here().ok_or(CallError::NotOurs)?))
}

/// As [`here`], if the program has a single thread.
fn here_alone() -> Option<&'static Process> {
    here().filter(|_| has_one_thread())
}

/// As [`find`], for calls that need the session: one that is held elsewhere is fetched.
fn find_here(fd: RawFd) -> Outcome<(Arc<Socket>, &'static Process)> {
    bring_here(fd, table::socket(fd).ok_or(CallError::NotOurs)?)
}

fn bring_here(fd: RawFd, socket: Arc<Socket>) -> Outcome<(Arc<Socket>, &'static Process)> {
    match here() {
        Some(process) => {
            if socket.end_first_relay() {
                // If it cannot be had the call has to use a relay.
                let _ = migration::reclaim(fd, &socket, here_alone);
            }
            migration::obtain(process, fd, &socket)?;
            Ok((socket, process))
        }
        None => {
            migration::have_relayed(fd, &socket)?;
            Err(CallError::NotOurs)
        }
    }
}

/// As [`find_here`], for calls that move data: a relayed session is requested again, and one that
/// the server has to relay goes there. A child of fork has the session relayed as long as it sends
/// little: many children send one reply and exit, for which a channel does not pay; `transfer` is
/// evaluated only then. A receiver must learn of a reset, which a relay cannot report.
fn find_to_use(
    fd: RawFd,
    transfer: impl Fn() -> Transfer,
) -> Outcome<(Arc<Socket>, &'static Process)> {
    let socket = table::socket(fd).ok_or(CallError::NotOurs)?;
    match socket.phase() {
        SocketPhase::HeldElsewhere if Process::is_new_child() && transfer() == Transfer::Brief => {
            migration::relay_first(fd, &socket)?
        }
        SocketPhase::Relayed if !socket.is_for_server() => {
            if transfer() == Transfer::Any {
                socket.end_first_relay();
            }
            migration::reclaim(fd, &socket, here_alone)?
        }
        SocketPhase::Cached if socket.is_for_server() => {
            if let Some(process) = here() {
                migration::give_back(process, &socket, migration::Destination::Relay);
            }
        }
        _ => {}
    }
    bring_here(fd, socket)
}

/// The kind of a call that moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    /// Sends little, in a way that the kernel's own call on a relayed descriptor would, too.
    Brief,
    Any,
}

impl Transfer {
    /// More than this is worth a channel.
    const BRIEF_MAX: usize = 16 << 10;

    fn sending(buffers: &[IoSlice<'_>], flags: i32, control: &SendControl) -> Transfer {
        let length: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let is_plain = flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == 0
            && *control == SendControl::default();
        if is_plain && length <= Transfer::BRIEF_MAX {
            Transfer::Brief
        } else {
            Transfer::Any
        }
    }
}

/// Repeats a call as long as the session moves away during it.
fn retry_if_moved<T>(mut call: impl FnMut() -> Outcome<T>) -> Outcome<T> {
    loop {
        match call() {
            Err(CallError::Moved) => {}
            done => return done,
        }
    }
}

/// While this lives, the calling thread watches sockets.
struct Watching<'a> {
    sockets: Vec<&'a Arc<Socket>>,
    waiter: Arc<Waiter>,
}

impl<'a> Watching<'a> {
    fn new(sockets: Vec<&'a Arc<Socket>>) -> Result<Watching<'a>, Errno> {
        let waiter = Waiter::mine();
        for socket in &sockets {
            // As in the kernel, a call in progress keeps the socket open.
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

/// Does Linux restart a call that a signal has interrupted? Not one with a time-out, nor if a
/// handler lacks `SA_RESTART` (signal(7), "Interruption of system calls").
fn restarts(deadline: Option<Instant>) -> bool {
    deadline.is_none() && crate::process::inside::handlers_restart()
}

/// Returns the deadline of `SO_RCVTIMEO` and similar time-outs, from now on.
fn deadline_after(timeout: Option<std::time::Duration>) -> Option<Instant> {
    timeout.map(|timeout| portolan_sys::clock::now() + timeout)
}
