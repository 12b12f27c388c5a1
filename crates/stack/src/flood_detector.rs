//! Detects floods of SYNs by the rate of those for which no state is kept (answered by cookies, or dropped).

use core::time::Duration;

use portolan_types::Instant;

/// This many within `WINDOW` are a flood.
const MANY: u32 = 16;
const WINDOW: Duration = Duration::from_millis(8);

/// Recent SYNs for which no state was kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct FloodDetector {
    since: Instant,
    count: u32,
    /// The flood counts as ongoing until this time.
    until: Instant,
}

impl FloodDetector {
    /// Counts a SYN for which no state was kept.
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

    /// Whether there is a flood now.
    pub fn is_flood(&self, now: Instant) -> bool {
        now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends SYNs at that rate for a second: returns whether there is a flood at its end, and soon after.
    fn flooded(per_second: u64) -> [bool; 2] {
        let mut flood_detector = FloodDetector::default();
        let mut now = Instant::from_millis(1000);
        for _ in 0..per_second {
            now += Duration::from_secs(1) / per_second as u32;
            flood_detector.note(now);
        }
        [now, now + WINDOW].map(|now| flood_detector.is_flood(now))
    }

    #[test]
    fn many_syns_are_a_flood_that_ends_when_they_do() {
        assert_eq!(flooded(500), [false, false]);
        assert_eq!(flooded(20_000), [true, false]);
    }
}
