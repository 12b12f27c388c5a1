//! Histograms of times, in buckets that are the same everywhere.

use core::time::Duration;

use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets in microseconds, inclusive. One more bucket has no bound.
pub const BOUNDS_US: [u64; 17] = [
    5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000,
];

pub const BUCKETS: usize = BOUNDS_US.len() + 1;

/// A histogram as a sequence of words: its buckets, then the sum.
pub const HISTOGRAM_WORDS: usize = BUCKETS + 1;

/// How many of the observed times were in each bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    pub counts: [u64; BUCKETS],
    pub sum_us: u64,
}

impl Histogram {
    pub fn observe(&mut self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| bound * 1_000 < nanoseconds);
        self.counts[bucket] = self.counts[bucket].wrapping_add(1);
        self.sum_us = self.sum_us.wrapping_add(nanoseconds / 1_000);
    }

    pub fn words(&self) -> [u64; HISTOGRAM_WORDS] {
        let mut words = [self.sum_us; HISTOGRAM_WORDS];
        words[..BUCKETS].copy_from_slice(&self.counts);
        words
    }

    pub fn from_words(words: &[u64; HISTOGRAM_WORDS]) -> Histogram {
        let mut counts = [0; BUCKETS];
        counts.copy_from_slice(&words[..BUCKETS]);
        Histogram {
            counts,
            sum_us: words[BUCKETS],
        }
    }
}

/// Times that the server reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimesReport {
    /// Smoothed round-trip times of connections: each when its session migrates or ends, and about ten times a second
    /// while it changes.
    pub round_trips: Histogram,
    pub migrations: MigrationTimes,
}

/// Durations of sessions' migrations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationTimes {
    /// To a process: from the first row of the filter that the server changes until the session has left it.
    pub cached: Histogram,
    /// From a process: from its announcement, after which packets wait at the server, until its capsule has arrived.
    /// Sessions that return to be closed are not announced, and not counted.
    pub flushed: Histogram,
    /// From one process to another: from the request until the session can be given to the requester.
    pub recalled: Histogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_counts_in_the_first_bucket_that_bounds_it() {
        let mut histogram = Histogram::default();
        for nanoseconds in [0, 5_000, 5_001, 999_999, 1_000_000_000, 1_000_000_001] {
            histogram.observe(Duration::from_nanos(nanoseconds));
        }
        histogram.observe(Duration::MAX);
        let mut counts = [0; BUCKETS];
        counts[0] = 2;
        counts[1] = 1;
        counts[7] = 1;
        counts[16] = 1;
        counts[17] = 2;
        assert_eq!(histogram.counts, counts);
    }

    #[test]
    fn words_make_the_same_histogram() {
        let mut histogram = Histogram::default();
        histogram.observe(Duration::from_millis(3));
        assert_eq!(Histogram::from_words(&histogram.words()), histogram);
        assert_eq!(histogram.words()[BUCKETS], 3_000);
    }
}
