//! The near end of a socket: the end of its pair that the program has as a descriptor, under one or more numbers. The
//! server has the far end.

use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use portolan_sys::{descriptor, owner};
use rustix::io::Errno;

use crate::descriptors;
use crate::socket::Socket;
use crate::socket::table::{self, File};

/// Gives a socket its descriptor, with the flags of `socket` or `accept4`.
pub(crate) fn enter(near: OwnedFd, socket: Arc<Socket>, flags: i32) -> Result<RawFd, Errno> {
    if flags & libc::SOCK_NONBLOCK != 0 {
        descriptor::set_nonblocking(&near, true)?;
    }
    enter_prepared(near, socket, flags)
}

/// As [`enter`], for a near end that is non-blocking if the flags say so.
pub(crate) fn enter_prepared(
    near: OwnedFd,
    socket: Arc<Socket>,
    flags: i32,
) -> Result<RawFd, Errno> {
    if flags & libc::SOCK_CLOEXEC == 0 {
        descriptor::set_close_on_exec(&near, false)?;
    }
    socket.set_nonblocking(flags & libc::SOCK_NONBLOCK != 0);
    let near = near.into_raw_fd();
    if !descriptors::can_hold(near) {
        descriptor::close(near);
        return Err(Errno::MFILE);
    }
    table::insert(near, File::Socket(socket));
    Ok(near)
}

/// Makes all the socket's descriptors refer to `near`.
pub(crate) fn replace_fds(socket: &Arc<Socket>, near: impl AsFd) -> Result<(), Errno> {
    let numbers = table::numbers_of(socket);
    if let Some(number) = numbers.first() {
        owner::inherit_status(*number, &near)?;
    }
    put_at(near, numbers)
}

/// As [`replace_fds`], for a socket that had no peer until now; `fd` is one of its descriptors.
pub(crate) fn replace_first_fds(
    socket: &Arc<Socket>,
    fd: RawFd,
    near: impl AsFd,
) -> Result<(), Errno> {
    // An owner is inherited together with this mode.
    if socket.is_nonblocking() && !Socket::has_owner() {
        descriptor::set_nonblocking(&near, true)?;
    }
    replace_by_prepared(socket, fd, near)
}

/// As [`replace_first_fds`], for a near end that is non-blocking if the socket is.
pub(crate) fn replace_by_prepared(
    socket: &Arc<Socket>,
    fd: RawFd,
    near: impl AsFd,
) -> Result<(), Errno> {
    if Socket::has_owner() {
        return replace_fds(socket, near);
    }
    put_at(near, table::numbers(socket, fd))
}

fn put_at(near: impl AsFd, numbers: Vec<RawFd>) -> Result<(), Errno> {
    let near = near.as_fd();
    for number in numbers {
        descriptors::replace(near, number, descriptor::is_close_on_exec(number)?)?;
    }
    Ok(())
}
