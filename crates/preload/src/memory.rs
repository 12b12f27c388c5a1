//! Copies between the caller's memory and the library's that fail with EFAULT where the kernel's would.
//!
//! `load` and `store` are for rare calls: the copy is a system call on this process itself. Calls on the data path
//! `read` and `write` their small structures, and use `iovec`, `msghdr` and `pollfd` arrays in place: each of their
//! pages is touched before ([`readable`], [`writable`]), by an instruction whose fault is recognised (`signal.rs`).
//! Payload is touched where it is copied, as far as it is; here only obviously bad buffers are refused.

use std::{
    ffi::c_void,
    mem::{MaybeUninit, size_of, size_of_val},
    ptr,
};

use portolan::posix::memory::{readable_at, writable_at};
use rustix::{io::Errno, process::getpid};

/// No object lies below this address.
const PAGE: usize = 4096;

/// Types for which every bit pattern is a valid value, and that have no relevant padding.
///
/// # Safety
/// The implementor is plain data.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: integers are plain data.
unsafe impl Plain for u8 {}
// SAFETY: integers are plain data.
unsafe impl Plain for u32 {}
// SAFETY: integers are plain data.
unsafe impl Plain for i32 {}
// SAFETY: integers are plain data.
unsafe impl Plain for i64 {}
// SAFETY: integers are plain data.
unsafe impl Plain for u64 {}
// SAFETY: integers are plain data.
unsafe impl Plain for usize {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::epoll_event {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::timeval {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::timespec {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::cmsghdr {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::in_pktinfo {}
// SAFETY: a C struct of integers.
unsafe impl Plain for libc::in6_pktinfo {}
// SAFETY: its elements are plain, with nothing between them.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Reads one value at `source`.
pub(crate) fn load<T: Plain>(source: *const T) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::uninit();
    copy_in(source.cast(), value.as_mut_ptr().cast(), size_of::<T>())?;
    // SAFETY: all bytes were written and T is plain data.
    Ok(unsafe { value.assume_init() })
}

/// Writes `values` to the array at `target`.
pub(crate) fn store<T: Plain>(target: *mut T, values: &[T]) -> Result<(), Errno> {
    copy_out(values.as_ptr().cast(), target.cast(), size_of_val(values))
}

/// As [`load`], without a system call.
#[inline]
pub(crate) fn read<T: Plain>(source: *const T) -> Result<T, Errno> {
    readable(source, 1)?;
    // SAFETY: T is plain data, which can be read.
    Ok(unsafe { source.read_unaligned() })
}

/// Fills `values` from the array at `source`, without a system call.
#[inline]
pub(crate) fn read_into<T: Plain>(source: *const T, values: &mut [T]) -> Result<(), Errno> {
    readable(source, values.len())?;
    // SAFETY: T is plain data, which can be read; bytes, as the array need not be aligned.
    unsafe {
        let bytes = size_of_val(values);
        ptr::copy_nonoverlapping(source.cast::<u8>(), values.as_mut_ptr().cast(), bytes);
    }
    Ok(())
}

/// As [`store`], without a system call.
#[inline]
pub(crate) fn write<T: Plain>(target: *mut T, values: &[T]) -> Result<(), Errno> {
    writable(target, values.len())?;
    // SAFETY: as in `read_into`.
    unsafe {
        ptr::copy_nonoverlapping(
            values.as_ptr().cast(),
            target.cast::<u8>(),
            size_of_val(values),
        );
    }
    Ok(())
}

/// Refuses pointers that are bad by their value: in the first page, or in the kernel's half of the address space.
#[inline]
pub(crate) fn plausible<T>(pointer: *const T, length: usize) -> Result<(), Errno> {
    if length > 0 && !(PAGE..=isize::MAX as usize).contains(&pointer.addr()) {
        Err(Errno::FAULT)
    } else {
        Ok(())
    }
}

/// Refuses an array that cannot be read.
#[inline]
pub(crate) fn readable<T>(array: *const T, length: usize) -> Result<(), Errno> {
    let bytes = length.checked_mul(size_of::<T>()).ok_or(Errno::FAULT)?;
    if readable_at(array.expose_provenance(), bytes) == bytes {
        Ok(())
    } else {
        Err(Errno::FAULT)
    }
}

/// Refuses an array that cannot be written.
#[inline]
pub(crate) fn writable<T>(array: *mut T, length: usize) -> Result<(), Errno> {
    let bytes = length.checked_mul(size_of::<T>()).ok_or(Errno::FAULT)?;
    if writable_at(array.expose_provenance(), bytes) == bytes {
        Ok(())
    } else {
        Err(Errno::FAULT)
    }
}

fn copy_in(theirs: *const c_void, ours: *mut c_void, length: usize) -> Result<(), Errno> {
    plausible(theirs, length)?;
    let (local, remote) = (piece(ours, length), piece(theirs.cast_mut(), length));
    // SAFETY: `ours` is valid for `length`; the kernel checks `theirs`.
    let copied = unsafe { libc::process_vm_readv(own_pid(), &local, 1, &remote, 1, 0) };
    checked(copied, length, || {
        readable(theirs.cast::<u8>(), length)?;
        // SAFETY: `ours` is valid for `length`, and `theirs` can be read.
        unsafe { ptr::copy_nonoverlapping(theirs.cast::<u8>(), ours.cast(), length) };
        Ok(())
    })
}

fn copy_out(ours: *const c_void, theirs: *mut c_void, length: usize) -> Result<(), Errno> {
    plausible(theirs, length)?;
    let (local, remote) = (piece(ours.cast_mut(), length), piece(theirs, length));
    // SAFETY: `ours` is valid for `length`; the kernel checks `theirs`.
    let copied = unsafe { libc::process_vm_writev(own_pid(), &local, 1, &remote, 1, 0) };
    checked(copied, length, || {
        writable(theirs.cast::<u8>(), length)?;
        // SAFETY: `ours` is valid for `length`, and `theirs` can be written.
        unsafe { ptr::copy_nonoverlapping(ours.cast::<u8>(), theirs.cast(), length) };
        Ok(())
    })
}

/// A sandbox may forbid the call (EPERM, ENOSYS): then copies directly. A partial copy sets no `errno`.
fn checked(
    copied: isize,
    length: usize,
    copy: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    match copied {
        0.. if copied == length as isize => Ok(()),
        0.. => Err(Errno::FAULT),
        _ if [Errno::PERM, Errno::NOSYS].contains(&last_error()) => copy(),
        _ => Err(Errno::FAULT),
    }
}

fn piece(base: *mut c_void, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base,
        iov_len: length,
    }
}

fn own_pid() -> libc::pid_t {
    getpid().as_raw_pid()
}

/// The calling thread's `errno`.
pub(crate) fn last_error() -> Errno {
    // SAFETY: __errno_location returns the calling thread's errno, valid while the thread lives.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_pointers_are_copied_both_ways() {
        let mut place = 7_u32;
        assert_eq!(load(&place), Ok(7));
        assert_eq!(store(&mut place, &[9]), Ok(()));
        assert_eq!(place, 9);
    }

    #[test]
    fn null_unmapped_and_kernel_pointers_are_faults() {
        for bad in [0_usize, 8, usize::MAX] {
            assert_eq!(load::<u32>(ptr::without_provenance(bad)), Err(Errno::FAULT));
            assert_eq!(read::<u32>(ptr::without_provenance(bad)), Err(Errno::FAULT));
            assert_eq!(
                store::<u32>(ptr::without_provenance_mut(bad), &[1]),
                Err(Errno::FAULT)
            );
        }
    }

    #[test]
    fn nothing_is_read_for_an_empty_array() {
        assert_eq!(read_into::<u8>(ptr::null(), &mut []), Ok(()));
    }
}
