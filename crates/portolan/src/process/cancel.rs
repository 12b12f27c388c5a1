//! Threads that are to end where they wait (`pthread_cancel`). The waits of libc's own calls are ended by libc; those of
//! the library are ended here, and the call that waited ends the thread once it has left the library.
//!
//! What the library calls of libc may end threads, too (`getrandom` does): so, in programs that cancel any, a thread in
//! the library has that switched off.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portolan_sys::thread;

use crate::process::Process;
use crate::process::inside;
use crate::wait::Waiter;

/// Was there ever one? Others need not look.
static HAS_ANY: AtomicBool = AtomicBool::new(false);

/// Threads that were cancelled and did not wait here since, by the kernel's numbers: libc gives a thread the name of one
/// that has ended.
static CANCELLED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// Who may sleep, by thread.
static SLEEPERS: Mutex<Vec<(i32, Weak<Waiter>)>> = Mutex::new(Vec::new());

thread_local! {
    /// It may be cancelled, but for its being here.
    static IS_HELD: Cell<bool> = const { Cell::new(false) };
    static IS_SHELTERED: Cell<bool> = const { Cell::new(false) };
    static IS_ENDED: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread sleeps by this waiter from now on.
pub(crate) fn note(waiter: &Arc<Waiter>) {
    let mut sleepers = held(&SLEEPERS);
    sleepers.retain(|(_, waiter)| waiter.strong_count() > 0);
    sleepers.push((thread::number(), Arc::downgrade(waiter)));
}

/// A thread is about to be cancelled.
pub fn expect() {
    HAS_ANY.store(true, Ordering::SeqCst);
}

/// `thread` was cancelled: a wait of its ends.
pub fn cancelled(thread: i32) {
    held(&CANCELLED).push(thread);
    // Sleepers are signalled with the core held.
    let Some(process) = Process::running() else {
        return;
    };
    let _core = process.lock();
    for (_, waiter) in held(&SLEEPERS).iter().filter(|(id, _)| *id == thread) {
        if let Some(waiter) = waiter.upgrade() {
            waiter.signal();
        }
    }
}

/// The calling thread is in the library.
pub fn hold() {
    if HAS_ANY.load(Ordering::Relaxed) && !IS_HELD.get() && thread::forbid_cancel() {
        IS_HELD.set(true);
    }
}

/// It has left the library.
fn release() {
    if IS_HELD.replace(false) {
        thread::allow_cancel();
    }
}

/// Is the calling thread to end rather than wait?
pub(crate) fn is_wanted() -> bool {
    if !HAS_ANY.load(Ordering::Acquire) || IS_SHELTERED.get() {
        return false;
    }
    let id = thread::number();
    let mut cancelled = held(&CANCELLED);
    let is_wanted = cancelled.contains(&id) && IS_HELD.get();
    if is_wanted {
        cancelled.retain(|other| *other != id);
        IS_ENDED.set(true);
    }
    is_wanted
}

/// The calling thread is not cancelled until this is dropped.
#[must_use]
pub struct CancelDisabled {
    /// Within another: a lock of the library's waits by such a call, too.
    was_sheltered: bool,
}

/// The call under way is none that threads are cancelled in.
pub fn shelter() -> CancelDisabled {
    CancelDisabled {
        was_sheltered: IS_SHELTERED.replace(true),
    }
}

impl Drop for CancelDisabled {
    fn drop(&mut self) {
        IS_SHELTERED.set(self.was_sheltered);
    }
}

/// Is the calling thread to end? Not while it is still in the library.
pub fn take_end() -> bool {
    if !HAS_ANY.load(Ordering::Relaxed) || inside::is_inside() {
        return false;
    }
    release();
    IS_ENDED.replace(false)
}

fn held<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shelter_within_another_leaves_it_standing() {
        let outer = shelter();
        drop(shelter());
        assert!(IS_SHELTERED.get());
        drop(outer);
        assert!(!IS_SHELTERED.get());
    }
}
