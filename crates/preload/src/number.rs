//! `syscall(2)`: programs that make system calls by number reach the same translation (libuv closes its sockets this
//! way).
//!
//! Only calls that involve Portolan's descriptors are handled here; all others go to the kernel unchanged.

use std::{ffi::c_long, mem, ptr, time::Duration};

use libc::{c_int, sigset_t};
use portolan::posix;
use rustix::io::Errno;

use crate::{
    descriptors, exec,
    interpose::{CallError, Outcome, ours},
    io, memory, multiplex, namespace, rights, select, socket,
    table::{self, Symbol},
    time,
};

interpose! {
    /// `long syscall(long, ...)`: six integers or pointers in place of the variable arguments.
    fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
        // libc's own is no cancellation point.
        let _disabled = posix::disable_cancel();
        let arguments = [a, b, c, d, e, f];
        match makes_descriptors(number, arguments).or_else(|refusal| match refusal {
            CallError::NotOurs => waits(number, arguments),
            refused => Err(refused),
        }).or_else(|refusal| match refusal {
            CallError::NotOurs => forks(number, arguments),
            refused => Err(refused),
        }) {
            Err(CallError::NotOurs) => works_on_one(number, arguments),
            answered => answered,
        }
    } afterwards(returned) {
        take_up(number, b, returned);
    }
}

/// Registers descriptors that a system call has received.
///
/// # Safety
/// The contract of the call.
unsafe fn take_up(number: c_long, second: usize, returned: c_long) {
    match number {
        libc::SYS_pidfd_getfd => posix::attach(returned as c_int),
        libc::SYS_recvmsg if returned >= 0 => {
            // SAFETY: the caller's promise.
            unsafe { rights::take_up(ptr::with_exposed_provenance(second)) };
        }
        _ => {}
    }
}

/// Makes a system call, bypassing the library's symbols.
///
/// # Safety
/// The contract of the call.
pub(crate) unsafe fn raw(number: c_long, [a, b, c]: [usize; 3]) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { raw_long(number, [a, b, c, 0, 0, 0]) }
}

/// As [`raw`], for calls with more arguments.
///
/// # Safety
/// The contract of the call.
unsafe fn raw_long(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> Result<usize, Errno> {
    type Call = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
    let next = table::next(Symbol::syscall);
    if next.is_null() {
        return Err(Errno::NOSYS);
    }
    // SAFETY: libc's syscall takes integers in the registers of its variable arguments.
    let call: Call = unsafe { mem::transmute(next) };
    // SAFETY: the caller's promise.
    let result = unsafe { call(number, a, b, c, d, e, f) };
    usize::try_from(result).map_err(|_| memory::last_error())
}

/// A fork by number does not run the handlers. One that shares the memory is not a fork: see [`posix::before_exec`].
///
/// # Safety
/// The contract of the call.
unsafe fn forks(number: c_long, arguments: [usize; 6]) -> Outcome<c_long> {
    let flags = match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => 0,
        libc::SYS_clone => arguments[0] as u64,
        libc::SYS_clone3 => memory::load(ptr::with_exposed_provenance::<u64>(arguments[0]))?,
        _ => return Err(CallError::NotOurs),
    };
    if flags & libc::CLONE_VM as u64 != 0 {
        return Err(CallError::NotOurs);
    }
    namespace::fork(flags, || {
        // SAFETY: the caller's promise.
        Ok(unsafe { raw_long(number, arguments) }? as c_long)
    })
}

