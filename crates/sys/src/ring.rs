//! Consumer of a receive ring: a `BPF_MAP_TYPE_RINGBUF` that only the packet filter fills. Returns frames
//! in place and decides when their space is released to the filter.
//!
//! The kernel lays the ring out as one consumer page (written here), one producer page, and the data area
//! mapped twice in a row, so that a record never wraps. A record is a word of length and flags, a word
//! reserved for the kernel, and the data, padded to eight bytes.

use std::ops::Range;
use std::os::fd::AsFd;
use std::slice::from_raw_parts;
use std::sync::atomic::Ordering::{Acquire, Release};

use portolan_proto::filter::RecordHeader;
use rustix::io::Errno;
use zerocopy::FromBytes;

use crate::mapping::{Mapping, page_size};

mod loans;

pub use loans::Loan;
use loans::Loans;
pub(crate) use loans::{FrameBuffer, LARGEST_FRAME};

/// The filter is still writing the record (`BPF_RINGBUF_BUSY_BIT`).
const BUSY: u32 = 1 << 31;
/// The filter discarded the record (`BPF_RINGBUF_DISCARD_BIT`).
const DISCARD: u32 = 1 << 30;
/// Bytes before the data of a record (`BPF_RINGBUF_HDR_SZ`).
const RECORD_PREFIX: u64 = 8;
const HEADER: usize = size_of::<RecordHeader>();

#[derive(Debug, thiserror::Error)]
pub enum MapError {
    #[error("ring size {0} is not a power of two of at least one page")]
    BadSize(usize),
    #[error("cannot map the consumer page: {0}")]
    Consumer(Errno),
    #[error("cannot map the data pages: {0}")]
    Data(Errno),
}

/// A frame in the ring.
#[derive(Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub header: RecordHeader,
    pub frame: &'a [u8],
}

/// The consumer. There must be one per ring: two would release each other's frames.
#[derive(Debug)]
pub struct Ring {
    consumer: Mapping,
    /// Producer page, then the data area twice.
    producer: Mapping,
    size: u64,
    /// Everything before this position has been read.
    position: u64,
    /// The position last published to the kernel.
    published: u64,
    malformed: u64,
    /// Position of the record read last.
    record: u64,
    /// Frames that were read and are still in use; none before the first loan.
    loans: Option<Box<Loans>>,
}

impl Ring {
    /// Maps the ring `fd` with a data area of `size` bytes. Children of `fork` do not inherit the mapping, and leak
    /// their copy.
    pub fn map(fd: impl AsFd, size: usize) -> Result<Ring, MapError> {
        let page = page_size();
        // The bound keeps `2 * size + page` from overflowing.
        if !size.is_power_of_two() || size < page || size > usize::MAX / 8 {
            return Err(MapError::BadSize(size));
        }
        let fd = fd.as_fd();
        let consumer = Mapping::read_write(fd, 0, page).map_err(MapError::Consumer)?;
        let producer = Mapping::read_only(fd, page, page + 2 * size).map_err(MapError::Data)?;
        producer.keep_from_children();
        let position = consumer.u64_at(0).load(Acquire);
        Ok(Ring {
            consumer,
            producer,
            size: size as u64,
            position,
            published: position,
            malformed: 0,
            record: position,
            loans: None,
        })
    }

