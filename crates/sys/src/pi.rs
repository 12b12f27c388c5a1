//! A mutex whose holder inherits the priority or deadline of its waiters (MS §V): the kernel's `FUTEX_LOCK_PI`, whose
//! word holds the holder's thread ID. Without contention it makes no system calls.
//!
//! Only real-time threads have something to pass on. Others *park*: they sleep until the lock is free, and whoever runs
//! then takes it. In the kernel's *queue* the lock is handed to the first sleeper instead, and nobody has it until that
//! thread runs. A thread that was overtaken for [`PATIENCE`] joins the queue, so that it is not overtaken for ever.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::{sched, thread};

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

/// How often a waiting thread polls the lock before it sleeps.
const LOOKS: u32 = 100;

/// How long a thread that is not a real-time thread may be overtaken.
const PATIENCE: Duration = Duration::from_millis(1);

/// A thread in the queue wakes up after this time and retries: a child of `vfork` or of a bare `clone` has its parent's
/// [`NUMBER`], and the kernel does not unlock what it holds under that ID.
const LOOK_UP_NANOS: i64 = 100_000_000;
const NANOS_PER_SECOND: i64 = 1_000_000_000;

/// Delay between attempts that the kernel refuses.
const PAUSE: Duration = Duration::from_millis(1);

/// Bit of the word: a thread is in the queue.
const FUTEX_WAITERS: u32 = 1 << 31;

/// Values of [`PiMutex::parked`]: no thread is parked, or some thread may be.
const NOBODY: u32 = 0;
const SOMEBODY: u32 = 1;

thread_local! {
    /// The calling thread's ID; 0 if not known yet.
    static NUMBER: Cell<u32> = const { Cell::new(0) };
}

/// Called in a forked child, whose thread has another ID than its parent's.
pub fn forget_number() {
    NUMBER.set(0);
}

fn own_number() -> u32 {
    match NUMBER.get() {
        0 => learn_number(),
        number => number,
    }
}

#[cold]
fn learn_number() -> u32 {
    let number = thread::number().unsigned_abs();
    NUMBER.set(number);
    number
}

/// Like `std::sync::Mutex`, without poisoning.
#[derive(Debug)]
pub struct PiMutex<T> {
    /// 0 while free, else the holder's ID and [`FUTEX_WAITERS`].
    word: AtomicU32,
    /// Parked threads sleep on it.
    parked: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only one thread at a time accesses the value; it may be any thread.
unsafe impl<T: Send> Send for PiMutex<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for PiMutex<T> {}

impl<T> PiMutex<T> {
    pub const fn new(value: T) -> PiMutex<T> {
        PiMutex {
            word: AtomicU32::new(0),
            parked: AtomicU32::new(NOBODY),
            value: UnsafeCell::new(value),
        }
    }

    pub fn lock(&self) -> PiGuard<'_, T> {
        let own = own_number();
        if self.take(own).is_err() {
            self.wait(own);
        }
        self.guard(own)
    }

    /// Returns `None` if a thread holds the lock.
    pub fn try_lock(&self) -> Option<PiGuard<'_, T>> {
        let own = own_number();
        self.take(own).is_ok().then(|| self.guard(own))
    }

    fn guard(&self, own: u32) -> PiGuard<'_, T> {
        PiGuard {
            mutex: self,
            own,
            stays_with_thread: PhantomData,
        }
    }

    /// Whether a thread holds the lock at present.
    pub fn is_held(&self) -> bool {
        self.word.load(Relaxed) != 0
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// The thread that parks, and the one that releases the lock, each write one word and then read the other's:
    /// sequential consistency has one of them see the other.
    fn take(&self, own: u32) -> Result<u32, u32> {
        self.word.compare_exchange(0, own, SeqCst, Relaxed)
    }

    #[cold]
    fn wait(&self, own: u32) {
        if self.spin(own) || (!sched::is_real_time() && self.park(own)) {
            return;
        }
        while let Err(errno) = self.queue() {
            if !matches!(errno, Errno::TIMEDOUT | Errno::INTR | Errno::AGAIN) {
                std::thread::sleep(PAUSE);
            }
            if self.take(own).is_ok() {
                return;
            }
        }
    }

    /// Polls the lock for a moment. Returns whether it was taken.
    fn spin(&self, own: u32) -> bool {
        for _ in 0..LOOKS {
            match self.word.load(Relaxed) {
                0 if self.take(own).is_ok() => return true,
                word if word & FUTEX_WAITERS != 0 => return false,
                _ => std::hint::spin_loop(),
            }
        }
        false
    }

    /// Sleeps until the lock is free, and takes it. Returns false if it was overtaken for too long.
    fn park(&self, own: u32) -> bool {
        let begun = Instant::now();
        loop {
            self.parked.store(SOMEBODY, SeqCst);
            if self.take(own).is_ok() {
                return true;
            }
            let left = PATIENCE.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return false;
            }
            let left = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
            // Whatever ends the sleep, the next look shows whether the lock is free.
            let _ = futex::wait(&self.parked, Flags::PRIVATE, SOMEBODY, Some(&left));
            if self.spin(own) {
                // Who woke this thread has noted that nobody is parked; others may be.
                self.parked.store(SOMEBODY, Relaxed);
                return true;
            }
        }
    }

    /// Sleeps until the caller has the lock.
    fn queue(&self) -> Result<(), Errno> {
        // The kernel interprets this operation's timeout by the realtime clock.
        let mut until = clock_gettime(ClockId::Realtime);
        until.tv_nsec += LOOK_UP_NANOS;
        if until.tv_nsec >= NANOS_PER_SECOND {
            until.tv_nsec -= NANOS_PER_SECOND;
            until.tv_sec += 1;
        }
        futex::lock_pi(&self.word, Flags::PRIVATE, Some(&until))
    }

    fn give_back(&self, own: u32) {
        if self.word.compare_exchange(own, 0, SeqCst, Relaxed).is_err() {
            self.hand_over();
        }
        if self.parked.load(SeqCst) != NOBODY {
            self.wake_parked();
        }
    }

    #[cold]
    fn wake_parked(&self) {
        self.parked.store(NOBODY, Relaxed);
        let _ = futex::wake(&self.parked, Flags::PRIVATE, 1);
    }

    /// Hands the lock to the first thread in the queue.
    #[cold]
    fn hand_over(&self) {
        if futex::unlock_pi(&self.word, Flags::PRIVATE).is_err() {
            // Held under another thread's ID, see `LOOK_UP_NANOS`.
            self.word.store(0, SeqCst);
        }
    }
}

/// The held lock.
#[must_use]
pub struct PiGuard<'a, T> {
    mutex: &'a PiMutex<T>,
    /// The holder's ID.
    own: u32,
    stays_with_thread: PhantomData<*const ()>,
}

// SAFETY: sharing the guard gives the same access as sharing the value.
unsafe impl<T: Sync> Sync for PiGuard<'_, T> {}

impl<T> Deref for PiGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: only the guard's thread has the lock.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for PiGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed exclusively.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for PiGuard<'_, T> {
    fn drop(&mut self) {
        self.mutex.give_back(self.own);
    }
}
