//! Parsing of received frames: Ethernet, IP, transport; with checksum verification.

use core::net::{IpAddr, SocketAddr};

use portolan_proto::filter::RecordHeader;
use portolan_proto::ip::{IpOptions, MtuDiscovery};
use portolan_tcp::{Codepoint, Error, IcmpError as TcpIcmpError, IcmpKind};
use portolan_types::{FlowKey, Protocol, scoped};
use portolan_wire::Malformed;
use portolan_wire::checksum::{Offload, Sum, verify};
use portolan_wire::ethernet::{EtherType, EthernetHeader};
use portolan_wire::icmp::{self, Cause, IcmpMessage as Message, Quoted};
use portolan_wire::ipv4::Ipv4Header;
use portolan_wire::ipv6::Ipv6Header;
use portolan_wire::tcp::{self, TcpHeader};
use portolan_wire::udp::UdpHeader;

use crate::pmtu;

/// A received packet. For an ICMP error, `source` and `destination` are the endpoints of the flow
/// it concerns, as if the peer had sent the packet.
#[derive(Debug)]
pub struct Packet<'a> {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// Remaining hops.
    pub ttl: u8,
    pub transport: Transport<'a>,
}

#[derive(Debug)]
pub enum Transport<'a> {
    Tcp {
        header: TcpHeader,
        payload: &'a [u8],
        /// ECN codepoint of the IP header.
        codepoint: Codepoint,
    },
    Udp {
        /// Fields of the IP header.
        ip: IpOptions,
        payload: &'a [u8],
        has_checksum: bool,
    },
    IcmpError(IcmpMessage<'a>),
}

/// An ICMP error about one of this host's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpMessage<'a> {
    pub cause: Cause,
    /// Type and code, of the IP version of `quoted`.
    pub kind: u8,
    pub code: u8,
    pub quoted: Quoted,
    /// Sender of the message.
    pub from: IpAddr,
    /// Fields of the IP header.
    pub ip: IpOptions,
    /// The quoted packet, starting with its IP header.
    pub packet: &'a [u8],
}

/// Why a frame was dropped; each reason has its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Drop {
    /// A header is truncated or contradicts itself.
    Malformed,
    BadChecksum,
    /// A fragment, or a protocol that has no sessions.
    Unsupported,
    /// For a connection or a connected UDP session, but not from its peer.
    ForeignPeer,
    /// A datagram to a group that the session has not joined.
    NotMember,
    /// The UDP session's receive buffer is full.
    ReceiveBufferFull,
    /// A fragment that contradicts others of its datagram.
    FragmentsOverlap,
    /// A fragment, while too many datagrams are incomplete.
    FragmentsCrowdedOut,
    /// Too many frames wait for sessions that have not arrived.
    TooEarly,
    /// A segment that passed more hops than the socket allows (`IP_MINTTL`).
    TooFar,
}

impl From<Malformed> for Drop {
    fn from(_: Malformed) -> Drop {
        Drop::Malformed
    }
}

