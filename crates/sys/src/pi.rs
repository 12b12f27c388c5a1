//! A mutex whose holder runs with the priority, or the deadline, of whoever waits for it (MS §V): the kernel's
//! `FUTEX_LOCK_PI`, whose word holds the holder's number. Nobody in the kernel is asked while nobody waits.

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

/// How often a thread looks whether the holder is about to be done, before it sleeps.
const LOOKS: u32 = 100;

/// A thread that sleeps looks up in that time: a child of `vfork` or of a bare `clone` has its parent's
/// [`NUMBER`], and what it holds in that name the kernel does not take back from it.
const LOOK_UP_NANOS: i64 = 100_000_000;
const NANOS_PER_SECOND: i64 = 1_000_000_000;

/// Between attempts that the kernel refuses.
const PAUSE: Duration = Duration::from_millis(1);

/// Somebody sleeps: in the word, beside the holder's number.
const FUTEX_WAITERS: u32 = 1 << 31;

thread_local! {
    /// The calling thread's number; 0 before it is known.
    static NUMBER: Cell<u32> = const { Cell::new(0) };
}

/// In a forked child: its thread has another number than its parent's.
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

/// As `std::sync::Mutex`, without its poison.
#[derive(Debug)]
pub struct PiMutex<T> {
    /// 0 while free, else the holder's number and [`FUTEX_WAITERS`].
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has the value, and it may be any.
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

    /// Does a thread hold it at the moment?
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

    /// Until the lock is the caller's.
    fn sleep(&self) -> Result<(), Errno> {
        // The kernel takes this operation's time by the clock that may jump.
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
            // Held in another thread's name, see `LOOK_UP_NANOS`.
            self.word.store(0, Release);
        }
    }
}

/// The lock, held by the thread that took it.
#[must_use]
pub struct PiGuard<'a, T> {
    mutex: &'a PiMutex<T>,
    /// The holder's number.
    own: u32,
    stays_with_thread: PhantomData<*const ()>,
}

// SAFETY: those who share the guard see the value as those who share the value do.
unsafe impl<T: Sync> Sync for PiGuard<'_, T> {}

impl<T> Deref for PiGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard's thread is the only one that has the lock.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for PiGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed alone.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for PiGuard<'_, T> {
    fn drop(&mut self) {
        self.mutex.give_back(self.own);
    }
}
