//! Signals: a handler that counts, and a function that sends a signal to a thread blocked in a call.

use std::{
    mem::zeroed,
    ptr,
    sync::atomic::{AtomicU32, Ordering},
    thread::{self, JoinHandle},
    time::Duration,
};

use libc::{c_int, pid_t};

/// Interval of checks of a thread's state.
const MOMENT: Duration = Duration::from_millis(5);

static SEEN: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_signal: c_int) {
    SEEN.fetch_add(1, Ordering::Relaxed);
}

/// Number of signals that the handler has received since it was installed.
#[derive(Clone, Copy)]
pub struct Counted;

impl Counted {
    pub fn so_far(&self) -> u32 {
        SEEN.load(Ordering::Relaxed)
    }
}

/// Installs a counting handler for `signal` with these SA_ flags.
pub fn count_signals(signal: c_int, flags: c_int) -> Counted {
    SEEN.store(0, Ordering::Relaxed);
    // SAFETY: a sigaction of zeros is valid; the handler only adds to an atomic.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = count as extern "C" fn(c_int) as usize;
        action.sa_flags = flags;
        libc::sigaction(signal, &action, ptr::null_mut());
    }
    Counted
}

/// Blocks `signal` in this thread, until [`unblock`].
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

/// Sends a signal to this thread.
pub fn raise(signal: c_int) {
    // SAFETY: the argument is an integer.
    unsafe { libc::raise(signal) };
}

pub fn ignore(signal: c_int) {
    // SAFETY: SIG_IGN is not a function.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

pub fn this_thread() -> pid_t {
    // SAFETY: the call has no arguments.
    unsafe { libc::gettid() }
}

/// Sends `signal` to a thread after `after`, when it sleeps, and not just for a lock: on a busy machine it may not be
/// blocked by then.
pub fn kick(target: pid_t, signal: c_int, after: Duration) -> JoinHandle<()> {
    thread::spawn(move || {
        thread::sleep(after);
        let mut asleep = 0;
        while asleep < 2 {
            thread::sleep(MOMENT);
            asleep = if sleeps(target) { asleep + 1 } else { 0 };
        }
        // SAFETY: the arguments are integers.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), target, signal) };
    })
}

/// Returns true if the thread sleeps (proc(5), the third field of `stat`).
fn sleeps(thread: pid_t) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    let stat = stat.expect("the thread runs");
    // The name, in parentheses, precedes the state.
    let state = stat.rsplit(") ").next();
    state.is_some_and(|state| state.starts_with('S'))
}
