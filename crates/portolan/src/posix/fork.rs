//! `fork`, `exec`, descriptors that are given away, and the end of a program. Fork costs nothing: a
//! session stays where it is, and the child asks for it when it needs it (ADR 8). What somebody gets
//! who may know nothing of Portolan is relayed, as is what a program leaves behind when it ends.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use portolan_proto::control::{ProbedState, Reader, ReplyBody, RequestBody};
use portolan_sys::{clock, descriptor, pi, unix};
use portolan_types::Protocol;

use super::attach::describe_to_others;
use super::delegate;
use super::fallback::become_kernels;
use super::migrate::{Destination, give_back, make_relayed, relay_for_others};
use crate::descriptors;
use crate::process::Process;
use crate::process::inside;
use crate::process::successor;
use crate::socket::table::{self, File};
use crate::socket::{Socket, SocketPhase, SocketState, UseHere};
use crate::wait::Waiter;

/// Another process is about to have the descriptors.
pub fn before_fork() {
    end_delegations();
    let _inside = inside::enter();
    for (_, socket) in sockets() {
        socket.share();
    }
}

/// What waits to be accepted is in this process's memory: who gets the descriptor could not accept it.
fn end_delegations() {
    if let Some(process) = Process::running()
        && !shares_memory()
        && !inside::is_inside()
    {
        let _inside = inside::enter();
        delegate::end_all(process);
    }
}

/// The last before a fork: no other thread is inside the library until it is done.
pub fn freeze() {
    inside::hold_others();
    // The child does not have the rings, but what the program has of them.
    if let Some(process) = Process::running()
        && !inside::is_inside()
    {
        process.lock().channel.detach_loans();
    }
}

pub fn after_fork_in_parent() {
    inside::let_others_go();
}

/// The child has no channel yet; it gets one with its first own session.
pub fn after_fork_in_child() {
    pi::forget_number();
    let _inside = inside::forget_others();
    own_memory();
    Process::note_fork();
    close_hidden();
    for (_, socket) in sockets() {
        let away = SocketState::HeldElsewhere {
            use_here: UseHere::Before,
        };
        match socket.phase() {
            SocketPhase::Cached => socket.become_unless_closed(away),
            SocketPhase::Connecting => socket.become_unless_closed(SocketState::Closed),
            // Of one that the server does not know there will be two, if both open it.
            _ => {}
        }
    }
    forget_server();
}

/// Gives up the connection to the server, with all that came by it. Only for a process of one thread, without sockets.
pub(crate) fn part_with_server() {
    close_hidden();
    forget_server();
}

fn close_hidden() {
    for fd in descriptors::take_hidden() {
        descriptor::close(fd);
    }
}

fn forget_server() {
    for (_, file) in table::all() {
        if let File::Epoll(set) = file {
            set.inherit();
        }
    }
    Process::forget();
    successor::forget();
    Waiter::forget_mine();
}

/// The program ends by itself: its connections are closed in order when the last descriptors go,
/// and what is still written to them until then arrives.
pub fn before_exit() {
    // In a child of vfork the sessions are the parent's. A handler that could not wait may have
    // interrupted a call with a lock held: then the server finds the descriptors gone, as after a kill.
    if let Some(process) = Process::running()
        && !shares_memory()
        && !inside::is_inside()
    {
        let _inside = inside::enter();
        process.lock().abort_delegations(clock::now());
        for (fd, socket) in sockets() {
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
        // The last that is counted of this process; the helper may not have come by for a while.
        process.publish(&process.lock());
    }
}

/// Another program is about to take this one's place, with the descriptors that are not marked
/// `FD_CLOEXEC`. True if sockets are among them.
pub fn before_exec() -> bool {
    if table::is_empty() {
        return false;
    }
    if shares_memory() {
        return before_exec_of_borrower();
    }
    end_delegations();
    let (inherited, closed): (Vec<_>, Vec<_>) =
        sockets().into_iter().partition(|(fd, _)| is_inherited(*fd));
    for (fd, socket) in &inherited {
        leave_to_kernel(*fd, socket);
    }
    // What ends with this program ends in order; if there is no other program after all, it comes
    // back with its next use.
    if let Some(process) = Process::running() {
        for (_, socket) in closed {
            give_back(process, &socket, Destination::Park);
        }
    }
    !inherited.is_empty()
}

/// A child of vfork has its own descriptors, and its parent's table. The sessions come back from the
/// parent by its helper.
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
        let Some((ReplyBody::Probed(Some(probed)), _)) = ask(RequestBody::Probe) else {
            continue;
        };
        has_any = true;
        if let ProbedState::Connected { .. } = probed.standing {
            let session = probed.session;
            // One that is lost shows as the end of its descriptor.
            let reader = Reader::Other;
            let _ = ask(RequestBody::Relay { session, reader });
        }
    }
    has_any
}

