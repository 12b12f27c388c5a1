//! Transmit queues: a session with a class of its own has its own queue, so that a slow class does not delay the
//! sessions of others (ADR 11). Sessions whose queue is full wait there, in order.

use std::collections::VecDeque;

use portolan_types::Slot;

use super::{SessionEntry, Stack};
use crate::frame::{TxQueueId, Wire};

/// The sessions waiting at each transmit queue.
#[derive(Debug, Default)]
pub(super) struct WaitingQueues {
    /// Few, if any.
    waiting: Vec<(TxQueueId, VecDeque<u32>)>,
    /// Sessions that have filled a transmit queue and have more to send: they queue behind those waiting by then.
    served: Vec<(TxQueueId, u32)>,
}

impl WaitingQueues {
    pub(super) fn wait(&mut self, tx_queue: TxQueueId, slot: u32) {
        self.at(tx_queue).push_back(slot);
    }

    /// The session has had its turn and has more to send. Otherwise the one with the largest window would starve the
    /// others.
    pub(super) fn wait_for_next_turn(&mut self, tx_queue: TxQueueId, slot: u32) {
        self.served.push((tx_queue, slot));
    }

    pub(super) fn end_turns(&mut self) {
        if self.served.is_empty() {
            return;
        }
        // The list keeps its memory: a full transmit queue is filled again for each packet sent.
        let mut served = std::mem::take(&mut self.served);
        for (tx_queue, slot) in served.drain(..) {
            self.wait(tx_queue, slot);
        }
        self.served = served;
    }

    fn at(&mut self, tx_queue: TxQueueId) -> &mut VecDeque<u32> {
        let known = self
            .waiting
            .iter()
            .position(|(other, _)| *other == tx_queue);
        let at = known.unwrap_or_else(|| {
            self.waiting.push((tx_queue, VecDeque::new()));
            self.waiting.len() - 1
        });
        &mut self.waiting[at].1
    }

    pub(super) fn forget(&mut self, slot: u32) {
        for (_, waiting) in &mut self.waiting {
            waiting.retain(|&other| other != slot);
        }
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.iter().any(|(_, waiting)| !waiting.is_empty())
    }
}

impl SessionEntry {
    /// Selects the session's transmit queue; returns false if it is full. A session changes to its next queue
    /// once none of its frames wait in the current one, so that they stay in order.
    pub(super) fn enter(&mut self, wire: &mut impl Wire) -> bool {
        wire.choose(self.tx_queue);
        if wire.is_full() {
            return false;
        }
        if self.tx_queue != self.next_tx_queue {
            self.tx_queue = self.next_tx_queue;
            wire.choose(self.tx_queue);
            return !wire.is_full();
        }
        true
    }
}

impl Stack {
    /// Sets the session's transmit queue.
    pub fn set_tx_queue(&mut self, slot: Slot, tx_queue: TxQueueId) {
        if let Some(entry) = self.entry(slot.0)
            && entry.next_tx_queue != tx_queue
        {
            entry.next_tx_queue = tx_queue;
            self.touch(slot);
        }
    }

    /// Whether any session uses that transmit queue, or will.
    pub fn uses_tx_queue(&self, tx_queue: TxQueueId) -> bool {
        self.entries()
            .any(|entry| entry.tx_queue == tx_queue || entry.next_tx_queue == tx_queue)
    }

    /// Whether a session that will use that transmit queue still has frames in another one.
    pub fn approaches_tx_queue(&self, tx_queue: TxQueueId) -> bool {
        self.entries()
            .any(|entry| entry.next_tx_queue == tx_queue && entry.tx_queue != tx_queue)
    }

    /// Whether a datagram of the session could be sent now. If not, an event reports it writable when one can.
    pub fn has_room(&mut self, slot: Slot, wire: &mut impl Wire) -> bool {
        let Some(entry) = self.entry(slot.0) else {
            return false;
        };
        let has_room = entry.enter(wire);
        if !has_room {
            self.await_room(slot);
        }
        has_room
    }

    /// Reports the session writable when its transmit queue has room.
    pub(super) fn await_room(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0)
            && !entry.is_pending
        {
            entry.is_pending = true;
            let tx_queue = entry.tx_queue;
            self.tx_queues.wait(tx_queue, slot.0);
        }
    }

    /// Sessions that waited for a transmit queue that has room again send first.
    pub(super) fn admit_waiting(&mut self, wire: &mut impl Wire) {
        for (tx_queue, waiting) in &mut self.tx_queues.waiting {
            wire.choose(*tx_queue);
            while !wire.is_full()
                && let Some(slot) = waiting.pop_back()
            {
                self.pending.push_front(slot);
            }
        }
    }
}
