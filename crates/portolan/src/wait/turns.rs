//! Turns on a processor that the background thread shares with a computing thread of the program.
//!
//! A waking thread runs at once, in place of a computing one, only while it has used no more of the processor than that
//! one (EEVDF: it is eligible); otherwise it waits for the kernel's next tick, up to 4 or 10 ms. So after each turn it
//! stays asleep for as long as the turn was, even if there is work: that delay avoids waiting for a tick. A mere look at
//! the state of the program is no turn: the timer would cost more than it does.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use portolan_sys::{clock, thread};

/// A longer turn counts as this long: the rest may cost a tick.
const LONGEST: Duration = Duration::from_micros(200);

/// Sleeping and waking cost more than the thread's clock shows before the sleep.
const OVERHEAD: Duration = Duration::from_micros(10);

#[derive(Default)]
pub(crate) struct Turns {
    /// The processor on which a thread of the program last returned from a wait.
    program: AtomicI32,
    /// CPU time of the background thread at the end of its last turn, in nanoseconds. Written only by that thread.
    used: AtomicU64,
}

impl Turns {
    /// Called when the calling thread returns to the program.
    pub(crate) fn leave_to_program(&self) {
        // Written only if it changes: all waiting threads read the neighbouring fields.
        let here = thread::processor();
        if self.program.load(Ordering::Relaxed) != here {
            self.program.store(here, Ordering::Relaxed);
        }
    }

    /// Called when the background thread has finished its work, or has to let the program continue first.
    pub(crate) fn end(&self) {
        let used = clock::of_thread();
        let before = self.used.swap(used.as_nanos() as u64, Ordering::Relaxed);
        if self.program.load(Ordering::Relaxed) == thread::processor() {
            let turn = used.saturating_sub(Duration::from_nanos(before)) + OVERHEAD;
            std::thread::sleep(turn.min(LONGEST));
        }
    }
}
