//! The send buffer: a ring of copied bytes followed by chunks that a program has filled itself. Chunks are sent from
//! their own memory, and return to the pool once they are acknowledged. Without chunks it is the ring alone.
//!
//! A segment takes its payload from at most two slices. That holds because the ring does not wrap while there are
//! chunks, and all chunks but the first and the last have at least [`LEAST`] bytes, more than a segment.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::buffer::ByteRing;
use crate::encoding::{Encoded, Reader, Refused, Writer};

/// Minimum size of a chunk that is sent in place; shorter ones are copied.
const LEAST: usize = 64 << 10;

/// Maximum number of free chunks in the pool; further ones are returned to the allocator.
const POOLED: usize = 64;

static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Memory of a fixed size, filled from its beginning.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Everything ever written to it, in earlier uses, too.
    memory: Vec<u8>,
    start: usize,
    end: usize,
}

impl Chunk {
    /// Capacity of a chunk in bytes.
    pub const CAPACITY: usize = 128 << 10;

    /// Creates an empty chunk.
    pub fn new() -> Chunk {
        let pooled = POOL.try_lock().ok().and_then(|mut pool| pool.pop());
        Chunk {
            memory: pooled.unwrap_or_else(|| Vec::with_capacity(Chunk::CAPACITY)),
            start: 0,
            end: 0,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.end]
    }

    /// Bytes that may be added.
    pub fn room(&self) -> usize {
        Chunk::CAPACITY - self.end
    }

    /// Appends as much of `data` as there is room for; returns how much.
    pub fn extend(&mut self, data: &[u8]) -> usize {
        let data = &data[..data.len().min(self.room())];
        let known = data.len().min(self.memory.len() - self.end);
        self.memory[self.end..self.end + known].copy_from_slice(&data[..known]);
        self.memory.extend_from_slice(&data[known..]);
        self.end += data.len();
        data.len()
    }

    /// Sets the length to `length`, at most the capacity; new bytes are zero.
    pub fn resize(&mut self, length: usize) {
        let before = self.end;
        self.resize_unspecified(length);
        if before < self.end {
            self.memory[before..self.end].fill(0);
        }
    }

    /// Sets the length to `length`, at most the capacity. New bytes hold old contents of some chunk of this process:
    /// the caller must write all of them.
    pub fn resize_unspecified(&mut self, length: usize) {
        self.end = (self.start + length).min(Chunk::CAPACITY);
        if self.memory.len() < self.end {
            self.memory.resize(self.end, 0);
        }
    }

    /// Drops `count` bytes at the beginning.
    pub fn drop_front(&mut self, count: usize) {
        self.start += count.min(self.len());
    }

    fn len(&self) -> usize {
        self.end - self.start
    }
}

impl Default for Chunk {
    fn default() -> Chunk {
        Chunk::new()
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        if memory.capacity() == Chunk::CAPACITY
            && let Ok(mut pool) = POOL.try_lock()
            && pool.len() < POOLED
        {
            pool.push(memory);
        }
    }
}

/// How a chunk was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// It is sent from its own memory, except for the first `copied` bytes.
    InPlace { copied: usize },
    /// It was short, and was copied.
    Copied,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct SendQueue {
    ring: ByteRing,
    chunks: VecDeque<Chunk>,
    /// Bytes in the chunks; zero if there are none.
    chunked: usize,
    /// Bytes in ring and chunks.
    len: usize,
}

impl SendQueue {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn span(&self) -> usize {
        self.ring.span() + self.chunked
    }

