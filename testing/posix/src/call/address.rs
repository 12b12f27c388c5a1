//! Socket addresses of C.

use std::{
    mem::{size_of, zeroed},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    ptr,
};

use libc::{AF_INET, AF_INET6, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

/// An address with room for any family.
pub(super) struct Raw {
    storage: sockaddr_storage,
    pub length: socklen_t,
}

impl Raw {
    pub(super) fn empty() -> Self {
        // SAFETY: zeros are an address of the family AF_UNSPEC.
        let storage: sockaddr_storage = unsafe { zeroed() };
        Self {
            storage,
            length: size_of::<sockaddr_storage>() as socklen_t,
        }
    }

    pub(super) fn set_family(&mut self, family: u16) {
        self.storage.ss_family = family;
    }

    pub(super) fn pointer(&self) -> *const sockaddr {
        ptr::from_ref(&self.storage).cast()
    }

    pub(super) fn pointer_mut(&mut self) -> *mut sockaddr {
        ptr::from_mut(&mut self.storage).cast()
    }
}

impl From<SocketAddr> for Raw {
    fn from(address: SocketAddr) -> Self {
        let mut raw = Self::empty();
        match address {
            SocketAddr::V4(v4) => {
                // SAFETY: the storage is large enough and aligned for any address.
                let place = unsafe { &mut *raw.pointer_mut().cast::<sockaddr_in>() };
                place.sin_family = AF_INET as u16;
                place.sin_port = v4.port().to_be();
                place.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                raw.length = size_of::<sockaddr_in>() as socklen_t;
            }
            SocketAddr::V6(v6) => {
                // SAFETY: the storage is large enough and aligned for any address.
                let place = unsafe { &mut *raw.pointer_mut().cast::<sockaddr_in6>() };
                place.sin6_family = AF_INET6 as u16;
                place.sin6_port = v6.port().to_be();
                place.sin6_addr.s6_addr = v6.ip().octets();
                place.sin6_scope_id = v6.scope_id();
                raw.length = size_of::<sockaddr_in6>() as socklen_t;
            }
        }
        raw
    }
}

/// Returns the address that a call left in `raw`; the wildcard address and port 0 if its family is unknown.
pub(super) fn decoded(raw: &Raw) -> SocketAddr {
    match i32::from(raw.storage.ss_family) {
        AF_INET => {
            // SAFETY: the storage is large enough and aligned for any address.
            let place = unsafe { &*raw.pointer().cast::<sockaddr_in>() };
            let host = Ipv4Addr::from(place.sin_addr.s_addr.to_ne_bytes());
            SocketAddr::new(host.into(), u16::from_be(place.sin_port))
        }
        AF_INET6 => {
            // SAFETY: the storage is large enough and aligned for any address.
            let place = unsafe { &*raw.pointer().cast::<sockaddr_in6>() };
            let host = Ipv6Addr::from(place.sin6_addr.s6_addr);
            SocketAddrV6::new(host, u16::from_be(place.sin6_port), 0, place.sin6_scope_id).into()
        }
        _ => SocketAddr::from(([0, 0, 0, 0], 0)),
    }
}
