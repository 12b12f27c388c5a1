//! Signals as something to wait for: blocked from interrupting, read from a descriptor, or put off by their handlers.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use rustix::io::{Errno, read};
use rustix::process::Signal;

use crate::{memory, raw};

/// The kernel's signals are 1 to 64; libc keeps 32 and 33.
pub const LAST: i32 = 64;

/// Signals that the calling thread's own faults raise: no handler of theirs interrupts a wait.
const FAULTS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

/// Those of them that say that there is no memory, or none that may be used so.
const OF_MEMORY: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// Other signals about what a thread does at that very moment: what seccomp(2) traps, abort(3) and the profiling timer.
const OF_THE_MOMENT: [i32; 3] = [libc::SIGSYS, libc::SIGABRT, libc::SIGPROF];

/// libc's own, by which it cancels threads and changes the user of all of them.
const OF_LIBC: [i32; 2] = [32, 33];

/// May a handler of this signal wait until it suits the thread?
pub fn may_be_defer(signal: i32) -> bool {
    let cannot_wait = [&FAULTS[..], &OF_THE_MOMENT, &OF_LIBC];
    (1..=LAST).contains(&signal) && !cannot_wait.iter().any(|those| those.contains(&signal))
}

/// Is it the signal of a bad pointer?
pub fn is_of_memory(signal: i32) -> bool {
    OF_MEMORY.contains(&signal)
}

/// Signals that a thread has blocked, as the kernel has sets: signal 1 is the lowest bit.
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

/// What the handler of a signal is called with.
pub struct SignalInfo {
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
}

impl SignalInfo {
    /// # Safety
    /// The arguments of the handler that calls this, which was installed with `SA_SIGINFO` and has not returned while
    /// this lives.
    pub unsafe fn new(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) -> SignalInfo {
        SignalInfo {
            signal,
            info,
            context,
        }
    }

    /// The signal comes once more when the calling thread lets it, and until then, once the handler has returned, nothing
    /// interrupts the thread but what may not be put off. Answers what it had blocked before.
    ///
    /// # Errors
    /// `EAGAIN`: there is no room for one more real-time signal; nothing was done.
    pub fn defer(&self) -> Result<Mask, Errno> {
        self.send_again()?;
        // SAFETY: the mask in the context is what the kernel takes up when the handler returns. Of libc's set it is only
        // as long as the kernel's: what follows is something else.
        unsafe {
            let kernels = &raw mut (*self.context.cast::<libc::ucontext_t>()).uc_sigmask;
            let kernels = kernels.cast::<u64>();
            let before = kernels.read();
            kernels.write(before | Mask::all_that_may_be_defer().0);
            Ok(Mask(before))
        }
    }

    /// Has a touch of a program's memory faulted? Then the handler is to return: the touch answers that
    /// ([`memory::recover`]).
    pub fn is_recovered(&self) -> bool {
        // SAFETY: `info` and `context` are the kernel's, and the handler has SA_SIGINFO.
        unsafe {
            let is_of_kernel = (*self.info).si_code > 0;
            is_of_kernel && memory::recover(self.context)
        }
    }

    /// Does what the kernel would have done without the handler, which has been taken away and is to return at once.
    pub fn leave_to_default(&self) {
        // Where there is no room for one more signal, the instruction faults again.
        let _ = self.send_again();
    }

    /// Does the kernel begin a call again that its handler interrupts?
    pub fn restarts(&self) -> bool {
        restarts(self.signal)
    }

    /// With all that is known of it.
    fn send_again(&self) -> Result<(), Errno> {
        let number = |number: i32| number as usize;
        let info = self.info.expose_provenance();
        // SAFETY: a thread may send itself whatever it has got.
        unsafe {
            let (process, thread) = (number(libc::getpid()), number(libc::gettid()));
            let arguments = [process, thread, number(self.signal), info, 0, 0];
            raw::syscall(libc::SYS_rt_tgsigqueueinfo, arguments)?;
        }
        Ok(())
    }
}

/// Handlers interrupt the calling thread as before; those that were put off run now.
pub fn let_through(mask: Mask) {
    change_mask(libc::SIG_SETMASK, Some(mask));
}

/// What the calling thread has blocked.
fn blocked() -> Mask {
    change_mask(libc::SIG_BLOCK, None)
}

/// Answers what the calling thread had blocked before.
fn change_mask(how: i32, set: Option<Mask>) -> Mask {
    let mut before = 0_u64;
    let set = set.as_ref().map_or(null(), |Mask(set)| &raw const *set);
    let (set, old) = (
        set.expose_provenance(),
        (&raw mut before).expose_provenance(),
    );
    // SAFETY: both are null or the kernel's sets, as long as it is told. It refuses nothing.
    let _ = unsafe {
        let arguments = [how as usize, set, old, size_of::<u64>(), 0, 0];
        raw::syscall(libc::SYS_rt_sigprocmask, arguments)
    };
    Mask(before)
}

/// Were all handlers of signals that may interrupt the calling thread installed with `SA_RESTART`? `before` is what
/// it has blocked itself, if [`SignalInfo::put_off`] blocks more.
pub fn handlers_restart(before: Option<Mask>) -> bool {
    let blocked = before.unwrap_or_else(blocked);
    (1..=LAST)
        .filter(|&signal| !FAULTS.contains(&signal) && !blocked.has(signal))
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

/// Bytes of `signalfd_siginfo`; its first word is the signal's number.
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
