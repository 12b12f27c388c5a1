//! Conversion between `struct sockaddr` and `SocketAddr`, with the length checks and errors of Linux.

use std::{
    mem::{offset_of, size_of},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
};

use libc::{
    AF_INET, AF_INET6, AF_UNSPEC, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6,
    sockaddr_storage, socklen_t,
};
use rustix::io::Errno;

use crate::memory;

const V4_LENGTH: usize = size_of::<sockaddr_in>();
const V6_LENGTH: usize = size_of::<sockaddr_in6>();
/// Linux accepts IPv6 addresses without the scope identifier, too (RFC 2133).
const V6_SHORT_LENGTH: usize = offset_of!(sockaddr_in6, sin6_scope_id);
const MAXIMUM_LENGTH: usize = size_of::<sockaddr_storage>();

/// An address as the caller gave it.
#[derive(Debug, PartialEq, Eq)]
enum Given {
    /// AF_UNSPEC, and the IPv4 address that the same bytes would be.
    Unspecified(Option<SocketAddrV4>),
    Inet(SocketAddr),
}

/// Returns the address for `bind`: AF_UNSPEC with the any-address is accepted as IPv4.
pub(crate) fn to_bind(address: *const sockaddr, length: socklen_t) -> Result<SocketAddr, Errno> {
    match load(address, length)? {
        Given::Inet(address) => Ok(address),
        Given::Unspecified(Some(any)) if any.ip().is_unspecified() => Ok(any.into()),
        Given::Unspecified(Some(_)) => Err(Errno::AFNOSUPPORT),
        Given::Unspecified(None) => Err(Errno::INVAL),
    }
}

/// Returns the address for `connect`: `None` for AF_UNSPEC, which clears the peer.
pub(crate) fn to_connect(
    address: *const sockaddr,
    length: socklen_t,
) -> Result<Option<SocketAddr>, Errno> {
    match load(address, length)? {
        Given::Inet(address) => Ok(Some(address)),
        Given::Unspecified(_) => Ok(None),
    }
}

/// Returns the destination for `sendto`: `None` for null; AF_UNSPEC is treated as IPv4.
pub(crate) fn to_send(
    address: *const sockaddr,
    length: socklen_t,
) -> Result<Option<SocketAddr>, Errno> {
    if address.is_null() {
        return Ok(None);
    }
    match load(address, length)? {
        Given::Inet(address) => Ok(Some(address)),
        Given::Unspecified(Some(address)) => Ok(Some(address.into())),
        Given::Unspecified(None) => Err(Errno::INVAL),
    }
}

/// Checks that a result can be stored; to be called before a call that consumes something.
pub(crate) fn check_room(address: *mut sockaddr, length: *mut socklen_t) -> Result<(), Errno> {
    if address.is_null() {
        Ok(())
    } else {
        room(length).map(drop)
    }
}

