//! Whether a thread sleeps, what it sleeps on, and whether it was signalled since: a [`Waiter`](super::Waiter) without its
//! descriptor. The thread and its signallers hold the process's lock for all accesses except the kernel's check of the
//! word, so that no signal is lost between a thread's last check and its sleep.

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

/// An atomic word: the standard library's, or loom's in tests.
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
    /// 1 from a signal until the thread wakes.
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

    /// Signals the thread. Returns what to wake, unless it was signalled before.
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

    /// Notes that the thread has woken. Returns whether its eventfd was signalled.
    pub(crate) fn wake(&self) -> bool {
        let state = self.state.swap(AWAKE);
        self.signalled.swap(0) == 1 && state == POLLING
    }

    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.load() == 1
    }

    /// The word to sleep on: 0 until there is a signal.
    pub(crate) fn word(&self) -> &W {
        &self.signalled
    }
}

#[cfg(test)]
mod tests;
