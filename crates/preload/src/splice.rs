//! `splice` between a pipe and one of Portolan's streams: bytes leave one only as far as the other
//! has accepted them.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::{BorrowedFd, RawFd},
};

use libc::{c_uint, off64_t};
use portolan::posix;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, OFlags, fcntl_getfl, fstat},
    io::{Errno, read, write},
};

use crate::interpose::{CallError, Outcome};

/// Bytes moved at a time: the default capacity of a pipe.
const PIECE: usize = 64 * 1024;
/// Bytes that a writable pipe accepts at least (PIPE_BUF).
const PORTION: usize = 4096;

type End = (RawFd, *mut off64_t);

/// Moves bytes from the socket to the pipe. Waits for room in the pipe, then for data, as Linux does.
pub(crate) fn out_of_socket(from: End, to: End, length: usize, flags: c_uint) -> Outcome<isize> {
    let (socket, pipe) = (from.0, pipe_end(to, from, OFlags::WRONLY)?);
    await_pipe(pipe, PollFlags::OUT, flags)?;
    let mut piece = vec![0; PIECE.min(length)];
    let mut buffers = [IoSliceMut::new(&mut piece)];
    let came = posix::receive(socket, &mut buffers, libc::MSG_PEEK)?.length;
    let taken = fill(pipe, &piece[..came])?;
    let mut buffers = [IoSliceMut::new(&mut piece[..taken])];
    if taken > 0 {
        posix::receive(socket, &mut buffers, libc::MSG_TRUNC)?;
    }
    Ok(taken as isize)
}

/// Moves bytes from the pipe to the socket. Waits for data in the pipe, then for room.
pub(crate) fn into_socket(from: End, to: End, length: usize, flags: c_uint) -> Outcome<isize> {
    let (socket, pipe) = (to.0, pipe_end(from, to, OFlags::RDONLY)?);
    let room = posix::send_space(socket)?;
    await_pipe(pipe, PollFlags::IN, flags)?;
    let waits = !is_nonblocking(socket)?;
    if room == 0 && !waits {
        return Err(Errno::AGAIN.into());
    }
    let most = if waits { PIECE } else { PIECE.min(room) };
    let mut piece = vec![0; most.min(length)];
    let count = read(pipe, &mut piece)?;
    let more = if flags & libc::SPLICE_F_MORE != 0 {
        libc::MSG_MORE
    } else {
        0
    };
    let mut sent = 0;
    while sent < count {
        let rest = [IoSlice::new(&piece[sent..count])];
        match posix::send(socket, &rest, None, more) {
            Ok(bytes) => sent += bytes,
            // Another thread was faster; bytes taken from the pipe must be sent.
            Err(CallError::Errno(Errno::AGAIN)) => await_room(socket)?,
            Err(refusal) if sent == 0 => return Err(refusal),
            Err(_) => break,
        }
    }
    Ok(sent as isize)
}

fn await_room(socket: RawFd) -> Outcome<()> {
    let mut entry = [libc::pollfd {
        fd: socket,
        events: libc::POLLOUT,
        revents: 0,
    }];
    posix::poll(&mut entry, None, None).map(drop)
}

/// Returns the end of a pipe that is open for `what`. Neither end has a position; the errors are those of Linux
/// (`do_splice`).
fn pipe_end<'a>(
    (fd, offset): End,
    (_, of_socket): End,
    what: OFlags,
) -> Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is not negative, and is used only in calls that fail with EBADF if it is not open.
    let pipe = unsafe { BorrowedFd::borrow_raw(fd) };
    if FileType::from_raw_mode(fstat(pipe)?.st_mode) != FileType::Fifo {
        return Err(Errno::INVAL);
    }
    let mode = fcntl_getfl(pipe)? & OFlags::RWMODE;
    if mode != what && mode != OFlags::RDWR {
        return Err(Errno::BADF);
    }
    match (offset.is_null(), of_socket.is_null()) {
        (false, _) => Err(Errno::SPIPE),
        (_, false) => Err(Errno::INVAL),
        _ => Ok(pipe),
    }
}

fn await_pipe(pipe: BorrowedFd, what: PollFlags, flags: c_uint) -> Result<(), Errno> {
    let waits =
        flags & libc::SPLICE_F_NONBLOCK == 0 && !fcntl_getfl(pipe)?.contains(OFlags::NONBLOCK);
    let timeout = (!waits).then(Timespec::default);
    let mut ends = [PollFd::from_borrowed_fd(pipe, what)];
    match posix::outside(|| poll(&mut ends, timeout.as_ref()))? {
        0 => Err(Errno::AGAIN),
        _ => Ok(()),
    }
}

/// Writes as much as the pipe accepts without waiting, whatever its mode.
fn fill(pipe: BorrowedFd, bytes: &[u8]) -> Result<usize, Errno> {
    let mut done = 0;
    for portion in bytes.chunks(PORTION) {
        let mut ready = [PollFd::from_borrowed_fd(pipe, PollFlags::OUT)];
        if done > 0 && poll(&mut ready, Some(&Timespec::default()))? == 0 {
            break;
        }
        done += write(pipe, portion)?;
    }
    Ok(done)
}

fn is_nonblocking(socket: RawFd) -> Result<bool, Errno> {
    // SAFETY: one of ours, so not negative.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    Ok(fcntl_getfl(socket)?.contains(OFlags::NONBLOCK))
}
