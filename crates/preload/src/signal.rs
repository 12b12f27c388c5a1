//! Signal handlers. A handler that interrupts the library could call it and wait for a lock of the interrupted call. So
//! the kernel calls [`arrived`] for all handlers, which defers those that can be deferred (ADR 24). For memory faults
//! it is called even if the program has no handler: the fault may be the library's, which touches the memory of a call
//! before it uses it (ADR 25). Queries of the program return its handlers as it has installed them.

use std::mem;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use libc::{c_int, c_void, sighandler_t, siginfo_t};
use portolan::posix::{self, SignalInfo};

use crate::interpose::{CallError, Outcome};

/// Argument of `sigset` that blocks a signal; not a handler. Not in `libc`.
const SIG_HOLD: sighandler_t = 2;

type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);

/// A handler installed by the program.
struct Disposition {
    function: AtomicUsize,
    /// The flags in [`OURS`], as the program has set them.
    flags: AtomicI32,
}

/// Flags that are passed to the kernel differently from the program's values.
const OURS: c_int = libc::SA_SIGINFO | libc::SA_RESETHAND;

/// Indexed by number; numbers begin with 1.
const SIGNALS: usize = posix::LAST_SIGNAL as usize + 1;

static DISPOSITIONS: [Disposition; SIGNALS] = [const {
    Disposition {
        function: AtomicUsize::new(libc::SIG_DFL),
        flags: AtomicI32::new(0),
    }
}; SIGNALS];

/// The function that the kernel calls in place of the program's handlers. Handlers with one
/// argument ignore the others.
unsafe extern "C-unwind" fn arrived(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: these are the kernel's arguments, by `replaced`.
    let arrival = unsafe { SignalInfo::new(signal, info, context) };
    // Uses no thread-local memory for memory faults: any code of the program may have faulted.
    let is_for_us = if posix::is_of_memory(signal) {
        arrival.is_recovered()
    } else {
        posix::defer(&arrival)
    };
    if is_for_us {
        return;
    }
    let Some(disposition) = disposition(signal) else {
        return;
    };
    if disposition.function.load(Ordering::Acquire) == libc::SIG_DFL {
        // SAFETY: zeros are the default action. A signal that was changed to this function can be changed again.
        let _ = unsafe { kernels(signal, &mem::zeroed(), null_mut()) };
        arrival.leave_to_default();
        return;
    }
    if disposition.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0 {
        // SAFETY: zeros are the default action. A signal that was changed to this function can be changed again.
        let _ = unsafe { kernels(signal, &mem::zeroed(), null_mut()) };
    }
    let function = disposition.function.load(Ordering::Acquire);
    // SAFETY: the program has declared it a handler, before the kernel was given this function.
    let handler: Handler = unsafe { mem::transmute(function) };
    // SAFETY: by its contract.
    unsafe { handler(signal, info, context) };
}

fn is_arrived(function: sighandler_t) -> bool {
    function == arrived as Handler as sighandler_t
}

fn disposition(signal: c_int) -> Option<&'static Disposition> {
    DISPOSITIONS.get(usize::try_from(signal).ok()?)
}

impl Disposition {
    fn note(&self, function: sighandler_t, flags: c_int) {
        self.function.store(function, Ordering::Release);
        self.flags.store(flags & OURS, Ordering::Relaxed);
    }

    fn noted(&self) -> (sighandler_t, c_int) {
        let function = self.function.load(Ordering::Acquire);
        (function, self.flags.load(Ordering::Relaxed))
    }
}

/// Does the kernel call [`arrived`] in its place? True for handlers that may have to be deferred,
/// and for every action on memory faults except to ignore them.
fn is_replaced(signal: c_int, function: sighandler_t) -> bool {
    match function {
        libc::SIG_IGN | libc::SIG_ERR | SIG_HOLD => false,
        libc::SIG_DFL => posix::is_of_memory(signal),
        function => {
            let is_ours = posix::may_be_defer(signal) || posix::is_of_memory(signal);
            is_ours && !is_arrived(function)
        }
    }
}

/// Replaces the actions on memory faults, before the program's own code runs.
pub(crate) fn watch_memory() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: zeros are an action, which is only written to. The existing one may be replaced.
        let _ = unsafe {
            let mut there: libc::sigaction = mem::zeroed();
            kernels(signal, null(), &mut there).and_then(|_| change(signal, &there, null_mut()))
        };
    }
}

