//! The memory of a capture: a ring of records (see [`portolan_proto::capture`]). The server creates and seals it, one
//! library writes, one command reads. Either may find anything there: positions are checked before they are used, and
//! bytes are copied, never borrowed.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::copy_nonoverlapping;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use portolan_proto::capture::{
    ALIGNMENT, HEADER, PIECE_MAX, RING_MAX, RING_MIN, RecordHeader, size, word,
};
use rustix::fs::{SealFlags, fstat};
use zerocopy::{FromZeros, IntoBytes};

use super::{CreateError, MapError, check_size, create, seal};
use crate::mapping::Mapping;

/// Creates the memory, with a ring of at least `least` bytes within the permitted range. Pages that are never written
/// cost nothing.
pub fn create_capture(least: u32) -> Result<OwnedFd, CreateError> {
    let ring = least.clamp(RING_MIN, RING_MAX).next_power_of_two();
    let fd = create("portolan-capture", size(ring))?;
    seal(&fd, SealFlags::empty())?;
    Ok(fd)
}

/// The mapped memory.
#[derive(Debug)]
struct Ring {
    memory: Mapping,
    /// A power of two.
    size: u64,
}

impl Ring {
    fn map(fd: impl AsFd) -> Result<Ring, MapError> {
        let bytes = usize::try_from(fstat(&fd)?.st_size).map_err(|_| MapError::TooShort)?;
        let ring = u32::try_from(bytes.saturating_sub(HEADER)).map_err(|_| MapError::TooShort)?;
        if !ring.is_power_of_two() || !(RING_MIN..=RING_MAX).contains(&ring) {
            return Err(MapError::TooShort);
        }
        check_size(&fd, size(ring))?;
        let memory = Mapping::read_write(fd.as_fd(), 0, size(ring))?;
        Ok(Ring {
            memory,
            size: ring.into(),
        })
    }

    /// Where `length` bytes at `position` are: in two parts if they continue at the start.
    fn place(&self, position: u64, length: usize) -> (*mut u8, usize, *mut u8) {
        let start = (position & (self.size - 1)) as usize;
        let first = length.min(self.size as usize - start);
        let front = self.memory.pointer(HEADER + start, first);
        let back = self.memory.pointer(HEADER, length - first);
        (front, first, back)
    }

    fn put(&self, position: u64, bytes: &[u8]) {
        let (front, first, back) = self.place(position, bytes.len());
        let (head, rest) = bytes.split_at(first);
        // SAFETY: `place` returns two ranges inside the mapping, of the lengths of `head` and `rest`; the source is
        // private memory and cannot overlap.
        unsafe {
            copy_nonoverlapping(head.as_ptr(), front, head.len());
            copy_nonoverlapping(rest.as_ptr(), back, rest.len());
        }
    }

    fn get(&self, position: u64, out: &mut [u8]) {
        let (front, first, back) = self.place(position, out.len());
        let (head, rest) = out.split_at_mut(first);
        // SAFETY: as in `put`, with the roles exchanged; any bytes are valid for `u8`.
        unsafe {
            copy_nonoverlapping(front.cast_const(), head.as_mut_ptr(), head.len());
            copy_nonoverlapping(back.cast_const(), rest.as_mut_ptr(), rest.len());
        }
    }
}

/// Bytes of a record in the ring.
fn taken_by(captured: u32) -> u64 {
    (size_of::<RecordHeader>() as u64 + u64::from(captured)).next_multiple_of(ALIGNMENT)
}

/// The library's side. It never waits for the reader.
#[derive(Debug)]
pub struct CaptureWriter {
    ring: Ring,
    head: u64,
    lost: u64,
}

impl CaptureWriter {
    pub fn map(fd: impl AsFd) -> Result<CaptureWriter, MapError> {
        Ok(CaptureWriter {
            ring: Ring::map(fd)?,
            head: 0,
            lost: 0,
        })
    }

    /// Writes a record with the first of `bytes`, at most the record's `captured`. Counts it as lost if there is no room.
    pub fn write(&mut self, header: &RecordHeader, bytes: &[u8]) {
        let captured = (bytes.len() as u32).min(header.captured).min(PIECE_MAX);
        let header = RecordHeader {
            captured,
            ..*header
        };
        let tail = self.ring.memory.u64_at(word::TAIL).load(Acquire);
        // A reader that claims to be ahead gets nothing.
        let used = self.head.checked_sub(tail).unwrap_or(u64::MAX);
        let needed = taken_by(captured);
        if used.saturating_add(needed) > self.ring.size {
            self.lost += 1;
            self.ring
                .memory
                .u64_at(word::LOST)
                .store(self.lost, Relaxed);
            return;
        }
        self.ring.put(self.head, header.as_bytes());
        let behind = self.head + size_of::<RecordHeader>() as u64;
        self.ring.put(behind, &bytes[..captured as usize]);
        self.head += needed;
        self.ring
            .memory
            .u64_at(word::HEAD)
            .store(self.head, Release);
    }
}

/// What the writer claims is impossible: nothing more can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed record")]
pub struct BadRecord;

/// The command's side.
#[derive(Debug)]
pub struct CaptureReader {
    ring: Ring,
    tail: u64,
    head: u64,
}

impl CaptureReader {
    pub fn map(fd: impl AsFd) -> Result<CaptureReader, MapError> {
        Ok(CaptureReader {
            ring: Ring::map(fd)?,
            tail: 0,
            head: 0,
        })
    }

