//! Whether a thread sleeps, and on what, and whether it was signalled since: a [`Waiter`](super::Waiter) less its descriptor.
//! All but the look at the word that the kernel takes happens with the process's lock held, by the thread itself and by
//! who signals it: so no signal falls between a thread's last look and its sleep.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// What a thread sleeps on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asleep {
    /// It polls its eventfd.
    Polling,
    /// The word of these signals, among others.
    OnWord,
}

const AWAKE: u32 = 0;
const POLLING: u32 = 1;
const ON_WORD: u32 = 2;

/// An atomic of the standard library's, or of a checker of interleavings.
pub(crate) trait SignalWord {
    fn new() -> Self;
    fn load(&self) -> u32;
    fn store(&self, value: u32);
    fn swap(&self, value: u32) -> u32;
}

impl SignalWord for AtomicU32 {
    fn new() -> AtomicU32 {
        AtomicU32::new(0)
    }

    fn load(&self) -> u32 {
        self.load(Relaxed)
    }

    fn store(&self, value: u32) {
        self.store(value, Relaxed);
    }

    fn swap(&self, value: u32) -> u32 {
        self.swap(value, Relaxed)
    }
}

#[derive(Debug)]
pub(crate) struct Signals<W = AtomicU32> {
    state: W,
    /// 1 from a signal on until the thread wakes.
    signalled: W,
}

impl<W: SignalWord> Signals<W> {
    pub(crate) fn new() -> Signals<W> {
        Signals {
            state: W::new(),
            signalled: W::new(),
        }
    }

    /// The thread is about to sleep.
    pub(crate) fn fall_asleep(&self, on: Asleep) {
        self.state.store(match on {
            Asleep::Polling => POLLING,
            Asleep::OnWord => ON_WORD,
        });
    }

    /// The thread is to wake: what it sleeps on is to be woken, unless it was before.
    #[must_use = "the thread sleeps on"]
    pub(crate) fn signal(&self) -> Option<Asleep> {
        let state = self.state.load();
        if state == AWAKE || self.signalled.swap(1) == 1 {
            return None;
        }
        Some(match state {
            ON_WORD => Asleep::OnWord,
            _ => Asleep::Polling,
        })
    }

    /// The thread has woken. True if its eventfd was signalled.
    pub(crate) fn wake(&self) -> bool {
        let state = self.state.swap(AWAKE);
        self.signalled.swap(0) == 1 && state == POLLING
    }

    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.load() == 1
    }

    /// 0 until there is a signal.
    pub(crate) fn word(&self) -> &W {
        &self.signalled
    }
}

#[cfg(test)]
mod tests;
