//! Ancillary data of messages, in C form.

use std::{
    mem::{align_of, size_of},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ptr, slice,
    time::Duration,
};

use libc::{IPPROTO_IP, IPPROTO_IPV6, MSG_CTRUNC, SOL_SOCKET, c_int, cmsghdr, msghdr};
use portolan::posix::{Control, Destination, ExtendedError, SendControl};
use rustix::io::Errno;

use crate::{
    address::Encoded,
    memory,
    time::{to_timespec, to_timeval},
};

/// Writes the control messages. Returns MSG_CTRUNC if they did not fit.
pub(crate) fn store(message: &mut msghdr, control: &Control) -> Result<c_int, Errno> {
    let room = if message.msg_control.is_null() {
        0
    } else {
        message.msg_controllen
    };
    let mut place = ControlBuffer {
        base: message.msg_control.cast(),
        room,
        used: 0,
        truncated: false,
    };
    if let Some(when) = control.timestamp {
        place.put(SOL_SOCKET, libc::SCM_TIMESTAMP, &to_timeval(when))?;
    }
    if let Some(when) = control.timestamp_ns {
        place.put(SOL_SOCKET, libc::SCM_TIMESTAMPNS, &to_timespec(when))?;
    }
    if let Some(when) = control.timestamping {
        let none = to_timespec(Duration::ZERO);
        let stamps = [to_timespec(when), none, none];
        place.put(SOL_SOCKET, libc::SCM_TIMESTAMPING, &stamps)?;
    }
    if let Some(dropped) = control.dropped {
        place.put(SOL_SOCKET, libc::SO_RXQ_OVFL, &dropped)?;
    }
    if let Some(rest) = control.rest {
        let rest = c_int::try_from(rest).unwrap_or(c_int::MAX);
        place.put(libc::IPPROTO_TCP, TCP_CM_INQ, &rest)?;
    }
    if let Some(size) = control.segment {
        place.put(libc::SOL_UDP, libc::UDP_GRO, &c_int::from(size))?;
    }
    if let Some(destination) = control.destination {
        put_destination(&mut place, &destination)?;
    }
    if let Some(destination) = control.v6_destination {
        put_destination(&mut place, &destination)?;
    }
    if let Some(hops) = control.hops {
        place.put(IPPROTO_IP, libc::IP_TTL, &c_int::from(hops))?;
    }
    if let Some(service) = control.service {
        place.put(IPPROTO_IP, libc::IP_TOS, &service)?;
    }
    if let Some(original) = control.original {
        put_name(&mut place, (IPPROTO_IP, libc::IP_ORIGDSTADDR), original)?;
    }
    if let Some(hops) = control.v6_hops {
        place.put(IPPROTO_IPV6, libc::IPV6_HOPLIMIT, &c_int::from(hops))?;
    }
    if let Some(class) = control.v6_class {
        place.put(IPPROTO_IPV6, libc::IPV6_TCLASS, &c_int::from(class))?;
    }
    if let Some(original) = control.v6_original {
        put_name(&mut place, (IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR), original)?;
    }
    if let Some((to, mtu)) = control.path_mtu {
        let mut bytes = [0; 32];
        let name = Encoded::from(to);
        bytes[..name.bytes().len()].copy_from_slice(name.bytes());
        bytes[28..].copy_from_slice(&mtu.to_ne_bytes());
        place.put(IPPROTO_IPV6, libc::IPV6_PATHMTU, &bytes)?;
    }
    if let Some(error) = control.error {
        put_error(&mut place, &error)?;
    }
    message.msg_controllen = place.used;
    Ok(if place.truncated { MSG_CTRUNC } else { 0 })
}

fn put_destination(place: &mut ControlBuffer, destination: &Destination) -> Result<(), Errno> {
    let interface = destination.interface;
    match (destination.address, destination.own) {
        (IpAddr::V4(v4), IpAddr::V4(own)) => {
            let address = |v4: Ipv4Addr| libc::in_addr {
                s_addr: u32::from_ne_bytes(v4.octets()),
            };
            let information = libc::in_pktinfo {
                ipi_ifindex: interface as c_int,
                ipi_spec_dst: address(own),
                ipi_addr: address(v4),
            };
            place.put(IPPROTO_IP, libc::IP_PKTINFO, &information)
        }
        (IpAddr::V6(v6), _) => {
            let ipi6_addr = libc::in6_addr {
                s6_addr: v6.octets(),
            };
            let information = libc::in6_pktinfo {
                ipi6_addr,
                ipi6_ifindex: interface,
            };
            place.put(IPPROTO_IPV6, libc::IPV6_PKTINFO, &information)
        }
        (IpAddr::V4(_), IpAddr::V6(_)) => Ok(()),
    }
}

/// `struct sockaddr_in` or `sockaddr_in6`.
fn put_name(
    place: &mut ControlBuffer,
    (level, kind): (c_int, c_int),
    name: SocketAddr,
) -> Result<(), Errno> {
    let name = Encoded::from(name);
    match name.bytes().first_chunk::<28>() {
        Some(bytes) => place.put(level, kind, bytes),
        None => match name.bytes().first_chunk::<16>() {
            Some(bytes) => place.put(level, kind, bytes),
            None => Ok(()),
        },
    }
}

