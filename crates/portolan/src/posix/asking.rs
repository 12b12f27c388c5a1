//! Common parts of calls that go to the server: how to name a socket's session, what a reply means,
//! and how a session gets its slot.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{
    Capsule, Delivery, MappingChoice, ReplyBody, RequestBody, SessionRef,
};
use portolan_stack::{Session, TcpSession};
use portolan_sys::unix::PairKind;
use portolan_sys::{clock, shm};
use portolan_tcp::{Events, HandoffBuffer};
use portolan_types::{Generation, Protocol, Slot};
use rustix::io::Errno;

use super::fallback::{fall_back, leave_session};
use super::lifecycle::close_arrival;
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::control::Lost;
use crate::process::{Absent, Process};
use crate::runtime::NewSession;
use crate::socket::near_end::replace_first_fds;
use crate::socket::{Setup, Socket, SocketPhase, SocketState};
use crate::wait::events::IN;
use crate::wait::unseen;

/// Default receive buffer of a UDP socket (Linux: `net.core.rmem_default`).
pub(super) const UDP_RECEIVE_BUFFER: usize = 212_992;

/// A table of slots that can be promised.
pub(super) trait Slots {
    fn reserve(&self) -> Slot;
    fn give_back(&self, slot: Slot);
}

impl Slots for Process {
    fn reserve(&self) -> Slot {
        self.lock().stack.reserve()
    }

    fn give_back(&self, slot: Slot) {
        self.lock().stack.remove(slot);
    }
}

/// A slot that is promised to a session. It is released if the call ends without one, for whatever
/// reason.
pub(super) struct SlotReservation<'a, S: Slots> {
    slots: &'a S,
    slot: Slot,
}

impl<S: Slots> SlotReservation<'_, S> {
    pub(super) fn at(slots: &S) -> SlotReservation<'_, S> {
        let slot = slots.reserve();
        SlotReservation { slots, slot }
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    /// Keeps the slot: the session is here, or certain to arrive.
    pub(super) fn keep(self) -> Slot {
        let slot = self.slot;
        std::mem::forget(self);
        slot
    }
}

impl<S: Slots> Drop for SlotReservation<'_, S> {
    fn drop(&mut self) {
        self.slots.give_back(self.slot);
    }
}

/// Makes a request about the socket's session. For a session that is new to the server, a pair of that kind is made,
/// whose far end the server keeps. If the reply makes it a kernel socket, it is one when this returns.
pub(super) fn ask(
    process: &Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    (setup, kind): (&Setup, PairKind),
    request: impl FnOnce(SessionRef) -> RequestBody,
) -> Outcome<ReplyBody> {
    let (session, pair) = match setup.session {
        Some(session) => (SessionRef::Known(session), None),
        None => (SessionRef::New, Some(process.control.replacing_pair(kind)?)),
    };
    let ends = pair.as_ref().map(|(near, far)| [far.as_fd(), near.as_fd()]);
    let fds = ends.as_ref().map_or(&[][..], |ends| &ends[..]);
    match process.control.call(request(session), fds) {
        Ok((ReplyBody::UseKernel { .. }, fds)) => {
            let kernel = match (socket.phase(), setup.session) {
                (SocketPhase::Cached, Some(session)) => {
                    let kernel = leave_session(fd, socket, session);
                    Some(kernel.ok_or(Errno::NETDOWN)?)
                }
                _ => fds.into_iter().next(),
            };
            Err(fall_back(socket, setup, kernel))
        }
        refused @ (Ok((ReplyBody::Error { .. }, _)) | Err(Lost)) => {
            Err(denial(socket, setup, refused))
        }
        // The server does not know it yet.
        Ok((ReplyBody::Deferred, _)) => Ok(ReplyBody::Deferred),
        Ok((reply, _)) => {
            if let Some((near, _)) = &pair {
                replace_first_fds(socket, fd, near)?;
            }
            Ok(reply)
        }
    }
}

