//! Tap devices: the transmit queue of a channel, by which the filter may also wake its owner. Frames carry
//! a virtio-net header, so that a segment of 64 KiB costs one write.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read, readv, writev};
use rustix::ioctl::{IntegerSetter, Opcode, Setter, Updater, ioctl};

use crate::device::{self, DeviceError};
use crate::{netlink, sysctl};

/// Name prefix of a server's taps; a number follows, or a dash and a word.
pub const PREFIX: &str = "ptl";

/// Bytes of the virtio-net header before each frame: the kernel's default.
pub const VNET_HEADER: usize = 10;

const OFFLOADS: u32 = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;

/// linux/if_tun.h
const TUN_F_USO4: u32 = 0x20;
const TUN_F_USO6: u32 = 0x40;

/// A tap device that lives as long as its descriptor.
#[derive(Debug)]
pub struct Tap {
    pub fd: OwnedFd,
    pub ifindex: u32,
    pub name: String,
    /// A UDP payload may be passed for segmentation into datagrams (USO, Linux 6.2).
    pub cuts_datagrams: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error("device name prefix {0:?} is too long")]
    BadPrefix(String),
    #[error("cannot open /dev/net/tun: {0}")]
    Open(Errno),
    #[error("cannot create a tap device: {0}")]
    Create(Errno),
    #[error("cannot set the tap's offloads: {0}")]
    Offload(Errno),
    #[error("cannot silence the tap: {0}")]
    Silence(#[from] sysctl::WriteError),
    #[error("cannot remove the tap's queueing discipline: {0}")]
    Discipline(Errno),
    #[error("cannot bring the tap up: {0}")]
    Up(Errno),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Tap {
    /// Creates a device `<prefix><number>` in the calling thread's network namespace: down, without addresses, and
    /// without IPv6. Each step takes the lock of all network configuration (rtnl).
    pub fn create(prefix: &str) -> Result<Tap, CreateError> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = open("/dev/net/tun", flags, Mode::empty()).map_err(CreateError::Open)?;
        let name = attach(&fd, prefix)?;
        let cuts_datagrams = cuts_datagrams(&fd);
        set_offloads(&fd, OFFLOADS).map_err(CreateError::Offload)?;
        disable_ipv6(&name)?;
        let ifindex = device::index(&name)?;
        // The tap has a queue of its own, which wakes its reader: 500 frames. The relevant limits are the filter's own.
        netlink::remove_discipline(ifindex).map_err(CreateError::Discipline)?;
        Ok(Tap {
            fd,
            ifindex,
            name,
            cuts_datagrams,
        })
    }

    /// Brings the device up, silently: no ARP, no multicast. What is attached to a device that is up makes the kernel
    /// wait for RCU readers while nobody else can change the network's configuration: attach it before.
    pub fn bring_up(&self) -> Result<(), CreateError> {
        netlink::bring_up_quietly(self.ifindex).map_err(CreateError::Up)
    }

    /// Limits the bytes of frames in transit to the wire; beyond, `write` returns `Blocked`.
    pub fn set_send_buffer(&self, bytes: u32) -> Result<(), Errno> {
        set_send_buffer(&self.fd, bytes)
    }
}

/// The same of a copy of a tap's descriptor. The kernel waits until nobody else changes the network's configuration.
pub fn set_send_buffer(tap: impl AsFd, bytes: u32) -> Result<(), Errno> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: TUNSETSNDBUF reads one int.
    let call = unsafe { Setter::<{ libc::TUNSETSNDBUF as Opcode }, _>::new(bytes) };
    // SAFETY: as above.
    unsafe { ioctl(tap, call) }
}

