//! The server's record of a listener: its passive opens, the intended receivers of its connections, and the
//! process that its handshakes are delegated to, if any (ADR 15).

use std::collections::VecDeque;

use portolan_proto::control::{AcceptQueue, Caching, HandshakeOptions};
use portolan_proto::report::FloodCounts;
use portolan_stack::passive::PassiveOpen;
use portolan_tcp::isn::Secret;
use portolan_types::{ChannelId, FlowKey, SessionId, Slot};

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
#[derive(Debug, Default)]
pub struct ExemptFlows {
    pub flows: Vec<FlowKey>,
    /// There are others that found no room: the filter must not answer for the listener.
    pub is_incomplete: bool,
}

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
            secret,
            floods: FloodCounts::default(),
            exempt: None,
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
