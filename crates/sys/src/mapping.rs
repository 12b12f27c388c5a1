//! Memory shared with other processes or the kernel, mapped for the lifetime of a [`Mapping`].
//! Gives access by atomics only: others may change the memory at any time.

use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, copy_nonoverlapping, null_mut};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous,
    mprotect, mremap_fixed, munmap,
};

/// Size of a page, the unit of the layouts shared with the kernel.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

fn own_number() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
    /// The process that has it exclusively, if it is kept from children; else 0.
    kept_by: AtomicI32,
}

// SAFETY: a mapping belongs to the process, not to a thread, and `Mapping` gives access to it
// through atomics and raw pointers only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `fd` from `offset`, shared, for reading only.
    pub(crate) fn read_only(
        fd: BorrowedFd<'_>,
        offset: usize,
        length: usize,
    ) -> Result<Mapping, Errno> {
        Mapping::shared(fd, offset, length, ProtFlags::READ)
    }

    /// Maps `length` bytes of `fd` from `offset`, shared, for reading and writing.
    pub(crate) fn read_write(
        fd: BorrowedFd<'_>,
        offset: usize,
        length: usize,
    ) -> Result<Mapping, Errno> {
        Mapping::shared(fd, offset, length, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn shared(
        fd: BorrowedFd<'_>,
        offset: usize,
        length: usize,
        protection: ProtFlags,
    ) -> Result<Mapping, Errno> {
        // SAFETY: the kernel chooses a free range, so no memory of this process is touched.
        let start = unsafe {
            mmap(
                null_mut(),
                length,
                protection,
                MapFlags::SHARED,
                fd,
                offset as u64,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping {
            start,
            length,
            kept_by: AtomicI32::new(0),
        })
    }

    /// Keeps the mapping from children of `fork`, which must not use their copy of the `Mapping`. Saves copying page
    /// tables.
    pub(crate) fn keep_from_children(&self) {
        self.kept_by.store(own_number(), Relaxed);
        // SAFETY: exactly the range that `shared` mapped; this process keeps it.
        let kept = unsafe {
            madvise(
                self.start.as_ptr().cast(),
                self.length,
                Advice::LinuxDontFork,
            )
        };
        debug_assert!(kept.is_ok());
    }

    /// Replaces whole pages, from `offset` on, by a private copy: they are not shared any more, and children of `fork`
    /// inherit them. Concurrent readers see the same bytes before and after.
    ///
    /// Nobody may write to these pages until this has returned.
    pub(crate) fn make_private(&self, offset: usize, length: usize) -> Result<(), Errno> {
        assert!(offset.is_multiple_of(page_size()) && length.is_multiple_of(page_size()));
        let place = self.pointer(offset, length);
        // SAFETY: the kernel chooses a free range, so no memory of this process is touched.
        let copy = unsafe {
            mmap_anonymous(
                null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        // SAFETY: both ranges are `length` bytes long (`pointer` asserts it of the first), mapped, and disjoint; nobody
        // else knows the second one yet.
        unsafe { copy_nonoverlapping(place.cast_const(), copy.cast(), length) };
        // SAFETY: `copy` belongs to this function. It replaces a part of this mapping that has the same bytes; a thread
        // that reads there at that moment waits for the kernel, which replaces the range atomically.
        let moved = unsafe {
            mprotect(copy, length, MprotectFlags::READ).and_then(|()| {
                let flags = MremapFlags::MAYMOVE;
                mremap_fixed(copy, length, length, flags, place.cast()).map(|_| ())
            })
        };
        if moved.is_err() {
            // SAFETY: it was not moved, and nobody else knows it.
            let _ = unsafe { munmap(copy, length) };
        }
        moved
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Pointer to the first byte of `offset..offset + length`, which must lie inside the mapping.
    pub(crate) fn pointer(&self, offset: usize, length: usize) -> *mut u8 {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.length), "outside mapping");
        // SAFETY: the assertion keeps the result inside the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }

    pub(crate) fn u32_at(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(align_of::<AtomicU32>()));
        let pointer = self.pointer(offset, size_of::<AtomicU32>());
        // SAFETY: in bounds (`pointer`), aligned (asserted; mappings start at a page), valid as long as
        // `self`; the shared memory is only accessed through atomics.
        unsafe { AtomicU32::from_ptr(pointer.cast()) }
    }

    pub(crate) fn u64_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(align_of::<AtomicU64>()));
        let pointer = self.pointer(offset, size_of::<AtomicU64>());
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(pointer.cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if ![0, own_number()].contains(self.kept_by.get_mut()) {
            // In a child the range may hold another mapping by now. Pages made private belong to the child, which keeps
            // them.
            return;
        }
        // SAFETY: exactly the range that `shared` mapped; every borrow of it has ended.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok());
    }
}
