//! State of a relayed session, and the memory of all of them.

use std::collections::BTreeSet;

use portolan_types::SessionId;

use crate::budget::{Budget, Charge, Limit};

/// State of one relayed session.
#[derive(Debug, Default)]
pub struct Relay {
    /// The application's side has ended: nothing more comes from the descriptor.
    pub near_ended: bool,
    /// The peer's FIN was passed on to the descriptor.
    pub far_ended: bool,
    /// Every copy of the descriptor is closed.
    pub hung_up: bool,
    /// The descriptor was closed with unread bytes in it.
    pub left_unread: bool,
    /// Nothing is moved before a thread has read what lies in the descriptor.
    pub is_suspended: bool,
    /// Bytes that may still go to the descriptor before its last holder has had time to come back.
    pub allowance: Option<usize>,
    /// Charge for the bytes held.
    pub(crate) charge: Option<Charge>,
}

/// Whether the session's last holder may soon want it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    AtOnce,
    Gently,
}

/// State of a relayed session after bytes were moved both ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayProgress {
    /// Bytes that the server holds for it. Those of local sessions are in memory that the two programs share.
    pub stored: Option<usize>,
    /// The connection accepts more data.
    pub is_writable: bool,
    /// It is closed, and everything received was read.
    pub is_over: bool,
    /// The user has no room for more.
    pub is_stalled: bool,
    /// The descriptor accepts no more.
    pub is_blocked: bool,
}

/// Events awaited on a descriptor, besides its hang-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    pub bytes: bool,
    pub room: bool,
}

/// All relayed sessions.
#[derive(Debug)]
pub(crate) struct Relays {
    pub(crate) memory: Budget,
    /// Sessions whose descriptors are not read for lack of room.
    pub(crate) stalled: BTreeSet<SessionId>,
}

impl Relays {
    pub(crate) fn new(memory: Limit) -> Relays {
        Relays {
            memory: Budget::new(memory),
            stalled: BTreeSet::new(),
        }
    }
}