/// Calls that create descriptors, and io_uring, which would bypass the library.
fn makes_descriptors(number: c_long, [a, b, c, ..]: [usize; 6]) -> Outcome<c_long> {
    let made = match number {
        libc::SYS_socket => posix::socket(a as c_int, b as c_int, c as c_int),
        libc::SYS_epoll_create1 if a as c_int & !libc::EPOLL_CLOEXEC == 0 => {
            posix::epoll_create(a as c_int)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_create if a as c_int > 0 => posix::epoll_create(0),
        libc::SYS_io_uring_setup if posix::is_active() => return Err(Errno::NOSYS.into()),
        _ => return Err(CallError::NotOurs),
    };
    made.map(c_long::from)
}

/// Calls that wait for several descriptors. Their signal sets are the kernel's, shorter than libc's.
///
/// # Safety
/// The contract of the call.
unsafe fn waits(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> Outcome<c_long> {
    let at_timespec = |timeout: usize| time::at_timespec(ptr::with_exposed_provenance(timeout));
    let milliseconds =
        |timeout: usize| Ok::<Option<Duration>, Errno>(time::milliseconds(timeout as c_int));
    // SAFETY: the caller's promise.
    let waited = unsafe {
        match number {
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => multiplex::poll_any(a as _, b as _, || milliseconds(c), || Ok(None)),
            libc::SYS_ppoll => multiplex::poll_any(a as _, b as _, || at_timespec(c), || mask(d)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => multiplex::select_any(a as _, [b as _, c as _, d as _], e as _),
            libc::SYS_pselect6 => {
                let sets = select::Sets::borrow(a as _, [b as _, c as _, d as _])?;
                let mask = if f == 0 {
                    None
                } else {
                    mask(memory::load(f as *const usize)?)?
                };
                sets.wait(&select::Wait::until(at_timespec(e)?), mask.as_ref())
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => {
                multiplex::epoll_any(a as _, b as _, c as _, || milliseconds(d), || Ok(None))
            }
            libc::SYS_epoll_pwait => {
                multiplex::epoll_any(a as _, b as _, c as _, || milliseconds(d), || mask(e))
            }
            libc::SYS_epoll_pwait2 => {
                multiplex::epoll_any(a as _, b as _, c as _, || at_timespec(d), || mask(e))
            }
            _ => Err(CallError::NotOurs),
        }
    };
    waited.map(c_long::from)
}

/// Calls with the descriptor as first argument, or with another descriptor after it.
///
/// # Safety
/// The contract of the call.
unsafe fn works_on_one(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> Outcome<c_long> {
    if number == libc::SYS_exit_group {
        posix::before_exit();
        return Err(CallError::NotOurs);
    }
    // SAFETY: the caller's promise; the functions have the contracts of the calls.
    unsafe {
        match number {
            libc::SYS_execve => return Ok(exec::execve(a as _, b as _, c as _).into()),
            libc::SYS_execveat => {
                return Ok(exec::execveat(a as _, b as _, c as _, d as _, e as _).into());
            }
            libc::SYS_unshare => return Ok(namespace::unshare(a as _).into()),
            libc::SYS_setns => return Ok(namespace::setns(a as _, b as _).into()),
            libc::SYS_capset => return Ok(namespace::capset(a as _, b as _).into()),
            libc::SYS_chroot => posix::before_chroot(),
            libc::SYS_seccomp => posix::before_confinement(),
            libc::SYS_prctl if a as c_int == libc::PR_SET_SECCOMP => posix::before_confinement(),
            libc::SYS_sendmsg if !posix::is_ours(a as c_int) => {
                rights::give_away(ptr::with_exposed_provenance(b));
            }
            _ => {}
        }
    }
    if number == libc::SYS_close_range {
        // SAFETY: the caller's promise.
        return Ok(unsafe { descriptors::close_range(a as _, b as _, c as _) }.into());
    }
    let second = match number {
        libc::SYS_dup3 | libc::SYS_sendfile => b,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_dup2 => b,
        libc::SYS_splice | libc::SYS_epoll_ctl => c,
        _ => a,
    };
    ours(a as c_int).or_else(|_| ours(second as c_int))?;
    // SAFETY: the caller's promise; the functions have the contracts of the calls.
    let result = unsafe {
        match number {
            libc::SYS_read => io::read(a as _, b as _, c) as c_long,
            libc::SYS_write => io::write(a as _, b as _, c) as c_long,
            libc::SYS_readv => io::readv(a as _, b as _, c as _) as c_long,
            libc::SYS_writev => io::writev(a as _, b as _, c as _) as c_long,
            // The offset comes in two halves; a 64-bit machine uses the first.
            libc::SYS_preadv2 => io::preadv2(a as _, b as _, c as _, d as _, f as _) as c_long,
            libc::SYS_pwritev2 => io::pwritev2(a as _, b as _, c as _, d as _, f as _) as c_long,
            libc::SYS_recvfrom => io::recvfrom(a as _, b as _, c, d as _, e as _, f as _) as c_long,
            libc::SYS_sendto => io::sendto(a as _, b as _, c, d as _, e as _, f as _) as c_long,
            libc::SYS_recvmsg => io::recvmsg(a as _, b as _, c as _) as c_long,
            libc::SYS_sendmsg => io::sendmsg(a as _, b as _, c as _) as c_long,
            libc::SYS_recvmmsg => io::recvmmsg(a as _, b as _, c as _, d as _, e as _).into(),
            libc::SYS_sendmmsg => io::sendmmsg(a as _, b as _, c as _, d as _).into(),
            libc::SYS_sendfile => io::sendfile(a as _, b as _, c as _, d) as c_long,
            libc::SYS_splice => io::splice(a as _, b as _, c as _, d as _, e, f as _) as c_long,
            libc::SYS_bind => socket::bind(a as _, b as _, c as _).into(),
            libc::SYS_connect => socket::connect(a as _, b as _, c as _).into(),
            libc::SYS_listen => socket::listen(a as _, b as _).into(),
            libc::SYS_accept => socket::accept(a as _, b as _, c as _).into(),
            libc::SYS_accept4 => socket::accept4(a as _, b as _, c as _, d as _).into(),
            libc::SYS_shutdown => socket::shutdown(a as _, b as _).into(),
            libc::SYS_getsockname => socket::getsockname(a as _, b as _, c as _).into(),
            libc::SYS_getpeername => socket::getpeername(a as _, b as _, c as _).into(),
            libc::SYS_getsockopt => {
                socket::getsockopt(a as _, b as _, c as _, d as _, e as _).into()
            }
            libc::SYS_setsockopt => {
                socket::setsockopt(a as _, b as _, c as _, d as _, e as _).into()
            }
            libc::SYS_epoll_ctl => multiplex::epoll_ctl(a as _, b as _, c as _, d as _).into(),
            libc::SYS_close => descriptors::close(a as _).into(),
            libc::SYS_dup => descriptors::dup(a as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => descriptors::dup2(a as _, b as _).into(),
            libc::SYS_dup3 => descriptors::dup3(a as _, b as _, c as _).into(),
            libc::SYS_fcntl => descriptors::fcntl(a as _, b as _, c).into(),
            libc::SYS_ioctl => descriptors::ioctl(a as _, b as _, c as _).into(),
            _ => return Err(CallError::NotOurs),
        }
    };
    Ok(result)
}

/// Converts the kernel's signal set at `pointer` to libc's.
fn mask(pointer: usize) -> Result<Option<sigset_t>, Errno> {
    if pointer == 0 {
        return Ok(None);
    }
    multiplex::kernels_signals(ptr::with_exposed_provenance(pointer)).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_no_interest_reach_the_kernel() {
        // SAFETY: getpid has no arguments.
        let pid = unsafe { syscall(libc::SYS_getpid, 0, 0, 0, 0, 0, 0) };
        assert_eq!(pid, std::process::id() as c_long);
    }

    #[test]
    fn an_error_by_number_is_minus_one_and_errno() {
        // SAFETY: no descriptor has this number.
        let closed = unsafe { syscall(libc::SYS_close, usize::MAX, 0, 0, 0, 0, 0) };
        assert_eq!((closed, memory::last_error()), (-1, Errno::BADF));
    }

    #[test]
    fn the_kernels_signal_set_becomes_libcs() {
        let signals = 1_u64 << (libc::SIGUSR1 - 1);
        let set = mask((&raw const signals).expose_provenance())
            .unwrap()
            .unwrap();
        // SAFETY: the set is initialised.
        let members =
            unsafe { [libc::SIGUSR1, libc::SIGUSR2].map(|signal| libc::sigismember(&set, signal)) };
        assert_eq!(members, [1, 0]);
    }
}
