//! Builds IP packets as a script states them.

use std::net::IpAddr;

use super::{FRAGMENT, Flow, ICMP, ICMPV6, Scope, TCP, UDP, Unknown, pattern, pseudo_header, sum};
use crate::script::{
    About, Body, Checksum, Expression, Field, Icmp, IcmpKind, Packet, Payload, Sequence, Tcp,
    TcpOption, Udp,
};

/// Why a packet cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum Unbuildable {
    #[error(transparent)]
    Unknown(#[from] Unknown),
    #[error("the stack under test has not told its first sequence number yet")]
    NoSequence,
    #[error("a packet to be sent must be told in full")]
    NotTold,
    #[error("the packet is too large")]
    TooLarge,
}

/// Size of the largest packet in bytes.
const LARGEST: usize = 65_535;
const ACK: u16 = 0x10;

/// Returns the packet, beginning with its IP header.
pub fn build(packet: &Packet, flow: &Flow, scope: &Scope) -> Result<Vec<u8>, Unbuildable> {
    let maker = Maker { flow, scope };
    let (protocol, content) = match &packet.body {
        Body::Tcp(tcp) => (TCP, maker.tcp(tcp)?),
        Body::Udp(udp) => (UDP, maker.udp(udp)?),
        Body::Icmp(icmp) if flow.remote.is_ipv4() => (ICMP, maker.icmp(icmp)?),
        Body::Icmp(icmp) => (ICMPV6, maker.icmp(icmp)?),
    };
    let ttl = maker.field(&packet.ip.ttl, 64)? as u8;
    let tos = maker.field(&packet.ip.tos, 0)? as u8;
    let header = IpHeader {
        from: flow.remote.ip(),
        to: flow.local.ip(),
        protocol,
        ttl,
        tos,
        dont_fragment: packet.ip.dont_fragment.unwrap_or(packet.ip.part.is_none()),
    };
    let Some(part) = packet.ip.part else {
        return header.before(&content, None);
    };
    let end = part.end.min(content.len());
    let Some(piece) = content.get(part.start..end) else {
        return Err(Unbuildable::TooLarge);
    };
    let fragment = FragmentOf {
        identification: part.identification,
        offset: part.start as u16,
        more: end < content.len(),
    };
    header.before(piece, Some(fragment))
}

struct IpHeader {
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    ttl: u8,
    tos: u8,
    dont_fragment: bool,
}

struct FragmentOf {
    identification: u16,
    offset: u16,
    more: bool,
}

impl IpHeader {
    fn before(&self, content: &[u8], fragment: Option<FragmentOf>) -> Result<Vec<u8>, Unbuildable> {
        if content.len() + 60 > LARGEST {
            return Err(Unbuildable::TooLarge);
        }
        Ok(match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let mut bytes = vec![0x45, self.tos];
                bytes.extend((20 + content.len() as u16).to_be_bytes());
                let (identification, place) = match &fragment {
                    Some(part) => {
                        let more = if part.more { 0x2000 } else { 0 };
                        (part.identification, part.offset >> 3 | more)
                    }
                    None if self.dont_fragment => (0, 0x4000),
                    None => (0, 0),
                };
                bytes.extend(identification.to_be_bytes());
                bytes.extend(place.to_be_bytes());
                bytes.extend([self.ttl, self.protocol, 0, 0]);
                bytes.extend(from.octets());
                bytes.extend(to.octets());
                let checksum = !sum(&[&bytes]);
                bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
                bytes.extend(content);
                bytes
            }
            (from, to) => {
                let extension = match &fragment {
                    Some(part) => {
                        let more = u16::from(part.more);
                        let mut header = vec![self.protocol, 0];
                        header.extend((part.offset | more).to_be_bytes());
                        header.extend(u32::from(part.identification).to_be_bytes());
                        header
                    }
                    None => Vec::new(),
                };
                let next = match fragment {
                    Some(_) => FRAGMENT,
                    None => self.protocol,
                };
                let mut bytes = vec![0x60 | self.tos >> 4, self.tos << 4, 0, 0];
                bytes.extend(((extension.len() + content.len()) as u16).to_be_bytes());
                bytes.extend([next, self.ttl]);
                for address in [from, to] {
                    if let IpAddr::V6(v6) = address {
                        bytes.extend(v6.octets());
                    }
                }
                bytes.extend(extension);
                bytes.extend(content);
                bytes
            }
        })
    }
}

struct Maker<'a> {
    flow: &'a Flow,
    scope: &'a Scope,
}

