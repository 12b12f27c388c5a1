//! A mutex whose holder inherits the priority or deadline of its waiters (MS §V): the kernel's `FUTEX_LOCK_PI`, whose
//! word holds the holder's thread ID. Without contention it makes no system calls.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};
use rustix::time::{ClockId, clock_gettime};

use crate::thread;

#[cfg(test)]
mod tests;

/// How often a waiting thread polls the lock before it sleeps.
const LOOKS: u32 = 100;

/// A sleeping thread wakes up after this time and retries: a child of `vfork` or of a bare `clone` has its parent's
/// [`NUMBER`], and the kernel does not unlock what it holds under that ID.
const LOOK_UP_NANOS: i64 = 100_000_000;
const NANOS_PER_SECOND: i64 = 1_000_000_000;

/// Delay between attempts that the kernel refuses.
const PAUSE: Duration = Duration::from_millis(1);

/// Bit of the word: a thread sleeps on the lock.
const FUTEX_WAITERS: u32 = 1 << 31;

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
            value: UnsafeCell::new(value),
        }
    }

    pub fn lock(&self) -> PiGuard<'_, T> {
        let own = own_number();
        if self.take(own).is_err() {
            self.wait(own);
        }
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

    fn take(&self, own: u32) -> Result<u32, u32> {
        self.word.compare_exchange(0, own, Acquire, Relaxed)
    }

    #[cold]
    fn wait(&self, own: u32) {
        for _ in 0..LOOKS {
            match self.word.load(Relaxed) {
                0 if self.take(own).is_ok() => return,
                word if word & FUTEX_WAITERS != 0 => break,
                _ => std::hint::spin_loop(),
            }
        }
        while let Err(errno) = self.sleep() {
            if !matches!(errno, Errno::TIMEDOUT | Errno::INTR | Errno::AGAIN) {
                std::thread::sleep(PAUSE);
            }
            if self.take(own).is_ok() {
                return;
            }
        }
    }

    /// Sleeps until the caller has the lock.
    fn sleep(&self) -> Result<(), Errno> {
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
        if self
            .word
            .compare_exchange(own, 0, Release, Relaxed)
            .is_err()
        {
            self.wake_next();
        }
    }

    #[cold]
    fn wake_next(&self) {
        if futex::unlock_pi(&self.word, Flags::PRIVATE).is_err() {
            // Held under another thread's ID, see `LOOK_UP_NANOS`.
            self.word.store(0, Release);
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
