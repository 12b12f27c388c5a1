//! A ring over plain shared memory, and the kernel's side of it, for tests.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use super::Ring;
use crate::mapping::{Mapping, page_size};
use crate::testing::memory;

pub(crate) const SIZE: usize = 8192;

/// The kernel's side. The second copy of the data area is real memory here, so `put` writes both.
pub(crate) struct Producer {
    pub(crate) memory: Mapping,
    pub(crate) position: u64,
}

pub(crate) fn ring() -> (Producer, Ring) {
    let fd: OwnedFd = memory(2 * page_size() + 2 * SIZE);
    let memory = Mapping::read_write(fd.as_fd(), 0, 2 * page_size() + 2 * SIZE).unwrap();
    let ring = Ring::map(&fd, SIZE).unwrap();
    (
        Producer {
            memory,
            position: 0,
        },
        ring,
    )
}

impl Producer {
    pub(crate) fn put(&mut self, flags: u32, data: &[u8]) {
        let start = (self.position as usize) & (SIZE - 1);
        for (index, byte) in data.iter().enumerate() {
            let place = (start + 8 + index) % SIZE;
            for copy in [0, SIZE] {
                let pointer = self.memory.pointer(2 * page_size() + copy + place, 1);
                // SAFETY: in bounds, and no slice of the ring exists in these tests.
                unsafe { pointer.write(*byte) };
            }
        }
        self.mark(flags, data.len());
        self.position += (data.len() as u64 + 8).next_multiple_of(8);
        self.memory.u64_at(page_size()).store(self.position, SeqCst);
    }

    /// Writes the length word of the record at `position`.
    pub(crate) fn mark(&self, flags: u32, length: usize) {
        let start = (self.position as usize) & (SIZE - 1);
        for copy in [0, SIZE] {
            let offset = 2 * page_size() + copy + start;
            self.memory
                .u32_at(offset)
                .store(length as u32 | flags, SeqCst);
        }
    }

    pub(crate) fn consumed(&self) -> u64 {
        self.memory.u64_at(0).load(SeqCst)
    }
}