impl Maker<'_> {
    fn number(&self, expression: &Expression) -> Result<i64, Unknown> {
        self.scope.evaluate(expression, Some(self.flow))
    }

    fn field(&self, field: &Option<Field>, otherwise: i64) -> Result<i64, Unbuildable> {
        match field {
            None => Ok(otherwise),
            Some(field) => self.told(field),
        }
    }

    fn told(&self, field: &Field) -> Result<i64, Unbuildable> {
        match field {
            Field::Compare(_, expression) => Ok(self.number(expression)?),
            Field::Any | Field::Capture(_) => Err(Unbuildable::NotTold),
        }
    }

    fn local_isn(&self) -> Result<u32, Unbuildable> {
        self.flow.local_isn.ok_or(Unbuildable::NoSequence)
    }

    fn tcp(&self, tcp: &Tcp) -> Result<Vec<u8>, Unbuildable> {
        let sequence = match &tcp.sequence {
            Sequence::Relative(number) => {
                let number = self.number(number)? as u32;
                self.flow.remote_isn.wrapping_add(number)
            }
            Sequence::Absolute(number) => self.number(number)? as u32,
            Sequence::Any => return Err(Unbuildable::NotTold),
        };
        let ack = match &tcp.ack {
            None => 0,
            Some(Sequence::Relative(number)) => {
                let number = self.number(number)? as u32;
                self.local_isn()?.wrapping_add(number)
            }
            Some(Sequence::Absolute(number)) => self.number(number)? as u32,
            Some(Sequence::Any) => return Err(Unbuildable::NotTold),
        };
        let options = self.options(tcp.options.as_deref().unwrap_or_default())?;
        let words = tcp.offset.unwrap_or((5 + options.len() / 4) as u8);
        let flags = tcp.flags & 0x1ff;
        let mut bytes = Vec::new();
        bytes.extend(self.flow.remote.port().to_be_bytes());
        bytes.extend(self.flow.local.port().to_be_bytes());
        bytes.extend(sequence.to_be_bytes());
        bytes.extend(ack.to_be_bytes());
        bytes.extend((u16::from(words) << 12 | flags).to_be_bytes());
        bytes.extend((self.field(&tcp.window, 65_535)? as u16).to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend((self.field(&tcp.urgent, 0)? as u16).to_be_bytes());
        bytes.extend(options);
        let position = sequence.wrapping_sub(self.flow.remote_isn);
        // A SYN takes one number; data in it are the first bytes of the stream.
        let syn = tcp.flags & 2 != 0;
        let position = u64::from(position) + u64::from(syn) + 251;
        bytes.extend(self.payload(&tcp.payload, position - 1)?);
        self.checksum(&mut bytes, TCP, 16, tcp.checksum);
        debug_assert!(tcp.ack.is_some() || flags & ACK == 0);
        Ok(bytes)
    }

    /// `position` is the first byte's position in the pattern, plus any number of periods.
    fn payload(&self, payload: &Payload, position: u64) -> Result<Vec<u8>, Unbuildable> {
        match payload {
            Payload::Text(text) => Ok(text.clone()),
            Payload::Any => Err(Unbuildable::NotTold),
            Payload::Stream(length) => self.piece(self.number(length)?, position),
            Payload::Span(first, end) => {
                let length = self.number(end)?.saturating_sub(self.number(first)?);
                self.piece(length, position)
            }
        }
    }

    fn piece(&self, length: i64, position: u64) -> Result<Vec<u8>, Unbuildable> {
        match usize::try_from(length) {
            Ok(length) if length <= LARGEST => {
                Ok((0..length as u64).map(|n| pattern(position + n)).collect())
            }
            _ => Err(Unbuildable::TooLarge),
        }
    }

    /// Encodes the options, padded with end-of-list options.
    fn options(&self, options: &[TcpOption]) -> Result<Vec<u8>, Unbuildable> {
        let mut bytes = Vec::new();
        for option in options {
            match option {
                TcpOption::Mss(mss) => {
                    bytes.extend([2, 4]);
                    bytes.extend((self.told(mss)? as u16).to_be_bytes());
                }
                TcpOption::WindowScale(shift) => bytes.extend([3, 3, self.told(shift)? as u8]),
                TcpOption::SackPermitted => bytes.extend([4, 2]),
                TcpOption::Sack(blocks) => {
                    bytes.extend([5, 2 + 8 * blocks.len() as u8]);
                    for (start, end) in blocks {
                        for edge in [start, end] {
                            let edge = self.number(edge)? as u32;
                            let edge = self.local_isn()?.wrapping_add(edge);
                            bytes.extend(edge.to_be_bytes());
                        }
                    }
                }
                TcpOption::Timestamps(value, echo) => {
                    bytes.extend([8, 10]);
                    bytes.extend((self.told(value)? as u32).to_be_bytes());
                    bytes.extend((self.told(echo)? as u32).to_be_bytes());
                }
                TcpOption::FastOpen(cookie) => {
                    let cookie = cookie.as_ref().unwrap_or(&self.scope.cookie);
                    bytes.extend([34, 2 + cookie.len().min(16) as u8]);
                    bytes.extend(&cookie[..cookie.len().min(16)]);
                }
                TcpOption::Nop => bytes.push(1),
                TcpOption::End => bytes.push(0),
                TcpOption::Raw(raw) => bytes.extend(raw),
            }
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        match bytes.len() {
            0..=40 => Ok(bytes),
            _ => Err(Unbuildable::TooLarge),
        }
    }

    fn udp(&self, udp: &Udp) -> Result<Vec<u8>, Unbuildable> {
        let payload = self.payload(&udp.payload, 0)?;
        if payload.len() > LARGEST - 68 {
            return Err(Unbuildable::TooLarge);
        }
        let length = udp.length.unwrap_or(8 + payload.len() as u16);
        let mut bytes = Vec::new();
        bytes.extend(self.flow.remote.port().to_be_bytes());
        bytes.extend(self.flow.local.port().to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(payload);
        self.checksum(&mut bytes, UDP, 6, udp.checksum);
        Ok(bytes)
    }

    fn checksum(&self, bytes: &mut [u8], protocol: u8, at: usize, kind: Checksum) {
        let (from, to) = (self.flow.remote.ip(), self.flow.local.ip());
        let pseudo = pseudo_header(from, to, protocol, bytes.len());
        let good = match !sum(&[&pseudo, bytes]) {
            // RFC 768: zero would mean that there is no checksum.
            0 if protocol == UDP => 0xffff,
            good => good,
        };
        let checksum = match kind {
            Checksum::Good => good,
            // Not the correct value, not zero, and not the value that checksum offloading leaves in the field.
            Checksum::Bad => good ^ 0x5a5a,
            Checksum::Zero => 0,
        };
        bytes[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }

    fn icmp(&self, icmp: &Icmp) -> Result<Vec<u8>, Unbuildable> {
        let v4 = self.flow.remote.is_ipv4();
        let (kind, code, word) = if v4 {
            icmp_v4(icmp.kind)
        } else {
            icmp_v6(icmp.kind)
        };
        let mut bytes = vec![kind, code, 0, 0];
        bytes.extend(word.to_be_bytes());
        let length = match icmp.kind {
            IcmpKind::TooBig(_) => LARGE,
            _ => QUOTED,
        };
        bytes.extend(self.quoted(&icmp.about, length)?);
        let checksum = if v4 {
            !sum(&[&bytes])
        } else {
            let (from, to) = (self.flow.remote.ip(), self.flow.local.ip());
            !sum(&[&pseudo_header(from, to, ICMPV6, bytes.len()), &bytes])
        };
        bytes[2..4].copy_from_slice(&checksum.to_be_bytes());
        Ok(bytes)
    }

    /// Returns the beginning of a packet that the stack under test has sent, with `length` bytes after its IP
    /// header.
    fn quoted(&self, about: &About, length: usize) -> Result<Vec<u8>, Unbuildable> {
        let mut content = Vec::new();
        content.extend(self.flow.local.port().to_be_bytes());
        content.extend(self.flow.remote.port().to_be_bytes());
        let protocol = match about {
            About::Udp => {
                content.extend([0, 20, 0x12, 0x34]);
                UDP
            }
            About::Tcp(sequence) => {
                let sequence = match sequence {
                    Sequence::Relative(number) => {
                        let number = self.number(number)? as u32;
                        self.local_isn()?.wrapping_add(number)
                    }
                    Sequence::Absolute(number) => self.number(number)? as u32,
                    Sequence::Any => return Err(Unbuildable::NotTold),
                };
                content.extend(sequence.to_be_bytes());
                content.extend([0, 0, 0, 0, 0x50, 0x10]);
                TCP
            }
        };
        content.resize(length, 0);
        let header = IpHeader {
            from: self.flow.local.ip(),
            to: self.flow.remote.ip(),
            protocol,
            ttl: 63,
            tos: 0,
            dont_fragment: true,
        };
        let mut packet = header.before(&content, None)?;
        packet.truncate(packet.len() - length + QUOTED);
        Ok(packet)
    }
}

/// Bytes after the IP header that an error quotes.
const QUOTED: usize = 20;
/// Payload length of a packet that was too big.
const LARGE: usize = 1480;

fn icmp_v4(kind: IcmpKind) -> (u8, u8, u32) {
    match kind {
        IcmpKind::NetUnreachable => (3, 0, 0),
        IcmpKind::HostUnreachable => (3, 1, 0),
        IcmpKind::ProtocolUnreachable => (3, 2, 0),
        IcmpKind::PortUnreachable => (3, 3, 0),
        IcmpKind::TooBig(mtu) => (3, 4, mtu & 0xffff),
        IcmpKind::Prohibited => (3, 13, 0),
        IcmpKind::SourceQuench => (4, 0, 0),
        IcmpKind::TimeExceeded => (11, 0, 0),
        IcmpKind::ParameterProblem => (12, 0, 0),
    }
}

fn icmp_v6(kind: IcmpKind) -> (u8, u8, u32) {
    match kind {
        IcmpKind::NetUnreachable => (1, 0, 0),
        IcmpKind::Prohibited => (1, 1, 0),
        IcmpKind::HostUnreachable => (1, 3, 0),
        IcmpKind::PortUnreachable => (1, 4, 0),
        IcmpKind::TooBig(mtu) => (2, 0, mtu),
        IcmpKind::TimeExceeded => (3, 0, 0),
        IcmpKind::ProtocolUnreachable => (4, 1, 0),
        // IPv6 has no source quench.
        IcmpKind::ParameterProblem | IcmpKind::SourceQuench => (4, 0, 0),
    }
}
