//! What is known of a relayed session, and what all of them hold.

use std::collections::BTreeSet;

use portolan_types::SessionId;

use crate::budget::{Budget, Charge, Limit};

/// What one relayed session has seen.
#[derive(Debug, Default)]
pub struct Relay {
    /// The application's side ended: nothing more comes from the descriptor.
    pub near_ended: bool,
    /// The peer's end was passed on to the descriptor.
    pub far_ended: bool,
    /// Every copy of the descriptor is closed.
    pub hung_up: bool,
    /// And bytes lay in it that nobody had read.
    pub left_unread: bool,
    /// Nothing is moved before a thread has read what lies in the descriptor.
    pub is_suspended: bool,
    /// Bytes that may still go to the descriptor before its last holder has had time to come back.
    pub allowance: Option<usize>,
    /// For what is held.
    pub(crate) charge: Option<Charge>,
}

/// Does the session's last holder perhaps want it back at once?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    AtOnce,
    Gently,
}

/// How a relayed session stands after bytes have been moved both ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayProgress {
    /// Bytes that the server holds of it; those of local sessions lie in the memory that its two programs share.
    pub stored: Option<usize>,
    /// The connection takes more.
    pub is_writable: bool,
    /// It is closed, and all that came is read.
    pub is_over: bool,
    /// The user has no room for more.
    pub is_stalled: bool,
    /// The descriptor takes no more.
    pub is_blocked: bool,
}

/// What is waited for at a descriptor, beside its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    pub bytes: bool,
    pub room: bool,
}

/// All relayed sessions.
#[derive(Debug)]
pub(crate) struct Relays {
    pub(crate) memory: Budget,
    /// Those whose descriptors are not read for want of room.
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
