//! The memory of a local session: two byte rings and a block for each end (see
//! [`portolan_proto::local`]). The server creates and seals it; both ends map all of it. The other
//! end may write anything anywhere at any time, so the header consists of atomics only, bytes of the
//! rings are copied and never borrowed, and every copy is bounds-checked here.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::copy_nonoverlapping;

use portolan_proto::local::{Ends, HEADER, RING_MAX, RING_MIN, Side, size};
use rustix::fs::{SealFlags, fstat, fstatfs};

use super::{CreateError, MapError, check_size, create, seal};
use crate::mapping::Mapping;

/// Of a memfd without large pages, of which there may be none left when one is touched (statfs(2)).
const TMPFS: i64 = 0x0102_1994;

/// One session's memory, mapped.
#[derive(Debug)]
pub struct Rings {
    memory: Mapping,
    /// Size of one ring, a power of two.
    size: usize,
}

impl Rings {
    /// Creates the memory, with rings of at least `least` bytes within the permitted range.
    pub fn create(least: usize) -> Result<OwnedFd, CreateError> {
        let ring = least.clamp(RING_MIN, RING_MAX).next_power_of_two();
        let fd = create("portolan-local", size(ring))?;
        seal(&fd, SealFlags::empty())?;
        Ok(fd)
    }

    pub fn map(fd: impl AsFd) -> Result<Rings, MapError> {
        let bytes = usize::try_from(fstat(&fd)?.st_size).map_err(|_| MapError::TooShort)?;
        let ring = bytes.saturating_sub(HEADER) / 2;
        if !ring.is_power_of_two() || !(RING_MIN..=RING_MAX).contains(&ring) {
            return Err(MapError::TooShort);
        }
        check_size(&fd, size(ring))?;
        let memory = Mapping::read_write(fd.as_fd(), 0, size(ring))?;
        Ok(Rings { memory, size: ring })
    }

    /// As [`Rings::map`], of memory that another process says is a session's: of such that the kernel gives and takes away
    /// without this process's part.
    pub fn map_strangers(fd: impl AsFd) -> Result<Rings, MapError> {
        if fstatfs(&fd)?.f_type != TMPFS {
            return Err(MapError::Foreign);
        }
        Rings::map(fd)
    }

    /// Size of one ring.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The words of both ends.
    pub fn ends(&self) -> &Ends {
        let start = self.memory.pointer(0, size_of::<Ends>());
        // SAFETY: in bounds (`pointer` asserts it), aligned as a mapping starts at a page, valid as long
        // as `self`; `Ends` consists of atomics, for which every bit pattern is valid, and the shared
        // memory is only accessed through them.
        unsafe { &*start.cast_const().cast::<Ends>() }
    }

    /// Copies `bytes`, at most the ring's size, into the ring of `side` at `offset`, which wraps after `cycle` bytes, a
    /// power of two.
    pub fn put(&self, side: Side, cycle: usize, offset: u64, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.size)];
        let (start, first) = self.place(cycle, offset, bytes.len());
        let (front, back) = bytes.split_at(first);
        // SAFETY: `place` returns a part of the ring of `side` that begins at `start` and has room for
        // `front`; the rest goes to the beginning of the ring, and both together are no longer than the
        // ring. The source is private memory and cannot overlap.
        unsafe {
            copy_nonoverlapping(
                front.as_ptr(),
                self.at(side, start, front.len()),
                front.len(),
            );
            copy_nonoverlapping(back.as_ptr(), self.at(side, 0, back.len()), back.len());
        }
    }

    /// Copies bytes, at most the ring's size, from the ring of `side` at `offset`. Concurrent writes by
    /// the other end may be visible in part.
    pub fn get(&self, side: Side, cycle: usize, offset: u64, out: &mut [u8]) {
        let length = out.len().min(self.size);
        let (start, first) = self.place(cycle, offset, length);
        let (front, back) = out[..length].split_at_mut(first);
        // SAFETY: as in `put`, with the roles exchanged; any bytes are valid for `u8`.
        unsafe {
            copy_nonoverlapping(
                self.at(side, start, front.len()).cast_const(),
                front.as_mut_ptr(),
                front.len(),
            );
            copy_nonoverlapping(
                self.at(side, 0, back.len()).cast_const(),
                back.as_mut_ptr(),
                back.len(),
            );
        }
    }

    /// The position of `offset` in a ring, and how many of `length` bytes fit before the end of the cycle.
    fn place(&self, cycle: usize, offset: u64, length: usize) -> (usize, usize) {
        let cycle = cycle.clamp(1, self.size);
        let start = (offset & (cycle as u64 - 1)) as usize;
        (start, length.min(cycle - start))
    }

    /// Pointer to the first of `length` bytes of a ring, which must lie inside it.
    fn at(&self, side: Side, start: usize, length: usize) -> *mut u8 {
        assert!(start + length <= self.size, "outside ring");
        let ring = match side {
            Side::Opener => HEADER,
            Side::Accepter => HEADER + self.size,
        };
        self.memory.pointer(ring + start, length)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::testing::memory;

    fn pair() -> (Rings, Rings) {
        let fd = Rings::create(1).unwrap();
        (Rings::map(&fd).unwrap(), Rings::map(&fd).unwrap())
    }

    #[test]
    fn bytes_cross_also_over_the_end_of_a_cycle() {
        let (a, b) = pair();
        for cycle in [a.size(), RING_MIN / 4] {
            let bytes: Vec<u8> = (0..cycle).map(|index| (index % 251) as u8).collect();
            for side in [Side::Opener, Side::Accepter] {
                for offset in [0, 1, RING_MIN as u64 - 1, u64::MAX - 5] {
                    a.put(side, cycle, offset, &bytes);
                    let mut got = vec![0; bytes.len()];
                    b.get(side, cycle, offset, &mut got);
                    assert!(got == bytes, "{side:?} {offset}");
                }
            }
        }
    }

    #[test]
    fn one_ring_does_not_reach_into_the_other_or_the_words() {
        let (a, b) = pair();
        for cycle in [0, 3, a.size(), 1 << 40] {
            a.put(Side::Opener, cycle, 7, &vec![0xff; 3 * a.size()]);
            let mut other = vec![1; b.size()];
            b.get(Side::Accepter, cycle, 0, &mut other);
            assert!(other.iter().all(|byte| *byte == 0));
            assert_eq!(b.ends().accepter.sent.0.bytes.load(Relaxed), 0);
        }
    }

    #[test]
    fn both_see_the_words() {
        let (a, b) = pair();
        a.ends().of(Side::Accepter).taken.0.bytes.store(7, Relaxed);
        assert_eq!(b.ends().accepter.taken.0.bytes.load(Relaxed), 7);
    }

    #[test]
    fn memory_of_another_shape_is_refused() {
        let shrinkable = memory(size(RING_MIN));
        assert!(matches!(Rings::map(&shrinkable), Err(MapError::Unsealed)));
        for bytes in [0, HEADER, size(RING_MIN) - 1, size(RING_MIN + 4096)] {
            let fd = create("test", bytes).unwrap();
            seal(&fd, SealFlags::empty()).unwrap();
            assert!(
                matches!(Rings::map(&fd), Err(MapError::TooShort)),
                "{bytes}"
            );
        }
    }

    #[test]
    fn sizes_are_kept_within_bounds() {
        for (least, ring) in [(0, RING_MIN), (100_000, 131_072), (usize::MAX, RING_MAX)] {
            let rings = Rings::map(Rings::create(least).unwrap()).unwrap();
            assert_eq!(rings.size(), ring);
        }
    }
}