impl<'a> Packet<'a> {
    pub fn parse(frame: &'a [u8], record: &RecordHeader) -> Result<Packet<'a>, Drop> {
        let (ethernet, packet) = EthernetHeader::parse(frame)?;
        let (source, destination, protocol, ip, body): (IpAddr, IpAddr, u8, IpOptions, &[u8]) =
            match ethernet.ether_type {
                EtherType::IPV4 => {
                    let (header, body) = Ipv4Header::parse(packet)?;
                    if header.is_fragment() {
                        return Err(Drop::Unsupported);
                    }
                    (
                        header.source.into(),
                        header.destination.into(),
                        header.protocol,
                        IpOptions {
                            ttl: header.ttl,
                            tos: header.traffic_class,
                            ..IpOptions::default()
                        },
                        body,
                    )
                }
                EtherType::IPV6 => {
                    let (header, body) = Ipv6Header::parse(packet)?;
                    if header.is_fragment() {
                        return Err(Drop::Unsupported);
                    }
                    (
                        header.source.into(),
                        header.destination.into(),
                        header.protocol,
                        IpOptions {
                            ttl: header.hop_limit,
                            tos: header.traffic_class,
                            ..IpOptions::default()
                        },
                        body,
                    )
                }
                _ => return Err(Drop::Unsupported),
            };
        if record.flags & RecordHeader::ICMP_ERROR != 0 {
            let ends = (source, destination);
            return parse_icmp(ends, protocol, ip, body, record.ifindex);
        }
        let pseudo = Sum::pseudo_header(source, destination, protocol, body.len());
        match Protocol::from_number(protocol) {
            Some(Protocol::Tcp) => {
                let (header, length) = TcpHeader::parse(body)?;
                if !verify(pseudo, body, tcp::CHECKSUM_AT, Offload::MayBePartial) {
                    return Err(Drop::BadChecksum);
                }
                Ok(Packet {
                    source: scoped(source, header.source_port, record.ifindex),
                    destination: scoped(destination, header.destination_port, record.ifindex),
                    ttl: ip.ttl,
                    transport: Transport::Tcp {
                        header,
                        payload: &body[length..],
                        codepoint: Codepoint::of_traffic_class(ip.tos),
                    },
                })
            }
            Some(Protocol::Udp) => {
                let (header, payload) = UdpHeader::parse(body)?;
                // The session decides whether the checksum may be missing.
                let has_checksum = header.checksum != 0;
                if has_checksum
                    && !header.verify(source, destination, payload, Offload::MayBePartial)
                {
                    return Err(Drop::BadChecksum);
                }
                Ok(Packet {
                    source: scoped(source, header.source_port, record.ifindex),
                    destination: scoped(destination, header.destination_port, record.ifindex),
                    ttl: ip.ttl,
                    transport: Transport::Udp {
                        ip,
                        payload,
                        has_checksum,
                    },
                })
            }
            None => Err(Drop::Unsupported),
        }
    }

    /// The flow of the packet, as seen from this host; `None` for an ICMP error about a protocol without
    /// sessions.
    pub fn flow(&self) -> Option<FlowKey> {
        let protocol = match &self.transport {
            Transport::Tcp { .. } => Protocol::Tcp,
            Transport::Udp { .. } => Protocol::Udp,
            Transport::IcmpError(message) => Protocol::from_number(message.quoted.protocol)?,
        };
        Some(FlowKey {
            protocol,
            local: self.destination,
            remote: self.source,
        })
    }
}

fn parse_icmp(
    (source, destination): (IpAddr, IpAddr),
    protocol: u8,
    ip: IpOptions,
    body: &[u8],
    interface: u32,
) -> Result<Packet<'_>, Drop> {
    let message = match (source, destination, protocol) {
        (IpAddr::V4(_), IpAddr::V4(_), icmp::ICMP) => Message::parse_v4(body)?,
        (IpAddr::V6(from), IpAddr::V6(to), icmp::ICMPV6) => Message::parse_v6(from, to, body)?,
        _ => return Err(Drop::Unsupported),
    };
    let Message::Error(error) = message else {
        return Err(Drop::Unsupported);
    };
    let quoted = error.flow().ok_or(Drop::Malformed)?;
    let [kind, code, ..] = *body else {
        return Err(Drop::Malformed);
    };
    Ok(Packet {
        source: scoped(
            quoted.destination.ip(),
            quoted.destination.port(),
            interface,
        ),
        destination: scoped(quoted.source.ip(), quoted.source.port(), interface),
        ttl: ip.ttl,
        transport: Transport::IcmpError(IcmpMessage {
            cause: error.cause,
            kind,
            code,
            quoted,
            from: source,
            ip,
            packet: error.quoted,
        }),
    })
}

