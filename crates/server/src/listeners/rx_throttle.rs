//! How the server withstands a flood of SYNs that the packet filter does not answer, or of other segments without a
//! connection: it polls its ring at intervals instead of being woken for each frame, and yields the processor after
//! each answer. Events on descriptors are still served at once.

use std::time::Duration;

use portolan_stack::FloodDetector;
use portolan_types::Instant;

/// Interval between polls of the ring.
const INTERVAL: Duration = Duration::from_micros(500);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RxThrottle(FloodDetector);

impl RxThrottle {
    /// Notes a SYN without state, or a reset not sent.
    pub(crate) fn note(&mut self, now: Instant) {
        self.0.note(now);
    }

    /// Returns when to poll the ring again, if the ring is throttled.
    pub(crate) fn next_look(&self, now: Instant) -> Option<Instant> {
        self.0.is_flood(now).then_some(now + INTERVAL)
    }

    /// Yields to other processes: an answer takes as long as a round trip of theirs.
    pub(crate) fn give_way(&self, now: Instant) {
        if self.0.is_flood(now) {
            std::thread::yield_now();
        }
    }
}
