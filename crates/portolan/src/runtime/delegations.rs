//! Listeners whose handshakes this process performs itself (ADR 15). As for any other listener, its
//! descriptor shows that connections wait to be accepted: a single message, sent from the far end,
//! of which this process keeps a copy, stands for all of them.

use std::os::fd::AsFd;

use portolan_proto::control::{DescriptorEvent, HandshakeOptions, RequestBody};
use portolan_proto::encode;
use portolan_proto::filter::RecordHeader;
use portolan_proto::report::StatisticsRow;
use portolan_stack::passive::Rules;
use portolan_stack::{Delegation, FloodReport, Session, Stack, TcpSession};
use portolan_sys::unix;
use portolan_tcp::Events;
use portolan_types::{FlowKey, Instant, SessionId, Slot};

use crate::descriptors::InternalFd;
use crate::runtime::Core;

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
    /// The message is on the descriptor.
    is_announced: bool,
    /// Accepted connections may stay unregistered.
    may_leave_unregistered: bool,
    handshakes: Delegation,
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

    /// Returns the number of connections that wait to be accepted.
    pub(crate) fn waiting(&self, id: SessionId) -> Option<u32> {
        let known = self.0.iter().find(|known| known.id == id)?;
        Some(known.handshakes.waiting())
    }

    fn named(&mut self, id: SessionId) -> Option<&mut Delegated> {
        self.0.iter_mut().find(|known| known.id == id)
    }

    pub(crate) fn slot_of(&self, id: SessionId) -> Option<Slot> {
        self.0
            .iter()
            .find(|known| known.id == id)
            .map(|known| known.slot)
    }

    pub(crate) fn may_leave_unregistered(&self, id: SessionId) -> bool {
        let known = self.0.iter().find(|known| known.id == id);
        known.is_some_and(|known| known.may_leave_unregistered)
    }

    /// From now on all accepted connections are registered.
    pub(crate) fn leave_none_unregistered(&mut self, id: SessionId) {
        if let Some(known) = self.named(id) {
            known.may_leave_unregistered = false;
        }
    }

    /// The listener gets another descriptor, and its port another server.
    pub(crate) fn begin_anew(&mut self, id: SessionId) {
        if let Some(known) = self.named(id) {
            known.far = None;
            known.is_announced = false;
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

    /// Returns true if the session has not been accepted yet.
    pub(crate) fn on_changed(&mut self, stack: &mut Stack, changed: (Slot, Events)) -> bool {
        self.0
            .iter_mut()
            .any(|known| known.handshakes.on_changed(stack, changed))
    }
}

impl Delegated {
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
        (id, slot, far): (SessionId, Slot, Option<InternalFd>),
        (rules, options, backlog): (Rules, HandshakeOptions, u32),
    ) {
        if let Some(known) = self.delegations.named(id) {
            if known.far.is_some() {
                known.handshakes.change(rules, options, backlog);
            } else {
                known.far = far;
                known.handshakes.follow(rules, options, backlog);
                self.attend_delegations();
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
                is_announced: false,
                may_leave_unregistered: true,
                handshakes,
            });
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
            None => self.keep_orphan(now, slot, Session::Tcp(session)),
        }
    }

    /// Notes that the message was read from the listener's descriptor.
    pub(crate) fn take_announcement(&mut self, listener: SessionId) {
        if let Some(known) = self.delegations.named(listener) {
            known.is_announced = false;
        }
    }

    /// Ends a delegation. Returns the connections that were not accepted.
    pub(crate) fn surrender_delegation(
        &mut self,
        now: Instant,
        listener: SessionId,
    ) -> Option<Vec<TcpSession>> {
        self.cut_off_unregistered(now, listener);
        let known = self.take_delegation(listener)?;
        Some(known.handshakes.surrender(&mut self.stack))
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
        self.orphans
            .extend(known.handshakes.abort(&mut self.stack, now));
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
    pub(crate) fn attend_delegations(&mut self) {
        for known in &mut self.delegations.0 {
            known.handshakes.answer(&self.routes, &mut self.channel);
            known.announce();
            let listener = known.id;
            let reports = known.handshakes.flood_reports().into_iter();
            self.outbox.extend(reports.map(|report| match report {
                FloodReport::ExemptFlows(flows) => RequestBody::ExemptFlows { listener, flows },
                FloodReport::Flooded(queue) => RequestBody::Flooded { listener, queue },
            }));
        }
    }
}
