//! Connections that this process has accepted or opened and the server does not know (ADR 31). Most end before they would be
//! registered: nothing of them needs a message. A closed one is finished here; if that takes long, by the server.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::journal::JournalRecord;
use portolan_stack::{Session, Stack, TcpSession};
use portolan_sys::shm::{JournalWriter, RecordIndex};
use portolan_tcp::StateName;
use portolan_types::{FlowKey, Instant, SessionId, Slot};

use crate::runtime::Core;
use crate::runtime::orphans::Orphan;
use crate::socket::Socket;

/// An open connection is registered at this age: from then on its own row saves the look-up by flow, and it survives a
/// restart of the server.
const REGISTER_AFTER: Duration = Duration::from_secs(1);

/// A closed connection that has not reached TIME-WAIT by then goes to the server, which has limits for those whose peers
/// do not answer.
const FINISH_HERE: Duration = Duration::from_secs(2);

/// Connections that are due within that time are attended to together.
const TOGETHER: Duration = Duration::from_millis(100);

/// Closed connections looked at to find one in TIME-WAIT that can give way.
const LOOKED_AT: usize = 16;

#[derive(Debug)]
pub(crate) struct Unregistered {
    journal: JournalWriter,
    by_slot: HashMap<Slot, Connection>,
    /// Connections that wait to be accepted, with their listeners.
    waiting: HashMap<Slot, (SessionId, RecordIndex)>,
    last_number: u64,
    /// Open ones, the oldest first.
    open: VecDeque<Known>,
    /// Closed ones, and those of them that have been in TIME-WAIT; the oldest first.
    closing: VecDeque<Known>,
    time_wait: VecDeque<Known>,
    /// A connection is to be registered at once.
    is_urgent: bool,
    /// Connections that have ended, whose last segments may not have been sent yet.
    ended: Vec<Slot>,
}

#[derive(Debug)]
struct Connection {
    /// The listener, or the leased port.
    port: SessionId,
    flow: FlowKey,
    record: RecordIndex,
    /// Tells it from earlier ones at the slot.
    number: u64,
    is_closed: bool,
}

/// A connection in a queue, which it may have left.
#[derive(Clone, Copy, Debug)]
struct Known {
    since: Instant,
    slot: Slot,
    number: u64,
}

/// What becomes of connections that are closed and unfinished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    Kept,
    HandedOver,
}

/// A closed connection on its way to the server, from the slot that it has here.
pub(crate) struct Leaving {
    pub(crate) port: SessionId,
    pub(crate) slot: Slot,
    pub(crate) session: Box<TcpSession>,
}

/// Connections that the server has to know.
#[derive(Default)]
pub(crate) struct DueConnections {
    pub(crate) to_register: Vec<Arc<Socket>>,
    pub(crate) to_hand_over: Vec<Leaving>,
}

impl Unregistered {
    pub(crate) fn new(journal: JournalWriter) -> Unregistered {
        Unregistered {
            journal,
            by_slot: HashMap::new(),
            waiting: HashMap::new(),
            last_number: 0,
            open: VecDeque::new(),
            closing: VecDeque::new(),
            time_wait: VecDeque::new(),
            is_urgent: false,
            ended: Vec::new(),
        }
    }

    /// Another server has given this journal.
    pub(super) fn continue_in(&mut self, journal: JournalWriter) {
        self.journal.continue_in(journal);
    }

    /// Returns the ports that unregistered connections are on.
    pub(super) fn used_ports(&self) -> HashSet<SessionId> {
        self.by_slot.values().map(|it| it.port).collect()
    }

