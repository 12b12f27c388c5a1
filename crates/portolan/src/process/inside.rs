//! Which threads are inside the library, where they may hold locks. A signal handler may call any function of
//! the library (POSIX, "Signal Actions"): it is deferred until its thread is outside (ADR 24). One that
//! cannot be deferred and ends the program must not wait for the locks. While one thread forks, no other is
//! inside: the child would find its locks held forever, and the data they guard half changed.
//!
//! Nothing here allocates: under the preload library an allocator may call in while it starts.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_sys::clock;
use portolan_sys::signals::{self, Mask, SignalInfo};

/// How long a fork waits for threads that are inside, which may be waiting for the server, or the next one.
const TIMEOUT: Duration = Duration::from_secs(6);
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// Number of threads inside, in counters that do not share a cache line. Each thread uses one of
/// them, possibly together with others.
static COUNTS: [Count; 128] = [const { Count(AtomicU32::new(0)) }; 128];

#[repr(align(64))]
struct Count(AtomicU32);

static NEXT_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Held by the thread that forks.
static FORK: Mutex<()> = Mutex::new(());
static IS_FORKING: AtomicBool = AtomicBool::new(false);

thread_local! {
    static THREAD: Thread = const { Thread::new() };
    /// Without a destructor: a program may fork while it ends, when the thread's other variables have been dropped.
    static HELD: Cell<Option<ManuallyDrop<MutexGuard<'static, ()>>>> = const { Cell::new(None) };
}

/// State of a thread, in one variable: in a shared library each access to a thread-local is a call.
struct Thread {
    is_inside: Cell<bool>,
    /// The thread forks, or waits for `FORK`; the calls that this takes may come back here.
    is_at_fork: Cell<bool>,
    /// Is there a signal in `deferred`?
    has_deferred: Cell<bool>,
    deferred: Cell<Option<Deferred>>,
    /// Whether handlers that were deferred until the last sleep let the kernel restart the call; `None` if there were
    /// none.
    begins_again: Cell<Option<bool>>,
    /// The counter that this thread uses.
    count: Cell<Option<&'static Count>>,
}

/// A signal that waits until the thread is outside.
#[derive(Clone, Copy)]
struct Deferred {
    /// The program's own signal mask; more is blocked while the signal waits.
    before: Mask,
    restarts: bool,
}

impl Thread {
    const fn new() -> Thread {
        Thread {
            is_inside: Cell::new(false),
            is_at_fork: Cell::new(false),
            has_deferred: Cell::new(false),
            deferred: Cell::new(None),
            begins_again: Cell::new(None),
            count: Cell::new(None),
        }
    }

