//! Doorways: a session with a class of its own has one of its own, so that a slow class does not stop the
//! sessions of others (ADR 11). Who finds its doorway full waits there, in order.

use std::collections::VecDeque;

use portolan_types::Slot;

use super::{Entry, Stack};
use crate::frame::{Door, Wire};

/// Who waits at which doorway.
#[derive(Debug, Default)]
pub(super) struct Doors {
    /// Few, if any.
    waiting: Vec<(Door, VecDeque<u32>)>,
    /// Who has filled a doorway, and has more to send: they come behind those that wait by then.
    served: Vec<(Door, u32)>,
}

impl Doors {
    pub(super) fn wait(&mut self, door: Door, slot: u32) {
        self.at(door).push_back(slot);
    }

    /// It has had its turn, and has more to send. Else who has the largest window would keep the others from the wire.
    pub(super) fn wait_for_next_turn(&mut self, door: Door, slot: u32) {
        self.served.push((door, slot));
    }

    pub(super) fn end_turns(&mut self) {
        // The list keeps its memory: a full doorway is filled again for each packet that leaves.
        let mut served = std::mem::take(&mut self.served);
        for (door, slot) in served.drain(..) {
            self.wait(door, slot);
        }
        self.served = served;
    }

    fn at(&mut self, door: Door) -> &mut VecDeque<u32> {
        let known = self.waiting.iter().position(|(other, _)| *other == door);
        let at = known.unwrap_or_else(|| {
            self.waiting.push((door, VecDeque::new()));
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

impl Entry {
    /// Chooses the session's doorway; false if it is full. A session that is to have another goes there
    /// once nothing of it waits in the old one: its frames keep their order.
    pub(super) fn enter(&mut self, wire: &mut impl Wire) -> bool {
        wire.choose(self.door);
        if wire.is_full() {
            return false;
        }
        if self.door != self.next_door {
            self.door = self.next_door;
            wire.choose(self.door);
            return !wire.is_full();
        }
        true
    }
}

impl Stack {
    /// The session's doorway from now on.
    pub fn set_door(&mut self, slot: Slot, door: Door) {
        if let Some(entry) = self.entry(slot.0)
            && entry.next_door != door
        {
            entry.next_door = door;
            self.touch(slot);
        }
    }

    /// Does anything go through that doorway, or will it?
    pub fn uses_door(&self, door: Door) -> bool {
        self.entries()
            .any(|entry| entry.door == door || entry.next_door == door)
    }

    /// Is a session to go through that doorway of which something waits in another?
    pub fn approaches_door(&self, door: Door) -> bool {
        self.entries()
            .any(|entry| entry.next_door == door && entry.door != door)
    }

    /// Could a datagram of the session be sent? If not, it changes to be writable when one can.
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

    /// The session changes to be writable when its doorway has room.
    pub(super) fn await_room(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0)
            && !entry.is_pending
        {
            entry.is_pending = true;
            let door = entry.door;
            self.doors.wait(door, slot.0);
        }
    }

    /// Those who waited for a doorway that is free again are the first to send.
    pub(super) fn admit_waiting(&mut self, wire: &mut impl Wire) {
        for (door, waiting) in &mut self.doors.waiting {
            wire.choose(*door);
            while !wire.is_full()
                && let Some(slot) = waiting.pop_back()
            {
                self.pending.push_front(slot);
            }
        }
    }
}
