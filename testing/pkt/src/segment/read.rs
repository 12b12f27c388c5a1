//! Parses packets from the link.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use super::{FRAGMENT, ICMP, ICMPV6, TCP, UDP, pseudo_header, sum};

/// One packet that the stack under test has sent.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Time of arrival by the monotonic clock.
    pub at: Duration,
    pub ttl: u8,
    pub tos: u8,
    pub dont_fragment: bool,
    /// Number of fragments; one for an unfragmented packet.
    pub fragments: usize,
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub content: Content,
    /// An error in the packet, independent of any expectation.
    pub fault: Option<&'static str>,
}

#[derive(Clone, Debug)]
pub enum Content {
    Tcp(SeenTcp),
    Udp(SeenUdp),
    Icmp(SeenIcmp),
}

#[derive(Clone, Debug)]
pub struct SeenTcp {
    pub flags: u16,
    pub sequence: u32,
    pub ack: u32,
    pub window: u16,
    pub urgent: u16,
    pub options: Vec<SeenOption>,
    pub payload: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeenOption {
    Mss(u16),
    WindowScale(u8),
    SackPermitted,
    Sack(Vec<(u32, u32)>),
    Timestamps(u32, u32),
    FastOpen(Vec<u8>),
    Other(Vec<u8>),
}

#[derive(Clone, Debug)]
pub struct SeenUdp {
    pub payload: Vec<u8>,
    pub has_checksum: bool,
}

/// An ICMP error.
#[derive(Clone, Debug)]
pub struct SeenIcmp {
    pub kind: u8,
    pub code: u8,
    pub word: u32,
    /// Protocol and endpoints of the packet that the error is about.
    pub about: Option<(u8, SocketAddr, SocketAddr)>,
    pub sequence: u32,
}

/// An IP packet, possibly a fragment.
pub(super) struct IpPacket<'a> {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) protocol: u8,
    pub(super) ttl: u8,
    pub(super) tos: u8,
    pub(super) dont_fragment: bool,
    pub(super) content: &'a [u8],
    pub(super) fragment: Option<FragmentPlace>,
    pub(super) fault: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FragmentPlace {
    pub(super) identification: u32,
    pub(super) offset: usize,
    pub(super) more: bool,
}

/// Parses a packet; None if it is not a complete TCP, UDP or ICMP error packet.
pub fn read(packet: &[u8], at: Duration) -> Option<Seen> {
    let ip = ip_packet(packet)?;
    match ip.fragment {
        Some(_) => None,
        None => transport(&ip, at),
    }
}

pub(super) fn ip_packet(packet: &[u8]) -> Option<IpPacket<'_>> {
    match packet.first()? >> 4 {
        4 => ip_v4(packet),
        6 => ip_v6(packet),
        _ => None,
    }
}

fn ip_v4(packet: &[u8]) -> Option<IpPacket<'_>> {
    let header_length = usize::from(packet[0] & 15) * 4;
    let header = packet.get(..header_length.max(20))?;
    let total = usize::from(half(packet, 2)?);
    let place = half(packet, 6)?;
    let fragment = (place & 0x3fff != 0).then_some(FragmentPlace {
        identification: half(packet, 4)?.into(),
        offset: usize::from(place & 0x1fff) * 8,
        more: place & 0x2000 != 0,
    });
    let address = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(bytes).into())
    };
    Some(IpPacket {
        from: address(12)?,
        to: address(16)?,
        protocol: packet[9],
        ttl: packet[8],
        tos: packet[1],
        dont_fragment: place & 0x4000 != 0,
        content: packet.get(header.len()..total)?,
        fragment,
        fault: (sum(&[header]) != 0xffff).then_some("its IP header checksum is wrong"),
    })
}

fn ip_v6(packet: &[u8]) -> Option<IpPacket<'_>> {
    let length = usize::from(half(packet, 4)?);
    let address = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
        Some(Ipv6Addr::from(bytes).into())
    };
    let mut protocol = *packet.get(6)?;
    let mut content = packet.get(40..40 + length)?;
    let mut fragment = None;
    if protocol == FRAGMENT {
        let place = half(content, 2)?;
        fragment = Some(FragmentPlace {
            identification: word(content, 4)?,
            offset: usize::from(place & !7),
            more: place & 1 != 0,
        });
        protocol = content[0];
        content = content.get(8..)?;
    }
    Some(IpPacket {
        from: address(8)?,
        to: address(24)?,
        protocol,
        ttl: packet[7],
        tos: packet[0] << 4 | packet[1] >> 4,
        dont_fragment: fragment.is_none(),
        content,
        fragment,
        fault: None,
    })
}

