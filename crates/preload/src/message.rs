//! `struct msghdr`: names, pieces and control messages, singly and in arrays.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::size_of,
    net::IpAddr,
    ptr, slice,
    time::{Duration, Instant},
};

use libc::{
    IPPROTO_IP, IPPROTO_IPV6, MSG_CTRUNC, MSG_DONTWAIT, MSG_WAITFORONE, SOL_SOCKET, c_int, cmsghdr,
    mmsghdr, msghdr, sockaddr, socklen_t,
};
use portolan::posix::{self, Control, Received};
use rustix::io::Errno;

use crate::{
    address,
    buffers::{self, MAXIMUM_PIECES},
    interpose::{Outcome, Settle},
    memory::{self, plausible},
    time::{to_timespec, to_timeval},
};

/// Linux looks at no more messages than this in one call.
const MAXIMUM_MESSAGES: usize = 1024;

/// Receives one message into `message`.
///
/// # Safety
/// `message` is null or a valid `msghdr`.
pub unsafe fn receive(fd: c_int, message: *mut msghdr, flags: c_int) -> Outcome<isize> {
    plausible(message, 1)?;
    // SAFETY: the caller's promise.
    let message = unsafe { &mut *message };
    check(message)?;
    let take = |slices: &mut [IoSliceMut]| posix::receive(fd, slices, flags).settle();
    // SAFETY: a valid msghdr describes valid buffers.
    let received = unsafe { buffers::with_scattered(message.msg_iov, message.msg_iovlen, take)? };
    let truncated = store_control(message, &received.control)?;
    store_name(message, &received)?;
    message.msg_flags = received.flags | truncated;
    Ok(received.length as isize)
}

/// Receives until `count` messages are there, nothing more comes at once (MSG_WAITFORONE) or, looked at after each
/// message as Linux does, the time is up.
///
/// # Safety
/// `messages` is null or an array of `count` valid entries.
pub unsafe fn receive_many(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    mut flags: c_int,
    timeout: Option<Duration>,
) -> Outcome<c_int> {
    let started = Instant::now();
    // SAFETY: the caller's promise.
    let messages = unsafe { listed(messages, count)? };
    for (done, entry) in messages.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        match unsafe { receive(fd, &mut entry.msg_hdr, flags & !MSG_WAITFORONE) } {
            Ok(length) => entry.msg_len = length as u32,
            Err(refusal) if done == 0 => return Err(refusal),
            Err(_) => return Ok(done as c_int),
        }
        if flags & MSG_WAITFORONE != 0 {
            flags |= MSG_DONTWAIT;
        }
        if timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
            return Ok(done as c_int + 1);
        }
    }
    Ok(messages.len() as c_int)
}

/// Sends one message.
///
/// # Safety
/// `message` is null or a valid `msghdr`.
pub unsafe fn send(fd: c_int, message: *const msghdr, flags: c_int) -> Outcome<isize> {
    plausible(message, 1)?;
    // SAFETY: the caller's promise.
    let message = unsafe { &*message };
    check(message)?;
    check_control_to_send(message)?;
    let to = address::to_send(message.msg_name.cast_const().cast(), message.msg_namelen)?;
    let give = |slices: &[IoSlice]| posix::send(fd, slices, to, flags).settle();
    // SAFETY: a valid msghdr describes valid buffers.
    let sent = unsafe { buffers::with_gathered(message.msg_iov, message.msg_iovlen, give)? };
    Ok(sent as isize)
}

/// Sends messages until one fails; the failure is told only if it is the first.
///
/// # Safety
/// `messages` is null or an array of `count` valid entries.
pub unsafe fn send_many(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    flags: c_int,
) -> Outcome<c_int> {
    // SAFETY: the caller's promise.
    let messages = unsafe { listed(messages, count)? };
    for (done, entry) in messages.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        match unsafe { send(fd, &entry.msg_hdr, flags) } {
            Ok(length) => entry.msg_len = length as u32,
            Err(refusal) if done == 0 => return Err(refusal),
            Err(_) => return Ok(done as c_int),
        }
    }
    Ok(messages.len() as c_int)
}

