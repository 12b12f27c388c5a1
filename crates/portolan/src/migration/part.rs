//! A part in the handshakes of a listener that several processes have, as the workers of a server do (ADR 39): each
//! performs the handshakes of the flows that it is dealt. Connections of other flows, and those that another process did
//! not accept in time, arrive on the listener's descriptor, which all of them read.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Weak};

use portolan_proto::control::{PartOffer, ReplyBody, RequestBody};
use portolan_stack::passive::Rules;
use portolan_sys::clock;
use portolan_sys::descriptor::epoll_control;
use portolan_sys::unix::{PairKind, socket_pair};
use portolan_types::{SessionId, Slot};
use rustix::io::Errno;

use crate::descriptors::InternalFd;
use crate::migration::arrival::SlotReservation;
use crate::migration::delegate::{end, fall_quiet, return_pending, turn};
use crate::migration::fallback::{kernel_event, wake_sleepers};
use crate::migration::registration::may_wait;
use crate::migration::reopen;
use crate::process::Process;
use crate::runtime::delegations::{Ends, GivenUp, OwnEnds};
use crate::socket::{Socket, SocketPhase, table};

/// A listener of which a part is offered. Nobody waits for its setup who holds the turn.
struct Offered<'a> {
    listener: &'a Arc<Socket>,
    id: SessionId,
    backlog: u32,
    /// The slot for the segments of the part.
    place: SlotReservation<'static, Process>,
}

impl Offered<'_> {
    fn of<'a>(process: &'static Process, listener: &'a Arc<Socket>, id: SessionId) -> Offered<'a> {
        let backlog = listener.setup().backlog;
        Offered {
            listener,
            id,
            backlog,
            place: SlotReservation::at(process),
        }
    }
}

/// The listener accepts many connections that the server opened: offers to perform a part of their handshakes.
pub(crate) fn take(process: &'static Process, listener: &Arc<Socket>, id: SessionId) {
    let offered = Offered::of(process, listener, id);
    let _turn = turn(process);
    take_in_turn(process, offered);
}

fn take_in_turn(process: &'static Process, offered: Offered<'_>) {
    let id = offered.id;
    if !is_wanted(process, offered.listener) || !offer(process, offered) {
        process.lock().busy_listeners.rest(clock::now(), id);
    }
}

/// The flows are about to be dealt anew.
pub(crate) fn take_again(process: &'static Process, listener: &Arc<Socket>, id: SessionId) {
    // At another slot: what still comes to the former one is for connections that the server knows by now.
    let offered = Offered::of(process, listener, id);
    let _turn = turn(process);
    if fall_quiet(process, id) {
        take_in_turn(process, offered);
    }
}

/// Another process that has the listener performs handshakes: this one does, too, if it accepts connections at all.
pub(crate) fn answer_invitation(process: &'static Process, listener: &Arc<Socket>, id: SessionId) {
    let offered = Offered::of(process, listener, id);
    let _turn = turn(process);
    if process.lock().delegations.has(id) {
        return;
    }
    let is_in_use = process.lock().busy_listeners.is_in_use(clock::now(), id);
    if !(is_in_use && is_wanted(process, listener) && offer(process, offered)) {
        decline(process, id);
    }
}

fn decline(process: &Process, listener: SessionId) {
    let _ = process
        .control
        .call(RequestBody::EndDelegation { listener }, &[]);
}

/// Is the listener one that may be delegated, and whose connections this process can show to its program?
fn is_wanted(process: &Process, listener: &Socket) -> bool {
    let chosen = listener.options().handshake().is_delegated;
    listener.phase() == SocketPhase::Listening
        && listener.is_shared()
        && !listener.stands_in()
        && chosen.or(process.wants_delegation()) != Some(false)
        && may_wait(process, listener)
        && !Socket::has_owner()
}

/// Returns false if the server refuses.
fn offer(process: &'static Process, offered: Offered<'_>) -> bool {
    let Offered {
        listener,
        id,
        backlog,
        place,
    } = offered;
    if process.lock().delegations.has(id) {
        // By an invitation.
        return true;
    }
    let slot = place.slot();
    let Some(rules) = ask(process, id, PartOffer::Anew(slot)) else {
        return false;
    };
    place.keep();
    let begun = begin(process, (listener, id, backlog), slot, rules);
    if begun.is_err() {
        process.lock().stack.remove(slot);
        decline(process, id);
    }
    begun.is_ok()
}

/// Returns the rules if this process may take part.
fn ask(process: &Process, listener: SessionId, offer: PartOffer) -> Option<Rules> {
    let request = RequestBody::TakePart { listener, offer };
    match process.control.call(request, &[]) {
        Ok((ReplyBody::Listening { rules, .. }, _)) => portolan_proto::decode(&rules?).ok(),
        _ => None,
    }
}

/// There is another server, which has the listener again: this process goes on with its part, if it has one.
pub(crate) fn go_on(process: &Process, listener: &Socket, (id, backlog): (SessionId, u32)) {
    let slot = {
        let delegations = &process.lock().delegations;
        delegations.slot_of(id).filter(|_| delegations.is_part(id))
    };
    let Some(slot) = slot else { return };
    match ask(process, id, PartOffer::AsBefore(slot)) {
        Some(rules) => {
            let options = listener.options().handshake();
            process
                .lock()
                .delegations
                .follow(id, (rules, options, backlog));
        }
        None => end(process, id),
    }
}

fn begin(
    process: &'static Process,
    (listener, id, backlog): (&Arc<Socket>, SessionId, u32),
    slot: Slot,
    rules: Rules,
) -> Result<(), Errno> {
    let (near, far) = socket_pair(PairKind::SeqPacket)?;
    let near = InternalFd::new(near);
    show_in_kernel_epolls(listener, near.as_fd().as_raw_fd())?;
    let own = OwnEnds {
        near,
        far: InternalFd::new(far),
        listener: Arc::downgrade(listener),
    };
    let options = listener.options().handshake();
    let place = (id, slot, Ends::Own(own));
    process
        .lock()
        .begin_delegation(clock::now(), place, (rules, options, backlog));
    process.ensure_helper();
    wake_sleepers(listener);
    Ok(())
}

/// Enters the descriptor of this process's part where the listener's is.
fn show_in_kernel_epolls(listener: &Arc<Socket>, near: RawFd) -> Result<(), Errno> {
    for (_, epoll) in table::epolls() {
        for interest in epoll.interests_in_listener(listener) {
            let event = Some(kernel_event(listener, interest));
            epoll_control(epoll.fd(), libc::EPOLL_CTL_ADD, near, event)?;
        }
    }
    Ok(())
}

/// Leaves connections to others that the program does not accept. Called by the background thread.
pub(crate) fn attend(process: &'static Process) {
    let due = process.lock().delegations.due_parts(clock::now());
    for listener in due.iter().filter_map(Weak::upgrade) {
        let Some(id) = listener.setup().session else {
            continue;
        };
        if has_server(process, &listener) {
            give_up_waiting(process, id);
        } else {
            process.lock().delegations.look_later(clock::now(), id);
        }
    }
}

/// Does the server know the listener? Otherwise nobody would take connections. One that was killed may look alive for a
/// while.
fn has_server(process: &Process, listener: &Socket) -> bool {
    reopen::is_open(process, &listener.setup()) && process.control.is_answered_now()
}

fn give_up_waiting(process: &'static Process, listener: SessionId) {
    let now = clock::now();
    let Some(GivenUp { waiting, is_last }) = process.lock().give_up_waiting(now, listener) else {
        return;
    };
    return_pending(process, listener, waiting);
    if is_last {
        end(process, listener);
    }
}
