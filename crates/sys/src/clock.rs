//! The host's monotonic clock as [`Instant`]. Time enters Portolan only here.

use std::time::Duration;

use portolan_types::Instant;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Reads CLOCK_MONOTONIC, the clock of `bpf_ktime_get_ns`; without a system call if the vDSO has it.
pub fn now() -> Instant {
    instant(clock_gettime(ClockId::Monotonic))
}

/// How far [`recent`] may be behind [`now`]: more than the longest tick of a kernel (100 Hz).
pub const RECENT: Duration = Duration::from_millis(12);

/// The time of the kernel's last tick: much cheaper than [`now`], never later, and behind it by at
/// most [`RECENT`].
pub fn recent() -> Instant {
    instant(clock_gettime(ClockId::MonotonicCoarse))
}

/// CPU time used by the calling thread.
pub fn of_thread() -> Duration {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

// The monotonic clocks count from boot, so neither part is ever negative.
fn instant(time: Timespec) -> Instant {
    Instant::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::time::Duration;

    use super::{RECENT, now, recent};

    #[test]
    fn the_recent_time_is_not_far_behind() {
        for _ in 0..10_000 {
            let before = now();
            let recent = recent();
            assert!(recent <= now());
            assert!(recent + RECENT >= before);
        }
    }

    #[test]
    fn the_clock_never_goes_back() {
        let mut last = now();
        for _ in 0..10_000 {
            let next = now();
            assert!(next >= last);
            last = next;
        }
    }

    /// The cost in the cheapest of several rounds: others may be disturbed.
    fn cost_of(call: impl Fn()) -> Duration {
        const CALLS: u32 = 2_000;
        let rounds = (0..50).map(|_| {
            let start = now();
            (0..CALLS).for_each(|_| call());
            now().since(start)
        });
        rounds.min().expect("there are rounds") / CALLS
    }

    #[test]
    fn reading_the_clock_is_cheaper_than_a_system_call() {
        let reading = cost_of(|| {
            std::hint::black_box(now());
        });
        let system_call = cost_of(|| {
            let mut time = MaybeUninit::<libc::timespec>::uninit();
            // SAFETY: the kernel writes a `timespec` there.
            unsafe {
                libc::syscall(
                    libc::SYS_clock_gettime,
                    libc::CLOCK_MONOTONIC,
                    time.as_mut_ptr(),
                )
            };
        });
        assert!(reading < system_call, "{reading:?}, {system_call:?}");
    }
}
