//! Waiting for an epoll set in an event loop of the program's own.

use std::os::fd::RawFd;
use std::time::Duration;

use portolan_sys::wait::pollfd;

use super::multiplex::epoll_wait;
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::socket::table;
use crate::threads::embedded::Begun;
pub use crate::threads::embedded::EmbeddedWait;
use crate::threads::start::here;

/// As [`epoll_wait`] with a time-out of zero. If there is no event, the library falls asleep in another event loop, and
/// `wait` becomes readable once the call should be repeated, which has to be done then.
pub fn epoll_wait_embedded(
    set: RawFd,
    events: &mut [libc::epoll_event],
    wait: &mut EmbeddedWait,
) -> Outcome<usize> {
    let (Some(epoll), Some(process)) = (table::epoll(set), here()) else {
        return Err(CallError::NotOurs);
    };
    process.end_embedded(wait);
    loop {
        let count = epoll_wait(set, events, Some(Duration::ZERO), None)?;
        if count > 0 {
            return Ok(count);
        }
        let members = epoll.has_kernel_members();
        let members = members.then(|| pollfd(epoll.fd(), libc::POLLIN));
        let begun = process.begin_embedded(wait, members, |core| {
            if epoll.has_kernel_members() != members.is_some() {
                return Some(0);
            }
            let count = epoll.collect(events, |socket| core.readiness(socket));
            (count > 0).then_some(count)
        });
        match begun {
            Ok(Begun::Ready(0) | Begun::Again) => {}
            Ok(Begun::Ready(count)) => return Ok(count),
            Ok(Begun::Asleep) => return Ok(0),
            Err(errno) => {
                process.end_embedded(wait);
                return Err(errno.into());
            }
        }
    }
}

/// Makes `wait` known to a set: events of its members end the sleep. To be undone by [`leave_embedded`].
pub fn join_embedded(set: RawFd) -> Outcome<EmbeddedWait> {
    let epoll = table::epoll(set).ok_or(CallError::NotOurs)?;
    let wait = EmbeddedWait::new()?;
    let _core = Process::running().map(Process::lock);
    epoll.add_sleeper(wait.waiter());
    Ok(wait)
}

/// Ends the sleep, and what [`join_embedded`] has begun.
pub fn leave_embedded(set: RawFd, wait: &mut EmbeddedWait) {
    if let Some(process) = Process::running() {
        process.end_embedded(wait);
    }
    if let Some(epoll) = table::epoll(set) {
        epoll.remove_sleeper(wait.waiter());
    }
}
