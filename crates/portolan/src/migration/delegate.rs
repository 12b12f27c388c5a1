//! Listeners that are delegated to this process (ADR 15): start, accept, end.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::{Arc, MutexGuard, PoisonError};

use portolan_proto::control::{ReplyBody, RequestBody, SessionRef};
use portolan_stack::passive::Rules;
use portolan_stack::{Session, TcpSession};
use portolan_sys::unix::{self, PairKind};
use portolan_sys::{clock, descriptor};
use portolan_types::{SessionId, Slot};
use rustix::io::Errno;

use crate::descriptors::InternalFd;
use crate::migration::arrival::{SlotReservation, install};
use crate::migration::part;
use crate::migration::registration::{may_wait, note_handed_over, register_all, tell_of};
use crate::outcome::{Outcome, refusal};
use crate::process::Process;
use crate::runtime::NewSession;
use crate::runtime::delegations::Ends;
use crate::runtime::orphans::Orphan;
use crate::socket::near_end::{enter, enter_prepared};
use crate::socket::table;
use crate::socket::{Setup, Socket, SocketPhase, Unregistered};

/// Bytes for the message that connections wait here.
const TOKEN_MAX: usize = 64;

/// The slot for a listener's segments, used if its handshakes are delegated.
pub(crate) enum ListenerSlot<'a> {
    /// The listener was not delegated when it started to listen, and cannot be now.
    Nowhere,
    Known(Slot),
    New(SlotReservation<'a, Process>),
}

impl ListenerSlot<'_> {
    pub(crate) fn new(process: &Process) -> ListenerSlot<'_> {
        ListenerSlot::New(SlotReservation::at(process))
    }

    pub(crate) fn of(process: &Process, listener: SessionId) -> ListenerSlot<'static> {
        let delegations = &process.lock().delegations;
        let slot = delegations.slot_of(listener);
        let slot = slot.filter(|_| !delegations.is_part(listener));
        slot.map_or(ListenerSlot::Nowhere, ListenerSlot::Known)
    }

    fn slot(&self) -> Option<Slot> {
        match self {
            ListenerSlot::Nowhere => None,
            ListenerSlot::Known(slot) => Some(*slot),
            ListenerSlot::New(reservation) => Some(reservation.slot()),
        }
    }
}

/// Returns the request for a listening socket.
pub(crate) fn request(
    process: &Process,
    socket: &Socket,
    session: SessionRef,
    backlog: u32,
    place: &ListenerSlot<'_>,
) -> RequestBody {
    let mut options = process.handshake_options(socket);
    let is_delegated = matches!(place, ListenerSlot::Known(_)).then_some(true);
    options.is_delegated = options
        .is_delegated
        .or(process.wants_delegation())
        .or(is_delegated);
    // Other processes that share the descriptor could not accept connections that are held here.
    let slot = place.slot().filter(|_| !socket.is_shared());
    RequestBody::Listen {
        session,
        backlog,
        options,
        options_blob: socket.options_blob(),
        slot,
    }
}

