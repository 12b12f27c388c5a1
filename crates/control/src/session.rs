//! The entry of one session, whoever holds it: its endpoints, who may use it, and its phase of life.
//! Data that only one phase needs is part of that phase and ends with it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use portolan_proto::control::{Delivery, HandshakeOptions, Reuse, SocketOptionsBlob};
use portolan_proto::report::SharedReason;
use portolan_types::{ChannelId, FlowKey, Generation, Instant, Protocol, SessionId, Slot};

use crate::budget::Charge;
use crate::legality::{Command, SessionPhase};
use crate::listener::Listener;
use crate::ports::{ClaimId, PortClaim};
use crate::recall::Recall;
use crate::relay::Relay;

/// Where a session's packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// Nowhere: it has no row in the filter.
    None,
    Server(Slot),
    Process(ChannelId, Slot),
}

/// A session's life, with the data of each phase. [`SessionPhase`] names the phases.
#[derive(Debug)]
pub enum Life {
    /// Has a local endpoint and no peer.
    Bound,
    /// A port from which its process opens connections itself.
    Leased,
    Listening(Box<Listener>),
    /// Given to that process when its handshake is done.
    Connecting {
        channel: ChannelId,
        slot: Slot,
    },
    /// Offered by its listener when data has arrived, or at `deferred_until`.
    Handshake {
        deferred_until: Option<Instant>,
    },
    /// In its listener's accept queue.
    Offered,
    /// Held by a process; TCP is connected, UDP has a peer.
    Connected,
    Relayed(Relay),
    /// Held by the server for the next process that asks for it.
    Parked,
    Closing(Closing),
}

impl Life {
    /// A handshake that waits for nothing else.
    pub fn handshake() -> Life {
        Life::Handshake {
            deferred_until: None,
        }
    }

    pub fn phase(&self) -> SessionPhase {
        match self {
            Life::Bound => SessionPhase::Bound,
            Life::Leased => SessionPhase::Leased,
            Life::Listening(_) => SessionPhase::Listening,
            Life::Connecting { .. } => SessionPhase::Connecting,
            Life::Handshake { .. } => SessionPhase::Handshake,
            Life::Offered => SessionPhase::Offered,
            Life::Connected => SessionPhase::Connected,
            Life::Relayed(_) => SessionPhase::Relayed,
            Life::Parked => SessionPhase::Parked,
            Life::Closing(_) => SessionPhase::Closing,
        }
    }
}

/// How the server finishes a session that no process has any more.
#[derive(Debug)]
pub enum Closing {
    /// The engine sends the rest; counted against its user as long as it is an orphan.
    Finishing(Option<Orphan>),
    TimeWait {
        since: Instant,
    },
    /// Its holder died with the sequence numbers: the peer must send them before it can be reset.
    Probing {
        tries: u32,
    },
}

/// A closed connection with bytes unsent, or with a peer that does not close.
#[derive(Debug)]
pub struct Orphan {
    pub(crate) age: u64,
    /// Unsent bytes at the last review.
    pub(crate) bytes: u64,
    pub(crate) _number: Charge,
    pub(crate) memory: Charge,
}

