//! C buffers and `iovec` arrays as slices of bytes.
//!
//! Null and empty pieces become empty slices; transfers are limited to the same length as by Linux.

use std::{
    array,
    ffi::c_void,
    io::{IoSlice, IoSliceMut},
    slice,
};

use libc::iovec;
use rustix::io::Errno;

use crate::{
    interpose::Outcome,
    memory::{plausible, readable},
};

/// Linux transfers at most this many bytes in one call (MAX_RW_COUNT with 4 KiB pages).
pub(crate) const MAXIMUM_TRANSFER: usize = 0x7fff_f000;
/// More pieces than this are refused.
pub(crate) const MAXIMUM_PIECES: usize = 1024;
/// Up to this many pieces are listed on the stack.
const FEW: usize = 16;

/// Returns the buffer of a receiving call. The library touches its pages before it writes there.
///
/// # Safety
/// `base` is writable for `length` bytes while the slice is in use, and nothing else touches them.
pub(crate) unsafe fn to_fill<'a>(
    base: *mut c_void,
    length: usize,
) -> Result<IoSliceMut<'a>, Errno> {
    plausible(base, length)?;
    if length == 0 {
        return Ok(IoSliceMut::new(&mut []));
    }
    // SAFETY: the caller's promise; bytes have no invalid value and the library only writes them.
    Ok(IoSliceMut::new(unsafe {
        slice::from_raw_parts_mut(base.cast(), length.min(MAXIMUM_TRANSFER))
    }))
}

/// Returns the buffer of a sending call. The library touches its pages before it reads there.
///
/// # Safety
/// `base` is readable for `length` bytes while the slice is in use.
pub(crate) unsafe fn to_drain<'a>(
    base: *const c_void,
    length: usize,
) -> Result<IoSlice<'a>, Errno> {
    plausible(base, length)?;
    if length == 0 {
        return Ok(IoSlice::new(&[]));
    }
    // SAFETY: the caller's promise.
    Ok(IoSlice::new(unsafe {
        slice::from_raw_parts(base.cast(), length.min(MAXIMUM_TRANSFER))
    }))
}

/// Calls `body` with the pieces of a receiving call.
///
/// # Safety
/// `pieces` is an array of `count` descriptions, each good for [`to_fill`].
pub(crate) unsafe fn with_scattered<T>(
    pieces: *const iovec,
    count: usize,
    body: impl FnOnce(&mut [IoSliceMut]) -> Outcome<T>,
) -> Outcome<T> {
    // SAFETY: the caller's promise.
    let pieces = unsafe { listed(pieces, count)? };
    // SAFETY: the caller's promise for each piece.
    let fill = |piece: &iovec| unsafe { to_fill(piece.iov_base, piece.iov_len) };
    if pieces.len() <= FEW {
        let mut few: [IoSliceMut; FEW] = array::from_fn(|_| IoSliceMut::new(&mut []));
        for (slot, piece) in few.iter_mut().zip(pieces) {
            *slot = fill(piece)?;
        }
        body(&mut few[..pieces.len()])
    } else {
        body(&mut pieces.iter().map(fill).collect::<Result<Vec<_>, _>>()?)
    }
}

/// Calls `body` with the pieces of a sending call.
///
/// # Safety
/// `pieces` is an array of `count` descriptions, each good for [`to_drain`].
pub(crate) unsafe fn with_gathered<T>(
    pieces: *const iovec,
    count: usize,
    body: impl FnOnce(&[IoSlice]) -> Outcome<T>,
) -> Outcome<T> {
    // SAFETY: the caller's promise.
    let pieces = unsafe { listed(pieces, count)? };
    // SAFETY: the caller's promise for each piece.
    let drain = |piece: &iovec| unsafe { to_drain(piece.iov_base, piece.iov_len) };
    if pieces.len() <= FEW {
        let mut few = [IoSlice::new(&[]); FEW];
        for (slot, piece) in few.iter_mut().zip(pieces) {
            *slot = drain(piece)?;
        }
        body(&few[..pieces.len()])
    } else {
        body(&pieces.iter().map(drain).collect::<Result<Vec<_>, _>>()?)
    }
}

/// # Safety
/// `pieces` is an array of `count` descriptions.
unsafe fn listed<'a>(pieces: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > MAXIMUM_PIECES {
        return Err(Errno::INVAL);
    }
    readable(pieces, count)?;
    // SAFETY: the caller's promise.
    let pieces = unsafe { slice::from_raw_parts(pieces, count) };
    let total = pieces
        .iter()
        .try_fold(0_usize, |total, piece| total.checked_add(piece.iov_len));
    match total {
        Some(total) if isize::try_from(total).is_ok() => Ok(pieces),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(pieces: &[iovec], count: usize) -> Result<Vec<usize>, Errno> {
        // SAFETY: the pieces are of live buffers, null or refused before use.
        let outcome = unsafe {
            with_gathered(pieces.as_ptr(), count, |slices| {
                Ok(slices.iter().map(|slice| slice.len()).collect())
            })
        };
        outcome.map_err(|error| error.errno_or(Errno::NOSYS))
    }

    fn piece(bytes: &mut [u8]) -> iovec {
        iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        }
    }

    #[test]
    fn few_and_many_pieces_keep_their_order() {
        let mut bytes = vec![0; 3];
        for count in [1, FEW, FEW + 1, MAXIMUM_PIECES] {
            let pieces = vec![piece(&mut bytes); count];
            assert_eq!(lengths(&pieces, count), Ok(vec![3; count]));
        }
    }

    #[test]
    fn an_empty_piece_may_be_null_and_another_may_not() {
        let null = |iov_len| iovec {
            iov_base: std::ptr::null_mut(),
            iov_len,
        };
        assert_eq!(lengths(&[null(0)], 1), Ok(vec![0]));
        assert_eq!(lengths(&[null(1)], 1), Err(Errno::FAULT));
    }

    #[test]
    fn too_many_pieces_and_too_long_sums_are_invalid() {
        let mut bytes = vec![0; 1];
        let pieces = vec![piece(&mut bytes); MAXIMUM_PIECES + 1];
        assert_eq!(lengths(&pieces, pieces.len()), Err(Errno::INVAL));
        let long = iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: usize::MAX,
        };
        assert_eq!(lengths(&[long, long], 2), Err(Errno::INVAL));
        assert_eq!(lengths(&[long], 1), Err(Errno::INVAL));
    }
}
