//! Active demultiplexing (MS §VI): each end advertises a handle for packets to it, and revokes it. This is the state of
//! both directions; to whom a handle belongs, and whether it is valid, is decided elsewhere.

use portolan_types::{Handle, SeqNum};
use portolan_wire::demux::{DemuxOption, ENCLOSED_V6_LEN};

use crate::encoding;

#[derive(Clone, Debug, Default)]
pub(crate) struct Demux {
    /// Bytes that a handle takes in each packet.
    room: u16,
    phase: HandlePhase,
    /// This side's handle, while the peer may use it.
    own: Option<Handle>,
    /// Sequence number of the last operation.
    sequence: u8,
    peers: Option<Handle>,
    /// Sequence number of the peer's last operation.
    last_rx: Option<u8>,
    /// Packets with options appear to be dropped on the path.
    is_barren: bool,
}

encoding::fields!(Demux {
    room,
    phase,
    own,
    sequence,
    peers,
    last_rx,
    is_barren
});

/// Largest room, of either IP version.
const ROOM_MAX: u16 = ENCLOSED_V6_LEN as u16;

/// MS Fig. 9.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum HandlePhase {
    #[default]
    Revoked,
    Advertising(Edge),
    Advertised,
    Revoking(Edge),
}

encoding::variants!(HandlePhase {
    0 => Revoked,
    1 => Advertising(inner),
    2 => Advertised,
    3 => Revoking(inner),
});

/// The position of both streams when a phase was entered. Since then every segment carries the option, so the option
/// has arrived once either stream has advanced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Edge {
    /// What had been sent. An acknowledgement beyond it covers a segment with the option.
    pub(crate) sent: SeqNum,
    /// What the peer was allowed to send. If it sends more, it has seen a later acknowledgement.
    pub(crate) allowed: SeqNum,
}

encoding::fields!(Edge { sent, allowed });

impl Demux {
    pub(crate) fn with_room(room: u16) -> Demux {
        Demux {
            room,
            ..Demux::default()
        }
    }

    pub(crate) fn room(&self) -> u32 {
        self.room.into()
    }

    /// Transition A: the session has got an exclusive receiver.
    pub(crate) fn advertise(&mut self, handle: Handle, edge: Edge) {
        self.sequence = self.sequence.wrapping_add(1);
        self.own = Some(handle);
        self.phase = HandlePhase::Advertising(edge);
    }

    /// Transition C: the session no longer has one. Does nothing if the peer knows of none.
    pub(crate) fn revoke(&mut self, edge: Edge) {
        if matches!(
            self.phase,
            HandlePhase::Advertising(_) | HandlePhase::Advertised
        ) {
            self.sequence = self.sequence.wrapping_add(1);
            self.own = None;
            self.phase = HandlePhase::Revoking(edge);
        }
    }

    /// Transitions B and D: the peer has acknowledged up to `acknowledged`; data has arrived up to `received`.
    pub(crate) fn progress(&mut self, acknowledged: SeqNum, received: SeqNum) {
        let has_arrived =
            |edge: Edge| acknowledged.after(edge.sent) || received.after(edge.allowed);
        match self.phase {
            HandlePhase::Advertising(edge) if has_arrived(edge) => {
                self.phase = HandlePhase::Advertised
            }
            HandlePhase::Revoking(edge) if has_arrived(edge) => self.phase = HandlePhase::Revoked,
            _ => {}
        }
    }

    /// The option that every segment carries in this phase.
    pub(crate) fn option(&self) -> Option<DemuxOption> {
        let sequence = self.sequence;
        match self.phase {
            HandlePhase::Advertising(_) => self
                .own
                .map(|handle| DemuxOption::Advertise { sequence, handle }),
            HandlePhase::Revoking(_) => Some(DemuxOption::Revoke { sequence }),
            HandlePhase::Advertised | HandlePhase::Revoked => None,
        }
    }

    /// Processes the peer's option. The peer may send any number of them: one handle is kept. An option that is older
    /// than one already seen, or whose marker is not local, is ignored.
    pub(crate) fn hear(&mut self, option: DemuxOption) {
        match option {
            DemuxOption::Advertise { sequence, handle } => {
                if handle.has_local_marker() && self.is_next(sequence) {
                    self.peers = Some(handle);
                }
            }
            DemuxOption::Revoke { sequence } => {
                if self.is_next(sequence) {
                    self.peers = None;
                }
            }
            DemuxOption::Able => {}
        }
    }

    /// Whether `sequence` is later than all seen so far. Numbers wrap.
    fn is_next(&mut self, sequence: u8) -> bool {
        let is_later = |last_rx: u8| (1..128).contains(&sequence.wrapping_sub(last_rx));
        let is_next = self.last_rx.is_none_or(is_later);
        if is_next {
            self.last_rx = Some(sequence);
        }
        is_next
    }

    /// A segment, or its acknowledgement, was lost. Some routers drop all packets with IP options (RFC 7126 §4), so
    /// handles are not enclosed any more. Returns true if they were.
    pub(crate) fn doubt(&mut self) -> bool {
        let encloses = self.enclosed().is_some();
        self.is_barren |= encloses;
        encloses
    }

    /// Whether it holds only values that a peer could have sent.
    pub(crate) fn is_sound(&self) -> bool {
        self.room <= ROOM_MAX && self.peers.is_none_or(Handle::has_local_marker)
    }

    /// The handle enclosed in packets to the peer.
    pub(crate) fn enclosed(&self) -> Option<Handle> {
        self.peers.filter(|_| !self.is_barren)
    }
}

#[cfg(test)]
mod tests;
