//! `fork`, `exec`, descriptors that are passed on, and the end of a program. Fork costs nothing: a session
//! stays where it is, and the child requests it when it needs it (ADR 8). A session that passes to a process
//! that may not know Portolan is relayed, as is one that a program leaves behind when it ends.

use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_proto::control::{ProbedState, Reader, ReplyBody, RequestBody};
use portolan_sys::{clock, descriptor, pi, unix};
use portolan_types::Protocol;

use super::attach::describe_to_others;
use super::lifecycle::settle_open;
use crate::migration::fallback::become_kernels;
use crate::migration::finish::finish_all_left;
use crate::migration::{
    Destination, delegate, give_back, make_relayed, registration, relay_for_others, reopen,
};
use crate::process::Process;
use crate::process::inside;
use crate::process::vfork::{own_memory, shares_memory};
use crate::runtime::unregistered::Closed;
use crate::socket::table;
use crate::socket::{Socket, SocketPhase, SocketState, UseHere};
use crate::threads::start::{self, here};
use crate::threads::successor;

/// Called before another process gets the descriptors.
pub fn before_fork() {
    await_server();
    end_delegations(Closed::Kept);
    let _inside = inside::enter();
    for (_, socket) in table::sockets() {
        socket.share();
    }
}

/// While the server is being restarted, a connection that is here gets another descriptor, which copies of the present one
/// would never be.
fn await_server() {
    if let Some(process) = Process::running()
        && !shares_memory()
        && !inside::is_inside()
    {
        let _inside = inside::enter();
        let is_lost = process.control.has_hung_up();
        for (_, socket) in table::sockets() {
            let is_unknown = is_lost || socket.is_unknown_to(process.incarnation());
            let is_here = socket.phase() == SocketPhase::Cached;
            if is_unknown && is_here && socket.protocol == Protocol::Tcp {
                reopen::adopt_next(process, &socket);
            }
        }
    }
}

/// Connections that wait to be accepted are in this process's memory, where no other process could accept them, as are
/// those that the server does not know.
fn end_delegations(closed: Closed) {
    if let Some(process) = Process::running()
        && !shares_memory()
        && !inside::is_inside()
    {
        let _inside = inside::enter();
        delegate::end_all(process);
        registration::register_all_of(process, closed);
        if closed == Closed::HandedOver {
            finish_all_left(process);
        }
    }
}

/// The last step before a fork: keeps other threads out of the library until it is done.
pub fn freeze() {
    inside::hold_others();
    // The child does not have the rings, but keeps the pieces that the program has of them.
    if let Some(process) = Process::running()
        && !inside::is_inside()
    {
        process.lock().channel.detach_loans();
    }
}

pub fn after_fork_in_parent() {
    inside::let_others_go();
}

/// The child has no channel yet; it gets one when it first needs a session of its own.
pub fn after_fork_in_child() {
    pi::forget_number();
    let _inside = inside::forget_others();
    own_memory();
    Process::note_fork();
    start::close_hidden();
    for (_, socket) in table::sockets() {
        let away = SocketState::HeldElsewhere {
            use_here: UseHere::Before,
        };
        match socket.phase() {
            SocketPhase::Cached => socket.become_unless_closed(away),
            SocketPhase::Connecting => socket.become_unless_closed(SocketState::Closed),
            // A socket that is new to the server becomes two sessions, if both processes open it.
            _ => {}
        }
    }
    start::forget_server();
}

/// Called when the program ends by itself: its connections are closed in order when the last
/// descriptors are closed, and data written to them until then arrives.
pub fn before_exit() {
    // In a child of vfork the sessions are the parent's. A handler that could not be deferred may have
    // interrupted a call that holds a lock: then the server sees the descriptors closed, as after a kill.
    if let Some(process) = Process::running()
        && !shares_memory()
        && !inside::is_inside()
    {
        let _inside = inside::enter();
        let listeners = process.lock().delegations.ids();
        for listener in listeners {
            delegate::leave(process, listener);
        }
        registration::register_all_of(process, Closed::HandedOver);
        finish_all_left(process);
        process.lock().abort_delegations(clock::now());
        for (fd, socket) in table::sockets() {
            settle_open(process, fd, &socket);
            let is_here = socket.phase() == SocketPhase::Cached;
            if is_here && process.lock().is_local(socket.slot()) {
                // The server closes it as the kernel would.
                continue;
            }
            if is_here && socket.is_shared() && socket.protocol == Protocol::Udp {
                become_kernels(fd, &socket);
            }
            let to = if socket.is_shared() {
                Destination::Park
            } else {
                Destination::Relay
            };
            give_back(process, &socket, to);
        }
        // The final statistics of this process; the background thread may not have published for a while.
        process.publish(&mut process.lock());
    }
}

