//! A call's buffers. The program's memory may be missing: it is checked before it is used (`EFAULT`).

use std::io::{IoSlice, IoSliceMut};

use portolan_sys::memory;
use rustix::io::Errno;

/// Calls `fill` for each piece of `buffers` behind the first `skip` bytes, until one is not filled.
pub(super) fn scatter(
    buffers: &mut [IoSliceMut<'_>],
    mut skip: usize,
    mut fill: impl FnMut(&mut [u8]) -> usize,
) {
    for buffer in buffers {
        if skip >= buffer.len() {
            skip -= buffer.len();
            continue;
        }
        let piece = &mut buffer[skip..];
        skip = 0;
        if fill(piece) < piece.len() {
            return;
        }
    }
}

/// Can `bytes` bytes be written behind the first `skip`, as far as the buffers have room?
pub(super) fn may_be_filled(buffers: &mut [IoSliceMut<'_>], skip: usize, mut bytes: usize) -> bool {
    let mut is_good = true;
    scatter(buffers, skip, |piece| {
        let wanted = piece.len().min(bytes);
        bytes -= wanted;
        is_good = memory::writable(&mut piece[..wanted]).len() == wanted;
        if is_good { wanted } else { 0 }
    });
    is_good
}

/// Calls `take` for each piece of `buffers` behind the first `skip` bytes, until one is not taken
/// completely.
pub(super) fn gather(
    buffers: &[IoSlice<'_>],
    mut skip: usize,
    mut take: impl FnMut(&[u8]) -> usize,
) {
    for buffer in buffers {
        if skip >= buffer.len() {
            skip -= buffer.len();
            continue;
        }
        let piece = &buffer[skip..];
        skip = 0;
        if take(piece) < piece.len() {
            return;
        }
    }
}

/// Can the bytes behind the first `skip` be read, as far as there is room for them?
pub(super) fn may_be_sent(buffers: &[IoSlice<'_>], skip: usize, mut room: usize) -> bool {
    let mut is_good = true;
    gather(buffers, skip, |piece| {
        let wanted = piece.len().min(room);
        room -= wanted;
        is_good = memory::readable(&piece[..wanted]).len() == wanted;
        if is_good { wanted } else { 0 }
    });
    is_good
}

/// Refuses buffers that cannot be read, for calls that take all or nothing.
pub(super) fn are_readable(buffers: &[IoSlice<'_>]) -> Result<(), Errno> {
    let is_good = |buffer: &IoSlice<'_>| memory::readable(buffer).len() == buffer.len();
    if buffers.iter().all(is_good) {
        Ok(())
    } else {
        Err(Errno::FAULT)
    }
}
