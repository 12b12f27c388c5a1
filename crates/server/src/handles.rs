//! The server's descriptors for sessions: the far ends of their descriptors, the kernel sockets on their ports. They
//! are closed with the session.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use portolan_control::Charge;
use portolan_local::Local;
use portolan_proto::filter::BindingKey;
use portolan_types::{ChannelId, SessionId};

use crate::connections::rejoin::Rejoining;
use crate::local_ends::LocalEnd;
use crate::poll::Token;
use crate::reservation::PortReservation;

/// The far end of a descriptor, watched for its hang-up.
#[derive(Debug)]
pub(crate) struct DescriptorPeer {
    pub fd: OwnedFd,
    pub token: Token,
    /// Known to be open nowhere else.
    pub is_ours: bool,
    /// A child may write without a request: the server relays the session then (ADR 32).
    pub relays_writes: bool,
}

/// The kernel socket on a session's port.
#[derive(Debug)]
pub(crate) struct HeldPort {
    pub socket: PortReservation,
    /// Set while it is watched.
    pub token: Option<Token>,
    /// A program has it, too, and may have its lock for as long as it likes: threads make calls on it.
    pub is_shared: bool,
    /// It may be a member of groups, which its last close leaves.
    pub has_groups: bool,
    /// Whose it is, and which port.
    pub owner: (u32, u16),
    /// Of a listener: bound to the same port, and for its program to listen on when there is no server. Nothing is read from it
    /// here, since the program decides whether that would block.
    pub token_socket: Option<OwnedFd>,
}

impl HeldPort {
    pub(crate) fn new(
        socket: PortReservation,
        token: Option<Token>,
        owner: (u32, u16),
    ) -> HeldPort {
        HeldPort {
            socket,
            token,
            is_shared: false,
            has_groups: false,
            owner,
            token_socket: None,
        }
    }
}

/// The rows of a listener whose flows are dealt.
#[derive(Debug)]
pub(crate) struct DealtRows {
    pub keys: Vec<BindingKey>,
    /// Processes that may send from the port.
    pub senders: HashSet<ChannelId>,
    /// For the buckets; given back when it is dropped.
    #[expect(dead_code, reason = "it is held")]
    pub charge: Charge,
}

/// The descriptors of one session.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    pub peer_end: Option<DescriptorPeer>,
    pub port: Option<HeldPort>,
    /// The near end, while processes that had the session under the previous server may still claim it.
    pub rejoining: Option<Rejoining>,
    /// Connections from the kernel that wait for room in a listener's descriptor.
    pub kernel_connections: VecDeque<(OwnedFd, SocketAddr)>,
    /// Of a listener whose flows are dealt.
    pub dealt: Option<DealtRows>,
    /// Its local end, if both ends are on this host.
    pub local: Option<Box<LocalEnd>>,
    /// Its own ring.
    pub ring: Option<ChannelId>,
    /// The pacing rate that its program has set, while the server limits it further.
    pub paced: Option<Option<u64>>,
}

/// The descriptors of all sessions.
#[derive(Debug, Default)]
pub(crate) struct HandleTable(HashMap<SessionId, Handles>);

impl HandleTable {
    pub(crate) fn of(&mut self, id: SessionId) -> &mut Handles {
        self.0.entry(id).or_default()
    }

    pub(crate) fn peer_end(&self, id: SessionId) -> Option<&DescriptorPeer> {
        self.0.get(&id)?.peer_end.as_ref()
    }

    pub(crate) fn take_peer_end(&mut self, id: SessionId) -> Option<DescriptorPeer> {
        self.0.get_mut(&id)?.peer_end.take()
    }

    pub(crate) fn port(&self, id: SessionId) -> Option<&HeldPort> {
        self.0.get(&id)?.port.as_ref()
    }

    pub(crate) fn port_mut(&mut self, id: SessionId) -> Option<&mut HeldPort> {
        self.0.get_mut(&id)?.port.as_mut()
    }

    pub(crate) fn take_port(&mut self, id: SessionId) -> Option<HeldPort> {
        self.0.get_mut(&id)?.port.take()
    }

    pub(crate) fn local(&self, id: SessionId) -> Option<&LocalEnd> {
        self.0.get(&id)?.local.as_deref()
    }

    pub(crate) fn local_mut(&mut self, id: SessionId) -> Option<&mut LocalEnd> {
        self.0.get_mut(&id)?.local.as_deref_mut()
    }

    /// Returns the end if the server relays it.
    pub(crate) fn watched(&mut self, id: SessionId) -> Option<&mut Local> {
        self.local_mut(id)?.watched.as_mut()
    }

    pub(crate) fn get_mut(&mut self, id: SessionId) -> Option<&mut Handles> {
        self.0.get_mut(&id)
    }

    pub(crate) fn ring(&self, id: SessionId) -> Option<ChannelId> {
        self.0.get(&id)?.ring
    }

    pub(crate) fn take_ring(&mut self, id: SessionId) -> Option<ChannelId> {
        self.0.get_mut(&id)?.ring.take()
    }

    pub(crate) fn is_paced(&self, id: SessionId) -> bool {
        self.0.get(&id).is_some_and(|it| it.paced.is_some())
    }

    pub(crate) fn take_paced(&mut self, id: SessionId) -> Option<Option<u64>> {
        self.0.get_mut(&id)?.paced.take()
    }

    pub(crate) fn remove(&mut self, id: SessionId) -> Option<Handles> {
        self.0.remove(&id)
    }
}

/// Work that waits for descriptors.
#[derive(Debug, Default)]
pub(crate) struct Shortage {
    /// The highest number seen: the kernel assigns the lowest free one.
    pub highest: u64,
    /// Listeners with connections that could not be offered.
    pub listeners: BTreeSet<SessionId>,
    /// No control connection is accepted.
    pub is_closed: bool,
    pub has_warned: bool,
}