impl IcmpMessage<'_> {
    /// The error for the TCP engine; `None` for errors that TCP ignores (RFC 9293 §3.9.2.2). As on Linux,
    /// any unreachable destination ends a connection that is opening (RFC 5461 §4.1), but never an
    /// established one.
    pub fn for_tcp(&self) -> Option<TcpIcmpError> {
        let unreachable = |error| IcmpKind::Unreachable { hard: true, error };
        let is_v4 = self.quoted.source.is_ipv4();
        let kind = match self.cause {
            // Codes that only `icmp_err_convert` distinguishes.
            _ if is_v4 && (self.kind, self.code) == (3, 5) => unreachable(Error::Unsupported),
            _ if is_v4 && (self.kind, self.code) == (3, 7) => unreachable(Error::HostDown),
            _ if is_v4 && (self.kind, self.code) == (3, 8) => unreachable(Error::NoNetwork),
            _ if is_v4 && (self.kind, self.code) == (3, 9) => {
                unreachable(Error::NetworkUnreachable)
            }
            Cause::NetworkUnreachable => unreachable(Error::NetworkUnreachable),
            Cause::HostUnreachable | Cause::OtherUnreachable { .. } | Cause::HopLimitExceeded => {
                unreachable(Error::HostUnreachable)
            }
            Cause::ProtocolUnreachable => unreachable(Error::ProtocolUnreachable),
            Cause::PortUnreachable => unreachable(Error::Refused),
            // `icmp_err_convert` maps most of them to EHOSTUNREACH, `icmpv6_err_convert` to EACCES.
            Cause::Prohibited if is_v4 => unreachable(Error::HostUnreachable),
            Cause::Prohibited => unreachable(Error::Prohibited),
            Cause::TooBig { .. } => {
                let headers = if self.quoted.source.is_ipv4() { 40 } else { 60 };
                let payload = self.path_mtu()?.checked_sub(headers)?;
                IcmpKind::TooBig {
                    mtu_payload: u16::try_from(payload).unwrap_or(u16::MAX),
                }
            }
            Cause::ReassemblyTimeExceeded | Cause::ParameterProblem { .. } => return None,
        };
        Some(TcpIcmpError {
            quoted: self.quoted.seq?,
            kind,
        })
    }

    /// The path MTU in a plausible report (RFC 1191 §5, RFC 8201 §4).
    pub fn path_mtu(&self) -> Option<u32> {
        let Cause::TooBig { mtu } = self.cause else {
            return None;
        };
        pmtu::believable(self.quoted.destination.ip(), mtu, self.quoted.length)
    }

    /// The error that a connected UDP session reports, chosen as by Linux's `__udp4_lib_err` and
    /// `__udp6_lib_err`: only hard errors reach a socket that has not requested more.
    pub fn errno_for_udp(&self, discovery: MtuDiscovery) -> Option<i32> {
        if matches!(self.cause, Cause::TooBig { .. }) {
            return (discovery != MtuDiscovery::Dont).then_some(errno::MSGSIZE);
        }
        let (errno, is_hard) = self.errno()?;
        is_hard.then_some(errno)
    }

    /// The errno of the error, and whether it is hard: Linux's `icmp_err_convert` and
    /// `icmpv6_err_convert`.
    pub fn errno(&self) -> Option<(i32, bool)> {
        if self.quoted.source.is_ipv4() {
            errno_v4(self.kind, self.code)
        } else {
            errno_v6(self.kind, self.code)
        }
    }
}

fn errno_v4(kind: u8, code: u8) -> Option<(i32, bool)> {
    Some(match (kind, code) {
        (3, 0 | 11) => (errno::NETUNREACH, false),
        (3, 1 | 12) => (errno::HOSTUNREACH, false),
        (3, 2) => (errno::NOPROTOOPT, true),
        (3, 3) => (errno::CONNREFUSED, true),
        (3, 4) => (errno::MSGSIZE, false),
        (3, 5) => (errno::OPNOTSUPP, false),
        (3, 6 | 9) => (errno::NETUNREACH, true),
        (3, 7) => (errno::HOSTDOWN, true),
        (3, 8) => (errno::NONET, true),
        (3, 10 | 13..=15) => (errno::HOSTUNREACH, true),
        (3 | 11, _) => (errno::HOSTUNREACH, false),
        (12, _) => (errno::PROTO, true),
        _ => return None,
    })
}

fn errno_v6(kind: u8, code: u8) -> Option<(i32, bool)> {
    Some(match (kind, code) {
        (1, 0) => (errno::NETUNREACH, false),
        (1, 1 | 5 | 6) => (errno::ACCES, true),
        (1, 4) => (errno::CONNREFUSED, true),
        (1, 2 | 3) | (3, _) => (errno::HOSTUNREACH, false),
        (1, _) => (errno::PROTO, true),
        (2, _) => (errno::MSGSIZE, false),
        (4, _) => (errno::PROTO, true),
        _ => return None,
    })
}

