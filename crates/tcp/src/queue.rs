//! The receive queue: a ring that takes what arrives and, before it, what an earlier holder of the
//! session left unread, which is read where it lies. What that holder had out of order lies there, too.

use core::fmt;
use std::sync::Arc;

use portolan_types::Memory;

use crate::buffer::{ByteRing, LARGEST};
use crate::encoding::{Encoded, Reader, Refused, Writer};

mod ooo_ranges;

pub(crate) use ooo_ranges::OooRange;
use ooo_ranges::OooRanges;

/// A memory that was handed on with the session, and which part of it is unread: perhaps none, if all it
/// has came out of order.
#[derive(Clone)]
pub struct HandoffBuffer {
    memory: Arc<dyn Memory>,
    start: usize,
    end: usize,
}

impl HandoffBuffer {
    /// `length` bytes of `memory` from `start` on; `None` if it has not as many.
    pub fn new(memory: Arc<dyn Memory>, start: usize, length: usize) -> Option<HandoffBuffer> {
        let end = start.checked_add(length)?;
        let has_them = end <= memory.bytes().len();
        has_them.then_some(HandoffBuffer { memory, start, end })
    }

    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// Where in its memory the unread bytes begin.
    pub fn start(&self) -> usize {
        self.start
    }

    /// How many they are.
    pub fn length(&self) -> usize {
        self.end - self.start
    }

    /// All that lies in its memory from there on, holes among it.
    pub fn bytes_aside(&self) -> usize {
        self.memory.bytes().len() - self.start
    }

    fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[self.start..self.end]
    }

    /// Are `bytes` those that were read from it last? Then they are unread again.
    fn rewind(&mut self, bytes: &[u8]) -> bool {
        let before = &self.memory.bytes()[..self.start];
        let fits = before.ends_with(bytes);
        if fits {
            self.start -= bytes.len();
        }
        fits
    }
}

impl fmt::Debug for HandoffBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prefix({} bytes)", self.length())
    }
}

/// Offsets count from the next byte that is read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    handoff: Option<HandoffBuffer>,
    /// In the memory of the prefix.
    ooo_ranges: OooRanges,
    ring: ByteRing,
}

impl Queue {
    /// Readable bytes.
    pub(crate) fn len(&self) -> usize {
        self.before() + self.ring.len()
    }

    /// Bytes up to the last one that arrived, in order or not.
    pub(crate) fn span(&self) -> usize {
        self.before() + self.ring.span().max(self.ooo_ranges.span())
    }

    /// Bytes that are encoded with the queue.
    pub(crate) fn encoded(&self) -> usize {
        self.ring.span()
    }

    /// Bytes before the ring.
    fn before(&self) -> usize {
        self.handoff.as_ref().map_or(0, HandoffBuffer::length)
    }

    fn memory(&self) -> &[u8] {
        self.handoff
            .as_ref()
            .map_or(&[], |handoff| handoff.memory.bytes())
    }

