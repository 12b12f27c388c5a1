//! Handlers for fork and exit of the process.

use std::sync::OnceLock;

/// Functions for [`at_fork`].
#[derive(Clone, Copy, Debug)]
pub struct ForkHandlers {
    /// In the forking thread, before the fork.
    pub before: fn(),
    pub in_parent: fn(),
    pub in_child: fn(),
}

static FORK: OnceLock<ForkHandlers> = OnceLock::new();
static EXIT: OnceLock<fn()> = OnceLock::new();

/// Makes libc's `fork` call the handlers. Only the first call has an effect.
pub fn at_fork(handlers: ForkHandlers) {
    if FORK.set(handlers).is_ok() {
        // SAFETY: the handlers are functions of the program, or of a library that is never unloaded.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    }
}

/// Makes libc call the handler when the program ends by `exit` or returns from `main`. Only the first call has an
/// effect.
pub fn at_exit(handler: fn()) {
    if EXIT.set(handler).is_ok() {
        // SAFETY: as in `at_fork`.
        unsafe { libc::atexit(exit) };
    }
}

fn call(choose: impl Fn(&ForkHandlers) -> fn()) {
    if let Some(handlers) = FORK.get() {
        choose(handlers)();
    }
}

unsafe extern "C" fn before() {
    call(|handlers| handlers.before);
}

unsafe extern "C" fn in_parent() {
    call(|handlers| handlers.in_parent);
}

unsafe extern "C" fn in_child() {
    call(|handlers| handlers.in_child);
}

extern "C" fn exit() {
    if let Some(handler) = EXIT.get() {
        handler();
    }
}
