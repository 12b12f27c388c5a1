//! Waiting: poll with a deadline and a signal mask, and notifiers that wake a waiter.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr::{null, null_mut};

use portolan_types::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, open, openat, unlinkat};
use rustix::io::{Errno, read, write};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    recv, send, socket_with, socketpair,
};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::{clock, raw};

/// Size of the kernel's signal set, which is smaller than libc's.
const KERNEL_SIGSET: usize = 8;

/// Waits until one of `fds` is ready, `deadline` has passed (none: no limit) or a signal arrives
/// (`EINTR`). `mask`, if given, replaces the thread's signal mask meanwhile. Returns the number of
/// ready descriptors.
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
    // outlive the call; the mask is longer than the eight bytes that the kernel reads.
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

/// An entry for [`ppoll`].
pub fn pollfd(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

/// Wakes the threads of this process that poll it, once for any number of notifications. An eventfd: a
/// holder can make writes to it block, so it is given to no other process; for those see [`wake_receiver`].
#[derive(Debug)]
pub struct EventNotifier {
    fd: OwnedFd,
}

impl EventNotifier {
    pub fn new() -> Result<EventNotifier, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(EventNotifier { fd })
    }

    /// Wraps a descriptor of a notifier.
    pub fn from_fd(fd: OwnedFd) -> EventNotifier {
        EventNotifier { fd }
    }

    pub fn notify(&self) {
        // Fails only after 2^64 - 2 notifications, and then it is set.
        let _ = write(&self.fd, &1_u64.to_ne_bytes());
    }

    /// Clears it; returns true if it was set.
    pub fn drain(&self) -> bool {
        read(&self.fd, &mut [0; 8]).is_ok()
    }
}

impl From<EventNotifier> for OwnedFd {
    fn from(notifier: EventNotifier) -> OwnedFd {
        notifier.fd
    }
}

impl AsFd for EventNotifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The receiving side of wake-ups between processes that do not trust each other: a datagram socket.
/// Each sender has a [`WakeSender`], a socket of its own, so that a process cannot affect another's
/// calls through its descriptor. A send takes no lock that a process can hold while it sleeps, unlike the
/// mutex of a pipe, and `MSG_DONTWAIT` is effective whatever the descriptor's flags.
#[derive(Debug)]
pub struct WakeReceiver {
    fd: OwnedFd,
}

/// A sending side.
#[derive(Debug)]
pub struct WakeSender<F = OwnedFd> {
    fd: F,
}

/// The address to which the senders of one [`WakeReceiver`] connect: its name in the file system, which
/// has been removed, so that nobody else can connect.
#[derive(Debug)]
pub struct WakeAddress {
    inode: OwnedFd,
}

/// Wake-ups taken at a time. A queue holds `net.unix.max_dgram_qlen`, ten by default.
const MOST_AT_ONCE: usize = 16;

/// Creates a receiver in `directory`, where its name exists for a moment only.
pub fn wake_receiver(directory: &Path) -> Result<(WakeReceiver, WakeAddress), Errno> {
    let fd = datagram_socket()?;
    // The mode of the name determines who may connect.
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    let path_only = OFlags::PATH | OFlags::CLOEXEC;
    let directory = open(directory, path_only | OFlags::DIRECTORY, Mode::empty())?;
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty())?;
    let name = format!(".wake-{:016x}", u64::from_ne_bytes(random));
    // A socket's path is limited in length, a directory's is not.
    let path = format!("/proc/self/fd/{}/{name}", directory.as_raw_fd());
    bind(&fd, &SocketAddrUnix::new(path)?)?;
    let inode = openat(
        &directory,
        &name,
        path_only | OFlags::NOFOLLOW,
        Mode::empty(),
    );
    unlinkat(&directory, &name, AtFlags::empty())?;
    Ok((WakeReceiver { fd }, WakeAddress { inode: inode? }))
}

