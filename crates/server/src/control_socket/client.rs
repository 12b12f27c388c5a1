//! The server's record of control connections, and the lists being assembled for them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_control::{Charge, ClientId};
use portolan_sys::unix::{Connection, Credentials};
use portolan_types::{ChannelId, SessionId};
use rustix::event::epoll::EventFlags;

use crate::connections::rights::PortRight;
use crate::poll::Token;

/// One control connection.
#[derive(Debug)]
pub struct Client {
    pub connection: Connection,
    pub token: Token,
    pub credentials: Credentials,
    /// Set by `Hello`.
    pub channel: Option<ChannelId>,
    /// As shown by `ShowRight`.
    pub right: PortRight,
    /// `Hello` was received, and not answered yet.
    pub is_registering: bool,
    /// Its user's requests have used up their share of the time.
    pub is_throttled: bool,
    /// Replies that it has not read.
    pub waiting: VecDeque<PendingReply>,
    pub _charge: Charge,
}

/// A reply on its way.
#[derive(Debug)]
pub struct PendingReply {
    pub message: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// The server may have no other copy of what it brings, whose last close may be its own.
    pub may_be_last: bool,
}

impl Client {
    /// A client that does not read its replies is not read either.
    pub fn interest(&self) -> EventFlags {
        match (self.waiting.is_empty(), self.is_throttled) {
            (true, false) => EventFlags::IN,
            (false, false) => EventFlags::OUT,
            // A hang-up is always reported; edge-triggered, only once.
            (true, true) => EventFlags::ET,
            (false, true) => EventFlags::OUT | EventFlags::ET,
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// A list being assembled.
#[derive(Debug)]
pub struct Listing {
    pub client: ClientId,
    pub request: u32,
    /// Sessions still to be listed.
    pub ids: Vec<SessionId>,
    pub count: usize,
    pub bytes: Vec<u8>,
}

/// At most one per connection.
#[derive(Debug, Default)]
pub struct Listings(pub VecDeque<Listing>);

impl Listings {
    pub fn has(&self, client: ClientId) -> bool {
        self.0.iter().any(|listing| listing.client == client)
    }
}
