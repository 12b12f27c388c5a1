//! A flood of SYNs that are never acknowledged, or of segments without a connection, from the address ranges reserved
//! for benchmarks (RFC 2544, 198.18.0.0/15; RFC 5180, 2001:2::/48).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZero;
use std::time::Duration;

use portolan_wire::checksum::Sum;
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketType, sendto, socket};
use serde::Serialize;

use crate::pace::{Target, steadily};

#[derive(Serialize)]
pub(crate) struct Report {
    pub syns: u64,
}

/// With this protocol, the data sent begins with the IP header.
const IPPROTO_RAW: u32 = 255;

const TCP: u8 = 6;
const HOPS: u8 = 64;

/// The kind of segments in a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Segment {
    Syn,
    SynAck,
    Ack,
}

impl Segment {
    fn flags(self) -> u8 {
        match self {
            Segment::Syn => 0x02,
            Segment::SynAck => 0x12,
            Segment::Ack => 0x10,
        }
    }
}

pub(crate) fn flood(
    target: Target,
    segment: Segment,
    per_second: f64,
    duration: Duration,
) -> io::Result<Report> {
    let protocol = NonZero::new(IPPROTO_RAW).map(Protocol::from_raw);
    let family = if target.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let raw = socket(family, SocketType::RAW, protocol)?;
    let syns = steadily(per_second, duration, |number| {
        let to = target.now();
        // On a raw socket a port would be taken for a protocol.
        let host = SocketAddr::new(to.ip(), 0);
        let packet = packet(source(number, to.ip()), to, segment, number as u32);
        sendto(&raw, &packet, SendFlags::empty(), &host)?;
        Ok(())
    })?;
    Ok(Report { syns })
}

/// Returns a different source endpoint for each number.
fn source(number: u64, to: IpAddr) -> SocketAddr {
    let low = number as u16;
    let [high, last] = low.to_be_bytes();
    let port = 1024 + (number % 60_000) as u16;
    let address = match to {
        IpAddr::V4(_) => Ipv4Addr::new(198, 18, high, last).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, low).into(),
    };
    SocketAddr::new(address, port)
}

/// Returns a packet with a segment without options. The kernel fills in the checksum of an IPv4 header.
fn packet(from: SocketAddr, to: SocketAddr, kind: Segment, sequence: u32) -> Vec<u8> {
    let segment = segment(from, to, kind, sequence);
    let payload_len = segment.len() as u16;
    let mut packet = match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = vec![0; ipv4::HEADER_LEN];
            Ipv4Header {
                traffic_class: 0,
                identification: 0,
                dont_fragment: false,
                more_fragments: false,
                fragment_offset: 0,
                ttl: HOPS,
                protocol: TCP,
                source,
                destination,
                payload_len,
            }
            .emit(&mut header);
            header
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = vec![0; ipv6::HEADER_LEN];
            Ipv6Header {
                traffic_class: 0,
                flow_label: 0,
                hop_limit: HOPS,
                protocol: TCP,
                source,
                destination,
                payload_len,
                fragment: None,
            }
            .emit(&mut header);
            header
        }
        _ => return Vec::new(),
    };
    packet.extend(segment);
    packet
}

fn segment(from: SocketAddr, to: SocketAddr, kind: Segment, sequence: u32) -> [u8; 20] {
    let mut segment = [0; 20];
    segment[0..2].copy_from_slice(&from.port().to_be_bytes());
    segment[2..4].copy_from_slice(&to.port().to_be_bytes());
    segment[4..8].copy_from_slice(&sequence.to_be_bytes());
    if kind != Segment::Syn {
        segment[8..12].copy_from_slice(&sequence.wrapping_mul(0x9e37_79b1).to_be_bytes());
    }
    segment[12] = 5 << 4;
    segment[13] = kind.flags();
    segment[14..16].copy_from_slice(&[0xff, 0xff]);
    let pseudo_header = Sum::pseudo_header(from.ip(), to.ip(), TCP, segment.len());
    let checksum = pseudo_header.over(&segment).checksum();
    segment[16..18].copy_from_slice(&checksum.to_be_bytes());
    segment
}
