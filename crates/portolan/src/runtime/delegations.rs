//! Listeners whose handshakes this process performs itself (ADR 15). As for any other listener, its
//! descriptor shows that connections wait to be accepted: a single message, sent from the far end,
//! of which this process keeps a copy, stands for all of them.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Weak;
use std::time::Duration;

use portolan_proto::control::{DescriptorEvent, HandshakeOptions, RequestBody};
use portolan_proto::encode;
use portolan_proto::filter::RecordHeader;
use portolan_proto::report::StatisticsRow;
use portolan_stack::passive::Rules;
use portolan_stack::{Delegation, FloodReport, Routes, Session, Stack, TcpSession};
use portolan_sys::unix;
use portolan_tcp::Events;
use portolan_types::{FlowKey, Instant, SessionId, Slot};

use crate::descriptors::InternalFd;
use crate::runtime::Core;
use crate::runtime::orphans::Orphan;
use crate::socket::Socket;

/// All listeners of this process that are delegated to it.
#[derive(Debug, Default)]
pub(crate) struct Delegations(Vec<Delegated>);

#[derive(Debug)]
struct Delegated {
    id: SessionId,
    /// The slot that the port's segments are sent to.
    slot: Slot,
    /// Absent while the listener's descriptor is being replaced, for another server.
    far: Option<InternalFd>,
    /// Set if other processes perform the handshakes, too.
    part: Option<Part>,
    /// The message is on the descriptor.
    is_announced: bool,
    /// Accepted connections may stay unregistered.
    may_leave_unregistered: bool,
    handshakes: Delegation,
}

/// A part of the handshakes of a listener that other processes have, too (ADR 39).
#[derive(Debug)]
struct Part {
    /// Becomes readable for connections that wait here: the listener's own descriptor is for all processes.
    _near: InternalFd,
    listener: Weak<Socket>,
    /// Since when a connection has waited and none was accepted.
    idle_since: Option<Instant>,
    /// How often waiting connections have been given up since the last one was accepted.
    given_up: u32,
}

impl Part {
    fn new(near: InternalFd, listener: Weak<Socket>) -> Part {
        if let Some(listener) = listener.upgrade() {
            listener.set_own_near(Some(near.as_fd().as_raw_fd()));
        }
        Part {
            _near: near,
            listener,
            idle_since: None,
            given_up: 0,
        }
    }

    fn note_accept(&mut self) {
        self.idle_since = None;
        self.given_up = 0;
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// When the waiting connections go to others.
    fn due(&self) -> Option<Instant> {
        Some(self.idle_since? + GIVE_UP_AFTER)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.upgrade() {
            listener.set_own_near(None);
        }
    }
}

/// Where the connections of a delegated listener are announced.
pub(crate) enum Ends {
    /// On the listener's descriptor, with this far end, if it is new.
    Listeners(Option<InternalFd>),
    /// On a descriptor of this process.
    Own(OwnEnds),
}

pub(crate) struct OwnEnds {
    pub(crate) near: InternalFd,
    pub(crate) far: InternalFd,
    pub(crate) listener: Weak<Socket>,
}

/// How long a connection waits while the program accepts none, before other processes may accept it.
const GIVE_UP_AFTER: Duration = Duration::from_millis(20);

/// A program that gives up connections that often, and accepts none in between, leaves the handshakes to others.
const GIVEN_UP_MAX: u32 = 2;

/// Connections that go to other processes.
pub(crate) struct GivenUp {
    pub(crate) waiting: Vec<TcpSession>,
    /// This process takes no part any more.
    pub(crate) is_last: bool,
}

impl Delegations {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn has(&self, id: SessionId) -> bool {
        self.slot_of(id).is_some()
    }

    pub(crate) fn ids(&self) -> Vec<SessionId> {
        self.0.iter().map(|known| known.id).collect()
    }

    /// Returns the statistics of the listeners.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (Slot, StatisticsRow)> {
        self.0.iter().map(|known| {
            let row = StatisticsRow {
                session: known.id.0,
                state: 0,
                reserved: 0,
                figures: known.handshakes.cookies().figures(),
            };
            (known.slot, row)
        })
    }

