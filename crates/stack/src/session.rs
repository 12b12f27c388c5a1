//! A session and its capsule: what a holder keeps, and what travels when the holder changes.

use core::net::SocketAddr;
use std::collections::VecDeque;

use portolan_tcp::Connection;
use portolan_types::{FlowKey, Generation, Instant, SessionId};
use serde::{Deserialize, Serialize};

/// Version of the capsule format; the first octet of each capsule.
const CAPSULE_VERSION: u8 = 1;

/// Octets a datagram costs in a receive buffer beyond its payload.
const DATAGRAM_OVERHEAD: usize = 256;

#[derive(Debug)]
pub enum Session {
    Tcp(Box<TcpSession>),
    Udp(UdpSession),
}

/// A TCP session: its endpoints, and the machine that runs it.
#[derive(Debug, Serialize, Deserialize)]
pub struct TcpSession {
    pub id: SessionId,
    pub flow: FlowKey,
    /// Packets filtered for an earlier holder carry another generation.
    #[serde(skip)]
    pub generation: Generation,
    pub ip: IpOptions,
    pub connection: Connection,
}

/// Fields of the IP header that the application sets, or is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpOptions {
    pub ttl: u8,
    pub tos: u8,
}

impl Default for IpOptions {
    fn default() -> IpOptions {
        IpOptions { ttl: 64, tos: 0 }
    }
}

/// Why a capsule was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCapsule {
    #[error("capsule of another version")]
    Version,
    #[error("capsule does not decode")]
    Malformed,
    #[error("capsule breaks an invariant of TCP")]
    Inconsistent,
}

impl TcpSession {
    pub fn new(id: SessionId, flow: FlowKey, connection: Connection) -> TcpSession {
        TcpSession {
            id,
            flow,
            generation: Generation::default(),
            ip: IpOptions::default(),
            connection,
        }
    }

    pub fn to_capsule(&self) -> Vec<u8> {
        let octets = vec![CAPSULE_VERSION];
        postcard::to_extend(self, octets).expect("plain data encodes into a growing vector")
    }

    /// Decodes a capsule that may come from a hostile process: whatever this returns is safe to
    /// run.
    pub fn from_capsule(octets: &[u8]) -> Result<TcpSession, BadCapsule> {
        let [CAPSULE_VERSION, body @ ..] = octets else {
            return Err(BadCapsule::Version);
        };
        let Ok((session, [])) = postcard::take_from_bytes::<TcpSession>(body) else {
            return Err(BadCapsule::Malformed);
        };
        session
            .connection
            .validate()
            .map_err(|_| BadCapsule::Inconsistent)?;
        Ok(session)
    }
}

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
