//! Threads that the application must not notice.

use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Threads of this process; as if there were many where there is no `/proc`.
pub fn count() -> usize {
    // A directory of which each thread is one.
    let tasks = rustix::fs::stat("/proc/self/task");
    tasks.map_or(usize::MAX, |tasks| tasks.st_nlink as usize - 2)
}

/// Starts a thread that takes no signals: they are the application's threads' to handle.
pub fn spawn_masked(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises `all`; `pthread_sigmask` reads it and initialises `before`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let spawned = Builder::new().name(name.to_string()).spawn(body);
    // SAFETY: `before` was initialised above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    spawned
}

/// The processor on which the calling thread runs, or did a moment ago; no system call where libc keeps a `struct rseq`.
pub fn processor() -> i32 {
    // SAFETY: it takes nothing, and touches only what is the thread's own.
    unsafe { libc::sched_getcpu() }
}

/// From now on the calling thread's sleeps are exact to [`EXACT`], not to 50 microseconds (PR_SET_TIMERSLACK).
pub fn sleep_exactly() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(EXACT.as_nanos() as u64));
}

/// How late the kernel may end a sleep in favour of fewer interrupts.
const EXACT: Duration = Duration::from_micros(1);

/// The calling thread, as the kernel counts.
pub fn number() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
}

const CANCEL_ENABLE: i32 = 0;
const CANCEL_DISABLE: i32 = 1;

/// From now on `pthread_cancel` does not end the calling thread. True if it could before.
pub fn forbid_cancel() -> bool {
    let mut before = CANCEL_DISABLE;
    // SAFETY: `before` is live.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    before == CANCEL_ENABLE
}

/// `pthread_cancel` ends the calling thread where it waits.
pub fn allow_cancel() {
    let mut before = CANCEL_DISABLE;
    // SAFETY: `before` is live.
    unsafe { pthread_setcancelstate(CANCEL_ENABLE, &mut before) };
}
