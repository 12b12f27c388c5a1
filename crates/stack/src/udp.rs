//! A UDP session: its endpoints, and the datagrams that wait for a reader.

use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

use portolan_types::{Generation, Instant, SessionId};

use crate::membership::Memberships;
use portolan_proto::ip::IpOptions;

/// Octets a datagram costs in a receive buffer beyond its payload.
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
    /// `SO_RCVBUF`: what `queue` may hold, overhead included, in octets.
    pub receive_buffer: usize,
    queued: usize,
    /// Datagrams that came coalesced are read so (`UDP_GRO`).
    pub coalesce: bool,
    /// Checksums are left out where that is allowed (`SO_NO_CHECK`).
    pub no_checksum: bool,
    /// Pending error from ICMP, as an errno value.
    pub error: Option<i32>,
    /// `IP_RECVERR`: every error is pending, and lies in `errors`.
    pub report_errors: bool,
    pub errors: VecDeque<DatagramError>,
    pub datagrams_in: u64,
    pub datagrams_out: u64,
    pub octets_in: u64,
    pub octets_out: u64,
    /// Datagrams lost because nobody read fast enough.
    pub overflow: u64,
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
    /// Octets of each of the datagrams that it is made of, but for the last; 0: it is one.
    pub segment: u16,
    /// How many were lost before it.
    pub dropped: u32,
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
            no_checksum: false,
            error: None,
            report_errors: false,
            errors: VecDeque::new(),
            datagrams_in: 0,
            datagrams_out: 0,
            octets_in: 0,
            octets_out: 0,
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
        self.octets_in += datagram.data.len() as u64;
        self.queue.push_back(datagram);
        true
    }

    /// Takes the oldest datagram.
    pub fn receive(&mut self) -> Option<Datagram> {
        let datagram = self.queue.pop_front()?;
        self.queued -= datagram.data.len() + DATAGRAM_OVERHEAD;
        Some(datagram)
    }

    /// Drops datagrams that are not from the peer just chosen.
    pub fn keep_only_from(&mut self, remote: SocketAddr) {
        self.queue.retain(|datagram| datagram.from == remote);
        let cost = |datagram: &Datagram| datagram.data.len() + DATAGRAM_OVERHEAD;
        self.queued = self.queue.iter().map(cost).sum();
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
        if matches!(error.cause, ErrorCause::Icmp { .. }) {
            self.error = self
                .errors
                .front()
                .filter(|next| matches!(next.cause, ErrorCause::Icmp { .. }))
                .map(|next| next.errno);
        }
        Some(error)
    }
}
