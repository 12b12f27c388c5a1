//! From `socket` to `close`, and duplication.

use std::os::fd::{AsFd, IntoRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use portolan_local::Stream;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_stack::Session;
use portolan_sys::unix::{self, PairKind};
use portolan_sys::{clock, descriptor};
use portolan_tcp::{Events, StateName};
use portolan_types::{Instant, Protocol, SessionId};
use rustix::io::Errno;

use super::asking::denial;
use super::bind::bind_as_asked;
use super::find::find_here;
use crate::descriptors::{self, InternalFd};
use crate::migration::active_open::complete_connect;
use crate::migration::delegate;
use crate::migration::fallback::{leave_to_sharers, return_from_kernel_epolls};
use crate::migration::finish::{finish, flush_local};
use crate::migration::{Destination, give_back, is_standard_stream, make_relayed, registration};
use crate::outcome::{CallError, Outcome};
use crate::process::vfork::shares_memory;
use crate::process::{Absent, Process};
use crate::runtime::orphans::Orphan;
use crate::socket::near_end::{enter, replace_fds};
use crate::socket::table::{self, File};
use crate::socket::{Family, RECEIVE, SEND, Setup, Socket, SocketPhase, SocketState, Unregistered};
use crate::threads::sleep::{Sleep, deadline_after};
use crate::threads::start::{for_new_socket, here};
use crate::threads::successor;
use crate::wait::epoll::Epoll;
use crate::wait::waiter::Waiter;

pub fn socket(domain: i32, kind: i32, protocol: i32) -> Outcome<RawFd> {
    let family = match domain {
        libc::AF_INET => Family::V4,
        libc::AF_INET6 => Family::V6,
        _ => return Err(CallError::NotOurs),
    };
    let flags = kind & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let (protocol, kind) = match (kind & !flags, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => (Protocol::Tcp, PairKind::Stream),
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => (Protocol::Udp, PairKind::SeqPacket),
        _ => return Err(CallError::NotOurs),
    };
    if Socket::has_unseen_waits() {
        return Err(CallError::NotOurs);
    }
    for_new_socket().map_err(|absent| match absent {
        Absent::UseKernel => CallError::NotOurs,
        Absent::Refuse => CallError::Errno(Errno::NETDOWN),
    })?;
    // It gets a peer once the server knows it.
    let near = unix::without_peer(kind)?;
    Ok(enter(near, Arc::new(Socket::new(family, protocol)), flags)?)
}

pub fn shutdown(fd: RawFd, how: i32) -> Outcome<()> {
    let (socket, process) = find_here(fd)?;
    complete_connect(process, fd, &socket);
    if !matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR) {
        return Err(Errno::INVAL.into());
    }
    match socket.phase() {
        SocketPhase::Cached => {}
        // Linux's `inet_shutdown` disconnects it; threads that wait for the outcome get a reset.
        SocketPhase::Connecting => {
            socket.set_error(libc::ECONNRESET);
            // The next `connect` opens anew.
            socket.take_news();
            return reset_to_idle(process, fd, &socket);
        }
        SocketPhase::Idle if socket.protocol == Protocol::Udp => {}
        SocketPhase::Listening if how == libc::SHUT_WR => return Ok(()),
        SocketPhase::Listening => return stop_listening(process, fd, &socket),
        SocketPhase::Relayed => return Err(CallError::NotOurs),
        SocketPhase::Idle => {
            // As on Linux: the call fails, but poll reports the shutdown.
            socket.shut(directions(how));
            socket.notify(Events::PEER_CLOSED | Events::WRITABLE);
            return Err(Errno::NOTCONN.into());
        }
        _ => return Err(Errno::NOTCONN.into()),
    }
    let mut core = process.lock();
    let now = clock::now();
    let slot = socket.slot();
    if socket.protocol == Protocol::Udp {
        socket.shut(directions(how));
        socket.notify(Events::PEER_CLOSED | Events::WRITABLE);
        let session = match socket.phase() {
            SocketPhase::Cached => core.stack.udp(slot),
            _ => None,
        };
        // As on Linux: without a peer the call fails, but takes effect.
        let has_peer = session.is_some_and(|session| session.remote.is_some());
        return if has_peer {
            Ok(())
        } else {
            Err(Errno::NOTCONN.into())
        };
    }
    if let Some(stream) = core.stream(slot) {
        if has_ended(stream) {
            return Err(Errno::NOTCONN.into());
        }
        if how != libc::SHUT_RD {
            stream.shutdown_send(now);
        }
        if how != libc::SHUT_WR {
            stream.shutdown_receive();
        }
    }
    core.touch(slot);
    core.poll_tx(now);
    socket.notify(Events::PEER_CLOSED | Events::WRITABLE);
    Ok(())
}

