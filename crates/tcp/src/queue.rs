//! The receive queue: a ring for arriving bytes, preceded by bytes that an earlier holder of the session left
//! unread, which are read in place. That holder's out-of-order bytes stay in place, too.

use core::fmt;
use std::sync::Arc;

use portolan_types::Memory;

use crate::buffer::{ByteRing, LARGEST};
use crate::encoding::{Encoded, Reader, Refused, Writer};

mod ooo_ranges;

pub(crate) use ooo_ranges::OooRange;
use ooo_ranges::OooRanges;

/// Memory handed over with the session, and its unread part, which is empty if all bytes in it arrived out of
/// order.
#[derive(Clone)]
pub struct HandoffBuffer {
    memory: Arc<dyn Memory>,
    start: usize,
    end: usize,
}

impl HandoffBuffer {
    /// The part of `length` bytes of `memory` at `start`; `None` if the memory is shorter.
    pub fn new(memory: Arc<dyn Memory>, start: usize, length: usize) -> Option<HandoffBuffer> {
        let end = start.checked_add(length)?;
        let has_them = end <= memory.bytes().len();
        has_them.then_some(HandoffBuffer { memory, start, end })
    }

    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// Where the unread bytes begin in the memory.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Number of unread bytes.
    pub fn length(&self) -> usize {
        self.end - self.start
    }

    /// All bytes of the memory from there on, including holes.
    pub fn bytes_aside(&self) -> usize {
        self.memory.bytes().len() - self.start
    }

    fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[self.start..self.end]
    }

    /// Makes `bytes` unread again if they are the bytes read from it last; returns whether they were.
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

/// Offsets count from the next byte to be read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    handoff: Option<HandoffBuffer>,
    /// Out-of-order bytes in the memory of `handoff`.
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

    /// Bytes that precede the ring.
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

    /// Copies to the ring those of its next `count` bytes that lie in the handed-over memory.
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

    /// Releases the handed-over memory once nothing in it is needed.
    fn drop_used_up(&mut self) {
        if self.before() == 0 && self.ooo_ranges.is_empty() {
            self.handoff = None;
        }
    }

    /// Copies readable bytes, starting at `offset`; returns their number.
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

    /// The byte at `offset`, if it has arrived.
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

    /// Everything that has arrived, in pieces with their offsets; where pieces overlap the later one counts.
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

    /// Puts handed-over bytes before those of the ring; out-of-order bytes may lie in the same memory.
    pub(crate) fn lead_with(&mut self, handoff: HandoffBuffer) {
        self.handoff = Some(handoff);
        self.drop_used_up();
    }

    /// Reads everything from `memory`, which holds a copy, from now on; `ooo_ranges` arrived out of order.
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

    /// Drops all bytes and releases the memory.
    pub(crate) fn release(&mut self) {
        *self = Queue::default();
    }

    /// Whether the out-of-order ranges lie within their memory.
    pub(crate) fn is_consistent(&self) -> bool {
        let readable = self.ring.len();
        self.ooo_ranges.is_consistent(readable, self.memory()) && self.span() <= LARGEST
    }
}

/// Encodes the ring and the positions of out-of-order bytes; handed-over memory travels separately.
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