/// Linux's error numbers, which are the same on nearly all architectures.
mod errno {
    pub(super) const ACCES: i32 = 13;
    pub(super) const NONET: i32 = 64;
    pub(super) const PROTO: i32 = 71;
    pub(super) const MSGSIZE: i32 = 90;
    pub(super) const NOPROTOOPT: i32 = 92;
    pub(super) const OPNOTSUPP: i32 = 95;
    pub(super) const NETUNREACH: i32 = 101;
    pub(super) const CONNREFUSED: i32 = 111;
    pub(super) const HOSTDOWN: i32 = 112;
    pub(super) const HOSTUNREACH: i32 = 113;
}

#[cfg(test)]
mod tests {
    use portolan_types::SeqNum;

    use super::*;

    fn error(address: &str, kind: u8, code: u8, cause: Cause) -> IcmpMessage<'static> {
        IcmpMessage {
            cause,
            kind,
            code,
            quoted: Quoted {
                protocol: 17,
                source: address.parse().unwrap(),
                destination: address.parse().unwrap(),
                seq: None,
                length: 1500,
            },
            from: IpAddr::from([10, 0, 0, 9]),
            ip: IpOptions::default(),
            packet: &[],
        }
    }

    #[test]
    fn an_open_fails_with_the_error_of_the_code() {
        let cause = |code| match code {
            0 | 6 | 8 | 11 => Cause::NetworkUnreachable,
            1 | 7 | 12 => Cause::HostUnreachable,
            2 => Cause::ProtocolUnreachable,
            3 => Cause::PortUnreachable,
            9 | 10 | 13 => Cause::Prohibited,
            code => Cause::OtherUnreachable { code },
        };
        for code in (0..16).filter(|&code| code != 4) {
            let mut message = error("10.0.0.1:1", 3, code, cause(code));
            message.quoted.seq = Some(SeqNum(7));
            let Some(IcmpKind::Unreachable { error, .. }) = message.for_tcp().map(|icmp| icmp.kind)
            else {
                panic!("code {code}");
            };
            let expected = errno_v4(3, code).map(|(errno, _)| errno);
            assert_eq!(Some(error.errno()), expected, "code {code}");
        }
    }

    /// Tables of `net/ipv4/icmp.c` and `net/ipv6/icmp.c`, as seen by a connected socket.
    #[test]
    fn a_connected_socket_hears_of_hard_errors_only() {
        let other = Cause::OtherUnreachable { code: 0 };
        let v4 =
            |kind, code| error("10.0.0.1:1", kind, code, other).errno_for_udp(MtuDiscovery::Want);
        let hard: Vec<Option<i32>> = (0..16).map(|code| v4(3, code)).collect();
        let none = None;
        assert_eq!(
            hard,
            [
                none,
                none,
                Some(92),
                Some(111),
                none,
                none,
                Some(101),
                Some(112),
                Some(64),
                Some(101),
                Some(113),
                none,
                none,
                Some(113),
                Some(113),
                Some(113),
            ]
        );
        assert_eq!((v4(11, 0), v4(12, 0)), (None, Some(71)));
        let v6 = |kind, code| error("[::1]:1", kind, code, other).errno_for_udp(MtuDiscovery::Want);
        let hard: Vec<Option<i32>> = (0..7).map(|code| v6(1, code)).collect();
        assert_eq!(
            hard,
            [none, Some(13), none, none, Some(111), Some(13), Some(13)]
        );
        assert_eq!((v6(3, 0), v6(4, 1)), (None, Some(71)));
    }

    #[test]
    fn a_packet_too_big_is_told_to_who_wants_to_know() {
        let error = error("10.0.0.1:1", 3, 4, Cause::TooBig { mtu: 1400 });
        assert_eq!(error.path_mtu(), Some(1400));
        assert_eq!(error.errno_for_udp(MtuDiscovery::Want), Some(90));
        assert_eq!(error.errno_for_udp(MtuDiscovery::Dont), None);
    }
}