/// # Safety
/// `messages` is null or an array of `count` valid entries.
unsafe fn listed<'a>(messages: *mut mmsghdr, count: u32) -> Result<&'a mut [mmsghdr], Errno> {
    let count = (count as usize).min(MAXIMUM_MESSAGES);
    plausible(messages, count)?;
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { slice::from_raw_parts_mut(messages, count) })
}

fn check(message: &msghdr) -> Result<(), Errno> {
    if message.msg_iovlen > MAXIMUM_PIECES {
        return Err(Errno::MSGSIZE);
    }
    if !message.msg_name.is_null() && message.msg_namelen > i32::MAX as socklen_t {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// Control messages steer single sends in ways that `posix::send` has no words for: like any that Linux does not know,
/// they are invalid.
fn check_control_to_send(message: &msghdr) -> Result<(), Errno> {
    let some = !message.msg_control.is_null() && message.msg_controllen >= size_of::<cmsghdr>();
    if some { Err(Errno::INVAL) } else { Ok(()) }
}

fn store_name(message: &mut msghdr, received: &Received) -> Result<(), Errno> {
    let name: *mut sockaddr = message.msg_name.cast();
    address::store_if_wanted(received.from, name, &mut message.msg_namelen)
}

/// Writes the control messages and returns MSG_CTRUNC if they did not fit.
fn store_control(message: &mut msghdr, control: &Control) -> Result<c_int, Errno> {
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
    message.msg_controllen = place.used;
    Ok(if place.truncated { MSG_CTRUNC } else { 0 })
}

fn put_destination(place: &mut Place, address: IpAddr, interface: u32) -> Result<(), Errno> {
    match address {
        IpAddr::V4(v4) => {
            let address = libc::in_addr {
                s_addr: u32::from_ne_bytes(v4.octets()),
            };
            let information = libc::in_pktinfo {
                ipi_ifindex: interface as c_int,
                ipi_spec_dst: address,
                ipi_addr: address,
            };
            place.put(IPPROTO_IP, libc::IP_PKTINFO, &information)
        }
        IpAddr::V6(v6) => {
            let information = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: v6.octets(),
                },
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
        memory::store(
            at.cast(),
            &[cmsghdr {
                cmsg_len: kept as _,
                cmsg_level: level,
                cmsg_type: kind,
            }],
        )?;
        // SAFETY: a plain value's octets may be read.
        let octets =
            unsafe { slice::from_raw_parts(ptr::from_ref(value).cast::<u8>(), size_of::<T>()) };
        memory::store(at.wrapping_add(HEADER), &octets[..kept - HEADER])?;
        self.used += length.next_multiple_of(align_of::<cmsghdr>()).min(left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(8))]
    struct Room([u8; 128]);

    fn stored(control: &Control, room: usize) -> (msghdr, Room, c_int) {
        let mut place = Room([0; 128]);
        // SAFETY: a msghdr of zeros is valid.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = place.0.as_mut_ptr().cast();
        message.msg_controllen = room;
        let flags = store_control(&mut message, control).unwrap();
        (message, place, flags)
    }

    fn example() -> Control {
        Control {
            timestamp: Some(Duration::new(7, 9000)),
            time_to_live: Some(64),
            ..Control::default()
        }
    }

    #[test]
    fn control_messages_can_be_walked_with_the_c_macros() {
        let (mut message, mut place, flags) = stored(&example(), 128);
        message.msg_control = place.0.as_mut_ptr().cast();
        assert_eq!((flags, message.msg_controllen), (0, 32 + 24));
        // SAFETY: the header describes what was stored in the live `place`.
        unsafe {
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
        for room in 0..56 {
            let (message, place, flags) = stored(&example(), room);
            assert!(message.msg_controllen <= room);
            assert!(place.0[room..].iter().all(|octet| *octet == 0), "{room}");
            assert_eq!(flags, if room < 52 { MSG_CTRUNC } else { 0 }, "{room}");
        }
    }
}
