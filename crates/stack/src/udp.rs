//! A UDP session: its endpoints, and the datagrams to be read.

use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

use portolan_types::{Generation, Instant, SessionId};

use crate::membership::Memberships;
use portolan_proto::ip::IpOptions;

/// Overhead of a datagram in a receive buffer.
const DATAGRAM_OVERHEAD: usize = 256;

/// Limit of the errors kept for `MSG_ERRQUEUE`; the oldest is discarded.
const ERRORS_MAX: usize = 64;

/// A UDP session: an endpoint, an optional peer, and the unread datagrams.
#[derive(Debug)]
pub struct UdpSession {
    pub id: SessionId,
    pub local: SocketAddr,
    pub remote: Option<SocketAddr>,
    pub generation: Generation,
    pub ip: IpOptions,
    pub multicast: MulticastOptions,
    pub memberships: Memberships,
    pub queue: VecDeque<Datagram>,
    /// `SO_RCVBUF`: limit of `queue` in bytes, including overhead.
    pub receive_buffer: usize,
    queued: usize,
    /// Reads coalesced datagrams as one (`UDP_GRO`).
    pub coalesce: bool,
    pub checksums: Checksums,
    pub v6_sizes: V6Sizes,
    /// Pending error from ICMP, as an errno value.
    pub error: Option<i32>,
    pub reports: Reports,
    pub errors: VecDeque<DatagramError>,
    /// The path MTU for a datagram that was refused, and its destination (`IPV6_RECVPATHMTU`).
    pub path_mtu: Option<(SocketAddr, u32)>,
    pub datagrams_in: u64,
    pub datagrams_out: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// Datagrams lost because the receive buffer was full.
    pub overflow: u64,
}

/// Checksums that may be omitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksums {
    /// `SO_NO_CHECK`
    pub v4_unsent: bool,
    /// `UDP_NO_CHECK6_TX`
    pub v6_unsent: bool,
    /// `UDP_NO_CHECK6_RX`: accepts IPv6 datagrams without a checksum (RFC 6936).
    pub v6_unwanted: bool,
}

impl Checksums {
    pub(crate) fn are_unsent(self, destination: IpAddr) -> bool {
        match destination {
            IpAddr::V4(_) => self.v4_unsent,
            IpAddr::V6(_) => self.v6_unsent,
        }
    }
}

/// Fragmentation of IPv6 datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct V6Sizes {
    /// No fragmentation: datagrams that do not fit are refused (`IPV6_DONTFRAG`).
    pub whole_only: bool,
    /// Upper bound of the fragment size, whatever the path MTU (`IPV6_MTU`).
    pub most: Option<u32>,
}

/// The errors that are reported to the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reports {
    /// `IP_RECVERR`: every error is pending, and queued in `errors`.
    pub v4: bool,
    /// `IPV6_RECVERR`
    pub v6: bool,
    /// `IPV6_RECVPATHMTU`
    pub path_mtu: bool,
}

impl Reports {
    pub fn of(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(_) => self.v4,
            IpAddr::V6(_) => self.v6,
        }
    }
}

/// How datagrams to groups are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulticastOptions {
    pub ttl: u8,
    /// Members on this host receive them, too.
    pub is_looped: bool,
    /// The output device; chosen by the routes if there is none.
    pub interface: Option<u32>,
}