    #[inline]
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.len += data.len();
        if self.chunked == 0 {
            self.ring.push(data);
        } else {
            self.push_behind(data);
        }
    }

    /// Appends bytes behind the last chunk.
    #[cold]
    fn push_behind(&mut self, mut data: &[u8]) {
        self.chunked += data.len();
        if let Some(last) = self.chunks.back_mut() {
            data = &data[last.extend(data)..];
        }
        while !data.is_empty() {
            let mut chunk = Chunk::new();
            data = &data[chunk.extend(data)..];
            self.chunks.push_back(chunk);
        }
    }

    pub(crate) fn push_chunk(&mut self, mut chunk: Chunk) -> Placed {
        let missing = self.missing();
        if chunk.len() < LEAST + missing {
            self.push(chunk.bytes());
            return Placed::Copied;
        }
        if self.chunked == 0 {
            self.ring.make_contiguous();
        }
        self.len += chunk.len();
        if missing > 0 {
            self.push_behind(&chunk.bytes()[..missing]);
            chunk.start += missing;
        }
        self.chunked += chunk.len();
        self.chunks.push_back(chunk);
        Placed::InPlace { copied: missing }
    }

    /// Bytes that the last chunk lacks to the minimum of one in the middle. It has room for them: a short chunk was
    /// created by copying.
    fn missing(&self) -> usize {
        let is_first = self.ring.len() == 0 && self.chunks.len() == 1;
        match self.chunks.back() {
            Some(last) if !is_first => LEAST.saturating_sub(last.len()),
            _ => 0,
        }
    }

    /// The bytes `offset..offset + len`, at most one segment, as two slices.
    #[inline]
    pub(crate) fn slices(&self, offset: usize, len: usize) -> [&[u8]; 2] {
        if self.chunked == 0 {
            self.ring.slices(offset, len)
        } else {
            self.slices_of_chunks(offset, len)
        }
    }

    #[cold]
    fn slices_of_chunks(&self, offset: usize, len: usize) -> [&[u8]; 2] {
        let [ring, wrapped] = self.ring.slices(0, self.ring.len());
        debug_assert!(wrapped.is_empty());
        let mut found: [&[u8]; 2] = [&[], &[]];
        let (mut skip, mut left, mut count) = (offset, len, 0);
        for piece in std::iter::once(ring).chain(self.chunks.iter().map(Chunk::bytes)) {
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let part = &piece[skip..][..left.min(piece.len() - skip)];
            skip = 0;
            found[count] = part;
            count += 1;
            left -= part.len();
            if left == 0 {
                break;
            }
        }
        found
    }

    /// Drops `count` bytes at the head.
    #[inline]
    pub(crate) fn consume(&mut self, count: usize) {
        if self.chunked > 0 {
            return self.consume_chunks(count);
        }
        self.ring.consume(count);
        self.len = self.ring.len();
    }

    #[cold]
    fn consume_chunks(&mut self, count: usize) {
        let of_ring = count.min(self.ring.len());
        self.ring.consume(of_ring);
        let mut left = (count - of_ring).min(self.chunked);
        self.len -= of_ring + left;
        self.chunked -= left;
        while let Some(first) = self.chunks.front_mut() {
            let part = left.min(first.len());
            first.start += part;
            left -= part;
            if first.len() > 0 {
                break;
            }
            self.chunks.pop_front();
        }
    }

    /// Drops all bytes and releases the memory.
    pub(crate) fn release(&mut self) {
        *self = SendQueue::default();
    }
}

/// Encoded like the ring alone: chunks become ring contents at the next holder.
impl Encoded for SendQueue {
    fn put(&self, out: &mut Writer) {
        if self.chunked == 0 {
            return self.ring.put(out);
        }
        (self.len() as u32).put(out);
        (self.span() as u32).put(out);
        for piece in self.ring.slices(0, self.ring.len()) {
            out.bytes(piece);
        }
        for chunk in &self.chunks {
            out.bytes(chunk.bytes());
        }
    }

    fn take(from: &mut Reader<'_>) -> Result<SendQueue, Refused> {
        let ring = ByteRing::take(from)?;
        Ok(SendQueue {
            len: ring.len(),
            ring,
            ..SendQueue::default()
        })
    }
}

#[cfg(test)]
mod tests;
