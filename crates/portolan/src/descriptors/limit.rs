//! The limit on the numbers of descriptors (`RLIMIT_NOFILE`). The library's own descriptors must
//! not use up the program's: descriptors numbered above the soft limit do not count against it, and
//! stay valid. Therefore the limit is raised briefly, as far as the hard limit allows.

use std::sync::{Mutex, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Threads that currently have the limit raised.
struct Raises {
    count: u32,
    before: Rlimit,
}

static RAISES: Mutex<Raises> = Mutex::new(Raises {
    count: 0,
    before: Rlimit {
        current: None,
        maximum: None,
    },
});

/// Keeps the limit above the one that the program has set.
#[must_use = "dropped, the limit is what it was"]
pub(crate) struct Raised(());

/// By how much the limit is raised if the hard limit allows, and the minimum.
pub(super) const ROOM: u64 = 4096;
const LEAST: u64 = 64;

/// Raises the limit. Returns `None` if the hard limit leaves too little room.
pub(crate) fn raise() -> Option<Raised> {
    raise_to(raised)
}

/// Raises the limit above `number`. Returns `None` if the hard limit is lower.
pub(crate) fn raise_above(number: u64) -> Option<Raised> {
    raise_to(|limits| {
        let may = limits.maximum.is_none_or(|most| most > number);
        may.then_some(number + 1)
    })
}

fn raise_to(wanted: impl FnOnce(Rlimit) -> Option<u64>) -> Option<Raised> {
    let mut raises = RAISES.lock().unwrap_or_else(PoisonError::into_inner);
    let limits = getrlimit(Resource::Nofile);
    if raises.count == 0 {
        raises.before = limits;
    }
    let wanted = wanted(raises.before)?;
    if limits.current.is_some_and(|current| current < wanted) {
        let current = Some(wanted);
        setrlimit(Resource::Nofile, Rlimit { current, ..limits }).ok()?;
    }
    raises.count += 1;
    Some(Raised(()))
}

/// The program's own limit.
pub(crate) fn current() -> u64 {
    let raises = RAISES.lock().unwrap_or_else(PoisonError::into_inner);
    let limits = match raises.count {
        0 => getrlimit(Resource::Nofile),
        _ => raises.before,
    };
    limits.current.unwrap_or(u64::MAX)
}

pub(crate) fn may_raise() -> bool {
    raised(getrlimit(Resource::Nofile)).is_some()
}

fn raised(limits: Rlimit) -> Option<u64> {
    let current = limits.current?;
    let most = limits.maximum.unwrap_or(u64::MAX);
    (most.checked_sub(current)? >= LEAST).then(|| most.min(current.saturating_add(ROOM)))
}

/// Calls `act` with the limit raised, and passes it the program's limit. Returns `None` if that is
/// at least `ample`, or cannot be raised.
pub(crate) fn above<T>(ample: u64, act: impl FnOnce(u64) -> T) -> Option<T> {
    let limit = Some(current()).filter(|&limit| limit < ample)?;
    let raised = raise()?;
    let result = act(limit);
    drop(raised);
    Some(result)
}

impl Drop for Raised {
    fn drop(&mut self) {
        let mut raises = RAISES.lock().unwrap_or_else(PoisonError::into_inner);
        raises.count -= 1;
        if raises.count == 0 {
            // It was set before, so that it cannot fail.
            let _ = setrlimit(Resource::Nofile, raises.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    /// The limit is the process's.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    #[test]
    fn the_limit_is_what_it_was_when_the_last_has_done() {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = || getrlimit(Resource::Nofile).current;
        let before = getrlimit(Resource::Nofile);
        let lower = Rlimit {
            current: Some(500),
            ..before
        };
        setrlimit(Resource::Nofile, lower).expect("it is lower");
        let first = raise().expect("the hard limit is higher");
        let second = raise().expect("it is");
        let higher = limit();
        assert!(higher > Some(500));
        drop(first);
        assert_eq!(limit(), higher, "one is left");
        drop(second);
        assert_eq!(limit(), Some(500));
        assert_eq!(above(600, |known| (known, limit())), Some((500, higher)));
        assert_eq!(above(500, |_| ()), None, "that is ample");
        setrlimit(Resource::Nofile, before).expect("it was so");
    }

    #[test]
    fn a_descriptor_above_the_limit_can_be_replaced() {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let before = getrlimit(Resource::Nofile);
        let file = || std::fs::File::open("/dev/null").expect("it is there");
        let high = rustix::io::fcntl_dupfd_cloexec(file(), 700).expect("the limit is higher");
        let lower = Rlimit {
            current: Some(500),
            ..before
        };
        setrlimit(Resource::Nofile, lower).expect("it is lower");
        let replaced = crate::descriptors::renumber(file().as_fd(), high.as_fd());
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, before).expect("it was so");
        assert_eq!((replaced, limit), (Ok(()), lower));
    }

    #[test]
    fn what_the_library_can_do_without_takes_no_number_of_the_programs() {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let before = getrlimit(Resource::Nofile);
        let lower = Rlimit {
            current: Some(500),
            ..before
        };
        setrlimit(Resource::Nofile, lower).expect("it is lower");
        let file = std::fs::File::open("/dev/null").expect("it is there");
        let kept = crate::descriptors::keep_spare(&file.into());
        let number = kept.map(|kept| kept.as_fd().as_raw_fd());
        let limit = current();
        setrlimit(Resource::Nofile, before).expect("it was so");
        assert_eq!(limit, 500);
        assert!(number.is_some_and(|number| number > 500), "{number:?}");
    }

    #[test]
    fn a_hard_limit_leaves_room_or_not() {
        let limits = |current, maximum| Rlimit {
            current: Some(current),
            maximum: Some(maximum),
        };
        assert_eq!(raised(limits(256, 256)), None);
        assert_eq!(raised(limits(256, 256 + LEAST - 1)), None);
        assert_eq!(raised(limits(256, 1024)), Some(1024));
        assert_eq!(raised(limits(1024, 1 << 19)), Some(1024 + ROOM));
    }
}
