//! Properties of a network device, from the classic device ioctls.

use std::os::fd::OwnedFd;

use portolan_types::MacAddr;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::net::netdevice::index_to_name;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// A snapshot of a device's properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub index: u32,
    pub mac: MacAddr,
    pub mtu: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("no device has the name {0:?}")]
    BadName(String),
    #[error("device {0} is not Ethernet: Portolan filters frames with Ethernet headers")]
    NotEthernet(String),
    #[error("cannot ask about device {name}: {errno}")]
    Ask { name: String, errno: Errno },
}

/// Looks up the Ethernet device `name` in the calling thread's network namespace.
pub fn by_name(name: &str) -> Result<Device, DeviceError> {
    let ask = |errno| DeviceError::Ask {
        name: name.to_owned(),
        errno,
    };
    let device = Requests::about(name)?;
    let Some(mac) = device.mac().map_err(ask)? else {
        return Err(DeviceError::NotEthernet(name.to_owned()));
    };
    Ok(Device {
        index: device.index().map_err(ask)?,
        mac,
        mtu: device.mtu().map_err(ask)?,
    })
}

/// Whether a device with that index exists in the calling thread's network namespace; true if that cannot be
/// determined.
pub fn exists(index: u32) -> bool {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
    let name = socket.and_then(|socket| index_to_name(socket, index));
    !matches!(name, Err(Errno::NODEV))
}

/// The device's rate in bits per second; none if unknown.
pub fn rate(name: &str) -> Option<u64> {
    Requests::about(name).ok()?.rate().ok().flatten()
}

/// Index of device `name`.
pub(crate) fn index(name: &str) -> Result<u32, DeviceError> {
    Requests::about(name)?
        .index()
        .map_err(|errno| DeviceError::Ask {
            name: name.to_owned(),
            errno,
        })
}

/// An `ifreq` that names `name`, otherwise zero.
pub(crate) fn request(name: &str) -> Option<libc::ifreq> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.contains(&0) {
        return None;
    }
    // SAFETY: `ifreq` consists of integers and unions of them, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Some(request)
}

/// The name in an `ifreq`.
pub(crate) fn name_of(request: &libc::ifreq) -> String {
    let bytes = request.ifr_name.iter().map(|byte| *byte as u8);
    let name: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&name).into_owned()
}

/// Device ioctls about one name, on a socket opened for this purpose.
struct Requests {
    socket: OwnedFd,
    named: libc::ifreq,
}

impl Requests {
    fn about(name: &str) -> Result<Requests, DeviceError> {
        let named = request(name).ok_or_else(|| DeviceError::BadName(name.to_owned()))?;
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| DeviceError::Ask {
            name: name.to_owned(),
            errno,
        })?;
        Ok(Requests { socket, named })
    }

    fn index(&self) -> Result<u32, Errno> {
        let answer = self.perform::<{ libc::SIOCGIFINDEX as Opcode }>(self.named)?;
        // SAFETY: SIOCGIFINDEX fills this member.
        Ok(unsafe { answer.ifr_ifru.ifru_ifindex } as u32)
    }

    fn mtu(&self) -> Result<u32, Errno> {
        let answer = self.perform::<{ libc::SIOCGIFMTU as Opcode }>(self.named)?;
        // SAFETY: SIOCGIFMTU fills this member.
        Ok(unsafe { answer.ifr_ifru.ifru_mtu } as u32)
    }

    /// None if the device is not Ethernet, like the loopback device.
    fn mac(&self) -> Result<Option<MacAddr>, Errno> {
        let answer = self.perform::<{ libc::SIOCGIFHWADDR as Opcode }>(self.named)?;
        // SAFETY: SIOCGIFHWADDR fills this member.
        let address = unsafe { answer.ifr_ifru.ifru_hwaddr };
        let bytes = address.sa_data;
        let mac = MacAddr(std::array::from_fn(|index| bytes[index] as u8));
        Ok((address.sa_family == libc::ARPHRD_ETHER).then_some(mac))
    }

    /// `ETHTOOL_GSET` works for every driver; only the speed in Mbit/s is read from `ethtool_cmd`.
    fn rate(&self) -> Result<Option<u64>, Errno> {
        const ETHTOOL_GSET: u32 = 1;
        const UNKNOWN: u32 = u32::MAX;
        let mut command = [0_u32; 11];
        command[0] = ETHTOOL_GSET;
        let mut request = self.named;
        request.ifr_ifru.ifru_data = command.as_mut_ptr().cast();
        self.perform::<{ libc::SIOCETHTOOL as Opcode }>(request)?;
        let bytes: Vec<u8> = command.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (low, high) = (&bytes[12..14], &bytes[28..30]);
        let half = |bytes: &[u8]| u32::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let speed = half(high) << 16 | half(low);
        // A device without a carrier reports 0, or that the speed is unknown.
        let known = speed != 0 && speed != UNKNOWN && speed != 0xffff;
        Ok(known.then(|| u64::from(speed) * 1_000_000))
    }

    fn perform<const OPCODE: Opcode>(
        &self,
        mut request: libc::ifreq,
    ) -> Result<libc::ifreq, Errno> {
        // SAFETY: the opcodes used here are device ioctls, which read and write one `ifreq`, and the buffer
        // that `rate` has it point to, which is as large as `ETHTOOL_GSET` requires.
        let call = unsafe { Updater::<OPCODE, libc::ifreq>::new(&mut request) };
        // SAFETY: as above; the request is plain data.
        unsafe { ioctl(&self.socket, call)? };
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_fresh_namespace, ip};

    #[test]
    fn a_device_that_is_not_ethernet_is_refused() {
        in_fresh_namespace(|| {
            ip("tuntap add tun7 mode tun");
            for name in ["lo", "tun7"] {
                let refused = by_name(name).unwrap_err();
                assert!(matches!(&refused, DeviceError::NotEthernet(refused) if refused == name));
            }
        });
    }

    #[test]
    fn a_device_is_found_by_name() {
        in_fresh_namespace(|| {
            ip("link add p0 address 02:00:00:00:00:07 mtu 1400 type veth peer name p1");
            let device = by_name("p0").unwrap();
            assert_eq!(device.mac, MacAddr([2, 0, 0, 0, 0, 7]));
            assert_eq!(device.mtu, 1400);
            assert_ne!(device.index, 0);
            assert!(exists(device.index));
            ip("link del p0");
            assert!(!exists(device.index));
        });
    }

    #[test]
    fn a_name_without_a_device_is_an_error() {
        assert!(matches!(
            by_name("no-such-dev"),
            Err(DeviceError::Ask { .. })
        ));
        assert!(matches!(by_name(""), Err(DeviceError::BadName(_))));
        let long = "a-name-that-is-too-long";
        assert!(matches!(by_name(long), Err(DeviceError::BadName(_))));
    }
}
