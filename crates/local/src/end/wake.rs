//! Sleeping holders of ends, and how they are woken.

use std::sync::Arc;

use portolan_proto::local::{Side, wants};
use portolan_sys::shm::Rings;
use portolan_sys::word::{Scope, Word};

/// How the holder of an end is woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WakeBy {
    #[default]
    Notifier,
    /// It sleeps on the words of its ends, and does not watch its notifier.
    Word,
}

impl WakeBy {
    pub(super) const fn bits(self) -> u32 {
        match self {
            WakeBy::Notifier => 0,
            WakeBy::Word => wants::ON_WORD,
        }
    }
}

/// How to wake a sleeping peer, and the holder that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the peer may sleep"]
pub enum Wake {
    /// By this notifier.
    Notifier(u64),
    /// It slept on its word, and has been woken; this is its holder's notifier.
    Word(u64),
}

impl Wake {
    /// Returns the notifier to wake.
    pub fn notifier(self) -> Option<u64> {
        match self {
            Wake::Notifier(number) => Some(number),
            Wake::Word(_) => None,
        }
    }

    /// Returns the holder, as the number of its notifier.
    pub fn holder(self) -> u64 {
        let (Wake::Notifier(number) | Wake::Word(number)) = self;
        number
    }
}

/// The request of an armed end. A thread that sleeps on it keeps the memory, even if the end goes away.
#[derive(Debug)]
pub struct WakeRequest {
    pub(super) rings: Arc<Rings>,
    pub(super) side: Side,
    pub(super) bits: u32,
}

impl WakeRequest {
    /// The word changes when the request is fulfilled.
    pub fn word(&self) -> Word<'_> {
        let wants = &self.rings.ends().of(self.side).notifier.0.wants;
        Word::new(wants, self.bits, Scope::Shared)
    }
}
