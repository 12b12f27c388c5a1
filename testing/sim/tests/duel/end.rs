//! One end: its connection, and the facts that an observer of its segments knows.

use portolan_sim::{Packet, Side};
use portolan_tcp::{Config, Connection};
use portolan_types::SeqNum;
use portolan_wire::tcp::TcpFlags;

pub(crate) struct End {
    pub side: Side,
    pub config: Config,
    pub connection: Option<Connection>,
    /// Packets in flight to the other end, in the order of departure.
    pub flying: Vec<Packet>,
    pub written: u64,
    pub read: u64,
    pub closed: bool,
    /// End of the highest byte sent.
    pub highest: Option<SeqNum>,
    /// Right edge of the largest window it has offered, as seen in its own segments.
    pub offered: Option<SeqNum>,
    /// Its last acknowledgement number.
    pub acknowledged: Option<SeqNum>,
    /// Right edge of the largest window in a segment that it has received.
    pub allowed: Option<SeqNum>,
    /// Window scale of its segments.
    scale: u8,
}

impl End {
    pub(crate) fn new(side: Side, config: Config) -> End {
        End {
            side,
            config,
            connection: None,
            flying: Vec::new(),
            written: 0,
            read: 0,
            closed: false,
            highest: None,
            offered: None,
            acknowledged: None,
            allowed: None,
            scale: 0,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| !c.is_closed())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::is_closed)
    }

    /// Returns a byte of this end's stream, which depends on the position, so that misplaced bytes are detected.
    pub(crate) fn byte(&self, position: u64) -> u8 {
        let salt = match self.side {
            Side::A => 0,
            Side::B => 0x5bd1,
        };
        ((position ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    /// Records the promises in a packet that this end sends.
    pub(crate) fn note_sent(&mut self, packet: &Packet) {
        let header = &packet.header;
        if header.flags.contains(TcpFlags::RST) {
            return;
        }
        let end = space_end(packet);
        self.highest = Some(self.highest.map_or(end, |highest| highest.max(end)));
        if !header.flags.contains(TcpFlags::ACK) {
            return;
        }
        self.acknowledged = Some(header.ack);
        let scale = if header.flags.contains(TcpFlags::SYN) {
            0
        } else {
            self.connection
                .as_ref()
                .map_or(0, |c| c.tcp_info().receive_scale)
        };
        self.scale = scale;
        let edge = header.ack + (u32::from(header.window) << scale);
        // The window field of a SYN may be too small for the window offered since.
        let is_full = header.flags.contains(TcpFlags::SYN) && header.window == u16::MAX;
        if let Some(before) = self.offered.filter(|_| !is_full) {
            let granule = (1 << scale) - 1;
            assert!(
                (edge + granule).at_or_after(before),
                "the window shrank from {before:?} to {edge:?}: {packet:?}"
            );
        }
        self.offered = Some(self.offered.map_or(edge, |before| before.max(edge)));
    }

    /// Records the contents of a genuine packet of `peer` that this end receives.
    pub(crate) fn note_arrived(&mut self, peer: &End, packet: &Packet) {
        let header = &packet.header;
        if header.flags.contains(TcpFlags::RST) || !header.flags.contains(TcpFlags::ACK) {
            if header.flags.contains(TcpFlags::SYN) {
                // In a simultaneous open, the window is known before anything is acknowledged.
                let edge = self.highest.map(|end| end + u32::from(header.window));
                self.allowed = self.allowed.or(edge);
            }
            return;
        }
        let scale = if header.flags.contains(TcpFlags::SYN) {
            0
        } else {
            peer.scale
        };
        let edge = header.ack + (u32::from(header.window) << scale);
        self.allowed = Some(self.allowed.map_or(edge, |before| before.max(edge)));
    }

    /// Checks that a packet is within the window; a FIN needs no window.
    pub(crate) fn check_window(&self, packet: &Packet) {
        let Some(allowed) = self.allowed else {
            return;
        };
        let end = packet.header.seq + packet.payload.len() as u32;
        assert!(
            packet.payload.is_empty() || end.at_or_before(allowed),
            "{packet:?} goes beyond {allowed:?}: {:?}",
            self.connection
        );
    }
}

pub(crate) fn space_end(packet: &Packet) -> SeqNum {
    let flags = packet.header.flags;
    packet.header.seq
        + packet.payload.len() as u32
        + u32::from(flags.contains(TcpFlags::SYN))
        + u32::from(flags.contains(TcpFlags::FIN))
}