fn is_inherited(fd: RawFd) -> bool {
    descriptor::is_close_on_exec(fd).is_ok_and(|closes| !closes)
}

/// The descriptor is about to be sent to somebody, who may not know Portolan.
pub fn give_away(fd: RawFd) {
    if let Some(socket) = table::socket(fd) {
        hand_out(fd, &socket);
    }
}

/// The descriptor is about to be used by what no symbol of ours sees. True if that works.
pub fn before_lending(fd: RawFd) -> bool {
    table::socket(fd).is_none_or(|socket| {
        if socket.protocol == Protocol::Tcp {
            socket.leave_to_kernel();
            make_relayed(fd, &socket);
        }
        matches!(
            socket.phase(),
            SocketPhase::Relayed | SocketPhase::Listening
        )
    })
}

/// Somebody else gets the descriptor. Sessions to accept come on a listener's descriptor anyway.
fn hand_out(fd: RawFd, socket: &Arc<Socket>) {
    share_with_others(socket);
    if socket.protocol == Protocol::Tcp {
        relay_for_others(fd, socket);
    }
    become_kernels(fd, socket);
}

fn share_with_others(socket: &Socket) {
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

/// This process will know nothing of its sockets any more.
fn leave_to_kernel(fd: RawFd, socket: &Arc<Socket>) {
    share_with_others(socket);
    if socket.protocol == Protocol::Tcp {
        make_relayed(fd, socket);
    }
    become_kernels(fd, socket);
}

/// The server may be out of reach from now on, in another root directory: who has had to do with it registers before, since
/// it may accept there, or open more (vsftpd's parents do, which have closed what they had). Without that connections that
/// are elsewhere are relayed.
pub fn before_chroot() {
    if shares_memory() {
        return;
    }
    let sockets = sockets();
    let may_need_server = !sockets.is_empty() || Process::knows_server();
    if (may_need_server && Process::start().is_ok()) || Process::running().is_some() {
        return;
    }
    for (fd, socket) in sockets {
        leave_to_kernel(fd, &socket);
    }
}

/// From now on the process may make only some system calls (seccomp(2)), and most likely not those that
/// Portolan needs: what it has is used by plain reads and writes, and what it opens is the kernel's.
pub fn before_confinement() {
    if shares_memory() {
        return;
    }
    for (fd, socket) in sockets() {
        leave_to_kernel(fd, &socket);
    }
    Process::renounce();
}

/// Makes a call before which this process must have no threads but the program's: one that the kernel refuses to processes of
/// several threads, that changes only what the calling thread has, or whose child takes libc's list of threads along.
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

/// As [`without_helper`], for a call that may take the calling thread to another network namespace.
pub fn while_moving<T>(call: impl FnOnce() -> T) -> T {
    if shares_memory() {
        return call();
    }
    Process::before_move();
    let result = without_helper(call);
    Process::after_move();
    result
}

/// The child of the next fork will be in another network namespace.
pub fn before_fork_to_namespace() {
    if !shares_memory() {
        Process::before_move();
    }
}

/// In that child.
pub fn after_fork_to_namespace() {
    Process::after_move();
}

/// The process whose memory this is.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// From now on this process is known from a child of vfork.
pub(super) fn own_memory() {
    OWNER.store(own_id(), Ordering::Relaxed);
}

/// Is this a child of vfork? It has descriptors of its own, and the sockets in memory are its
/// parent's.
pub fn shares_memory() -> bool {
    ![0, own_id()].contains(&OWNER.load(Ordering::Relaxed))
}

fn own_id() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
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