    /// Has its program closed the unregistered connection at `slot`?
    pub(super) fn is_closed(&self, slot: Slot) -> bool {
        self.by_slot.get(&slot).is_some_and(|it| it.is_closed)
    }

    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.by_slot.contains_key(&slot)
    }

    fn enter(&mut self, now: Instant, port: SessionId, (slot, flow): (Slot, FlowKey)) -> bool {
        let record = JournalRecord::new(port, &flow);
        let Some(record) = self.journal.enter(&record) else {
            return false;
        };
        self.last_number += 1;
        let number = self.last_number;
        self.open.push_back(Known {
            since: now,
            slot,
            number,
        });
        let connection = Connection {
            port,
            flow,
            record,
            number,
            is_closed: false,
        };
        self.by_slot.insert(slot, connection);
        true
    }

    /// A connection waits to be accepted. If the journal is full, its peer will hear late if this process is killed.
    pub(super) fn note_waiting(&mut self, listener: SessionId, (slot, flow): (Slot, FlowKey)) {
        self.forget_waiting(slot);
        if let Some(record) = self.journal.enter(&JournalRecord::new(listener, &flow)) {
            self.waiting.insert(slot, (listener, record));
        }
    }

    /// The connection at `slot` waits no longer.
    pub(super) fn forget_waiting(&mut self, slot: Slot) {
        if let Some((_, record)) = self.waiting.remove(&slot) {
            self.journal.erase(record);
        }
    }

    pub(super) fn forget_waiting_for(&mut self, listener: SessionId) {
        let ended = self.waiting.extract_if(|_, (its, _)| *its == listener);
        for (_, (_, record)) in ended {
            self.journal.erase(record);
        }
    }

    /// Registering the connection at `slot` pays already.
    pub(super) fn hurry(&mut self, slot: Slot) {
        if let Some(connection) = self.by_slot.get(&slot).filter(|it| !it.is_closed) {
            self.open.push_front(Known {
                since: Instant::ZERO,
                slot,
                number: connection.number,
            });
            self.is_urgent = true;
        }
    }

    fn is(&self, known: &Known) -> bool {
        let here = self.by_slot.get(&known.slot);
        here.is_some_and(|connection| connection.number == known.number)
    }

    /// Its program has closed the connection at `slot`. Returns false if the server knows it.
    fn close(&mut self, now: Instant, slot: Slot) -> bool {
        let Some(connection) = self.by_slot.get_mut(&slot) else {
            return false;
        };
        connection.is_closed = true;
        self.closing.push_back(Known {
            since: now,
            slot,
            number: connection.number,
        });
        true
    }

    /// The connection at `slot` has ended; if its program has closed it, it can be removed.
    pub(crate) fn note_end(&mut self, slot: Slot) {
        if self.is_closed(slot) {
            self.ended.push(slot);
        }
    }

    /// Another connection between the endpoints of the one at `slot` is being opened.
    pub(crate) fn reopened(&mut self, stack: &mut Stack, slot: Slot) {
        if self.is_closed(slot) {
            stack.remove(slot);
        }
        self.remove(slot);
    }

    fn remove(&mut self, slot: Slot) -> Option<(SessionId, FlowKey)> {
        let connection = self.by_slot.remove(&slot)?;
        self.journal.erase(connection.record);
        Some((connection.port, connection.flow))
    }

    /// Returns all connections, each with whether it is closed.
    fn slots(&self) -> Vec<(Slot, bool)> {
        let all = self.by_slot.iter();
        all.map(|(slot, it)| (*slot, it.is_closed)).collect()
    }

    fn slots_of(&self, port: SessionId) -> impl Iterator<Item = (Slot, bool)> + '_ {
        let all = self.by_slot.iter();
        all.filter(move |(_, it)| it.port == port)
            .map(|(slot, it)| (*slot, it.is_closed))
    }

    /// Returns when a connection is to be registered, or to go to the server. Most have ended before.
    fn deadline(&mut self) -> Option<Instant> {
        let register = self.first(|it| &mut it.open).map(|it| it + REGISTER_AFTER);
        let hand_over = self.first(|it| &mut it.closing).map(|it| it + FINISH_HERE);
        let first = register.into_iter().chain(hand_over).min()?;
        let step = TOGETHER.as_nanos() as u64;
        Some(Instant::from_nanos(first.as_nanos().next_multiple_of(step)))
    }

    /// Returns since when the first of `queue` is there.
    fn first(&mut self, queue: fn(&mut Unregistered) -> &mut VecDeque<Known>) -> Option<Instant> {
        while let Some(first) = queue(self).front().copied() {
            if self.is(&first) {
                return Some(first.since);
            }
            queue(self).pop_front();
        }
        None
    }

    /// Takes those of `queue` that are as old as `age`.
    fn take_due(
        &mut self,
        now: Instant,
        (queue, age): (fn(&mut Unregistered) -> &mut VecDeque<Known>, Duration),
    ) -> Vec<Known> {
        let mut due = Vec::new();
        while let Some(first) = queue(self).front().copied()
            && first.since + age <= now
        {
            queue(self).pop_front();
            if self.is(&first) {
                due.push(first);
            }
        }
        due
    }
}

impl Core {
    /// Leaves an accepted connection unregistered. Returns false if the server has to know it from the beginning.
    pub(crate) fn leave_unregistered(
        &mut self,
        now: Instant,
        listener: SessionId,
        (slot, flow): (Slot, FlowKey),
    ) -> bool {
        self.delegations.may_leave_unregistered(listener)
            && self.enter_unregistered(now, listener, (slot, flow))
    }

