//! The owner of a descriptor, which receives its signals (fcntl(2), "Managing signals"), and signalling it.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use rustix::fs::{fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use crate::descriptor::{borrow, number};
use crate::raw;

/// Copies `O_NONBLOCK`, `O_ASYNC` and the owner, which belong to the open file that `from` refers to,
/// to `to`, which will replace it.
pub fn inherit_status(from: RawFd, to: impl AsFd) -> Result<(), Errno> {
    let to = to.as_fd();
    let mut owner = owner_of(from)?;
    // SAFETY: integers, and a structure that outlives the call.
    unsafe {
        let signal = control(from, F_GETSIG, 0)?;
        control(to.as_raw_fd(), F_SETSIG, signal)?;
        if owner.id != 0 {
            let owner = std::ptr::from_mut(&mut owner).expose_provenance();
            control(to.as_raw_fd(), F_SETOWN_EX, owner)?;
        }
    }
    fcntl_setfl(to, fcntl_getfl(borrow(from)?)?)
}

/// Sends SIGURG to the owner of the descriptor, if `F_SETOWN` has set one (fcntl(2)).
pub fn raise_sigurg(fd: RawFd) {
    if let Ok(owner) = owner_of(fd) {
        owner.signal(libc::SIGURG);
    }
}

/// Like [`raise_sigurg`], for an event of a descriptor with `O_ASYNC`: SIGIO, or the signal set by `F_SETSIG`.
pub fn raise_sigio(fd: RawFd, event: IoEvent) {
    let (Ok(owner), Ok(signal)) = (
        owner_of(fd),
        // SAFETY: integers only.
        unsafe { control(fd, F_GETSIG, 0) },
    ) else {
        return;
    };
    match signal {
        0 => owner.signal(libc::SIGIO),
        signal => owner.queue(signal as i32, fd, event),
    }
}

/// The event reported with a signal of `F_SETSIG` (sigaction(2), `si_code` of `SIGIO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEvent {
    In,
    Out,
}

// fcntl(2), and the kinds of owners other than a process.
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;
const THREAD: i32 = 0;
const GROUP: i32 = 2;

/// `struct f_owner_ex`: a kind, and the ID of a thread, process or group.
#[repr(C)]
struct Owner {
    kind: i32,
    id: i32,
}

fn owner_of(fd: RawFd) -> Result<Owner, Errno> {
    let mut owner = Owner { kind: 0, id: 0 };
    // SAFETY: the kernel writes one `f_owner_ex`.
    unsafe {
        let owner = std::ptr::from_mut(&mut owner).expose_provenance();
        control(fd, F_GETOWN_EX, owner)?;
    }
    Ok(owner)
}

/// `fcntl` without the libc function.
///
/// # Safety
/// As required by the command.
unsafe fn control(fd: RawFd, command: i32, argument: usize) -> Result<usize, Errno> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        raw::syscall(
            libc::SYS_fcntl,
            [number(fd), number(command), argument, 0, 0, 0],
        )
    }
}

impl Owner {
    fn signal(&self, signal: i32) {
        if self.id == 0 {
            return;
        }
        let (call, id) = match self.kind {
            THREAD => (libc::SYS_tkill, self.id),
            GROUP => (libc::SYS_kill, -self.id),
            _ => (libc::SYS_kill, self.id),
        };
        // SAFETY: the application has chosen the target; it may no longer exist.
        let _ = unsafe { raw::syscall(call, [number(id), number(signal), 0, 0, 0, 0]) };
    }

    /// Sends a signal with a `siginfo_t`, which the kernel accepts for the process's own threads only;
    /// others get the signal without it.
    fn queue(&self, signal: i32, fd: RawFd, event: IoEvent) {
        /// The part of `siginfo_t` that `SIGIO` uses, in its 128 bytes.
        #[repr(C)]
        struct Info {
            signal: i32,
            errno: i32,
            code: i32,
            _pad: i32,
            band: i64,
            fd: i32,
            _rest: [i32; 25],
        }
        let (code, band) = match event {
            IoEvent::In => (1, libc::POLLIN | libc::POLLRDNORM),
            IoEvent::Out => (2, libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND),
        };
        let info = Info {
            signal,
            errno: 0,
            code,
            _pad: 0,
            band: band.into(),
            fd,
            _rest: [0; 25],
        };
        let info = std::ptr::from_ref(&info).expose_provenance();
        let own = rustix::process::getpid().as_raw_pid();
        let (call, arguments) = match self.kind {
            THREAD => (
                libc::SYS_rt_tgsigqueueinfo,
                [number(own), number(self.id), number(signal), info, 0, 0],
            ),
            _ => (
                libc::SYS_rt_sigqueueinfo,
                [number(self.id), number(signal), info, 0, 0, 0],
            ),
        };
        // SAFETY: `info` outlives the call and is as long as a `siginfo_t`.
        let is_queued = self.kind != GROUP && unsafe { raw::syscall(call, arguments) }.is_ok();
        if !is_queued {
            self.signal(signal);
        }
    }
}