impl Default for MulticastOptions {
    fn default() -> MulticastOptions {
        MulticastOptions {
            ttl: 1,
            is_looped: true,
            interface: None,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Datagram {
    pub from: SocketAddr,
    /// The address it was sent to: one of this host's, or a group's.
    pub to: SocketAddr,
    pub interface: u32,
    /// Fields of its IP header.
    pub ip: IpOptions,
    pub received: Instant,
    /// Payload of each datagram that it is made of, except the last; 0 for a single datagram.
    pub segment: u16,
    /// Number of datagrams lost before it.
    pub dropped: u32,
    /// It is empty and has been peeked at.
    pub is_seen: bool,
    pub data: Vec<u8>,
}

/// An entry of the error queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatagramError {
    pub errno: i32,
    pub cause: ErrorCause,
    /// `ee_info`: the path MTU, or the kind of a timestamp.
    pub info: u32,
    /// `ee_data`: the number of the datagram that a timestamp belongs to.
    pub data: u32,
    /// Destination of the datagram; none if it was sent from here without error.
    pub to: Option<SocketAddr>,
    pub offender: Option<IpAddr>,
    /// Fields of the IP header of the message.
    pub ip: IpOptions,
    pub at: Instant,
    /// The quoted part of the datagram.
    pub payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCause {
    /// This host refused to send it.
    Local,
    /// Type and code of the ICMP message.
    Icmp { is_v6: bool, kind: u8, code: u8 },
    /// Not an error: the datagram was sent.
    Timestamp,
}

impl UdpSession {
    pub fn new(
        id: SessionId,
        local: SocketAddr,
        remote: Option<SocketAddr>,
        generation: Generation,
        receive_buffer: usize,
    ) -> UdpSession {
        UdpSession {
            id,
            local,
            remote,
            generation,
            ip: IpOptions::default(),
            multicast: MulticastOptions::default(),
            memberships: Memberships::default(),
            queue: VecDeque::new(),
            receive_buffer,
            queued: 0,
            coalesce: false,
            checksums: Checksums::default(),
            v6_sizes: V6Sizes::default(),
            error: None,
            reports: Reports::default(),
            errors: VecDeque::new(),
            path_mtu: None,
            datagrams_in: 0,
            datagrams_out: 0,
            bytes_in: 0,
            bytes_out: 0,
            overflow: 0,
        }
    }

    /// Queues a datagram; returns false if the receive buffer is full and it was lost.
    pub fn deliver(&mut self, mut datagram: Datagram) -> bool {
        let cost = datagram.data.len() + DATAGRAM_OVERHEAD;
        if self.queued + cost > self.receive_buffer {
            self.overflow += 1;
            return false;
        }
        datagram.dropped = self.overflow as u32;
        self.queued += cost;
        self.datagrams_in += 1;
        self.bytes_in += datagram.data.len() as u64;
        self.queue.push_back(datagram);
        true
    }

    /// Takes the oldest datagram.
    pub fn receive(&mut self) -> Option<Datagram> {
        let datagram = self.queue.pop_front()?;
        self.queued -= datagram.data.len() + DATAGRAM_OVERHEAD;
        Some(datagram)
    }

    /// Returns the datagram `start` bytes from the beginning of the first one, and the offset in it, as
    /// `SO_PEEK_OFF` requires. An empty one is seen once.
    pub fn look_from(&mut self, start: usize) -> Option<(&Datagram, usize)> {
        let mut rest = start;
        let at = self.queue.iter().position(|datagram| {
            let length = datagram.data.len();
            let is_passed = rest >= length && (rest > 0 || datagram.is_seen);
            rest -= if is_passed { length } else { 0 };
            !is_passed
        })?;
        let datagram = &mut self.queue[at];
        datagram.is_seen |= datagram.data.is_empty();
        Some((datagram, rest))
    }

    pub fn note_error(&mut self, error: DatagramError) {
        if self.errors.len() == ERRORS_MAX {
            self.errors.pop_front();
        }
        self.errors.push_back(error);
    }

    /// Takes the oldest error; the next error that came from the network becomes the pending one.
    pub fn take_error(&mut self) -> Option<DatagramError> {
        let error = self.errors.pop_front()?;
        let is_icmp = |error: &DatagramError| matches!(error.cause, ErrorCause::Icmp { .. });
        match self.errors.front() {
            Some(next) if is_icmp(next) => self.error = Some(next.errno),
            _ if is_icmp(&error) => self.error = None,
            _ => {}
        }
        Some(error)
    }
}
