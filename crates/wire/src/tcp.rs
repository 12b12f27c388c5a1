//! The TCP header (RFC 9293 §3.1) and the options Portolan speaks: MSS, window scale and
//! timestamps (RFC 7323), SACK (RFC 2018).

use arrayvec::ArrayVec;
use portolan_types::SeqNum;

/// A TCP header, parsed. Unknown options are skipped.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TcpHeader {
    pub source_port: u16,
    pub destination_port: u16,
    pub seq: SeqNum,
    pub ack: SeqNum,
    pub flags: TcpFlags,
    /// As on the wire, not scaled.
    pub window: u16,
    pub urgent: u16,
    pub options: TcpOptions,
}

/// The options of one segment.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TcpOptions {
    pub mss: Option<u16>,
    /// Shift count; values above 14 are kept as read (RFC 7323 §2.3 has the receiver cap them).
    pub window_scale: Option<u8>,
    pub sack_permitted: bool,
    pub timestamps: Option<Timestamps>,
    pub sack: ArrayVec<SackBlock, 4>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamps {
    pub value: u32,
    pub echo: u32,
}

/// Octets `start..end` that the receiver holds beyond its cumulative acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SackBlock {
    pub start: SeqNum,
    pub end: SeqNum,
}

/// The control bits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    pub const FIN: TcpFlags = TcpFlags(0x01);
    pub const SYN: TcpFlags = TcpFlags(0x02);
    pub const RST: TcpFlags = TcpFlags(0x04);
    pub const PSH: TcpFlags = TcpFlags(0x08);
    pub const ACK: TcpFlags = TcpFlags(0x10);
    pub const URG: TcpFlags = TcpFlags(0x20);
    pub const ECE: TcpFlags = TcpFlags(0x40);
    pub const CWR: TcpFlags = TcpFlags(0x80);

    pub const fn contains(self, other: TcpFlags) -> bool {
        self.0 & other.0 == other.0
    }

    #[must_use]
    pub const fn with(self, other: TcpFlags) -> TcpFlags {
        TcpFlags(self.0 | other.0)
    }
}
