//! Flows whose sessions have recently left this process, and may have come back: frames addressed
//! to the former slot may still lie on the ring.

use std::collections::VecDeque;

use portolan_types::{FlowKey, Slot};

/// Number of flows that are remembered; frames of others go through the server.
const MOST: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct MigratedFlows(VecDeque<(FlowKey, Option<Slot>)>);

impl MigratedFlows {
    pub(crate) fn has_left(&mut self, flow: FlowKey) {
        self.0.retain(|(known, _)| *known != flow);
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back((flow, None));
    }

    pub(crate) fn has_come(&mut self, flow: &FlowKey, at: Slot) {
        if let Some((_, slot)) = self.0.iter_mut().find(|(known, _)| known == flow) {
            *slot = Some(at);
        }
    }

    /// Returns the slot of a session that had left, if it is back.
    pub(crate) fn slot_of(&self, flow: &FlowKey) -> Option<Slot> {
        self.0.iter().find(|(known, _)| known == flow)?.1
    }
}

#[cfg(test)]
mod tests {
    use portolan_types::Protocol;

    use super::*;

    fn flow(port: u16) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], port).into(),
            remote: ([10, 0, 0, 2], 80).into(),
        }
    }

    #[test]
    fn only_who_has_left_and_come_back_is_found() {
        let mut migrated_flows = MigratedFlows::default();
        migrated_flows.has_come(&flow(1), Slot(1));
        assert_eq!(migrated_flows.slot_of(&flow(1)), None, "it never left");
        migrated_flows.has_left(flow(1));
        assert_eq!(migrated_flows.slot_of(&flow(1)), None, "it is away");
        migrated_flows.has_come(&flow(1), Slot(3));
        assert_eq!(migrated_flows.slot_of(&flow(1)), Some(Slot(3)));
        migrated_flows.has_left(flow(1));
        assert_eq!(migrated_flows.slot_of(&flow(1)), None, "it is away again");
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut migrated_flows = MigratedFlows::default();
        for port in 0..=MOST as u16 {
            migrated_flows.has_left(flow(port));
            migrated_flows.has_come(&flow(port), Slot(u32::from(port)));
        }
        assert_eq!(migrated_flows.slot_of(&flow(0)), None);
        assert_eq!(migrated_flows.slot_of(&flow(1)), Some(Slot(1)));
    }
}
