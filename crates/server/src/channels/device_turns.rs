//! Makes deletions of devices wait for the making of others. The kernel does both under one lock (rtnl): it takes the
//! lock eight times, briefly, to make a tap, and holds it for tens of milliseconds to delete several.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum delay of a deletion.
const DELAY_MAX: Duration = Duration::from_millis(200);

/// One thread makes devices, another one deletes devices.
#[derive(Debug, Default)]
pub(crate) struct DeviceTurns {
    is_making: Mutex<bool>,
    was_made: Condvar,
}

impl DeviceTurns {
    /// Makes a device. No deletion begins meanwhile, unless making takes longer than [`DELAY_MAX`].
    pub(crate) fn make<T>(&self, make: impl FnOnce() -> T) -> T {
        *self.is_making() = true;
        let made = make();
        *self.is_making() = false;
        self.was_made.notify_all();
        made
    }

    /// Returns when a deletion may begin.
    pub(crate) fn await_deletion(&self) {
        let is_making = |making: &mut bool| *making;
        // Nobody panics while it holds the lock.
        let _ = self
            .was_made
            .wait_timeout_while(self.is_making(), DELAY_MAX, is_making);
    }

    fn is_making(&self) -> MutexGuard<'_, bool> {
        self.is_making
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_deletion_waits_for_what_is_being_made_but_not_for_ever() {
        let turns = DeviceTurns::default();
        let start = Instant::now();
        turns.await_deletion();
        assert!(start.elapsed() < DELAY_MAX);

        let (begun, has_begun) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let turns = &turns;
            let maker = scope.spawn(move || {
                turns.make(|| {
                    begun.send(()).unwrap();
                    // Ends with the sender.
                    let _ = ends.recv();
                });
            });
            has_begun.recv().unwrap();
            let start = Instant::now();
            turns.await_deletion();
            assert!(start.elapsed() >= DELAY_MAX);
            drop(end);
            maker.join().unwrap();
        });
        let start = Instant::now();
        turns.await_deletion();
        assert!(start.elapsed() < DELAY_MAX);
    }
}
