//! The memory of a local session: what both ends of a stream between two programs of one host
//! share. A header with a block for each end, then the ring of what the opener sends, then that of
//! what the accepter sends; each ring has half of what follows the header, a power of two.
//!
//! Positions count bytes since the session began and never wrap. Each word has one writer, but
//! for `wants`; whoever reads it takes it for a claim of the other end.

use core::mem::{align_of, offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Bytes before the rings.
pub const HEADER: usize = 4096;

/// Sizes of one ring.
pub const RING_MIN: usize = 16 << 10;
pub const RING_MAX: usize = 8 << 20;

/// Bits of [`End::flags`]; none is ever taken back.
pub mod flags {
    /// Nothing more is sent.
    pub const FIN: u32 = 1;
    /// Nobody has this end any more: what comes for it is refused.
    pub const CLOSED: u32 = 2;
    /// It ended with bytes unread, or by force.
    pub const RESET: u32 = 4;
    /// Its FIN went before the peer's had come: this end goes to FIN-WAIT and TIME-WAIT.
    pub const ACTIVE: u32 = 8;
}

/// Bits of [`End::wants`].
pub mod wants {
    /// To be woken when something was sent.
    pub const INPUT: u32 = 1;
    /// To be woken when there is room for a good deal.
    pub const OUTPUT: u32 = 2;
    /// The holder sleeps on this word itself (a futex), and no notifier needs to be woken.
    pub const ON_WORD: u32 = 4;
}

/// Values of [`End::holder`] that are no process's notifier.
pub mod holder {
    /// Nobody: whoever takes the end looks at it.
    pub const NONE: u64 = 0;
    pub const SERVER: u64 = 1;
    /// The first number of a process.
    pub const FIRST: u64 = 2;
}

/// A cache line and the one that is fetched with it.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Line<T>(pub T);

/// What an end has sent.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Sent {
    /// What the peer may read; written after the bytes and all else in this line that they need.
    pub shown: AtomicU64,
    /// With what is held back until there is more (`TCP_CORK`).
    pub bytes: AtomicU64,
    /// The position whose byte lies first in the ring; moves only while the ring is empty, so that
    /// short messages always use the same memory.
    pub base: AtomicU64,
    /// After so many bytes, a power of two, the writer begins at the first place again. It changes while the ring is
    /// empty, or grows while no byte in it has been taken, so that those lie where they lay.
    pub cycle: AtomicU64,
    /// Position behind the last urgent byte; 0: there was none.
    pub urgent: AtomicU64,
    /// [`flags`]; the last word to be written.
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

/// What wakes an end. The peer takes a bit of `wants` away and then notifies the holder, or wakes who sleeps
/// on the word.
#[derive(Debug, Default)]
#[repr(C)]
pub struct NotifyWord {
    pub wants: AtomicU32,
    pub reserved: AtomicU32,
    /// Whose notifier: a number that the server gives, or of [`holder`].
    pub number: AtomicU64,
}

/// What goes with an end from holder to holder, and the sizes of its buffers.
#[derive(Debug, Default)]
#[repr(C)]
pub struct EndState {
    /// `SO_SNDBUF` and `SO_RCVBUF`; 0: as large as the ring.
    pub send_limit: AtomicU32,
    pub receive_limit: AtomicU32,
    /// Position behind the urgent byte that was taken out of band last.
    pub urgent_taken: AtomicU64,
    /// The program reads no more (`SHUT_RD`).
    pub receive_shut: AtomicU32,
    /// The error that the end had was reported.
    pub error_told: AtomicU32,
    /// Bytes came with the opening (of the opener's end).
    pub early: AtomicU32,
    /// Seconds in FIN-WAIT-2 once this end is closed (`TCP_LINGER2`); 0: as long as usual.
    pub fin_wait: AtomicU32,
}

/// One end; lines that different sides write at different times lie apart.
#[derive(Debug, Default)]
#[repr(C)]
pub struct End {
    pub sent: Line<Sent>,
    pub taken: Line<Taken>,
    pub notifier: Line<NotifyWord>,
    pub kept: Line<EndState>,
}

/// Which end.
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

/// The header as it lies in memory.
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

/// Bytes of the whole memory with rings of `ring` bytes.
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