fn directions(how: i32) -> u8 {
    match how {
        libc::SHUT_RD => RECEIVE,
        libc::SHUT_WR => SEND,
        _ => RECEIVE | SEND,
    }
}

/// Is the connection over, as Linux sees it? There TIME-WAIT is not a state of the socket.
pub(super) fn has_ended(stream: &dyn Stream) -> bool {
    matches!(stream.state(), StateName::Closed | StateName::TimeWait)
}

/// Makes the listener an idle socket again; as on Linux, it keeps a port that the application chose.
fn stop_listening(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    let mut setup = socket.setup();
    let (SocketPhase::Listening, Some(session)) = (socket.phase(), setup.session) else {
        // Lost the race to another thread.
        return Err(Errno::NOTCONN.into());
    };
    let (near, far) = process.control.replacing_pair(PairKind::SeqPacket)?;
    registration::register_all(process, session);
    process.lock().abort_delegation(clock::now(), session);
    let request = RequestBody::StopListening { session };
    let answer = process.control.call(request, &[far.as_fd(), near.as_fd()]);
    if !matches!(answer, Ok((ReplyBody::Done, _))) {
        drop(setup);
        return reset_to_idle(process, fd, socket);
    }
    setup.backlog = 0;
    setup.carries_messages = true;
    setup.port_token = None;
    setup.give_up_unchosen_port();
    socket.become_unless_closed(SocketState::Idle);
    // The old descriptor hangs up, which wakes other processes that sleep in `accept` on it.
    replace_fds(socket, &near)?;
    drop(setup);
    return_from_kernel_epolls(socket);
    let core = process.lock();
    socket.notify(Events::CLOSED);
    drop(core);
    Ok(())
}

/// Returns the socket to its state before it was connected or listened.
pub(super) fn reset_to_idle(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
) -> Outcome<()> {
    let mut setup = socket.setup();
    let bound = setup.local.filter(|_| setup.is_bound).map(|mut local| {
        if !setup.has_chosen_port {
            local.set_port(0);
        }
        local
    });
    // An address chosen by the application is kept.
    let bound = bound.filter(|local| local.port() != 0 || !local.ip().is_unspecified());
    socket.reopen();
    leave_session(
        process,
        socket,
        SocketState::Idle,
        (setup.session, Ending::Abort),
    );
    begin_anew(socket, &mut setup)?;
    drop(setup);
    let core = process.lock();
    socket.notify(Events::CLOSED);
    drop(core);
    match bound {
        Some(local) => bind_as_asked(process, fd, socket, local),
        None => Ok(()),
    }
}

/// Gives a bound TCP socket that is about to connect a pair that carries bytes, not messages.
pub(super) fn carry_bytes(
    process: &Process,
    socket: &Arc<Socket>,
    setup: &mut Setup,
) -> Outcome<()> {
    if !setup.carries_messages {
        return Ok(());
    }
    let session = setup.session.ok_or(Errno::INVAL)?;
    let (near, far) = process.control.replacing_pair(PairKind::Stream)?;
    let request = RequestBody::ReplaceDescriptor { session };
    match process.control.call(request, &[far.as_fd(), near.as_fd()]) {
        Ok((ReplyBody::Done, _)) => {
            setup.carries_messages = false;
            Ok(replace_fds(socket, &near)?)
        }
        other => Err(denial(socket, setup, other)),
    }
}

/// Detaches the socket from the server, which keeps the far end of the former pair until that hangs up.
fn begin_anew(socket: &Arc<Socket>, setup: &mut Setup) -> Result<(), Errno> {
    let kind = match socket.protocol {
        Protocol::Tcp => PairKind::Stream,
        Protocol::Udp => PairKind::SeqPacket,
    };
    replace_fds(socket, unix::without_peer(kind)?)?;
    socket.note_deferred(false);
    socket.set_stands_in(false);
    socket.note_registered();
    *setup = Setup::default();
    Ok(())
}

pub fn close(fd: RawFd) -> Outcome<()> {
    if descriptors::is_internal(fd) {
        return Err(CallError::Errno(Errno::BADF));
    }
    if !descriptors::is_ours(fd) || shares_memory() {
        return Err(CallError::NotOurs);
    }
    let listening = listening_behind(fd);
    forget(fd);
    descriptor::close(fd);
    if let (Some(session), Some(process)) = (listening, Process::running()) {
        // If that was the last copy, the port no longer listens when `close` returns.
        let _ = process.control.call(RequestBody::Release { session }, &[]);
    }
    Ok(())
}

