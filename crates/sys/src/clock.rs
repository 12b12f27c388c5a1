//! The host's monotonic clock as [`Instant`]. The one place where time enters Portolan.

use portolan_types::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Reads CLOCK_MONOTONIC, the clock of `bpf_ktime_get_ns`; no system call where the vDSO has it.
pub fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    // The monotonic clock counts from boot, so neither part is ever negative.
    Instant::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::now;

    #[test]
    fn the_clock_never_goes_back() {
        let mut last = now();
        for _ in 0..10_000 {
            let next = now();
            assert!(next >= last);
            last = next;
        }
    }

    #[test]
    fn reading_the_clock_is_no_system_call() {
        const READS: u32 = 100_000;
        let start = now();
        for _ in 0..READS {
            std::hint::black_box(now());
        }
        let each = now().since(start) / READS;
        assert!(each.as_nanos() < 150, "{each:?} each");
    }
}
