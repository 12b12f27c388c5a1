//! Waiting: poll with a deadline and a signal mask, and a word that wakes a waiter.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use portolan_types::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::{clock, raw};

/// Octets of the kernel's signal set, which is shorter than libc's.
const KERNEL_SIGSET: usize = 8;

/// Waits until one of `fds` is ready, `deadline` has passed (none: for ever) or a signal came
/// (`EINTR`); `mask`, if any, replaces the thread's signal mask meanwhile. Returns how many are
/// ready.
pub fn ppoll(
    fds: &mut [libc::pollfd],
    deadline: Option<Instant>,
    mask: Option<&libc::sigset_t>,
) -> Result<usize, Errno> {
    let mut timeout = deadline.map(|deadline| {
        let left = deadline.since(clock::now());
        libc::timespec {
            tv_sec: left.as_secs() as libc::time_t,
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    });
    let timeout = timeout.as_mut().map_or(null_mut::<libc::timespec>(), |t| t);
    let mask = mask.map_or(null(), |mask| mask as *const libc::sigset_t);
    // SAFETY: `fds` is a slice of `pollfd`; `timeout` and `mask` are null or point to values that
    // outlive the call; the mask is longer than the eight octets that the kernel reads.
    unsafe {
        raw::syscall(
            libc::SYS_ppoll,
            [
                fds.as_mut_ptr().expose_provenance(),
                fds.len(),
                timeout.expose_provenance(),
                mask.expose_provenance(),
                KERNEL_SIGSET,
                0,
            ],
        )
    }
}

/// Wakes whoever polls it, once for any number of rings.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
}

impl Bell {
    pub fn new() -> Result<Bell, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Bell { fd })
    }

    /// Another's, whose descriptor came here.
    pub fn from_fd(fd: OwnedFd) -> Bell {
        Bell { fd }
    }

    pub fn ring(&self) {
        // Fails only when it has been rung 2^64 - 2 times, and then it is still ringing.
        let _ = write(&self.fd, &1_u64.to_ne_bytes());
    }

    /// As [`Bell::silence`], but it rings on.
    pub fn is_rung(&self) -> bool {
        let mut fds = [libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        ppoll(&mut fds, Some(Instant::ZERO), None).is_ok_and(|ready| ready > 0)
    }

    /// Silences it; true if it rang.
    pub fn silence(&self) -> bool {
        read(&self.fd, &mut [0; 8]).is_ok()
    }
}

impl From<Bell> for OwnedFd {
    fn from(bell: Bell) -> OwnedFd {
        bell.fd
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The listening side of a bell that other processes ring: a pipe. Who only has the [`Rope`] cannot
/// take a ring away from the listener.
#[derive(Debug)]
pub struct Chime {
    fd: OwnedFd,
}

/// The ringing side.
#[derive(Debug)]
pub struct Rope<F = OwnedFd> {
    fd: F,
}

/// `RWF_NOSIGNAL` (linux/fs.h, since Linux 6.18).
const NO_SIGNAL: usize = 0x100;

/// Does the kernel lack `RWF_NOSIGNAL`?
static LACKS_NO_SIGNAL: AtomicBool = AtomicBool::new(false);

/// A new bell of that kind.
pub fn chime() -> Result<(Chime, Rope), Errno> {
    let (listening, ringing) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    Ok((Chime { fd: listening }, Rope { fd: ringing }))
}

impl Chime {
    /// One whose descriptor came here.
    pub fn from_fd(fd: OwnedFd) -> Chime {
        Chime { fd }
    }

    /// Silences it, unless somebody rings without end.
    pub fn silence(&self) {
        // Fails only if nobody has rung.
        let _ = read(&self.fd, &mut [0; 256]);
    }
}

impl<F: AsFd> Rope<F> {
    /// One whose descriptor came here.
    pub fn from_fd(fd: F) -> Rope<F> {
        Rope { fd }
    }

    /// Rings. A listener who has gone hears nothing, and one whose pipe is full hears enough.
    pub fn pull(&self) {
        if !LACKS_NO_SIGNAL.load(Relaxed) && self.pull_without_signal() != Err(Errno::OPNOTSUPP) {
            return;
        }
        LACKS_NO_SIGNAL.store(true, Relaxed);
        // As above.
        let _ = write(&self.fd, &[0]);
    }

    fn pull_without_signal(&self) -> Result<usize, Errno> {
        const CURRENT: usize = usize::MAX;
        let octet = 0_u8;
        let piece = libc::iovec {
            iov_base: (&raw const octet).cast_mut().cast(),
            iov_len: 1,
        };
        let fd = self.fd.as_fd().as_raw_fd() as usize;
        let piece = (&raw const piece).expose_provenance();
        // SAFETY: one piece of one octet, both of which outlive the call, which only reads them.
        unsafe {
            raw::syscall(
                libc::SYS_pwritev2,
                [fd, piece, 1, CURRENT, CURRENT, NO_SIGNAL],
            )
        }
    }
}

impl AsFd for Chime {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl<F: AsFd> AsFd for Rope<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Chime> for OwnedFd {
    fn from(chime: Chime) -> OwnedFd {
        chime.fd
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn readable(fd: impl AsFd) -> libc::pollfd {
        libc::pollfd {
            fd: fd.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }
    }

    #[test]
    fn a_deadline_ends_the_wait() {
        let start = clock::now();
        let deadline = start + Duration::from_millis(20);
        assert_eq!(ppoll(&mut [], Some(deadline), None), Ok(0));
        assert!(clock::now() >= deadline);
    }

    #[test]
    fn a_deadline_in_the_past_only_looks() {
        let bell = Bell::new().unwrap();
        let past = Some(Instant::ZERO);
        assert_eq!(ppoll(&mut [readable(&bell)], past, None), Ok(0));
        bell.ring();
        assert_eq!(ppoll(&mut [readable(&bell)], past, None), Ok(1));
    }

    #[test]
    fn a_bell_wakes_a_waiter_and_falls_silent() {
        let bell = Bell::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(10));
                bell.ring();
                bell.ring();
            });
            assert_eq!(ppoll(&mut [readable(&bell)], None, None), Ok(1));
        });
        assert!(bell.silence());
        assert!(!bell.silence());
    }

    #[test]
    fn a_rope_rings_the_chime_and_survives_its_end() {
        let (chime, rope) = chime().unwrap();
        let poll = |chime: &Chime| ppoll(&mut [readable(chime)], Some(Instant::ZERO), None);
        assert_eq!(poll(&chime), Ok(0));
        rope.pull();
        rope.pull();
        assert_eq!(poll(&chime), Ok(1));
        chime.silence();
        assert_eq!(poll(&chime), Ok(0));
        assert!(read(&rope.fd, &mut [0]).is_err(), "who rings cannot listen");
        drop(chime);
        if !LACKS_NO_SIGNAL.load(Relaxed) {
            rope.pull();
        }
    }

    #[test]
    fn a_signal_mask_is_accepted() {
        // SAFETY: zero is the empty set.
        let none: libc::sigset_t = unsafe { std::mem::zeroed() };
        assert_eq!(ppoll(&mut [], Some(Instant::ZERO), Some(&none)), Ok(0));
    }
}
