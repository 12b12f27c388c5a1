//! The receive queue: a ring that takes what arrives and, before it, what an earlier holder of the
//! session left unread, which is read where it lies. What that holder had out of order lies there, too.

use core::fmt;
use std::sync::Arc;

use portolan_types::Memory;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::buffer::{ByteRing, LARGEST};

mod islands;

pub(crate) use islands::Island;
use islands::Islands;

/// A memory that was handed on with the session, and which part of it is unread: perhaps none, if all it
/// has came out of order.
#[derive(Clone)]
pub struct Prefix {
    memory: Arc<dyn Memory>,
    start: usize,
    end: usize,
}

impl Prefix {
    /// `length` octets of `memory` from `start` on; `None` if it has not as many.
    pub fn new(memory: Arc<dyn Memory>, start: usize, length: usize) -> Option<Prefix> {
        let end = start.checked_add(length)?;
        let has_them = end <= memory.octets().len();
        has_them.then_some(Prefix { memory, start, end })
    }

    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// Where in its memory the unread octets begin.
    pub fn start(&self) -> usize {
        self.start
    }

    /// How many they are.
    pub fn length(&self) -> usize {
        self.end - self.start
    }

    /// All that lies in its memory from there on, holes among it.
    pub fn octets_aside(&self) -> usize {
        self.memory.octets().len() - self.start
    }

    fn octets(&self) -> &[u8] {
        &self.memory.octets()[self.start..self.end]
    }

    /// Are `octets` those that were read from it last? Then they are unread again.
    fn rewind(&mut self, octets: &[u8]) -> bool {
        let before = &self.memory.octets()[..self.start];
        let fits = before.ends_with(octets);
        if fits {
            self.start -= octets.len();
        }
        fits
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prefix({} octets)", self.length())
    }
}

/// Offsets count from the next octet that is read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    prefix: Option<Prefix>,
    /// In the memory of the prefix.
    islands: Islands,
    ring: ByteRing,
}

impl Queue {
    /// Readable octets.
    pub(crate) fn len(&self) -> usize {
        self.before() + self.ring.len()
    }

    /// Octets up to the last one that arrived, in order or not.
    pub(crate) fn span(&self) -> usize {
        self.before() + self.ring.span().max(self.islands.span())
    }

    /// Octets that are encoded with the queue.
    pub(crate) fn encoded(&self) -> usize {
        self.ring.span()
    }

    /// Octets before the ring.
    fn before(&self) -> usize {
        self.prefix.as_ref().map_or(0, Prefix::length)
    }

    fn memory(&self) -> &[u8] {
        self.prefix
            .as_ref()
            .map_or(&[], |prefix| prefix.memory.octets())
    }

    /// Appends to the readable part.
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.ring.push(data);
    }

    /// Writes behind the readable part; does not make it readable.
    pub(crate) fn write_at(&mut self, offset: usize, data: &[u8]) {
        self.ring.write_at(offset - self.before(), data);
    }

    /// Makes `count` octets readable that arrived behind the readable part.
    pub(crate) fn extend(&mut self, count: usize) {
        if !self.islands.is_empty() {
            self.land(count);
        }
        self.ring.extend(count);
    }

    /// Copies to the ring what is elsewhere of the next `count` octets.
    fn land(&mut self, count: usize) {
        let Queue {
            prefix: Some(prefix),
            islands,
            ring,
        } = self
        else {
            return;
        };
        while let Some((offset, island)) = islands.reach(ring.len() + count) {
            let octets = &prefix.memory.octets()[island.start as usize..island.end as usize];
            ring.write_at(offset, octets);
        }
        self.drop_used_up();
    }

    /// The memory goes once nothing in it is of use.
    fn drop_used_up(&mut self) {
        if self.before() == 0 && self.islands.is_empty() {
            self.prefix = None;
        }
    }

    /// Copies readable octets from `offset` on; returns how many.
    pub(crate) fn copy_out(&self, offset: usize, out: &mut [u8]) -> usize {
        let Some(prefix) = &self.prefix else {
            return self.ring.copy_out(offset, out);
        };
        let first = prefix.octets().get(offset..).unwrap_or_default();
        let first = &first[..first.len().min(out.len())];
        out[..first.len()].copy_from_slice(first);
        let behind = offset.saturating_sub(prefix.length());
        first.len() + self.ring.copy_out(behind, &mut out[first.len()..])
    }

    /// One octet of those that arrived.
    pub(crate) fn octet(&self, offset: usize) -> Option<u8> {
        let Some(behind) = offset.checked_sub(self.before()) else {
            return self.prefix.as_ref()?.octets().get(offset).copied();
        };
        let elsewhere = self.islands.octet(behind, self.memory());
        elsewhere.or_else(|| self.ring.octet(behind))
    }

    /// Drops `count` readable octets at the head.
    pub(crate) fn consume(&mut self, count: usize) {
        let first = count.min(self.before());
        if let Some(prefix) = &mut self.prefix {
            prefix.start += first;
            self.drop_used_up();
        }
        self.ring.consume(count - first);
        self.islands.shift((count - first) as i64);
    }

    /// Puts octets back in front of the head.
    pub(crate) fn unread(&mut self, data: &[u8]) {
        if let Some(prefix) = &mut self.prefix {
            if prefix.rewind(data) {
                return;
            }
            let octets = prefix.octets();
            self.ring.unread(octets);
            self.islands.shift(-(octets.len() as i64));
            prefix.start = prefix.end;
            self.drop_used_up();
        }
        self.ring.unread(data);
        self.islands.shift(-(data.len() as i64));
    }

    /// All that has arrived, each piece with its offset; where they overlap the later ones count.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let before = self.before();
        let prefix = self.prefix.as_ref().map(|prefix| (0, prefix.octets()));
        let [first, second] = self.ring.slices(0, self.ring.span());
        let ring = [(before, first), (before + first.len(), second)];
        let islands = self.islands.pieces(self.memory());
        let islands = islands.map(move |(offset, octets)| (before + offset, octets));
        prefix.into_iter().chain(ring).chain(islands)
    }

    pub(crate) fn prefix(&self) -> Option<&Prefix> {
        self.prefix.as_ref()
    }

    /// Puts octets in front that are not in the ring; also those that are out of order may lie there.
    pub(crate) fn lead_with(&mut self, prefix: Prefix) {
        self.prefix = Some(prefix);
        self.drop_used_up();
    }

    /// All is read from `memory` from now on, which has a copy: `islands` are what came out of order.
    pub(crate) fn replace(
        &mut self,
        memory: Arc<dyn Memory>,
        islands: impl Iterator<Item = Island>,
    ) {
        let end = self.len();
        *self = Queue {
            prefix: Some(Prefix {
                memory,
                start: 0,
                end,
            }),
            islands: Islands::new(end, islands),
            ring: ByteRing::default(),
        };
        self.drop_used_up();
    }

    /// Drops everything and its memory.
    pub(crate) fn release(&mut self) {
        *self = Queue::default();
    }

    /// Whether the octets that lie elsewhere do.
    pub(crate) fn is_consistent(&self) -> bool {
        let readable = self.ring.len();
        self.islands.is_consistent(readable, self.memory()) && self.span() <= LARGEST
    }
}

/// Encodes as its ring, and where octets out of order lie: what is read elsewhere travels by itself.
impl Serialize for Queue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (&self.ring, &self.islands).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Queue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Queue, D::Error> {
        let (ring, islands) = Deserialize::deserialize(deserializer)?;
        Ok(Queue {
            prefix: None,
            islands,
            ring,
        })
    }
}

#[cfg(test)]
mod tests;