    /// Does a connection wait to be accepted that the listener's descriptor says nothing about, or one of this process's own?
    pub(crate) fn has_at_hand(&self, id: SessionId) -> bool {
        self.get(id).is_some_and(|known| {
            known.handshakes.has_ready() && (known.part.is_some() || !known.is_announced)
        })
    }

    /// Returns true if the message is still on the descriptor of this process's own although no connection waits; the caller
    /// takes it away.
    pub(crate) fn withdraw_announcement(&mut self, id: SessionId) -> bool {
        let Some(known) = self.named(id).filter(|known| known.part.is_some()) else {
            return false;
        };
        let is_vain = known.is_announced && !known.handshakes.has_ready();
        known.is_announced &= !is_vain;
        is_vain
    }

    /// Returns the number of connections that wait to be accepted.
    pub(crate) fn waiting(&self, id: SessionId) -> Option<u32> {
        let known = self.get(id)?;
        Some(known.handshakes.waiting())
    }

    fn get(&self, id: SessionId) -> Option<&Delegated> {
        self.0.iter().find(|known| known.id == id)
    }

    fn named(&mut self, id: SessionId) -> Option<&mut Delegated> {
        self.0.iter_mut().find(|known| known.id == id)
    }

    pub(crate) fn slot_of(&self, id: SessionId) -> Option<Slot> {
        self.get(id).map(|known| known.slot)
    }

    pub(crate) fn may_leave_unregistered(&self, id: SessionId) -> bool {
        self.get(id)
            .is_some_and(|known| known.may_leave_unregistered)
    }

    /// From now on all accepted connections are registered.
    pub(crate) fn leave_none_unregistered(&mut self, id: SessionId) {
        if let Some(known) = self.named(id) {
            known.may_leave_unregistered = false;
        }
    }

    /// Do other processes perform the listener's handshakes, too?
    pub(crate) fn is_part(&self, id: SessionId) -> bool {
        self.get(id).is_some_and(|known| known.part.is_some())
    }

    /// Does this process alone perform the listener's handshakes?
    pub(crate) fn is_sole(&self, id: SessionId) -> bool {
        self.has(id) && !self.is_part(id)
    }

    /// Returns when waiting connections are to be given up.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let parts = self.0.iter().filter_map(|known| known.part.as_ref());
        parts.filter_map(Part::due).min()
    }

    /// Returns when connections stop waiting for their first bytes.
    pub(crate) fn deferred_until(&self) -> Option<Instant> {
        let all = self.0.iter();
        all.filter_map(|known| known.handshakes.deferred_until())
            .min()
    }

    /// Returns the listeners whose waiting connections are to be given up.
    pub(crate) fn due_parts(&self, now: Instant) -> Vec<Weak<Socket>> {
        let parts = self.0.iter().filter_map(|known| known.part.as_ref());
        let due = parts.filter(|part| part.is_due(now));
        due.map(|part| Weak::clone(&part.listener)).collect()
    }

    /// The waiting connections cannot be given up yet.
    pub(crate) fn look_later(&mut self, now: Instant, id: SessionId) {
        if let Some(part) = self.named(id).and_then(|known| known.part.as_mut()) {
            part.idle_since = Some(now);
        }
    }

    /// The listener gets another descriptor, and its port another server.
    pub(crate) fn begin_anew(&mut self, id: SessionId) {
        if let Some(known) = self.named(id).filter(|known| known.part.is_none()) {
            known.far = None;
            known.is_announced = false;
        }
    }

    /// Another server has given the rules.
    pub(crate) fn follow(
        &mut self,
        id: SessionId,
        (rules, options, backlog): (Rules, HandshakeOptions, u32),
    ) {
        if let Some(known) = self.named(id) {
            known.handshakes.follow(rules, options, backlog);
        }
    }

    /// An accepted connection is registered from now on.
    pub(crate) fn registered(
        &mut self,
        now: Instant,
        id: SessionId,
        (slot, flow): (Slot, FlowKey),
    ) {
        if let Some(known) = self.named(id) {
            known.handshakes.registered(now, slot, &flow);
        }
    }

    /// An accepted connection is over.
    pub(crate) fn forget_ended(&mut self, id: SessionId, (slot, flow): (Slot, FlowKey)) {
        if let Some(known) = self.named(id) {
            known.handshakes.forget_ended(slot, &flow);
        }
    }

    /// Returns the delegation that a frame is for, if it came by the port's row.
    pub(crate) fn of(&mut self, record: &RecordHeader) -> Option<&mut Delegation> {
        if self.0.is_empty() || record.flags & RecordHeader::BINDING == 0 {
            return None;
        }
        let known = self.0.iter_mut().find(|known| known.slot.0 == record.slot);
        known.map(|known| &mut known.handshakes)
    }

    /// Processes a frame for a session that has left, which the server could not be given.
    fn input_without_server(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        frame: &[u8],
    ) -> bool {
        let mut all = self.0.iter_mut();
        all.any(|known| {
            let with = (&mut *stack, routes);
            known.handshakes.input_without_server(with, now, frame)
        })
    }

    /// Returns true if the session has not been accepted yet.
    pub(crate) fn on_changed(&mut self, stack: &mut Stack, changed: (Slot, Events)) -> bool {
        self.0
            .iter_mut()
            .any(|known| known.handshakes.on_changed(stack, changed))
    }
}