/// Follows the server's decision: the handshakes are this process's, or no longer. `far` is the far
/// end of the listener's descriptor, if that is new.
pub(crate) fn heed(
    process: &'static Process,
    socket: &Socket,
    (id, backlog): (SessionId, u32),
    (place, far): (ListenerSlot<'_>, Option<OwnedFd>),
    rules: Option<Vec<u8>>,
) {
    let rules = rules.and_then(|rules| portolan_proto::decode::<Rules>(&rules).ok());
    let is_known = matches!(place, ListenerSlot::Known(_));
    match (rules, place.slot()) {
        (Some(rules), Some(slot)) => {
            if let ListenerSlot::New(reservation) = place {
                reservation.keep();
            }
            let options = socket.options().handshake();
            let ends = Ends::Listeners(far.map(InternalFd::new));
            let listener = (id, slot, ends);
            let mut core = process.lock();
            core.begin_delegation(clock::now(), listener, (rules, options, backlog));
            drop(core);
            process.ensure_helper();
        }
        (None, Some(_)) if is_known => end(process, id),
        _ => {}
    }
}

/// The listener has accepted a connection that the server opened. If it accepts many, their handshakes are performed here
/// from now on, unless something else was chosen.
pub(crate) fn note_accept(process: &'static Process, listener: &Arc<Socket>) {
    let (session, backlog) = {
        let setup = listener.setup();
        (setup.session, setup.backlog)
    };
    let Some(id) = session else { return };
    let is_busy = process.lock().busy_listeners.note_accept(clock::now(), id);
    if !is_busy || listener.phase() != SocketPhase::Listening || listener.stands_in() {
        return;
    }
    if listener.is_shared() {
        return part::take(process, listener, id);
    }
    let place = ListenerSlot::new(process);
    let known = SessionRef::Known(id);
    let mut request = request(process, listener, known, backlog, &place);
    if let RequestBody::Listen { options, .. } = &mut request {
        options.is_delegated = options.is_delegated.or(Some(true));
    }
    if let Ok((ReplyBody::Listening { rules, .. }, mut fds)) = process.control.call(request, &[]) {
        let whose = (id, backlog);
        heed(process, listener, whose, (place, fds.pop()), rules);
    }
}

/// Accepts the next connection that this process performed the handshake of, unless a message on the listener's descriptor
/// tells of it; `None` if none waits.
pub(crate) fn accept_at_hand(
    listener: &Socket,
    flags: i32,
) -> Outcome<Option<(RawFd, SocketAddr)>> {
    let (Some(id), Some(process)) = (listener.setup().session, Process::running()) else {
        return Ok(None);
    };
    let taken = if process.lock().delegations.has_at_hand(id) {
        // Until its socket has it, nobody else could register the connection.
        let _turn = turn(process);
        accept_next(process, (listener, id), flags)
    } else {
        Ok(None)
    };
    if let Some(near) = listener.own_near()
        && process.lock().delegations.withdraw_announcement(id)
    {
        // Another one may have been sent since: the order does not matter.
        let _ = unix::receive(descriptor::borrow(near)?, &mut [0; TOKEN_MAX]);
    }
    taken
}

/// Accepts the connection of a delegated listener that has waited longest, after the message on its descriptor was read;
/// `None` if none waits.
pub(crate) fn accept(
    process: &'static Process,
    listener: &Socket,
    flags: i32,
) -> Outcome<Option<(RawFd, SocketAddr)>> {
    let id = listener.setup().session.ok_or(Errno::INVAL)?;
    let _turn = turn(process);
    process.lock().take_announcement(id);
    accept_next(process, (listener, id), flags)
}

fn accept_next(
    process: &'static Process,
    (listener, id): (&Socket, SessionId),
    flags: i32,
) -> Outcome<Option<(RawFd, SocketAddr)>> {
    let taken = if may_wait(process, listener) {
        accept_unregistered(process, (listener, id), flags)
    } else {
        accept_registered(process, (listener, id), flags)
    };
    // Others may still wait, even if this one failed.
    process.lock().attend_delegations(clock::now());
    taken
}

/// Accepts a connection that the server need not know yet.
fn accept_unregistered(
    process: &'static Process,
    (listener, id): (&Socket, SessionId),
    flags: i32,
) -> Outcome<Option<(RawFd, SocketAddr)>> {
    let is_nonblocking = flags & libc::SOCK_NONBLOCK != 0;
    loop {
        // Made before a connection is taken, since there may be no number.
        let made = process.pairs().take().and_then(|mut pair| {
            let near = pair.descriptor(is_nonblocking)?;
            Ok((pair, near))
        });
        let Ok((pair, near)) = made else {
            return accept_registered(process, (listener, id), flags);
        };
        let mut core = process.lock();
        let now = clock::now();
        let next = core.accept_delegated(now, id);
        let Some((slot, session)) = next else {
            drop(core);
            process.pairs().put(pair);
            return Ok(None);
        };
        if session.connection.is_closed() {
            core.stack.remove(slot);
            drop(core);
            process.pairs().put(pair);
            continue;
        }
        let flow = session.flow;
        if !core.leave_unregistered(now, id, (slot, flow)) {
            core.return_delegated(now, id, (slot, session));
            drop(core);
            process.pairs().put(pair);
            return accept_registered(process, (listener, id), flags);
        }
        drop(core);
        let setup = Setup {
            local: Some(flow.local),
            remote: Some(flow.remote),
            unregistered: Some(Unregistered { port: id, pair }),
            ..Setup::default()
        };
        let socket = Arc::new(Socket::accepted(listener, setup));
        let session = NewSession::Session(Session::Tcp(session));
        install(process, &socket, slot, session);
        let shown = listener.shown(flow.remote);
        return Ok(Some((enter_prepared(near, socket, flags)?, shown)));
    }
}

/// Accepts a connection, and registers it with the server.
fn accept_registered(
    process: &'static Process,
    (listener, id): (&Socket, SessionId),
    flags: i32,
) -> Outcome<Option<(RawFd, SocketAddr)>> {
    loop {
        let pair = process.control.brief_pair(PairKind::Stream)?;
        let next = process.lock().accept_delegated(clock::now(), id);
        let Some((slot, session)) = next else {
            return Ok(None);
        };
        if session.connection.is_closed() {
            process.lock().stack.remove(slot);
            continue;
        }
        return claim(process, (listener, id), (slot, session), pair, flags).map(Some);
    }
}

/// Registers a connection with the server, and gives it its descriptor.
fn claim(
    process: &'static Process,
    (listener, listening): (&Socket, SessionId),
    (slot, mut session): (Slot, Box<TcpSession>),
    (near, far): (OwnedFd, OwnedFd),
    flags: i32,
) -> Outcome<(RawFd, SocketAddr)> {
    let (local, remote) = (session.flow.local, session.flow.remote);
    let request = RequestBody::Register {
        port: listening,
        local,
        remote,
        slot,
    };
    match process.control.call(request, &[far.as_fd(), near.as_fd()]) {
        Ok((
            ReplyBody::Bound {
                session: id,
                generation,
                ..
            },
            _,
        )) => {
            session.id = id;
            session.generation = generation;
            process
                .lock()
                .delegations
                .registered(clock::now(), listening, (slot, session.flow));
            let setup = Setup {
                session: Some(id),
                local: Some(local),
                remote: Some(remote),
                ..Setup::default()
            };
            let socket = Arc::new(Socket::accepted(listener, setup));
            install(
                process,
                &socket,
                slot,
                NewSession::Session(Session::Tcp(session)),
            );
            Ok((enter(near, socket, flags)?, listener.shown(remote)))
        }
        // The server is short of descriptors: the connection keeps waiting.
        Ok((ReplyBody::Error { errno }, _)) if errno == libc::EMFILE => {
            let mut core = process.lock();
            core.return_delegated(clock::now(), listening, (slot, session));
            Err(Errno::MFILE.into())
        }
        // It waits for the next server.
        lost if process.control.is_lost() => {
            let mut core = process.lock();
            core.return_delegated(clock::now(), listening, (slot, session));
            Err(refusal(lost))
        }
        refused => {
            let now = clock::now();
            session.connection.abort(now);
            process
                .lock()
                .keep_orphan(now, Orphan::new(slot), Session::Tcp(session));
            Err(refusal(refused))
        }
    }
}

/// Returns a listener's handshakes to the server, if they are this process's: another process may
/// have the descriptor from now on, or needs the port.
pub(crate) fn end(process: &Process, listener: SessionId) {
    let _turn = turn(process);
    if fall_quiet(process, listener) {
        process.lock().busy_listeners.rest(clock::now(), listener);
        let _ = process
            .control
            .call(RequestBody::EndDelegation { listener }, &[]);
        // What came until now is passed on, although the process may be about to end.
        process.lock().take_in_all(clock::now());
    }
}

/// Returns when no other thread requests or gives back handshakes.
pub(crate) fn turn(process: &Process) -> MutexGuard<'_, ()> {
    let lock = process.delegation_lock.lock();
    lock.unwrap_or_else(PoisonError::into_inner)
}

