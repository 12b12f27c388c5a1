//! Sessions that a process is asked to give back, and the requesters that wait for them (ADR 8).

use portolan_types::{Instant, Slot};

/// How many requests may wait for one session.
pub(crate) const REQUESTERS_MAX: usize = 64;

/// Identifies a control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// What a requester wants of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestedState {
    CacheAt(Slot),
    Relay,
    /// Its kernel socket.
    Share,
}

/// A request that waits for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    pub client: ClientId,
    pub request: u32,
    pub want: RequestedState,
}

/// A pending recall of a session.
#[derive(Debug)]
pub struct Recall {
    pub requesters: Vec<Requester>,
    pub since: Instant,
}
