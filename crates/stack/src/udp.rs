//! A UDP session: its endpoints, and the datagrams that wait for a reader.

use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

use portolan_types::{Generation, Instant, SessionId};

use crate::membership::Memberships;
use portolan_proto::ip::IpOptions;

/// Bytes a datagram costs in a receive buffer beyond its payload.
const DATAGRAM_OVERHEAD: usize = 256;

/// Errors that wait for `MSG_ERRQUEUE`; older ones give way.
const ERRORS_MAX: usize = 64;

/// A UDP session: an endpoint, perhaps a peer, and the datagrams nobody has read yet.
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
    /// `SO_RCVBUF`: what `queue` may hold, overhead included, in bytes.
    pub receive_buffer: usize,
    queued: usize,
    /// Datagrams that came coalesced are read so (`UDP_GRO`).
    pub coalesce: bool,
    pub checksums: Checksums,
    pub v6_sizes: V6Sizes,
    /// Pending error from ICMP, as an errno value.
    pub error: Option<i32>,
    pub reports: Reports,
    pub errors: VecDeque<DatagramError>,
    /// What the path takes of a datagram that was refused, and where it was to go
    /// (`IPV6_RECVPATHMTU`).
    pub path_mtu: Option<(SocketAddr, u32)>,
    pub datagrams_in: u64,
    pub datagrams_out: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// Datagrams lost because nobody read fast enough.
    pub overflow: u64,
}

/// Which checksums there need not be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksums {
    /// `SO_NO_CHECK`
    pub v4_unsent: bool,
    /// `UDP_NO_CHECK6_TX`
    pub v6_unsent: bool,
    /// `UDP_NO_CHECK6_RX`: IPv6 datagrams without one are taken (RFC 6936).
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

/// What IPv6 datagrams may be cut into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct V6Sizes {
    /// Nothing: those that do not fit are refused (`IPV6_DONTFRAG`).
    pub whole_only: bool,
    /// Fragments no larger than this, whatever the path takes (`IPV6_MTU`).
    pub most: Option<u32>,
}

/// What the program is told of errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reports {
    /// `IP_RECVERR`: every error is pending, and lies in `errors`.
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
    /// Members on this host get them, too.
    pub is_looped: bool,
    /// The device they leave by; the routes choose if there is none.
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
    /// What its IP header said.
    pub ip: IpOptions,
    pub received: Instant,
    /// Bytes of each of the datagrams that it is made of, but for the last; 0: it is one.
    pub segment: u16,
    /// How many were lost before it.
    pub dropped: u32,
    /// It is empty, and has been looked at.
    pub is_seen: bool,
    pub data: Vec<u8>,
}

/// What the error queue holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatagramError {
    pub errno: i32,
    pub cause: ErrorCause,
    /// `ee_info`: the path MTU, or what a time stamp is of.
    pub info: u32,
    /// `ee_data`: the number of the datagram that a time stamp is of.
    pub data: u32,
    /// Where the datagram was to go; nowhere if it was sent from here without fault.
    pub to: Option<SocketAddr>,
    pub offender: Option<IpAddr>,
    /// What the IP header of the message said.
    pub ip: IpOptions,
    pub at: Instant,
    /// What is left of the datagram.
    pub payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCause {
    /// This host would not send it.
    Local,
    /// Type and code of the message that said so.
    Icmp { is_v6: bool, kind: u8, code: u8 },
    /// Not an error: it has been sent.
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

    /// Queues a datagram unless the receive buffer is full; false if it was lost.
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

    /// The datagram `start` bytes from the first one's beginning, and where in it that is: what a
    /// look with `SO_PEEK_OFF` sees. An empty one is seen once.
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

    /// Takes the oldest error; the pending one becomes the next that came from the network.
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
