//! Turns on a processor that the background thread shares with a thread of the program that computes.
//!
//! A thread that wakes runs at once, in place of one that computes, only while it has had no more of the processor than
//! that one (EEVDF: it is eligible); else it waits for the next tick of the kernel, which is up to 4 ms away, or 10. So after each
//! turn it stays asleep for as long as the turn was, whatever comes: what is late by that is not late by a tick.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use portolan_sys::{clock, thread};

/// A longer turn counts as this long: the rest is paid to the tick.
const LONGEST: Duration = Duration::from_micros(200);

/// Sleeping and waking cost, too, and more than the thread's clock tells before it sleeps.
const OVERHEAD: Duration = Duration::from_micros(10);

#[derive(Default)]
pub(super) struct Turns {
    /// Where a thread of the program was when it last came back from a wait.
    program: AtomicI32,
    /// What the background thread had used of processors when its last turn ended, in nanoseconds. Nobody else writes it.
    used: AtomicU64,
}

impl Turns {
    /// The calling thread goes back to the program.
    pub(super) fn leave_to_program(&self) {
        // Written only if it is another: all threads that wait read what lies beside it.
        let here = thread::processor();
        if self.program.load(Ordering::Relaxed) != here {
            self.program.store(here, Ordering::Relaxed);
        }
    }

    /// The background thread has done what there was to do, or is to wait for the program with it.
    pub(super) fn end(&self) {
        let used = clock::of_thread();
        let before = self.used.swap(used.as_nanos() as u64, Ordering::Relaxed);
        if self.program.load(Ordering::Relaxed) == thread::processor() {
            let turn = used.saturating_sub(Duration::from_nanos(before)) + OVERHEAD;
            std::thread::sleep(turn.min(LONGEST));
        }
    }
}
