//! How the server bears a flood of SYNs: while many are not kept (answered by cookies, or dropped) it looks at its ring at
//! intervals instead of being woken for each, and lets others run after each answer. What is waited for by
//! descriptors is served at once as ever.

use std::time::Duration;

use portolan_types::Instant;

/// From one look at the ring to the next.
const INTERVAL: Duration = Duration::from_micros(500);

/// That many within that time are a flood.
const MANY: u32 = 16;
const WINDOW: Duration = Duration::from_millis(8);

/// SYNs of late that were not kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    since: Instant,
    count: u32,
    /// There is a flood.
    until: Instant,
}

impl Pace {
    /// A SYN was not kept.
    pub fn note(&mut self, now: Instant) {
        if now.since(self.since) > WINDOW {
            self.since = now;
            self.count = 0;
        }
        self.count += 1;
        if self.count >= MANY {
            self.until = now + WINDOW;
        }
    }

    /// Are they many now?
    pub fn is_flood(&self, now: Instant) -> bool {
        now < self.until
    }

    /// When to look at the ring again, if not when it rings.
    pub fn next_look(&self, now: Instant) -> Option<Instant> {
        self.is_flood(now).then_some(now + INTERVAL)
    }

    /// Others go first: an answer takes as long as a round trip of theirs.
    pub fn give_way(&self, now: Instant) {
        if self.is_flood(now) {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cookies at that rate for a second: is there a flood at its end, and soon after?
    fn flooded(per_second: u64) -> [bool; 2] {
        let mut pace = Pace::default();
        let mut now = Instant::from_millis(1000);
        for _ in 0..per_second {
            now += Duration::from_secs(1) / per_second as u32;
            pace.note(now);
        }
        [now, now + WINDOW].map(|now| pace.next_look(now).is_some())
    }

    #[test]
    fn many_cookies_are_a_flood_that_ends_when_they_do() {
        assert_eq!(flooded(500), [false, false]);
        assert_eq!(flooded(20_000), [true, false]);
    }
}
