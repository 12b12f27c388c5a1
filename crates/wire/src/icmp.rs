//! ICMP (RFC 792, RFC 1191) and ICMPv6 (RFC 4443) as far as a host needs them: errors about its own
//! packets, and echo. The types are common to both versions.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use portolan_types::SeqNum;

use crate::Malformed;
use crate::checksum::Sum;
use crate::ipv4::Ipv4Header;
use crate::ipv6::{self, Ipv6Header};

/// Bytes before the quoted packet or the echo data.
pub const HEADER_LEN: usize = 8;
/// IP protocol numbers.
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;

const CHECKSUM_AT: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpMessage<'a> {
    Error(IcmpError<'a>),
    EchoRequest(Echo<'a>),
    EchoReply(Echo<'a>),
    /// A message that is none of the above, by type and code.
    Other {
        kind: u8,
        code: u8,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Echo<'a> {
    pub identifier: u16,
    pub sequence: u16,
    pub data: &'a [u8],
}

/// An error about the packet that it quotes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IcmpError<'a> {
    pub cause: Cause,
    /// The offending packet from its IP header on, possibly truncated.
    pub quoted: &'a [u8],
}

/// The cause of an error, common to both versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    NetworkUnreachable,
    HostUnreachable,
    ProtocolUnreachable,
    PortUnreachable,
    Prohibited,
    /// Fragmentation needed, or packet too big. `mtu` 0: the router did not say (RFC 1191 §5).
    TooBig {
        mtu: u32,
    },
    HopLimitExceeded,
    ReassemblyTimeExceeded,
    ParameterProblem {
        code: u8,
    },
    OtherUnreachable {
        code: u8,
    },
}

/// The flow of the packet that an error quotes: `source` is the end that sent it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quoted {
    pub protocol: u8,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// If the packet is TCP.
    pub seq: Option<SeqNum>,
    /// Length of the whole packet, according to its header.
    pub length: u32,
}

impl<'a> IcmpMessage<'a> {
    /// Reads an ICMP message and checks its checksum.
    pub fn parse_v4(message: &'a [u8]) -> Result<IcmpMessage<'a>, Malformed> {
        if Sum::default().over(message).folded() != 0xffff {
            return Err(Malformed);
        }
        let (kind, code, word, rest) = split(message)?;
        Ok(match kind {
            0 => IcmpMessage::EchoReply(Echo::new(word, rest)),
            8 => IcmpMessage::EchoRequest(Echo::new(word, rest)),
            3 | 11 | 12 => IcmpMessage::Error(IcmpError {
                cause: Cause::from_v4(kind, code, word),
                quoted: rest,
            }),
            _ => IcmpMessage::Other { kind, code },
        })
    }

    /// Reads an ICMPv6 message and checks its checksum.
    pub fn parse_v6(
        source: Ipv6Addr,
        destination: Ipv6Addr,
        message: &'a [u8],
    ) -> Result<IcmpMessage<'a>, Malformed> {
        if pseudo_header(source, destination, message)
            .over(message)
            .folded()
            != 0xffff
        {
            return Err(Malformed);
        }
        let (kind, code, word, rest) = split(message)?;
        Ok(match kind {
            128 => IcmpMessage::EchoRequest(Echo::new(word, rest)),
            129 => IcmpMessage::EchoReply(Echo::new(word, rest)),
            1..=4 => IcmpMessage::Error(IcmpError {
                cause: Cause::from_v6(kind, code, word),
                quoted: rest,
            }),
            _ => IcmpMessage::Other { kind, code },
        })
    }

    /// Bytes that `emit_v4` and `emit_v6` write.
    pub fn emitted_len(&self) -> usize {
        HEADER_LEN + self.body().len()
    }

