//! The word by which an end requests a wake-up from its peer (`portolan_proto::local::wants`). On one side a
//! full fence lies between the request and a last look at the data, on the other between publishing data and
//! a look at the word: so either the peer sees the request, or the end sees the published data.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

/// An atomic: the standard library's, or loom's.
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

/// Requests a wake-up. The caller must check once more, and may sleep if it finds nothing.
pub(crate) fn ask<W: WakeWord>(word: &W, wants: u32) {
    if word.load() != wants {
        word.store(wants);
    }
    W::fence();
}

/// Clears the requests that the data just published fulfils. Returns the former word if any of `due` was requested.
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