/// Writes `value` as the result of a call: both pointers must be valid.
pub(crate) fn store(
    value: SocketAddr,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> Result<(), Errno> {
    let encoded = Encoded::from(value);
    let room = room(length)?;
    memory::write(address.cast(), &encoded.bytes()[..room.min(encoded.length)])?;
    memory::write(length, &[encoded.length as socklen_t])
}

/// Writes `value` for a call that may return the peer: nothing is written at a null address.
pub(crate) fn store_if_wanted(
    value: Option<SocketAddr>,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> Result<(), Errno> {
    match value {
        _ if address.is_null() => Ok(()),
        Some(value) => store(value, address, length),
        None => memory::write(length, &[0]),
    }
}

/// An address in C form.
pub(crate) struct Encoded {
    storage: [u8; V6_LENGTH],
    length: usize,
}

impl Encoded {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.storage[..self.length]
    }
}

impl From<SocketAddr> for Encoded {
    fn from(address: SocketAddr) -> Self {
        let mut storage = [0; V6_LENGTH];
        let family = if address.is_ipv4() { AF_INET } else { AF_INET6 } as sa_family_t;
        storage[..2].copy_from_slice(&family.to_ne_bytes());
        storage[2..4].copy_from_slice(&address.port().to_be_bytes());
        let length = match address {
            SocketAddr::V4(v4) => {
                storage[4..8].copy_from_slice(&v4.ip().octets());
                V4_LENGTH
            }
            SocketAddr::V6(v6) => {
                storage[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                storage[8..24].copy_from_slice(&v6.ip().octets());
                storage[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                V6_LENGTH
            }
        };
        Self { storage, length }
    }
}

fn room(length: *mut socklen_t) -> Result<usize, Errno> {
    let room = memory::read(length)?;
    if room > i32::MAX as socklen_t {
        Err(Errno::INVAL)
    } else {
        Ok(room as usize)
    }
}

fn load(address: *const sockaddr, length: socklen_t) -> Result<Given, Errno> {
    let mut storage = [0_u8; MAXIMUM_LENGTH];
    let bytes = storage.get_mut(..length as usize).ok_or(Errno::INVAL)?;
    memory::read_into(address.cast(), bytes)?;
    parse(bytes)
}

fn parse(bytes: &[u8]) -> Result<Given, Errno> {
    let family = sa_family_t::from_ne_bytes(field(bytes, 0)?);
    match i32::from(family) {
        AF_UNSPEC => Ok(Given::Unspecified(parse_v4(bytes).ok())),
        AF_INET => Ok(Given::Inet(parse_v4(bytes)?.into())),
        AF_INET6 => Ok(Given::Inet(parse_v6(bytes)?.into())),
        _ if bytes.len() < V4_LENGTH => Err(Errno::INVAL),
        _ => Err(Errno::AFNOSUPPORT),
    }
}

fn parse_v4(bytes: &[u8]) -> Result<SocketAddrV4, Errno> {
    if bytes.len() < V4_LENGTH {
        return Err(Errno::INVAL);
    }
    let port = u16::from_be_bytes(field(bytes, 2)?);
    Ok(SocketAddrV4::new(
        Ipv4Addr::from(field::<4>(bytes, 4)?),
        port,
    ))
}

fn parse_v6(bytes: &[u8]) -> Result<SocketAddrV6, Errno> {
    if bytes.len() < V6_SHORT_LENGTH {
        return Err(Errno::INVAL);
    }
    let port = u16::from_be_bytes(field(bytes, 2)?);
    let flow = u32::from_be_bytes(field(bytes, 4)?);
    let address = Ipv6Addr::from(field::<16>(bytes, 8)?);
    let scope = field(bytes, V6_SHORT_LENGTH).map_or(0, u32::from_ne_bytes);
    Ok(SocketAddrV6::new(address, port, flow, scope))
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> Result<[u8; N], Errno> {
    bytes
        .get(offset..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .ok_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(address: &str) -> Vec<u8> {
        Encoded::from(address.parse::<SocketAddr>().unwrap())
            .bytes()
            .to_vec()
    }

    fn bind(bytes: &[u8]) -> Result<SocketAddr, Errno> {
        to_bind(bytes.as_ptr().cast(), bytes.len() as socklen_t)
    }

    #[test]
    fn addresses_survive_the_round_trip() {
        for text in ["192.0.2.1:80", "[2001:db8::1%3]:443"] {
            assert_eq!(bind(&encoded(text)), Ok(text.parse().unwrap()));
        }
    }

    #[test]
    fn every_length_of_every_family_is_answered() {
        for family in 0..=12_u8 {
            for length in 0..=MAXIMUM_LENGTH + 1 {
                let mut bytes = vec![0xff; length];
                bytes
                    .iter_mut()
                    .zip([family, 0])
                    .for_each(|(byte, value)| *byte = value);
                let _ = bind(&bytes);
            }
        }
    }

    #[test]
    fn short_addresses_are_invalid() {
        assert_eq!(bind(&encoded("192.0.2.1:80")[..15]), Err(Errno::INVAL));
        assert_eq!(bind(&encoded("[::1]:80")[..23]), Err(Errno::INVAL));
        assert_eq!(
            bind(&encoded("[::1]:80")[..24]),
            Ok("[::1]:80".parse().unwrap())
        );
        assert_eq!(bind(&[]), Err(Errno::INVAL));
    }

    #[test]
    fn other_families_are_not_supported() {
        let mut bytes = encoded("192.0.2.1:80");
        bytes[0] = libc::AF_UNIX as u8;
        assert_eq!(bind(&bytes), Err(Errno::AFNOSUPPORT));
    }

    #[test]
    fn an_unspecified_family_binds_the_any_address_only() {
        let mut any = encoded("0.0.0.0:80");
        any[0] = 0;
        assert_eq!(bind(&any), Ok("0.0.0.0:80".parse().unwrap()));
        any[4] = 10;
        assert_eq!(bind(&any), Err(Errno::AFNOSUPPORT));
    }

    #[test]
    fn an_unspecified_family_disconnects() {
        let bytes = [0_u8; 2];
        assert_eq!(to_connect(bytes.as_ptr().cast(), 2), Ok(None));
    }

    #[test]
    fn a_result_is_cut_to_the_room_and_its_true_length_told() {
        let mut place = [0xee_u8; 8];
        let mut length = 4;
        let value = "192.0.2.1:80".parse().unwrap();
        assert_eq!(store(value, place.as_mut_ptr().cast(), &mut length), Ok(()));
        assert_eq!((length, &place[..4]), (16, &encoded("192.0.2.1:80")[..4]));
        assert_eq!(place[4..], [0xee; 4]);
    }

    #[test]
    fn a_negative_room_is_invalid() {
        let mut place = [0_u8; 16];
        let mut length = u32::MAX;
        assert_eq!(
            check_room(place.as_mut_ptr().cast(), &mut length),
            Err(Errno::INVAL)
        );
    }

    #[test]
    fn any_bytes_are_refused_or_come_back_as_they_were() {
        portolan_fuzz::check!(3000)
            .with_type::<(u8, Vec<u8>)>()
            .for_each(|(family, bytes)| {
                let mut bytes = bytes.clone();
                if let Some(first) = bytes.first_mut() {
                    *first = [0, 1, 2, 10][usize::from(family % 4)];
                }
                if let Some(second) = bytes.get_mut(1) {
                    *second = 0;
                }
                if let Ok(Given::Inet(address)) = parse(&bytes) {
                    let again = Encoded::from(address);
                    // The bytes behind an IPv4 address are padding; a scope identifier may be missing.
                    let told = match address {
                        SocketAddr::V4(_) => 8,
                        SocketAddr::V6(_) if bytes.len() < V6_LENGTH => V6_SHORT_LENGTH,
                        SocketAddr::V6(_) => V6_LENGTH,
                    };
                    assert_eq!(again.bytes()[..told], bytes[..told]);
                }
            });
    }
}
