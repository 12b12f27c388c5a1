//! Whether the calling thread is inside the library, where it may hold locks: a signal handler that
//! ends the program there must not wait for them.

use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The thread has come in, or gone out for a while, until this is dropped.
#[must_use]
pub struct Passage {
    before: bool,
}

/// The thread comes into the library.
pub fn enter() -> Passage {
    Passage {
        before: INSIDE.replace(true),
    }
}

/// The thread sleeps, without a lock.
pub(crate) fn leave() -> Passage {
    Passage {
        before: INSIDE.replace(false),
    }
}

/// Is the thread in the library?
pub fn is_inside() -> bool {
    INSIDE.get()
}

impl Drop for Passage {
    fn drop(&mut self) {
        INSIDE.set(self.before);
    }
}
