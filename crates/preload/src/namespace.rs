//! Calls that affect only the calling thread – its namespaces, its capabilities –, some of which
//! the kernel refuses to processes with several threads, and forks that do not run libc's handlers.
//! The library's own threads are stopped for them (ADR 26).

use std::ffi::c_void;

use libc::{c_int, c_ulong};
use portolan::posix;

use crate::interpose::{CallError, Outcome};
use crate::process;

type Function = unsafe extern "C" fn(*mut c_void) -> c_int;

interpose! {
    /// `int unshare(int)`
    fn unshare(flags: c_int) -> c_int {
        let next = next!(unshare: fn(c_int) -> c_int);
        Ok(match flags & libc::CLONE_NEWNET {
            0 => posix::without_helper(|| next(flags)),
            _ => posix::while_moving(|| next(flags)),
        })
    }

    /// `int setns(int, int)`: 0 means any kind.
    fn setns(fd: c_int, kind: c_int) -> c_int {
        let next = next!(setns: fn(c_int, c_int) -> c_int);
        Ok(match kind & libc::CLONE_NEWNET {
            0 if kind != 0 => posix::without_helper(|| next(fd, kind)),
            _ => posix::while_moving(|| next(fd, kind)),
        })
    }

    /// `int capset(cap_user_header_t, const cap_user_data_t)`
    fn capset(header: *mut c_void, data: *const c_void) -> c_int {
        let next = next!(capset: fn(*mut c_void, *const c_void) -> c_int);
        Ok(posix::without_helper(|| next(header, data)))
    }

    /// `int clone(int (*)(void *), void *, int, void *, ...)`: three pointers in place of the variable arguments.
    ///
    /// A call that shares the memory is not a fork.
    fn clone(
        function: Option<Function>,
        stack: *mut c_void,
        flags: c_int,
        argument: *mut c_void,
        parent: *mut c_void,
        tls: *mut c_void,
        child: *mut c_void,
    ) -> c_int {
        let (Some(function), 0) = (function, flags & libc::CLONE_VM) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(clone: fn(
            Function, *mut c_void, c_int, *mut c_void, *mut c_void, *mut c_void, *mut c_void
        ) -> c_int);
        let mut start = Start {
            function,
            argument,
            flags: flags as c_ulong,
        };
        let start = (&raw mut start).cast();
        fork(flags as u64, || {
            // The child has a copy of `start`.
            Ok(next(begin, stack, flags, start, parent, tls, child))
        })
    }
}

/// Arguments of the function that the child of `clone` runs.
struct Start {
    function: Function,
    argument: *mut c_void,
    flags: c_ulong,
}

unsafe extern "C" fn begin(start: *mut c_void) -> c_int {
    // SAFETY: passed by `clone`; the child's memory is a copy of its parent's.
    let Start {
        function,
        argument,
        flags,
    } = unsafe { start.cast::<Start>().read() };
    after_fork_in_child(flags);
    // SAFETY: the contract of `clone`.
    let status = unsafe { function(argument) };
    // libc ends only this thread, and the library's own would keep the process alive.
    if posix::has_one_thread() {
        // SAFETY: the thread ends here in any case.
        unsafe { process::_exit(status) }
    }
    status
}

/// Performs a fork by the kernel's call, of a child that does not share the memory. In the child `clone` returns 0, if
/// at all.
pub(crate) fn fork<T: PartialEq + From<i8>>(
    flags: c_ulong,
    clone: impl FnOnce() -> Outcome<T>,
) -> Outcome<T> {
    posix::before_fork();
    if has_own_network(flags) {
        posix::before_fork_to_namespace();
    }
    posix::without_helper(|| {
        let _outside = posix::leave();
        posix::freeze();
        let child = clone();
        if matches!(&child, Ok(child) if *child == T::from(0)) {
            after_fork_in_child(flags);
        } else {
            posix::after_fork_in_parent();
        }
        child
    })
}

fn after_fork_in_child(flags: c_ulong) {
    posix::after_fork_in_child();
    if has_own_network(flags) {
        posix::after_fork_to_namespace();
    }
}

fn has_own_network(flags: c_ulong) -> bool {
    flags & libc::CLONE_NEWNET as c_ulong != 0
}