impl Delegated {
    fn note_waiting(&mut self, now: Instant) {
        if let Some(part) = &mut self.part
            && self.handshakes.has_ready()
        {
            part.idle_since.get_or_insert(now);
        }
    }

    /// Shows on the descriptor that connections wait.
    fn announce(&mut self) {
        let Some(far) = &self.far else { return };
        if self.is_announced || !self.handshakes.has_ready() {
            return;
        }
        // A full descriptor has other connections to accept; their accept calls lead to the next attempt.
        let token = encode(&DescriptorEvent::AcceptedHere);
        self.is_announced = unix::send(far.as_fd(), &token, &[]).is_ok();
    }
}

impl Core {
    /// Takes over the handshakes of a listener, or changes their rules.
    pub(crate) fn begin_delegation(
        &mut self,
        now: Instant,
        (id, slot, ends): (SessionId, Slot, Ends),
        (rules, options, backlog): (Rules, HandshakeOptions, u32),
    ) {
        let (far, part) = match ends {
            Ends::Listeners(far) => (far, None),
            Ends::Own(own) => (Some(own.far), Some(Part::new(own.near, own.listener))),
        };
        if let Some(known) = self.delegations.named(id) {
            if known.far.is_some() {
                known.handshakes.change(rules, options, backlog);
            } else {
                known.far = far;
                self.delegations.follow(id, (rules, options, backlog));
                self.attend_delegations(now);
            }
        } else if let Some(far) = far {
            let mut handshakes = Delegation::new(now, rules, options, backlog);
            // Frames that arrived after the row was changed to point here.
            for (record, frame) in self.stack.take_early(slot) {
                let with = (&mut self.stack, &self.routes);
                handshakes.input(with, now, &record, &frame);
            }
            self.delegations.0.push(Delegated {
                id,
                slot,
                far: Some(far),
                part,
                is_announced: false,
                may_leave_unregistered: true,
                handshakes,
            });
            self.poll(now);
        }
    }

    /// There is no server that these frames, for sessions that have left, could be passed on to.
    pub(crate) fn take_back_frames(&mut self, now: Instant, frames: &[Vec<u8>]) {
        let mut opens = false;
        for frame in frames {
            let with = (&mut self.stack, &self.routes);
            opens |= self.delegations.input_without_server(with, now, frame);
        }
        if opens {
            self.poll(now);
        }
    }

    /// Accepts the connection of a delegated listener that has waited longest.
    pub(crate) fn accept_delegated(
        &mut self,
        now: Instant,
        listener: SessionId,
    ) -> Option<(Slot, Box<TcpSession>)> {
        let known = self.delegations.named(listener)?;
        let accepted = known.handshakes.accept(&mut self.stack, now)?;
        if let Some(part) = &mut known.part {
            part.note_accept();
        }
        self.unregistered.forget_waiting(accepted.0);
        Some(accepted)
    }

    /// Puts back a connection that could not be accepted after all.
    pub(crate) fn return_delegated(
        &mut self,
        now: Instant,
        listener: SessionId,
        (slot, session): (Slot, Box<TcpSession>),
    ) {
        match self.delegations.named(listener) {
            Some(known) => {
                let with = (&mut self.stack, now);
                let flow = session.flow;
                known.handshakes.return_accepted(with, (slot, session));
                self.unregistered.note_waiting(listener, (slot, flow));
            }
            None => self.keep_orphan(now, Orphan::new(slot), Session::Tcp(session)),
        }
    }