/// `struct sock_extended_err`, then the offender's `struct sockaddr_in` or `sockaddr_in6`.
fn put_error(place: &mut ControlBuffer, error: &ExtendedError) -> Result<(), Errno> {
    let mut bytes = [0; 16 + 28];
    bytes[..4].copy_from_slice(&error.errno.to_ne_bytes());
    bytes[4..7].copy_from_slice(&[error.origin, error.kind, error.code]);
    bytes[8..12].copy_from_slice(&error.info.to_ne_bytes());
    bytes[12..16].copy_from_slice(&error.data.to_ne_bytes());
    if let Some(offender) = error.offender {
        let name = Encoded::from(SocketAddr::new(offender, 0));
        bytes[16..16 + name.bytes().len()].copy_from_slice(name.bytes());
    }
    if error.is_v6 {
        return place.put(IPPROTO_IPV6, libc::IPV6_RECVERR, &bytes);
    }
    let Some(bytes) = bytes.first_chunk::<32>() else {
        return Ok(());
    };
    place.put(IPPROTO_IP, libc::IP_RECVERR, bytes)
}

/// Reads the control messages of a message to send, with the checks of Linux (`__sock_cmsg_send`,
/// `ip_cmsg_send`, `ip6_datagram_send_ctl`, `udp_cmsg_send`).
pub(crate) fn load(message: &msghdr) -> Result<SendControl, Errno> {
    let mut control = SendControl::default();
    if message.msg_control.is_null() {
        return Ok(control);
    }
    let length = message.msg_controllen;
    if length > MAXIMUM_CONTROL {
        return Err(Errno::NOBUFS);
    }
    let mut bytes = vec![0_u8; length];
    memory::read_into(message.msg_control.cast(), &mut bytes)?;
    let mut rest = bytes.as_slice();
    while let Some(header) = rest.first_chunk::<HEADER>() {
        let length = usize::from_ne_bytes(*header.first_chunk().ok_or(Errno::INVAL)?);
        let level = number(&header[8..])?;
        let kind = number(&header[12..])?;
        let data = rest.get(HEADER..length).ok_or(Errno::INVAL)?;
        note(&mut control, level, kind, data)?;
        let next = length.next_multiple_of(align_of::<cmsghdr>());
        rest = rest.get(next..).unwrap_or_default();
    }
    Ok(control)
}

fn note(control: &mut SendControl, level: c_int, kind: c_int, data: &[u8]) -> Result<(), Errno> {
    match (level, kind) {
        (SOL_SOCKET, libc::SO_TIMESTAMPING) if data.len() == 4 => {
            control.timestamping = Some(number(data)?.cast_unsigned());
        }
        (SOL_SOCKET, libc::SCM_RIGHTS | libc::SCM_CREDENTIALS) => {}
        (SOL_SOCKET, _) => return Err(Errno::INVAL),
        (IPPROTO_IP, libc::IP_PKTINFO) if data.len() == 12 => {
            let source = Ipv4Addr::from(field::<4>(data, 4)?);
            set_source(control, number(data)?.cast_unsigned(), source.into());
        }
        (IPPROTO_IP, libc::IP_TTL) if data.len() == 4 => {
            control.hops = match number(data)? {
                hops @ 1..=255 => Some(hops as u8),
                _ => return Err(Errno::INVAL),
            };
        }
        (IPPROTO_IP, libc::IP_TOS) => {
            control.service = match data {
                [service] => Some(*service),
                [_, _, _, _] => Some(u8::try_from(number(data)?).map_err(|_| Errno::INVAL)?),
                _ => return Err(Errno::INVAL),
            };
        }
        (IPPROTO_IP, _) => return Err(Errno::INVAL),
        (IPPROTO_IPV6, libc::IPV6_PKTINFO) if data.len() >= 20 => {
            let source = Ipv6Addr::from(field::<16>(data, 0)?);
            set_source(control, number(&data[16..])?.cast_unsigned(), source.into());
        }
        (IPPROTO_IPV6, libc::IPV6_HOPLIMIT) if data.len() == 4 => {
            control.hops = match number(data)? {
                hops @ 0..=255 => Some(hops as u8),
                -1 => None,
                _ => return Err(Errno::INVAL),
            };
        }
        (IPPROTO_IPV6, libc::IPV6_TCLASS) if data.len() == 4 => {
            control.service = match number(data)? {
                class @ 0..=255 => Some(class as u8),
                -1 => None,
                _ => return Err(Errno::INVAL),
            };
        }
        (IPPROTO_IPV6, _) => return Err(Errno::INVAL),
        (libc::SOL_UDP, libc::UDP_SEGMENT) if data.len() == 2 => {
            control.segment = Some(u16::from_ne_bytes(field(data, 0)?));
        }
        (libc::SOL_UDP, _) => return Err(Errno::INVAL),
        // Other levels are ignored.
        _ => {}
    }
    Ok(())
}

