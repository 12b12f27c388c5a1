//! Who sleeps at an end, and how they are woken.

use std::sync::Arc;

use portolan_proto::local::{Side, wants};
use portolan_sys::shm::Rings;
use portolan_sys::word::{Scope, Word};

/// What wakes the holder of an end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WakeBy {
    #[default]
    Notifier,
    /// It sleeps on the words of its ends, and hears no notifier.
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

/// Of a peer that slept: whom it belongs to, and how it is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the peer may sleep"]
pub enum Wake {
    /// By this notifier.
    Notifier(u64),
    /// It was on its word, and has been; its notifier would have been this.
    Word(u64),
}

impl Wake {
    /// The notifier to wake.
    pub fn notifier(self) -> Option<u64> {
        match self {
            Wake::Notifier(number) => Some(number),
            Wake::Word(_) => None,
        }
    }

    /// Whose it is, as the number of a notifier.
    pub fn holder(self) -> u64 {
        let (Wake::Notifier(number) | Wake::Word(number)) = self;
        number
    }
}

/// What an end has requested when it was armed. Who sleeps on it keeps the memory, whatever becomes of the end.
#[derive(Debug)]
pub struct WakeRequest {
    pub(super) rings: Arc<Rings>,
    pub(super) side: Side,
    pub(super) bits: u32,
}

impl WakeRequest {
    /// Changes when the request is fulfilled.
    pub fn word(&self) -> Word<'_> {
        let wants = &self.rings.ends().of(self.side).notifier.0.wants;
        Word::new(wants, self.bits, Scope::Shared)
    }
}