interpose! {
    /// `int sigaction(int, const struct sigaction *, struct sigaction *)`
    fn sigaction(signal: c_int, wanted: *const libc::sigaction, before: *mut libc::sigaction) -> c_int {
        change(signal, wanted, before)
    }

    /// `int __sigaction(int, const struct sigaction *, struct sigaction *)`
    fn __sigaction(signal: c_int, wanted: *const libc::sigaction, before: *mut libc::sigaction) -> c_int {
        change(signal, wanted, before)
    }

    /// `sighandler_t signal(int, sighandler_t)`
    fn signal(number: c_int, wanted: sighandler_t) -> sighandler_t {
        install(number, wanted, next!(signal: fn(c_int, sighandler_t) -> sighandler_t))
    }

    /// `sighandler_t bsd_signal(int, sighandler_t)`
    fn bsd_signal(number: c_int, wanted: sighandler_t) -> sighandler_t {
        install(number, wanted, next!(bsd_signal: fn(c_int, sighandler_t) -> sighandler_t))
    }

    /// `sighandler_t ssignal(int, sighandler_t)`
    fn ssignal(number: c_int, wanted: sighandler_t) -> sighandler_t {
        install(number, wanted, next!(ssignal: fn(c_int, sighandler_t) -> sighandler_t))
    }

    /// `sighandler_t sysv_signal(int, sighandler_t)`
    fn sysv_signal(number: c_int, wanted: sighandler_t) -> sighandler_t {
        install(number, wanted, next!(sysv_signal: fn(c_int, sighandler_t) -> sighandler_t))
    }

    /// `sighandler_t __sysv_signal(int, sighandler_t)`
    fn __sysv_signal(number: c_int, wanted: sighandler_t) -> sighandler_t {
        install(number, wanted, next!(__sysv_signal: fn(c_int, sighandler_t) -> sighandler_t))
    }

    /// `sighandler_t sigset(int, sighandler_t)`
    fn sigset(number: c_int, wanted: sighandler_t) -> sighandler_t {
        install(number, wanted, next!(sigset: fn(c_int, sighandler_t) -> sighandler_t))
    }
}

/// # Safety
/// The contract of `sigaction`.
unsafe fn change(
    signal: c_int,
    wanted: *const libc::sigaction,
    before: *mut libc::sigaction,
) -> Outcome<c_int> {
    let Some(disposition) = disposition(signal) else {
        return Err(CallError::NotOurs);
    };
    let noted = disposition.noted();
    // SAFETY: the caller's promise.
    let result = unsafe {
        match wanted.as_ref() {
            Some(wanted) if is_replaced(signal, wanted.sa_sigaction) => {
                disposition.note(wanted.sa_sigaction, wanted.sa_flags);
                let result = kernels(signal, &replaced(wanted), before)?;
                if result != 0 {
                    disposition.note(noted.0, noted.1);
                }
                result
            }
            _ => kernels(signal, wanted, before)?,
        }
    };
    // SAFETY: the caller's promise.
    if let (0, Some(before)) = (result, unsafe { before.as_mut() })
        && is_arrived(before.sa_sigaction)
    {
        before.sa_sigaction = noted.0;
        before.sa_flags = before.sa_flags & !OURS | noted.1;
    }
    Ok(result)
}

/// The older calls: libc knows the flags and mask of each, and the handler is replaced in the action that libc has set.
///
/// # Safety
/// The contract of `signal`; `by` is libc's definition of it, or of a related call.
unsafe fn install(
    signal: c_int,
    wanted: sighandler_t,
    by: unsafe extern "C-unwind" fn(c_int, sighandler_t) -> sighandler_t,
) -> Outcome<sighandler_t> {
    let noted = disposition(signal).map(Disposition::noted);
    // SAFETY: the caller's promise; zeros are an action, which is only written to.
    let before = unsafe {
        let before = by(signal, wanted);
        let mut made: libc::sigaction = mem::zeroed();
        if before != libc::SIG_ERR
            && is_replaced(signal, wanted)
            && kernels(signal, null(), &mut made)? == 0
            && made.sa_sigaction == wanted
        {
            change(signal, &made, null_mut())?;
        }
        before
    };
    Ok(match noted {
        Some((function, _)) if is_arrived(before) => function,
        _ => before,
    })
}

/// Returns the action that is passed to the kernel.
fn replaced(wanted: &libc::sigaction) -> libc::sigaction {
    let mut replaced = *wanted;
    replaced.sa_sigaction = arrived as Handler as sighandler_t;
    // A deferred signal arrives twice.
    replaced.sa_flags = replaced.sa_flags & !libc::SA_RESETHAND | libc::SA_SIGINFO;
    replaced
}

/// Calls libc's `sigaction`, which sets `errno`.
///
/// # Safety
/// The contract of `sigaction`.
unsafe fn kernels(
    signal: c_int,
    wanted: *const libc::sigaction,
    before: *mut libc::sigaction,
) -> Outcome<c_int> {
    // SAFETY: libc's definition is a function of this type; the caller's promise.
    unsafe {
        let next =
            next!(sigaction: fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int);
        Ok(next(signal, wanted, before))
    }
}
