//! How the server bears a flood of SYNs that the packet filter does not answer, or of other segments without a connection:
//! it looks at its ring at
//! intervals instead of being woken for each, and lets others run after each answer. What is waited for by
//! descriptors is served at once as ever.

use std::time::Duration;

use portolan_stack::FloodDetector;
use portolan_types::Instant;

/// From one look at the ring to the next.
const INTERVAL: Duration = Duration::from_micros(500);

#[derive(Clone, Copy, Debug, Default)]
pub struct RxThrottle(FloodDetector);

impl RxThrottle {
    /// A SYN was not kept, a reset not sent.
    pub fn note(&mut self, now: Instant) {
        self.0.note(now);
    }

    /// When to look at the ring again, if not when it rings.
    pub fn next_look(&self, now: Instant) -> Option<Instant> {
        self.0.is_flood(now).then_some(now + INTERVAL)
    }

    /// Others go first: an answer takes as long as a round trip of theirs.
    pub fn give_way(&self, now: Instant) {
        if self.0.is_flood(now) {
            std::thread::yield_now();
        }
    }
}
