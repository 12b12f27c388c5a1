//! Bytes that arrived out of order at an earlier holder of the session, and lie in the memory that was handed over.
//! They are copied to the ring when the stream reaches them, if that happens at this holder.

use std::collections::VecDeque;

use crate::buffer::LARGEST;
use crate::encoding;

/// A range of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OooRange {
    pub(crate) start: u32,
    pub(crate) end: u32,
}

encoding::fields!(OooRange { start, end });

impl OooRange {
    fn bytes(self, memory: &[u8]) -> &[u8] {
        &memory[self.start as usize..self.end as usize]
    }
}

/// Sorted and disjoint ranges. Offsets count from the start of the ring.
#[derive(Clone, Debug, Default)]
pub(super) struct OooRanges {
    all: VecDeque<OooRange>,
    /// Position in the memory that corresponds to the first byte of the ring.
    base: i64,
}

encoding::fields!(OooRanges { all, base });

impl OooRanges {
    /// The ring begins behind the first `base` bytes of the memory.
    pub(super) fn new(base: usize, all: impl Iterator<Item = OooRange>) -> OooRanges {
        OooRanges {
            all: all.collect(),
            base: base as i64,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// `count` bytes have left the ring at its head, or, if negative, were put back.
    pub(super) fn shift(&mut self, count: i64) {
        if !self.all.is_empty() {
            self.base += count;
        }
    }

    /// Offset of the end of the last range; zero if there is none.
    pub(super) fn span(&self) -> usize {
        self.all.back().map_or(0, |last| self.offset(last.end))
    }

    fn offset(&self, position: u32) -> usize {
        usize::try_from(i64::from(position) - self.base).unwrap_or(0)
    }

    /// The bytes of each range, with their offset.
    pub(super) fn pieces<'a>(
        &'a self,
        memory: &'a [u8],
    ) -> impl Iterator<Item = (usize, &'a [u8])> {
        self.all
            .iter()
            .map(move |ooo_range| (self.offset(ooo_range.start), ooo_range.bytes(memory)))
    }

    /// The byte at `offset`, if a range contains it.
    pub(super) fn byte(&self, offset: usize, memory: &[u8]) -> Option<u8> {
        self.pieces(memory)
            .find_map(|(start, bytes)| bytes.get(offset.checked_sub(start)?).copied())
    }

    /// Removes the part of the first range that lies before `offset`; returns its offset and that part.
    pub(super) fn reach(&mut self, offset: usize) -> Option<(usize, OooRange)> {
        let &first = self.all.front()?;
        let begin = self.offset(first.start);
        if begin >= offset {
            return None;
        }
        let rest = self.offset(first.end).saturating_sub(offset) as u32;
        let end = first.end - rest;
        if rest == 0 {
            self.all.pop_front();
        } else {
            self.all[0].start = end;
        }
        Some((begin, OooRange { end, ..first }))
    }

    /// Whether the ranges lie within the memory, in order, and behind the `readable` bytes of the ring.
    pub(super) fn is_consistent(&self, readable: usize, memory: &[u8]) -> bool {
        if self.base.unsigned_abs() > LARGEST as u64 {
            return false;
        }
        let mut at = self.base + readable as i64;
        self.all.iter().all(|ooo_range| {
            let ok = i64::from(ooo_range.start) > at
                && ooo_range.end > ooo_range.start
                && ooo_range.end as usize <= memory.len();
            at = i64::from(ooo_range.end);
            ok
        })
    }
}