    /// Writes [`IcmpMessage::emitted_len`] bytes, checksum included, to the front of `out`.
    pub fn emit_v4(&self, out: &mut [u8]) {
        let (kind, code, word) = match self {
            IcmpMessage::Error(error) => error.cause.to_v4(),
            IcmpMessage::EchoRequest(echo) => (8, 0, echo.word()),
            IcmpMessage::EchoReply(echo) => (0, 0, echo.word()),
            IcmpMessage::Other { kind, code } => (*kind, *code, 0),
        };
        let out = self.emit_body(out, kind, code, word);
        let checksum = Sum::default().over(out).checksum();
        out[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&checksum.to_be_bytes());
    }

    /// Writes [`IcmpMessage::emitted_len`] bytes, checksum included, to the front of `out`.
    pub fn emit_v6(&self, source: Ipv6Addr, destination: Ipv6Addr, out: &mut [u8]) {
        let (kind, code, word) = match self {
            IcmpMessage::Error(error) => error.cause.to_v6(),
            IcmpMessage::EchoRequest(echo) => (128, 0, echo.word()),
            IcmpMessage::EchoReply(echo) => (129, 0, echo.word()),
            IcmpMessage::Other { kind, code } => (*kind, *code, 0),
        };
        let out = self.emit_body(out, kind, code, word);
        let checksum = pseudo_header(source, destination, out).over(out).checksum();
        out[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&checksum.to_be_bytes());
    }

    fn body(&self) -> &'a [u8] {
        match self {
            IcmpMessage::Error(error) => error.quoted,
            IcmpMessage::EchoRequest(echo) | IcmpMessage::EchoReply(echo) => echo.data,
            IcmpMessage::Other { .. } => &[],
        }
    }

    fn emit_body<'o>(&self, out: &'o mut [u8], kind: u8, code: u8, word: u32) -> &'o mut [u8] {
        let out = &mut out[..self.emitted_len()];
        out[..4].copy_from_slice(&[kind, code, 0, 0]);
        out[4..HEADER_LEN].copy_from_slice(&word.to_be_bytes());
        out[HEADER_LEN..].copy_from_slice(self.body());
        out
    }
}

impl<'a> Echo<'a> {
    fn new(word: u32, data: &'a [u8]) -> Echo<'a> {
        Echo {
            identifier: (word >> 16) as u16,
            sequence: word as u16,
            data,
        }
    }

    fn word(&self) -> u32 {
        u32::from(self.identifier) << 16 | u32::from(self.sequence)
    }
}

impl Cause {
    /// RFC 792, with the codes of RFC 1122 §3.2.2.1 and RFC 1812 §5.2.7.1.
    fn from_v4(kind: u8, code: u8, word: u32) -> Cause {
        match (kind, code) {
            (3, 0 | 6 | 8 | 11) => Cause::NetworkUnreachable,
            (3, 1 | 7 | 12) => Cause::HostUnreachable,
            (3, 2) => Cause::ProtocolUnreachable,
            (3, 3) => Cause::PortUnreachable,
            // RFC 1191 §4: the next-hop MTU is in the low 16 bits.
            (3, 4) => Cause::TooBig { mtu: word & 0xffff },
            (3, 9 | 10 | 13) => Cause::Prohibited,
            (3, code) => Cause::OtherUnreachable { code },
            (11, 0) => Cause::HopLimitExceeded,
            (11, _) => Cause::ReassemblyTimeExceeded,
            (_, code) => Cause::ParameterProblem { code },
        }
    }

    /// RFC 4443 §3.
    fn from_v6(kind: u8, code: u8, word: u32) -> Cause {
        match (kind, code) {
            (1, 0) => Cause::NetworkUnreachable,
            (1, 1 | 5 | 6) => Cause::Prohibited,
            (1, 3) => Cause::HostUnreachable,
            (1, 4) => Cause::PortUnreachable,
            (1, code) => Cause::OtherUnreachable { code },
            (2, _) => Cause::TooBig { mtu: word },
            (3, 0) => Cause::HopLimitExceeded,
            (3, _) => Cause::ReassemblyTimeExceeded,
            // RFC 4443 §3.4: code 1, unrecognised next header, corresponds to protocol unreachable.
            (_, 1) => Cause::ProtocolUnreachable,
            (_, code) => Cause::ParameterProblem { code },
        }
    }

