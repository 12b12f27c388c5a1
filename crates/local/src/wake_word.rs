//! The word by which an end asks its peer to be woken (`portolan_proto::local::wants`). Between asking and a last look on the
//! one side, publishing and a look at the word on the other, lies a full fence: so that either the peer sees the request,
//! or the end what was published.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

/// An atomic of the standard library's, or of a checker of interleavings.
pub(crate) trait WakeWord {
    fn load(&self) -> u32;
    fn store(&self, wants: u32);
    fn fetch_and(&self, mask: u32) -> u32;
    fn fence();
}

impl WakeWord for AtomicU32 {
    fn load(&self) -> u32 {
        AtomicU32::load(self, Relaxed)
    }

    fn store(&self, wants: u32) {
        AtomicU32::store(self, wants, Relaxed);
    }

    fn fetch_and(&self, mask: u32) -> u32 {
        AtomicU32::fetch_and(self, mask, AcqRel)
    }

    fn fence() {
        fence(SeqCst);
    }
}

/// Asks to be woken; who then looks and finds nothing may sleep.
pub(crate) fn ask<W: WakeWord>(word: &W, wants: u32) {
    if word.load() != wants {
        word.store(wants);
    }
    W::fence();
}

/// Takes away what has been fulfilled by what was just published: the word as it was, if any of `due` was asked for.
pub(crate) fn take<W: WakeWord>(word: &W, due: u32) -> Option<u32> {
    W::fence();
    if word.load() & due == 0 {
        return None;
    }
    let wants = word.fetch_and(!due);
    (wants & due != 0).then_some(wants)
}

#[cfg(test)]
mod tests;
