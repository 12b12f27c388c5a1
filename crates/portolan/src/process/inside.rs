//! Which threads are inside the library, where they may hold locks. A signal's handler, which may call what it likes of
//! the library (POSIX, "Signal Actions"), waits until its thread is outside (ADR 24); one that cannot wait and ends the
//! program must not wait for the locks. While one thread forks no other is inside, since the child would find its locks
//! held, and what they guard half done, forever.
//!
//! Under the preload library an allocator may come here while it starts: nothing is allocated.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_sys::clock;
use portolan_sys::signals::{self, Mask, SignalInfo};

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

thread_local! {
    static PUT_OFF: Cell<Option<PutOff>> = const { Cell::new(None) };
    /// Does the kernel begin the call again that handlers have interrupted, which were put off to its last sleep?
    static BEGINS_AGAIN: Cell<Option<bool>> = const { Cell::new(None) };
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Where the thread counts.
    static COUNT: Cell<Option<&'static Count>> = const { Cell::new(None) };
    /// The thread waits at `FORK`, which are calls that come here, or forks.
    static IS_AT_FORK: Cell<bool> = const { Cell::new(false) };
    static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// A signal waits until the thread is outside.
#[derive(Clone, Copy)]
struct PutOff {
    /// What the program had blocked: more is while the signal waits.
    before: Mask,
    restarts: bool,
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
fn count_in() {
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

/// Answers what was put off, whose handler has run.
fn go_out() -> Option<PutOff> {
    count().0.fetch_sub(1, Ordering::Release);
    IS_INSIDE.set(false);
    // What interrupts this thread sees it so from here on.
    compiler_fence(Ordering::SeqCst);
    let_through()
}

fn let_through() -> Option<PutOff> {
    let defer = PUT_OFF.take()?;
    signals::let_through(defer.before);
    Some(defer)
}

/// Is the handler of a signal to return at once, since it has interrupted the library? Then the signal comes once more
/// when the thread is outside, and no other before.
pub fn defer(arrival: &SignalInfo) -> bool {
    if !IS_INSIDE.get() && !IS_AT_FORK.get() {
        return false;
    }
    let Ok(before) = arrival.defer() else {
        return false;
    };
    PUT_OFF.set(Some(PutOff {
        before,
        restarts: arrival.restarts(),
    }));
    true
}

/// Has the last sleep been interrupted by handlers with `SA_RESTART` only, as far as can be told?
pub(crate) fn handlers_restart() -> bool {
    BEGINS_AGAIN.get().unwrap_or_else(|| {
        let before = PUT_OFF.get().map(|defer| defer.before);
        signals::handlers_restart(before)
    })
}

/// Answers what was put off, whose handler has run.
fn go(to: Whereabouts) -> Option<PutOff> {
    match (IS_AT_FORK.get(), to, IS_INSIDE.get()) {
        (false, Whereabouts::Inside, false) => {
            count_in();
            None
        }
        (false, Whereabouts::Outside, true) => go_out(),
        _ => None,
    }
}

#[derive(Clone, Copy)]
enum Whereabouts {
    Inside,
    Outside,
}

/// The thread has come in, or gone out for a while, until this is dropped.
#[must_use]
pub struct LibraryGuard {
    before: Whereabouts,
}

fn whereabouts() -> Whereabouts {
    match is_inside() {
        true => Whereabouts::Inside,
        false => Whereabouts::Outside,
    }
}

/// The thread comes into the library.
pub fn enter() -> LibraryGuard {
    let before = whereabouts();
    go(Whereabouts::Inside);
    LibraryGuard { before }
}

/// The thread sleeps, or becomes another program, without a lock.
pub fn leave() -> ExitGuard {
    let before = whereabouts();
    let ran = go(Whereabouts::Outside);
    BEGINS_AGAIN.set(ran.map(|ran| ran.restarts));
    ExitGuard {
        _passage: LibraryGuard { before },
        is_interrupted: ran.is_some(),
    }
}

/// The thread is outside until this is dropped.
#[must_use]
pub struct ExitGuard {
    _passage: LibraryGuard,
    /// Handlers have run that a sleep would not have put off.
    pub(crate) is_interrupted: bool,
}

pub fn is_inside() -> bool {
    IS_INSIDE.get()
}

impl Drop for LibraryGuard {
    fn drop(&mut self) {
        go(self.before);
    }
}

/// Before a fork: waits until all other threads are outside, and keeps them there. Until they may go on, handlers
/// wait as if this thread were inside. Not for a handler that has interrupted the library.
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
}

/// After the fork, in the parent.
pub(crate) fn let_others_go() {
    end_fork();
    if !is_inside() {
        let_through();
    }
}

/// After the fork, in the child: there are no others. The thread is inside until what it inherited is in order.
pub(crate) fn forget_others() -> LibraryGuard {
    for count in &COUNTS {
        count.0.store(0, Ordering::Relaxed);
    }
    let before = whereabouts();
    IS_INSIDE.set(true);
    count().0.store(1, Ordering::Relaxed);
    end_fork();
    LibraryGuard { before }
}

fn end_fork() {
    IS_AT_FORK.set(true);
    if let Some(held) = HELD.take() {
        IS_FORKING.store(false, Ordering::SeqCst);
        drop(held);
    }
    IS_AT_FORK.set(false);
    compiler_fence(Ordering::SeqCst);
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
