//! Descriptors of the server's for sessions: their far ends, the kernel's sockets on their ports. They go with the
//! session.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use portolan_types::SessionId;

use crate::poll::Token;
use crate::reservation::PortReservation;

/// The far end of a descriptor, watched for its hang-up.
#[derive(Debug)]
pub struct DescriptorPeer {
    pub fd: OwnedFd,
    pub token: Token,
}

/// The kernel's socket on a session's port.
#[derive(Debug)]
pub struct HeldPort {
    pub socket: PortReservation,
    /// While it is watched.
    pub token: Option<Token>,
}

/// Those of one session.
#[derive(Debug, Default)]
pub struct Handles {
    pub peer_end: Option<DescriptorPeer>,
    pub port: Option<HeldPort>,
    /// Connections from the kernel that wait for room in a listener's descriptor.
    pub kernel_connections: VecDeque<(OwnedFd, SocketAddr)>,
}

/// Those of all sessions.
#[derive(Debug, Default)]
pub struct HandleTable(HashMap<SessionId, Handles>);

impl HandleTable {
    pub fn of(&mut self, id: SessionId) -> &mut Handles {
        self.0.entry(id).or_default()
    }

    pub fn peer_end(&self, id: SessionId) -> Option<&DescriptorPeer> {
        self.0.get(&id)?.peer_end.as_ref()
    }

    pub fn take_peer_end(&mut self, id: SessionId) -> Option<DescriptorPeer> {
        self.0.get_mut(&id)?.peer_end.take()
    }

    pub fn port(&self, id: SessionId) -> Option<&HeldPort> {
        self.0.get(&id)?.port.as_ref()
    }

    pub fn port_mut(&mut self, id: SessionId) -> Option<&mut HeldPort> {
        self.0.get_mut(&id)?.port.as_mut()
    }

    pub fn take_port(&mut self, id: SessionId) -> Option<HeldPort> {
        self.0.get_mut(&id)?.port.take()
    }

    pub fn remove(&mut self, id: SessionId) -> Option<Handles> {
        self.0.remove(&id)
    }
}
