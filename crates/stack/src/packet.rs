//! Taking a received frame apart: Ethernet, IP, transport; checksums verified.

use core::net::{IpAddr, SocketAddr};

use portolan_proto::filter::RecordHeader;
use portolan_tcp::{Error, IcmpError as TcpIcmpError, IcmpKind};
use portolan_types::{FlowKey, Protocol};
use portolan_wire::Malformed;
use portolan_wire::checksum::{Offload, Sum, verify};
use portolan_wire::ethernet::{EtherType, EthernetHeader};
use portolan_wire::icmp::{self, Cause, IcmpMessage as Message, Quoted};
use portolan_wire::ipv4::Ipv4Header;
use portolan_wire::ipv6::Ipv6Header;
use portolan_wire::tcp::{self, TcpHeader};
use portolan_wire::udp::UdpHeader;

use crate::session::IpOptions;

/// A received packet. For an ICMP error, `source` and `destination` are the endpoints of the flow
/// it is about, seen as if the peer had sent it.
#[derive(Debug)]
pub struct Packet<'a> {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub transport: Transport<'a>,
}

#[derive(Debug)]
pub enum Transport<'a> {
    Tcp {
        header: TcpHeader,
        payload: &'a [u8],
    },
    Udp {
        /// What the IP header said.
        ip: IpOptions,
        payload: &'a [u8],
    },
    IcmpError(IcmpMessage),
}

/// An ICMP error about one of this host's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpMessage {
    pub cause: Cause,
    pub quoted: Quoted,
}

/// Why a frame was dropped; each has its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Drop {
    /// A header that is cut short or contradicts itself.
    Malformed,
    BadChecksum,
    /// A fragment, or a protocol that has no sessions.
    Unsupported,
    /// A datagram for a connected UDP session from somebody else.
    ForeignPeer,
    /// The UDP session's receive buffer is full.
    ReceiveBufferFull,
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
                        },
                        body,
                    )
                }
                _ => return Err(Drop::Unsupported),
            };
        if record.flags & RecordHeader::ICMP_ERROR != 0 {
            return parse_icmp(source, destination, protocol, body);
        }
        let pseudo = Sum::pseudo_header(source, destination, protocol, body.len());
        match Protocol::from_number(protocol) {
            Some(Protocol::Tcp) => {
                let (header, length) = TcpHeader::parse(body)?;
                if !verify(pseudo, body, tcp::CHECKSUM_AT, Offload::MayBePartial) {
                    return Err(Drop::BadChecksum);
                }
                Ok(Packet {
                    source: SocketAddr::new(source, header.source_port),
                    destination: SocketAddr::new(destination, header.destination_port),
                    transport: Transport::Tcp {
                        header,
                        payload: &body[length..],
                    },
                })
            }
            Some(Protocol::Udp) => {
                let (header, payload) = UdpHeader::parse(body)?;
                if !header.verify(source, destination, payload, Offload::MayBePartial) {
                    return Err(Drop::BadChecksum);
                }
                Ok(Packet {
                    source: SocketAddr::new(source, header.source_port),
                    destination: SocketAddr::new(destination, header.destination_port),
                    transport: Transport::Udp { ip, payload },
                })
            }
            None => Err(Drop::Unsupported),
        }
    }

    /// The flow the packet belongs to, seen from this host; `None` for an ICMP error about a
    /// protocol without sessions.
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
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    body: &[u8],
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
    Ok(Packet {
        source: quoted.destination,
        destination: quoted.source,
        transport: Transport::IcmpError(IcmpMessage {
            cause: error.cause,
            quoted,
        }),
    })
}

impl IcmpMessage {
    /// As the TCP machine wants it; `None` for what TCP ignores (RFC 9293 §3.9.2.2).
    pub fn for_tcp(&self) -> Option<TcpIcmpError> {
        let unreachable = |hard, error| IcmpKind::Unreachable { hard, error };
        let kind = match self.cause {
            Cause::NetworkUnreachable => unreachable(false, Error::NetworkUnreachable),
            Cause::HostUnreachable | Cause::OtherUnreachable { .. } => {
                unreachable(false, Error::HostUnreachable)
            }
            Cause::ProtocolUnreachable => unreachable(true, Error::ProtocolUnreachable),
            Cause::PortUnreachable => unreachable(true, Error::Refused),
            Cause::Prohibited => unreachable(false, Error::Prohibited),
            Cause::TooBig { mtu } => {
                let headers = if self.quoted.source.is_ipv4() { 40 } else { 60 };
                let payload = mtu.checked_sub(headers).filter(|&payload| payload > 0)?;
                IcmpKind::TooBig {
                    mtu_payload: u16::try_from(payload).unwrap_or(u16::MAX),
                }
            }
            Cause::HopLimitExceeded => unreachable(false, Error::HostUnreachable),
            Cause::ReassemblyTimeExceeded | Cause::ParameterProblem { .. } => return None,
        };
        Some(TcpIcmpError {
            quoted: self.quoted.seq?,
            kind,
        })
    }

    /// The error a UDP session reports, as Linux maps it (`icmp_err_convert`): only hard errors
    /// reach a socket that did not ask for more.
    pub fn errno_for_udp(&self) -> Option<i32> {
        match self.cause {
            Cause::PortUnreachable => Some(Error::Refused.errno()),
            Cause::ProtocolUnreachable => Some(Error::ProtocolUnreachable.errno()),
            _ => None,
        }
    }
}
