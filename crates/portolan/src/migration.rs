//! Migration of sessions (ADR 8): they are requested by the first call that needs them, and
//! returned when another process that shares the descriptor requests them.

pub(crate) mod active_open;
pub(crate) mod arrival;
pub(crate) mod capsule;
pub(crate) mod delegate;
pub(crate) mod fallback;
pub(crate) mod finish;
pub(crate) mod own_open;
pub(crate) mod part;
pub(crate) mod registration;
pub(crate) mod reopen;

use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::control::{AfterFlush, Reader, ReplyBody, RequestBody};
use portolan_sys::{clock, descriptor, unix};
use portolan_tcp::Events;
use portolan_types::{Protocol, SessionId, Slot};
use rustix::io::Errno;

use crate::migration::arrival::{fetch, install_fetched};
use crate::migration::capsule::OutgoingCapsule;
use crate::migration::fallback::{become_kernels, hand_to_kernel_epolls, lose};
use crate::outcome::{CallError, Outcome};
use crate::process::control::Lost;
use crate::process::{CoreGuard, Process};
use crate::runtime::Core;
use crate::socket::table;
use crate::socket::{Setup, Socket, SocketPhase, SocketState, UseHere};

/// A child of fork that still uses its session after this time requests it, and a channel.
const RELAYED_FIRST: Duration = Duration::from_millis(10);

