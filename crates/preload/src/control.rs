//! Control messages of a received datagram, in C form.

use std::{
    mem::{align_of, size_of},
    net::IpAddr,
    ptr, slice,
};

use libc::{IPPROTO_IP, IPPROTO_IPV6, MSG_CTRUNC, SOL_SOCKET, c_int, cmsghdr, msghdr};
use portolan::posix::Control;
use rustix::io::Errno;

use crate::{
    memory,
    time::{to_timespec, to_timeval},
};

/// Writes the control messages and returns MSG_CTRUNC if they did not fit.
pub fn store(message: &mut msghdr, control: &Control) -> Result<c_int, Errno> {
    let room = if message.msg_control.is_null() {
        0
    } else {
        message.msg_controllen
    };
    let mut place = Place {
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
    if let Some(destination) = control.destination {
        put_destination(&mut place, destination.address, destination.interface)?;
    }
    if let Some(hops) = control.hops {
        place.put(IPPROTO_IP, libc::IP_TTL, &c_int::from(hops))?;
    }
    if let Some(service) = control.service {
        place.put(IPPROTO_IP, libc::IP_TOS, &service)?;
    }
    message.msg_controllen = place.used;
    Ok(if place.truncated { MSG_CTRUNC } else { 0 })
}

fn put_destination(place: &mut Place, address: IpAddr, interface: u32) -> Result<(), Errno> {
    match address {
        IpAddr::V4(v4) => {
            let address = libc::in_addr {
                s_addr: u32::from_ne_bytes(v4.octets()),
            };
            let ipi_ifindex = interface as c_int;
            let information = libc::in_pktinfo {
                ipi_ifindex,
                ipi_spec_dst: address,
                ipi_addr: address,
            };
            place.put(IPPROTO_IP, libc::IP_PKTINFO, &information)
        }
        IpAddr::V6(v6) => {
            let ipi6_addr = libc::in6_addr {
                s6_addr: v6.octets(),
            };
            let information = libc::in6_pktinfo {
                ipi6_addr,
                ipi6_ifindex: interface,
            };
            place.put(IPPROTO_IPV6, libc::IPV6_PKTINFO, &information)
        }
    }
}

/// Where control messages go, filled from the front.
struct Place {
    base: *mut u8,
    room: usize,
    used: usize,
    truncated: bool,
}

impl Place {
    /// Appends one control message; what does not fit is cut, as Linux does.
    fn put<T: memory::Plain>(&mut self, level: c_int, kind: c_int, value: &T) -> Result<(), Errno> {
        const HEADER: usize = size_of::<cmsghdr>();
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
        // SAFETY: a plain value's octets may be read.
        let octets =
            unsafe { slice::from_raw_parts(ptr::from_ref(value).cast::<u8>(), size_of::<T>()) };
        memory::write(at.wrapping_add(HEADER), &octets[..kept - HEADER])?;
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

    /// Puts a time and a number of hops.
    fn put(room: &mut Room, length: usize) -> (usize, bool) {
        let mut place = Place {
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
            assert!(room.0[length..].iter().all(|octet| *octet == 0), "{length}");
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
                let mut place = Place {
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
                assert!(room.0[length..].iter().all(|octet| *octet == 0xee));
            });
    }
}