/// A receiver with one sender, for two processes.
pub fn wake_pair() -> Result<(WakeReceiver, WakeSender), Errno> {
    let (receiving, sending) = socketpair(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok((WakeReceiver { fd: receiving }, WakeSender { fd: sending }))
}

fn datagram_socket() -> Result<OwnedFd, Errno> {
    let kind = SocketType::DGRAM;
    socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

impl WakeAddress {
    /// Creates another sender.
    pub fn wake_sender(&self) -> Result<WakeSender, Errno> {
        let fd = datagram_socket()?;
        let path = format!("/proc/self/fd/{}", self.inode.as_raw_fd());
        connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(WakeSender { fd })
    }
}

impl WakeReceiver {
    /// Wraps a received descriptor.
    pub fn from_fd(fd: OwnedFd) -> WakeReceiver {
        WakeReceiver { fd }
    }

    /// Like [`WakeReceiver::drain`], without clearing it.
    pub fn is_notified(&self) -> bool {
        let mut fds = [pollfd(self.fd.as_raw_fd(), libc::POLLIN)];
        ppoll(&mut fds, Some(Instant::ZERO), None).is_ok_and(|ready| ready > 0)
    }

    /// Clears it, unless notified continuously; returns true if it was set.
    pub fn drain(&self) -> bool {
        // Fails only if nothing was sent.
        let take = || recv(&self.fd, &mut [0_u8; 1], RecvFlags::DONTWAIT).is_ok();
        (0..MOST_AT_ONCE).take_while(|_| take()).count() > 0
    }
}

impl<F: AsFd> WakeSender<F> {
    /// Wraps a received descriptor.
    pub fn from_fd(fd: F) -> WakeSender<F> {
        WakeSender { fd }
    }

    /// Notifies the receiver. Ignored if it no longer exists, or if its queue is full, which wakes it anyway.
    pub fn wake(&self) {
        let _ = send(&self.fd, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

impl AsFd for WakeReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl<F: AsFd> AsFd for WakeSender<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<WakeReceiver> for OwnedFd {
    fn from(wake_receiver: WakeReceiver) -> OwnedFd {
        wake_receiver.fd
    }
}

impl From<WakeSender> for OwnedFd {
    fn from(wake_sender: WakeSender) -> OwnedFd {
        wake_sender.fd
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn readable(fd: impl AsFd) -> libc::pollfd {
        pollfd(fd.as_fd().as_raw_fd(), libc::POLLIN)
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
        let notifier = EventNotifier::new().unwrap();
        let past = Some(Instant::ZERO);
        assert_eq!(ppoll(&mut [readable(&notifier)], past, None), Ok(0));
        notifier.notify();
        assert_eq!(ppoll(&mut [readable(&notifier)], past, None), Ok(1));
    }

    #[test]
    fn a_notifier_wakes_a_waiter_and_falls_silent() {
        let notifier = EventNotifier::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(10));
                notifier.notify();
                notifier.notify();
            });
            assert_eq!(ppoll(&mut [readable(&notifier)], None, None), Ok(1));
        });
        assert!(notifier.drain());
        assert!(!notifier.drain());
    }

    #[test]
    fn each_wake_sender_rings_the_wake_receiver_and_survives_its_end() {
        let (wake_receiver, address) = wake_receiver(&std::env::temp_dir()).unwrap();
        let wake_senders = [
            address.wake_sender().unwrap(),
            address.wake_sender().unwrap(),
        ];
        assert!(!wake_receiver.is_notified());
        for wake_sender in &wake_senders {
            wake_sender.wake();
            wake_sender.wake();
        }
        assert!(wake_receiver.is_notified());
        assert!(wake_receiver.drain());
        assert!(!wake_receiver.is_notified() && !wake_receiver.drain());
        for _ in 0..100 {
            wake_senders[0].wake();
        }
        assert!(wake_receiver.drain(), "a full queue rings");
        drop(wake_receiver);
        wake_senders[1].wake();
    }

    #[test]
    fn nothing_that_one_sender_does_to_its_socket_keeps_another_from_ringing() {
        let (wake_receiver, address) = wake_receiver(&std::env::temp_dir()).unwrap();
        let (hostile, honest) = (
            address.wake_sender().unwrap(),
            address.wake_sender().unwrap(),
        );
        rustix::net::shutdown(&hostile, rustix::net::Shutdown::Both).unwrap();
        honest.wake();
        assert!(wake_receiver.drain());
    }

    #[test]
    fn the_name_of_a_wake_receiver_is_gone_once_it_is_made() {
        let name = format!("wake-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let made = wake_receiver(&directory).unwrap();
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        std::fs::remove_dir(&directory).unwrap();
        made.1.wake_sender().unwrap().wake();
        assert!(made.0.drain());
    }

    #[test]
    fn a_signal_mask_is_accepted() {
        // SAFETY: zero is the empty set.
        let none: libc::sigset_t = unsafe { std::mem::zeroed() };
        assert_eq!(ppoll(&mut [], Some(Instant::ZERO), Some(&none)), Ok(0));
    }
}