    /// Notes that the message was read from the listener's descriptor.
    pub(crate) fn take_announcement(&mut self, listener: SessionId) {
        if let Some(known) = self.delegations.named(listener) {
            known.is_announced = false;
        }
    }

    /// Takes the connections of a listener that have waited for so long that another process may accept them;
    /// [`Core::note_handed_over`] must follow.
    pub(crate) fn give_up_waiting(&mut self, now: Instant, listener: SessionId) -> Option<GivenUp> {
        let known = self.delegations.named(listener)?;
        let part = known.part.as_mut().filter(|part| part.is_due(now))?;
        part.idle_since = None;
        part.given_up += 1;
        let is_last = part.given_up >= GIVEN_UP_MAX;
        let given_up = known.handshakes.give_up_waiting(&mut self.stack, now);
        for (slot, _) in &given_up {
            self.unregistered.forget_waiting(*slot);
        }
        self.leaving += given_up.len();
        let waiting = given_up.into_iter().map(|(_, session)| session).collect();
        Some(GivenUp { waiting, is_last })
    }

    /// Resets a connection that nobody has accepted, and that the server could not be given.
    pub(crate) fn reset_pending(&mut self, now: Instant, mut session: TcpSession) {
        session.connection.abort(now);
        let slot = self.stack.insert(now, Session::Tcp(Box::new(session)));
        self.orphans.push(Orphan::new(slot));
        self.poll_tx(now);
    }

    /// Ends a delegation. Returns the connections that were not accepted; [`Core::note_handed_over`] must follow.
    pub(crate) fn surrender_delegation(
        &mut self,
        now: Instant,
        listener: SessionId,
    ) -> Option<Vec<TcpSession>> {
        self.cut_off_unregistered(now, listener);
        let known = self.take_delegation(listener)?;
        let waiting = known.handshakes.surrender(&mut self.stack);
        self.leaving += waiting.len();
        Some(waiting)
    }

    fn take_delegation(&mut self, listener: SessionId) -> Option<Delegated> {
        let delegations = &mut self.delegations.0;
        let at = delegations.iter().position(|known| known.id == listener)?;
        let known = delegations.swap_remove(at);
        self.unregistered.forget_waiting_for(listener);
        self.stack.remove(known.slot);
        Some(known)
    }

    /// Ends the delegation of a closed listener, and aborts the connections that wait to be accepted.
    pub(crate) fn abort_delegation(&mut self, now: Instant, listener: SessionId) {
        self.cut_off_unregistered(now, listener);
        let Some(known) = self.take_delegation(listener) else {
            return;
        };
        let aborted = known.handshakes.abort(&mut self.stack, now).into_iter();
        aborted.for_each(|slot| self.orphans.push(Orphan::new(slot)));
        self.poll_tx(now);
    }

    pub(crate) fn abort_delegations(&mut self, now: Instant) {
        for listener in self.delegations.ids() {
            self.abort_delegation(now, listener);
        }
    }

    /// Enters the connections whose handshakes are done in the journal, before their peers see anything acknowledged.
    pub(crate) fn note_done_handshakes(&mut self) {
        for known in &mut self.delegations.0 {
            for (slot, flow) in known.handshakes.take_done() {
                self.unregistered.note_waiting(known.id, (slot, flow));
            }
        }
    }

    /// Sends the handshakes' replies that need no session, and reports waiting connections and floods.
    pub(crate) fn attend_delegations(&mut self, now: Instant) {
        for known in &mut self.delegations.0 {
            known.handshakes.answer(&self.routes, &mut self.channel);
            known.handshakes.end_deferrals(now);
            if self.accepts_next != Some(known.id) {
                known.announce();
            }
            known.note_waiting(now);
            let listener = known.id;
            let reports = known.handshakes.flood_reports().into_iter();
            self.outbox.extend(reports.map(|report| match report {
                FloodReport::ExemptFlows(flows) => RequestBody::ExemptFlows { listener, flows },
                FloodReport::Flooded(queue) => RequestBody::Flooded { listener, queue },
            }));
        }
    }
}
