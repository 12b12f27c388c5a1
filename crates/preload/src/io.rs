//! The symbols that move data.

use std::io::{IoSlice, IoSliceMut};

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, off64_t, size_t, sockaddr, socklen_t,
    ssize_t, timespec,
};
use portolan::posix;
use rustix::io::Errno;

use crate::{
    address, buffers, file,
    interpose::{CallError, Outcome, ours},
    message, rights, splice, time,
};

interpose! {
    /// `ssize_t read(int, void *, size_t)`
    fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
        receive_plain(fd, buffer, length, 0)
    }

    /// `ssize_t __read_chk(int, void *, size_t, size_t)`
    fn __read_chk(fd: c_int, buffer: *mut c_void, length: size_t, room: size_t) -> ssize_t {
        fits(length, room)?;
        receive_plain(fd, buffer, length, 0)
    }

    /// `ssize_t recv(int, void *, size_t, int)`
    fn recv(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t {
        receive_plain(fd, buffer, length, flags)
    }

    /// `ssize_t __recv_chk(int, void *, size_t, size_t, int)`
    fn __recv_chk(fd: c_int, buffer: *mut c_void, length: size_t, room: size_t, flags: c_int) -> ssize_t {
        fits(length, room)?;
        receive_plain(fd, buffer, length, flags)
    }

    /// `ssize_t recvfrom(int, void *, size_t, int, struct sockaddr *, socklen_t *)`
    fn recvfrom(
        fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int, address: *mut sockaddr, room: *mut socklen_t,
    ) -> ssize_t {
        receive_from(fd, buffer, length, flags, address, room)
    }

    /// `ssize_t __recvfrom_chk(int, void *, size_t, size_t, int, struct sockaddr *, socklen_t *)`
    fn __recvfrom_chk(
        fd: c_int, buffer: *mut c_void, length: size_t, buffer_room: size_t, flags: c_int,
        address: *mut sockaddr, room: *mut socklen_t,
    ) -> ssize_t {
        fits(length, buffer_room)?;
        receive_from(fd, buffer, length, flags, address, room)
    }

    /// `ssize_t readv(int, const struct iovec *, int)`
    fn readv(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
        receive_scattered(fd, pieces, count, 0)
    }

    /// `ssize_t preadv2(int, const struct iovec *, int, off_t, int)`
    fn preadv2(fd: c_int, pieces: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
        receive_scattered(fd, pieces, count, stream_flags(fd, offset, flags)?)
    }

    /// `ssize_t preadv64v2(int, const struct iovec *, int, off64_t, int)`
    fn preadv64v2(fd: c_int, pieces: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t {
        receive_scattered(fd, pieces, count, stream_flags(fd, offset, flags)?)
    }

    /// `ssize_t recvmsg(int, struct msghdr *, int)`
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        ours(fd)?;
        message::receive(fd, message, flags)
    } afterwards(length) {
        if length >= 0 {
            rights::take_up(message);
        }
    }

    /// `int recvmmsg(int, struct mmsghdr *, unsigned int, int, struct timespec *)`
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
        ours(fd)?;
        message::receive_many(fd, messages, count, flags, time::at_timespec(timeout)?)
    } afterwards(received) {
        for index in 0..received.max(0) as usize {
            rights::take_up(messages.wrapping_add(index).cast());
        }
    }

    /// `ssize_t write(int, const void *, size_t)`
    fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
        send_plain(fd, buffer, length, 0)
    }

    /// `ssize_t send(int, const void *, size_t, int)`
    fn send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
        send_plain(fd, buffer, length, flags)
    }

    /// `ssize_t sendto(int, const void *, size_t, int, const struct sockaddr *, socklen_t)`
    fn sendto(
        fd: c_int, buffer: *const c_void, length: size_t, flags: c_int, address: *const sockaddr, room: socklen_t,
    ) -> ssize_t {
        ours(fd)?;
        let buffer = buffers::to_drain(buffer, length)?;
        let to = address::to_send(address, room)?;
        posix::send(fd, &[buffer], to, flags).map(signed)
    }

    /// `ssize_t writev(int, const struct iovec *, int)`
    fn writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
        send_gathered(fd, pieces, count, 0)
    }

    /// `ssize_t pwritev2(int, const struct iovec *, int, off_t, int)`
    fn pwritev2(fd: c_int, pieces: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
        send_gathered(fd, pieces, count, stream_flags(fd, offset, flags)?)
    }

    /// `ssize_t pwritev64v2(int, const struct iovec *, int, off64_t, int)`
    fn pwritev64v2(fd: c_int, pieces: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t {
        send_gathered(fd, pieces, count, stream_flags(fd, offset, flags)?)
    }

    /// `ssize_t sendmsg(int, const struct msghdr *, int)`
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        if !posix::is_ours(fd) {
            rights::give_away(message);
        }
        ours(fd)?;
        message::send(fd, message, flags)
    }

    /// `int sendmmsg(int, struct mmsghdr *, unsigned int, int)`
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        if !posix::is_ours(fd) {
            // The header is the first member of each.
            for index in 0..(count as usize).min(message::MAXIMUM_MESSAGES) {
                rights::give_away(messages.wrapping_add(index).cast());
            }
        }
        ours(fd)?;
        message::send_many(fd, messages, count, flags)
    }

    /// `ssize_t sendfile(int, int, off_t *, size_t)`
    fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
        file::send(to, from, offset, count)
    }

    /// `ssize_t sendfile64(int, int, off64_t *, size_t)`
    fn sendfile64(to: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
        file::send(to, from, offset, count)
    }

    /// `ssize_t splice(int, off64_t *, int, off64_t *, size_t, unsigned int)`
    fn splice(
        from: c_int, from_offset: *mut off64_t, to: c_int, to_offset: *mut off64_t, length: size_t, flags: c_uint,
    ) -> ssize_t {
        match (ours(from), ours(to)) {
            (Err(_), Err(refusal)) => Err(refusal),
            (Ok(()), Ok(())) => Err(Errno::INVAL.into()),
            _ if length == 0 => Ok(0),
            (Ok(()), _) => splice::out_of_socket((from, from_offset), (to, to_offset), length, flags),
            (_, Ok(())) => splice::into_socket((from, from_offset), (to, to_offset), length, flags),
        }
    }
}

