//! The metastate memfd: one writer, many readers, a sequence lock. Both sides access the memory
//! through atomics only, so a reader that loses the race reads garbage, detects it, and retries.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

use portolan_proto::metastate::{HEADER, Metastate, SIZE};
use portolan_proto::{decode, encode};
use rustix::fs::SealFlags;

use super::{CreateError, MapError, check_size, create, seal};
use crate::mapping::Mapping;

/// Offsets of the two header words.
const GENERATION: usize = 0;
const LENGTH: usize = 4;

const WORD: usize = size_of::<u64>();

/// How often a reader retries while the writer is active.
const ATTEMPTS: usize = 1000;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    #[error("the metastate has {0} bytes, more than its memory")]
    TooLarge(usize),
}

/// The server's side.
#[derive(Debug)]
pub struct MetastateWriter {
    fd: OwnedFd,
    memory: Mapping,
}

impl MetastateWriter {
    /// Creates the memory, empty until the first `publish`.
    pub fn create() -> Result<MetastateWriter, CreateError> {
        let fd = create("portolan-metastate", SIZE)?;
        // Mapped before the seal: after it nobody else can map it writable.
        let memory = Mapping::read_write(fd.as_fd(), 0, SIZE)?;
        seal(&fd, SealFlags::FUTURE_WRITE)?;
        Ok(MetastateWriter { fd, memory })
    }

    /// Replaces the published metastate.
    pub fn publish(&mut self, metastate: &Metastate) -> Result<(), PublishError> {
        let encoded = encode(metastate);
        if encoded.len() > SIZE - HEADER {
            return Err(PublishError::TooLarge(encoded.len()));
        }
        let generation = self.memory.u32_at(GENERATION);
        let before = generation.load(Relaxed);
        generation.store(before.wrapping_add(1), Relaxed);
        // The odd generation is visible before any byte changes.
        fence(Release);
        self.write(&encoded);
        generation.store(before.wrapping_add(2), Release);
        Ok(())
    }

    fn write(&self, encoded: &[u8]) {
        self.memory
            .u32_at(LENGTH)
            .store(encoded.len() as u32, Relaxed);
        for (index, chunk) in encoded.chunks(WORD).enumerate() {
            let mut word = [0; WORD];
            word[..chunk.len()].copy_from_slice(chunk);
            self.memory
                .u64_at(HEADER + index * WORD)
                .store(u64::from_ne_bytes(word), Relaxed);
        }
    }
}

/// To be passed to others, who can only read it.
impl AsFd for MetastateWriter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The library's side.
#[derive(Debug)]
pub struct MetastateReader {
    memory: Mapping,
}

impl MetastateReader {
    pub fn map(fd: impl AsFd) -> Result<MetastateReader, MapError> {
        check_size(&fd, SIZE)?;
        let memory = Mapping::read_only(fd.as_fd(), 0, SIZE)?;
        Ok(MetastateReader { memory })
    }

    /// Changes whenever the metastate does. Read it before `read`: if it has changed since, the data
    /// may be outdated.
    pub fn generation(&self) -> u32 {
        self.memory.u32_at(GENERATION).load(Acquire)
    }

    /// Returns a consistent copy; none if nothing was published yet, or the writer died while publishing.
    pub fn read(&self) -> Option<Metastate> {
        for _ in 0..ATTEMPTS {
            let before = self.generation();
            let encoded = self.copy()?;
            // The bytes are read before the generation is checked again.
            fence(Acquire);
            let settled = before.is_multiple_of(2);
            if settled && self.memory.u32_at(GENERATION).load(Relaxed) == before {
                return (before != 0).then(|| decode(&encoded).ok()).flatten();
            }
            std::hint::spin_loop();
        }
        None
    }