    /// Appends to the readable part.
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.ring.push(data);
    }

    /// Writes behind the readable part; does not make it readable.
    pub(crate) fn write_at(&mut self, offset: usize, data: &[u8]) {
        self.ring.write_at(offset - self.before(), data);
    }

    /// Makes `count` bytes readable that arrived behind the readable part.
    pub(crate) fn extend(&mut self, count: usize) {
        if !self.ooo_ranges.is_empty() {
            self.land(count);
        }
        self.ring.extend(count);
    }

    /// Copies to the ring what is elsewhere of the next `count` bytes.
    fn land(&mut self, count: usize) {
        let Queue {
            handoff: Some(handoff),
            ooo_ranges,
            ring,
        } = self
        else {
            return;
        };
        while let Some((offset, ooo_range)) = ooo_ranges.reach(ring.len() + count) {
            let bytes = &handoff.memory.bytes()[ooo_range.start as usize..ooo_range.end as usize];
            ring.write_at(offset, bytes);
        }
        self.drop_used_up();
    }

    /// The memory goes once nothing in it is of use.
    fn drop_used_up(&mut self) {
        if self.before() == 0 && self.ooo_ranges.is_empty() {
            self.handoff = None;
        }
    }

    /// Copies readable bytes from `offset` on; returns how many.
    pub(crate) fn copy_out(&self, offset: usize, out: &mut [u8]) -> usize {
        let Some(handoff) = &self.handoff else {
            return self.ring.copy_out(offset, out);
        };
        let first = handoff.bytes().get(offset..).unwrap_or_default();
        let first = &first[..first.len().min(out.len())];
        out[..first.len()].copy_from_slice(first);
        let behind = offset.saturating_sub(handoff.length());
        first.len() + self.ring.copy_out(behind, &mut out[first.len()..])
    }

    /// One byte of those that arrived.
    pub(crate) fn byte(&self, offset: usize) -> Option<u8> {
        let Some(behind) = offset.checked_sub(self.before()) else {
            return self.handoff.as_ref()?.bytes().get(offset).copied();
        };
        let elsewhere = self.ooo_ranges.byte(behind, self.memory());
        elsewhere.or_else(|| self.ring.byte(behind))
    }

    /// Drops `count` readable bytes at the head.
    pub(crate) fn consume(&mut self, count: usize) {
        let first = count.min(self.before());
        if let Some(handoff) = &mut self.handoff {
            handoff.start += first;
            self.drop_used_up();
        }
        self.ring.consume(count - first);
        self.ooo_ranges.shift((count - first) as i64);
    }

    /// Puts bytes back in front of the head.
    pub(crate) fn unread(&mut self, data: &[u8]) {
        if let Some(handoff) = &mut self.handoff {
            if handoff.rewind(data) {
                return;
            }
            let bytes = handoff.bytes();
            self.ring.unread(bytes);
            self.ooo_ranges.shift(-(bytes.len() as i64));
            handoff.start = handoff.end;
            self.drop_used_up();
        }
        self.ring.unread(data);
        self.ooo_ranges.shift(-(data.len() as i64));
    }

    /// All that has arrived, each piece with its offset; where they overlap the later ones count.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let before = self.before();
        let handoff = self.handoff.as_ref().map(|handoff| (0, handoff.bytes()));
        let [first, second] = self.ring.slices(0, self.ring.span());
        let ring = [(before, first), (before + first.len(), second)];
        let ooo_ranges = self.ooo_ranges.pieces(self.memory());
        let ooo_ranges = ooo_ranges.map(move |(offset, bytes)| (before + offset, bytes));
        handoff.into_iter().chain(ring).chain(ooo_ranges)
    }

    pub(crate) fn handoff(&self) -> Option<&HandoffBuffer> {
        self.handoff.as_ref()
    }

    /// Puts bytes in front that are not in the ring; also those that are out of order may lie there.
    pub(crate) fn lead_with(&mut self, handoff: HandoffBuffer) {
        self.handoff = Some(handoff);
        self.drop_used_up();
    }

    /// All is read from `memory` from now on, which has a copy: `ooo_ranges` are what came out of order.
    pub(crate) fn replace(
        &mut self,
        memory: Arc<dyn Memory>,
        ooo_ranges: impl Iterator<Item = OooRange>,
    ) {
        let end = self.len();
        *self = Queue {
            handoff: Some(HandoffBuffer {
                memory,
                start: 0,
                end,
            }),
            ooo_ranges: OooRanges::new(end, ooo_ranges),
            ring: ByteRing::default(),
        };
        self.drop_used_up();
    }

    /// Drops everything and its memory.
    pub(crate) fn release(&mut self) {
        *self = Queue::default();
    }

    /// Whether the bytes that lie elsewhere do.
    pub(crate) fn is_consistent(&self) -> bool {
        let readable = self.ring.len();
        self.ooo_ranges.is_consistent(readable, self.memory()) && self.span() <= LARGEST
    }
}

/// Its ring, and where bytes out of order lie: what is read elsewhere travels by itself.
impl Encoded for Queue {
    fn put(&self, out: &mut Writer) {
        self.ring.put(out);
        self.ooo_ranges.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Queue, Refused> {
        Ok(Queue {
            ring: Encoded::take(from)?,
            ooo_ranges: Encoded::take(from)?,
            handoff: None,
        })
    }
}

#[cfg(test)]
mod tests;