fn listening_behind(fd: RawFd) -> Option<SessionId> {
    let socket = table::socket(fd).filter(|socket| socket.phase() == SocketPhase::Listening)?;
    socket.setup().session
}

/// Called when `fd` ceases to refer to its file, as by `dup2` onto it.
pub fn forget(fd: RawFd) {
    if !descriptors::is_ours(fd) || shares_memory() {
        return;
    }
    if let (Some(socket), Some(process)) = (table::socket(fd), Process::running()) {
        settle_open(process, fd, &socket);
    }
    match table::remove(fd) {
        Some(File::Socket(socket)) => {
            for (epoll, member) in socket.epolls() {
                if member == fd {
                    let name = epoll.rename(fd);
                    socket.rename_in_epoll(&epoll, fd, name);
                }
            }
            if socket.is_shared() && table::numbers_of(&socket).is_empty() {
                leave_to_sharers(fd, &socket);
            }
            if !drop_reference(&socket) && table::numbers_of(&socket).is_empty() {
                keep_open(fd, &socket);
            }
        }
        Some(File::Epoll(epoll)) => match table::number_of_set(&epoll) {
            Some(other) => epoll.move_to(other),
            None => leave_all(&epoll),
        },
        None => {}
    }
}

/// An established connection that nobody has seen would end by a FIN; so an open whose outcome is pending must not be
/// abandoned. The server cancels an open that has none; if it cancels nothing, the outcome is on the descriptor.
pub(super) fn settle_open(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) {
    complete_connect(process, fd, socket);
    if socket.phase() != SocketPhase::Connecting || socket.is_shared() || socket.is_unregistered() {
        return;
    }
    if table::numbers_of(socket) != [fd] {
        return;
    }
    let Some(session) = socket.setup().session else {
        return;
    };
    let released = process.control.call(RequestBody::Release { session }, &[]);
    if matches!(released, Ok((ReplyBody::Error { .. }, _))) {
        complete_connect(process, fd, socket);
    }
}

fn leave_all(epoll: &Arc<Epoll<Socket>>) {
    for (fd, socket) in epoll.members(|_| true) {
        socket.leave_epoll(epoll, fd);
    }
}

/// Called when the process has one descriptor, or one call in progress, less for the socket. Closes
/// it with the last one, and then returns true.
pub(super) fn drop_reference(socket: &Arc<Socket>) -> bool {
    if !socket.drop_reference() {
        return false;
    }
    for (epoll, member) in socket.epolls() {
        epoll.remove(member);
        socket.leave_epoll(&epoll, member);
    }
    if socket.phase() == SocketPhase::Listening {
        // The port is free when `close` returns.
        socket.setup().port_token = None;
    }
    if let Some(process) = Process::running() {
        let is_stream = socket.phase() == SocketPhase::Cached && socket.protocol == Protocol::Tcp;
        if is_stream && socket.is_shared() {
            give_back(process, socket, Destination::Park);
            socket.become_unless_closed(SocketState::Closed);
            return true;
        }
        let linger = socket.options().linger();
        let ending = if linger.is_some_and(|linger| linger.time.is_zero()) {
            Ending::Abort
        } else {
            Ending::Close
        };
        if is_stream && let Some(linger) = linger.filter(|linger| !linger.time.is_zero()) {
            wait_lingering(process, socket, linger.time);
        }
        let listener = match socket.phase() {
            SocketPhase::Listening => socket.setup().session,
            _ => None,
        };
        if let Some(listener) = listener {
            delegate::leave(process, listener);
            process.lock().busy_listeners.forget(listener);
        }
        let unregistered = registration::give_up(socket);
        leave_session(process, socket, SocketState::Closed, (listener, ending));
        if let Some(Unregistered { pair, .. }) = unregistered {
            process.pairs().put_used(pair, socket);
        }
    }
    true
}

/// A close with `SO_LINGER` waits until the peer has acknowledged all data and the FIN, or the time
/// is over (socket(7)); also for a non-blocking socket.
fn wait_lingering(process: &'static Process, socket: &Arc<Socket>, time: Duration) {
    let waiter = Waiter::mine();
    let slot = socket.slot();
    let mut core = process.lock();
    let now = clock::now();
    if let Some(stream) = core.stream(slot) {
        stream.close(now);
    }
    core.touch(slot);
    core.poll_tx(now);
    drop(core);
    socket.watch(&waiter);
    // A signal ends the wait; the server finishes the rest.
    let _ = process.wait(Sleep::until(deadline_after(Some(time))), |core, _| {
        let stream = core.stream(slot);
        let is_over = stream.is_none_or(|stream| stream.is_flushed());
        is_over.then_some(())
    });
    socket.unwatch(&waiter);
}

