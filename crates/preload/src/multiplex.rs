//! The symbols that wait for several descriptors: select, poll, epoll.

use std::{mem, ptr, slice, time::Duration};

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use portolan::posix;
use rustix::io::Errno;

use crate::{
    interpose::{CallError, Outcome, done, ours},
    memory::{self, plausible, readable, writable},
    select, time,
};

/// Linux limits the number of events so that their bytes fit an int.
const MAXIMUM_EVENTS: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;

interpose! {
    /// `int select(int, fd_set *, fd_set *, fd_set *, struct timeval *)`
    ///
    /// As on Linux, the remaining time is written back.
    fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int {
        select_any(count, [read, write, except], timeout)
    }

    /// `int pselect(int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *)`
    fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t,
    ) -> c_int {
        let sets = select::Sets::borrow(count, [read, write, except])?;
        let wait = select::Wait::until(time::at_timespec(timeout)?);
        sets.wait(&wait, signals(mask)?.as_ref())
    }

    /// `int poll(struct pollfd *, nfds_t, int)`
    fn poll(entries: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
        poll_any(entries, count, || Ok(time::milliseconds(timeout)), || Ok(None))
    }

    /// `int __poll_chk(struct pollfd *, nfds_t, int, size_t)`
    fn __poll_chk(entries: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int {
        fits(count, room)?;
        poll_any(entries, count, || Ok(time::milliseconds(timeout)), || Ok(None))
    }

    /// `int ppoll(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *)`
    fn ppoll(entries: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        poll_any(entries, count, || time::at_timespec(timeout), || signals(mask))
    }

    /// `int __ppoll_chk(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t)`
    fn __ppoll_chk(
        entries: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t,
    ) -> c_int {
        fits(count, room)?;
        poll_any(entries, count, || time::at_timespec(timeout), || signals(mask))
    }

    /// `int epoll_create(int)`
    fn epoll_create(size: c_int) -> c_int {
        if size <= 0 {
            return Err(Errno::INVAL.into());
        }
        posix::epoll_create(0)
    }

    /// `int epoll_create1(int)`
    fn epoll_create1(flags: c_int) -> c_int {
        if flags & !libc::EPOLL_CLOEXEC != 0 {
            return Err(Errno::INVAL.into());
        }
        posix::epoll_create(flags)
    }

    /// `int epoll_ctl(int, int, int, struct epoll_event *)`
    fn epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
        ours(set).or_else(|_| ours(fd))?;
        let event = if operation == libc::EPOLL_CTL_DEL { None } else { Some(memory::read(event)?) };
        done(posix::epoll_control(set, operation, fd, event))
    }

    /// `int epoll_wait(int, struct epoll_event *, int, int)`
    fn epoll_wait(set: c_int, events: *mut epoll_event, maximum: c_int, timeout: c_int) -> c_int {
        epoll_any(set, events, maximum, || Ok(time::milliseconds(timeout)), || Ok(None))
    }

    /// `int epoll_pwait(int, struct epoll_event *, int, int, const sigset_t *)`
    fn epoll_pwait(
        set: c_int, events: *mut epoll_event, maximum: c_int, timeout: c_int, mask: *const sigset_t,
    ) -> c_int {
        epoll_any(set, events, maximum, || Ok(time::milliseconds(timeout)), || signals(mask))
    }

    /// `int epoll_pwait2(int, struct epoll_event *, int, const struct timespec *, const sigset_t *)`
    fn epoll_pwait2(
        set: c_int, events: *mut epoll_event, maximum: c_int, timeout: *const timespec, mask: *const sigset_t,
    ) -> c_int {
        epoll_any(set, events, maximum, || time::at_timespec(timeout), || signals(mask))
    }
}

