//! Frames that stay in the ring while in use.
//!
//! The filter reuses the ring's space in order, so the oldest loan blocks everything read after it. A loan that is kept
//! for long is therefore *detached*: its pages are replaced by a private copy at the same address, while readers may
//! read them, and the ring continues. Loans have their own mapping for this; after a detachment the next ones get a new
//! one.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::BorrowedFd;
use std::slice::from_raw_parts;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use crate::mapping::{Mapping, page_size};

/// Bytes of a received frame, which do not change while this exists.
#[derive(Debug)]
pub struct Loan(Content);

#[derive(Debug)]
enum Content {
    InRing(Arc<Lent>),
    /// In the buffer that the tap was read into.
    InBuffer(FrameBuffer, Range<usize>),
    Copied(Box<[u8]>),
}

/// Size of the largest frame received by the tap, including its virtio-net header.
pub(crate) const LARGEST_FRAME: usize = 66 * 1024;

/// Maximum number of free buffers in the pool; further ones are returned to the allocator.
const POOLED: usize = 32;

static POOL: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// A buffer for a frame read from the tap.
#[derive(Debug)]
pub(crate) struct FrameBuffer(Box<[u8]>);

impl FrameBuffer {
    pub(crate) fn new() -> FrameBuffer {
        let pooled = POOL.try_lock().ok().and_then(|mut pool| pool.pop());
        FrameBuffer(pooled.unwrap_or_else(|| vec![0; LARGEST_FRAME].into_boxed_slice()))
    }
}

impl Deref for FrameBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for FrameBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for FrameBuffer {
    fn drop(&mut self) {
        if let Ok(mut pool) = POOL.try_lock()
            && pool.len() < POOLED
        {
            pool.push(std::mem::take(&mut self.0));
        }
    }
}

#[derive(Debug)]
struct Lent {
    memory: Arc<Mapping>,
    offset: usize,
    length: usize,
}

#[derive(Debug, Default)]
pub(super) struct Loans {
    /// Producer page, then the data area twice; none before the first loan and after a detachment.
    memory: Option<Arc<Mapping>>,
    /// The loans in the order of the ring, each with the position of its record.
    out: VecDeque<(u64, Arc<Lent>)>,
}

impl Loan {
    pub(super) fn of_copy(bytes: &[u8]) -> Loan {
        Loan(Content::Copied(bytes.into()))
    }

    /// A loan of `range` of a buffer, which it takes over.
    pub(crate) fn of_buffer(buffer: FrameBuffer, range: Range<usize>) -> Loan {
        assert!(range.end <= buffer.len(), "outside buffer");
        Loan(Content::InBuffer(buffer, range))
    }

    /// Whether the bytes lie where the kernel put them, in the ring or in the tap's buffer.
    pub fn is_in_place(&self) -> bool {
        !matches!(self.0, Content::Copied(_))
    }
}

impl Deref for Loan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let lent = match &self.0 {
            Content::InRing(lent) => lent,
            Content::InBuffer(buffer, range) => return &buffer[range.clone()],
            Content::Copied(bytes) => return bytes,
        };
        let data = lent.memory.pointer(lent.offset, lent.length);
        // SAFETY: in bounds (`pointer` asserts it), valid as long as `self`, and nobody writes these bytes meanwhile:
        // the mapping is read-only, the kernel refuses a writable one to everybody, and the filter reuses a record's
        // space only after the consumer position has passed it. `Ring::release` keeps that position before the record
        // until this
        // `Arc` is the only one, or the pages are a private copy with the same bytes.
        unsafe { from_raw_parts(data, lent.length) }
    }
}

impl Loans {
    /// Discards loans that were returned. Returns the position of the oldest remaining one.
    pub(super) fn reclaim(&mut self) -> Option<u64> {
        while let Some((start, lent)) = self.out.front_mut() {
            // Seeing the last reference is ordered after all reads by former holders.
            if Arc::get_mut(lent).is_none() {
                return Some(*start);
            }
            self.out.pop_front();
        }
        None
    }

    /// Lends bytes of the data area that belong to the record at `start`.
    pub(super) fn lend(
        &mut self,
        fd: BorrowedFd<'_>,
        size: usize,
        (start, offset, length): (u64, usize, usize),
    ) -> Option<Loan> {
        let memory = match &self.memory {
            Some(memory) => Arc::clone(memory),
            None => {
                let page = page_size();
                let memory = Mapping::read_only(fd, page, page + 2 * size).ok()?;
                memory.keep_from_children();
                Arc::clone(self.memory.insert(Arc::new(memory)))
            }
        };
        let lent = Arc::new(Lent {
            memory,
            offset: page_size() + offset,
            length,
        });
        self.out.push_back((start, Arc::clone(&lent)));
        Some(Loan(Content::InRing(lent)))
    }

    /// Replaces what is still in use by copies. Without memory for that it stays lent.
    pub(super) fn detach(&mut self) {
        self.out
            .retain_mut(|(_, lent)| Arc::get_mut(lent).is_none());
        if self.out.is_empty() {
            return;
        }
        // Replaced pages no longer show the ring: the next loans need a new mapping.
        self.memory = None;
        let pages = |lent: &Lent| {
            let page = page_size();
            lent.offset / page * page..(lent.offset + lent.length).next_multiple_of(page)
        };
        while let Some((_, first)) = self.out.front() {
            let memory = Arc::clone(&first.memory);
            let mut run = pages(first);
            let count = run_of(&self.out, &memory, &mut run, pages);
            if replace(&memory, &run).is_err() {
                return;
            }
            self.out.drain(..count);
        }
    }
}

/// Returns how many of the first loans lie in adjoining pages; extends `run` to cover them.
fn run_of(
    out: &VecDeque<(u64, Arc<Lent>)>,
    memory: &Arc<Mapping>,
    run: &mut Range<usize>,
    pages: impl Fn(&Lent) -> Range<usize>,
) -> usize {
    let mut count = 0;
    for (_, lent) in out {
        let next = pages(lent);
        let joins =
            Arc::ptr_eq(&lent.memory, memory) && (run.start..=run.end).contains(&next.start);
        if !joins {
            break;
        }
        run.end = run.end.max(next.end);
        count += 1;
    }
    count
}

fn replace(memory: &Mapping, run: &Range<usize>) -> Result<(), Errno> {
    memory.make_private(run.start, run.len())
}

#[cfg(test)]
mod tests;
