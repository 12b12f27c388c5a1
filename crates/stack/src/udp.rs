//! A UDP session: its endpoints, and the datagrams that wait for a reader.

use core::net::SocketAddr;
use std::collections::VecDeque;

use portolan_types::{Generation, Instant, SessionId};

use crate::session::IpOptions;

/// Octets a datagram costs in a receive buffer beyond its payload.
const DATAGRAM_OVERHEAD: usize = 256;

/// A UDP session: an endpoint, perhaps a peer, and the datagrams nobody has read yet.
#[derive(Debug)]
pub struct UdpSession {
    pub id: SessionId,
    pub local: SocketAddr,
    pub remote: Option<SocketAddr>,
    pub generation: Generation,
    pub ip: IpOptions,
    pub queue: VecDeque<Datagram>,
    /// `SO_RCVBUF`: what `queue` may hold, overhead included, in octets.
    pub receive_buffer: usize,
    queued: usize,
    /// Pending error from ICMP, as an errno value.
    pub error: Option<i32>,
    pub datagrams_in: u64,
    pub datagrams_out: u64,
    pub octets_in: u64,
    pub octets_out: u64,
    /// Datagrams lost because nobody read fast enough.
    pub overflow: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Datagram {
    pub from: SocketAddr,
    /// The address it was sent to: one of this host's.
    pub to: SocketAddr,
    pub interface: u32,
    /// What its IP header said.
    pub ip: IpOptions,
    pub received: Instant,
    pub data: Vec<u8>,
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
            queue: VecDeque::new(),
            receive_buffer,
            queued: 0,
            error: None,
            datagrams_in: 0,
            datagrams_out: 0,
            octets_in: 0,
            octets_out: 0,
            overflow: 0,
        }
    }

    /// Queues a datagram unless the receive buffer is full; false if it was lost.
    pub fn deliver(&mut self, datagram: Datagram) -> bool {
        let cost = datagram.data.len() + DATAGRAM_OVERHEAD;
        if self.queued + cost > self.receive_buffer {
            self.overflow += 1;
            return false;
        }
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
}
