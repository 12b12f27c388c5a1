//! Migration of sessions (ADR 8): they are requested by the first call that needs them, and
//! returned when another process that shares the descriptor requests them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::control::{
    AfterFlush, Blob, Capsule, Reader, ReplyBody, RequestBody, SocketOptionsBlob,
};
use portolan_stack::{Session, TcpSession};
use portolan_sys::shm::SetAside;
use portolan_sys::{clock, descriptor, shm};
use portolan_tcp::{Connection, Events};
use portolan_types::{Protocol, SessionId, Slot};
use rustix::io::Errno;

use super::asking::{SlotReservation, install, open_capsule};
use super::delegate;
use super::fallback::{become_kernels, hand_to_kernel_epolls};
use super::here;
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::{CoreGuard, Process};
use crate::runtime::locals;
use crate::runtime::{Core, NewSession};
use crate::socket::table::{self, File};
use crate::socket::{Setup, Socket, SocketPhase, SocketState, UseHere};

/// A child of fork that still uses its session after this time requests it, and a channel.
const RELAYED_FIRST: Duration = Duration::from_millis(10);

/// Requests a session from the server that it or another process holds. Returns the session, the slot
/// reserved for it, and the socket's options from the last holder; `None` if the server relays it.
pub(super) fn fetch(
    process: &'static Process,
    session: SessionId,
    descriptor: &[BorrowedFd<'_>],
) -> Outcome<Option<(NewSession, Slot, SocketOptionsBlob)>> {
    let reservation = SlotReservation::at(process);
    let slot = reservation.slot();
    let request = RequestBody::Cache { session, slot };
    match process.control.call(request, descriptor) {
        Ok((
            ReplyBody::Cached {
                capsule,
                generation,
                options_blob,
            },
            fds,
        )) => {
            let session = open_capsule(capsule, generation, fds);
            let session = session.map_err(Errno::from_raw_os_error)?;
            let arrival = NewSession::Session(Session::Tcp(Box::new(session)));
            Ok(Some((arrival, reservation.keep(), options_blob)))
        }
        Ok((ReplyBody::CachedLocal { side, options_blob }, mut fds)) => {
            let end = locals::open(fds.pop(), side).map_err(Errno::from_raw_os_error)?;
            let arrival = NewSession::Local(session, Box::new(end));
            Ok(Some((arrival, reservation.keep(), options_blob)))
        }
        Ok((ReplyBody::Relayed, _)) => Ok(None),
        other => Err(refusal(other)),
    }
}

/// Fetches a session that is held elsewhere, or learns that it is relayed.
pub(super) fn obtain(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    if socket.phase() != SocketPhase::HeldElsewhere {
        return Ok(());
    }
    if is_standard(socket) || socket.protocol == Protocol::Udp {
        return have_relayed(fd, socket);
    }
    fetch_away(process, fd, socket)
}

fn fetch_away(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    let setup = socket.setup();
    let (SocketPhase::HeldElsewhere, Some(session)) = (socket.phase(), setup.session) else {
        return Ok(());
    };
    match fetch(process, session, &[descriptor::borrow(fd)?]) {
        Ok(Some((session, slot, options_blob))) => {
            socket.adopt(&options_blob);
            install(process, socket, slot, session);
            Ok(())
        }
        Ok(None) => {
            become_relayed(Some(process), socket);
            Ok(())
        }
        Err(lost) => {
            if let CallError::Errno(Errno::CONNRESET | Errno::BADF) = lost {
                lose(socket);
                return Err(Errno::CONNRESET.into());
            }
            Err(lost)
        }
    }
}

/// Requests a relayed session back, which succeeds if no other process has the descriptor any more; fails
/// with `NotOurs` if it does not. It is requested at increasing intervals, and only by programs with one
/// thread: another thread could be waiting in the kernel for events that would no longer arrive there.
pub(super) fn reclaim(fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    if !socket.may_reclaim(clock::now()) || socket.is_with_kernel() || is_standard(socket) {
        return Err(CallError::NotOurs);
    }
    let process = here().ok_or(CallError::NotOurs)?;
    if !process.has_one_thread() {
        return Err(CallError::NotOurs);
    }
    let setup = socket.setup();
    let session = setup.session.ok_or(CallError::NotOurs)?;
    match fetch(process, session, &[descriptor::borrow(fd)?]) {
        Ok(Some((session, slot, _))) => {
            socket.note_return();
            install(process, socket, slot, session);
            Ok(())
        }
        // It is used as before.
        Ok(None) | Err(_) => Err(CallError::NotOurs),
    }
}

/// Is it a standard stream? libc reads and writes these by calls that the library does not see.
fn is_standard(socket: &Arc<Socket>) -> bool {
    table::numbers_of(socket)
        .into_iter()
        .any(is_standard_stream)
}

pub(super) fn is_standard_stream(fd: RawFd) -> bool {
    (0..=2).contains(&fd)
}

/// Has the server relay a session, so that every holder of the descriptor can use it.
pub(super) fn make_relayed(fd: RawFd, socket: &Arc<Socket>) {
    bring_options(fd, socket);
    match (socket.phase(), Process::running()) {
        (SocketPhase::Cached, Some(process)) => give_back(process, socket, Destination::Relay),
        (SocketPhase::HeldElsewhere, _) => {
            // A lost session shows as the end of its descriptor.
            let _ = have_relayed(fd, socket);
        }
        _ => {}
    }
}

/// Options set on an unused session are only here: the session is fetched first, to leave with its
/// options.
fn bring_options(fd: RawFd, socket: &Arc<Socket>) {
    if socket.accepted_unused()
        && !socket.options().is_empty()
        && let Some(process) = here()
    {
        // If it cannot be fetched the server relays it as it is.
        let _ = fetch_away(process, fd, socket);
    }
}

/// As [`make_relayed`], for another process. Here the session becomes held elsewhere, unless its events are watched.
pub(super) fn relay_for_others(fd: RawFd, socket: &Arc<Socket>) {
    if socket.is_watched() {
        return make_relayed(fd, socket);
    }
    bring_options(fd, socket);
    match (socket.phase(), Process::running()) {
        (SocketPhase::Cached, Some(process)) => give_back(process, socket, Destination::Others),
        (SocketPhase::HeldElsewhere, _) => {
            let (session, reader) = (socket.setup().session, Reader::Other);
            if let (Some(session), Ok(near)) = (session, descriptor::borrow(fd)) {
                // A lost session shows as the end of its descriptor.
                let _ = Process::ask(RequestBody::Relay { session, reader }, near);
            }
        }
        _ => {}
    }
}

/// Has a session that is held elsewhere relayed, or finds it lost; a UDP socket becomes the kernel's. Needs no channel.
pub(super) fn have_relayed(fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    if socket.protocol == Protocol::Udp {
        if socket.phase() == SocketPhase::HeldElsewhere {
            become_kernels(fd, socket);
        }
        return Ok(());
    }
    let setup = socket.setup();
    let (SocketPhase::HeldElsewhere, Some(session)) = (socket.phase(), setup.session) else {
        return Ok(());
    };
    if has_relayed(fd, socket, session)? {
        Ok(())
    } else {
        lose(socket);
        Err(Errno::CONNRESET.into())
    }
}

/// Has the server relay the session for this process. Returns whether it does.
fn has_relayed(fd: RawFd, socket: &Arc<Socket>, session: SessionId) -> Result<bool, Errno> {
    let reader = Reader::Sender;
    let request = RequestBody::Relay { session, reader };
    let reply = Process::ask(request, descriptor::borrow(fd)?);
    let is_relayed = matches!(reply, Some((ReplyBody::Relayed, _)));
    if is_relayed {
        become_relayed(Process::running(), socket);
    }
    Ok(is_relayed)
}

/// In a child of fork without a channel: the call continues in the kernel (`NotOurs`) if the server relays the session.
pub(super) fn relay_first(fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    if socket.protocol != Protocol::Tcp
        || !socket.options().are_of_listeners()
        || is_standard(socket)
    {
        return Ok(());
    }
    let Some(session) = socket.setup().session else {
        return Ok(());
    };
    if !has_relayed(fd, socket, session)? {
        // Requesting the session will show why.
        return Ok(());
    }
    socket.note_first_relay(clock::now() + RELAYED_FIRST);
    Err(CallError::NotOurs)
}

/// Marks the session as lost, and wakes threads that wait for it.
pub(super) fn lose(socket: &Arc<Socket>) {
    // Waiters are signalled with the core locked.
    let _core = Process::running().map(Process::lock);
    socket.become_unless_closed(SocketState::Closed);
    socket.notify(Events::CLOSED);
}

/// Marks the socket as relayed: its calls go to the kernel, and its events come from there.
fn become_relayed(process: Option<&'static Process>, socket: &Arc<Socket>) {
    // Waiters are signalled with the core locked.
    let _core = process.map(Process::lock);
    socket.become_unless_closed(SocketState::Relayed);
    hand_to_kernel_epolls(socket);
    socket.notify(Events::READABLE | Events::WRITABLE | Events::CLOSED);
}

/// Where a session migrates to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// To the server, which moves its data through the descriptor.
    Relay,
    /// To the server, which relays it for another process, until a process requests it that may have it.
    Others,
    /// To the server, for the next process that requests it.
    Park,
}

