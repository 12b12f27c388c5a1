//! A mutex whose holder runs with the priority, or the deadline, of whoever waits for it (MS §V): the kernel's
//! `FUTEX_LOCK_PI`, whose word holds the holder's number. Nobody in the kernel is asked while nobody waits.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::{raw, thread};

#[cfg(test)]
mod tests;

/// How often a thread looks whether the holder is about to be done, before it sleeps.
const LOOKS: u32 = 100;

/// A thread that sleeps looks up in that time: a child of `vfork` or of a bare `clone` has its parent's
/// [`NUMBER`], and what it holds in that name the kernel does not take back from it.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Between attempts that the kernel refuses.
const PAUSE: Duration = Duration::from_millis(1);

const FUTEX_LOCK_PI_PRIVATE: usize = 6 | 128;
const FUTEX_UNLOCK_PI_PRIVATE: usize = 7 | 128;
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
        if self.take().is_err() {
            self.wait();
        }
        PiGuard {
            mutex: self,
            stays_with_thread: PhantomData,
        }
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    fn take(&self) -> Result<u32, u32> {
        let own = own_number();
        self.word.compare_exchange(0, own, Acquire, Relaxed)
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..LOOKS {
            match self.word.load(Relaxed) {
                0 if self.take().is_ok() => return,
                word if word & FUTEX_WAITERS != 0 => break,
                _ => std::hint::spin_loop(),
            }
        }
        while let Err(errno) = self.sleep() {
            if !matches!(errno, Errno::TIMEDOUT | Errno::INTR | Errno::AGAIN) {
                std::thread::sleep(PAUSE);
            }
            if self.take().is_ok() {
                return;
            }
        }
    }

    /// Until the lock is the caller's.
    fn sleep(&self) -> Result<(), Errno> {
        // The kernel takes this operation's time by the clock that may jump.
        let now = clock_gettime(ClockId::Realtime);
        let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
        let until = now + LOOK_UP;
        let until = [until.as_secs(), u64::from(until.subsec_nanos())];
        let until = until.as_ptr().expose_provenance();
        // SAFETY: the word outlives the call, and `until` is a `timespec` of the kernel's.
        unsafe { self.futex(FUTEX_LOCK_PI_PRIVATE, until) }
    }

    fn give_back(&self) {
        let own = own_number();
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
        // SAFETY: the word outlives the call; there is no time.
        if unsafe { self.futex(FUTEX_UNLOCK_PI_PRIVATE, 0) }.is_err() {
            // Held in another thread's name, see `LOOK_UP`.
            self.word.store(0, Release);
        }
    }

    /// # Safety
    /// `until` is the address of a live `timespec`, or 0.
    unsafe fn futex(&self, operation: usize, until: usize) -> Result<(), Errno> {
        let word = self.word.as_ptr().expose_provenance();
        // SAFETY: the word is live as long as `self`; the caller answers for the time.
        unsafe { raw::syscall(libc::SYS_futex, [word, operation, 0, until, 0, 0]) }.map(drop)
    }
}

/// The lock, held by the thread that took it.
#[must_use]
pub struct PiGuard<'a, T> {
    mutex: &'a PiMutex<T>,
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
        self.mutex.give_back();
    }
}
