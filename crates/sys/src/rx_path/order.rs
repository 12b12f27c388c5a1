//! In which order the owner of a channel reads its ring and its tap, and when it may sleep.
//!
//! This module decides and reads neither, so that the model in `order/model.rs` runs the same code. Its invariants, for
//! frames that one processor puts through the filter:
//!
//! 1. They are returned in the order in which the filter saw them, unless one that it sent to the tap takes longer than
//!    [`STRAGGLE`] to appear there.
//! 2. A sleeping owner whose frame is not on the tap is woken by the ring.

use std::time::Duration;

use portolan_types::Instant;

/// A frame that the filter sent to the tap when the owner had just woken up appears there within a
/// microsecond, unless its CPU is preempted. After this time it counts as lost.
const STRAGGLE: Duration = Duration::from_millis(1);

/// Where to look for the next frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Ring,
    Tap(Counted),
    /// A frame of the tap comes before those on the ring, and has not arrived.
    Nowhere,
}

/// Why the tap is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// The filter has counted a frame there.
    Yes,
    /// A frame that was given up may have arrived.
    No,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Order {
    /// Frames read from the tap; the filter counts those it sent there.
    taken_from_tap: u32,
    /// Some were given up. If one arrives later, the count does not show it, so the tap is also read
    /// after each sleep.
    has_given_up: bool,
    /// The tap has not been read since the last sleep.
    must_ask: bool,
    is_asleep: bool,
    /// The ring's position when the owner woke up: frames up to it are older than those of the tap.
    ring_at_wake: u64,
    /// When the owner woke up, until the tap is known to be drained: the filter may have seen it asleep
    /// and not have counted the frame yet.
    woken: Option<Instant>,
    /// A frame sent to the tap has not arrived; those on the ring are newer.
    ring_waits: bool,
}

impl Order {
    pub(super) fn is_asleep(&self) -> bool {
        self.is_asleep
    }

    /// Called before the doorbell shows that the owner sleeps on the tap, when ring and tap are empty.
    pub(super) fn fall_asleep(&mut self) {
        self.is_asleep = true;
        self.woken = None;
    }

    /// Called before the doorbell shows that the owner is awake. `produced`: the ring's producer position.
    pub(super) fn wake_up(&mut self, produced: u64, now: Instant) {
        self.is_asleep = false;
        self.ring_at_wake = produced;
        self.woken = Some(now);
        self.must_ask = self.has_given_up;
    }

    /// `by_tap`: the number of frames that the filter sent to the tap.
    pub(super) fn tap_holds_more(&self, by_tap: u32) -> bool {
        by_tap != self.taken_from_tap
    }

    /// Whether frames may arrive by the tap although the owner is awake.
    pub(super) fn is_settling(&self) -> bool {
        self.woken.is_some()
    }

    /// Where is the next frame, with the ring consumed up to `position`?
    pub(super) fn next(
        &mut self,
        position: u64,
        by_tap: impl FnOnce() -> u32,
        now: Instant,
    ) -> Look {
        if position < self.ring_at_wake {
            return Look::Ring;
        }
        let is_counted = self.tap_holds_more(by_tap());
        if is_counted {
            // Frames of a session with tap delivery arrive there while the owner is awake.
            self.woken.get_or_insert(now);
            return Look::Tap(Counted::Yes);
        }
        if self.is_settling() {
            if self.must_ask {
                return Look::Tap(Counted::No);
            }
            self.settle(now);
        }
        if self.may_read_ring() {
            Look::Ring
        } else {
            Look::Nowhere
        }
    }

    pub(super) fn took_from_tap(&mut self, counted: Counted) {
        if counted == Counted::Yes {
            self.taken_from_tap = self.taken_from_tap.wrapping_add(1);
        }
    }

    pub(super) fn found_tap_empty(&mut self, counted: Counted, by_tap: u32, now: Instant) {
        self.must_ask = false;
        match counted {
            Counted::Yes => self.miss(by_tap, now),
            Counted::No => self.settle(now),
        }
    }

    pub(super) fn may_read_ring(&self) -> bool {
        !self.ring_waits
    }

    /// All counted frames have arrived. If this was seen twice, no further one is pending.
    fn settle(&mut self, now: Instant) {
        self.ring_waits = false;
        self.woken = self.woken.filter(|&woken| woken >= now);
    }

    /// A counted frame has not arrived: delays frames from the ring, for a limited time.
    fn miss(&mut self, by_tap: u32, now: Instant) {
        self.ring_waits = self.woken.is_some_and(|woken| now.since(woken) < STRAGGLE);
        if !self.ring_waits {
            self.woken = None;
            self.has_given_up = true;
            self.taken_from_tap = by_tap;
        }
    }
}

#[cfg(test)]
mod model;
