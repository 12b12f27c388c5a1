//! Signals as something to wait for: blocked from interrupting, read from a descriptor.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use rustix::io::{Errno, read};
use rustix::process::Signal;

/// The kernel's signals are 1 to 64; libc keeps 32 and 33.
const LAST: i32 = 64;

/// Signals that the calling thread's own faults raise: no handler of theirs interrupts a wait.
const FAULTS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

/// Signals that a thread has blocked.
#[derive(Clone, Copy)]
pub struct Mask(libc::sigset_t);

/// No handler interrupts the calling thread from now on, but for its own faults. Answers what was blocked before.
pub fn hold_back() -> Mask {
    // SAFETY: zeros are the empty set; `set` is a set from then on, and `before` becomes one.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        for fault in FAULTS {
            libc::sigdelset(&mut set, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
        Mask(before)
    }
}

/// Handlers interrupt it as before; those that were held back run now.
pub fn let_through(mask: Mask) {
    // SAFETY: the mask is a set that the kernel has told.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &mask.0, null_mut()) };
}

/// What the calling thread has blocked.
fn blocked() -> Mask {
    // SAFETY: zeros are the empty set; a null set changes nothing.
    unsafe {
        let mut blocked: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), &mut blocked);
        Mask(blocked)
    }
}

/// Were all handlers of signals that may interrupt the calling thread installed with `SA_RESTART`? `held_back` is what
/// it has blocked itself, if [`hold_back`] blocks more.
pub fn handlers_restart(held_back: Option<Mask>) -> bool {
    let Mask(blocked) = held_back.unwrap_or_else(blocked);
    (1..=LAST)
        .filter(|signal| !FAULTS.contains(signal))
        // SAFETY: `blocked` is a set.
        .filter(|&signal| unsafe { libc::sigismember(&blocked, signal) } == 0)
        .all(restarts)
}

/// True also for a signal without a handler.
fn restarts(signal: i32) -> bool {
    // SAFETY: zeros are a `sigaction`, which is only written; a null action changes nothing. For
    // libc's own signals it fails and leaves the zeros, which mean "no handler".
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, null(), &mut action);
        action
    };
    matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
        || action.sa_flags & libc::SA_RESTART != 0
}

/// Octets of `signalfd_siginfo`; its first word is the signal's number.
const INFO: usize = 128;

/// A set of signals that the calling thread, and those it starts, no longer get otherwise.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    pub fn watch(signals: &[Signal]) -> Result<Signals, Errno> {
        // SAFETY: zero is the empty set.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        for signal in signals {
            // SAFETY: `set` is a set, and the number is one of a signal.
            unsafe { libc::sigaddset(&mut set, signal.as_raw()) };
        }
        // SAFETY: `set` is a set; the old mask is not asked for.
        if unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, null_mut()) } != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: `set` is a set; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the descriptor is new and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals { fd })
    }

    /// The next signal that came, if any.
    pub fn next(&self) -> Option<Signal> {
        let mut info = [0; INFO];
        read(&self.fd, &mut info).ok()?;
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        Signal::from_named_raw(number)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handler that does nothing, with these flags.
    fn handle(signal: i32, flags: i32) {
        extern "C" fn nothing(_signal: i32) {}
        // SAFETY: zeros are a `sigaction`; the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
            action.sa_flags = flags;
            libc::sigaction(signal, &action, null_mut());
        }
    }

    #[test]
    fn one_handler_without_restart_is_enough_to_interrupt() {
        assert!(handlers_restart(None));
        handle(libc::SIGUSR2, libc::SA_RESTART);
        assert!(handlers_restart(None));
        handle(libc::SIGUSR2, 0);
        assert!(!handlers_restart(None));
        handle(libc::SIGUSR2, libc::SA_RESTART);
    }

    #[test]
    fn a_blocked_signal_is_read_once() {
        let signals = Signals::watch(&[Signal::USR2]).unwrap();
        assert_eq!(signals.next(), None);
        // SAFETY: sends a signal to the calling thread, which has it blocked.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
        assert_eq!(signals.next(), Some(Signal::USR2));
        assert_eq!(signals.next(), None);
    }
}
