//! Datagrams over kernel sockets, with the ancillary data that tells how they arrived and how they
//! are to be sent.

use std::io::{IoSlice, IoSliceMut};
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, cmsghdr, sockaddr_in, sockaddr_in6, sockaddr_storage};
use rustix::io::Errno;

use crate::descriptor::{number, set_socket_option};
use crate::raw;

/// Bytes for all control messages of one datagram.
const CONTROL: usize = 256;

/// A received datagram without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedDatagram {
    pub length: usize,
    pub from: SocketAddr,
    pub to: IpAddr,
    pub interface: u32,
    pub hops: u8,
    pub service: u8,
}

/// How to send a datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Departure {
    pub to: Option<SocketAddr>,
    pub source: Option<IpAddr>,
    pub interface: u32,
    pub hops: Option<u8>,
    pub service: Option<u8>,
    /// Size of the datagrams to cut it into (`UDP_SEGMENT`); 0 for none.
    pub segment: u16,
}

/// Enables the ancillary data that [`receive`] uses.
pub fn announce(socket: impl AsFd, is_v6: bool) -> Result<(), Errno> {
    set_all(socket, is_v6, 1)
}

/// Undoes [`announce`].
pub fn announce_no_more(socket: impl AsFd, is_v6: bool) -> Result<(), Errno> {
    set_all(socket, is_v6, 0)
}

fn set_all(socket: impl AsFd, is_v6: bool, value: i32) -> Result<(), Errno> {
    let on = value.to_ne_bytes();
    let v4 = [libc::IP_PKTINFO, libc::IP_RECVTTL, libc::IP_RECVTOS];
    let v6 = [
        libc::IPV6_RECVPKTINFO,
        libc::IPV6_RECVHOPLIMIT,
        libc::IPV6_RECVTCLASS,
    ];
    for name in v4 {
        set_socket_option(&socket, libc::IPPROTO_IP, name, &on)?;
    }
    for name in v6.into_iter().filter(|_| is_v6) {
        set_socket_option(&socket, libc::IPPROTO_IPV6, name, &on)?;
    }
    Ok(())
}

/// Receives the next datagram; `Errno::AGAIN` if there is none. Never blocks, whatever flags others set
/// on the socket.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<ReceivedDatagram, Errno> {
    // SAFETY: all zeros is a valid value of both.
    let (mut name, mut message): (sockaddr_storage, libc::msghdr) = unsafe { zeroed() };
    let mut control = Control([0; CONTROL]);
    let mut piece = IoSliceMut::new(buffer);
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = size_of::<sockaddr_storage>() as libc::socklen_t;
    message.msg_iov = (&raw mut piece).cast();
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL;
    let arguments = [
        number(socket.as_fd().as_raw_fd()),
        (&raw mut message).expose_provenance(),
        number(libc::MSG_DONTWAIT),
        0,
        0,
        0,
    ];
    // SAFETY: the message describes live buffers.
    let length = unsafe { raw::syscall(libc::SYS_recvmsg, arguments)? };
    let from = address_of(&name, message.msg_namelen).ok_or(Errno::PROTO)?;
    let any = match from {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let mut arrival = ReceivedDatagram {
        length,
        from: SocketAddr::new(from.ip().to_canonical(), from.port()),
        to: any,
        interface: 0,
        hops: 0,
        service: 0,
    };
    for (level, kind, data) in control.messages(message.msg_controllen) {
        note(&mut arrival, level, kind, data);
    }
    Ok(arrival)
}

fn note(arrival: &mut ReceivedDatagram, level: c_int, kind: c_int, data: &[u8]) {
    let number = |at: usize| {
        let bytes = data.get(at..at + 4).and_then(|word| word.first_chunk());
        bytes.map_or(0, |word| u32::from_ne_bytes(*word))
    };
    match (level, kind) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            arrival.interface = number(0);
            if let Some(address) = data.get(8..12).and_then(|bytes| bytes.first_chunk()) {
                arrival.to = Ipv4Addr::from(*address).into();
            }
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            arrival.interface = number(16);
            if let Some(address) = data.first_chunk::<16>() {
                arrival.to = IpAddr::from(Ipv6Addr::from(*address)).to_canonical();
            }
        }
        (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
            arrival.hops = number(0) as u8;
        }
        (libc::IPPROTO_IP, libc::IP_TOS) => arrival.service = data.first().copied().unwrap_or(0),
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => arrival.service = number(0) as u8,
        _ => {}
    }
}

