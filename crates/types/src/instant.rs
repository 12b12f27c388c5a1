use core::ops::{Add, AddAssign, Sub};
use core::time::Duration;

use serde::{Deserialize, Serialize};

/// A moment of the host's monotonic clock, in nanoseconds since boot.
///
/// All processes of one host share that clock, so an `Instant` keeps its meaning inside a capsule.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct Instant(u64);

impl Instant {
    pub const ZERO: Instant = Instant(0);
    /// Later than any instant that occurs.
    pub const FAR_FUTURE: Instant = Instant(u64::MAX);

    pub const fn from_nanos(nanos: u64) -> Instant {
        Instant(nanos)
    }

    pub const fn from_millis(millis: u64) -> Instant {
        Instant(millis * 1_000_000)
    }

    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000
    }

    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Time since `earlier`, zero if `earlier` is later.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The instant `time` ago, or the clock's beginning.
    pub fn before_by(self, time: Duration) -> Instant {
        Instant(self.0.saturating_sub(nanos(time)))
    }
}

/// `Duration::as_nanos` limited to 64 bits, at the cost of 64-bit arithmetic.
fn nanos(d: Duration) -> u64 {
    d.as_secs()
        .saturating_mul(1_000_000_000)
        .saturating_add(d.subsec_nanos().into())
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, d: Duration) -> Instant {
        Instant(self.0.saturating_add(nanos(d)))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, d: Duration) {
        *self = *self + d;
    }
}

impl Sub<Instant> for Instant {
    type Output = Duration;
    fn sub(self, earlier: Instant) -> Duration {
        self.since(earlier)
    }
}
