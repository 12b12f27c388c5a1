//! What the calls that go to the server have in common: how a socket's session is named, what an
//! answer means, and how a session gets its slot.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use portolan_proto::control::{Blob, ReplyBody, SessionRef};
use portolan_stack::{Session, TcpSession};
use portolan_sys::clock;
use portolan_tcp::Events;
use portolan_types::{Generation, SessionId, Slot};
use rustix::io::Errno;

use super::Stop;
use super::fallback::fall_back;
use super::socket_options::apply_quickack;
use crate::control::{self, Lost};
use crate::process::{Absent, Process};
use crate::socket::{Setup, Socket};

/// Default receive buffer of a UDP socket (Linux: `net.core.rmem_default`).
pub(super) const UDP_RECEIVE_BUFFER: usize = 212_992;

impl From<Lost> for Stop {
    /// What calls report once the server has gone.
    fn from(_: Lost) -> Stop {
        Stop::Failed(Errno::NETDOWN)
    }
}

/// How a request names the socket's session, and the descriptors that come with a new one.
pub(super) fn introduce<'a>(
    setup: &'a Setup,
    near: BorrowedFd<'a>,
) -> Result<(SessionRef, Vec<BorrowedFd<'a>>), Errno> {
    match (setup.session, &setup.far) {
        (Some(session), _) => Ok((SessionRef::Known(session), Vec::new())),
        (None, Some(far)) => Ok((SessionRef::New, vec![far.as_fd(), near])),
        (None, None) => Err(Errno::INVAL),
    }
}

impl Setup {
    /// The server knows the session now, and holds the far end.
    pub(super) fn opened(&mut self, session: SessionId) {
        self.session = Some(session);
        self.far = None;
    }
}

/// Puts a session at its slot and makes the socket its face.
pub(super) fn install(
    process: &'static Process,
    socket: &Arc<Socket>,
    slot: Slot,
    mut session: Session,
) {
    socket.options().apply(&mut session);
    if let Session::Tcp(session) = &mut session {
        apply_quickack(socket, &mut session.connection);
    }
    let mut core = process.lock();
    let now = clock::now();
    core.stack.insert_at(now, slot, session);
    core.attach(slot, Arc::clone(socket));
    socket.cache_at(slot);
    core.attend(now);
    socket.notify(Events::CONNECTED | Events::WRITABLE | Events::READABLE);
    drop(core);
    process.ensure_helper();
}

/// What becomes of a call on a socket without a session. If the server has gone, the socket is the
/// kernel's.
pub(super) fn denial(
    socket: &Arc<Socket>,
    setup: &Setup,
    answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>,
) -> Stop {
    match (answer, Process::start()) {
        (Err(Lost), Err(Absent::UseKernel)) => fall_back(socket, setup, None),
        (answer, _) => refusal(answer),
    }
}

pub(super) fn refusal(answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>) -> Stop {
    match answer {
        Ok((ReplyBody::Error { errno }, _)) => Errno::from_raw_os_error(errno).into(),
        Ok(_) => Errno::PROTO.into(),
        Err(lost) => lost.into(),
    }
}

/// The server is trusted not to lie, but versions may differ: a bad capsule is a protocol error.
pub(super) fn open_capsule(
    capsule: Blob,
    generation: Generation,
    fds: &mut Vec<OwnedFd>,
) -> Result<TcpSession, i32> {
    let octets = control::unpack(capsule, fds).ok_or(libc::EPROTO)?;
    let mut session = TcpSession::from_capsule(&octets).map_err(|_| libc::EPROTO)?;
    session.generation = generation;
    Ok(session)
}
