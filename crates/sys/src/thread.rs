//! Threads that are invisible to the application.

use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use rustix::thread::SecureComputingMode;

/// Number of threads of this process; a large number without `/proc`.
pub fn count() -> usize {
    // The directory has a subdirectory per thread.
    let tasks = rustix::fs::stat("/proc/self/task");
    tasks.map_or(usize::MAX, |tasks| tasks.st_nlink as usize - 2)
}

/// Starts a thread with all signals blocked: they are handled by the application's threads.
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

/// The CPU on which the calling thread runs or last ran; without a system call if libc maintains a `struct rseq`.
pub fn processor() -> i32 {
    // SAFETY: it takes no arguments, and accesses only the thread's own data.
    unsafe { libc::sched_getcpu() }
}

/// Sets the calling thread's timer slack to [`EXACT`] instead of 50 microseconds (PR_SET_TIMERSLACK).
pub fn sleep_exactly() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(EXACT.as_nanos() as u64));
}

/// Does a filter (seccomp) decide on the calling thread's system calls? It may kill the program for an unusual one.
pub fn is_filtered() -> bool {
    let mode = rustix::thread::secure_computing_mode();
    !matches!(mode, Ok(SecureComputingMode::Disabled))
}

/// How long the kernel may delay the end of a sleep to save interrupts.
const EXACT: Duration = Duration::from_micros(1);

/// The calling thread's ID.
pub fn number() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
}

const CANCEL_ENABLE: i32 = 0;
const CANCEL_DISABLE: i32 = 1;

/// Disables cancellation of the calling thread by `pthread_cancel`. Returns true if it was enabled.
pub fn forbid_cancel() -> bool {
    let mut before = CANCEL_DISABLE;
    // SAFETY: `before` is valid.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    before == CANCEL_ENABLE
}

/// Enables cancellation of the calling thread at cancellation points.
pub fn allow_cancel() {
    let mut before = CANCEL_DISABLE;
    // SAFETY: `before` is valid.
    unsafe { pthread_setcancelstate(CANCEL_ENABLE, &mut before) };
}
