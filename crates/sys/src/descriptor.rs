//! The application's descriptors by number, on which the library operates but which it does not own. If
//! the application closes one during a call, the call fails or hits the number's next owner, as with
//! any descriptor used after close.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use rustix::net::AddressFamily;
use rustix::process::{Resource, getrlimit};

use crate::raw;

/// Whether it is a kernel socket of an internet protocol.
pub fn is_network_socket(fd: impl AsFd) -> bool {
    rustix::net::getsockname(fd).is_ok_and(|name| {
        matches!(
            name.address_family(),
            AddressFamily::INET | AddressFamily::INET6
        )
    })
}

/// Borrows the descriptor; `EBADF` for a negative number.
pub fn borrow<'a>(fd: RawFd) -> Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is not -1. The application is responsible for what it refers to, and every call
    // on it reports `EBADF` if it is not open.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Makes the kernel enlarge the process's table of descriptors to `most` numbers, or to its limit. When the table of a
/// process with several threads grows later, those that need a number wait for an RCU grace period: 10 to 30 ms, half a
/// second on a busy machine.
pub fn widen_table(most: u64) -> Result<(), Errno> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(most);
    let last = most.min(limit).saturating_sub(1);
    let last = RawFd::try_from(last).unwrap_or(RawFd::MAX);
    // The copy is closed again: the table keeps its size.
    fcntl_dupfd_cloexec(std::io::stderr(), last).map(drop)
}

/// Takes ownership of a descriptor that the caller has just opened.
pub fn own(fd: RawFd) -> Result<OwnedFd, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the caller guarantees it is open and unowned; it is not -1.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Closes the application's descriptor on its behalf.
pub fn close(fd: RawFd) {
    if fd >= 0 {
        // SAFETY: the application requested it and gives the number up.
        unsafe { rustix::io::close(fd) };
    }
}

/// `dup3`: makes the number `onto` refer to the same open file as `from`.
pub fn replace(from: impl AsFd, onto: RawFd, close_on_exec: bool) -> Result<(), Errno> {
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    let from = from.as_fd().as_raw_fd();
    // SAFETY: plain numbers; the application gives up what `onto` referred to.
    unsafe {
        raw::syscall(
            libc::SYS_dup3,
            [number(from), number(onto), number(flags), 0, 0, 0],
        )?
    };
    Ok(())
}

pub fn is_close_on_exec(fd: RawFd) -> Result<bool, Errno> {
    Ok(fcntl_getfd(borrow(fd)?)?.contains(FdFlags::CLOEXEC))
}

pub fn set_close_on_exec(fd: impl AsFd, on: bool) -> Result<(), Errno> {
    fcntl_setfd(
        fd,
        if on {
            FdFlags::CLOEXEC
        } else {
            FdFlags::empty()
        },
    )
}

pub fn is_nonblocking(fd: impl AsFd) -> Result<bool, Errno> {
    Ok(fcntl_getfl(fd)?.contains(OFlags::NONBLOCK))
}

/// The open descriptors of this process; none without `/proc`.
pub fn all_open() -> Vec<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Whether the process could open another descriptor now.
pub fn has_free_number() -> bool {
    match rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 0) {
        Ok(copy) => {
            close(copy.into_raw_fd());
            true
        }
        Err(errno) => !matches!(errno, Errno::MFILE | Errno::NFILE),
    }
}

pub fn set_nonblocking(fd: impl AsFd, on: bool) -> Result<(), Errno> {
    let flags = fcntl_getfl(&fd)?;
    fcntl_setfl(
        fd,
        if on {
            flags | OFlags::NONBLOCK
        } else {
            flags - OFlags::NONBLOCK
        },
    )
}

/// `setsockopt` with raw bytes.
pub fn set_socket_option(fd: impl AsFd, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
    // SAFETY: `value` is readable for its length.
    unsafe {
        raw::syscall(
            libc::SYS_setsockopt,
            [
                number(fd.as_fd().as_raw_fd()),
                number(level),
                number(name),
                value.as_ptr().expose_provenance(),
                value.len(),
                0,
            ],
        )?;
    }
    Ok(())
}

/// `getsockopt` for an option of the length of `value`.
pub fn socket_option(fd: impl AsFd, level: i32, name: i32, value: &mut [u8]) -> Result<(), Errno> {
    let mut length = value.len() as libc::socklen_t;
    // SAFETY: `value` is writable for `length`, which the kernel reads and writes.
    unsafe {
        raw::syscall(
            libc::SYS_getsockopt,
            [
                number(fd.as_fd().as_raw_fd()),
                number(level),
                number(name),
                value.as_mut_ptr().expose_provenance(),
                (&raw mut length).expose_provenance(),
                0,
            ],
        )?;
    }
    Ok(())
}

/// Does the kernel take a socket's lock to note its priority? Since Linux 6.7 it does not.
pub fn priority_takes_lock() -> bool {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|word| word.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version < (6, 7)
}

/// A kernel socket.
pub fn kernel_socket(domain: i32, kind: i32, protocol: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: plain numbers.
    let fd = unsafe {
        raw::syscall(
            libc::SYS_socket,
            [number(domain), number(kind), number(protocol), 0, 0, 0],
        )?
    };
    // SAFETY: the kernel has just opened it; descriptors fit an `int`.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// `ioctl` with the application's argument.
pub fn request(fd: impl AsFd, request: u64, argument: usize) -> Result<i32, Errno> {
    let fd = number(fd.as_fd().as_raw_fd());
    // SAFETY: the caller of `ioctl` is responsible for its argument; the kernel checks the pointers in it.
    let result =
        unsafe { raw::syscall(libc::SYS_ioctl, [fd, request as usize, argument, 0, 0, 0])? };
    Ok(result as i32)
}

/// `epoll_ctl` with the given data. `event` is unused for a removal.
pub fn epoll_control(
    set: RawFd,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Result<(), Errno> {
    let mut event = event.unwrap_or(libc::epoll_event { events: 0, u64: 0 });
    // SAFETY: `event` outlives the call.
    unsafe {
        let event = std::ptr::from_mut(&mut event).expose_provenance();
        raw::syscall(
            libc::SYS_epoll_ctl,
            [number(set), number(operation), number(fd), event, 0, 0],
        )?;
    }
    Ok(())
}

/// Returns the events that a kernel epoll set has now, without blocking.
pub fn epoll_collect(set: RawFd, events: &mut [libc::epoll_event]) -> Result<usize, Errno> {
    if events.is_empty() {
        return Ok(0);
    }
    // SAFETY: `events` is writable for its length; a null mask leaves the signal mask unchanged.
    unsafe {
        raw::syscall(
            libc::SYS_epoll_pwait,
            [
                number(set),
                events.as_mut_ptr().expose_provenance(),
                events.len().min(i32::MAX as usize),
                0,
                0,
                8,
            ],
        )
    }
}

/// Creates a kernel epoll set.
pub fn epoll_create(close_on_exec: bool) -> Result<OwnedFd, Errno> {
    let flags = if close_on_exec {
        epoll::CreateFlags::CLOEXEC
    } else {
        epoll::CreateFlags::empty()
    };
    epoll::create(flags)
}

/// Raises SIGPIPE in the calling thread, as writing to a closed socket does.
pub fn raise_sigpipe() {
    // SAFETY: a signal to the calling thread; the application chose its effect.
    unsafe { libc::raise(libc::SIGPIPE) };
}

/// An `int` argument as passed in a register.
pub(crate) fn number(argument: i32) -> usize {
    argument as isize as usize
}
