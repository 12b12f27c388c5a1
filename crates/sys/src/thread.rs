//! Threads that the application must not notice.

use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

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

/// The calling thread, as `pthread_cancel` knows it.
pub fn id() -> usize {
    // SAFETY: no precondition.
    unsafe { libc::pthread_self() as usize }
}

/// May the calling thread be ended by `pthread_cancel` where it waits?
pub fn is_cancellable() -> bool {
    const ENABLE: i32 = 0;
    unsafe extern "C" {
        fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
    }
    let mut before = ENABLE;
    let mut ours = ENABLE;
    // SAFETY: asks by setting, and sets what was.
    unsafe {
        pthread_setcancelstate(ENABLE, &mut before);
        pthread_setcancelstate(before, &mut ours);
    }
    before == ENABLE
}
