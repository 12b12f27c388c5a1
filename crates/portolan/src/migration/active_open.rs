//! The outcomes of active opens: a session, or an error, which the server leaves on the socket's descriptor (ADR 4).

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use portolan_proto::MAX_MESSAGE;
use portolan_proto::control::{DescriptorEvent, FastOpenMode, ReplyBody, RequestBody, SessionRef};
use portolan_proto::local::Side;
use portolan_stack::Session;
use portolan_sys::unix::{self, PairKind, ReceiveError};
use portolan_sys::wait::{pollfd, ppoll};
use portolan_sys::{clock, descriptor};
use portolan_tcp::Events;
use portolan_types::{Instant, Protocol, SessionId};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::descriptors::InternalFd;
use crate::migration::arrival::install;
use crate::migration::capsule::open_capsule;
use crate::process::Process;
use crate::process::control::Lost;
use crate::runtime::NewSession;
use crate::runtime::locals::NewEnd;
use crate::socket::near_end::replace_fds;
use crate::socket::table;
use crate::socket::{Setup, Socket, SocketPhase, SocketState};

thread_local! {
    /// Buffer for the outcome of an open; as long as the longest message.
    static MESSAGE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// How an active open has ended.
enum OpenOutcome {
    Established(NewSession),
    /// With an error number.
    Failed(i32),
    /// The server closed the descriptor.
    HungUp,
}

impl Process {
    /// Receives the outcomes that have arrived.
    pub(crate) fn take_outcomes(&'static self) {
        if !Socket::any(SocketPhase::Connecting) {
            return;
        }
        let openings = self.lock().openings.poll_list();
        if openings.is_empty() {
            return;
        }
        let mut fds: Vec<_> = openings
            .iter()
            .map(|(_, fd)| pollfd(*fd, libc::POLLIN))
            .collect();
        if ppoll(&mut fds, Some(Instant::ZERO), None).is_ok_and(|ready| ready > 0) {
            self.take_outcomes_of(&openings, &fds);
        }
    }

    /// Receives the outcomes on those descriptors of `openings` that are ready in `polled`.
    pub(crate) fn take_outcomes_of(
        &'static self,
        openings: &[(Arc<Socket>, RawFd)],
        polled: &[libc::pollfd],
    ) {
        for ((socket, fd), polled) in openings.iter().zip(polled) {
            if polled.revents != 0 {
                complete_connect(self, *fd, socket);
            }
        }
    }
}

/// Receives the outcome of an active open from the descriptor, if it has arrived.
pub(crate) fn complete_connect(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) {
    if socket.is_unregistered() {
        return complete_own_open(process, socket);
    }
    if socket.phase() != SocketPhase::Connecting {
        return;
    }
    let mut setup = socket.setup();
    let SocketState::Connecting { slot } = socket.state() else {
        return;
    };
    let session = setup.session;
    let receive = || table::with_number(socket, fd, |fd| receive_outcome(fd, session));
    // The outcome may carry the descriptor of the session's memory, which is lost if no number is free for it.
    let outcome = if descriptor::has_free_number() {
        receive()
    } else if table::with_number(socket, fd, has_outcome) == Some(true) {
        process.control.with_room(receive)
    } else {
        return;
    };
    let Some(Some(outcome)) = outcome else {
        return;
    };
    match outcome {
        OpenOutcome::Established(session) => {
            install(process, socket, slot, session);
            if setup.incarnation != process.incarnation() {
                socket.note_server(setup.incarnation);
                process.note_unadopted();
            }
        }
        OpenOutcome::Failed(errno) => fail(process, socket, &mut setup, errno),
        OpenOutcome::HungUp if will_be_repeated(process, socket, &mut setup) => {}
        OpenOutcome::HungUp => fail(process, socket, &mut setup, libc::ECONNABORTED),
    }
}

fn fail(process: &Process, socket: &Socket, setup: &mut Setup, errno: i32) {
    setup.remote = None;
    setup.give_up_unchosen_port();
    socket.set_error(errno);
    let mut core = process.lock();
    // The slot of a socket that was closed in between is gone already.
    if let SocketState::Connecting { slot } = socket.state()
        && socket.change(SocketState::Idle).is_ok()
    {
        core.stack.remove(slot);
    }
    socket.notify(Events::ERROR);
}

/// The server has ended during an active open. Has the next one try again, if one is to be expected: until then the
/// descriptor is silent.
fn will_be_repeated(process: &'static Process, socket: &Arc<Socket>, setup: &mut Setup) -> bool {
    let is_lost = process.control.has_hung_up() || setup.incarnation != process.incarnation();
    if !is_lost || !setup.is_open_repeatable || Process::is_cut_off() {
        return false;
    }
    let Ok((near, far)) = process.control.replacing_pair(PairKind::Stream) else {
        return false;
    };
    if replace_fds(socket, &near).is_err() {
        return false;
    }
    setup.session = None;
    setup.silent_far = Some(InternalFd::new(far));
    process.note_unadopted();
    true
}

/// Has the server continue with an active open that began under an earlier one. Returns false while the answer of the peer is
/// still to come to this process, which has sent the SYN itself.
pub(crate) fn open_again(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> bool {
    complete_connect(process, fd, socket);
    if socket.is_unregistered() {
        return socket.phase() != SocketPhase::Connecting
            || !socket.is_unknown_to(process.incarnation());
    }
    let mut setup = socket.setup();
    let (SocketState::Connecting { slot }, Some(remote), None, None) = (
        socket.state(),
        setup.remote,
        setup.session,
        &setup.unregistered,
    ) else {
        return true;
    };
    let Ok((near, far)) = process.control.replacing_pair(PairKind::Stream) else {
        return false;
    };
    let request = RequestBody::Connect {
        session: SessionRef::New,
        protocol: Protocol::Tcp,
        remote,
        slot,
        options: process.handshake_options(socket),
        early: FastOpenMode::No,
    };
    let incarnation = process.incarnation();
    match process.control.call(request, &[far.as_fd(), near.as_fd()]) {
        Ok((ReplyBody::Connecting { session, local, .. }, _)) => {
            setup.session = Some(session);
            setup.incarnation = incarnation;
            setup.set_local(local);
            if replace_fds(socket, &near).is_ok() {
                setup.silent_far = None;
            }
        }
        Ok((ReplyBody::Error { errno }, _)) => fail(process, socket, &mut setup, errno),
        Ok(_) => fail(process, socket, &mut setup, libc::ECONNABORTED),
        Err(Lost) => return false,
    }
    true
}

/// Takes the outcome of an open from a leased port, if there is one.
fn complete_own_open(process: &Process, socket: &Socket) {
    if socket.phase() == SocketPhase::Connecting {
        process.lock().poll(clock::now());
    }
    if socket.phase() == SocketPhase::Idle {
        note_failure(&mut socket.setup(), socket);
    }
}

/// The open from a leased port has failed: the socket has neither a port nor a session.
pub(crate) fn note_failure(setup: &mut Setup, socket: &Socket) {
    if socket.phase() == SocketPhase::Idle && setup.unregistered.take().is_some() {
        setup.remote = None;
        setup.give_up_unchosen_port();
        socket.note_registered();
    }
}

/// Has the server left an outcome on the descriptor?
fn has_outcome(fd: RawFd) -> bool {
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    descriptor::borrow(fd).is_ok_and(|near| {
        let mut first = [0; 1];
        rustix::net::recv(near, &mut first, peek) != Err(Errno::AGAIN)
    })
}

/// Returns the session, or the error that the server left on the descriptor; `None` if neither has arrived.
fn receive_outcome(fd: RawFd, session: Option<SessionId>) -> Option<OpenOutcome> {
    let near = descriptor::borrow(fd).ok()?;
    // When the program ends, its thread-locals may have been dropped.
    let mut message = MESSAGE.try_with(Cell::take).unwrap_or_default();
    message.resize(MAX_MESSAGE, 0);
    let outcome = read_outcome(near, session, &mut message);
    let _ = MESSAGE.try_with(|kept| kept.set(message));
    outcome
}

fn read_outcome(
    near: BorrowedFd<'_>,
    session: Option<SessionId>,
    message: &mut [u8],
) -> Option<OpenOutcome> {
    let received = match unix::receive(near, message) {
        Ok(received) if received.is_short => return Some(OpenOutcome::Failed(libc::EMFILE)),
        Ok(received) => received,
        Err(ReceiveError::Blocked) => return None,
        Err(_) => return Some(OpenOutcome::HungUp),
    };
    let mut fds: Vec<OwnedFd> = received.fds.into_iter().collect();
    let established = match portolan_proto::decode(&message[..received.length]) {
        Ok(DescriptorEvent::Established {
            capsule,
            generation,
        }) => open_capsule(capsule.into(), generation, fds)
            .map(|session| NewSession::Session(Session::Tcp(Box::new(session)))),
        Ok(DescriptorEvent::EstablishedLocal) => session
            .ok_or(libc::EPROTO)
            .and_then(|id| NewEnd::open(id, fds.pop(), Side::Opener))
            .map(NewSession::Local),
        Ok(DescriptorEvent::Failed { errno }) => Err(errno),
        Ok(_) | Err(_) => Err(libc::EPROTO),
    };
    Some(established.map_or_else(OpenOutcome::Failed, OpenOutcome::Established))
}