    /// Is there an unregistered connection at `slot`, whose listener is delegated to this process?
    pub(crate) fn is_on_delegated_port(&self, slot: Slot) -> bool {
        let connection = self.unregistered.by_slot.get(&slot);
        connection.is_some_and(|it| self.delegations.has(it.port))
    }

    pub(super) fn enter_unregistered(
        &mut self,
        now: Instant,
        port: SessionId,
        (slot, flow): (Slot, FlowKey),
    ) -> bool {
        self.unregistered.enter(now, port, (slot, flow))
            || (self.end_a_time_wait() && self.unregistered.enter(now, port, (slot, flow)))
    }

    /// Ends the oldest TIME-WAIT that is found at once.
    fn end_a_time_wait(&mut self) -> bool {
        while let Some(known) = self.unregistered.time_wait.pop_front() {
            if self.unregistered.is(&known) {
                self.remove_unregistered(known.slot);
                return true;
            }
        }
        for _ in 0..LOOKED_AT {
            let Some(known) = self.unregistered.closing.pop_front() else {
                break;
            };
            if !self.unregistered.is(&known) {
                continue;
            }
            if self.is_in_time_wait(known.slot) {
                self.remove_unregistered(known.slot);
                return true;
            }
            self.unregistered.closing.push_back(known);
        }
        false
    }

    fn is_in_time_wait(&mut self, slot: Slot) -> bool {
        let session = self.stack.tcp(slot);
        session.is_some_and(|it| it.connection.state() == StateName::TimeWait)
    }

    /// Finishes the connection at `slot`, which its program has closed, here. Returns false if the server knows it.
    pub(crate) fn finish_unregistered(&mut self, now: Instant, slot: Slot) -> bool {
        if !self.unregistered.close(now, slot) {
            return false;
        }
        let session = self.stack.tcp(slot);
        if session.is_none_or(|it| it.connection.is_closed()) {
            self.unregistered.note_end(slot);
        }
        true
    }

    /// The connection at `slot` is registered from now on.
    pub(crate) fn note_registered(&mut self, now: Instant, slot: Slot, id: SessionId) {
        self.leave_to_server(now, slot);
        if let Some(session) = self.stack.tcp(slot) {
            session.id = id;
        }
    }

    /// The server knows the connection at `slot`, or will in a moment. Until it has a row, its segments arrive by that of its
    /// port. Returns the port.
    fn leave_to_server(&mut self, now: Instant, slot: Slot) -> Option<SessionId> {
        let (port, flow) = self.unregistered.remove(slot)?;
        self.delegations.registered(now, port, (slot, flow));
        self.leases.flows.registered(now, slot, &flow);
        self.leases.spend(now, port);
        Some(port)
    }

    /// Removes a closed connection.
    fn remove_unregistered(&mut self, slot: Slot) -> Option<(SessionId, Box<TcpSession>)> {
        let (port, flow) = self.unregistered.remove(slot)?;
        self.delegations.forget_ended(port, (slot, flow));
        self.leases.flows.forget_ended(slot, &flow);
        Some((port, self.take_stream(slot)?))
    }

    fn take_stream(&mut self, slot: Slot) -> Option<Box<TcpSession>> {
        match self.stack.remove(slot)? {
            Session::Tcp(session) => Some(session),
            Session::Udp(_) => None,
        }
    }

    /// Takes a closed connection, for the server to finish; [`Core::note_handed_over`] must follow.
    fn return_closed(&mut self, now: Instant, slot: Slot) -> Option<Leaving> {
        let port = self.leave_to_server(now, slot)?;
        let Session::Tcp(session) = self.stack.take(slot)? else {
            return None;
        };
        self.leaving += 1;
        Some(Leaving {
            port,
            slot,
            session,
        })
    }

    /// The server has been told of so many of the connections that have left.
    pub(crate) fn note_handed_over(&mut self, count: usize) {
        self.leaving -= count;
    }

    /// There was no server that a closed connection could leave to.
    pub(crate) fn keep_leaving(&mut self, now: Instant, leaving: Leaving) {
        let Leaving { slot, session, .. } = leaving;
        self.leases.flows.opened(slot, session.flow);
        self.keep_orphan(now, Orphan::new(slot), Session::Tcp(session));
    }

