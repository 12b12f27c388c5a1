//! The server's record of control connections, and the lists being assembled for them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_control::{Charge, ClientId};
use portolan_proto::control::{ListPart, Reply, ReplyBody};
use portolan_proto::encode;
use portolan_sys::unix::{Connection, Credentials};
use portolan_types::{ChannelId, SessionId};
use rustix::event::epoll::EventFlags;

use crate::connections::rights::PortRight;
use crate::poll::Token;

/// One control connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub connection: Connection,
    pub token: Token,
    pub credentials: Credentials,
    /// Set by `Hello`.
    pub channel: Option<ChannelId>,
    /// A channel of the previous server, whose ring its `Hello` has brought.
    pub inherits: Option<ChannelId>,
    /// As shown by `ShowRight`.
    pub right: PortRight,
    /// `Hello` was received, and not answered yet.
    pub is_registering: bool,
    /// Its user's requests have used up their share of the time.
    pub is_throttled: bool,
    /// Replies that it has not read.
    pub waiting: VecDeque<PendingReply>,
    /// Lists whose next part follows when those are read.
    pub lists: VecDeque<OutgoingList>,
    /// As the poller has it.
    pub watched: EventFlags,
    pub _charge: Charge,
}

/// A reply on its way.
#[derive(Debug)]
pub(crate) struct PendingReply {
    pub message: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// The server may have no other copy of what it brings, whose last close may be its own.
    pub may_be_last: bool,
}

/// Bytes of a list in one reply: several fit into a socket's buffer.
const PART: usize = 32 << 10;

/// A list that goes to its client in parts.
#[derive(Debug)]
pub(crate) struct OutgoingList {
    pub request: u32,
    pub bytes: Vec<u8>,
    pub sent: usize,
    pub body: fn(ListPart) -> ReplyBody,
    pub _charge: Charge,
}

impl OutgoingList {
    /// Returns the reply with the next part, and whether it is the last.
    fn next(&mut self) -> (PendingReply, bool) {
        let rest = &self.bytes[self.sent..];
        let bytes = rest[..rest.len().min(PART)].to_vec();
        self.sent += bytes.len();
        let is_last = self.sent == self.bytes.len();
        let body = (self.body)(ListPart { bytes, is_last });
        let reply = PendingReply {
            message: encode(&Reply {
                id: self.request,
                body,
            }),
            fds: Vec::new(),
            may_be_last: false,
        };
        (reply, is_last)
    }
}

impl Client {
    /// Queues the next part of a list, if nothing else is queued.
    pub(crate) fn continue_list(&mut self) {
        if self.waiting.is_empty()
            && let Some(list) = self.lists.front_mut()
        {
            let (part, is_last) = list.next();
            self.waiting.push_back(part);
            if is_last {
                self.lists.pop_front();
            }
        }
    }

    /// A client that does not read its replies is not read either.
    pub(crate) fn interest(&self) -> EventFlags {
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
pub(crate) struct Listing {
    pub client: ClientId,
    pub request: u32,
    /// Sessions still to be listed.
    pub ids: Vec<SessionId>,
    pub count: usize,
    pub bytes: Vec<u8>,
    pub charge: Charge,
}

impl Listing {
    /// Returns the bytes that it takes.
    pub(crate) fn size(&self) -> u64 {
        let ids = self.ids.len() * size_of::<SessionId>();
        (ids + self.bytes.len()) as u64
    }
}

/// At most one per connection.
#[derive(Debug, Default)]
pub(crate) struct Listings(pub VecDeque<Listing>);

impl Listings {
    pub(crate) fn has(&self, client: ClientId) -> bool {
        self.0.iter().any(|listing| listing.client == client)
    }
}
