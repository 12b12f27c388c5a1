//! What `portolan capture` and a library share (ADR 36): a ring of records of what the library's local sessions carry, and
//! of the frames that it sends and receives.
//!
//! A page of words, then the ring, a power of two. The library is the only writer, the command the only reader; each
//! treats the other's words as claims. Positions count bytes since the ring was made and never wrap. A record is a
//! [`RecordHeader`] and the captured bytes, padded to eight; it may continue at the start of the ring.

use core::mem::size_of;
use core::net::SocketAddr;

use portolan_types::{ChannelId, SessionId};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::local::Side;

/// Bytes before the ring.
pub const HEADER: usize = 4096;

/// Offsets of the words.
pub mod word {
    /// Position behind the last record; written after it.
    pub const HEAD: usize = 0;
    /// Records that found no room.
    pub const LOST: usize = 8;
    /// Position behind the last record that was read.
    pub const TAIL: usize = 128;
}

/// Sizes of the ring.
pub const RING_MIN: u32 = 256 << 10;
pub const RING_MAX: u32 = 64 << 20;

/// Most bytes of a stream in one record: a segment on Linux's loopback device.
pub const PIECE_MAX: u32 = 65_483;

/// Alignment of records.
pub const ALIGNMENT: u64 = 8;

/// Bits of [`RecordHeader::flags`].
pub mod flags {
    /// The stream ends behind these bytes.
    pub const FIN: u32 = 1;
    pub const RESET: u32 = 2;
    /// The bytes are an Ethernet frame; session and position are zero.
    pub const FRAME: u32 = 4;
}

/// Values of [`RecordHeader::direction`].
pub mod direction {
    /// Sent by the program.
    pub const OUT: u32 = 0;
    /// Received by it.
    pub const IN: u32 = 1;
}

/// A piece of a stream, or a frame.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RecordHeader {
    /// The end that recorded it.
    pub session: u64,
    /// Of the first byte, since the session began.
    pub position: u64,
    /// Nanoseconds of the monotonic clock.
    pub at: u64,
    /// Bytes of the stream or the frame.
    pub length: u32,
    /// How many of them follow.
    pub captured: u32,
    pub direction: u32,
    pub flags: u32,
}

const _: () = assert!(size_of::<RecordHeader>() == 40);

/// What a process records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// What its local sessions carry.
    Local,
    /// The frames that it sends and receives.
    Packets,
    All,
}

impl Subject {
    pub fn has_local(self) -> bool {
        self != Subject::Packets
    }

    pub fn has_packets(self) -> bool {
        self != Subject::Local
    }
}

/// What to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureRequest {
    /// One process; none for all that the caller may capture.
    pub pid: Option<u32>,
    /// Wanted size of each process's ring.
    pub ring_size: u32,
    /// Most bytes to record of a piece or a frame.
    pub snap: u32,
    pub subject: Subject,
}

/// What a capture hears from the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CaptureNews {
    /// A process that records; the packet carries its ring.
    Process {
        channel: ChannelId,
        pid: u32,
        program: String,
    },
    /// Ends that a process that records has, or gets with this.
    Ends(Vec<CapturedEnd>),
    /// All processes and ends that there were have been named.
    Ready,
    /// An end was closed or reset. Its records are in the rings already.
    Closed {
        pair: u64,
        side: Side,
        is_reset: bool,
    },
    /// The process is gone. Its records are in the ring.
    ProcessGone(ChannelId),
}

/// An end of a local session, in a process that records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedEnd {
    pub channel: ChannelId,
    pub session: SessionId,
    /// The local session, whose other end may be named, too.
    pub pair: u64,
    pub side: Side,
    #[serde(with = "portolan_types::endpoint")]
    pub opener: SocketAddr,
    #[serde(with = "portolan_types::endpoint")]
    pub accepter: SocketAddr,
    /// What each end has sent and the other one has taken, as they say: the rest is recorded.
    pub from_opener: u64,
    pub from_accepter: u64,
    /// Nanoseconds of the monotonic clock.
    pub at: u64,
}

/// A ring that a process writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureRing {
    pub number: u64,
    /// The packet carries its memory.
    pub is_new: bool,
    pub snap: u32,
    pub subject: Subject,
}

/// Size of the whole memory with a ring of that size.
pub const fn size(ring: u32) -> usize {
    HEADER + ring as usize
}
