//! The memory of a local session, shared by both ends of a stream between two programs of one host. A
//! header with a block for each end, then the ring for data sent by the opener, then that for data sent
//! by the accepter; each ring has half of the memory behind the header, a power of two.
//!
//! Positions count bytes since the session began and never wrap. Each word has one writer, except for
//! `wants`; readers treat it as a claim of the other end.

use core::mem::{align_of, offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Bytes before the rings.
pub const HEADER: usize = 4096;

/// Sizes of one ring.
pub const RING_MIN: usize = 16 << 10;
pub const RING_MAX: usize = 8 << 20;

/// Bits of [`Sent::flags`]; once set, they are never cleared.
pub mod flags {
    /// Nothing more is sent.
    pub const FIN: u32 = 1;
    /// No process has this end any more: data for it is refused.
    pub const CLOSED: u32 = 2;
    /// It ended with bytes unread, or was aborted.
    pub const RESET: u32 = 4;
    /// Its FIN was sent before the peer's arrived: this end enters FIN-WAIT and TIME-WAIT.
    pub const ACTIVE: u32 = 8;
}

/// Bits of [`NotifyWord::wants`].
pub mod wants {
    /// Wake up when data was sent.
    pub const INPUT: u32 = 1;
    /// Wake up when there is ample room.
    pub const OUTPUT: u32 = 2;
    /// The holder sleeps on this word itself (a futex); no notifier needs to be woken.
    pub const ON_WORD: u32 = 4;
}

/// Values of [`NotifyWord::number`] that are not the notifier of a process.
pub mod holder {
    /// No holder: the next one checks the end when it takes over.
    pub const NONE: u64 = 0;
    pub const SERVER: u64 = 1;
    /// The lowest number of a process.
    pub const FIRST: u64 = 2;
}

/// A cache line and the adjacent one that is prefetched with it.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Line<T>(pub T);

/// The sending state of an end.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Sent {
    /// What the peer may read; written after the bytes and everything else in this line that describes them.
    pub shown: AtomicU64,
    /// Including what is held back until there is more (`TCP_CORK`).
    pub bytes: AtomicU64,
    /// The position of the byte at the start of the ring; changes only while the ring is empty, so that short
    /// messages always use the same memory.
    pub base: AtomicU64,
    /// Number of bytes, a power of two, after which the writer wraps to the start. It changes while the ring is empty,
    /// or grows while no byte in the ring has been consumed, so that those bytes stay where they are.
    pub cycle: AtomicU64,
    /// Position behind the last urgent byte; 0 if there was none.
    pub urgent: AtomicU64,
    /// [`flags`]; written last.
    pub flags: AtomicU32,
    /// When something was shown first since the peer had read all, or had fallen asleep, and when last: nanoseconds of the
    /// monotonic clock, for the order in which the peer's program is told of several ends and for nothing else.
    pub first_at: AtomicU64,
    pub last_at: AtomicU64,
}

/// What an end has read.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Taken {
    pub bytes: AtomicU64,
    /// When that left room for a good deal, as [`Sent::first_at`]; written before `bytes`.
    pub room_at: AtomicU64,
}

/// How to wake an end. The peer clears a bit of `wants` and then notifies the holder, or wakes the sleeper on
/// the word.
#[derive(Debug, Default)]
#[repr(C)]
pub struct NotifyWord {
    pub wants: AtomicU32,
    pub reserved: AtomicU32,
    /// The notifier's number, assigned by the server, or one of [`holder`].
    pub number: AtomicU64,
}

/// State that goes with an end from holder to holder, and its buffer limits.
#[derive(Debug, Default)]
#[repr(C)]
pub struct EndState {
    /// `SO_SNDBUF` and `SO_RCVBUF`; 0: the size of the ring.
    pub send_limit: AtomicU32,
    pub receive_limit: AtomicU32,
    /// Position behind the urgent byte last read out of band.
    pub urgent_taken: AtomicU64,
    /// The program has shut down reading (`SHUT_RD`).
    pub receive_shut: AtomicU32,
    /// The error of the end was reported.
    pub error_told: AtomicU32,
    /// Data was sent with the opening (for the opener's end).
    pub early: AtomicU32,
    /// Seconds in FIN-WAIT-2 once this end is closed (`TCP_LINGER2`); 0: the default.
    pub fin_wait: AtomicU32,
}

/// One end; fields written by different sides at different times are in separate lines.
#[derive(Debug, Default)]
#[repr(C)]
pub struct End {
    pub sent: Line<Sent>,
    pub taken: Line<Taken>,
    pub notifier: Line<NotifyWord>,
    pub kept: Line<EndState>,
}

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Side {
    Opener,
    Accepter,
}

impl Side {
    pub const fn other(self) -> Side {
        match self {
            Side::Opener => Side::Accepter,
            Side::Accepter => Side::Opener,
        }
    }
}

/// The header as laid out in memory.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ends {
    pub opener: End,
    pub accepter: End,
}

impl Ends {
    pub const fn of(&self, side: Side) -> &End {
        match side {
            Side::Opener => &self.opener,
            Side::Accepter => &self.accepter,
        }
    }
}

/// Size of the whole memory with rings of `ring` bytes.
pub const fn size(ring: usize) -> usize {
    HEADER + 2 * ring
}

const _: () = {
    assert!(
        size_of::<Sent>() == 64 && size_of::<NotifyWord>() == 16 && size_of::<EndState>() == 32
    );
    assert!(size_of::<End>() == 512 && align_of::<End>() == 128);
    assert!(offset_of!(End, taken) == 128 && offset_of!(End, notifier) == 256);
    assert!(offset_of!(End, kept) == 384);
    assert!(offset_of!(Ends, accepter) == 512 && size_of::<Ends>() <= HEADER);
    assert!(RING_MIN.is_power_of_two() && RING_MAX.is_power_of_two());
};
