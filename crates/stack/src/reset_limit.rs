//! Rate limit for resets that answer segments without a connection. Without it an attacker could make the host send a
//! reset for each such segment, to addresses of the attacker's choice.

use core::time::Duration;

use portolan_types::Instant;

/// Resets per second, as Linux limits its ICMP messages (`net.ipv4.icmp_msgs_per_sec`).
const RATE: u32 = 1000;

/// Largest burst, as the time in which its credit accumulates.
const BURST: Duration = Duration::from_secs(1);

/// GCRA's virtual clock (ITU-T I.371): each reset advances it by its cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResetLimit {
    paid_until: Instant,
}

impl ResetLimit {
    /// Counts a reset and returns true if it may be sent.
    pub fn allows(&mut self, now: Instant) -> bool {
        let paid_until = self.paid_until.max(now);
        if paid_until.since(now) >= BURST {
            return false;
        }
        self.paid_until = paid_until + Duration::from_secs(1) / RATE;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_gets_the_rate_and_the_burst() {
        let mut limit = ResetLimit::default();
        let start = Instant::from_millis(5000);
        let sent = (0..30_000_u32)
            .filter(|n| limit.allows(start + *n * Duration::from_micros(100)))
            .count();
        // Three seconds at the rate, after the burst.
        assert!((3990..=4010).contains(&sent), "{sent}");
    }

    #[test]
    fn a_few_are_never_withheld() {
        let mut limit = ResetLimit::default();
        let start = Instant::from_millis(5000);
        assert!((0..5000_u32).all(|n| limit.allows(start + n * Duration::from_millis(1))));
    }
}
