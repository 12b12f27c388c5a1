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
const ROOM: u64 = 4096;
const LEAST: u64 = 64;

/// Raises the limit. Returns `None` if the hard limit leaves too little room.
pub(crate) fn raise() -> Option<Raised> {
    let mut raises = RAISES.lock().unwrap_or_else(PoisonError::into_inner);
    let limits = getrlimit(Resource::Nofile);
    if raises.count == 0 {
        raises.before = limits;
    }
    let wanted = raised(raises.before)?;
    if limits.current.is_some_and(|current| current < wanted) {
        let current = Some(wanted);
        setrlimit(Resource::Nofile, Rlimit { current, ..limits }).ok()?;
    }
    raises.count += 1;
    Some(Raised(()))
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
    let limits = getrlimit(Resource::Nofile);
    let limit = limits.current.filter(|&limit| limit < ample)?;
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
    use super::*;

    #[test]
    fn the_limit_is_what_it_was_when_the_last_has_done() {
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
