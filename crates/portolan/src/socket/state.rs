//! The state of a socket. Phase and slot are one atomic word, so that no thread sees one without the other, or an
//! intermediate state. The phase determines who handles a socket's calls.
//!
//! A session is put into its slot and removed from it with the process's lock held, together with the change of state:
//! a thread that reads `Cached` under that lock finds the socket's own session there, and one that reads another state
//! leaves the slot alone. Changes that are not allowed ([`SocketState::may_become`]) are refused: if two threads end or
//! open the same socket, the slower one learns the state that the other has set.

use std::sync::atomic::{AtomicU64, Ordering};

use portolan_types::Slot;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketState {
    /// No session yet, or only a port.
    Idle,
    /// The server opens it; the outcome arrives on the descriptor, and the session in the slot.
    Connecting {
        slot: Slot,
    },
    /// The session is here.
    Cached {
        slot: Slot,
    },
    /// Sessions to accept arrive on the descriptor.
    Listening,
    /// The server holds it and relays through the descriptor: calls go to the kernel.
    Relayed,
    /// Another process that has the descriptor holds it, or the server keeps it: the next call that
    /// needs the session requests it.
    HeldElsewhere {
        use_here: UseHere,
    },
    Closed,
}

/// Has this process ever needed a session that is held elsewhere?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UseHere {
    /// It was accepted, and only this process has its options.
    Never,
    Before,
}

/// A state without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SocketPhase {
    Idle,
    Connecting,
    Cached,
    Listening,
    Relayed,
    HeldElsewhere,
    Closed,
}

pub(crate) const PHASES: [SocketPhase; 7] = [
    SocketPhase::Idle,
    SocketPhase::Connecting,
    SocketPhase::Cached,
    SocketPhase::Listening,
    SocketPhase::Relayed,
    SocketPhase::HeldElsewhere,
    SocketPhase::Closed,
];

/// The slot of a socket that has none: no session lies there.
const NO_SLOT: Slot = Slot(u32::MAX);

impl SocketState {
    pub(crate) fn phase(self) -> SocketPhase {
        match self {
            SocketState::Idle => SocketPhase::Idle,
            SocketState::Connecting { .. } => SocketPhase::Connecting,
            SocketState::Cached { .. } => SocketPhase::Cached,
            SocketState::Listening => SocketPhase::Listening,
            SocketState::Relayed => SocketPhase::Relayed,
            SocketState::HeldElsewhere { .. } => SocketPhase::HeldElsewhere,
            SocketState::Closed => SocketPhase::Closed,
        }
    }

    /// May a socket change from this state to `next`? A closed one may be reopened (`connect` to `AF_UNSPEC`
    /// after its session was lost), but does not get a session that was being opened for it.
    pub(crate) fn may_become(self, next: SocketState) -> bool {
        use SocketPhase::{Cached, Closed, Connecting, HeldElsewhere, Idle, Listening, Relayed};
        if let (SocketState::Connecting { slot: promised }, SocketState::Cached { slot }) =
            (self, next)
        {
            return promised == slot;
        }
        matches!(
            (self.phase(), next.phase()),
            (_, Closed)
                | (Idle, Idle | Connecting | Cached | Listening | Relayed)
                | (Connecting, Idle)
                | (Cached, Idle | Relayed | HeldElsewhere)
                | (Listening, Idle | Relayed)
                | (Relayed, Cached)
                | (HeldElsewhere, Cached | Relayed)
                | (Closed, Idle)
        )
    }
}

/// The atomic word that contains a state: the standard library's, or loom's.
pub(crate) trait AtomicWord {
    fn new(word: u64) -> Self;
    fn load(&self) -> u64;
    /// Returns the word that was found instead of `expected`.
    fn compare_exchange(&self, expected: u64, new: u64) -> Result<(), u64>;
}

impl AtomicWord for AtomicU64 {
    fn new(word: u64) -> AtomicU64 {
        AtomicU64::new(word)
    }

    fn load(&self) -> u64 {
        AtomicU64::load(self, Ordering::Acquire)
    }

    fn compare_exchange(&self, expected: u64, new: u64) -> Result<(), u64> {
        AtomicU64::compare_exchange(self, expected, new, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
    }
}

#[derive(Debug)]
pub(crate) struct StateCell<W = AtomicU64>(W);

impl<W: AtomicWord> StateCell<W> {
    pub(crate) fn new(state: SocketState) -> StateCell<W> {
        StateCell(W::new(to_word(state)))
    }

    pub(crate) fn state(&self) -> SocketState {
        from_word(self.0.load())
    }

    pub(crate) fn phase(&self) -> SocketPhase {
        phase_of(self.0.load())
    }

    /// Returns the slot where the session lies, or will lie; a slot without one in all other states.
    pub(crate) fn slot(&self) -> Slot {
        slot_of(self.0.load())
    }

    /// Returns the previous state, or the one that does not allow the change.
    pub(crate) fn change(&self, next: SocketState) -> Result<SocketState, SocketState> {
        let mut word = self.0.load();
        loop {
            let before = from_word(word);
            if !before.may_become(next) {
                return Err(before);
            }
            match self.0.compare_exchange(word, to_word(next)) {
                Ok(()) => return Ok(before),
                Err(found) => word = found,
            }
        }
    }
}

// Bits 0 to 31: the slot. 32 to 39: the phase. 40: set if a session held elsewhere was needed here before.
const PHASE_AT: u32 = 32;
const USED: u64 = 1 << 40;

fn to_word(state: SocketState) -> u64 {
    let slot = match state {
        SocketState::Connecting { slot } | SocketState::Cached { slot } => slot,
        _ => NO_SLOT,
    };
    let used = match state {
        SocketState::HeldElsewhere {
            use_here: UseHere::Before,
        } => USED,
        _ => 0,
    };
    u64::from(slot.0) | u64::from(state.phase() as u8) << PHASE_AT | used
}

fn phase_of(word: u64) -> SocketPhase {
    PHASES[usize::from((word >> PHASE_AT) as u8)]
}

fn slot_of(word: u64) -> Slot {
    // The lower half.
    Slot(word as u32)
}

fn from_word(word: u64) -> SocketState {
    let slot = slot_of(word);
    match phase_of(word) {
        SocketPhase::Idle => SocketState::Idle,
        SocketPhase::Connecting => SocketState::Connecting { slot },
        SocketPhase::Cached => SocketState::Cached { slot },
        SocketPhase::Listening => SocketState::Listening,
        SocketPhase::Relayed => SocketState::Relayed,
        SocketPhase::HeldElsewhere => SocketState::HeldElsewhere {
            use_here: match word & USED {
                0 => UseHere::Never,
                _ => UseHere::Before,
            },
        },
        SocketPhase::Closed => SocketState::Closed,
    }
}

#[cfg(test)]
mod tests;
