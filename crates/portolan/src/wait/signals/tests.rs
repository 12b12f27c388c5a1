//! No signal is lost, and none is left over, in all interleavings (loom; a thread that nobody wakes is a deadlock).

use loom::sync::atomic::{self, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

impl SignalWord for atomic::AtomicU32 {
    fn new() -> Self {
        Self::new(0)
    }

    fn load(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }

    fn store(&self, value: u32) {
        self.store(value, Ordering::Relaxed);
    }

    fn swap(&self, value: u32) -> u32 {
        self.swap(value, Ordering::Relaxed)
    }
}

struct World {
    signals: Signals<atomic::AtomicU32>,
    /// What has come. Of `Core` no more is needed here.
    core: Mutex<u32>,
    /// The eventfd's count, and what sleepers on it and on the word wait for.
    eventfd: Mutex<u32>,
    kernel: Condvar,
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            signals: Signals::new(),
            core: Mutex::new(0),
            eventfd: Mutex::new(0),
            kernel: Condvar::new(),
        })
    }

    /// As `Process::wait`.
    fn wait_for(&self, wanted: u32, on: Asleep) {
        let mut core = self.core.lock().unwrap();
        while *core < wanted {
            self.signals.fall_asleep(on);
            drop(core);
            self.sleep(on);
            core = self.core.lock().unwrap();
            if self.signals.wake() {
                *self.eventfd.lock().unwrap() = 0;
            }
        }
    }

    /// The kernel's part: it looks and sleeps in one step.
    fn sleep(&self, on: Asleep) {
        let mut eventfd = self.eventfd.lock().unwrap();
        let is_woken = |count: u32| match on {
            Asleep::Polling => count > 0,
            Asleep::OnWord => SignalWord::load(self.signals.word()) != 0,
        };
        while !is_woken(*eventfd) {
            eventfd = self.kernel.wait(eventfd).unwrap();
        }
    }

    /// As whoever makes something ready.
    fn arrive(&self) {
        let mut core = self.core.lock().unwrap();
        *core += 1;
        let Some(asleep) = self.signals.signal() else {
            return;
        };
        let mut eventfd = self.eventfd.lock().unwrap();
        if asleep == Asleep::Polling {
            *eventfd += 1;
        }
        self.kernel.notify_all();
    }
}

fn check(first: Asleep, then: Asleep) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound.get_or_insert(2);
    model.check(move || {
        let world = World::new();
        let arrivals: Vec<_> = (0..2)
            .map(|_| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.arrive())
            })
            .collect();
        world.wait_for(1, first);
        world.wait_for(2, then);
        for arrival in arrivals {
            arrival.join().unwrap();
        }
        assert_eq!(
            *world.eventfd.lock().unwrap(),
            0,
            "the next sleep would end for nothing"
        );
        assert!(!world.signals.is_signalled());
    });
}

#[test]
fn no_signal_is_lost_or_left_over() {
    use Asleep::{OnWord, Polling};
    for (first, then) in [
        (Polling, Polling),
        (OnWord, OnWord),
        (Polling, OnWord),
        (OnWord, Polling),
    ] {
        check(first, then);
    }
}