pub(super) fn transport(ip: &IpPacket, at: Duration) -> Option<Seen> {
    let content = ip.content;
    let (ports, parsed) = match ip.protocol {
        TCP => (true, Content::Tcp(tcp(content)?)),
        UDP => (true, Content::Udp(udp(content)?)),
        ICMP => (false, Content::Icmp(icmp(content, ip.protocol)?)),
        ICMPV6 => (false, Content::Icmp(icmp(content, ip.protocol)?)),
        _ => return None,
    };
    let port = |at| if ports { half(content, at) } else { Some(0) };
    Some(Seen {
        at,
        ttl: ip.ttl,
        tos: ip.tos,
        dont_fragment: ip.dont_fragment,
        fragments: 1,
        from: SocketAddr::new(ip.from, port(0)?),
        to: SocketAddr::new(ip.to, port(2)?),
        fault: ip.fault.or_else(|| checksum_fault(ip, &parsed)),
        content: parsed,
    })
}

fn checksum_fault(ip: &IpPacket, parsed: &Content) -> Option<&'static str> {
    let pseudo = pseudo_header(ip.from, ip.to, ip.protocol, ip.content.len());
    let whole = match parsed {
        Content::Udp(udp) if !udp.has_checksum => return None,
        Content::Icmp(_) if ip.protocol == ICMP => sum(&[ip.content]),
        _ => sum(&[&pseudo, ip.content]),
    };
    (whole != 0xffff).then_some("its checksum is wrong")
}

fn tcp(segment: &[u8]) -> Option<SeenTcp> {
    let offset = half(segment, 12)?;
    let header_length = usize::from(offset >> 12) * 4;
    Some(SeenTcp {
        flags: offset & 0x1ff,
        sequence: word(segment, 4)?,
        ack: word(segment, 8)?,
        window: half(segment, 14)?,
        urgent: half(segment, 18)?,
        options: options(segment.get(20..header_length)?)?,
        payload: segment.get(header_length..)?.to_vec(),
    })
}

fn options(mut bytes: &[u8]) -> Option<Vec<SeenOption>> {
    let mut options = Vec::new();
    while let Some((&kind, rest)) = bytes.split_first() {
        match kind {
            0 => break,
            1 => bytes = rest,
            _ => {
                let length = usize::from(*rest.first()?);
                let (option, rest) = bytes.split_at_checked(length.max(2))?;
                options.push(option_of(kind, &option[2..], option)?);
                bytes = rest;
            }
        }
    }
    Some(options)
}

fn option_of(kind: u8, value: &[u8], whole: &[u8]) -> Option<SeenOption> {
    Some(match (kind, value.len()) {
        (2, 2) => SeenOption::Mss(half(value, 0)?),
        (3, 1) => SeenOption::WindowScale(value[0]),
        (4, 0) => SeenOption::SackPermitted,
        (5, _) => {
            let blocks = value.chunks_exact(8);
            let blocks = blocks.map(|block| Some((word(block, 0)?, word(block, 4)?)));
            SeenOption::Sack(blocks.collect::<Option<_>>()?)
        }
        (8, 8) => SeenOption::Timestamps(word(value, 0)?, word(value, 4)?),
        (34, _) => SeenOption::FastOpen(value.to_vec()),
        _ => SeenOption::Other(whole.to_vec()),
    })
}

fn udp(datagram: &[u8]) -> Option<SeenUdp> {
    let length = usize::from(half(datagram, 4)?);
    Some(SeenUdp {
        payload: datagram.get(8..length)?.to_vec(),
        has_checksum: half(datagram, 6)? != 0,
    })
}

/// Parses ICMP errors only: scripts do not use other ICMP messages.
fn icmp(message: &[u8], protocol: u8) -> Option<SeenIcmp> {
    let (kind, code) = (*message.first()?, *message.get(1)?);
    let is_error = match protocol {
        ICMP => matches!(kind, 3 | 4 | 11 | 12),
        _ => kind < 128,
    };
    if !is_error {
        return None;
    }
    let quoted = message.get(8..)?;
    let (from, to, protocol, content) = match quoted.first()? >> 4 {
        4 => {
            let header_length = usize::from(quoted[0] & 15) * 4;
            let address = |at: usize| -> Option<IpAddr> {
                let bytes: [u8; 4] = quoted.get(at..at + 4)?.try_into().ok()?;
                Some(Ipv4Addr::from(bytes).into())
            };
            let protocol = *quoted.get(9)?;
            (
                address(12)?,
                address(16)?,
                protocol,
                quoted.get(header_length..)?,
            )
        }
        _ => {
            let address = |at: usize| -> Option<IpAddr> {
                let bytes: [u8; 16] = quoted.get(at..at + 16)?.try_into().ok()?;
                Some(Ipv6Addr::from(bytes).into())
            };
            (
                address(8)?,
                address(24)?,
                *quoted.get(6)?,
                quoted.get(40..)?,
            )
        }
    };
    let ends = half(content, 0).zip(half(content, 2));
    Some(SeenIcmp {
        kind,
        code,
        word: word(message, 4)?,
        about: ends.map(|(source, destination)| {
            let source = SocketAddr::new(from, source);
            (protocol, source, SocketAddr::new(to, destination))
        }),
        sequence: word(content, 4).unwrap_or(0),
    })
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
