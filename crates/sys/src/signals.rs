//! Signals to wait for: blocked, read from a descriptor, or deferred by their handlers.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use rustix::io::{Errno, read};
use rustix::process::Signal;

use crate::{memory, raw};

/// The kernel's signals are 1 to 64; libc keeps 32 and 33.
pub const LAST: i32 = 64;

/// Signals raised by faults of the calling thread: their handlers do not interrupt a wait.
const FAULTS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

/// The ones for memory that does not exist or may not be accessed that way.
const OF_MEMORY: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// Other signals about the thread's current action: traps of seccomp(2), abort(3) and the profiling timer.
const OF_THE_MOMENT: [i32; 3] = [libc::SIGSYS, libc::SIGABRT, libc::SIGPROF];

/// libc's own signals, by which it cancels threads and sets the user ID of all of them.
const OF_LIBC: [i32; 2] = [32, 33];

/// Whether a handler of this signal may be deferred.
pub fn may_be_defer(signal: i32) -> bool {
    let cannot_wait = [&FAULTS[..], &OF_THE_MOMENT, &OF_LIBC];
    (1..=LAST).contains(&signal) && !cannot_wait.iter().any(|those| those.contains(&signal))
}

/// Whether it is a signal for a bad pointer.
pub fn is_of_memory(signal: i32) -> bool {
    OF_MEMORY.contains(&signal)
}

/// A thread's signal mask in the kernel's format: signal 1 is the lowest bit.
#[derive(Clone, Copy)]
pub struct Mask(u64);

impl Mask {
    fn all_that_may_be_defer() -> Mask {
        let those = (1..=LAST).filter(|&signal| may_be_defer(signal));
        Mask(those.fold(0, |set, signal| set | bit(signal)))
    }

    fn has(self, signal: i32) -> bool {
        self.0 & bit(signal) != 0
    }
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The arguments of a signal handler.
pub struct SignalInfo {
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
}

impl SignalInfo {
    /// # Safety
    /// The arguments must be those of the calling handler, which was installed with `SA_SIGINFO` and does not return
    /// while this lives.
    pub unsafe fn new(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) -> SignalInfo {
        SignalInfo {
            signal,
            info,
            context,
        }
    }

    /// Defers the signal: it is sent again and stays pending until the calling thread unblocks it. From the handler's
    /// return until then only signals that cannot be deferred interrupt the thread. Returns the former signal mask.
    ///
    /// # Errors
    /// `EAGAIN`: no further real-time signal can be queued; nothing was changed.
    pub fn defer(&self) -> Result<Mask, Errno> {
        self.send_again()?;
        // SAFETY: the kernel restores the mask in the context when the handler returns. Only the part of libc's type
        // that the kernel uses is accessed: what follows it is something else.
        unsafe {
            let kernels = &raw mut (*self.context.cast::<libc::ucontext_t>()).uc_sigmask;
            let kernels = kernels.cast::<u64>();
            let before = kernels.read();
            kernels.write(before | Mask::all_that_may_be_defer().0);
            Ok(Mask(before))
        }
    }

    /// Whether the fault was a touch of program memory. If so, the handler must return: the touch reports the failure
    /// ([`memory::recover`]).
    pub fn is_recovered(&self) -> bool {
        // SAFETY: `info` and `context` are the kernel's, and the handler has SA_SIGINFO.
        unsafe {
            let is_of_kernel = (*self.info).si_code > 0;
            is_of_kernel && memory::recover(self.context)
        }
    }

    /// Repeats the signal for the default action; the handler must have been removed and return at once.
    pub fn leave_to_default(&self) {
        // If no further signal can be queued, the instruction faults again.
        let _ = self.send_again();
    }

    /// Whether the kernel restarts a system call that this handler interrupts.
    pub fn restarts(&self) -> bool {
        restarts(self.signal)
    }

    /// Sends the signal to the thread again, with its `siginfo_t`.
    fn send_again(&self) -> Result<(), Errno> {
        let number = |number: i32| number as usize;
        let info = self.info.expose_provenance();
        // SAFETY: a thread may send itself any signal it has received.
        unsafe {
            let (process, thread) = (number(libc::getpid()), number(libc::gettid()));
            let arguments = [process, thread, number(self.signal), info, 0, 0];
            raw::syscall(libc::SYS_rt_tgsigqueueinfo, arguments)?;
        }
        Ok(())
    }
}

/// Restores the mask: handlers interrupt the calling thread as before; deferred ones run now.
pub fn let_through(mask: Mask) {
    change_mask(libc::SIG_SETMASK, Some(mask));
}

/// The calling thread's signal mask.
fn blocked() -> Mask {
    change_mask(libc::SIG_BLOCK, None)
}

/// Changes the calling thread's signal mask and returns the former one.
fn change_mask(how: i32, set: Option<Mask>) -> Mask {
    let mut before = 0_u64;
    let set = set.as_ref().map_or(null(), |Mask(set)| &raw const *set);
    let (set, old) = (
        set.expose_provenance(),
        (&raw mut before).expose_provenance(),
    );
    // SAFETY: both are null or kernel sets of the given size. The call cannot fail.
    let _ = unsafe {
        let arguments = [how as usize, set, old, size_of::<u64>(), 0, 0];
        raw::syscall(libc::SYS_rt_sigprocmask, arguments)
    };
    Mask(before)
}

/// Whether all handlers of signals that may interrupt the calling thread were installed with `SA_RESTART`. `before` is
/// the mask it had itself, if [`SignalInfo::defer`] has blocked more.
pub fn handlers_restart(before: Option<Mask>) -> bool {
    let blocked = before.unwrap_or_else(blocked);
    (1..=LAST)
        .filter(|&signal| !FAULTS.contains(&signal) && !blocked.has(signal))
        .all(restarts)
}

/// Also true for a signal without a handler.
fn restarts(signal: i32) -> bool {
    // SAFETY: zeros are a valid `sigaction`, which is only written; a null action changes nothing. For
    // libc's own signals the call fails and leaves the zeros, which mean "no handler".
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, null(), &mut action);
        action
    };
    matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
        || action.sa_flags & libc::SA_RESTART != 0
}

/// Bytes of `signalfd_siginfo`; its first word is the signal's number.
const INFO: usize = 128;

/// A set of signals that the calling thread, and threads it starts, receive only through this.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    pub fn watch(signals: &[Signal]) -> Result<Signals, Errno> {
        // SAFETY: zeros are the empty set.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        for signal in signals {
            // SAFETY: `set` is initialised, and the signal number is valid.
            unsafe { libc::sigaddset(&mut set, signal.as_raw()) };
        }
        // SAFETY: `set` is initialised; the old mask is not requested.
        if unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, null_mut()) } != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: `set` is initialised; -1 requests a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the descriptor is new and unowned.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals { fd })
    }

    /// Returns the next pending signal, if any.
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

    /// Installs a handler that does nothing, with these flags.
    fn handle(signal: i32, flags: i32) {
        extern "C" fn nothing(_signal: i32) {}
        // SAFETY: zeros are a valid `sigaction`; the handler does nothing.
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
