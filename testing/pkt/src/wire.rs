//! The far end of the link: a packet socket that receives every frame with the kernel's time stamp,
//! so that a delay of the runner does not distort the measured times.
//!
//! The only unsafe code of this crate: calls that rustix does not wrap.

use std::cell::RefCell;
use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use portolan_netns::Namespace;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

const ETHERNET_HEADER: usize = 14;
const ETHERTYPE_V4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_V6: [u8; 2] = [0x86, 0xdd];
const LARGEST: usize = 1 << 17;
/// Room for all frames of a script, should none be read.
const RECEIVE_BUFFER: libc::c_int = 4 << 20;

/// Packets to and from the stack under test.
pub struct Wire {
    socket: OwnedFd,
    /// Both MAC addresses: that of the stack under test, then that of the remote host.
    macs: [u8; 12],
    /// The buffer for the next frame, which is reused: allocating one for each frame would make the
    /// threads of all runners contend for the memory map.
    frame: RefCell<Vec<u8>>,
}

/// Returns the time of the monotonic clock.
pub fn now() -> Duration {
    duration(clock_gettime(ClockId::Monotonic))
}

fn duration(time: Timespec) -> Duration {
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Wire {
    /// Attaches to a device of `namespace`.
    pub fn open(namespace: &Namespace, device: &str, macs: [u8; 12]) -> io::Result<Wire> {
        namespace.enter(|| {
            let socket = open_socket()?;
            let index = rustix::net::netdevice::name_to_index(&socket, device)?;
            bind(&socket, index)?;
            Ok(Wire {
                socket,
                macs,
                frame: RefCell::new(vec![0; LARGEST]),
            })
        })
    }

    /// Sends an IP packet on the link.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        let kind = match packet.first().map(|byte| byte >> 4) {
            Some(6) => ETHERTYPE_V6,
            _ => ETHERTYPE_V4,
        };
        let frame = [&self.macs[..], &kind, packet].concat();
        rustix::net::send(&self.socket, &frame, rustix::net::SendFlags::empty())?;
        Ok(())
    }

    /// Returns the next IP packet that the stack under test has sent, with its time, waiting until `deadline`.
    pub fn receive(&self, deadline: Duration) -> Option<(Duration, Vec<u8>)> {
        loop {
            if let Some(found) = self.receive_now() {
                match found {
                    Some(found) => return Some(found),
                    None => continue,
                }
            }
            let left = deadline.checked_sub(now())?;
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            // After an interruption, the socket is checked again.
            let _ = poll(&mut fds, Some(&timeout));
        }
    }

    /// Returns None if no frame waits, and Some(None) for a frame that is no IP packet.
    fn receive_now(&self) -> Option<Option<(Duration, Vec<u8>)>> {
        let mut frame = self.frame.borrow_mut();
        let (length, stamp) = receive_stamped(&self.socket, &mut frame)?;
        let frame = frame.get(..length)?;
        let kind = frame.get(12..ETHERNET_HEADER)?;
        if kind != ETHERTYPE_V4 && kind != ETHERTYPE_V6 {
            return Some(None);
        }
        // Time stamps are of the wall clock.
        let age = duration(clock_gettime(ClockId::Realtime)).saturating_sub(stamp);
        let at = now().saturating_sub(age);
        Some(Some((at, frame[ETHERNET_HEADER..].to_vec())))
    }

    /// Discards all received frames.
    pub fn drain(&self) {
        while self.receive_now().is_some() {}
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

const EVERYTHING: u16 = (libc::ETH_P_ALL as u16).to_be();

fn open_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the arguments are integers.
    let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
    // SAFETY: the descriptor was just opened, and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    set(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    set(
        &socket,
        libc::SOL_SOCKET,
        libc::SO_RCVBUFFORCE,
        RECEIVE_BUFFER,
    )?;
    Ok(socket)
}

/// Frames are received from this call on.
fn bind(socket: &OwnedFd, index: u32) -> io::Result<()> {
    // SAFETY: an address of zeros is valid.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = EVERYTHING;
    address.sll_ifindex = index as i32;
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: `address` is valid and has this length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(())
}

fn set(socket: &OwnedFd, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    let pointer = (&raw const value).cast();
    // SAFETY: the option's value is one int, which is valid.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, pointer, length) })?;
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        other => Ok(other),
    }
}

/// Returns the length and the time stamp of the next frame; None if no frame waits.
fn receive_stamped(socket: &OwnedFd, frame: &mut [u8]) -> Option<(usize, Duration)> {
    let mut control = [0_u64; 16];
    let mut piece = libc::iovec {
        iov_base: frame.as_mut_ptr().cast(),
        iov_len: frame.len(),
    };
    // SAFETY: a msghdr of zeros is valid.
    let mut header: libc::msghdr = unsafe { zeroed() };
    header.msg_iov = &raw mut piece;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control);
    // SAFETY: the header describes valid buffers.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, 0) };
    let length = usize::try_from(length).ok()?;
    // SAFETY: recvmsg wrote well-formed control messages; a time stamp is one timespec.
    let stamp = unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&header);
        let mut stamp = None;
        while !next.is_null() {
            if (*next).cmsg_level == libc::SOL_SOCKET && (*next).cmsg_type == libc::SO_TIMESTAMPNS {
                let time: libc::timespec = libc::CMSG_DATA(next)
                    .cast::<libc::timespec>()
                    .read_unaligned();
                stamp = Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32));
            }
            next = libc::CMSG_NXTHDR(&header, next);
        }
        stamp
    };
    // A frame without a time stamp is taken to have arrived just now.
    let stamp = stamp.unwrap_or_else(|| duration(clock_gettime(ClockId::Realtime)));
    Some((length, stamp))
}
