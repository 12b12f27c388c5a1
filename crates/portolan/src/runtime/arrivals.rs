//! Dispatches received frames: to a protocol of the program's own, a delegated listener, or a
//! session. Frames that none of these claims are passed to the server.

use portolan_proto::control::RequestBody;
use portolan_proto::filter::RecordHeader;
use portolan_stack::{DelegateInput, Input, Reassembled, Routes, Stack};
use portolan_sys::probes;
use portolan_types::{FlowKey, Instant, Slot};

use super::delegations::Delegations;
use super::leases::Leases;
use super::migrated_flows::MigratedFlows;
use super::unregistered::Unregistered;
use super::{Core, OUTBOX_MAX};
use crate::channel::layers::{self, Layer};
use crate::socket::inboxes::Inboxes;

/// Frames processed before sessions may answer: limits how long a reader holds the lock.
const BATCH: usize = 64;

/// The possible receivers of a frame.
pub(super) struct Claimants<'a> {
    pub(super) now: Instant,
    pub(super) stack: &'a mut Stack,
    routes: &'a Routes,
    delegations: &'a mut Delegations,
    unregistered: &'a mut Unregistered,
    leases: &'a mut Leases,
    migrated_flows: &'a MigratedFlows,
    inboxes: &'a mut Inboxes,
    outbox: &'a mut Vec<RequestBody>,
}

impl Core {
    /// Processes received frames.
    pub(super) fn receive(&mut self, now: Instant) {
        if !self.channel.may_have_received() {
            return;
        }
        let mut claimants = Claimants {
            now,
            stack: &mut self.stack,
            routes: &self.routes,
            delegations: &mut self.delegations,
            unregistered: &mut self.unregistered,
            leases: &mut self.leases,
            migrated_flows: &self.migrated_flows,
            inboxes: &mut self.inboxes,
            outbox: &mut self.outbox,
        };
        if self.lending.is_active() {
            self.lending.receive(&mut self.channel, &mut claimants);
        } else {
            self.channel
                .receive(now, BATCH, |record, frame| claimants.offer(record, frame));
        }
    }
}

/// A static probe for a frame that the stack gets next.
#[inline(always)]
pub(super) fn probe_input(record: &RecordHeader, frame: &[u8]) {
    let header = std::ptr::from_ref(record) as u64;
    probes::input(header, frame.len() as u64, frame.as_ptr() as u64);
}

impl Claimants<'_> {
    pub(super) fn offer(&mut self, record: &RecordHeader, frame: &[u8]) {
        if record.is_raw() {
            self.inboxes.deliver(record, frame);
        } else {
            probe_input(record, frame);
            let _input = layers::enter(Layer::InputHeaders);
            self.input(record, frame);
        }
    }

    fn input(&mut self, record: &RecordHeader, frame: &[u8]) {
        if record.is_fragment() {
            if let Reassembled::Whole(whole) = self.stack.reassemble(self.now, record, frame) {
                self.input(&whole.record, &whole.frame);
            }
            return;
        }
        if self.is_stray(record, frame) && self.outbox.len() < OUTBOX_MAX {
            self.outbox.push(RequestBody::MisdeliveredFrame {
                frame: frame.to_vec(),
            });
        }
    }

    /// Processes a frame. Returns true if no session here claims it.
    fn is_stray(&mut self, record: &RecordHeader, frame: &[u8]) -> bool {
        if let Some(handshakes) = self.delegations.of(record) {
            let with = (&mut *self.stack, self.routes);
            let met = handshakes.input(with, self.now, record, frame);
            return self.is_left(met);
        }
        if let Some(opened) = self.leases.of(record) {
            let met = opened.input(self.stack, self.now, record, frame);
            return self.is_left(met);
        }
        let Input::Unclaimed(packet) = self.stack.input(self.now, record, frame) else {
            return false;
        };
        let flow = packet.flow();
        let moved = flow.and_then(|flow| self.readdressed(&flow, record));
        moved.is_none_or(|record| {
            matches!(
                self.stack.input(self.now, &record, frame),
                Input::Unclaimed(_)
            )
        })
    }

    /// Notes what a frame that came by the row of a port has led to. Returns true if its connection has left.
    fn is_left(&mut self, met: DelegateInput) -> bool {
        match met {
            DelegateInput::Done => {}
            DelegateInput::Busy(slot) => self.unregistered.hurry(slot),
            DelegateInput::Reopened(slot) => self.unregistered.reopened(self.stack, slot),
            DelegateInput::Left => return true,
        }
        false
    }

    /// Readdresses the record of a frame that was sent to a session before it left, now that it is back.
    fn readdressed(&mut self, flow: &FlowKey, record: &RecordHeader) -> Option<RecordHeader> {
        let slot: Slot = self.migrated_flows.slot_of(flow)?;
        let session = self.stack.tcp(slot)?;
        (session.flow == *flow).then_some(RecordHeader {
            slot: slot.0,
            generation: session.generation.0,
            ..*record
        })
    }
}
