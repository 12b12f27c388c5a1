//! A flood of SYNs that nobody will acknowledge: from addresses of the range that is set aside for
//! benchmarks (RFC 2544, 198.18.0.0/15).

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZero;
use std::time::Duration;

use portolan_wire::checksum::Sum;
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketType, sendto, socket};
use serde::Serialize;

use crate::pace::steadily;

#[derive(Serialize)]
pub struct Report {
    pub syns: u64,
}

/// With it, what is sent begins with the IP header.
const IPPROTO_RAW: u32 = 255;

pub fn flood(to: SocketAddrV4, per_second: f64, duration: Duration) -> io::Result<Report> {
    let protocol = NonZero::new(IPPROTO_RAW).map(Protocol::from_raw);
    let raw = socket(AddressFamily::INET, SocketType::RAW, protocol)?;
    let syns = steadily(per_second, duration, |number| {
        let packet = syn(source(number), to, number as u32);
        sendto(&raw, &packet, SendFlags::empty(), &to)?;
        Ok(())
    })?;
    Ok(Report { syns })
}

/// Another endpoint each time.
fn source(number: u64) -> SocketAddrV4 {
    let [high, low] = (number as u16).to_be_bytes();
    let port = 1024 + (number % 60_000) as u16;
    SocketAddrV4::new(Ipv4Addr::new(198, 18, high, low), port)
}

/// A SYN without options. The kernel fills in the IP header's checksum.
fn syn(from: SocketAddrV4, to: SocketAddrV4, sequence: u32) -> [u8; 40] {
    let mut packet = [0; 40];
    packet[0] = 0x45;
    packet[3] = 40;
    packet[8] = 64;
    packet[9] = 6;
    packet[12..16].copy_from_slice(&from.ip().octets());
    packet[16..20].copy_from_slice(&to.ip().octets());
    packet[20..22].copy_from_slice(&from.port().to_be_bytes());
    packet[22..24].copy_from_slice(&to.port().to_be_bytes());
    packet[24..28].copy_from_slice(&sequence.to_be_bytes());
    packet[32] = 5 << 4;
    packet[33] = 2;
    packet[34..36].copy_from_slice(&[0xff, 0xff]);
    let (source, destination) = ((*from.ip()).into(), (*to.ip()).into());
    let pseudo_header = Sum::pseudo_header(source, destination, 6, 20);
    let checksum = pseudo_header.over(&packet[20..]).checksum();
    packet[36..38].copy_from_slice(&checksum.to_be_bytes());
    packet
}