    fn count(&self) -> &'static Count {
        self.count.get().unwrap_or_else(|| {
            let number = NEXT_COUNT.fetch_add(1, Ordering::Relaxed) % COUNTS.len();
            let count = &COUNTS[number];
            self.count.set(Some(count));
            count
        })
    }

    /// Counts the thread as inside. Waits while another thread forks: of the two, at least one sees the other.
    fn count_in(&self) {
        let count = self.count();
        self.is_inside.set(true);
        count.0.fetch_add(1, Ordering::SeqCst);
        while IS_FORKING.load(Ordering::SeqCst) {
            count.0.fetch_sub(1, Ordering::Release);
            self.is_at_fork.set(true);
            drop(FORK.lock());
            self.is_at_fork.set(false);
            count.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Counts the thread as outside. Returns the deferred signal, whose handler has run.
    fn go_out(&self) -> Option<Deferred> {
        self.count().0.fetch_sub(1, Ordering::Release);
        self.is_inside.set(false);
        // Signal handlers of this thread see it outside from here on.
        compiler_fence(Ordering::SeqCst);
        self.let_through()
    }

    fn let_through(&self) -> Option<Deferred> {
        if !self.has_deferred.replace(false) {
            return None;
        }
        let deferred = self.deferred.take()?;
        signals::let_through(deferred.before);
        Some(deferred)
    }

    /// Returns the deferred signal, whose handler has run.
    fn go(&self, to: Whereabouts) -> Option<Deferred> {
        match (self.is_at_fork.get(), to, self.is_inside.get()) {
            (false, Whereabouts::Inside, false) => {
                self.count_in();
                None
            }
            (false, Whereabouts::Outside, true) => self.go_out(),
            _ => None,
        }
    }

    fn whereabouts(&self) -> Whereabouts {
        if self.is_inside.get() {
            Whereabouts::Inside
        } else {
            Whereabouts::Outside
        }
    }
}

/// Returns whether the handler of a signal must return at once, because it has interrupted the
/// library. The signal is then raised again when the thread is outside, before any other.
pub fn defer(arrival: &SignalInfo) -> bool {
    THREAD.with(|thread| {
        if !thread.is_inside.get() && !thread.is_at_fork.get() {
            return false;
        }
        let Ok(before) = arrival.defer() else {
            return false;
        };
        thread.deferred.set(Some(Deferred {
            before,
            restarts: arrival.restarts(),
        }));
        thread.has_deferred.set(true);
        true
    })
}

/// Did only handlers with `SA_RESTART` interrupt the last sleep, as far as can be told?
pub(crate) fn handlers_restart() -> bool {
    THREAD.with(|thread| {
        thread.begins_again.get().unwrap_or_else(|| {
            let before = thread.deferred.get().map(|deferred| deferred.before);
            signals::handlers_restart(before)
        })
    })
}

#[derive(Clone, Copy)]
enum Whereabouts {
    Inside,
    Outside,
}

/// Restores the thread's previous whereabouts when dropped.
#[must_use]
pub struct LibraryGuard {
    before: Whereabouts,
}

/// Marks the thread as inside the library.
pub fn enter() -> LibraryGuard {
    THREAD.with(|thread| {
        let before = thread.whereabouts();
        thread.go(Whereabouts::Inside);
        LibraryGuard { before }
    })
}

/// Marks the thread as outside, for a sleep or an exec, without locks held.
pub fn leave() -> ExitGuard {
    THREAD.with(|thread| {
        let before = thread.whereabouts();
        let ran = thread.go(Whereabouts::Outside);
        thread.begins_again.set(ran.map(|ran| ran.restarts));
        ExitGuard {
            _guard: LibraryGuard { before },
            is_interrupted: ran.is_some(),
        }
    })
}

/// The thread is outside until this is dropped.
#[must_use]
pub struct ExitGuard {
    _guard: LibraryGuard,
    /// Handlers have run that a sleep would not have deferred.
    pub(crate) is_interrupted: bool,
}

pub fn is_inside() -> bool {
    THREAD.with(|thread| thread.is_inside.get())
}

impl Drop for LibraryGuard {
    fn drop(&mut self) {
        THREAD.with(|thread| thread.go(self.before));
    }
}

/// Called before a fork: waits until all other threads are outside, and keeps them there. Until it lets them go,
/// handlers are deferred as if this thread were inside. Does nothing for a handler that has interrupted the library.
pub(crate) fn hold_others() {
    if is_inside() {
        return;
    }
    THREAD.with(|thread| thread.is_at_fork.set(true));
    let held = FORK.lock().unwrap_or_else(PoisonError::into_inner);
    IS_FORKING.store(true, Ordering::SeqCst);
    let until = clock::now() + TIMEOUT;
    for count in &COUNTS {
        while count.0.load(Ordering::SeqCst) != 0 && clock::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
    }
    HELD.set(Some(ManuallyDrop::new(held)));
}

/// Called after the fork, in the parent.
pub(crate) fn let_others_go() {
    end_fork();
    THREAD.with(|thread| {
        if !thread.is_inside.get() {
            thread.let_through();
        }
    });
}

/// Called after the fork, in the child, which has no other threads. The thread is inside until its inherited state is
/// in order.
pub(crate) fn forget_others() -> LibraryGuard {
    // Pages that are not written to stay shared with the parent.
    let used = COUNTS.iter().filter(|it| it.0.load(Ordering::Relaxed) != 0);
    used.for_each(|count| count.0.store(0, Ordering::Relaxed));
    let before = THREAD.with(|thread| {
        let before = thread.whereabouts();
        thread.is_inside.set(true);
        thread.count().0.store(1, Ordering::Relaxed);
        before
    });
    end_fork();
    LibraryGuard { before }
}

fn end_fork() {
    THREAD.with(|thread| thread.is_at_fork.set(true));
    if let Some(held) = HELD.take() {
        IS_FORKING.store(false, Ordering::SeqCst);
        drop(ManuallyDrop::into_inner(held));
    }
    THREAD.with(|thread| thread.is_at_fork.set(false));
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
                    let _guard = enter();
                    note(&order, "second in");
                }
            });
            note(&of_second, "forked");
            // Long enough for a thread that is not kept out.
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