/// # Safety
/// `buffer` is writable for `length` bytes.
unsafe fn receive_plain(
    fd: c_int,
    buffer: *mut c_void,
    length: usize,
    flags: c_int,
) -> Outcome<ssize_t> {
    ours(fd)?;
    // SAFETY: the caller's promise.
    let buffer = unsafe { buffers::to_fill(buffer, length)? };
    Ok(signed(posix::receive(fd, &mut [buffer], flags)?.length))
}

/// # Safety
/// `buffer` is writable for `length` bytes.
unsafe fn receive_from(
    fd: c_int,
    buffer: *mut c_void,
    length: usize,
    flags: c_int,
    address: *mut sockaddr,
    room: *mut socklen_t,
) -> Outcome<ssize_t> {
    ours(fd)?;
    address::check_room(address, room)?;
    // SAFETY: the caller's promise.
    let buffer = unsafe { buffers::to_fill(buffer, length)? };
    let received = posix::receive(fd, &mut [buffer], flags)?;
    address::store_if_wanted(received.from, address, room)?;
    Ok(signed(received.length))
}

/// # Safety
/// `pieces` is an array of `count` descriptions of writable buffers.
unsafe fn receive_scattered(
    fd: c_int,
    pieces: *const iovec,
    count: c_int,
    flags: c_int,
) -> Outcome<ssize_t> {
    ours(fd)?;
    let receive = |slices: &mut [IoSliceMut]| Ok(signed(posix::receive(fd, slices, flags)?.length));
    // SAFETY: the caller's promise.
    unsafe { buffers::with_scattered(pieces, counted(count)?, receive) }
}

/// # Safety
/// `buffer` is readable for `length` bytes.
unsafe fn send_plain(
    fd: c_int,
    buffer: *const c_void,
    length: usize,
    flags: c_int,
) -> Outcome<ssize_t> {
    ours(fd)?;
    // SAFETY: the caller's promise.
    let buffer = unsafe { buffers::to_drain(buffer, length)? };
    posix::send(fd, &[buffer], None, flags).map(signed)
}

/// # Safety
/// `pieces` is an array of `count` descriptions of readable buffers.
unsafe fn send_gathered(
    fd: c_int,
    pieces: *const iovec,
    count: c_int,
    flags: c_int,
) -> Outcome<ssize_t> {
    ours(fd)?;
    let send = |slices: &[IoSlice]| posix::send(fd, slices, None, flags).map(signed);
    // SAFETY: the caller's promise.
    unsafe { buffers::with_gathered(pieces, counted(count)?, send) }
}

/// A fortified call that overflows its buffer is left to libc, which aborts the program.
fn fits(length: size_t, room: size_t) -> Outcome<()> {
    if length <= room {
        Ok(())
    } else {
        Err(CallError::NotOurs)
    }
}

/// A socket has no position: only offset -1 ("current") works, and RWF_NOWAIT means MSG_DONTWAIT.
fn stream_flags(fd: c_int, offset: i64, flags: c_int) -> Outcome<c_int> {
    ours(fd)?;
    match (offset, flags) {
        (-1, 0) => Ok(0),
        (-1, libc::RWF_NOWAIT) => Ok(libc::MSG_DONTWAIT),
        (-1, _) => Err(Errno::OPNOTSUPP.into()),
        (..-1, _) => Err(Errno::INVAL.into()),
        _ => Err(Errno::SPIPE.into()),
    }
}

fn counted(count: c_int) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| Errno::INVAL)
}

/// Lengths are limited far below the largest positive value.
fn signed(length: usize) -> ssize_t {
    length as ssize_t
}