/// Prepares a session to leave: its frames go to the server from now on, and all frames that arrived before
/// are processed. It sends nothing more from here, since its row is no longer this process's.
fn depart<'a>(process: &'a Process, setup: &Setup, slot: Slot) -> CoreGuard<'a> {
    let mut core = process.lock();
    let (Some(session), false) = (setup.session, core.is_local(slot)) else {
        return core;
    };
    core.poll(clock::now());
    core.stack.suspend_tx(slot);
    drop(core);
    // If the server cannot wait for it, some packets take a detour.
    let _ = process
        .control
        .call(RequestBody::BeginFlush { session }, &[]);
    let mut core = process.lock();
    core.take_in_all(clock::now());
    core
}

/// The session cannot be packed, for lack of descriptors or memory, and stays here.
fn stay(core: &mut Core, setup: &Setup, slot: Slot) {
    core.stack.resume_tx(slot);
    let stay = |session| RequestBody::AbortFlush { session };
    core.outbox.extend(setup.session.map(stay));
}

/// Returns a TCP session that is here. If the server does not accept it, it is lost.
pub(super) fn give_back(process: &Process, socket: &Arc<Socket>, to: Destination) {
    let slot_here = || match socket.state() {
        SocketState::Cached { slot } if socket.protocol == Protocol::Tcp => Some(slot),
        _ => None,
    };
    // In a child of fork the lock of a socket that is not here may be held forever.
    if slot_here().is_none() {
        return;
    }
    let setup = socket.setup();
    let Some(slot) = slot_here() else { return };
    let mut core = depart(process, &setup, slot);
    if slot_here() != Some(slot) {
        // It was closed in between, and its session with it.
        return;
    }
    let Some((id, outgoing)) = pack(&mut core, slot) else {
        return stay(&mut core, &setup, slot);
    };
    core.release(slot);
    core.poll_tx(clock::now());
    let away = SocketState::HeldElsewhere {
        use_here: UseHere::Before,
    };
    let (then, state) = match to {
        Destination::Relay => (AfterFlush::Relay(Reader::Sender), SocketState::Relayed),
        Destination::Others => (AfterFlush::Relay(Reader::Other), away),
        Destination::Park => (AfterFlush::Park, away),
    };
    // Data that other threads write to a relayed descriptor waits there; threads that request a
    // session held elsewhere wait for `setup`.
    socket.become_unless_closed(state);
    drop(core);
    let fds: Vec<_> = outgoing.fds.iter().map(AsFd::as_fd).collect();
    let request = RequestBody::Flush {
        session: id,
        capsule: outgoing.capsule,
        then,
        options_blob: socket.options_blob(),
    };
    let moved = process.control.call(request, &fds);
    // Waiters are signalled with the core locked.
    let _core = process.lock();
    if !matches!(moved, Ok((ReplyBody::Done, _))) {
        socket.set_error(libc::ECONNABORTED);
        socket.become_unless_closed(SocketState::Closed);
    }
    if to == Destination::Relay {
        hand_to_kernel_epolls(socket);
    }
    socket.notify(Events::READABLE | Events::WRITABLE | Events::CLOSED);
    drop(setup);
}

