//! Calls that concern the process as a whole: its start, its forks and its end.

use std::ffi::{c_char, c_void};
use std::mem;

use libc::{FILE, c_int, c_ulong, pid_t, pthread_t};
use portolan::posix;
use rustix::io::Errno;

use crate::interpose::CallError;
use crate::table::{self, Symbol};
use crate::{environment, memory, signal};

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs when the library is loaded, before the program's own code.
extern "C" fn start() {
    table::look_all_up();
    signal::watch_memory();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe {
        libc::pthread_atfork(
            Some(before_fork),
            Some(after_fork_in_parent),
            Some(after_fork_in_child),
        );
    }
    environment::note();
    posix::read_settings();
    posix::attach_inherited();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static STOP: extern "C" fn() = stop;

/// Runs when the program calls `exit` or returns from `main`, after its own handlers.
extern "C" fn stop() {
    posix::before_exit();
}

unsafe extern "C" fn before_fork() {
    posix::before_fork();
    posix::freeze();
}

unsafe extern "C" fn after_fork_in_parent() {
    posix::after_fork_in_parent();
}

unsafe extern "C" fn after_fork_in_child() {
    posix::after_fork_in_child();
}

/// `void _exit(int)`
///
/// # Safety
/// The contract of the C function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _exit(status: c_int) -> ! {
    // SAFETY: the caller's promise.
    unsafe { end(Symbol::_exit, status) }
}

/// `void _Exit(int)`
///
/// # Safety
/// The contract of the C function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's promise.
    unsafe { end(Symbol::_Exit, status) }
}

unsafe fn end(symbol: Symbol, status: c_int) -> ! {
    posix::before_exit();
    let next = table::next(symbol);
    if next.is_null() {
        // SAFETY: abort has no precondition.
        unsafe { libc::abort() }
    }
    // SAFETY: libc's definition is a function of this type.
    let exit: unsafe extern "C" fn(c_int) -> ! = unsafe { mem::transmute(next) };
    // SAFETY: the caller's promise.
    unsafe { exit(status) }
}

interpose! {
    /// `int posix_spawn(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
    /// char *const [], char *const [])`
    ///
    /// This library does not run in the child: the next program requests its inherited sockets itself.
    fn posix_spawn(
        pid: *mut pid_t,
        path: *const c_char,
        actions: *const c_void,
        attributes: *const c_void,
        arguments: *const *mut c_char,
        environment: *const *mut c_char,
    ) -> c_int {
        posix::before_fork();
        Err(CallError::NotOurs)
    }

    /// `int posix_spawnp(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
    /// char *const [], char *const [])`
    fn posix_spawnp(
        pid: *mut pid_t,
        file: *const c_char,
        actions: *const c_void,
        attributes: *const c_void,
        arguments: *const *mut c_char,
        environment: *const *mut c_char,
    ) -> c_int {
        posix::before_fork();
        Err(CallError::NotOurs)
    }

    /// `int system(const char *)`
    fn system(command: *const c_char) -> c_int {
        posix::before_fork();
        Err(CallError::NotOurs)
    }

    /// `FILE *popen(const char *, const char *)`
    fn popen(command: *const c_char, kind: *const c_char) -> *mut FILE {
        posix::before_fork();
        Err(CallError::NotOurs)
    }

    /// `int pthread_cancel(pthread_t)`
    ///
    /// libc knows only of its own waits.
    fn pthread_cancel(thread: pthread_t) -> c_int {
        // Once cancelled, the thread may be joined at any moment.
        let number = number_of(thread);
        posix::expect_cancel();
        // It may be the calling thread.
        posix::hold();
        let cancel = next!(pthread_cancel: fn(pthread_t) -> c_int);
        let result = cancel(thread);
        if let (0, Some(number)) = (result, number) {
            posix::cancelled(number);
        }
        Ok(result)
    }

    /// `pid_t _Fork(void)`: the fork that runs no handlers.
    fn _Fork() -> pid_t {
        posix::before_fork();
        let fork = next!(_Fork: fn() -> pid_t);
        let child = fork();
        if child == 0 {
            posix::after_fork_in_child();
        }
        Ok(child)
    }

    /// `int chroot(const char *)`
    fn chroot(path: *const c_char) -> c_int {
        posix::before_chroot();
        Err(CallError::NotOurs)
    }

    /// `int prctl(int, ...)`: four integers in place of the variable arguments.
    fn prctl(option: c_int, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong) -> c_int {
        if option == libc::PR_SET_SECCOMP {
            posix::before_confinement();
        }
        Err(CallError::NotOurs)
    }

    /// `int daemon(int, int)`
    ///
    /// libc's own ends the parent by an internal call, and with it the sessions that now belong to the child.
    fn daemon(stay: c_int, keep: c_int) -> c_int {
        match libc::fork() {
            -1 => return Err(memory::last_error().into()),
            0 => {}
            _ => end(Symbol::_exit, 0),
        }
        if libc::setsid() == -1 {
            return Err(memory::last_error().into());
        }
        if stay == 0 {
            // libc ignores the result, too.
            libc::chdir(c"/".as_ptr());
        }
        if keep == 0 {
            redirect_to_nowhere()?;
        }
        Ok(0)
    }
}

/// Redirects standard input, output and error to `/dev/null`.
unsafe fn redirect_to_nowhere() -> Result<(), Errno> {
    // SAFETY: the name is a C string; the descriptor is our own.
    unsafe {
        let nowhere = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if nowhere == -1 {
            return Err(memory::last_error());
        }
        for standard in 0..=2 {
            libc::dup2(nowhere, standard);
        }
        if nowhere > 2 {
            libc::close(nowhere);
        }
    }
    Ok(())
}

/// Returns the kernel's thread ID if the thread still runs. libc reveals it through the thread's clock.
///
/// # Safety
/// The thread was not joined.
unsafe fn number_of(thread: pthread_t) -> Option<pid_t> {
    let mut clock = 0;
    // SAFETY: the caller's promise; `clock` is live.
    match unsafe { libc::pthread_getcpuclockid(thread, &mut clock) } {
        0 => Some(!(clock >> 3)),
        _ => None,
    }
}
