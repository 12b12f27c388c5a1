//! The symbols that close, copy and control descriptors of any kind.

use std::ops::Range;

use libc::{c_int, c_uint, c_ulong, c_void};
use portolan::posix::{self, Duplicate};
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};

use crate::{
    interpose::{CallError, Outcome, done, ours},
    number::raw,
};

/// The kernel's own default limit (fs.nr_open): higher numbers are not searched.
const MOST_DESCRIPTORS: u64 = 1 << 20;

interpose! {
    /// `int close(int)`
    ///
    /// Programs close numbers that they never opened: for the library's own descriptors this fails with EBADF.
    fn close(fd: c_int) -> c_int {
        done(posix::close(fd))
    }

    /// `int close_range(unsigned int, unsigned int, int)`
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        close_between(first, last, flags as c_uint)
    }

    /// `void closefrom(int)`
    fn closefrom(first: c_int) -> () {
        close_between(first.max(0) as c_uint, c_uint::MAX, 0).map(drop)
    }

    /// `int dup(int)`
    fn dup(fd: c_int) -> c_int {
        ours(fd)?;
        posix::duplicate(fd, Duplicate::Any { min: 0, cloexec: false })
    }

    /// `int dup2(int, int)`
    fn dup2(fd: c_int, onto: c_int) -> c_int {
        if fd == onto {
            return Err(CallError::NotOurs);
        }
        duplicate_onto(fd, onto, false)
    }

    /// `int dup3(int, int, int)`
    fn dup3(fd: c_int, onto: c_int, flags: c_int) -> c_int {
        if fd == onto || flags & !libc::O_CLOEXEC != 0 {
            return Err(Errno::INVAL.into());
        }
        duplicate_onto(fd, onto, flags != 0)
    }

    /// `int fcntl(int, int, ...)`: one integer or pointer in place of the variable arguments.
    fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
        control(fd, command, argument)
    }

    /// `int fcntl64(int, int, ...)`: one integer or pointer in place of the variable arguments.
    fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
        control(fd, command, argument)
    }

    /// `int pidfd_getfd(int, int, unsigned int)`
    fn pidfd_getfd(process: c_int, fd: c_int, flags: c_uint) -> c_int {
        Err(CallError::NotOurs)
    } afterwards(taken) {
        posix::attach(taken);
    }

    /// `int ioctl(int, unsigned long, ...)`: one integer or pointer in place of the variable arguments.
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        ours(fd)?;
        posix::ioctl(fd, request, argument as usize)
    }
}

fn control(fd: c_int, command: c_int, argument: usize) -> Outcome<c_int> {
    ours(fd)?;
    let copy = |cloexec| Duplicate::Any {
        min: argument as c_int,
        cloexec,
    };
    match command {
        libc::F_DUPFD => posix::duplicate(fd, copy(false)),
        libc::F_DUPFD_CLOEXEC => posix::duplicate(fd, copy(true)),
        _ => posix::fcntl(fd, command, argument),
    }
}

fn duplicate_onto(fd: c_int, onto: c_int, cloexec: bool) -> Outcome<c_int> {
    if posix::is_internal(onto) {
        return Err(Errno::BUSY.into());
    }
    if posix::is_ours(fd) {
        return posix::duplicate(fd, Duplicate::Onto { fd: onto, cloexec });
    }
    if posix::is_ours(onto) {
        // Only a successful duplication closes the target.
        kernel_has(fd)?;
        posix::forget(onto);
    }
    Err(CallError::NotOurs)
}

/// Closes Portolan's sockets one by one, and has the kernel close the ranges between them. The library's own
/// descriptors stay open.
fn close_between(first: c_uint, last: c_uint, flags: c_uint) -> Outcome<c_int> {
    let only_marks = flags & libc::CLOSE_RANGE_CLOEXEC != 0;
    let last_possible = last.min(highest_descriptor());
    if first > last
        || only_marks
        || posix::shares_memory()
        || !(first..=last_possible).any(is_special)
    {
        return Err(CallError::NotOurs);
    }
    let mut unclosed = first;
    for fd in (first..=last_possible).filter(|fd| is_special(*fd)) {
        close_stretch(unclosed..fd, flags)?;
        done(posix::close(fd as c_int)).ok();
        unclosed = fd + 1;
    }
    close_stretch(unclosed..last.saturating_add(1), flags)?;
    Ok(0)
}

/// Is it one of Portolan's sockets, or the library's own?
fn is_special(fd: c_uint) -> bool {
    posix::is_ours(fd as c_int) || posix::is_internal(fd as c_int)
}

fn close_stretch(stretch: Range<c_uint>, flags: c_uint) -> Result<(), Errno> {
    if stretch.is_empty() {
        return Ok(());
    }
    let arguments = [
        stretch.start as usize,
        stretch.end as usize - 1,
        flags as usize,
    ];
    // SAFETY: these descriptors are the caller's to close: it asked for it.
    unsafe { raw(libc::SYS_close_range, arguments) }.map(drop)
}

fn kernel_has(fd: c_int) -> Result<(), Errno> {
    // SAFETY: reading a descriptor's flags has no effect.
    unsafe { raw(libc::SYS_fcntl, [fd as usize, libc::F_GETFD as usize, 0]) }.map(drop)
}

/// Returns a number that no descriptor of this process exceeds.
fn highest_descriptor() -> c_uint {
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    limit.min(MOST_DESCRIPTORS) as c_uint
}
