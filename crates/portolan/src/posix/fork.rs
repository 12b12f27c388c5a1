//! `fork`: what both processes will share goes back to the server, which relays it through the
//! descriptors; each process goes on with plain kernel calls on those. The end of a program: the
//! same, so that the server closes what the kernel would have closed.

use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{AfterFlush, ReplyBody, RequestBody};
use portolan_stack::Session;
use portolan_sys::descriptor;
use portolan_types::Protocol;

use super::fallback::hand_to_kernel_epolls;
use crate::control;
use crate::inside;
use crate::process::Process;
use crate::socket::{Phase, Socket};
use crate::table::{self, File};
use crate::wait::Waiter;

/// TCP sessions of this process go back to the server. UDP sessions stay the parent's.
pub fn before_fork() {
    if let Some(process) = Process::running() {
        give_back(process);
    }
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
        give_back(process);
        // The last that is counted of this process; the helper may not have come by for a while.
        process.publish(&process.lock());
    }
}

fn give_back(process: &Process) {
    for (_, socket) in sockets() {
        if socket.phase() == Phase::Cached && socket.protocol == Protocol::Tcp {
            relay(process, &socket);
        }
    }
}

pub fn after_fork_in_parent() {}

/// The child has no channel yet; it gets one with its first own session.
pub fn after_fork_in_child() {
    for fd in table::take_hidden() {
        descriptor::close(fd);
    }
    for (_, socket) in sockets() {
        if matches!(socket.phase(), Phase::Cached | Phase::Connecting) {
            socket.set_phase(Phase::Closed);
        }
    }
    Process::forget();
    Waiter::forget_mine();
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

/// If the server does not take it, the session stays here and the child will not see it.
fn relay(process: &Process, socket: &Arc<Socket>) {
    let _setup = socket.setup();
    let slot = socket.slot();
    let mut core = process.lock();
    core.attend(portolan_sys::clock::now());
    let Some(Session::Tcp(session)) = core.stack.get(slot) else {
        return;
    };
    let id = session.id;
    let Ok((capsule, memfd)) = control::pack(session.to_capsule()) else {
        return;
    };
    core.detach(slot);
    core.stack.remove(slot);
    // Calls of other threads find the session gone only once they may pass to the kernel.
    socket.set_phase(Phase::Relayed);
    drop(core);
    let fds: Vec<_> = memfd.iter().map(AsFd::as_fd).collect();
    let request = RequestBody::Flush {
        session: id,
        capsule,
        then: AfterFlush::Relay,
    };
    if !matches!(
        process.control.call(request, &fds),
        Ok((ReplyBody::Done, _))
    ) {
        socket.set_error(libc::ECONNABORTED);
        socket.set_phase(Phase::Closed);
    }
    hand_to_kernel_epolls(socket);
}
