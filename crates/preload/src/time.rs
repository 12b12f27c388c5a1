//! Conversion of C time-outs to durations, with Linux's checks.

use std::time::Duration;

use libc::{c_int, timespec, timeval};
use rustix::io::Errno;

use crate::memory;

/// A time-out in milliseconds; negative means without limit.
pub(crate) fn milliseconds(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// Reads the time-out at `timeout`; null means without limit.
pub(crate) fn at_timespec(timeout: *const timespec) -> Result<Option<Duration>, Errno> {
    if timeout.is_null() {
        return Ok(None);
    }
    let timespec { tv_sec, tv_nsec } = memory::read(timeout)?;
    let seconds = u64::try_from(tv_sec).map_err(|_| Errno::INVAL)?;
    let nanoseconds = u32::try_from(tv_nsec).map_err(|_| Errno::INVAL)?;
    if nanoseconds >= 1_000_000_000 {
        return Err(Errno::INVAL);
    }
    Ok(Some(Duration::new(seconds, nanoseconds)))
}

/// Reads the time-out at `timeout`; null means without limit. Microseconds beyond a second are carried over, as by
/// Linux.
pub(crate) fn at_timeval(timeout: *const timeval) -> Result<Option<Duration>, Errno> {
    if timeout.is_null() {
        return Ok(None);
    }
    let timeval { tv_sec, tv_usec } = memory::read(timeout)?;
    let seconds = u64::try_from(tv_sec).map_err(|_| Errno::INVAL)?;
    let microseconds = u64::try_from(tv_usec).map_err(|_| Errno::INVAL)?;
    let whole = Duration::from_secs(seconds);
    Ok(Some(
        whole.saturating_add(Duration::from_micros(microseconds)),
    ))
}

pub(crate) fn to_timeval(duration: Duration) -> timeval {
    timeval {
        tv_sec: duration.as_secs() as i64,
        tv_usec: duration.subsec_micros().into(),
    }
}

pub(crate) fn to_timespec(duration: Duration) -> timespec {
    timespec {
        tv_sec: duration.as_secs() as i64,
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_milliseconds_wait_for_ever() {
        assert_eq!(milliseconds(-1), None);
        assert_eq!(milliseconds(1500), Some(Duration::from_millis(1500)));
    }

    #[test]
    fn a_timespec_must_be_normalised() {
        let spec = |tv_sec, tv_nsec| at_timespec(&timespec { tv_sec, tv_nsec });
        assert_eq!(spec(1, 5), Ok(Some(Duration::new(1, 5))));
        assert_eq!(spec(0, 1_000_000_000), Err(Errno::INVAL));
        assert_eq!(spec(-1, 0), Err(Errno::INVAL));
        assert_eq!(spec(0, -1), Err(Errno::INVAL));
    }

    #[test]
    fn a_timeval_is_carried() {
        let timeout = timeval {
            tv_sec: 1,
            tv_usec: 2_500_000,
        };
        assert_eq!(at_timeval(&timeout), Ok(Some(Duration::from_millis(3500))));
        assert_eq!(
            at_timeval(&timeval {
                tv_sec: -1,
                tv_usec: 0
            }),
            Err(Errno::INVAL)
        );
    }
}