/// Sends one datagram; never blocks.
pub fn send(
    socket: impl AsFd,
    pieces: &[IoSlice<'_>],
    departure: &Departure,
) -> Result<usize, Errno> {
    // SAFETY: all zeros is a valid value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    let name = departure.to.map(Name::from);
    if let Some(name) = &name {
        message.msg_name = name.bytes.as_ptr().cast_mut().cast();
        message.msg_namelen = name.length;
    }
    let mut control = Control([0; CONTROL]);
    message.msg_controllen = control.describe(departure);
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len();
    let arguments = [
        number(socket.as_fd().as_raw_fd()),
        (&raw const message).expose_provenance(),
        number(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL),
        0,
        0,
        0,
    ];
    // SAFETY: the message describes live buffers, which sendmsg only reads.
    unsafe { raw::syscall(libc::SYS_sendmsg, arguments) }
}

/// A socket address in C form.
struct Name {
    bytes: [u8; size_of::<sockaddr_in6>()],
    length: libc::socklen_t,
}

impl From<SocketAddr> for Name {
    fn from(address: SocketAddr) -> Name {
        let mut bytes = [0; size_of::<sockaddr_in6>()];
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        let (family, length) = match address {
            SocketAddr::V4(v4) => {
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                (libc::AF_INET, size_of::<sockaddr_in>())
            }
            SocketAddr::V6(v6) => {
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                (libc::AF_INET6, size_of::<sockaddr_in6>())
            }
        };
        bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        Name {
            bytes,
            length: length as libc::socklen_t,
        }
    }
}

fn address_of(name: &sockaddr_storage, length: libc::socklen_t) -> Option<SocketAddr> {
    // SAFETY: plain bytes, all initialised.
    let bytes: &[u8; size_of::<sockaddr_storage>()] = unsafe { &*std::ptr::from_ref(name).cast() };
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match (c_int::from(name.ss_family), length as usize) {
        (libc::AF_INET, 16..) => {
            let address = Ipv4Addr::from(*bytes[4..].first_chunk()?);
            Some(SocketAddrV4::new(address, port).into())
        }
        (libc::AF_INET6, 28..) => {
            let address = Ipv6Addr::from(*bytes[8..].first_chunk()?);
            let scope = u32::from_ne_bytes(*bytes[24..].first_chunk()?);
            Some(SocketAddrV6::new(address, port, 0, scope).into())
        }
        _ => None,
    }
}

/// Space for control messages, aligned for their headers.
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

const HEADER: usize = size_of::<cmsghdr>();

impl Control {
    /// The messages in the first `length` bytes: level, type, data.
    fn messages(&self, length: usize) -> impl Iterator<Item = (c_int, c_int, &[u8])> {
        let bytes = &self.0[..length.min(CONTROL)];
        let mut at = 0;
        std::iter::from_fn(move || {
            let header = bytes.get(at..at + HEADER)?;
            let length = usize::from_ne_bytes(*header.first_chunk()?);
            let level = c_int::from_ne_bytes(*header[8..].first_chunk()?);
            let kind = c_int::from_ne_bytes(*header[12..].first_chunk()?);
            let data = bytes.get(at + HEADER..at + length)?;
            at += length.next_multiple_of(align_of::<cmsghdr>());
            Some((level, kind, data))
        })
    }

    /// Writes the control messages for `departure`; returns their length in bytes.
    fn describe(&mut self, departure: &Departure) -> usize {
        let mut used = 0;
        let mut put = |level: c_int, kind: c_int, data: &[u8]| {
            let length = HEADER + data.len();
            let room = &mut self.0[used..used + length.next_multiple_of(8)];
            room[..8].copy_from_slice(&length.to_ne_bytes());
            room[8..12].copy_from_slice(&level.to_ne_bytes());
            room[12..16].copy_from_slice(&kind.to_ne_bytes());
            room[16..length].copy_from_slice(data);
            used += length.next_multiple_of(8);
        };
        let is_v6 = departure.to.is_some_and(|to| match to {
            SocketAddr::V4(_) => false,
            SocketAddr::V6(v6) => v6.ip().to_ipv4_mapped().is_none(),
        });
        let interface = departure.interface.to_ne_bytes();
        let zero = [0; 4];
        match departure.source {
            Some(IpAddr::V4(v4)) => {
                let information = [interface, v4.octets(), zero].concat();
                put(libc::IPPROTO_IP, libc::IP_PKTINFO, &information);
            }
            Some(IpAddr::V6(v6)) => {
                let information = [&v6.octets()[..], &interface].concat();
                put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &information);
            }
            None if departure.interface != 0 && is_v6 => {
                let information = [&[0; 16][..], &interface].concat();
                put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &information);
            }
            None if departure.interface != 0 => {
                let information = [interface, zero, zero].concat();
                put(libc::IPPROTO_IP, libc::IP_PKTINFO, &information);
            }
            None => {}
        }
        let (level, hops, service) = if is_v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, libc::IPV6_TCLASS)
        } else {
            (libc::IPPROTO_IP, libc::IP_TTL, libc::IP_TOS)
        };
        if let Some(number) = departure.hops {
            put(level, hops, &c_int::from(number).to_ne_bytes());
        }
        if let Some(number) = departure.service {
            put(level, service, &c_int::from(number).to_ne_bytes());
        }
        if departure.segment != 0 {
            let size = departure.segment.to_ne_bytes();
            put(libc::SOL_UDP, libc::UDP_SEGMENT, &size);
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn pair(address: &str) -> (UdpSocket, UdpSocket) {
        let socket = || UdpSocket::bind(address).unwrap();
        let (a, b) = (socket(), socket());
        announce(&b, address.starts_with('[')).unwrap();
        (a, b)
    }

    #[test]
    fn what_a_datagram_asks_for_is_what_its_receiver_is_told() {
        for (address, loopback) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1")] {
            let (a, b) = pair(address);
            let departure = Departure {
                to: Some(b.local_addr().unwrap()),
                source: Some(loopback.parse().unwrap()),
                hops: Some(7),
                service: Some(0x48),
                ..Departure::default()
            };
            send(&a, &[IoSlice::new(b"he"), IoSlice::new(b"llo")], &departure).unwrap();
            let mut buffer = [0; 16];
            let arrival = receive(&b, &mut buffer).unwrap();
            let expected = ReceivedDatagram {
                length: 5,
                from: a.local_addr().unwrap(),
                to: loopback.parse().unwrap(),
                interface: 1,
                hops: 7,
                service: 0x48,
            };
            assert_eq!((arrival, &buffer[..5]), (expected, &b"hello"[..]));
            assert_eq!(receive(&b, &mut buffer), Err(Errno::AGAIN));
        }
    }
}
