//! Pacing: the time at which each burst is sent, for algorithms that set a rate and users that limit
//! it; and the size of a burst.

use core::time::Duration;

use portolan_types::Instant;

use super::Sender;
use crate::encoding;

/// Linux's `tcp_pacing_ss_ratio` and `tcp_pacing_ca_ratio`, percent of a window per round trip.
const SLOW_START_RATIO: u64 = 200;
const AVOIDANCE_RATIO: u64 = 120;
/// Linux's `tcp_min_tso_segs`.
const MIN_SEGMENTS: u32 = 2;
/// Linux's `tcp_tso_rtt_log`: each such interval of round trip halves the increase for short paths.
const SHORT_PATH: Duration = Duration::from_micros(512);
/// A longer wait was not computed here, but comes from a hostile capsule; it is ignored.
const LONGEST: Duration = Duration::from_secs(60);
/// A burst takes a millisecond at the current rate.
const BURSTS_PER_SECOND: u64 = 1000;

#[derive(Clone, Debug, Default)]
pub(crate) struct Pacer {
    /// Earliest time of the next segment.
    next: Instant,
}

encoding::fields!(Pacer { next });

impl Sender {
    /// Bytes per second that correspond to the window, with room to grow (Linux's
    /// `tcp_update_pacing_rate`).
    pub(crate) fn window_rate(&self) -> Option<u64> {
        let nanos = u64::try_from(self.rtt.smoothed()?.as_nanos()).ok()?.max(1);
        let congestion = &self.congestion;
        let percent = if congestion.cwnd() < congestion.ssthresh() / 2 {
            SLOW_START_RATIO
        } else {
            AVOIDANCE_RATIO
        };
        // At most twice 2^30, times a billion.
        let window = u64::from(congestion.cwnd().max(self.in_flight()));
        Some(window * percent / 100 * 1_000_000_000 / nanos)
    }

    /// The pacing rate, if the algorithm or the user sets one.
    pub(crate) fn pacing_rate(&self, maximum: Option<u64>) -> Option<u64> {
        let wanted = self.congestion.pacing_rate();
        match (wanted, maximum) {
            (None, None) => None,
            (Some(rate), None) => Some(rate),
            (wanted, Some(maximum)) => Some(
                wanted
                    .or_else(|| self.window_rate())
                    .map_or(maximum, |rate| rate.min(maximum)),
            ),
        }
        .map(|rate| rate.max(1))
    }

    /// Until when pacing holds segments back.
    pub(crate) fn held_until(&self, now: Instant, maximum: Option<u64>) -> Option<Instant> {
        let wait = self.pacer.next.since(now);
        let held = !wait.is_zero() && wait <= LONGEST && self.pacing_rate(maximum).is_some();
        held.then_some(self.pacer.next)
    }

    /// `bytes` are sent now: the next burst waits for the time they take at the pacing rate. A late
    /// timer is compensated by half a burst at most, as in Linux.
    pub(super) fn pace(&mut self, bytes: u32, now: Instant, maximum: Option<u64>) {
        let Some(rate) = self.pacing_rate(maximum) else {
            return;
        };
        let took = Duration::from_nanos(u64::from(bytes) * 1_000_000_000 / rate);
        let took = took.min(LONGEST);
        let late = match self.pacer.next {
            Instant::ZERO => Duration::ZERO,
            next => now.since(next),
        };
        self.pacer.next = self.pacer.next.max(now) + (took - late.min(took / 2));
    }

    /// The largest burst (Linux's `tcp_tso_autosize`): a millisecond's worth, and more on short paths,
    /// unless the rate is what limits.
    pub(crate) fn burst(&self, maximum: Option<u64>) -> u32 {
        let most = self
            .burst_limit
            .map_or(self.gso_max, |limit| limit.min(self.gso_max));
        let largest = (most - most % self.mss).max(self.mss);
        let paced = self.pacing_rate(maximum);
        let Some(rate) = paced.or_else(|| self.window_rate()) else {
            return largest;
        };
        let mut bytes = u32::try_from(rate / BURSTS_PER_SECOND).unwrap_or(u32::MAX);
        if paced.is_none() {
            let rtt = self.rtt.minimum().unwrap_or(Duration::ZERO);
            let halvings = rtt.as_micros() / SHORT_PATH.as_micros();
            let halvings = u32::try_from(halvings).unwrap_or(u32::MAX);
            bytes = bytes.saturating_add(self.gso_max.checked_shr(halvings).unwrap_or(0));
        }
        (bytes - bytes % self.mss).clamp((MIN_SEGMENTS * self.mss).min(largest), largest)
    }
}

#[cfg(test)]
mod tests {
    use portolan_types::{Instant, SeqNum};

    use super::*;
    use crate::Config;

    #[test]
    fn bursts_keep_to_a_limit_in_whole_segments_and_never_below_one() {
        let mut sender = Sender::new(&Config::default(), SeqNum(1), Instant::from_millis(1));
        let usual = sender.burst(None);
        for (limit, most) in [(100_000, usual), (10_000, 6 * 1460), (100, 1460)] {
            sender.limit_bursts(Some(limit));
            assert_eq!(sender.burst(None), most, "{limit}");
        }
        sender.limit_bursts(None);
        assert_eq!(sender.burst(None), usual);
    }
}
