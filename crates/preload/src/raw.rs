//! `<portolan/raw.h>`: converts between numbers and `errno`, and `portolan::raw`. These symbols are
//! this library's own, not libc's.

use std::ffi::c_void;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::slice;
use std::time::Duration;

use libc::{c_int, sockaddr, socklen_t};
use portolan::raw::layers::types::Protocol;
use portolan::raw::{Guard, RawFlow};
use rustix::io::Errno;

use crate::address;
use crate::own::Numbered;

/// `struct portolan_hop`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Hop {
    interface: u32,
    mtu: u32,
    own_mac: [u8; 6],
    next_mac: [u8; 6],
    source: [u8; 16],
}

pub(crate) static FLOWS: Numbered<RawFlow> = Numbered::new();

own! {
    "raw.h", Errno;

    /// `int portolan_raw_ethertype(uint16_t)`
    fn portolan_raw_ethertype(number: u16) -> c_int {
        open(Guard::EtherType(number))
    }

    /// `int portolan_raw_protocol(uint8_t)`
    fn portolan_raw_protocol(number: u8) -> c_int {
        open(Guard::IpProtocol(number))
    }

    /// `int portolan_raw_port(int, const struct sockaddr *, socklen_t)`
    fn portolan_raw_port(protocol: c_int, local: *const sockaddr, length: socklen_t) -> c_int {
        let number = u8::try_from(protocol).ok();
        let protocol = number.and_then(Protocol::from_number).ok_or(Errno::PROTONOSUPPORT)?;
        open(Guard::Port { protocol, local: address::to_bind(local, length)? })
    }

    /// `int portolan_raw_name(int, struct sockaddr *, socklen_t *)`
    fn portolan_raw_name(flow: c_int, local: *mut sockaddr, length: *mut socklen_t) -> c_int {
        match FLOWS.find(flow)?.guard() {
            Guard::Port { local: name, .. } => address::store(name, local, length).map(|()| 0),
            Guard::EtherType(_) | Guard::IpProtocol(_) => Err(Errno::OPNOTSUPP),
        }
    }

    /// `int portolan_raw_close(int)`
    fn portolan_raw_close(flow: c_int) -> c_int {
        // The protocol is released when no call uses it any more.
        FLOWS.take(flow)?;
        Ok(0)
    }

    /// `ssize_t portolan_raw_recv(int, void *, size_t, int)`
    fn portolan_raw_recv(flow: c_int, frame: *mut c_void, size: usize, timeout_ms: c_int) -> isize {
        let flow = FLOWS.find(flow)?;
        if frame.is_null() {
            return Err(Errno::FAULT);
        }
        let received = match u64::try_from(timeout_ms) {
            Ok(0) => flow.try_recv(),
            Ok(timeout) => flow.recv(Some(Duration::from_millis(timeout))),
            Err(_) => flow.recv(None),
        }?;
        // SAFETY: by the contract there is room for `size` bytes.
        let room = unsafe { slice::from_raw_parts_mut(frame.cast::<u8>(), size) };
        let length = size.min(received.bytes.len());
        room[..length].copy_from_slice(&received.bytes[..length]);
        Ok(received.bytes.len().cast_signed())
    }

    /// `int portolan_raw_send(int, const void *, size_t)`
    fn portolan_raw_send(flow: c_int, frame: *const c_void, length: usize) -> c_int {
        let flow = FLOWS.find(flow)?;
        if frame.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: by the contract there are `length` bytes.
        let frame = unsafe { slice::from_raw_parts(frame.cast::<u8>(), length) };
        flow.send(frame, &[]).map(|()| 0)
    }

    /// `int portolan_raw_hop(int, int, const void *, int, struct portolan_hop *)`
    fn portolan_raw_hop(
        flow: c_int,
        family: c_int,
        address: *const c_void,
        timeout_ms: c_int,
        hop: *mut Hop,
    ) -> c_int {
        let flow = FLOWS.find(flow)?;
        if address.is_null() || hop.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: by the contract an address of that family.
        let destination = unsafe { address_of(family, address) }?;
        let timeout = Duration::from_millis(u64::try_from(timeout_ms).unwrap_or_default());
        let found = flow.hop(destination, timeout)?;
        let mut source = [0; 16];
        match found.source {
            IpAddr::V4(v4) => source[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => source = v6.octets(),
        }
        let found = Hop {
            interface: found.interface,
            mtu: found.mtu,
            own_mac: found.own_mac.0,
            next_mac: found.next_mac.0,
            source,
        };
        // SAFETY: by the contract there is room for one.
        unsafe { hop.write(found) };
        Ok(0)
    }

    /// `int64_t portolan_raw_dropped(int)`
    fn portolan_raw_dropped(flow: c_int) -> i64 {
        FLOWS.find(flow).map(|flow| flow.dropped().cast_signed())
    }
}

fn open(guard: Guard) -> Result<c_int, Errno> {
    FLOWS.enter(RawFlow::open(guard)?)
}

/// # Safety
/// `address` points to an `in_addr` or `in6_addr`, according to `family`.
unsafe fn address_of(family: c_int, address: *const c_void) -> Result<IpAddr, Errno> {
    match family {
        libc::AF_INET => {
            // SAFETY: the caller's promise; bytes need no alignment.
            Ok(Ipv4Addr::from(unsafe { address.cast::<[u8; 4]>().read() }).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            Ok(Ipv6Addr::from(unsafe { address.cast::<[u8; 16]>().read() }).into())
        }
        _ => Err(Errno::AFNOSUPPORT),
    }
}
