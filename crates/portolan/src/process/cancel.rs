//! Thread cancellation (`pthread_cancel`). libc ends the waits of its own calls; those of the
//! library are ended here, and the call that waited ends the thread once it has left the library.
//!
//! Functions of libc that the library calls may be cancellation points, too (`getrandom` is): in
//! programs that cancel threads, cancellation is disabled for a thread while it is in the library.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use portolan_sys::thread;

use crate::process::Process;
use crate::process::inside;
use crate::wait::waiter;

/// Set before the first cancellation. Until then no check is needed.
static HAS_ANY: AtomicBool = AtomicBool::new(false);

/// Threads that were cancelled and have not waited here since, by the kernel's thread IDs: libc
/// reuses the name of a thread that has ended.
static CANCELLED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

thread_local! {
    /// The library has disabled cancellation, which the thread had enabled.
    static IS_HELD: Cell<bool> = const { Cell::new(false) };
    static IS_DISABLED: Cell<bool> = const { Cell::new(false) };
    static IS_ENDED: Cell<bool> = const { Cell::new(false) };
}

/// Called before a thread is cancelled.
pub fn expect() {
    HAS_ANY.store(true, Ordering::SeqCst);
}

/// Called after `thread` was cancelled: ends its wait.
pub fn cancelled(thread: i32) {
    cancelled_threads().push(thread);
    // Waiters are signalled with the core locked.
    let Some(process) = Process::running() else {
        return;
    };
    let _core = process.lock();
    waiter::signal_thread(thread);
}

/// Disables cancellation for the calling thread, which is in the library.
pub fn hold() {
    if HAS_ANY.load(Ordering::Relaxed) && !IS_HELD.get() && thread::forbid_cancel() {
        IS_HELD.set(true);
    }
}

/// Enables it again, when the thread leaves the library.
fn release() {
    if IS_HELD.replace(false) {
        thread::allow_cancel();
    }
}

/// Must the calling thread end instead of waiting?
pub(crate) fn is_wanted() -> bool {
    if !HAS_ANY.load(Ordering::Acquire) || IS_DISABLED.get() {
        return false;
    }
    let id = thread::number();
    let mut cancelled = cancelled_threads();
    let is_wanted = cancelled.contains(&id) && IS_HELD.get();
    if is_wanted {
        cancelled.retain(|other| *other != id);
        IS_ENDED.set(true);
    }
    is_wanted
}

/// Until this is dropped, waits of the calling thread are no cancellation points.
#[must_use]
pub struct CancelDisabled {
    /// State to restore: these values nest, since the library's locks wait by such a call, too.
    was_disabled: bool,
}

/// Marks the current call as one that is no cancellation point.
pub fn disable_cancel() -> CancelDisabled {
    CancelDisabled {
        was_disabled: IS_DISABLED.replace(true),
    }
}

impl Drop for CancelDisabled {
    fn drop(&mut self) {
        IS_DISABLED.set(self.was_disabled);
    }
}

/// Must the calling thread end? Never true while it is still in the library.
pub fn take_end() -> bool {
    if !HAS_ANY.load(Ordering::Relaxed) || inside::is_inside() {
        return false;
    }
    release();
    IS_ENDED.replace(false)
}

fn cancelled_threads() -> MutexGuard<'static, Vec<i32>> {
    CANCELLED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disabling_within_another_keeps_it_disabled() {
        let outer = disable_cancel();
        drop(disable_cancel());
        assert!(IS_DISABLED.get());
        drop(outer);
        assert!(!IS_DISABLED.get());
    }
}
