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
    /// The server knows it.
    pub(crate) is_registered: bool,
}

impl Known {
    pub(crate) fn new(slot: Slot, peer_isn: SeqNum) -> Known {
        Known {
            slot,
            peer_isn,
            segments: 0,
            is_registered: false,
        }
    }

    /// Is it the same connection?
    fn is(&self, other: &Known) -> bool {
        (self.slot, self.peer_isn) == (other.slot, other.peer_isn)
    }

    /// Whether the segment opens another connection between the same endpoints.
    pub(crate) fn is_followed_by(&self, header: &TcpHeader) -> bool {
        header.seq != self.peer_isn && portolan_tcp::opens_connection(header)
    }
}

#[derive(Debug, Default)]
pub(crate) struct FlowTable {
    flows: HashMap<FlowKey, Known>,
    /// Registered; until when their flows are known.
    leaving: VecDeque<(Instant, FlowKey, Known)>,
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
            known.is_registered = true;
            self.leaving.push_back((now + FOLLOW_FOR, *flow, *known));
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
        while let Some((until, flow, known)) = self.leaving.front()
            && *until <= now
        {
            // The flow may belong to another connection by now.
            if self.get(flow).is_some_and(|it| it.is(known)) {
                self.flows.remove(flow);
            }
            self.leaving.pop_front();
        }
    }
}
