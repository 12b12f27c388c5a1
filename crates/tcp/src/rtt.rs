//! Round-trip time and the retransmission time-out (RFC 6298), with Linux's bounds.

use core::time::Duration;

use crate::encoding;

pub(crate) const INITIAL_RTO: Duration = Duration::from_secs(1);
/// RFC 6298 §5.7: after a handshake in which the SYN was retransmitted.
const CAUTIOUS_RTO: Duration = Duration::from_secs(3);
pub(crate) const MIN_RTO: Duration = Duration::from_millis(200);
const MAX_RTO: Duration = Duration::from_secs(120);
/// Shortest sample, nanoseconds: Linux counts in microseconds.
const SHORTEST: u64 = 1_000;

#[derive(Clone, Debug, Default)]
pub(crate) struct RttEstimator {
    /// Nanoseconds; zero before the first sample.
    smoothed: u64,
    variation: u64,
    minimum: u64,
    /// Doublings since the last acknowledgement of new data.
    backoff: u32,
    /// The handshake gave no sample.
    cautious: bool,
}

encoding::fields!(RttEstimator {
    smoothed,
    variation,
    minimum,
    backoff,
    cautious
});

impl RttEstimator {
    /// RFC 6298 §2.2 and §2.3. A sample longer than any time-out was delayed by the peer and says nothing about
    /// the path; without the bound it would slow a paced sender to a crawl for minutes.
    pub(crate) fn sample(&mut self, rtt: Duration) {
        let rtt = (rtt.min(MAX_RTO).as_nanos() as u64).max(SHORTEST);
        if self.smoothed == 0 {
            self.smoothed = rtt;
            self.variation = rtt / 2;
            self.minimum = rtt;
        } else {
            let error = self.smoothed.abs_diff(rtt);
            self.variation = self.variation - self.variation / 4 + error / 4;
            self.smoothed = (self.smoothed - self.smoothed / 8 + rtt / 8).max(1);
            self.minimum = self.minimum.min(rtt);
        }
    }

    /// The time-out with its backoff (RFC 6298 §2.4, §5.5).
    pub(crate) fn rto(&self) -> Duration {
        Duration::from_nanos(self.rto_nanos())
    }

    /// Like [`RttEstimator::rto`], in nanoseconds, for callers that arm a timer with each segment.
    pub(crate) fn rto_nanos(&self) -> u64 {
        const LEAST_VARIATION: u64 = MIN_RTO.as_nanos() as u64;
        const MOST: u64 = MAX_RTO.as_nanos() as u64;
        let base = match (self.smoothed, self.cautious) {
            (0, true) => CAUTIOUS_RTO.as_nanos() as u64,
            (0, false) => INITIAL_RTO.as_nanos() as u64,
            // Linux: the lower bound applies to the variation term.
            (smoothed, _) => smoothed + (4 * self.variation).max(LEAST_VARIATION),
        };
        let backed_off = base.saturating_mul(1 << self.backoff.min(16));
        backed_off.min(MOST)
    }

    pub(crate) fn back_off(&mut self) {
        self.backoff = self.backoff.saturating_add(1);
    }

    pub(crate) fn reset_backoff(&mut self) {
        self.backoff = 0;
    }

    /// The handshake is complete; data will follow.
    pub(crate) fn complete_handshake(&mut self) {
        self.cautious = self.smoothed == 0;
        self.backoff = 0;
    }

    pub(crate) fn smoothed(&self) -> Option<Duration> {
        (self.smoothed != 0).then(|| Duration::from_nanos(self.smoothed))
    }

    pub(crate) fn smoothed_nanos(&self) -> Option<u64> {
        (self.smoothed != 0).then_some(self.smoothed)
    }

    pub(crate) fn variation(&self) -> Duration {
        Duration::from_nanos(self.variation)
    }

    pub(crate) fn minimum(&self) -> Option<Duration> {
        (self.smoothed != 0).then(|| Duration::from_nanos(self.minimum))
    }

    /// The minimum round trip in nanoseconds; zero before the first sample.
    pub(crate) fn minimum_nanos(&self) -> u64 {
        self.minimum
    }

    pub(crate) fn is_consistent(&self) -> bool {
        const BOUND: u64 = 1 << 41;
        self.smoothed < BOUND && self.variation < BOUND && self.minimum < BOUND
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_first_sample_sets_both_terms() {
        let mut rtt = RttEstimator::default();
        assert_eq!(rtt.rto(), INITIAL_RTO);
        rtt.sample(100 * MS);
        assert_eq!((rtt.smoothed(), rtt.variation()), (Some(100 * MS), 50 * MS));
        assert_eq!(rtt.rto(), 300 * MS);
    }

    #[test]
    fn a_steady_path_has_a_time_out_of_200_ms_beyond_the_round_trip() {
        let mut rtt = RttEstimator::default();
        for _ in 0..100 {
            rtt.sample(10 * MS);
        }
        assert!(rtt.rto().abs_diff(210 * MS) < MS, "{:?}", rtt.rto());
    }

    #[test]
    fn a_sample_counts_for_no_more_than_the_longest_time_out() {
        let mut rtt = RttEstimator::default();
        rtt.sample(Duration::from_secs(660));
        assert_eq!(rtt.smoothed(), Some(MAX_RTO));
        rtt.sample(Duration::from_secs(660));
        assert_eq!(rtt.smoothed(), Some(MAX_RTO));
    }

    #[test]
    fn the_time_out_doubles_up_to_two_minutes() {
        let mut rtt = RttEstimator::default();
        for doubled in [1, 2, 4, 8, 16, 32, 64, 120, 120] {
            assert_eq!(rtt.rto(), Duration::from_secs(doubled));
            rtt.back_off();
        }
        rtt.reset_backoff();
        assert_eq!(rtt.rto(), INITIAL_RTO);
    }
}
