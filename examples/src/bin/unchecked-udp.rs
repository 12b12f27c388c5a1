//! A UDP of its own at one port, which neither computes nor verifies checksums, as video and voice may like it: the data is
//! touched once less, and a wrong byte is better than none. (PX §2.) All other ports are the host's. IPv4 only (RFC 8200
//! §8.1 wants checksums).
//!
//!     unchecked-udp echo PORT [OBJECT]
//!     unchecked-udp call ADDRESS:PORT COUNT
//!
//! `echo` sends back what comes; `call` sends from an ephemeral port, one datagram after the other, and tells what came
//! back as it was sent. The other end may be any UDP. OBJECT has a handler that comes before the `echo`, or behind it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::process::ExitCode;
use std::time::Duration;

use portolan::raw::layers::types::{MacAddr, Protocol};
use portolan::raw::layers::wire::ethernet::{EtherType, EthernetHeader};
use portolan::raw::layers::wire::ipv4::{HEADER_LEN as IP_HEADER, Ipv4Header};
use portolan::raw::layers::wire::udp::{HEADER_LEN, UdpHeader};
use portolan::raw::{Errno, Guard, RawFlow};
use portolan_examples::install;

const ETHERNET: usize = 14;
const TIMEOUT: Duration = Duration::from_secs(5);

/// Where a datagram is from and to, on the link and beyond.
#[derive(Clone, Copy)]
struct Way {
    source_mac: MacAddr,
    destination_mac: MacAddr,
    source: SocketAddrV4,
    destination: SocketAddrV4,
}

impl Way {
    fn back(self) -> Way {
        Way {
            source_mac: self.destination_mac,
            destination_mac: self.source_mac,
            source: self.destination,
            destination: self.source,
        }
    }

    fn send(self, flow: &RawFlow, payload: &[u8]) -> Result<(), Errno> {
        let payload_len = u16::try_from(payload.len()).map_err(|_| Errno::MSGSIZE)?;
        let mut head = [0; ETHERNET + IP_HEADER + HEADER_LEN];
        let ethernet = EthernetHeader {
            destination: self.destination_mac,
            source: self.source_mac,
            ether_type: EtherType::IPV4,
        };
        ethernet.emit(&mut head);
        let ip = Ipv4Header {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            protocol: Protocol::Udp.number(),
            source: *self.source.ip(),
            destination: *self.destination.ip(),
            payload_len: payload_len + HEADER_LEN as u16,
        };
        ip.emit(&mut head[ETHERNET..]);
        let udp = UdpHeader {
            source_port: self.source.port(),
            destination_port: self.destination.port(),
            payload_len,
            // None was computed (RFC 768).
            checksum: 0,
        };
        udp.emit(&mut head[ETHERNET + IP_HEADER..]);
        flow.send(&head, payload)
    }
}

/// A whole datagram, whatever its checksum.
fn parse(frame: &[u8]) -> Option<(Way, &[u8])> {
    let (ethernet, packet) = EthernetHeader::parse(frame).ok()?;
    let (ip, datagram) = Ipv4Header::parse(packet).ok()?;
    // ICMP errors about what was sent from the port come, too.
    if ip.protocol != Protocol::Udp.number() || ip.is_fragment() {
        return None;
    }
    let (udp, payload) = UdpHeader::parse(datagram).ok()?;
    let way = Way {
        source_mac: ethernet.source,
        destination_mac: ethernet.destination,
        source: SocketAddrV4::new(ip.source, udp.source_port),
        destination: SocketAddrV4::new(ip.destination, udp.destination_port),
    };
    Some((way, payload))
}

fn open(port: u16) -> Result<(RawFlow, u16), Errno> {
    let flow = RawFlow::open(Guard::Port {
        protocol: Protocol::Udp,
        local: SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
    })?;
    match flow.guard() {
        Guard::Port { local, .. } => Ok((flow, local.port())),
        Guard::EtherType(_) | Guard::IpProtocol(_) => Err(Errno::PROTO),
    }
}

fn echo(port: u16, object: Option<&str>) -> Result<(), Errno> {
    let (flow, port) = open(port)?;
    let _handler = object.map(|object| install(&flow, object)).transpose()?;
    println!("serving {port}");
    loop {
        let frame = flow.recv(None)?.bytes;
        if let Some((way, payload)) = parse(&frame) {
            way.back().send(&flow, payload)?;
        }
    }
}

fn call(destination: SocketAddrV4, count: u32) -> Result<(), Errno> {
    let (flow, port) = open(0)?;
    let hop = flow.hop((*destination.ip()).into(), TIMEOUT)?;
    let IpAddr::V4(source) = hop.source else {
        return Err(Errno::AFNOSUPPORT);
    };
    let way = Way {
        source_mac: hop.own_mac,
        destination_mac: hop.next_mac,
        source: SocketAddrV4::new(source, port),
        destination,
    };
    let mut came_back = 0;
    for number in 0..count {
        let payload = number.to_be_bytes();
        way.send(&flow, &payload)?;
        let frame = flow.recv(Some(TIMEOUT))?.bytes;
        came_back += u32::from(parse(&frame).is_some_and(|(_, answer)| answer == payload));
    }
    println!("{came_back} of {count} came back");
    Ok(())
}

fn run(words: &[&str]) -> Result<(), Errno> {
    let number = |word: &str| word.parse().map_err(|_| Errno::INVAL);
    match words {
        ["echo", port, object @ ..] if object.len() < 2 => {
            let port = port.parse().map_err(|_| Errno::INVAL)?;
            echo(port, object.first().copied())
        }
        ["call", destination, count] => {
            let destination = destination.parse().map_err(|_| Errno::INVAL)?;
            call(destination, number(count)?)
        }
        _ => Err(Errno::INVAL),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(errno) => {
            eprintln!("unchecked-udp: {errno}");
            ExitCode::FAILURE
        }
    }
}
