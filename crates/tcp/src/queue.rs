//! The receive queue: a ring that takes what arrives and, before it, what an earlier holder of the
//! session left unread, which is read where it lies.

use core::fmt;
use std::sync::Arc;

use portolan_types::Memory;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::buffer::ByteRing;

/// The unread part of a memory that was handed on with the session.
#[derive(Clone)]
pub struct Prefix {
    memory: Arc<dyn Memory>,
    start: usize,
    end: usize,
}

impl Prefix {
    /// `length` octets of `memory` from `start` on; `None` if it has not as many, or there are none.
    pub fn new(memory: Arc<dyn Memory>, start: usize, length: usize) -> Option<Prefix> {
        let end = start.checked_add(length)?;
        let has_them = length > 0 && end <= memory.octets().len();
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
    ring: ByteRing,
}

impl Queue {
    /// Readable octets.
    pub(crate) fn len(&self) -> usize {
        self.before() + self.ring.len()
    }

    /// Octets up to the last one that arrived, in order or not.
    pub(crate) fn span(&self) -> usize {
        self.before() + self.ring.span()
    }

    /// Octets before the ring.
    fn before(&self) -> usize {
        self.prefix.as_ref().map_or(0, Prefix::length)
    }

    /// Appends to the readable part.
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.ring.push(data);
    }

    /// Writes behind the readable part; does not make it readable.
    pub(crate) fn write_at(&mut self, offset: usize, data: &[u8]) {
        self.ring.write_at(offset - self.before(), data);
    }

    /// Makes `count` octets readable that were written behind the readable part.
    pub(crate) fn extend(&mut self, count: usize) {
        self.ring.extend(count);
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
        match &self.prefix {
            Some(prefix) if offset < prefix.length() => prefix.octets().get(offset).copied(),
            _ => self.ring.slices(offset - self.before(), 1)[0]
                .first()
                .copied(),
        }
    }

    /// Drops `count` readable octets at the head.
    pub(crate) fn consume(&mut self, count: usize) {
        let first = count.min(self.before());
        if let Some(prefix) = &mut self.prefix {
            prefix.start += first;
            if prefix.length() == 0 {
                self.prefix = None;
            }
        }
        self.ring.consume(count - first);
    }

    /// Puts octets back in front of the head.
    pub(crate) fn unread(&mut self, data: &[u8]) {
        if let Some(prefix) = &mut self.prefix {
            if prefix.rewind(data) {
                return;
            }
            let prefix = self.prefix.take().expect("looked at above");
            self.ring.unread(prefix.octets());
        }
        self.ring.unread(data);
    }

    /// All that is readable, in pieces.
    pub(crate) fn parts(&self) -> [&[u8]; 3] {
        let prefix = self.prefix.as_ref().map_or(&[][..], Prefix::octets);
        let [first, second] = self.ring.slices(0, self.ring.len());
        [prefix, first, second]
    }

    pub(crate) fn prefix(&self) -> Option<&Prefix> {
        self.prefix.as_ref()
    }

    /// Puts octets in front that are not in the ring.
    pub(crate) fn lead_with(&mut self, prefix: Prefix) {
        self.prefix = Some(prefix);
    }

    /// All that is readable is read from `prefix` from now on.
    pub(crate) fn replace(&mut self, prefix: Prefix) {
        self.consume(self.len());
        self.prefix = Some(prefix);
    }

    /// Drops everything and its memory.
    pub(crate) fn release(&mut self) {
        *self = Queue::default();
    }
}

/// Encodes as its ring: what is read elsewhere travels by itself.
impl Serialize for Queue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.ring.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Queue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Queue, D::Error> {
        Ok(Queue {
            prefix: None,
            ring: ByteRing::deserialize(deserializer)?,
        })
    }
}

#[cfg(test)]
mod tests;