fn attach(fd: &OwnedFd, prefix: &str) -> Result<String, CreateError> {
    let bad_prefix = || CreateError::BadPrefix(prefix.to_owned());
    // The kernel replaces %d by the first free number.
    let mut request = device::request(&format!("{prefix}%d")).ok_or_else(bad_prefix)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`.
    let call = unsafe { Updater::<{ libc::TUNSETIFF as Opcode }, _>::new(&mut request) };
    // SAFETY: as above.
    unsafe { ioctl(fd, call) }.map_err(CreateError::Create)?;
    Ok(device::name_of(&request))
}

/// Whether the kernel knows the offload is known from whether a tap accepts it as a reader. Unsegmented datagrams are
/// received by the ring, not the tap.
fn cuts_datagrams(fd: &OwnedFd) -> bool {
    static CUTS_DATAGRAMS: OnceLock<bool> = OnceLock::new();
    *CUTS_DATAGRAMS.get_or_init(|| set_offloads(fd, OFFLOADS | TUN_F_USO4 | TUN_F_USO6).is_ok())
}

fn set_offloads(fd: &OwnedFd, offloads: u32) -> Result<(), Errno> {
    // SAFETY: TUNSETOFFLOAD takes an integer of flags.
    let call =
        unsafe { IntegerSetter::<{ libc::TUNSETOFFLOAD as Opcode }>::new_usize(offloads as usize) };
    // SAFETY: as above.
    unsafe { ioctl(fd, call) }
}

/// Keeps the kernel from sending router solicitations and the like through `device`.
fn disable_ipv6(device: &str) -> Result<(), sysctl::WriteError> {
    match sysctl::write(&format!("net/ipv6/conf/{device}/disable_ipv6"), "1") {
        // Without IPv6 in the kernel there is nothing to silence.
        Err(error) if error.errno == Errno::NOENT => Ok(()),
        result => result,
    }
}

/// Why a frame was not written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The send buffer is full; poll for POLLOUT.
    #[error("the tap is full")]
    Blocked,
    #[error("the tap refused the frame: {0}")]
    Refused(Errno),
}

/// Reading and writing frames on a tap's descriptor, owned or borrowed. Never blocks.
#[derive(Debug)]
pub struct TapIo<F> {
    fd: F,
}

impl<F: AsFd> TapIo<F> {
    /// `fd` comes from a [`Tap`], possibly of another process.
    pub fn new(fd: F) -> TapIo<F> {
        TapIo { fd }
    }

    /// Sends one frame: its virtio-net header and data, gathered from `parts`.
    pub fn write(&self, parts: &[IoSlice<'_>]) -> Result<(), WriteError> {
        match writev(&self.fd, parts) {
            Ok(_) => Ok(()),
            // ENOBUFS: the device's queue is full, a temporary condition like a full buffer.
            Err(Errno::AGAIN | Errno::NOBUFS) => Err(WriteError::Blocked),
            Err(errno) => Err(WriteError::Refused(errno)),
        }
    }

    /// Receives one frame with its virtio-net header and returns its length; none if there is none (or
    /// the device is gone, which poll reports as an error).
    pub fn read(&self, buffer: &mut [u8]) -> Option<usize> {
        read(&self.fd, buffer).ok()
    }

    /// Like [`TapIo::read`], into several buffers.
    pub fn read_vectored(&self, parts: &mut [IoSliceMut<'_>]) -> Option<usize> {
        readv(&self.fd, parts).ok()
    }
}

impl<F: AsFd> AsFd for TapIo<F> {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::testing::{in_fresh_namespace, ip, last_close, run};

    /// An ARP request behind a zero header.
    fn frame() -> Vec<u8> {
        let mut frame = vec![0; VNET_HEADER];
        frame.extend_from_slice(&[0xff; 6]);
        frame.extend_from_slice(&[2, 0, 0, 0, 0, 9, 0x08, 0x06]);
        frame.resize(VNET_HEADER + 60, 0);
        frame
    }

    #[test]
    fn a_tap_is_up_silent_and_gone_with_its_descriptor() {
        in_fresh_namespace(|| {
            let tap = Tap::create("ptl").unwrap();
            tap.bring_up().unwrap();
            assert_eq!(tap.name, "ptl0");
            assert_eq!(device::by_name("ptl0").unwrap().index, tap.ifindex);
            let shown = run(Command::new("ip").args(["link", "show", "ptl0"]));
            let shown = String::from_utf8(shown.stdout).unwrap();
            assert!(shown.contains(" qdisc noqueue "), "{shown}");
            assert!(shown.contains("<BROADCAST,NOARP,UP,"), "{shown}");
            let mut buffer = [0; 2048];
            assert_eq!(TapIo::new(&tap.fd).read(&mut buffer), None);
            last_close(tap);
            assert!(device::by_name("ptl0").is_err());
        });
    }

    #[test]
    fn frames_cross_a_bridge_from_tap_to_tap() {
        in_fresh_namespace(|| {
            let (a, b) = (Tap::create("a").unwrap(), Tap::create("b").unwrap());
            a.bring_up().unwrap();
            b.bring_up().unwrap();
            ip("link add br0 type bridge stp_state 0 forward_delay 0");
            ip("link set br0 up");
            ip("link set a0 master br0");
            ip("link set b0 master br0");
            a.set_send_buffer(1 << 20).unwrap();
            let sent = frame();
            let (head, tail) = sent.split_at(VNET_HEADER);
            let parts = [IoSlice::new(head), IoSlice::new(tail)];
            TapIo::new(&a.fd).write(&parts).unwrap();

            let mut buffer = [0; 2048];
            let receiver = TapIo::new(&b.fd);
            while let Some(length) = receiver.read(&mut buffer) {
                if buffer[VNET_HEADER..length] == *tail {
                    return;
                }
            }
            panic!("the frame did not arrive");
        });
    }

    #[test]
    fn a_frame_without_its_header_is_refused() {
        in_fresh_namespace(|| {
            let tap = Tap::create("ptl").unwrap();
            tap.bring_up().unwrap();
            let short = [IoSlice::new(&[0; 4])];
            let refused = TapIo::new(&tap.fd).write(&short);
            assert_eq!(refused, Err(WriteError::Refused(Errno::INVAL)));
        });
    }
}
