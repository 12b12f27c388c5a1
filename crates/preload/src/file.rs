//! `sendfile` to one of Portolan's sockets: the file is read and sent in pieces.

use std::{
    io::IoSlice,
    os::fd::{BorrowedFd, RawFd},
};

use portolan::posix;
use rustix::{
    fs::{SeekFrom, seek},
    io::{Errno, pread},
};

use crate::{
    buffers::MAXIMUM_TRANSFER,
    interpose::{Outcome, ours},
    memory,
};

/// Bytes per read and send: as much as a large segment holds.
const PIECE: usize = 64 * 1024;

/// Sends up to `count` bytes of the file `from`, from `*offset` on, or from the file's position if
/// `offset` is null. Advances the one that was used.
pub(crate) fn send(to: RawFd, from: RawFd, offset: *mut i64, count: usize) -> Outcome<isize> {
    if ours(to).is_err() && ours(from).is_ok() {
        return Err(Errno::INVAL.into());
    }
    ours(to)?;
    if from < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: the number is not negative, and is used only in calls that fail with EBADF if it is not open.
    let file = unsafe { BorrowedFd::borrow_raw(from) };
    let start = if offset.is_null() {
        seek(file, SeekFrom::Current(0)).map_err(|errno| match errno {
            Errno::BADF => errno,
            _ => Errno::INVAL,
        })?
    } else {
        u64::try_from(memory::load(offset)?).map_err(|_| Errno::INVAL)?
    };
    let sent = copy(to, file, start, count.min(MAXIMUM_TRANSFER))?;
    let end = start + sent as u64;
    if offset.is_null() {
        seek(file, SeekFrom::Start(end))?;
    } else {
        memory::store(offset, &[end as i64])?;
    }
    Ok(sent as isize)
}

/// Stops at the end of the file, at a short send, and at an error after something was sent.
fn copy(to: RawFd, file: BorrowedFd, start: u64, count: usize) -> Outcome<usize> {
    let mut piece = vec![0; PIECE.min(count)];
    let mut sent = 0;
    while sent < count {
        let wanted = piece.len().min(count - sent);
        let read = match pread(file, &mut piece[..wanted], start + sent as u64) {
            Ok(0) => break,
            Ok(read) => read,
            Err(_) if sent > 0 => break,
            Err(Errno::SPIPE) => return Err(Errno::INVAL.into()),
            Err(errno) => return Err(errno.into()),
        };
        match posix::send(to, &[IoSlice::new(&piece[..read])], None, 0) {
            Ok(length) if length < read => return Ok(sent + length),
            Ok(length) => sent += length,
            Err(_) if sent > 0 => break,
            Err(refusal) => return Err(refusal),
        }
    }
    Ok(sent)
}
