//! Connections of an earlier server's time, which processes or nobody holds.

use std::net::SocketAddr;

use portolan_proto::control::{Evidence, HandshakeOptions, Reuse};
use portolan_types::{ChannelId, FlowKey, Instant, Protocol, SessionId, Slot};
use serde::{Deserialize, Serialize};

use crate::control::{Control, Effects};
use crate::errno::Errno;
use crate::ports::{ClaimError, ClaimId, PortClaim};
use crate::session::{Holder, Life, Opening};

#[cfg(test)]
mod tests;

/// A connection that a process holds.
#[derive(Clone, Copy, Debug)]
pub struct Adopted {
    pub id: SessionId,
    pub flow: FlowKey,
    pub slot: Slot,
    pub evidence: Evidence,
    pub reuse: Reuse,
    pub v6_only: bool,
    pub options: HandshakeOptions,
}

/// Where the peer of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    WithinHost,
    Network,
}

/// A connection of the preceding server's time, apart from who held it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct HeldBefore {
    pub id: SessionId,
    pub flow: FlowKey,
    /// The listener it was accepted from.
    pub listener: Option<SessionId>,
    pub uid: u32,
    /// Socket cookie of its descriptor's near end.
    pub cookie: u64,
    pub reuse: Reuse,
    pub v6_only: bool,
    pub options: HandshakeOptions,
}

impl Control {
    /// Enters a connection that the preceding server held, under its old number, as one that nobody holds yet.
    pub fn enter_held(&mut self, held: HeldBefore, reach: Reach) -> Result<SessionId, Errno> {
        self.expect_free(held.id)?;
        let claim = self.claim_flow(&held.flow, held.uid)?;
        self.enter_of_before(None, (held, reach), Some(claim))
    }

    fn expect_free(&self, id: SessionId) -> Result<(), Errno> {
        match self.registry.session(id) {
            None if id != SessionId::NONE => Ok(()),
            _ => Err(Errno::INVAL),
        }
    }

    fn enter_of_before(
        &mut self,
        owner: Option<ChannelId>,
        (held, reach): (HeldBefore, Reach),
        flow_claim: Option<ClaimId>,
    ) -> Result<SessionId, Errno> {
        let opening = Opening {
            reuse: held.reuse,
            v6_only: held.v6_only,
            cookie: held.cookie,
            listener: held.listener,
            flow_claim,
            ..opening_of(&held.flow, held.uid)
        };
        // Nobody has the number.
        let id = self.enter(owner, opening, || held.id.0)?;
        if let Some(session) = self.registry.session_mut(id) {
            session.choose(&held.options);
            session.local_peer = (reach == Reach::WithinHost).then_some(SessionId::NONE);
        }
        Ok(id)
    }

    /// Enters a connection that the process on `channel` holds, under its old number. `cookie` is the socket cookie of the
    /// new descriptor's near end. A session within the host has no port: the process alone says which it was.
    pub fn adopt(
        &mut self,
        channel: ChannelId,
        adopted: Adopted,
        cookie: u64,
    ) -> Result<SessionId, Errno> {
        let uid = self.registry.process(channel).ok_or(Errno::PERM)?.uid;
        self.expect_free(adopted.id)?;
        self.registry.has_room(channel)?;
        let (reach, claim) = match adopted.evidence {
            Evidence::Row(_) => (Reach::Network, Some(self.claim_flow(&adopted.flow, uid)?)),
            Evidence::Memory(_) => (Reach::WithinHost, None),
        };
        let held = HeldBefore {
            id: adopted.id,
            flow: adopted.flow,
            listener: None,
            uid,
            cookie,
            reuse: adopted.reuse,
            v6_only: adopted.v6_only,
            options: adopted.options,
        };
        let id = self.enter_of_before(Some(channel), (held, reach), claim)?;
        let holder = Holder::Process(channel, adopted.slot);
        match adopted.evidence {
            Evidence::Row(generation) => self.registry.adopt(id, holder, generation),
            Evidence::Memory(_) => {
                self.registry.steer(id, holder);
            }
        }
        Ok(id)
    }

    /// Both ends of a session within the host are here again.
    pub fn pair_again(&mut self, one: SessionId, other: SessionId) {
        for (id, peer) in [(one, other), (other, one)] {
            if let Some(session) = self.registry.session_mut(id) {
                session.local_peer = Some(peer);
            }
        }
    }

    /// Resets a connection that no process has named: as after the death of its holder.
    pub fn abandon(
        &mut self,
        (flow, uid): (&FlowKey, u32),
        random: impl FnMut() -> u64,
        now: Instant,
    ) -> Result<Effects, Errno> {
        let opening = Opening {
            flow_claim: Some(self.claim_flow(flow, uid)?),
            ..opening_of(flow, uid)
        };
        let id = self.enter(None, opening, random)?;
        let mut effects = Effects::new();
        self.on_orphaned(id, now, &mut effects);
        Ok(effects)
    }

    /// Has nobody open a connection of an earlier server's time that its process may still name.
    pub fn expect(&mut self, flow: &FlowKey, uid: u32) {
        // Those that the server itself held are there already.
        let _ = self.ports.expect(claim_of(flow.local, uid), flow.remote);
    }

    pub fn expect_no_longer(&mut self, flow: &FlowKey) {
        self.ports.expect_no_longer(flow);
    }

    /// Holds a port back that a process had under lease: it may still have connections there that nobody knows.
    pub fn hold_lease_back(&mut self, local: SocketAddr, uid: u32, now: Instant) {
        // In use otherwise already: nobody gets it.
        if let Ok((claim, _)) = self.ports.bind(claim_of(local, uid), 0) {
            self.hold_port_back(claim, now);
        }
    }

    fn claim_flow(&mut self, flow: &FlowKey, uid: u32) -> Result<ClaimId, Errno> {
        let adopted = self.ports.adopt(claim_of(flow.local, uid), flow.remote);
        adopted.map_err(ClaimError::errno)
    }
}

fn claim_of(local: SocketAddr, uid: u32) -> PortClaim {
    PortClaim {
        protocol: Protocol::Tcp,
        local,
        reuse: Reuse::default(),
        v6_only: true,
        uid,
    }
}

fn opening_of(flow: &FlowKey, uid: u32) -> Opening {
    Opening {
        life: Life::Connected,
        remote: Some(flow.remote),
        ..Opening::new(Protocol::Tcp, flow.local, uid)
    }
}