/// Inserts a session at its slot and attaches it to the socket. The caller holds the lock on `setup`, unless the socket
/// is not shared yet. A session that arrives too late, for a socket that was closed in between, is closed.
pub(super) fn install(
    process: &'static Process,
    socket: &Arc<Socket>,
    slot: Slot,
    mut arrival: NewSession,
) {
    match &mut arrival {
        NewSession::Session(session) => socket.options().apply(session),
        NewSession::Local(_, end) => socket.options().apply_to_stream(&mut **end),
    }
    match &mut arrival {
        NewSession::Session(Session::Tcp(session)) => {
            socket.options().apply_quickack(&mut session.connection);
        }
        NewSession::Session(Session::Udp(_)) => {}
        NewSession::Local(_, end) => socket.options().apply_quickack(&mut **end),
    }
    let id = match &arrival {
        NewSession::Session(session) => Some(session.id()),
        NewSession::Local(..) => None,
    };
    let delivery = socket.options().delivery().unwrap_or(process.delivery());
    let stays = delivery != Delivery::Server || socket.protocol != Protocol::Tcp;
    if !stays || unseen::is_seen() {
        socket.leave_to_server();
    }
    process.hear_of_tx_queues();
    let mut core = process.lock();
    if socket.change(SocketState::Cached { slot }).is_err() {
        drop(core);
        return close_arrival(process, socket, arrival);
    }
    let now = clock::now();
    core.put(now, slot, arrival);
    core.attach(slot, Arc::clone(socket));
    core.poll(now);
    socket.notify(Events::CONNECTED | Events::WRITABLE | Events::READABLE);
    if core.readiness(socket) & IN != 0 {
        core.call_helper();
    }
    drop(core);
    if let Some(session) = id
        && stays
        && wants_ring(process, socket)
    {
        process.map_directly(session);
    }
    process.ensure_helper();
}

fn wants_ring(process: &Process, socket: &Socket) -> bool {
    let chosen = socket.options().mapping();
    chosen.unwrap_or(process.mapping()) == MappingChoice::Direct
}

/// Returns the error of a call on a socket without a session. If the server is gone, the socket
/// becomes the kernel's.
pub(super) fn denial(
    socket: &Arc<Socket>,
    setup: &Setup,
    answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>,
) -> CallError {
    match (answer, Process::start()) {
        (Err(Lost), Err(Absent::UseKernel)) => fall_back(socket, setup, None),
        (answer, _) => refusal(answer),
    }
}

/// The server is trusted, but versions may differ: a bad capsule is a protocol error.
pub(super) fn open_capsule(
    capsule: Capsule,
    generation: Generation,
    fds: Vec<OwnedFd>,
) -> Result<TcpSession, i32> {
    let mut session = unpack(capsule, fds).ok_or(libc::EPROTO)?;
    session.generation = generation;
    Ok(session)
}

/// Unread bytes are read in place; their descriptor is closed, because it would be in the program's way.
fn unpack(capsule: Capsule, fds: Vec<OwnedFd>) -> Option<TcpSession> {
    let (bytes, unread) = shm::unpack_capsule(capsule, fds).ok()?;
    let unread = match unread {
        Some((memory, at)) => {
            let memory = Arc::new(memory.into_bytes());
            Some(HandoffBuffer::new(
                memory,
                at.start as usize,
                at.length as usize,
            )?)
        }
        None => None,
    };
    TcpSession::from_parts(&bytes, unread).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use portolan_stack::Stack;
    use portolan_types::Instant;

    use super::*;

    impl Slots for Mutex<Stack> {
        fn reserve(&self) -> Slot {
            self.lock().unwrap().reserve()
        }

        fn give_back(&self, slot: Slot) {
            self.lock().unwrap().remove(slot);
        }
    }

    #[test]
    fn a_slot_is_given_back_when_the_session_does_not_come() {
        let slots = Mutex::new(Stack::new(Instant::ZERO));
        let open = || -> Result<Slot, Errno> {
            let reservation = SlotReservation::at(&slots);
            Err(Errno::MFILE)?;
            Ok(reservation.keep())
        };
        assert_eq!(open(), Err(Errno::MFILE));
        assert_eq!(open(), Err(Errno::MFILE));
        let first = SlotReservation::at(&slots).keep();
        assert_eq!(first, Slot(0), "earlier ones came back");
        assert_eq!(slots.reserve(), Slot(1), "one that is kept does not");
    }
}
