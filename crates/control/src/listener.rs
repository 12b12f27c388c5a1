//! The server's record of a listener: its passive opens, the intended receivers of its connections, and the
//! process that its handshakes are delegated to, if any (ADR 15).

use std::collections::{BTreeSet, VecDeque};

use portolan_proto::control::{AcceptQueue, Caching, HandshakeOptions};
use portolan_proto::report::FloodCounts;
use portolan_stack::passive::PassiveOpen;
use portolan_tcp::isn::Secret;
use portolan_types::{ChannelId, FlowKey, Instant, SessionId, Slot};

use crate::performers::Performers;

/// The process that performs a listener's handshakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delegate {
    pub channel: ChannelId,
    /// The slot there that the port's segments go to.
    pub slot: Slot,
    /// As last reported by the process.
    pub queue: AcceptQueue,
    /// The process was asked to end the delegation.
    pub is_wanted_back: bool,
}

/// Flows to a delegated listener that have no row in the filter.
#[derive(Debug)]
pub struct ExemptFlows {
    pub flows: Vec<FlowKey>,
    /// When the last one was named. A report of a flood follows those that it exempts.
    pub named: Instant,
    /// There are others that found no room: the filter must not answer for the listener.
    pub is_incomplete: bool,
}

/// Processes noted that accept from one listener.
const ACCEPTORS: usize = 64;

#[derive(Debug)]
pub struct Listener {
    pub opens: PassiveOpen<SessionId>,
    /// Opens within the host that wait for room.
    pub(crate) local_opens: VecDeque<SessionId>,
    /// The descriptor's queue is full: the server waits for room, and leaves connections to the kernel.
    pub is_blocked: bool,
    /// The last connection was first used by another process than the one that accepted it.
    pub is_for_children: bool,
    /// Performs the handshakes; the server does if there is none.
    pub delegate: Option<Delegate>,
    /// Or each its part of them, if several processes have the listener.
    pub performers: Performers,
    /// Processes that have accepted connections from the server since the last deal.
    pub(crate) acceptors: BTreeSet<ChannelId>,
    /// Of its cookies, initial numbers and time stamps, also for the process that performs the handshakes.
    pub secret: Secret,
    pub floods: FloodCounts,
    pub exempt: Option<ExemptFlows>,
}

impl Listener {
    pub fn new(backlog: u32, secret: Secret) -> Listener {
        Listener {
            opens: PassiveOpen::new(HandshakeOptions::default(), backlog),
            local_opens: VecDeque::new(),
            is_blocked: false,
            is_for_children: false,
            delegate: None,
            performers: Performers::default(),
            acceptors: BTreeSet::new(),
            secret,
            floods: FloodCounts::default(),
            exempt: None,
        }
    }

    /// Returns who performs handshakes in place of the server.
    pub fn delegates(&self) -> impl Iterator<Item = (ChannelId, Slot)> + '_ {
        let sole = self.delegate.iter().map(|it| (it.channel, it.slot));
        let several = self.performers.members().iter();
        sole.chain(several.map(|it| (it.channel, it.slot)))
    }

    pub fn is_delegated(&self) -> bool {
        self.delegate.is_some() || !self.performers.is_empty()
    }

    /// Has the server, or a process that performs handshakes, room for more connections?
    pub(crate) fn has_room(&self) -> bool {
        let several = self.performers.members();
        match &self.delegate {
            Some(delegate) => delegate.queue == AcceptQueue::HasRoom,
            None if several.is_empty() => self.opens.queue.has_room(),
            None => several.iter().any(|it| it.queue == AcceptQueue::HasRoom),
        }
    }

    pub(crate) fn note_queue_of(&mut self, channel: ChannelId, queue: AcceptQueue) {
        match (&mut self.delegate, self.performers.member_mut(channel)) {
            (Some(delegate), _) => delegate.queue = queue,
            (None, Some(performer)) => performer.queue = queue,
            (None, None) => {}
        }
    }

    pub(crate) fn note_acceptor(&mut self, acceptor: Option<ChannelId>) {
        if self.acceptors.len() < ACCEPTORS {
            self.acceptors.extend(acceptor);
        }
    }

    pub fn caching(&self) -> Caching {
        let is_concurrent = self.opens.options.is_concurrent_server;
        if is_concurrent.unwrap_or(self.is_for_children) {
            Caching::WithFirstUse
        } else {
            Caching::WithAccept
        }
    }
}
