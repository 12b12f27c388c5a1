//! Signals: a handler that counts, and a way to send one to a thread that is blocked in a call.

use std::{
    mem::zeroed,
    ptr,
    sync::atomic::{AtomicU32, Ordering},
    thread::{self, JoinHandle},
    time::Duration,
};

use libc::{c_int, pid_t};

/// Between two looks at a thread.
const MOMENT: Duration = Duration::from_millis(5);

static SEEN: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_signal: c_int) {
    SEEN.fetch_add(1, Ordering::Relaxed);
}

/// The signals that a handler has seen since it was installed.
pub struct Counted;

impl Counted {
    pub fn so_far(&self) -> u32 {
        SEEN.load(Ordering::Relaxed)
    }
}

/// Installs a handler for `signal` that counts, with these SA_ flags.
pub fn count_signals(signal: c_int, flags: c_int) -> Counted {
    SEEN.store(0, Ordering::Relaxed);
    // SAFETY: zeros are a sigaction; the handler only adds to an atomic.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = count as extern "C" fn(c_int) as usize;
        action.sa_flags = flags;
        libc::sigaction(signal, &action, ptr::null_mut());
    }
    Counted
}

/// Keeps `signal` from this thread, until [`unblock`].
pub fn block(signal: c_int) {
    change_mask(libc::SIG_BLOCK, signal);
}

pub fn unblock(signal: c_int) {
    change_mask(libc::SIG_UNBLOCK, signal);
}

fn change_mask(how: c_int, signal: c_int) {
    // SAFETY: zeros are an empty signal set.
    unsafe {
        let mut set: libc::sigset_t = zeroed();
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(how, &set, ptr::null_mut());
    }
}

/// To this thread.
pub fn raise(signal: c_int) {
    // SAFETY: an integer.
    unsafe { libc::raise(signal) };
}

pub fn ignore(signal: c_int) {
    // SAFETY: SIG_IGN is no handler.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

pub fn this_thread() -> pid_t {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// Sends `signal` to a thread after a while, once it sleeps: on a busy machine it may not have come to it.
pub fn kick(target: pid_t, signal: c_int, after: Duration) -> JoinHandle<()> {
    thread::spawn(move || {
        thread::sleep(after);
        while !sleeps(target) {
            thread::sleep(MOMENT);
        }
        // SAFETY: integers only.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), target, signal) };
    })
}

/// Is the thread asleep (proc(5), the third field of `stat`)?
fn sleeps(thread: pid_t) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    let stat = stat.expect("the thread runs");
    // Its name stands before, in brackets.
    let state = stat.rsplit(") ").next();
    state.is_some_and(|state| state.starts_with('S'))
}