    fn to_v4(self) -> (u8, u8, u32) {
        match self {
            Cause::NetworkUnreachable => (3, 0, 0),
            Cause::HostUnreachable => (3, 1, 0),
            Cause::ProtocolUnreachable => (3, 2, 0),
            Cause::PortUnreachable => (3, 3, 0),
            Cause::TooBig { mtu } => (3, 4, mtu.min(0xffff)),
            Cause::Prohibited => (3, 13, 0),
            Cause::OtherUnreachable { code } => (3, code, 0),
            Cause::HopLimitExceeded => (11, 0, 0),
            Cause::ReassemblyTimeExceeded => (11, 1, 0),
            Cause::ParameterProblem { code } => (12, code, 0),
        }
    }

    fn to_v6(self) -> (u8, u8, u32) {
        match self {
            Cause::NetworkUnreachable => (1, 0, 0),
            Cause::Prohibited => (1, 1, 0),
            Cause::HostUnreachable => (1, 3, 0),
            Cause::PortUnreachable => (1, 4, 0),
            Cause::OtherUnreachable { code } => (1, code, 0),
            Cause::TooBig { mtu } => (2, 0, mtu),
            Cause::HopLimitExceeded => (3, 0, 0),
            Cause::ReassemblyTimeExceeded => (3, 1, 0),
            Cause::ProtocolUnreachable => (4, 1, 0),
            Cause::ParameterProblem { code } => (4, code, 0),
        }
    }
}

impl IcmpError<'_> {
    /// The flow of the quoted packet; `None` if it is neither TCP nor UDP, or a later fragment.
    pub fn flow(&self) -> Option<Quoted> {
        let (protocol, source, destination, length, transport): (u8, IpAddr, IpAddr, usize, &[u8]) =
            match self.quoted.first()? >> 4 {
                4 => {
                    let (ip, transport) = Ipv4Header::parse_quoted(self.quoted).ok()?;
                    if ip.fragment_offset != 0 {
                        return None;
                    }
                    (
                        ip.protocol,
                        ip.source.into(),
                        ip.destination.into(),
                        self.quoted.len() - transport.len() + usize::from(ip.payload_len),
                        transport,
                    )
                }
                _ => {
                    let (ip, transport) = Ipv6Header::parse_quoted(self.quoted).ok()?;
                    if ip.fragment.is_some_and(|fragment| fragment.offset != 0) {
                        return None;
                    }
                    (
                        ip.protocol,
                        ip.source.into(),
                        ip.destination.into(),
                        ipv6::HEADER_LEN + usize::from(ip.payload_len),
                        transport,
                    )
                }
            };
        if protocol != 6 && protocol != 17 {
            return None;
        }
        // RFC 792: at least eight bytes of the transport header are quoted.
        let first: [u8; 8] = transport.get(..8)?.try_into().ok()?;
        let [s0, s1, d0, d1, seq @ ..] = first;
        Some(Quoted {
            protocol,
            source: SocketAddr::new(source, u16::from_be_bytes([s0, s1])),
            destination: SocketAddr::new(destination, u16::from_be_bytes([d0, d1])),
            seq: (protocol == 6).then_some(SeqNum(u32::from_be_bytes(seq))),
            // At most the sum of two length fields.
            length: length as u32,
        })
    }
}

fn split(message: &[u8]) -> Result<(u8, u8, u32, &[u8]), Malformed> {
    let (header, rest) = message.split_first_chunk::<HEADER_LEN>().ok_or(Malformed)?;
    let [kind, code, _, _, word @ ..] = *header;
    Ok((kind, code, u32::from_be_bytes(word), rest))
}

fn pseudo_header(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> Sum {
    Sum::pseudo_header(source.into(), destination.into(), ICMPV6, message.len())
}

#[cfg(test)]
mod tests;