/// Keeps the socket open for calls in progress although its last descriptor is about to be closed:
/// the server must not see the hang-up before they return.
fn keep_open(fd: RawFd, socket: &Arc<Socket>) {
    // Without a copy the calls end with the session.
    if let Ok(near) = descriptor::borrow(fd)
        && let Ok(copy) = rustix::io::fcntl_dupfd_cloexec(near, 0)
    {
        socket.setup().kept = Some(InternalFd::new(copy));
    }
}

/// How to end a session that its program no longer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Close,
    Abort,
}

/// Puts the socket into a state without a session, and ends its session if that is here. Otherwise the session ends
/// when the server sees the last copy of the descriptor closed. `listener` is the socket's session if it may be
/// listening.
fn leave_session(
    process: &Process,
    socket: &Arc<Socket>,
    next: SocketState,
    (listener, ending): (Option<SessionId>, Ending),
) {
    let mut core = process.lock();
    let now = clock::now();
    let slot = match (socket.change(next), listener) {
        (Ok(SocketState::Cached { slot }), _) => slot,
        (Ok(SocketState::Connecting { slot }), _) => {
            if !core.abandon_open(slot) {
                core.stack.remove(slot);
            }
            return;
        }
        (Ok(SocketState::Listening), Some(listener)) => {
            return core.abort_delegation(now, listener);
        }
        _ => return,
    };
    core.detach(slot);
    let local = core.take_local(slot, |end| end_stream(end, now, ending));
    if let Some(session) = local {
        drop(core);
        return flush_local(process, session);
    }
    if let Some(Session::Tcp(session)) = core.stack.get_mut(slot) {
        end_stream(&mut session.connection, now, ending);
        core.stack.touch(slot);
        let is_finished_here = core.finish_unregistered(now, slot);
        core.poll_tx(now);
        if is_finished_here {
            return;
        }
    }
    let session = core.stack.take(slot);
    drop(core);
    if let Some(session) = session
        && let Err(session) = finish(process, socket, session)
    {
        // The background thread serves it until there is a server that has it.
        let choices = socket.options().choices();
        let orphan = Orphan { slot, choices };
        process.lock().keep_orphan(clock::now(), orphan, session);
        successor::look_again();
        return;
    }
    process.lock().stack.remove(slot);
}

fn end_stream(stream: &mut dyn Stream, now: Instant, ending: Ending) {
    match ending {
        Ending::Close => stream.close(now),
        Ending::Abort => stream.abort(now),
    }
}

/// The number of a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicate {
    /// The lowest free number from `min` on.
    Any { min: RawFd, cloexec: bool },
    /// Exactly that number, even if it is in use.
    Onto { fd: RawFd, cloexec: bool },
}

pub fn duplicate(fd: RawFd, to: Duplicate) -> Outcome<RawFd> {
    let file = table::find(fd).ok_or(CallError::NotOurs)?;
    if shares_memory() {
        return Err(CallError::NotOurs);
    }
    let near = descriptor::borrow(fd)?;
    let new = match to {
        Duplicate::Any { min, .. } if min < 0 => return Err(Errno::INVAL.into()),
        Duplicate::Any { min, cloexec: true } => {
            rustix::io::fcntl_dupfd_cloexec(near, min)?.into_raw_fd()
        }
        Duplicate::Any {
            min,
            cloexec: false,
        } => {
            let new = rustix::io::fcntl_dupfd_cloexec(near, min)?;
            descriptor::set_close_on_exec(&new, false)?;
            new.into_raw_fd()
        }
        Duplicate::Onto { fd: onto, cloexec } => {
            if descriptors::is_internal(onto) {
                return Err(Errno::BUSY.into());
            }
            forget(onto);
            descriptor::replace(near, onto, cloexec)?;
            onto
        }
    };
    if !descriptors::can_hold(new) {
        descriptor::close(new);
        return Err(Errno::MFILE.into());
    }
    if let File::Socket(socket) = &file {
        socket.add_reference();
        if is_standard_stream(new) {
            make_relayed(fd, socket, here);
        }
    }
    table::insert(new, file);
    Ok(new)
}