fn set_source(control: &mut SendControl, interface: u32, source: IpAddr) {
    control.interface = Some(interface).filter(|&index| index != 0);
    control.source = Some(source).filter(|source| !source.is_unspecified());
}

fn number(bytes: &[u8]) -> Result<c_int, Errno> {
    field(bytes, 0).map(c_int::from_ne_bytes)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Errno> {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.copied().ok_or(Errno::INVAL)
}

/// `linux/tcp.h`
const TCP_CM_INQ: c_int = 36;

const HEADER: usize = size_of::<cmsghdr>();

/// More than the kernel would accept (`net.core.optmem_max`).
const MAXIMUM_CONTROL: usize = 128 * 1024;

/// The buffer for control messages, filled from its start.
struct ControlBuffer {
    base: *mut u8,
    room: usize,
    used: usize,
    truncated: bool,
}

impl ControlBuffer {
    /// Appends a control message; one that does not fit is truncated, as by Linux.
    fn put<T: memory::Plain>(&mut self, level: c_int, kind: c_int, value: &T) -> Result<(), Errno> {
        let left = self.room - self.used;
        if left < HEADER {
            self.truncated = true;
            return Ok(());
        }
        let length = HEADER + size_of::<T>();
        let kept = length.min(left);
        self.truncated |= kept < length;
        let at = self.base.wrapping_add(self.used);
        let header = cmsghdr {
            cmsg_len: kept as _,
            cmsg_level: level,
            cmsg_type: kind,
        };
        memory::write(at.cast(), &[header])?;
        // SAFETY: a plain value's bytes may be read.
        let bytes =
            unsafe { slice::from_raw_parts(ptr::from_ref(value).cast::<u8>(), size_of::<T>()) };
        memory::write(at.wrapping_add(HEADER), &bytes[..kept - HEADER])?;
        self.used += length.next_multiple_of(align_of::<cmsghdr>()).min(left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[repr(align(8))]
    struct Room([u8; 128]);

    /// Appends a time and a hop count.
    fn put(room: &mut Room, length: usize) -> (usize, bool) {
        let mut place = ControlBuffer {
            base: room.0.as_mut_ptr(),
            room: length,
            used: 0,
            truncated: false,
        };
        let time = to_timeval(Duration::new(7, 9000));
        place.put(SOL_SOCKET, libc::SCM_TIMESTAMP, &time).unwrap();
        place.put(IPPROTO_IP, libc::IP_TTL, &64_u32).unwrap();
        (place.used, place.truncated)
    }

    #[test]
    fn control_messages_can_be_walked_with_the_c_macros() {
        let mut room = Room([0; 128]);
        assert_eq!(put(&mut room, 128), (32 + 24, false));
        // SAFETY: a header of zeros is valid; it is made to describe what was stored in the live room.
        unsafe {
            let mut message: msghdr = std::mem::zeroed();
            message.msg_control = room.0.as_mut_ptr().cast();
            message.msg_controllen = 56;
            let first = libc::CMSG_FIRSTHDR(&message);
            let second = libc::CMSG_NXTHDR(&message, first);
            assert_eq!(
                ((*first).cmsg_level, (*first).cmsg_type),
                (SOL_SOCKET, libc::SCM_TIMESTAMP)
            );
            assert_eq!(
                libc::CMSG_DATA(first)
                    .cast::<libc::timeval>()
                    .read()
                    .tv_usec,
                9
            );
            assert_eq!(
                ((*second).cmsg_level, (*second).cmsg_type),
                (IPPROTO_IP, libc::IP_TTL)
            );
            assert_eq!(libc::CMSG_DATA(second).cast::<c_int>().read(), 64);
            assert!(libc::CMSG_NXTHDR(&message, second).is_null());
        }
    }

    #[test]
    fn every_room_is_respected_and_its_lack_told() {
        for length in 0..56 {
            let mut room = Room([0; 128]);
            let (used, truncated) = put(&mut room, length);
            assert!(used <= length);
            assert!(room.0[length..].iter().all(|byte| *byte == 0), "{length}");
            assert_eq!(truncated, length < 52, "{length}");
        }
    }

    #[test]
    fn control_messages_of_any_size_stay_within_any_room() {
        portolan_fuzz::check!(1000)
            .with_type::<(u8, Vec<bool>)>()
            .for_each(|(length, kinds)| {
                let length = usize::from(length % 128);
                let mut room = Room([0xee; 128]);
                let mut place = ControlBuffer {
                    base: room.0.as_mut_ptr(),
                    room: length,
                    used: 0,
                    truncated: false,
                };
                for &large in kinds.iter().take(20) {
                    let (time, hops) = (to_timeval(Duration::new(7, 9000)), 64_u32);
                    if large {
                        place.put(SOL_SOCKET, libc::SCM_TIMESTAMP, &time).unwrap();
                    } else {
                        place.put(IPPROTO_IP, libc::IP_TTL, &hops).unwrap();
                    }
                }
                assert!(place.used <= length);
                assert!(room.0[length..].iter().all(|byte| *byte == 0xee));
            });
    }
}
