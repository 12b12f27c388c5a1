//! `fork`, `exec` and the end of a program. Fork costs nothing: a session stays where it is, and the
//! child asks for it when it needs it (ADR 8). What an image that knows nothing of Portolan inherits
//! is relayed, as is what a program leaves behind when it ends.

use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_sys::descriptor;
use portolan_types::Protocol;

use super::here;
use super::migrate::{Destination, give_back, obtain};
use crate::inside;
use crate::process::Process;
use crate::socket::{Phase, Socket};
use crate::table::{self, File};
use crate::wait::Waiter;

/// UDP sessions stay the parent's.
pub fn before_fork() {
    for (_, socket) in sockets() {
        socket.share();
    }
}

/// The child has no channel yet; it gets one with its first own session.
pub fn after_fork_in_child() {
    for fd in table::take_hidden() {
        descriptor::close(fd);
    }
    for (_, socket) in sockets() {
        match (socket.phase(), socket.protocol) {
            (Phase::Cached, Protocol::Tcp) => socket.set_phase(Phase::Away),
            (Phase::Cached | Phase::Connecting, _) => socket.set_phase(Phase::Closed),
            _ => {}
        }
    }
    Process::forget();
    Waiter::forget_mine();
}

/// The program ends by itself: its connections are closed in order when the last descriptors go,
/// and what is still written to them until then arrives.
pub fn before_exit() {
    // In a child of vfork the sessions are the parent's. A signal handler may have interrupted a
    // call with a lock held: then the server finds the descriptors gone, as after a kill.
    if let Some(process) = Process::running()
        && process.is_mine()
        && !inside::is_inside()
    {
        for (_, socket) in sockets() {
            let to = if socket.is_shared() {
                Destination::Shelf
            } else {
                Destination::Relay
            };
            give_back(process, &socket, to);
        }
        // The last that is counted of this process; the helper may not have come by for a while.
        process.publish(&process.lock());
    }
}

/// Another program is about to take this one's place, with the descriptors that are not marked
/// `FD_CLOEXEC`.
pub fn before_exec() {
    for (fd, socket) in sockets() {
        let is_inherited = descriptor::is_close_on_exec(fd).is_ok_and(|closes| !closes);
        if !is_inherited || !matches!(socket.phase(), Phase::Cached | Phase::Away) {
            continue;
        }
        if let Some(process) = here()
            && obtain(process, fd, &socket).is_ok()
        {
            give_back(process, &socket, Destination::Relay);
        }
    }
}

fn sockets() -> Vec<(RawFd, Arc<Socket>)> {
    let socket = |file| match file {
        File::Socket(socket) => Some(socket),
        File::Epoll(_) => None,
    };
    table::all()
        .into_iter()
        .filter_map(|(fd, file)| Some((fd, socket(file)?)))
        .collect()
}