    /// Finds what was written until now.
    pub fn look(&mut self) {
        self.head = self.ring.memory.u64_at(word::HEAD).load(Acquire);
    }

    /// Takes the next record of those that were found.
    pub fn take(&mut self) -> Result<Option<(RecordHeader, Vec<u8>)>, BadRecord> {
        let available = self.head.wrapping_sub(self.tail);
        if available == 0 {
            return Ok(None);
        }
        let prefix = size_of::<RecordHeader>() as u64;
        if available > self.ring.size || available < prefix {
            return Err(BadRecord);
        }
        let mut header = RecordHeader::new_zeroed();
        self.ring.get(self.tail, header.as_mut_bytes());
        let needed = taken_by(header.captured);
        if header.length > PIECE_MAX || header.captured > header.length || needed > available {
            return Err(BadRecord);
        }
        let mut bytes = vec![0; header.captured as usize];
        self.ring.get(self.tail + prefix, &mut bytes);
        self.tail += needed;
        self.ring
            .memory
            .u64_at(word::TAIL)
            .store(self.tail, Release);
        Ok(Some((header, bytes)))
    }

    /// How many records found no room, as the writer says.
    pub fn lost(&self) -> u64 {
        self.ring.memory.u64_at(word::LOST).load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (CaptureWriter, CaptureReader, OwnedFd) {
        let fd = create_capture(1).unwrap();
        let writer = CaptureWriter::map(&fd).unwrap();
        (writer, CaptureReader::map(&fd).unwrap(), fd)
    }

    fn next(reader: &mut CaptureReader) -> Result<Option<(RecordHeader, Vec<u8>)>, BadRecord> {
        reader.look();
        reader.take()
    }

    fn record(position: u64, length: usize) -> RecordHeader {
        RecordHeader {
            session: 7,
            position,
            at: 1,
            length: length as u32,
            captured: length as u32,
            ..RecordHeader::default()
        }
    }

    #[test]
    fn records_cross_also_over_the_end_of_the_ring() {
        let (mut writer, mut reader, _) = ends();
        for position in 0..3000 {
            let bytes: Vec<u8> = (0..position % 1500).map(|byte| byte as u8).collect();
            let header = record(position, bytes.len());
            writer.write(&header, &bytes);
            assert_eq!(next(&mut reader), Ok(Some((header, bytes))), "{position}");
            assert_eq!(next(&mut reader), Ok(None));
        }
        assert_eq!(reader.lost(), 0);
    }

    #[test]
    fn only_what_is_to_be_captured_is_copied() {
        let (mut writer, mut reader, _) = ends();
        let header = RecordHeader {
            captured: 3,
            ..record(0, 9)
        };
        writer.write(&header, b"123456789");
        assert_eq!(next(&mut reader), Ok(Some((header, b"123".to_vec()))));
    }

    #[test]
    fn what_finds_no_room_is_counted_and_harms_nothing_before_it() {
        let (mut writer, mut reader, _) = ends();
        let bytes = [9; 10_000];
        let written = 100;
        for position in 0..written {
            writer.write(&record(position, bytes.len()), &bytes);
        }
        let mut read = 0;
        while let Some((header, copy)) = next(&mut reader).unwrap() {
            assert_eq!((header.position, copy.len()), (read, bytes.len()));
            read += 1;
        }
        assert!(read > 20, "{read}");
        assert_eq!(reader.lost(), written - read);
        writer.write(&record(1000, 0), &[]);
        assert_eq!(next(&mut reader).unwrap().unwrap().0.position, 1000);
    }

    #[test]
    fn a_reader_that_lies_about_its_progress_gets_nothing_and_stops_nobody() {
        let (mut writer, _, fd) = ends();
        let liar = Ring::map(&fd).unwrap();
        for tail in [1, u64::MAX, 1 << 40] {
            liar.memory.u64_at(word::TAIL).store(tail, Relaxed);
            writer.write(&record(0, 4), b"data");
        }
        assert_eq!(liar.memory.u64_at(word::LOST).load(Relaxed), 3);
    }

    #[test]
    fn no_words_and_records_make_a_reader_panic_or_leave_the_ring() {
        let fd = create_capture(1).unwrap();
        let hostile = Ring::map(&fd).unwrap();
        for head in [1, 39, 40, 48, 1 << 18, (1 << 18) + 8, u64::MAX] {
            for captured in [0, 1, 8, PIECE_MAX, PIECE_MAX + 1, u32::MAX] {
                for length in [0, 8, u32::MAX] {
                    let header = RecordHeader {
                        captured,
                        length,
                        ..RecordHeader::default()
                    };
                    hostile.put(0, header.as_bytes());
                    hostile.memory.u64_at(word::HEAD).store(head, Relaxed);
                    let mut reader = CaptureReader::map(&fd).unwrap();
                    if let Ok(Some((_, bytes))) = next(&mut reader) {
                        assert!(bytes.len() as u64 <= head, "{head} {captured} {length}");
                    }
                }
            }
        }
    }

    #[test]
    fn memory_of_another_shape_is_refused() {
        for bytes in [0, HEADER, size(RING_MIN) - 1, size(RING_MIN) + 4096] {
            let fd = create("test", bytes).unwrap();
            seal(&fd, SealFlags::empty()).unwrap();
            assert!(CaptureReader::map(&fd).is_err(), "{bytes}");
        }
    }
}
