//! A listener as the server knows it: its passive opens, whom they are for, and the process that performs its
//! handshakes, if one does (ADR 15).

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
    /// Where the port's segments go there.
    pub slot: Slot,
    /// As it said last.
    pub queue: AcceptQueue,
    /// It was asked to end it.
    pub is_wanted_back: bool,
}

/// Flows to a delegated listener of which the filter knows no rows.
#[derive(Debug, Default)]
pub struct ExemptFlows {
    pub flows: Vec<FlowKey>,
    /// There are others, which found no place: the filter must not answer for the listener.
    pub is_incomplete: bool,
}

#[derive(Debug)]
pub struct Listener {
    pub opens: PassiveOpen<SessionId>,
    /// Opens within the host that wait for room.
    pub(crate) local_opens: VecDeque<SessionId>,
    /// The descriptor's queue is full: we wait for room, and leave connections to the kernel.
    pub is_blocked: bool,
    /// Another process than the one that accepted it was the first to use the last connection.
    pub is_for_children: bool,
    /// Performs the handshakes; without one the server does.
    pub delegate: Option<Delegate>,
    /// Of the processes that do, or did.
    pub lent_secret: Option<Secret>,
    pub floods: FloodCounts,
    pub exempt: Option<ExemptFlows>,
}

impl Listener {
    pub fn new(backlog: u32) -> Listener {
        Listener {
            opens: PassiveOpen::new(HandshakeOptions::default(), backlog),
            local_opens: VecDeque::new(),
            is_blocked: false,
            is_for_children: false,
            delegate: None,
            lent_secret: None,
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
