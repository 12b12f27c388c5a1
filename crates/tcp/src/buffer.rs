//! A byte ring that grows by doubling. It owns bytes, knows no sequence numbers, and may hold bytes
//! beyond its readable part (data that arrived out of order).
//!
//! A stream cycles through the whole ring. In a ring that was once large, every byte would touch new memory
//! and miss the cache, so the circle (the part of the ring in use) shrinks with its contents; the memory
//! stays allocated.

use core::fmt;
use core::ops::RangeInclusive;
use std::sync::Mutex;

use crate::encoding::{Encoded, Reader, Refused, Writer};

const SMALLEST: usize = 2048;
/// Rings of at least `LARGE` bytes reserve memory for a circle `SPARE` times as large.
const LARGE: usize = 256 << 10;
const SPARE: usize = 4;

/// The memory of the last large ring that was dropped, kept for the next one. A session that migrates back and forth
/// needs it after each migration; from the kernel it would come page by page, each one zeroed.
static LEFT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
/// Larger memory is returned to the allocator.
const LEFT_MOST: usize = 8 << 20;
/// Upper bound of any buffer; rejects hostile offsets before they cause allocations.
pub(crate) const LARGEST: usize = 1 << 26;

/// The bytes of one direction of a stream.
#[derive(Clone, Default)]
pub struct ByteRing {
    /// Holds at least the bytes written; memory behind it stays untouched until needed.
    store: Vec<u8>,
    /// The size at which offsets wrap: zero or a power of two, at most the memory's capacity.
    circle: usize,
    head: usize,
    /// Readable bytes from `head`.
    len: usize,
    /// Bytes from `head` up to the last one ever written; at least `len`.
    span: usize,
}

impl ByteRing {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn span(&self) -> usize {
        self.span
    }

    /// Appends to the readable part.
    pub fn push(&mut self, data: &[u8]) {
        self.write_at(self.len, data);
        self.len += data.len();
    }

    /// Writes `data` so that it starts `offset` bytes after the head; does not make it readable.
    pub(crate) fn write_at(&mut self, offset: usize, data: &[u8]) {
        let end = offset + data.len();
        self.reserve(end);
        self.fill(offset);
        let start = self.index(offset);
        let (first, second) = data.split_at(data.len().min(self.circle - start));
        self.put(start, first);
        self.put(0, second);
        self.span = self.span.max(end);
    }

    /// Extends the store to cover the first `count` bytes from the head.
    fn fill(&mut self, count: usize) {
        let end = self.circle.min(self.head + count);
        if self.store.len() < end {
            self.store.resize(end, 0);
        }
    }

    /// Writes at an index inside the store or at its end.
    fn put(&mut self, at: usize, data: &[u8]) {
        let known = data.len().min(self.store.len() - at);
        self.store[at..at + known].copy_from_slice(&data[..known]);
        self.store.extend_from_slice(&data[known..]);
    }

    /// Makes the next `count` bytes readable, which were written behind the readable part.
    pub(crate) fn extend(&mut self, count: usize) {
        self.len += count;
        if self.len > self.span {
            // Reached only with a capsule that claims more bytes than it contains.
            self.reserve(self.len);
            self.fill(self.len);
            self.span = self.len;
        }
    }

    /// The readable bytes `offset..offset + len`, as two slices.
    pub fn slices(&self, offset: usize, len: usize) -> [&[u8]; 2] {
        debug_assert!(offset + len <= self.span);
        if len == 0 {
            return [&[], &[]];
        }
        let start = self.index(offset);
        let first = len.min(self.circle - start);
        [
            &self.store[start..start + first],
            &self.store[..len - first],
        ]
    }

    /// The byte at `offset`, if one was written there.
    pub(crate) fn byte(&self, offset: usize) -> Option<u8> {
        let is_here = offset < self.span;
        is_here.then(|| self.store[self.index(offset)])
    }