/// The server knows all connections of the listener when this returns, and this process performs no more handshakes of it.
/// Returns false if it performed none.
pub(crate) fn fall_quiet(process: &Process, listener: SessionId) -> bool {
    if !process.lock().delegations.has(listener) {
        return false;
    }
    register_all(process, listener);
    let mut core = process.lock();
    core.poll(clock::now());
    let surrendered = core.surrender_delegation(clock::now(), listener);
    drop(core);
    let Some(waiting) = surrendered else {
        return false;
    };
    return_pending(process, listener, waiting);
    true
}

/// Connections that cannot be sent are reset; those that a lost server does not receive are lost.
pub(crate) fn return_pending(process: &Process, listener: SessionId, waiting: Vec<TcpSession>) {
    let count = waiting.len();
    for session in waiting {
        let request = |capsule| RequestBody::ReturnPending { listener, capsule };
        if !tell_of(process, &session, request) {
            process.lock().reset_pending(clock::now(), session);
        }
    }
    note_handed_over(process, count);
}

/// The process is about to close the listener. Other processes may have it, and accept what waits here.
pub(crate) fn leave(process: &Process, listener: SessionId) {
    if process.lock().delegations.is_part(listener) {
        end(process, listener);
    } else {
        register_all(process, listener);
    }
}

/// Ends all delegations of the process.
pub(crate) fn end_all(process: &Process) {
    let listeners = process.lock().delegations.ids();
    for listener in listeners {
        end(process, listener);
    }
}

/// Does what the server asks for a listener of this process: ends its delegation, or takes a part in its handshakes.
/// Returns false if the session is no listener.
pub(crate) fn heed_recall(process: &'static Process, id: SessionId) -> bool {
    let (is_sole, is_part) = {
        let delegations = &process.lock().delegations;
        (delegations.is_sole(id), delegations.is_part(id))
    };
    if is_sole {
        end(process, id);
        return true;
    }
    match listener_of(id) {
        Some(listener) if is_part => part::take_again(process, &listener, id),
        Some(listener) => part::answer_invitation(process, &listener, id),
        None => return false,
    }
    true
}

fn listener_of(id: SessionId) -> Option<Arc<Socket>> {
    let mut sockets = table::sockets().into_iter().map(|(_, socket)| socket);
    sockets.find(|socket| {
        socket.phase() == SocketPhase::Listening && socket.setup().session == Some(id)
    })
}
