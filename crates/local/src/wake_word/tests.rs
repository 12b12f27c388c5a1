//! No wake-up is lost, in all interleavings and memory orders (loom: a lost wake-up is a deadlock).

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use portolan_proto::local::wants::{INPUT, ON_WORD, OUTPUT};

use super::*;

impl WakeWord for AtomicU32 {
    fn load(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }

    fn store(&self, wants: u32) {
        self.store(wants, Ordering::Relaxed);
    }

    fn fetch_and(&self, mask: u32) -> u32 {
        self.fetch_and(mask, Ordering::AcqRel)
    }

    fn fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// A sleeping end, and the data that its peer publishes.
struct Session {
    word: AtomicU32,
    sent: AtomicU32,
    taken: AtomicU32,
    /// Set by a notification until it is consumed. The kernel's side of a futex word uses the same lock.
    rung: Mutex<bool>,
    kernel: Condvar,
}

impl Session {
    fn new() -> Arc<Session> {
        Arc::new(Session {
            word: AtomicU32::new(0),
            sent: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            rung: Mutex::new(false),
            kernel: Condvar::new(),
        })
    }

    /// Sleeps by the notifier until both published words have reached `end`.
    fn await_by_notifier(&self, wants: u32, end: (u32, u32)) {
        while !self.has_come(end) {
            ask(&self.word, wants);
            if self.has_come(end) {
                return;
            }
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.kernel.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    /// As [`Session::await_by_notifier`], by the word itself: the kernel compares it and sleeps in one step.
    fn await_by_word(&self, wants: u32, end: (u32, u32)) {
        let wants = wants | ON_WORD;
        while !self.has_come(end) {
            ask(&self.word, wants);
            if self.has_come(end) {
                return;
            }
            let rung = self.rung.lock().unwrap();
            if WakeWord::load(&self.word) == wants {
                drop(self.kernel.wait(rung).unwrap());
            }
        }
    }

    fn has_come(&self, (sent, taken): (u32, u32)) -> bool {
        self.sent.load(Ordering::Acquire) >= sent && self.taken.load(Ordering::Acquire) >= taken
    }

    fn publish(&self, what: &AtomicU32, due: u32) {
        what.fetch_add(1, Ordering::Release);
        let Some(wants) = take(&self.word, due) else {
            return;
        };
        let mut rung = self.rung.lock().unwrap();
        *rung |= wants & ON_WORD == 0;
        self.kernel.notify_one();
    }
}

fn sleeps_until_all_has_come(sleep: fn(&Session, u32, (u32, u32))) {
    let mut model = loom::model::Builder::new();
    // LOOM_MAX_PREEMPTIONS sets more, up to all: `make fuzz TARGET=interleavings`.
    model.preemption_bound.get_or_insert(3);
    model.check(move || {
        let session = Session::new();
        let peer = Arc::clone(&session);
        let peer = thread::spawn(move || {
            peer.publish(&peer.sent, INPUT);
            peer.publish(&peer.taken, OUTPUT);
        });
        sleep(&session, INPUT, (1, 0));
        // A writer that found no room adds a request for it while it continues to sleep.
        sleep(&session, INPUT | OUTPUT, (1, 1));
        peer.join().unwrap();
    });
}

#[test]
fn no_notifier_is_missed() {
    sleeps_until_all_has_come(Session::await_by_notifier);
}

#[test]
fn no_word_is_missed() {
    sleeps_until_all_has_come(Session::await_by_word);
}
