//! The network card, which cuts the stack's frames into packets and completes their checksums, and
//! the router behind it, which reports packets that are too big.

use core::net::IpAddr;

use portolan_wire::checksum::Sum;
use portolan_wire::ethernet::{self, EtherType, EthernetHeader};
use portolan_wire::icmp::{Cause, IcmpError, IcmpMessage};
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use portolan_wire::tcp::{self, TcpFlags, TcpHeader};
use portolan_wire::vnet::VnetHeader;

/// Number of bytes of a packet that a router quotes.
const QUOTED: usize = 128;
const TCP: u8 = 6;

/// A packet on the wire, and what an observer parses of it.
#[derive(Clone, Debug)]
pub(crate) struct Flying {
    pub frame: Vec<u8>,
    pub header: TcpHeader,
    pub payload: usize,
}

impl Flying {
    /// Bytes of the IP packet.
    pub(crate) fn length(&self) -> usize {
        self.frame.len() - ethernet::HEADER_LEN
    }
}

struct Parsed<'a> {
    ethernet: EthernetHeader,
    ip: Ip,
    body: &'a [u8],
}

enum Ip {
    V4(Ipv4Header),
    V6(Ipv6Header),
}

fn parse(frame: &[u8]) -> Parsed<'_> {
    let (ethernet, packet) = EthernetHeader::parse(frame).expect("a frame");
    let (ip, body) = match ethernet.ether_type {
        EtherType::IPV4 => {
            let (header, body) = Ipv4Header::parse(packet).expect("an IPv4 header");
            (Ip::V4(header), body)
        }
        _ => {
            let (header, body) = Ipv6Header::parse(packet).expect("an IPv6 header");
            (Ip::V6(header), body)
        }
    };
    Parsed { ethernet, ip, body }
}

impl Parsed<'_> {
    /// A frame between the same hosts with another payload.
    fn with(&self, protocol: u8, body: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; ethernet::HEADER_LEN];
        self.ethernet.emit(&mut frame);
        let payload_len = u16::try_from(body.len()).expect("a packet's worth");
        match self.ip {
            Ip::V4(ref header) => {
                let mut bytes = [0; ipv4::HEADER_LEN];
                let header = Ipv4Header {
                    payload_len,
                    protocol,
                    ..*header
                };
                header.emit(&mut bytes);
                frame.extend(bytes);
            }
            Ip::V6(ref header) => {
                let mut bytes = [0; ipv6::HEADER_LEN];
                let header = Ipv6Header {
                    payload_len,
                    protocol,
                    ..*header
                };
                header.emit(&mut bytes);
                frame.extend(bytes);
            }
        }
        frame.extend(body);
        frame
    }

    fn addresses(&self) -> (IpAddr, IpAddr) {
        match self.ip {
            Ip::V4(ref header) => (header.source.into(), header.destination.into()),
            Ip::V6(ref header) => (header.source.into(), header.destination.into()),
        }
    }
}

/// Cuts a frame by its virtio-net header, as the card does.
pub(crate) fn cut(frame: &[u8]) -> Vec<Flying> {
    let (vnet, frame) = VnetHeader::parse(frame).expect("a virtio-net header");
    let parsed = parse(frame);
    let (header, length) = TcpHeader::parse(parsed.body).expect("a TCP header");
    let payload = &parsed.body[length..];
    let size = vnet.gso().map_or(usize::MAX, |(_, size)| size.into());
    let count = payload.len().div_ceil(size).max(1);
    (0..count)
        .map(|index| {
            let start = index * size.min(payload.len());
            let piece = &payload[start..payload.len().min(start.saturating_add(size))];
            let mut header = header.clone();
            header.seq += start as u32;
            if index + 1 < count {
                header.flags.0 &= !(TcpFlags::PSH.0 | TcpFlags::FIN.0);
            }
            finish(&parsed, header, piece)
        })
        .collect()
}

fn finish(parsed: &Parsed<'_>, header: TcpHeader, payload: &[u8]) -> Flying {
    let mut body = vec![0; header.header_len()];
    header.emit(&mut body);
    body.extend(payload);
    body[tcp::CHECKSUM_AT..][..2].fill(0);
    let (source, destination) = parsed.addresses();
    let sum = Sum::pseudo_header(source, destination, TCP, body.len()).over(&body);
    body[tcp::CHECKSUM_AT..][..2].copy_from_slice(&sum.checksum().to_be_bytes());
    Flying {
        frame: parsed.with(TCP, &body),
        header,
        payload: payload.len(),
    }
}

/// The error of a router that cannot forward `flying`, addressed to its sender.
pub(crate) fn too_big(flying: &Flying, mtu: u32) -> Vec<u8> {
    let packet = &flying.frame[ethernet::HEADER_LEN..];
    let error = IcmpMessage::Error(IcmpError {
        cause: Cause::TooBig { mtu },
        quoted: &packet[..packet.len().min(QUOTED)],
    });
    let mut parsed = parse(&flying.frame);
    let mut body = vec![0; error.emitted_len()];
    match &mut parsed.ip {
        Ip::V4(header) => {
            core::mem::swap(&mut header.source, &mut header.destination);
            error.emit_v4(&mut body);
            parsed.with(1, &body)
        }
        Ip::V6(header) => {
            core::mem::swap(&mut header.source, &mut header.destination);
            error.emit_v6(header.source, header.destination, &mut body);
            parsed.with(58, &body)
        }
    }
}