/// One session, whoever holds it.
#[derive(Debug)]
pub struct SessionEntry {
    pub id: SessionId,
    pub protocol: Protocol,
    pub life: Life,
    pub local: SocketAddr,
    pub remote: Option<SocketAddr>,
    pub reuse: Reuse,
    pub v6_only: bool,
    pub uid: u32,
    pub holder: Holder,
    pub generation: Generation,
    /// Its row in the filter's table of flows.
    pub(crate) row: Option<FlowKey>,
    /// Its connection has ended, and another session has the flow.
    pub is_flow_reused: bool,
    /// Where the server waits for the session while its holder makes the capsule.
    pub awaited: Option<(Slot, Generation)>,
    /// Since when, if it is awaited.
    pub awaited_since: Instant,
    /// Set while the session is recalled from its holder.
    pub recall: Option<Recall>,
    /// The other end, if both are on this host; [`SessionId::NONE`] if it is not known after a restart.
    pub local_peer: Option<SessionId>,
    /// The server has its end of the descriptor.
    pub has_descriptor: bool,
    /// Deadlines that were set, as bits.
    pub(crate) armed: u8,
    /// Claim of its own bind, if it has one.
    pub claim: Option<ClaimId>,
    /// The process chose the port of its bind: the port is kept when a connection fails or the listener stops.
    pub has_chosen_port: bool,
    /// Claim of its connection in the port table.
    pub flow_claim: Option<ClaimId>,
    /// Socket cookie of the descriptor's near end.
    pub cookie: u64,
    /// The listener it was accepted from.
    pub listener: Option<SessionId>,
    /// The process that accepted it.
    pub acceptor: Option<ChannelId>,
    /// How often it moved to a process or back.
    pub migrations: u32,
    /// How often it was recalled from a process.
    pub recalls: u32,
    /// As last reported by a library.
    pub options_blob: SocketOptionsBlob,
    /// How packets reach it, if it has chosen that.
    pub delivery: Option<Delivery>,
    /// `SO_PRIORITY`, or 0.
    pub priority: u8,
    /// Groups, each on one device.
    pub(crate) memberships: BTreeSet<(IpAddr, u32)>,
    /// Why it shares its process's ring against its wish.
    pub ring_refusal: Option<SharedReason>,
    /// The process charged for it: the first that opened or cached it.
    pub(crate) owner: Option<ChannelId>,
    /// Processes known to have its descriptor.
    pub(crate) users: BTreeSet<ChannelId>,
    /// Those of them that use the descriptor for I/O because they were told that it is relayed.
    pub(crate) relayed_to: BTreeSet<ChannelId>,
    /// Charge to its user's sessions; `None` in TIME-WAIT.
    pub(crate) charge: Option<Charge>,
    /// Charge for its rows in the table of bindings.
    pub(crate) bindings: Option<Charge>,
    /// While it listens: it takes as many descriptors as two sessions.
    pub(crate) listening: Option<Charge>,
}

impl SessionEntry {
    pub fn phase(&self) -> SessionPhase {
        self.life.phase()
    }

    pub fn flow(&self) -> Option<FlowKey> {
        self.remote.map(|remote| FlowKey {
            protocol: self.protocol,
            local: self.local,
            remote,
        })
    }

    /// Returns the claim for its port.
    pub fn port_claim(&self) -> PortClaim {
        PortClaim {
            protocol: self.protocol,
            local: self.local,
            reuse: self.reuse,
            v6_only: self.v6_only,
            uid: self.uid,
        }
    }

    /// Returns what it has of the port table.
    pub(crate) fn claims(&self) -> impl Iterator<Item = ClaimId> + use<> {
        self.claim.into_iter().chain(self.flow_claim)
    }

    pub(crate) fn take_claims(&mut self) -> impl Iterator<Item = ClaimId> + use<> {
        let claims = self.claims();
        (self.claim, self.flow_claim) = (None, None);
        claims
    }

    /// Returns its slot in the server's engine.
    pub fn server_slot(&self) -> Option<Slot> {
        match self.holder {
            Holder::Server(slot) => Some(slot),
            Holder::None | Holder::Process(..) => None,
        }
    }

    /// Returns whether both ends are on this host.
    pub fn is_local(&self) -> bool {
        self.local_peer.is_some()
    }

    pub fn owner(&self) -> Option<ChannelId> {
        self.owner
    }

    pub fn is_held_by(&self, channel: ChannelId) -> bool {
        matches!(self.holder, Holder::Process(holder, _) if holder == channel)
    }