/// # Safety
/// Each of `sets` is null or a bit set of at least `count` bits.
pub(crate) unsafe fn select_any(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timeval,
) -> Outcome<c_int> {
    // SAFETY: the caller's promise.
    let sets = unsafe { select::Sets::borrow(count, sets)? };
    let wait = select::Wait::until(time::at_timeval(timeout)?);
    let ready = sets.wait(&wait, None);
    if let Some(left) = wait
        .left()
        .filter(|_| !matches!(ready, Err(CallError::NotOurs)))
    {
        memory::write(timeout, &[time::to_timeval(left)])?;
    }
    ready
}

/// # Safety
/// `entries` is null or an array of `count`.
pub(crate) unsafe fn poll_any(
    entries: *mut pollfd,
    count: nfds_t,
    timeout: impl FnOnce() -> Result<Option<Duration>, Errno>,
    mask: impl FnOnce() -> Result<Option<sigset_t>, Errno>,
) -> Outcome<c_int> {
    let count = count as usize;
    if count == 0 || readable(entries, count).is_err() {
        return Err(CallError::NotOurs);
    }
    // SAFETY: the caller's promise; the array can be read.
    let listed = unsafe { slice::from_raw_parts(entries, count) };
    if !listed.iter().any(|entry| posix::is_ours(entry.fd)) {
        return Err(CallError::NotOurs);
    }
    writable(entries, count)?;
    // SAFETY: the caller's promise; the array can be written.
    let entries = unsafe { slice::from_raw_parts_mut(entries, count) };
    posix::poll(entries, timeout()?, mask()?.as_ref()).map(|ready| ready as c_int)
}

/// # Safety
/// `events` is null or an array of `maximum`.
pub(crate) unsafe fn epoll_any(
    set: c_int,
    events: *mut epoll_event,
    maximum: c_int,
    timeout: impl FnOnce() -> Result<Option<Duration>, Errno>,
    mask: impl FnOnce() -> Result<Option<sigset_t>, Errno>,
) -> Outcome<c_int> {
    ours(set)?;
    if !(1..=MAXIMUM_EVENTS).contains(&maximum) {
        return Err(Errno::INVAL.into());
    }
    let maximum = room_for_events(events, maximum as usize)?;
    // SAFETY: the caller's promise; an event has no invalid value and the library only writes them.
    let events = unsafe { slice::from_raw_parts_mut(events, maximum) };
    posix::epoll_wait(set, events, timeout()?, mask()?.as_ref()).map(|ready| ready as c_int)
}

/// Returns how many of `maximum` events can be written: all, if the first and the last can be.
/// Programs give room for many more events than ever occur.
fn room_for_events(events: *mut epoll_event, maximum: usize) -> Result<usize, Errno> {
    plausible(events, maximum)?;
    writable(events, 1)?;
    let last = events.wrapping_add(maximum - 1);
    if writable(last, 1).is_ok() {
        return Ok(maximum);
    }
    let bytes = maximum * size_of::<epoll_event>();
    let good = posix::memory::writable_at(events.expose_provenance(), bytes);
    Ok(good / size_of::<epoll_event>())
}

/// Reads the signal set at `mask`, of which the kernel, too, reads only its own 64 signals.
fn signals(mask: *const sigset_t) -> Result<Option<sigset_t>, Errno> {
    if mask.is_null() {
        return Ok(None);
    }
    kernels_signals(mask.cast()).map(Some)
}

/// Converts the kernel's signal set at `signals` to libc's.
pub(crate) fn kernels_signals(signals: *const u64) -> Result<sigset_t, Errno> {
    let signals = memory::read(signals)?;
    // SAFETY: a signal set is an array of words, in which the kernel's 64 signals come first.
    unsafe {
        let mut set: sigset_t = mem::zeroed();
        ptr::from_mut(&mut set).cast::<u64>().write(signals);
        Ok(set)
    }
}

/// A fortified call that overflows its array is left to libc, which aborts the program.
fn fits(count: nfds_t, room: size_t) -> Outcome<()> {
    if room / size_of::<pollfd>() < count as usize {
        Err(CallError::NotOurs)
    } else {
        Ok(())
    }
}
