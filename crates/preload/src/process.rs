//! What concerns the process as a whole: its start, its forks and its end.

use portolan::posix;

use crate::table;

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs when the library is loaded, before the program's own code.
extern "C" fn start() {
    table::look_all_up();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe {
        libc::pthread_atfork(
            Some(before_fork),
            Some(after_fork_in_parent),
            Some(after_fork_in_child),
        )
    };
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
}

unsafe extern "C" fn after_fork_in_parent() {
    posix::after_fork_in_parent();
}

unsafe extern "C" fn after_fork_in_child() {
    posix::after_fork_in_child();
}