/// Called before another program replaces this one, with the descriptors that are not marked
/// `FD_CLOEXEC`. Returns true if sockets are among them.
pub fn before_exec() -> bool {
    if table::is_empty() {
        return false;
    }
    if shares_memory() {
        return before_exec_of_borrower();
    }
    end_delegations(Closed::HandedOver);
    let (inherited, closed): (Vec<_>, Vec<_>) = table::sockets()
        .into_iter()
        .partition(|(fd, _)| is_inherited(*fd));
    for (fd, socket) in &inherited {
        leave_to_kernel(*fd, socket);
    }
    // Sessions that end with this program end in order; if the exec fails, each comes back with its
    // next use.
    if let Some(process) = Process::running() {
        for (fd, socket) in closed {
            settle_open(process, fd, &socket);
            give_back(process, &socket, Destination::Park);
        }
    }
    !inherited.is_empty()
}

/// A child of vfork has its own descriptors, and its parent's table. The parent's background thread
/// returns the sessions.
fn before_exec_of_borrower() -> bool {
    before_fork();
    let mut has_any = false;
    for fd in descriptor::all_open() {
        let Ok(near) = descriptor::borrow(fd) else {
            continue;
        };
        if !is_inherited(fd) || !unix::is_pair_end(near) {
            continue;
        }
        let ask = |request| Process::ask_briefly(request, near);
        let Ok((ReplyBody::Probed(Some(probed)), _)) = ask(RequestBody::Probe) else {
            continue;
        };
        has_any = true;
        if let ProbedState::Connected { .. } = probed.standing {
            let session = probed.session;
            // A lost session shows as the end of its descriptor.
            let reader = Reader::Other;
            let _ = ask(RequestBody::Relay { session, reader });
        }
    }
    has_any
}

fn is_inherited(fd: RawFd) -> bool {
    descriptor::is_close_on_exec(fd).is_ok_and(|closes| !closes)
}

/// Called before the descriptor is sent to another process, which may not know Portolan.
pub fn give_away(fd: RawFd) {
    if let Some(socket) = table::socket(fd) {
        hand_out(fd, &socket);
    }
}

/// Called when another process gets the descriptor. Sessions to accept arrive on a listener's descriptor anyway.
fn hand_out(fd: RawFd, socket: &Arc<Socket>) {
    share_with_others(socket);
    if socket.protocol == Protocol::Tcp {
        relay_for_others(fd, socket, here);
    }
    become_kernels(fd, socket);
}

fn share_with_others(socket: &Socket) {
    if let Some(process) = Process::running() {
        registration::register_for_others(process, socket);
    }
    socket.share();
    end_delegation_of(socket);
    describe_to_others(socket);
}

fn end_delegation_of(socket: &Socket) {
    if socket.phase() == SocketPhase::Listening
        && let Some(process) = Process::running()
        && let Some(session) = socket.setup().session
    {
        delegate::end(process, session);
    }
}

/// Called when this process will lose its knowledge of its sockets.
fn leave_to_kernel(fd: RawFd, socket: &Arc<Socket>) {
    share_with_others(socket);
    if socket.protocol == Protocol::Tcp {
        make_relayed(fd, socket, here);
    }
    become_kernels(fd, socket);
}

/// The server may become unreachable, in another root directory. A process that has dealt with it
/// registers before, since it may accept or open sockets there (vsftpd's parents do, which have
/// closed theirs). If that fails, connections that are held elsewhere are relayed.
pub fn before_chroot() {
    if shares_memory() {
        return;
    }
    let sockets = table::sockets();
    let may_need_server = !sockets.is_empty() || Process::knows_server();
    if (may_need_server && start::start().is_ok()) || Process::running().is_some() {
        return;
    }
    for (fd, socket) in sockets {
        leave_to_kernel(fd, &socket);
    }
}

/// Called before the process is confined to some system calls (seccomp(2)), most likely without those that
/// Portolan needs: its sockets are used by plain reads and writes, and new ones are the kernel's.
pub fn before_confinement() {
    if shares_memory() {
        return;
    }
    for (fd, socket) in table::sockets() {
        leave_to_kernel(fd, &socket);
    }
    Process::renounce();
}

/// Makes a call with the library's own threads stopped: one that the kernel refuses to processes with several
/// threads, that affects only the calling thread, or whose child inherits libc's list of threads.
pub fn without_helper<T>(call: impl FnOnce() -> T) -> T {
    let stopped = match Process::running() {
        Some(process) if !shares_memory() && process.stop_helper() => Some(process),
        _ => None,
    };
    let has_watched = !shares_memory() && successor::stop();
    let result = call();
    // In a child of fork the process is its parent's.
    if let (Some(process), Some(running)) = (stopped, Process::running())
        && std::ptr::eq(process, running)
    {
        process.start_helper();
    }
    if has_watched && !shares_memory() {
        successor::watch();
    }
    result
}

/// As [`without_helper`], for a call that may move the calling thread to another network namespace.
pub fn while_moving<T>(call: impl FnOnce() -> T) -> T {
    if shares_memory() {
        return call();
    }
    Process::before_move();
    let result = without_helper(call);
    start::after_move();
    result
}

/// Called before a fork whose child will be in another network namespace.
pub fn before_fork_to_namespace() {
    if !shares_memory() {
        Process::before_move();
    }
}

/// Called in that child.
pub fn after_fork_to_namespace() {
    start::after_move();
}