/// Puts much unread data into memory of its own, which the next holder reads without a copy. If
/// that is not possible it goes in the capsule.
fn set_aside(connection: &mut Connection) {
    let length = connection.arrived();
    let is_worth_it = length >= shm::WORTH_SETTING_ASIDE || connection.handoff().is_some();
    if is_worth_it && let Ok(memory) = SetAside::write(length, connection.arrived_pieces()) {
        connection.set_aside(Arc::new(memory));
    }
}

/// A session and the descriptors that travel with it.
pub(super) struct OutgoingCapsule {
    pub(super) capsule: Capsule,
    pub(super) fds: Vec<OwnedFd>,
}

impl OutgoingCapsule {
    /// The capsule of a local session: all its state is in shared memory.
    pub(super) fn empty() -> OutgoingCapsule {
        OutgoingCapsule {
            capsule: Blob::Inline(Vec::new()).into(),
            fds: Vec::new(),
        }
    }

    pub(super) fn of(session: &mut TcpSession) -> Option<OutgoingCapsule> {
        set_aside(&mut session.connection);
        let unread = match session.connection.handoff() {
            Some(prefix) => {
                let memory = prefix.memory().as_any().downcast_ref::<SetAside>()?;
                Some((memory, prefix.start(), prefix.length()))
            }
            None => None,
        };
        let (capsule, fds) = shm::pack_capsule(session.to_capsule(), unread).ok()?;
        Some(OutgoingCapsule { capsule, fds })
    }
}

/// Packs the session at `slot`.
fn pack(core: &mut Core, slot: Slot) -> Option<(SessionId, OutgoingCapsule)> {
    if let Some(id) = core.take_local(slot, |_| {}) {
        return Some((id, OutgoingCapsule::empty()));
    }
    core.settle_lending(slot);
    let session = core.stack.tcp(slot)?;
    Some((session.id, OutgoingCapsule::of(session)?))
}

/// Returns a session that the server recalls for another process; a UDP session goes to the kernel.
/// If threads wait for its events it must be relayed: they would get none from elsewhere.
pub(crate) fn yield_session(process: &Process, id: SessionId) {
    if delegate::end_named(process, id) {
        return;
    }
    let wanted = table::all().into_iter().find_map(|(fd, file)| match file {
        File::Socket(socket) if socket.phase() == SocketPhase::Cached => {
            let is_it = socket.setup().session == Some(id);
            is_it.then_some((fd, socket))
        }
        File::Socket(_) | File::Epoll(_) => None,
    });
    let Some((fd, socket)) = wanted else { return };
    if socket.protocol == Protocol::Udp {
        return become_kernels(fd, &socket);
    }
    let to = if socket.is_watched() {
        Destination::Relay
    } else {
        Destination::Park
    };
    give_back(process, &socket, to);
}