    /// The server does not know the ports of an earlier one: what has closed there goes to it by name.
    pub(super) fn leave_closed_of_before(&mut self) {
        let (leases, delegations) = (&self.leases, &self.delegations);
        let has_port = |port| leases.has(port) || delegations.has(port);
        let all = self.unregistered.by_slot.iter();
        let of_before = all.filter(|(_, it)| it.is_closed && !has_port(it.port));
        let of_before: Vec<Slot> = of_before.map(|(slot, _)| *slot).collect();
        for slot in of_before {
            if !self.is_in_time_wait(slot) {
                self.unregistered.remove(slot);
                self.put_back(Orphan::new(slot));
            }
        }
    }

    /// The server has adopted what a closed socket has left here.
    pub(crate) fn note_orphan_adopted(&mut self, now: Instant, slot: Slot, id: SessionId) {
        if let Some(session) = self.stack.tcp(slot) {
            session.id = id;
            self.leases.flows.registered(now, slot, &session.flow);
        }
    }

    /// Removes the connection at `slot` as it is. Returns false if the server knows it.
    pub(super) fn drop_unregistered(&mut self, slot: Slot) -> bool {
        self.remove_unregistered(slot).is_some()
    }

    /// Has the background thread register connections that are busy.
    pub(super) fn pass_on_urgent(&mut self) {
        if std::mem::take(&mut self.unregistered.is_urgent) {
            self.call_helper();
        }
    }

    /// Removes connections that have ended, once their last segments are sent.
    pub(super) fn remove_ended(&mut self) {
        if self.unregistered.ended.is_empty() || self.stack.has_output() {
            return;
        }
        for slot in std::mem::take(&mut self.unregistered.ended) {
            self.remove_unregistered(slot);
        }
    }

    /// Returns when a connection is to be registered or handed to the server, or ports may be returned.
    pub(crate) fn next_registration(&mut self) -> Option<Instant> {
        let deadlines = [self.unregistered.deadline(), self.leases.deadline()];
        deadlines.into_iter().flatten().min()
    }

    /// Takes the connections that are to be registered, or handed to the server, by now.
    pub(crate) fn take_due_connections(&mut self, now: Instant) -> DueConnections {
        let mut taken = DueConnections::default();
        let open = self
            .unregistered
            .take_due(now, (|it| &mut it.open, REGISTER_AFTER));
        for known in open {
            if let Some(socket) = self.socket_at(known.slot) {
                taken.to_register.push(socket);
                // In case it fails.
                let again = Known {
                    since: now,
                    ..known
                };
                self.unregistered.open.push_back(again);
            }
        }
        let closing = self
            .unregistered
            .take_due(now, (|it| &mut it.closing, FINISH_HERE));
        for known in closing {
            if self.is_in_time_wait(known.slot) {
                self.unregistered.time_wait.push_back(known);
            } else {
                taken
                    .to_hand_over
                    .extend(self.return_closed(now, known.slot));
            }
        }
        taken
    }

    /// Another process, or none, will have the descriptors: takes all open connections, and, if this process ends, the closed
    /// ones.
    pub(crate) fn take_all_unregistered(&mut self, now: Instant, closed: Closed) -> DueConnections {
        let all = self.unregistered.slots();
        self.take(now, all, closed)
    }

    /// From now on the server must know all connections of the listener or the leased port: takes those that it does not.
    pub(crate) fn take_unregistered(&mut self, now: Instant, port: SessionId) -> DueConnections {
        self.delegations.leave_none_unregistered(port);
        let all: Vec<_> = self.unregistered.slots_of(port).collect();
        self.take(now, all, Closed::HandedOver)
    }

    /// `all` says of each connection whether it is closed.
    fn take(&mut self, now: Instant, all: Vec<(Slot, bool)>, closed: Closed) -> DueConnections {
        let mut taken = DueConnections::default();
        for (slot, is_closed) in all {
            if !is_closed {
                taken.to_register.extend(self.socket_at(slot));
            } else if closed == Closed::HandedOver {
                taken.to_hand_over.extend(self.return_closed(now, slot));
            }
        }
        taken
    }

    /// Without the listener's delegation, no segments reach its unregistered connections.
    pub(super) fn cut_off_unregistered(&mut self, now: Instant, listener: SessionId) {
        let all: Vec<_> = self.unregistered.slots_of(listener).collect();
        self.cut_off(now, all);
    }

    /// Likewise without a server, for all.
    pub(super) fn cut_off_all_unregistered(&mut self, now: Instant) {
        let all = self.unregistered.slots();
        self.cut_off(now, all);
    }

    fn cut_off(&mut self, now: Instant, all: Vec<(Slot, bool)>) {
        for (slot, is_closed) in all {
            self.unregistered.remove(slot);
            if is_closed {
                self.stack.remove(slot);
            } else {
                self.end_one(now, slot);
            }
        }
    }
}
