//! Sessions that arrive: a slot is reserved for each, and promised to the server; the session is fetched, or made here,
//! and installed at its slot.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use portolan_proto::control::{Delivery, MappingChoice, ReplyBody, RequestBody, SocketOptionsBlob};
use portolan_stack::Session;
use portolan_sys::clock;
use portolan_tcp::Events;
use portolan_types::{Generation, Protocol, SessionId, Slot};
use rustix::io::Errno;

use crate::migration::capsule::open_capsule;
use crate::migration::finish::close_arrival;
use crate::outcome::{Outcome, refusal};
use crate::process::Process;
use crate::runtime::NewSession;
use crate::runtime::locals::NewEnd;
use crate::socket::{Socket, SocketState};
use crate::wait::events::IN;

/// A table of slots that can be promised.
pub(crate) trait Slots {
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
pub(crate) struct SlotReservation<'a, S: Slots> {
    slots: &'a S,
    slot: Slot,
}

impl<S: Slots> SlotReservation<'_, S> {
    pub(crate) fn at(slots: &S) -> SlotReservation<'_, S> {
        let slot = slots.reserve();
        SlotReservation { slots, slot }
    }

    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }

    /// Keeps the slot: the session is here, or certain to arrive.
    pub(crate) fn keep(self) -> Slot {
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

/// A session that has come from the server.
pub(crate) struct Fetched {
    pub(crate) session: NewSession,
    /// Reserved for it.
    pub(crate) slot: Slot,
    /// The socket's options from the last holder.
    pub(crate) options_blob: SocketOptionsBlob,
    /// Of the server.
    incarnation: u64,
}

/// Requests a session from the server that it or another process holds; returns `None` if the server relays it.
pub(crate) fn fetch(
    process: &'static Process,
    session: SessionId,
    descriptor: &[BorrowedFd<'_>],
) -> Outcome<Option<Fetched>> {
    let incarnation = process.incarnation();
    let reservation = SlotReservation::at(process);
    let slot = reservation.slot();
    let fetched = |session, options_blob| {
        Some(Fetched {
            session,
            slot: reservation.keep(),
            options_blob,
            incarnation,
        })
    };
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
            Ok(fetched(arrival, options_blob))
        }
        Ok((ReplyBody::CachedLocal { side, options_blob }, mut fds)) => {
            let end = NewEnd::open(session, fds.pop(), side);
            let arrival = NewSession::Local(end.map_err(Errno::from_raw_os_error)?);
            Ok(fetched(arrival, options_blob))
        }
        Ok((ReplyBody::Relayed, _)) => Ok(None),
        other => Err(refusal(other)),
    }
}

/// As [`install`]. If the server is another one by now, that has it adopted.
pub(crate) fn install_fetched(process: &'static Process, socket: &Arc<Socket>, fetched: Fetched) {
    let known_to = fetched.incarnation;
    install(process, socket, fetched.slot, fetched.session);
    if process.incarnation() != known_to {
        socket.note_server(known_to);
        process.note_unadopted();
    }
}

/// Inserts a session at its slot and attaches it to the socket. The caller holds the lock on `setup`, unless the socket
/// is not shared yet. A session that arrives too late, for a socket that was closed in between, is closed.
pub(crate) fn install(
    process: &'static Process,
    socket: &Arc<Socket>,
    slot: Slot,
    mut arrival: NewSession,
) {
    match &mut arrival {
        NewSession::Session(session) => socket.options().apply(session),
        NewSession::Local(it) => socket.options().apply_to_stream(&mut it.end),
    }
    match &mut arrival {
        NewSession::Session(Session::Tcp(session)) => {
            socket.options().apply_quickack(&mut session.connection);
        }
        NewSession::Session(Session::Udp(_)) => {}
        NewSession::Local(it) => socket.options().apply_quickack(&mut it.end),
    }
    let id = match &arrival {
        NewSession::Session(session) => Some(session.id()),
        NewSession::Local(..) => None,
    };
    let delivery = socket.options().delivery().unwrap_or(process.delivery());
    let stays = delivery != Delivery::Server || socket.protocol != Protocol::Tcp;
    if !stays || Socket::has_unseen_waits() {
        socket.leave_to_server();
    }
    process.hear_before_session();
    socket.note_server(process.incarnation());
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
    {
        map_directly(process, socket, session);
    }
    process.ensure_helper();
}

/// Requests a ring of its own for a session, if it is to have one.
pub(super) fn map_directly(process: &Process, socket: &Socket, session: SessionId) {
    let chosen = socket.options().mapping();
    if chosen.unwrap_or(process.mapping()) == MappingChoice::Direct {
        process.map_directly(session);
    }
}

/// Sets the endpoints that a UDP session has from now on.
pub(crate) fn retarget(
    process: &Process,
    slot: Slot,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    generation: Generation,
) {
    process.hear_before_session();
    let mut core = process.lock();
    if let Some(session) = core.stack.udp(slot) {
        session.local = local;
        session.remote = remote;
        session.generation = generation;
    }
    core.choose_tx_queue(slot);
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
