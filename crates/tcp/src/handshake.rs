//! The two states before both sides know each other's sequence numbers, and what the options of a
//! SYN settle (RFC 9293 §3.10.7.3, RFC 7323, RFC 2018).

use arrayvec::ArrayVec;
use portolan_types::SeqNum;
use portolan_wire::demux::DemuxOption;
use portolan_wire::tcp::{MAX_COOKIE, TcpFlags, TcpHeader, TcpOptions};

use crate::config::{Config, EcnMode};
use crate::encoding;
use crate::receive::MAX_SCALE;

/// A smaller MSS is an attack, not a path.
const MIN_MSS: u16 = 48;
/// Size of the timestamps option with padding.
const TIMESTAMP_BYTES: u16 = 12;
/// Linux's `tcp_syn_retries`: the last wait ends after 127 s.
pub(crate) const SYN_RETRIES: u32 = 6;
/// Linux's `tcp_synack_retries`.
pub(crate) const SYN_ACK_RETRIES: u32 = 5;

/// A SYN was sent; nothing is known of the peer.
#[derive(Clone, Debug)]
pub(crate) struct SynSent {
    pub(crate) iss: SeqNum,
    pub(crate) offer: Offer,
    /// The SYN must be sent, for the first time or again.
    pub(crate) due: bool,
    pub(crate) fast: Option<FastSyn>,
}

encoding::fields!(SynSent {
    iss,
    offer,
    due,
    fast
});

/// What Fast Open adds to the first SYN.
#[derive(Clone, Debug)]
pub(crate) struct FastSyn {
    /// Empty to request a cookie; none to send data without one.
    pub(crate) cookie: Option<ArrayVec<u8, MAX_COOKIE>>,
    /// The peer's MSS when it granted the cookie.
    pub(crate) mss: u16,
    /// Bytes of data sent with the SYN.
    pub(crate) sent: u32,
    /// The user has data to send after the handshake, which will carry the acknowledgement.
    pub(crate) text_follows: bool,
}

encoding::fields!(FastSyn {
    cookie,
    mss,
    sent,
    text_follows
});

impl FastSyn {
    /// Whether the SYN may carry data.
    pub(crate) fn takes_text(&self) -> bool {
        self.cookie.as_ref().is_none_or(|cookie| !cookie.is_empty())
    }
}

/// The peer's SYN has arrived; this side's SYN is not acknowledged yet.
#[derive(Clone, Debug)]
pub(crate) struct SynReceived {
    pub(crate) iss: SeqNum,
    pub(crate) irs: SeqNum,
    pub(crate) offer: Offer,
    pub(crate) due: bool,
    /// It began as an active open: a reset means that the peer refused.
    pub(crate) active: bool,
    /// Data came with the SYN, and the user may answer already (RFC 7413 §4.2.2).
    pub(crate) fast: bool,
    /// A Fast Open cookie to send to the peer.
    pub(crate) grant: Option<ArrayVec<u8, MAX_COOKIE>>,
    /// The accept queue is full: the final acknowledgement is dropped. The holder sets this before
    /// each segment; it is not part of a capsule.
    pub(crate) is_held: bool,
}

encoding::fields!(SynReceived {
    iss, irs, offer, due, active, fast, grant
} default { is_held: false });

/// What the options of this side's SYN offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Offer {
    pub(crate) mss: u16,
    /// The peer's MSS if it sends no MSS option.
    pub(crate) assumed_mss: u16,
    pub(crate) scale: Option<u8>,
    pub(crate) timestamps: bool,
    pub(crate) sack: bool,
    /// Requests or accepts explicit congestion notification.
    pub(crate) ecn: bool,
    /// Active demultiplexing: bytes that a handle takes, or 0.
    pub(crate) handle_room: u16,
}

encoding::fields!(Offer {
    mss,
    assumed_mss,
    scale,
    timestamps,
    sack,
    ecn,
    handle_room
});

/// What both sides agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Agreement {
    /// Payload of a full segment sent by this side.
    pub(crate) mss: u16,
    /// Window scale shifts of the peer's windows and of this side's.
    pub(crate) send_scale: u8,
    pub(crate) receive_scale: u8,
    pub(crate) scaling: bool,
    pub(crate) timestamps: bool,
    pub(crate) sack: bool,
    pub(crate) handle_room: u16,
}

impl Offer {
    pub(crate) fn new(config: &Config, scale: u8) -> Offer {
        Offer {
            mss: config.mss,
            assumed_mss: config.assumed_mss,
            scale: config.window_scaling.then_some(scale),
            timestamps: config.timestamps,
            sack: config.sack,
            ecn: config.ecn == EcnMode::Request,
            handle_room: config.handle_room,
        }
    }

    /// The part of the offer that a SYN+ACK repeats, given the options of the peer's SYN.
    pub(crate) fn answering(self, peer: &TcpOptions) -> Offer {
        Offer {
            scale: self.scale.filter(|_| peer.window_scale.is_some()),
            timestamps: self.timestamps && peer.timestamps.is_some(),
            sack: self.sack && peer.sack_permitted,
            handle_room: match peer.demux {
                Some(DemuxOption::Able) => self.handle_room,
                _ => 0,
            },
            ..self
        }
    }

    /// The agreement once the peer's SYN is known.
    pub(crate) fn agree(self, peer: &TcpOptions) -> Agreement {
        let ours = self.answering(peer);
        let scales = ours.scale.zip(peer.window_scale);
        // RFC 9293 §3.7.1 [MUST-15].
        let theirs = peer.mss.unwrap_or(self.assumed_mss);
        let room = self.mss.min(theirs).max(MIN_MSS);
        let timestamps = if ours.timestamps { TIMESTAMP_BYTES } else { 0 };
        Agreement {
            mss: room - timestamps - ours.handle_room,
            send_scale: scales.map_or(0, |(_, theirs)| theirs.min(MAX_SCALE)),
            receive_scale: scales.map_or(0, |(ours, _)| ours),
            scaling: scales.is_some(),
            timestamps: ours.timestamps,
            sack: ours.sack,
            handle_room: ours.handle_room,
        }
    }
}

/// What a segment means to a connection in SYN-SENT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SynSentAnswer {
    Ignore,
    /// It acknowledges something never sent: answer with a RST that has its number.
    Reset(SeqNum),
    Refused,
    Established,
    /// Simultaneous open.
    SynReceived,
}

impl SynSent {
    /// RFC 9293 §3.10.7.3.
    pub(crate) fn judge(&self, header: &TcpHeader) -> SynSentAnswer {
        let ack = header.flags.contains(TcpFlags::ACK);
        let sent = self.fast.as_ref().map_or(0, |fast| fast.sent);
        let known = header.ack.after(self.iss) && header.ack.at_or_before(self.iss + 1 + sent);
        if ack && !known {
            return if header.flags.contains(TcpFlags::RST) {
                SynSentAnswer::Ignore
            } else {
                SynSentAnswer::Reset(header.ack)
            };
        }
        match (
            header.flags.contains(TcpFlags::RST),
            header.flags.contains(TcpFlags::SYN),
            ack,
        ) {
            (true, _, true) => SynSentAnswer::Refused,
            (true, _, false) => SynSentAnswer::Ignore,
            (false, true, true) => SynSentAnswer::Established,
            (false, true, false) => SynSentAnswer::SynReceived,
            (false, false, _) => SynSentAnswer::Ignore,
        }
    }
}