    /// Copies readable bytes, starting at `offset`; returns their number.
    pub(crate) fn copy_out(&self, offset: usize, out: &mut [u8]) -> usize {
        let count = out.len().min(self.len.saturating_sub(offset));
        let [a, b] = self.slices(offset.min(self.len), count);
        out[..a.len()].copy_from_slice(a);
        out[a.len()..count].copy_from_slice(b);
        count
    }

    /// Drops the first `count` readable bytes.
    pub fn consume(&mut self, count: usize) {
        let count = count.min(self.len);
        self.len -= count;
        self.span -= count;
        self.head = if self.span == 0 { 0 } else { self.index(count) };
        self.narrow();
    }

    /// Puts bytes back in front of the head.
    pub(crate) fn unread(&mut self, data: &[u8]) {
        self.reserve(self.span + data.len());
        self.head = self.index(self.circle - data.len());
        self.len += data.len();
        self.span += data.len();
        self.write_at(0, data);
    }

    /// Makes the written bytes contiguous, until the next write.
    pub(crate) fn make_contiguous(&mut self) {
        if self.head + self.span > self.circle {
            self.grow(self.circle);
        }
    }

    fn index(&self, offset: usize) -> usize {
        (self.head + offset) & (self.circle.wrapping_sub(1))
    }

    fn reserve(&mut self, needed: usize) {
        if needed > self.circle {
            self.widen(circle_for(needed));
        }
    }

    /// Halves the circle if all bytes are in its first half and fill at most half of that.
    fn narrow(&mut self) {
        let half = self.circle / 2;
        if half >= SMALLEST && self.span <= half / 2 && self.head + self.span <= half {
            self.circle = half;
        }
    }

    #[cold]
    fn widen(&mut self, circle: usize) {
        if circle > self.store.capacity() {
            self.grow(circle);
        } else {
            self.unwrap();
        }
        self.circle = circle;
    }

    /// Copies the wrapped bytes behind the circle, which the caller then enlarges.
    fn unwrap(&mut self) {
        let wrapped = (self.head + self.span).saturating_sub(self.circle);
        if wrapped > 0 {
            let end = self.store.len().max(self.circle + wrapped);
            self.store.resize(end, 0);
            self.store.copy_within(..wrapped, self.circle);
        }
    }

    /// Allocates memory for a larger circle. Large rings get room to grow in place: untouched pages cost nothing.
    fn grow(&mut self, circle: usize) {
        let mut store = match circle {
            ..LARGE => Vec::with_capacity(circle),
            _ => memory(circle),
        };
        let [a, b] = self.slices(0, self.span);
        store.extend_from_slice(a);
        store.extend_from_slice(b);
        self.store = store;
        self.head = 0;
    }
}

impl Drop for ByteRing {
    fn drop(&mut self) {
        if (LARGE..=LEFT_MOST).contains(&self.store.capacity()) {
            leave(std::mem::take(&mut self.store));
        }
    }
}

/// The smallest circle that takes so many bytes.
fn circle_for(bytes: usize) -> usize {
    bytes.next_power_of_two().max(SMALLEST)
}

/// Memory for a large ring that grows.
fn memory(least: usize) -> Vec<u8> {
    let room = || Vec::with_capacity((least * SPARE).min(LARGEST.max(least)));
    left_memory(least..=usize::MAX).unwrap_or_else(room)
}

/// Takes the memory kept for reuse, if it has such a size. Does not wait for it if another thread has it locked.
fn left_memory(sizes: RangeInclusive<usize>) -> Option<Vec<u8>> {
    let mut left = LEFT.try_lock().ok()?;
    let fits = sizes.contains(&left.capacity());
    fits.then(|| std::mem::take(&mut *left))
}

fn leave(mut store: Vec<u8>) {
    store.clear();
    if let Ok(mut left) = LEFT.try_lock()
        && left.capacity() < store.capacity()
    {
        std::mem::swap(&mut *left, &mut store);
    }
}

impl fmt::Debug for ByteRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ByteRing({} readable of {})", self.len, self.span)
    }
}

/// The readable length, then the bytes of the used part.
impl Encoded for ByteRing {
    fn put(&self, out: &mut Writer) {
        (self.len as u32).put(out);
        (self.span as u32).put(out);
        for piece in self.slices(0, self.span) {
            out.bytes(piece);
        }
    }