    fn copy(&self) -> Option<Vec<u8>> {
        let length = self.memory.u32_at(LENGTH).load(Relaxed) as usize;
        if length > SIZE - HEADER {
            return None;
        }
        let mut encoded = Vec::with_capacity(length.next_multiple_of(WORD));
        for index in 0..length.div_ceil(WORD) {
            let word = self.memory.u64_at(HEADER + index * WORD).load(Relaxed);
            encoded.extend_from_slice(&word.to_ne_bytes());
        }
        encoded.truncate(length);
        Some(encoded)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use portolan_proto::metastate::Interface;
    use portolan_types::MacAddr;
    use rustix::io::Errno;

    use super::*;
    use crate::testing::memory;

    /// Metastate of `count` interfaces whose fields all contain `count`.
    fn sample(count: u32) -> Metastate {
        let interface = Interface {
            index: count,
            name: format!("eth{count}"),
            mac: MacAddr::default(),
            mtu: count,
            up: true,
            managed: false,
        };
        Metastate {
            interfaces: vec![interface; count as usize],
            ..Metastate::default()
        }
    }

    #[test]
    fn a_reader_sees_what_was_published_last() {
        let mut writer = MetastateWriter::create().unwrap();
        let reader = MetastateReader::map(&writer).unwrap();
        assert_eq!(reader.read(), None);
        let empty = reader.generation();
        writer.publish(&sample(3)).unwrap();
        assert_ne!(reader.generation(), empty);
        assert_eq!(reader.read(), Some(sample(3)));
        writer.publish(&sample(1)).unwrap();
        assert_eq!(reader.read(), Some(sample(1)));
    }

    #[test]
    fn a_reader_never_sees_half_an_update() {
        let mut writer = MetastateWriter::create().unwrap();
        writer.publish(&sample(1)).unwrap();
        let reader = MetastateReader::map(&writer).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..2000 {
                    writer.publish(&sample(1 + round % 40)).unwrap();
                }
                done.store(true, Release);
            });
            while !done.load(Acquire) {
                if let Some(read) = reader.read() {
                    assert_eq!(read, sample(read.interfaces.len() as u32));
                }
            }
        });
    }

    #[test]
    fn what_does_not_fit_is_refused_and_the_old_stays() {
        let mut writer = MetastateWriter::create().unwrap();
        writer.publish(&sample(2)).unwrap();
        let huge = sample(SIZE as u32 / 8);
        assert!(matches!(
            writer.publish(&huge),
            Err(PublishError::TooLarge(_))
        ));
        let reader = MetastateReader::map(&writer).unwrap();
        assert_eq!(reader.read(), Some(sample(2)));
    }

    #[test]
    fn the_holder_of_the_descriptor_cannot_write() {
        let writer = MetastateWriter::create().unwrap();
        let mapped = Mapping::read_write(writer.as_fd(), 0, SIZE);
        assert_eq!(mapped.unwrap_err(), Errno::PERM);
        assert_eq!(
            rustix::io::pwrite(&writer, &[1], 0).unwrap_err(),
            Errno::PERM
        );
    }

    #[test]
    fn memory_that_can_shrink_is_refused() {
        let fd = memory(SIZE);
        assert!(matches!(MetastateReader::map(&fd), Err(MapError::Unsealed)));
    }

    #[test]
    fn rubbish_reads_as_nothing() {
        let fd = create("test", SIZE).unwrap();
        let writer = Mapping::read_write(fd.as_fd(), 0, SIZE).unwrap();
        seal(&fd, SealFlags::empty()).unwrap();
        let reader = MetastateReader::map(&fd).unwrap();
        writer.u32_at(GENERATION).store(2, Relaxed);
        writer.u32_at(LENGTH).store(u32::MAX, Relaxed);
        assert_eq!(reader.read(), None);
        writer.u32_at(LENGTH).store(100, Relaxed);
        assert_eq!(reader.read(), None);
        writer.u32_at(GENERATION).store(3, Relaxed);
        assert_eq!(reader.read(), None);
    }
}
