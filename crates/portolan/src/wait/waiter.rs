//! What wakes a sleeping thread: an eventfd among the descriptors that it polls, or a word that it sleeps on.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use portolan_sys::wait::pollfd;
use portolan_sys::word::{self, Scope, Word};
use portolan_sys::{clock, thread, wait};
use portolan_types::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::descriptors::InternalFd;
use crate::wait::signals::{Asleep, Signals};

/// Wakes one sleeping thread when signalled.
#[derive(Debug)]
pub(crate) struct Waiter {
    /// Not set while no descriptor is available: then the thread polls in short intervals.
    eventfd: OnceLock<InternalFd>,
    /// Nanoseconds of [`Instant`]: when to try again to open one.
    next_try: AtomicU64,
    signals: Signals,
}

/// How long a thread polls at a time that has no descriptor to be signalled by.
const WITHOUT_DESCRIPTOR: Duration = Duration::from_millis(1);

const BETWEEN_TRIES: Duration = Duration::from_secs(1);

/// Waiters of threads that may sleep, by thread ID.
static SLEEPERS: Mutex<Vec<(i32, Weak<Waiter>)>> = Mutex::new(Vec::new());

thread_local! {
    static MINE: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
}

impl Waiter {
    /// Returns the calling thread's own. A thread that ends, and has dropped its variables, gets one for this wait.
    pub(crate) fn mine() -> Arc<Waiter> {
        let mine = MINE.try_with(|mine| {
            let mut mine = mine.borrow_mut();
            let waiter = mine.get_or_insert_with(Waiter::noted);
            Arc::clone(waiter)
        });
        mine.unwrap_or_else(|_| Waiter::noted())
    }

    fn noted() -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::new());
        note(&waiter);
        waiter
    }

    pub(crate) fn new() -> Waiter {
        let waiter = Waiter {
            eventfd: OnceLock::new(),
            next_try: AtomicU64::new(0),
            signals: Signals::new(),
        };
        waiter.equip();
        waiter
    }

    /// Makes this the waiter of the calling thread, which has not slept yet.
    pub(crate) fn adopt(self) {
        let waiter = Arc::new(self);
        note(&waiter);
        MINE.with(|mine| mine.replace(Some(waiter)));
    }

    /// Called by the thread itself: opens the descriptor, if possible. Not tried each time: a
    /// number that the program has just freed is the program's to use.
    fn equip(&self) {
        if self.eventfd.get().is_some() {
            return;
        }
        let now = clock::now();
        if now.as_nanos() < self.next_try.load(Relaxed) {
            return;
        }
        let next_try = now + BETWEEN_TRIES;
        self.next_try.store(next_try.as_nanos(), Relaxed);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        if let Ok(fd) = eventfd(0, flags) {
            self.eventfd.get_or_init(|| InternalFd::new(fd));
        }
    }

    /// Called after fork: the child shares the parent's eventfd and must not use it.
    pub(crate) fn forget_mine() {
        // One that ends, and forks, has none any more.
        let _ = MINE.try_with(|mine| mine.borrow_mut().take());
    }

    /// Wakes the thread if it sleeps. The caller holds `Core`, as does the thread between its last
    /// check and [`Waiter::fall_asleep`]: no signal is lost.
    pub(crate) fn signal(&self) {
        match self.signals.signal() {
            Some(Asleep::OnWord) => word::wake(self.signals.word(), Scope::Private),
            Some(Asleep::Polling) => {
                if let Some(eventfd) = self.eventfd.get() {
                    // Fails only if it is signalled already.
                    let _ = write(eventfd, &1_u64.to_ne_bytes());
                }
            }
            None => {}
        }
    }

    /// Returns the descriptor that wakes a thread that polls it. poll ignores negative numbers.
    pub(crate) fn pollfd(&self) -> libc::pollfd {
        let fd = self.eventfd.get().map_or(-1, |fd| fd.as_fd().as_raw_fd());
        pollfd(fd, libc::POLLIN)
    }

    /// Calls `ppoll`, which a signal of this waiter ends, too.
    pub(crate) fn poll(
        &self,
        fds: &mut [libc::pollfd],
        deadline: Option<Instant>,
        mask: Option<&libc::sigset_t>,
    ) -> Result<usize, Errno> {
        if self.eventfd.get().is_some() {
            return wait::ppoll(fds, deadline, mask);
        }
        loop {
            let now = clock::now();
            let while_over = now + WITHOUT_DESCRIPTOR;
            let until = deadline.map_or(while_over, |deadline| deadline.min(while_over));
            let ready = wait::ppoll(fds, Some(until), mask)?;
            let is_late = deadline.is_some_and(|deadline| deadline <= until);
            if ready > 0 || is_late || self.signals.is_signalled() {
                return Ok(ready);
            }
        }
    }

    /// Returns the word that wakes a thread that sleeps on words.
    pub(crate) fn word(&self) -> Word<'_> {
        Word::new(self.signals.word(), 0, Scope::Private)
    }

    pub(crate) fn fall_asleep(&self) {
        self.equip();
        self.signals.fall_asleep(Asleep::Polling);
    }

    pub(crate) fn fall_asleep_on_word(&self) {
        self.signals.fall_asleep(Asleep::OnWord);
    }

    pub(crate) fn wake(&self) {
        if self.signals.wake()
            && let Some(eventfd) = self.eventfd.get()
        {
            // Fails only if there is nothing to read.
            let _ = read(eventfd, &mut [0; 8]);
        }
    }
}

/// Registers the waiter by which the calling thread sleeps.
fn note(waiter: &Arc<Waiter>) {
    let mut sleepers = sleepers();
    sleepers.retain(|(_, waiter)| waiter.strong_count() > 0);
    sleepers.push((thread::number(), Arc::downgrade(waiter)));
}

/// Wakes a thread, if it sleeps. The caller holds `Core`.
pub(crate) fn signal_thread(thread: i32) {
    for (_, waiter) in sleepers().iter().filter(|(id, _)| *id == thread) {
        if let Some(waiter) = waiter.upgrade() {
            waiter.signal();
        }
    }
}

fn sleepers() -> MutexGuard<'static, Vec<(i32, Weak<Waiter>)>> {
    SLEEPERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Are both the same thread's?
impl PartialEq for Waiter {
    fn eq(&self, other: &Waiter) -> bool {
        std::ptr::eq(self, other)
    }
}