    fn take(from: &mut Reader<'_>) -> Result<ByteRing, Refused> {
        let len = u32::take(from)? as usize;
        let span = u32::take(from)? as usize;
        if len > span || span > LARGEST {
            return Err(Refused::Value(""));
        }
        let bytes = from.bytes(span)?;
        let circle = if span > 0 { circle_for(span) } else { 0 };
        // Without room to grow: whoever holds sessions of others is charged for their bytes, and most of these only drain.
        let exact = || Vec::with_capacity(circle);
        let mut store = match circle {
            ..LARGE => exact(),
            _ => left_memory(circle..=2 * circle).unwrap_or_else(exact),
        };
        store.extend_from_slice(bytes);
        Ok(ByteRing {
            store,
            circle,
            head: 0,
            len,
            span,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(parts: &[&[u8]]) -> ByteRing {
        let mut ring = ByteRing::default();
        for part in parts {
            ring.push(part);
        }
        ring
    }

    #[test]
    fn bytes_come_out_in_order_across_the_wrap_and_while_it_grows() {
        let mut ring = ByteRing::default();
        let (mut next_in, mut next_out) = (0u8, 0u8);
        for step in 0..200 {
            let data: Vec<u8> = (0..step * 7 % 900)
                .map(|i| next_in.wrapping_add(i as u8))
                .collect();
            next_in = next_in.wrapping_add(data.len() as u8);
            ring.push(&data);
            let mut out = vec![0; step * 5 % 800];
            let count = ring.copy_out(0, &mut out);
            ring.consume(count);
            for byte in &out[..count] {
                assert_eq!(*byte, next_out);
                next_out = next_out.wrapping_add(1);
            }
        }
        assert!(ring.len() > SMALLEST);
    }

    #[test]
    fn a_ring_that_holds_little_goes_round_in_little_memory() {
        let mut ring = ring(&[&[0; 1 << 20]]);
        ring.consume((1 << 20) - 100);
        let mut sent = 0u32;
        for _ in 0..3 << 10 {
            ring.push(&[7; 1000]);
            ring.consume(1000);
            sent += 1000;
        }
        assert!(sent > 2 << 20);
        assert_eq!((ring.circle, ring.store.len()), (SMALLEST, 1 << 20));
    }

    #[test]
    fn a_ring_from_a_capsule_takes_no_more_memory_than_its_bytes_need() {
        for bytes in [0, 1, 3000, LARGE - 1, 1 << 20] {
            let mut capsule = Writer::new(0);
            ring(&[&vec![7; bytes]]).put(&mut capsule);
            let capsule = capsule.finish();
            let copy = ByteRing::take(&mut Reader::new(&capsule).unwrap()).unwrap();
            let most = 2 * bytes.max(SMALLEST).next_power_of_two();
            assert!(copy.store.capacity() <= most, "{bytes}");
            assert_eq!((copy.len(), copy.span()), (bytes, bytes));
        }
    }

    #[test]
    fn bytes_are_the_same_in_a_circle_that_narrows_and_widens() {
        let mut ring = ByteRing::default();
        let (mut next_in, mut next_out) = (0u32, 0u32);
        let mut circles = 0;
        for step in 0..4000usize {
            let before = ring.circle;
            // Fills and drains alternately, out of step with the sizes.
            let (taken, given) = if step / 97 % 2 == 0 {
                (911, 307)
            } else {
                (293, 1201)
            };
            let data: Vec<u8> = (0..taken).map(|i| (next_in + i) as u8).collect();
            next_in += taken;
            ring.push(&data);
            let mut out = vec![0; given];
            let count = ring.copy_out(0, &mut out);
            ring.consume(count);
            for byte in &out[..count] {
                assert_eq!(*byte, next_out as u8);
                next_out += 1;
            }
            circles += u32::from(ring.circle != before);
        }
        assert!(circles > 100, "{circles}");
    }

    #[test]
    fn the_next_ring_gets_the_memory_of_the_last_and_nothing_that_was_in_it() {
        drop(ring(&[&[7; 2 << 20]]));
        let mut next = ByteRing::default();
        next.write_at(300 << 10, b"x");
        assert_eq!(next.byte(299 << 10), Some(0));
        next.extend((300 << 10) + 1);
        let mut out = vec![1; next.len()];
        next.copy_out(0, &mut out);
        assert!(out.ends_with(b"\0x") && out.iter().all(|byte| *byte != 7));
    }

    #[test]
    fn a_ring_is_what_a_plain_list_of_bytes_would_be() {
        let mut ring = ByteRing::default();
        // The expected contents from the head on; bytes never written are unknown.
        let mut list: Vec<Option<u8>> = Vec::new();
        let mut chance = 0x9e37_79b9_u32;
        let mut below = |limit: usize| {
            // Marsaglia's xorshift.
            chance ^= chance << 13;
            chance ^= chance >> 17;
            chance ^= chance << 5;
            chance as usize % limit
        };
        for step in 0..20_000 {
            let data = vec![step as u8; below(900)];
            match below(8) {
                0..3 => {
                    ring.push(&data);
                    put(&mut list, ring.len() - data.len(), &data);
                }
                3 => {
                    let offset = ring.len() + below(5000);
                    ring.write_at(offset, &data);
                    put(&mut list, offset, &data);
                }
                4 => {
                    let gap = list[ring.len()..].iter().position(Option::is_none);
                    ring.extend(gap.unwrap_or(list.len() - ring.len()));
                }
                5 => {
                    ring.unread(&data);
                    list.splice(..0, data.iter().copied().map(Some));
                }
                _ => {
                    let count = below(3000).min(ring.len());
                    ring.consume(count);
                    list.drain(..count);
                }
            }
            assert_eq!(ring.span(), list.len());
            let mut out = vec![0; ring.len()];
            assert_eq!(ring.copy_out(0, &mut out), out.len());
            let is_same = |(byte, known): (u8, Option<u8>)| known == Some(byte);
            assert!(out.into_iter().zip(list.iter().copied()).all(is_same));
            for (offset, known) in list.iter().enumerate().skip(ring.len()) {
                assert!(known.is_none() || ring.byte(offset) == *known);
            }
        }
    }

    fn put(list: &mut Vec<Option<u8>>, offset: usize, data: &[u8]) {
        let end = list.len().max(offset + data.len());
        list.resize(end, None);
        for (place, byte) in list[offset..].iter_mut().zip(data) {
            *place = Some(*byte);
        }
    }

    #[test]
    fn bytes_beyond_the_readable_part_wait_to_be_made_readable() {
        let mut ring = ring(&[b"ab"]);
        ring.write_at(4, b"ef");
        assert_eq!((ring.len(), ring.span()), (2, 6));
        ring.write_at(2, b"cd");
        ring.extend(4);
        let mut out = [0; 8];
        assert_eq!(ring.copy_out(1, &mut out), 5);
        assert_eq!(&out[..5], b"bcdef");
    }

    #[test]
    fn bytes_that_are_put_back_come_first_again() {
        let mut ring = ring(&[b"abcdef"]);
        ring.write_at(8, b"ij");
        ring.consume(4);
        ring.unread(b"cd");
        ring.unread(&[b'.'; 3000]);
        assert_eq!((ring.len(), ring.span()), (3004, 3008));
        ring.consume(3000);
        ring.write_at(4, b"gh");
        ring.extend(4);
        let mut out = [0; 8];
        assert_eq!(ring.copy_out(0, &mut out), 8);
        assert_eq!(&out, b"cdefghij");
    }

    #[test]
    fn consuming_keeps_what_arrived_out_of_order() {
        let mut ring = ring(&[b"ab"]);
        ring.write_at(4, b"ef");
        ring.consume(2);
        ring.write_at(0, b"cd");
        ring.extend(4);
        let mut out = [0; 4];
        assert_eq!(ring.copy_out(0, &mut out), 4);
        assert_eq!(&out, b"cdef");
    }
}