    /// Returns its groups, each on one device.
    pub fn memberships(&self) -> impl Iterator<Item = (IpAddr, u32)> + '_ {
        self.memberships.iter().copied()
    }

    /// Returns whether `channel` has or had the descriptor.
    pub fn is_user(&self, channel: ChannelId) -> bool {
        self.users.contains(&channel)
    }

    /// Returns `asker` and the processes known to have had the descriptor that do not use it for I/O.
    pub fn idle_users(&self, asker: ChannelId) -> impl Iterator<Item = ChannelId> + '_ {
        let is_idle =
            move |&channel: &ChannelId| channel == asker || !self.relayed_to.contains(&channel);
        self.users.iter().copied().filter(is_idle)
    }

    /// Applies the options of an open, or of all connections to a listener.
    pub fn choose(&mut self, options: &HandshakeOptions) {
        self.delivery = options.delivery;
        self.set_priority(options.priority);
    }

    pub fn set_priority(&mut self, priority: u8) {
        self.priority = match priority {
            1..=HandshakeOptions::PRIORITY_MAX => priority,
            _ => 0,
        };
    }

    /// Returns whether it waits for data before it is offered.
    pub fn is_deferred(&self) -> bool {
        matches!(self.life, Life::Handshake { deferred_until } if deferred_until.is_some())
    }

    /// Begins to finish the session, unless that has begun already.
    pub(crate) fn begin_closing(&mut self) {
        if !self.is_closing() {
            self.life = Life::Closing(Closing::Finishing(None));
        }
    }

    /// Returns whether the server is finishing the session.
    pub fn is_closing(&self) -> bool {
        matches!(self.life, Life::Closing(_))
    }

    /// Returns whether its peer is being probed because its holder died with the sequence numbers.
    pub fn is_probing(&self) -> bool {
        matches!(self.life, Life::Closing(Closing::Probing { .. }))
    }

    pub(crate) fn may_be_named_by(&self, channel: ChannelId, command: Command) -> bool {
        match self.life {
            // Shared by fork or passed through a descriptor: knowing the number is the right.
            Life::Offered | Life::Relayed(_) | Life::Parked | Life::Listening(_) => true,
            // A process that has shown the descriptor may have it recalled.
            Life::Connected if command == Command::Cache => self.users.contains(&channel),
            Life::Bound => self.protocol == Protocol::Tcp || self.users.contains(&channel),
            Life::Connected | Life::Leased => self.is_held_by(channel),
            Life::Connecting { .. } => self.users.contains(&channel),
            Life::Handshake { .. } | Life::Closing(_) => false,
        }
    }
}

/// Initial values of a session.
#[derive(Debug)]
pub struct Opening {
    pub protocol: Protocol,
    pub life: Life,
    pub local: SocketAddr,
    pub remote: Option<SocketAddr>,
    pub reuse: Reuse,
    pub v6_only: bool,
    pub uid: u32,
    pub cookie: u64,
    pub claim: Option<ClaimId>,
    pub flow_claim: Option<ClaimId>,
    pub listener: Option<SessionId>,
}

impl Opening {
    /// Without a descriptor, a port or a peer.
    pub fn new(protocol: Protocol, local: SocketAddr, uid: u32) -> Opening {
        Opening {
            protocol,
            life: Life::Bound,
            local,
            remote: None,
            reuse: Reuse::default(),
            v6_only: false,
            uid,
            cookie: 0,
            claim: None,
            flow_claim: None,
            listener: None,
        }
    }

    pub fn claims(&self) -> impl Iterator<Item = ClaimId> + use<> {
        self.claim.into_iter().chain(self.flow_claim)
    }

    pub(crate) fn into_entry(self, id: SessionId, charge: Charge) -> SessionEntry {
        SessionEntry {
            id,
            protocol: self.protocol,
            life: self.life,
            local: self.local,
            remote: self.remote,
            reuse: self.reuse,
            v6_only: self.v6_only,
            uid: self.uid,
            holder: Holder::None,
            generation: Generation(0),
            row: None,
            is_flow_reused: false,
            awaited: None,
            awaited_since: Instant::ZERO,
            recall: None,
            local_peer: None,
            has_descriptor: false,
            armed: 0,
            claim: self.claim,
            has_chosen_port: false,
            flow_claim: self.flow_claim,
            cookie: self.cookie,
            listener: self.listener,
            acceptor: None,
            migrations: 0,
            recalls: 0,
            options_blob: SocketOptionsBlob::default(),
            delivery: None,
            priority: 0,
            memberships: BTreeSet::new(),
            ring_refusal: None,
            owner: None,
            users: BTreeSet::new(),
            relayed_to: BTreeSet::new(),
            charge: Some(charge),
            bindings: None,
            listening: None,
        }
    }
}
