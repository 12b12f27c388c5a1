//! What a message carries besides its bytes.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// What `recvmsg` returns besides the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// The return value of the call: with `MSG_TRUNC` the datagram's own length.
    pub length: usize,
    pub from: Option<SocketAddr>,
    /// `msg_flags`.
    pub flags: i32,
    pub control: Control,
}

/// Ancillary data, as far as the socket's options request it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// When the packet filter saw the datagram, since the epoch (`SO_TIMESTAMP`).
    pub timestamp: Option<Duration>,
    /// The same for `SO_TIMESTAMPNS`.
    pub timestamp_ns: Option<Duration>,
    /// The same for `SO_TIMESTAMPING`, or the time when a datagram was sent.
    pub timestamping: Option<Duration>,
    /// Its destination (`IP_PKTINFO`).
    pub destination: Option<Destination>,
    /// The same for IPv6 (`IPV6_RECVPKTINFO`).
    pub v6_destination: Option<Destination>,
    /// Address and port that it was sent to (`IP_RECVORIGDSTADDR`, `IPV6_RECVORIGDSTADDR`).
    pub original: Option<SocketAddr>,
    pub v6_original: Option<SocketAddr>,
    /// A destination and its path MTU (`IPV6_RECVPATHMTU`).
    pub path_mtu: Option<(SocketAddr, u32)>,
    /// Its time to live (`IP_RECVTTL`).
    pub hops: Option<u8>,
    /// Its type of service (`IP_RECVTOS`).
    pub service: Option<u8>,
    /// The same for IPv6 (`IPV6_RECVHOPLIMIT`, `IPV6_RECVTCLASS`).
    pub v6_hops: Option<u8>,
    pub v6_class: Option<u8>,
    /// Length of each of the datagrams that are read as one (`UDP_GRO`).
    pub segment: Option<u16>,
    /// Number of datagrams lost before it (`SO_RXQ_OVFL`).
    pub dropped: Option<u32>,
    /// Bytes that a stream has left to read (`TCP_INQ`).
    pub rest: Option<usize>,
    /// The entry of the error queue (`IP_RECVERR`).
    pub error: Option<ExtendedError>,
}

/// The host's address and device that received a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// As in the datagram's header.
    pub address: IpAddr,
    /// The host's own address for it (`ipi_spec_dst`).
    pub own: IpAddr,
    pub interface: u32,
}

/// `struct sock_extended_err`, and the sender of the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedError {
    pub errno: i32,
    pub origin: u8,
    pub kind: u8,
    pub code: u8,
    pub info: u32,
    pub data: u32,
    pub offender: Option<IpAddr>,
    /// For an IPv6 socket; determines the level and the address family of the control message.
    pub is_v6: bool,
}

/// What ancillary data requests for a sent message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendControl {
    /// `IP_PKTINFO`, `IPV6_PKTINFO`
    pub source: Option<IpAddr>,
    pub interface: Option<u32>,
    /// `IP_TTL`, `IPV6_HOPLIMIT`
    pub hops: Option<u8>,
    /// `IP_TOS`, `IPV6_TCLASS`
    pub service: Option<u8>,
    /// `UDP_SEGMENT`
    pub segment: Option<u16>,
    /// `SO_TIMESTAMPING`
    pub timestamping: Option<u32>,
}