    /// Returns the next complete frame, if any. May release frames returned by earlier calls, once half
    /// the ring has been read since the last [`Ring::release`].
    #[expect(clippy::should_implement_trait, reason = "lends from the ring")]
    pub fn next(&mut self) -> Option<Record<'_>> {
        if self.position - self.published >= self.size / 2 {
            self.release();
        }
        let (header, start, length) = loop {
            let (offset, word) = self.head()?;
            if word & BUSY != 0 {
                return None;
            }
            let length = word & !DISCARD;
            self.record = self.position;
            self.skip(length);
            if word & DISCARD != 0 {
                continue;
            }
            let start = offset + RECORD_PREFIX as usize;
            match self.header(start, length as usize) {
                Some(header) => break (header, start + HEADER, header.length as usize),
                None => self.malformed += 1,
            }
        };
        let frame = self.bytes(start, length);
        Some(Record { header, frame })
    }

    /// Offset in the producer mapping and first word of the record at `position`.
    fn head(&self) -> Option<(usize, u32)> {
        if self.position >= self.produced() {
            return None;
        }
        let offset = page_size() + (self.position & (self.size - 1)) as usize;
        // Acquire: the filter's data is read after the word that marks it complete.
        Some((offset, self.producer.u32_at(offset).load(Acquire)))
    }

    fn skip(&mut self, length: u32) {
        self.position += (u64::from(length) + RECORD_PREFIX).next_multiple_of(8);
    }

    /// The header of the record with `length` bytes of data at `start`, if the record holds the frame
    /// that the header claims. Copied once, then checked.
    fn header(&self, start: usize, length: usize) -> Option<RecordHeader> {
        if length < HEADER || start + length > self.producer.length() {
            return None;
        }
        let header = RecordHeader::read_from_bytes(self.bytes(start, HEADER)).ok()?;
        (header.length as usize <= length - HEADER).then_some(header)
    }

    /// The bytes of a complete record that has not been released.
    fn bytes(&self, start: usize, length: usize) -> &[u8] {
        let data = self.producer.pointer(start, length);
        // SAFETY: in bounds (`pointer` asserts it), and nobody writes these bytes while the slice
        // lives: the mapping is read-only, the kernel refuses a writable one to everybody, and the
        // filter reuses a record's space only after the consumer position has passed it. Only
        // `publish` stores that position; it takes `&mut self` and so cannot run while the slice is
        // borrowed.
        unsafe { from_raw_parts(data, length) }
    }

    /// Releases the space of every frame read so far to the filter, up to the first that is lent.
    pub fn release(&mut self) {
        let free = match self.loans {
            None => self.position,
            Some(_) => self.unlent(),
        };
        self.publish(free);
    }

    fn publish(&mut self, position: u64) {
        if self.published != position {
            self.published = position;
            self.consumer.u64_at(0).store(position, Release);
        }
    }

    /// Whether frames that were read have not been released. The ring's descriptor is readable then.
    pub fn is_withheld(&self) -> bool {
        self.published != self.position
    }

    /// The position up to which nothing is lent. Copies loans kept for so long that they block half of the ring.
    #[cold]
    fn unlent(&mut self) -> u64 {
        let Some(loans) = &mut self.loans else {
            return self.position;
        };
        let free = loans.reclaim().unwrap_or(self.position);
        if self.position - free < self.size / 2 {
            return free;
        }
        loans.detach();
        loans.reclaim().unwrap_or(self.position)
    }

    /// Whether the frame read next or last may be lent: not if that would withhold more than a quarter of the ring from
    /// the filter.
    pub fn may_lend(&mut self) -> bool {
        let oldest = self.loans.as_mut().and_then(|loans| loans.reclaim());
        oldest.is_none_or(|oldest| self.position - oldest < self.size / 4)
    }

    /// Lends `range` of the frame read last, which stays in place until the loan is dropped. `fd` is the ring that was
    /// mapped. If it cannot be mapped once more for lack of memory, the loan is a copy.
    ///
    /// # Panics
    /// If nothing was read since the last release, or the frame is shorter.
    pub fn lend(&mut self, fd: impl AsFd, range: Range<usize>) -> Loan {
        let start = self.record + RECORD_PREFIX + HEADER as u64;
        let is_there = start + range.end as u64 <= self.position && self.record >= self.published;
        assert!(is_there, "no frame that was read");
        let offset = (start & (self.size - 1)) as usize + range.start;
        let (size, length) = (self.size as usize, range.len());
        let loans = self.loans.get_or_insert_default();
        match loans.lend(fd.as_fd(), size, (self.record, offset, length)) {
            Some(loan) => loan,
            None => Loan::of_copy(self.bytes(page_size() + offset, length)),
        }
    }

    /// Copies what is lent, so that the ring is free of it. Loans stay valid; children of `fork` can then read them,
    /// too.
    pub fn detach_loans(&mut self) {
        if let Some(loans) = &mut self.loans {
            loans.detach();
        }
    }

    /// Everything before it has been read; never decreases.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The filter's position: [`Ring::position`] once everything reserved so far has been read.
    pub fn produced(&self) -> u64 {
        // Acquire: the words of records are read after the position that covers them.
        self.producer.u64_at(0).load(Acquire)
    }

    /// Whether there is nothing to read and nothing being written. False while a record is being
    /// written, so that an owner that checks after it has announced to sleep does not sleep over it.
    pub fn is_empty(&self) -> bool {
        self.head().is_none()
    }

    /// Number of records that did not hold what their header claimed.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
