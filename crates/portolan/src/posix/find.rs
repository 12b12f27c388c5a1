//! The socket behind a descriptor, with its session where the call needs it.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::migration::{self, Destination};
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::socket::table;
use crate::socket::{Socket, SocketPhase};
use crate::threads::start::{has_one_thread, here};

/// Returns the socket behind a descriptor, and this process.
pub(super) fn find(fd: RawFd) -> Outcome<(Arc<Socket>, &'static Process)> {
    let socket = table::socket(fd).ok_or(CallError::NotOurs)?;
    Ok((socket, here().ok_or(CallError::NotOurs)?))
}

/// As [`here`], if the program has a single thread.
fn here_alone() -> Option<&'static Process> {
    here().filter(|_| has_one_thread())
}

/// As [`find`], for calls that need the session: one that is held elsewhere is fetched.
pub(super) fn find_here(fd: RawFd) -> Outcome<(Arc<Socket>, &'static Process)> {
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
pub(super) fn find_to_use(
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
                migration::give_back(process, &socket, Destination::Relay);
            }
        }
        _ => {}
    }
    bring_here(fd, socket)
}

/// The kind of a call that moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// Sends little, in a way that the kernel's own call on a relayed descriptor would, too.
    Brief,
    Any,
}

/// Repeats a call as long as the session moves away during it.
pub(super) fn retry_if_moved<T>(mut call: impl FnMut() -> Outcome<T>) -> Outcome<T> {
    loop {
        match call() {
            Err(CallError::Moved) => {}
            done => return done,
        }
    }
}
