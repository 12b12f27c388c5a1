//! Connections whose segments arrive by the row of their port, and are distinguished by their flows.

use core::time::Duration;
use std::collections::{HashMap, VecDeque};

use portolan_types::{FlowKey, Instant, SeqNum, Slot};
use portolan_wire::tcp::TcpHeader;

/// How long segments may arrive by the port's row for a connection that has its own row.
pub(crate) const FOLLOW_FOR: Duration = Duration::from_secs(2);

/// Segments from which on a row of its own pays for a connection: it saves the look-up by flow.
const MANY: u8 = 64;

/// A connection on the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) slot: Slot,
    /// Initial sequence number of the peer, if the peer opened it: a SYN with another one belongs to another connection.
    pub(crate) peer_isn: SeqNum,
    /// Number of segments so far, up to [`MANY`].
    segments: u8,
    /// The server knows it, and it is known here until then.
    leaves: Option<Instant>,
}

impl Known {
    pub(crate) fn new(slot: Slot, peer_isn: SeqNum) -> Known {
        Known {
            slot,
            peer_isn,
            segments: 0,
            leaves: None,
        }
    }

    pub(crate) fn is_registered(&self) -> bool {
        self.leaves.is_some()
    }

    /// Whether the segment opens another connection between the same endpoints.
    pub(crate) fn is_followed_by(&self, header: &TcpHeader) -> bool {
        header.seq != self.peer_isn && portolan_tcp::opens_connection(header)
    }
}

#[derive(Debug, Default)]
pub(crate) struct FlowTable {
    flows: HashMap<FlowKey, Known>,
    /// Registered connections, in the order in which they leave.
    leaving: VecDeque<(Instant, FlowKey)>,
}

impl FlowTable {
    pub(crate) fn get(&self, flow: &FlowKey) -> Option<Known> {
        self.flows.get(flow).copied()
    }

    /// Counts a segment of the flow. Returns true for the one with which a row of its own pays.
    pub(crate) fn note_segment(&mut self, flow: &FlowKey) -> bool {
        let Some(known) = self.flows.get_mut(flow) else {
            return false;
        };
        let is_new = known.segments < MANY;
        known.segments = (known.segments + 1).min(MANY);
        is_new && known.segments == MANY
    }

    pub(crate) fn flows(&self) -> impl Iterator<Item = FlowKey> + '_ {
        self.flows.keys().copied()
    }

    pub(crate) fn insert(&mut self, flow: FlowKey, known: Known) {
        self.flows.insert(flow, known);
    }

    pub(crate) fn remove(&mut self, flow: &FlowKey) {
        self.flows.remove(flow);
    }

    /// A connection has a row of its own from now on.
    pub(crate) fn registered(&mut self, now: Instant, slot: Slot, flow: &FlowKey) {
        let known = self.flows.get_mut(flow);
        if let Some(known) = known.filter(|known| known.slot == slot) {
            let leaves = now + FOLLOW_FOR;
            known.leaves = Some(leaves);
            self.leaving.push_back((leaves, *flow));
        }
    }

    /// The connection at `slot` is over. Another one may have the flow by now.
    pub(crate) fn forget_ended(&mut self, slot: Slot, flow: &FlowKey) {
        if self.get(flow).is_some_and(|known| known.slot == slot) {
            self.flows.remove(flow);
        }
    }

    /// Forgets registered connections after their time.
    pub(crate) fn forget_left(&mut self, now: Instant) {
        while let Some(&(leaves, flow)) = self.leaving.front()
            && leaves <= now
        {
            // The flow may belong to another connection by now, even at the same slot.
            let known = self.flows.get(&flow);
            if known.is_some_and(|known| known.leaves == Some(leaves)) {
                self.flows.remove(&flow);
            }
            self.leaving.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use portolan_types::Protocol;

    use super::*;

    #[test]
    fn a_connection_with_the_flow_and_slot_of_a_registered_one_stays_known() {
        let mut table = FlowTable::default();
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: "10.0.0.1:20000".parse().unwrap(),
            remote: "10.0.0.2:80".parse().unwrap(),
        };
        let known = || Known::new(Slot(3), SeqNum(0));
        table.insert(flow, known());
        table.registered(Instant::ZERO, Slot(3), &flow);
        table.forget_ended(Slot(3), &flow);
        table.insert(flow, known());
        table.forget_left(Instant::ZERO + FOLLOW_FOR);
        assert_eq!(table.get(&flow), Some(known()));
        table.registered(Instant::ZERO + FOLLOW_FOR, Slot(3), &flow);
        table.forget_left(Instant::ZERO + 2 * FOLLOW_FOR);
        assert_eq!(table.get(&flow), None);
    }
}
