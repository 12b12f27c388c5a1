//! Which threads are inside the library, where they may hold locks. A signal handler that ends the
//! program there must not wait for them; and while one thread forks no other is inside, since the
//! child would find its locks held, and what they guard half done, for ever.
//!
//! Under the preload library an allocator may come here while it starts: nothing is allocated.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_sys::clock;
use portolan_sys::signals::{self, Mask};

/// How long a fork waits for threads that are inside. One may wait there for the server's answer.
const PATIENCE: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// How many threads are inside, in parts that do not share a cache line. A thread counts in one of
/// them, which it may share.
static COUNTS: [Count; 128] = [const { Count(AtomicU32::new(0)) }; 128];

#[repr(align(64))]
struct Count(AtomicU32);

static NEXT_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Held by the thread that forks.
static FORK: Mutex<()> = Mutex::new(());
static IS_FORKING: AtomicBool = AtomicBool::new(false);

/// The program forks in signal handlers: it keeps signals from itself but while it sleeps, and relies upon it that
/// nothing but a system call is interrupted. From then on none is let through while a thread is inside.
static FORKS_IN_HANDLERS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The thread sleeps in the library.
    static IS_ASLEEP: Cell<bool> = const { Cell::new(false) };
    /// What the program had blocked before signals were held back.
    static HELD_BACK: Cell<Option<Mask>> = const { Cell::new(None) };
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Where the thread counts.
    static COUNT: Cell<Option<&'static Count>> = const { Cell::new(None) };
    /// The thread is at `FORK`: waiting for a lock, and waking who waits, are calls that come here.
    static IS_AT_FORK: Cell<bool> = const { Cell::new(false) };
    static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

fn count() -> &'static Count {
    COUNT.get().unwrap_or_else(|| {
        let number = NEXT_COUNT.fetch_add(1, Ordering::Relaxed) % COUNTS.len();
        let count = &COUNTS[number];
        COUNT.set(Some(count));
        count
    })
}

/// Waits while another thread forks. Either sees the other first.
fn come_in() {
    if FORKS_IN_HANDLERS.load(Ordering::Relaxed) {
        HELD_BACK.set(Some(signals::hold_back()));
    }
    let count = count();
    IS_INSIDE.set(true);
    count.0.fetch_add(1, Ordering::SeqCst);
    while IS_FORKING.load(Ordering::SeqCst) {
        count.0.fetch_sub(1, Ordering::Release);
        IS_AT_FORK.set(true);
        drop(FORK.lock());
        IS_AT_FORK.set(false);
        count.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn go_out() {
    IS_INSIDE.set(false);
    count().0.fetch_sub(1, Ordering::Release);
    if let Some(mask) = HELD_BACK.take() {
        signals::let_through(mask);
    }
}

/// What the program has blocked, if more is blocked while the thread is inside.
pub(crate) fn held_back() -> Option<Mask> {
    HELD_BACK.get()
}

fn go(to: Whereabouts) {
    match (IS_AT_FORK.get(), to, IS_INSIDE.get()) {
        (false, Whereabouts::Inside, false) => come_in(),
        (false, Whereabouts::Outside, true) => go_out(),
        _ => {}
    }
}

#[derive(Clone, Copy)]
enum Whereabouts {
    Inside,
    Outside,
}

/// The thread has come in, or gone out for a while, until this is dropped.
#[must_use]
pub struct Passage {
    before: Whereabouts,
}

impl Passage {
    fn to(to: Whereabouts) -> Passage {
        let before = match IS_INSIDE.get() {
            true => Whereabouts::Inside,
            false => Whereabouts::Outside,
        };
        go(to);
        Passage { before }
    }
}

/// The thread comes into the library.
pub fn enter() -> Passage {
    Passage::to(Whereabouts::Inside)
}

/// The thread sleeps, without a lock.
pub(crate) fn leave() -> Nap {
    IS_ASLEEP.set(true);
    Nap {
        _passage: Passage::to(Whereabouts::Outside),
    }
}

/// The thread sleeps until this is dropped.
#[must_use]
pub(crate) struct Nap {
    _passage: Passage,
}

impl Drop for Nap {
    fn drop(&mut self) {
        IS_ASLEEP.set(false);
    }
}

/// The calling thread is about to fork. If it is in the library it does so in a signal handler.
pub(crate) fn note_fork() {
    if IS_ASLEEP.get() || is_inside() {
        FORKS_IN_HANDLERS.store(true, Ordering::Relaxed);
    }
}

pub fn is_inside() -> bool {
    IS_INSIDE.get()
}

impl Drop for Passage {
    fn drop(&mut self) {
        go(self.before);
    }
}

/// Before a fork: waits until all other threads are outside, and keeps them there. Not for a signal
/// handler that has interrupted the library.
pub(crate) fn hold_others() {
    if is_inside() {
        return;
    }
    IS_AT_FORK.set(true);
    let held = FORK.lock().unwrap_or_else(PoisonError::into_inner);
    IS_FORKING.store(true, Ordering::SeqCst);
    let until = clock::now() + PATIENCE;
    for count in &COUNTS {
        while count.0.load(Ordering::SeqCst) != 0 && clock::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
    }
    HELD.replace(Some(held));
    IS_AT_FORK.set(false);
}

/// After the fork, in the parent.
pub(crate) fn let_others_go() {
    IS_AT_FORK.set(true);
    if let Some(held) = HELD.take() {
        IS_FORKING.store(false, Ordering::SeqCst);
        drop(held);
    }
    IS_AT_FORK.set(false);
}

/// After the fork, in the child: there are no others.
pub(crate) fn forget_others() {
    // Children start anew.
    FORKS_IN_HANDLERS.store(false, Ordering::Relaxed);
    IS_ASLEEP.set(false);
    for count in &COUNTS {
        count.0.store(0, Ordering::Relaxed);
    }
    if is_inside() {
        count().0.store(1, Ordering::Relaxed);
    }
    let_others_go();
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    #[test]
    fn a_fork_waits_for_those_inside_and_keeps_others_out() {
        let (told, inside) = mpsc::channel();
        let (go_out, may_go_out) = mpsc::channel::<()>();
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |order: &Arc<Mutex<Vec<&str>>>, what| order.lock().unwrap().push(what);
        let (of_first, of_second) = (Arc::clone(&order), Arc::clone(&order));
        let first = thread::spawn(move || {
            let passage = enter();
            told.send(()).unwrap();
            may_go_out.recv().unwrap();
            note(&of_first, "first out");
            drop(passage);
        });
        inside.recv().unwrap();
        let forker = thread::spawn(move || {
            hold_others();
            let second = thread::spawn({
                let order = Arc::clone(&of_second);
                move || {
                    let _passage = enter();
                    note(&order, "second in");
                }
            });
            note(&of_second, "forked");
            // Long enough for a thread that nothing keeps out.
            thread::sleep(Duration::from_millis(50));
            note(&of_second, "done");
            let_others_go();
            second.join().unwrap();
        });
        thread::sleep(Duration::from_millis(20));
        go_out.send(()).unwrap();
        first.join().unwrap();
        forker.join().unwrap();
        let order = order.lock().unwrap();
        assert_eq!(*order, ["first out", "forked", "done", "second in"]);
    }

    #[test]
    fn who_sleeps_inside_is_outside_for_a_while() {
        let _inside = enter();
        let again = enter();
        let outside = leave();
        assert!(!is_inside());
        drop(outside);
        assert!(is_inside());
        drop(again);
        assert!(is_inside());
    }
}