/// Fetches a session that is held elsewhere, or learns that it is relayed.
pub(crate) fn obtain(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
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
    let near = descriptor::borrow(fd)?;
    let mut fetched = fetch(process, session, &[near]);
    while fetched.is_err()
        && process.control.is_lost()
        && !unix::has_hung_up(near)
        && process.await_server()
    {
        fetched = fetch(process, session, &[near]);
    }
    match fetched {
        Ok(Some(fetched)) => {
            socket.adopt(&fetched.options_blob);
            install_fetched(process, socket, fetched);
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
/// thread (`here_alone`): another thread could be waiting in the kernel for events that would no longer arrive there.
pub(crate) fn reclaim(
    fd: RawFd,
    socket: &Arc<Socket>,
    here_alone: impl FnOnce() -> Option<&'static Process>,
) -> Outcome<()> {
    if !socket.may_reclaim(clock::now()) || socket.is_with_kernel() || is_standard(socket) {
        return Err(CallError::NotOurs);
    }
    let process = here_alone().ok_or(CallError::NotOurs)?;
    let setup = socket.setup();
    let session = setup.session.ok_or(CallError::NotOurs)?;
    match fetch(process, session, &[descriptor::borrow(fd)?]) {
        Ok(Some(fetched)) => {
            socket.note_return();
            install_fetched(process, socket, fetched);
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

pub(crate) fn is_standard_stream(fd: RawFd) -> bool {
    (0..=2).contains(&fd)
}

/// Has the server relay a session, so that every holder of the descriptor can use it. `here` registers this process, if
/// that is necessary.
pub(crate) fn make_relayed(
    fd: RawFd,
    socket: &Arc<Socket>,
    here: impl FnOnce() -> Option<&'static Process>,
) {
    bring_options(fd, socket, here);
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
fn bring_options(fd: RawFd, socket: &Arc<Socket>, here: impl FnOnce() -> Option<&'static Process>) {
    if socket.accepted_unused()
        && !socket.options().is_empty()
        && let Some(process) = here()
    {
        // If it cannot be fetched the server relays it as it is.
        let _ = fetch_away(process, fd, socket);
    }
}

/// Called before the descriptor is used by calls that the library does not see. Returns whether that works.
pub(crate) fn before_lending(fd: RawFd, here: impl FnOnce() -> Option<&'static Process>) -> bool {
    table::socket(fd).is_none_or(|socket| {
        if socket.protocol == Protocol::Tcp {
            socket.leave_to_kernel();
            make_relayed(fd, &socket, here);
        }
        matches!(
            socket.phase(),
            SocketPhase::Relayed | SocketPhase::Listening
        )
    })
}

/// As [`make_relayed`], for another process. Here the session becomes held elsewhere, unless its events are watched.
pub(crate) fn relay_for_others(
    fd: RawFd,
    socket: &Arc<Socket>,
    here: impl FnOnce() -> Option<&'static Process>,
) {
    if socket.is_watched() {
        return make_relayed(fd, socket, here);
    }
    bring_options(fd, socket, here);
    match (socket.phase(), Process::running()) {
        (SocketPhase::Cached, Some(process)) => give_back(process, socket, Destination::Others),
        (SocketPhase::HeldElsewhere, _) => {
            let (session, reader) = (socket.setup().session, Reader::Other);
            if let (Some(session), Ok(near)) = (session, descriptor::borrow(fd)) {
                // A lost session shows as the end of its descriptor.
                let _ = Process::ask(|| RequestBody::Relay { session, reader }, near);
            }
        }
        _ => {}
    }
}

/// Has a session that is held elsewhere relayed, or finds it lost; a UDP socket becomes the kernel's. Needs no channel.
pub(crate) fn have_relayed(fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
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
    let request = || RequestBody::Relay { session, reader };
    let reply = Process::ask(request, descriptor::borrow(fd)?);
    let is_relayed = matches!(reply, Some((ReplyBody::Relayed, _)));
    if is_relayed {
        become_relayed(Process::running(), socket);
    }
    Ok(is_relayed)
}

/// In a child of fork without a channel: the call continues in the kernel (`NotOurs`) if the server relays the session, or
/// begins to once there is something to relay.
pub(crate) fn relay_first(fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    if socket.protocol != Protocol::Tcp
        || !socket.options().are_of_listeners()
        || is_standard(socket)
    {
        return Ok(());
    }
    let (session, relays_writes) = {
        let setup = socket.setup();
        (setup.session, setup.relays_writes)
    };
    let Some(session) = session else {
        return Ok(());
    };
    // The reason for a hang-up is what the request reports.
    if relays_writes && socket.accepted_unused() && !unix::has_hung_up(descriptor::borrow(fd)?) {
        become_relayed(None, socket);
    } else if !has_relayed(fd, socket, session)? {
        // Requesting the session will show why.
        return Ok(());
    }
    socket.note_first_relay(clock::now() + RELAYED_FIRST);
    Err(CallError::NotOurs)
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
pub(crate) enum Destination {
    /// To the server, which moves its data through the descriptor.
    Relay,
    /// To the server, which relays it for another process, until a process requests it that may have it.
    Others,
    /// To the server, for the next process that requests it.
    Park,
}

/// Prepares a session to leave: its frames go to the server from now on, and all frames that arrived before
/// are processed. It sends nothing more from here, since its row is no longer this process's. Without a server it stays.
fn depart<'a>(process: &'a Process, setup: &Setup, slot: Slot) -> Result<CoreGuard<'a>, Lost> {
    let mut core = process.lock();
    let (Some(session), false) = (setup.session, core.is_local(slot)) else {
        return Ok(core);
    };
    core.poll(clock::now());
    core.stack.suspend_tx(slot);
    drop(core);
    // If the server cannot wait for it, some packets take a detour.
    let announced = process
        .control
        .call(RequestBody::BeginFlush { session }, &[]);
    let mut core = process.lock();
    if let Err(Lost) = announced {
        core.stack.resume_tx(slot);
        return Err(Lost);
    }
    core.take_in_all(clock::now());
    Ok(core)
}

/// The session cannot be packed, for lack of descriptors or memory, and stays here.
fn stay(core: &mut Core, setup: &Setup, slot: Slot) {
    core.stack.resume_tx(slot);
    let stay = |session| RequestBody::AbortFlush { session };
    core.outbox.extend(setup.session.map(stay));
}

/// Returns a TCP session that is here, for a call of the program; while the server is being restarted, to the next one.
pub(crate) fn give_back(process: &'static Process, socket: &Arc<Socket>, to: Destination) {
    // In a child of fork the lock of a socket that is not here may be held forever.
    while socket.phase() == SocketPhase::Cached {
        reopen::adopt_next(process, socket);
        if let Ok(()) = move_away(process, socket, to) {
            return;
        }
        if !process.await_server() {
            return end_here(process, socket);
        }
    }
}

/// Nobody can have a session that has to leave.
fn end_here(process: &Process, socket: &Arc<Socket>) {
    let _setup = socket.setup();
    let mut core = process.lock();
    if let SocketState::Cached { slot } = socket.state() {
        core.release(slot);
        socket.set_error(libc::ECONNABORTED);
        socket.become_unless_closed(SocketState::Closed);
        socket.notify(Events::READABLE | Events::WRITABLE | Events::CLOSED);
    }
}

/// Returns a TCP session that is here. If the server does not accept it, it is lost; if there is no server, it stays.
fn move_away(process: &Process, socket: &Arc<Socket>, to: Destination) -> Result<(), Lost> {
    let slot_here = || match socket.state() {
        SocketState::Cached { slot } if socket.protocol == Protocol::Tcp => Some(slot),
        _ => None,
    };
    // In a child of fork the lock of a socket that is not here may be held forever.
    if slot_here().is_none() {
        return Ok(());
    }
    registration::register_for_others(process, socket);
    let setup = socket.setup();
    let Some(slot) = slot_here() else {
        return Ok(());
    };
    let mut core = depart(process, &setup, slot)?;
    if slot_here() != Some(slot) {
        // It was closed in between, and its session with it.
        return Ok(());
    }
    let Some((id, outgoing)) = pack(&mut core, slot) else {
        stay(&mut core, &setup, slot);
        return Ok(());
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
    Ok(())
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
pub(crate) fn yield_session(process: &'static Process, id: SessionId) {
    if delegate::heed_recall(process, id) {
        return;
    }
    let wanted = table::sockets().into_iter().find(|(_, socket)| {
        socket.phase() == SocketPhase::Cached && socket.setup().session == Some(id)
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
    // The next server asks again.
    let _ = move_away(process, &socket, to);
}
