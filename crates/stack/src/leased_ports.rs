//! Connections that a process has opened from ports under lease (ADR 31): their segments arrive by the ports' rows.

use portolan_proto::filter::RecordHeader;
use portolan_proto::ip::IpOptions;
use portolan_tcp::reset_for;
use portolan_types::{FlowKey, Instant, SeqNum, Slot};
use portolan_wire::tcp::TcpHeader;

use crate::counters::Fate;
use crate::delegation::{ANSWERS_MAX, DelegateInput, deliver, parse};
use crate::flow_table::{FlowTable, Known};
use crate::frame::Wire;
use crate::passive::Segment;
use crate::reset_limit::ResetLimit;
use crate::routes::Routes;
use crate::stack::{Stack, send_segment};

/// The connections of all leased ports of a process.
#[derive(Debug, Default)]
pub struct LeasedPorts {
    flows: FlowTable,
    /// Resets for segments of no connection.
    answers: Vec<(FlowKey, TcpHeader)>,
    reset_limit: ResetLimit,
}

impl LeasedPorts {
    /// Returns the slot of the connection between those endpoints, unless it has ended or moved long ago.
    pub fn slot_of(&self, flow: &FlowKey) -> Option<Slot> {
        Some(self.flows.get(flow)?.slot)
    }

    /// A connection is being opened at `slot`.
    pub fn opened(&mut self, slot: Slot, flow: FlowKey) {
        self.flows.insert(flow, Known::new(slot, SeqNum(0)));
    }

    /// A connection has a row of its own from now on.
    pub fn registered(&mut self, now: Instant, slot: Slot, flow: &FlowKey) {
        self.flows.registered(now, slot, flow);
    }

    /// A connection is over.
    pub fn forget_ended(&mut self, slot: Slot, flow: &FlowKey) {
        self.flows.forget_ended(slot, flow);
    }

    /// Processes a frame that arrived by a port's row.
    pub fn input(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        record: &RecordHeader,
        frame: &[u8],
    ) -> DelegateInput {
        self.flows.forget_left(now);
        let Some(packet) = parse(stack, record, frame) else {
            return DelegateInput::Done;
        };
        let known = packet.flow().and_then(|flow| {
            let known = self.flows.get(&flow)?;
            Some((known.slot, flow))
        });
        if let Some(known) = known {
            return deliver(stack, known, now, record, frame);
        }
        stack.counters.count(Fate::Unclaimed);
        if let Some(segment) = Segment::of(&packet)
            && let Some(reset) = reset_for(segment.header, segment.payload.len())
        {
            if !self.reset_limit.allows(now) {
                stack.counters.count(Fate::ResetWithheld);
            } else if self.answers.len() < ANSWERS_MAX {
                self.answers.push((segment.flow, reset));
            }
        }
        DelegateInput::Done
    }

    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Sends the answers that belong to no connection.
    pub fn answer(&mut self, routes: &Routes, wire: &mut impl Wire) {
        for (flow, answer) in self.answers.drain(..) {
            send_segment(&flow, IpOptions::default(), &answer, routes, wire);
        }
    }
}

#[cfg(test)]
mod tests;
