//! Connections of an earlier server's time, which processes or nobody holds.

use portolan_proto::control::{HandshakeOptions, Reuse};
use portolan_types::{ChannelId, FlowKey, Generation, Instant, Protocol, SessionId, Slot};

use crate::control::{Control, Effects};
use crate::errno::Errno;
use crate::ports::{ClaimError, ClaimId, PortClaim};
use crate::session::{Holder, Life, Opening};

#[cfg(test)]
mod tests;

/// A connection that a process holds, as its row says.
#[derive(Clone, Copy, Debug)]
pub struct Adopted {
    pub id: SessionId,
    pub flow: FlowKey,
    pub slot: Slot,
    pub generation: Generation,
    pub reuse: Reuse,
    pub v6_only: bool,
    pub options: HandshakeOptions,
}

impl Control {
    /// Enters a connection that the process on `channel` holds, under its old number. `cookie` is the socket cookie of the
    /// new descriptor's near end.
    pub fn adopt(
        &mut self,
        channel: ChannelId,
        adopted: Adopted,
        cookie: u64,
    ) -> Result<SessionId, Errno> {
        let id = adopted.id;
        if id.0 == 0 || self.registry.session(id).is_some() {
            return Err(Errno::INVAL);
        }
        let uid = self.registry.process(channel).ok_or(Errno::PERM)?.uid;
        self.registry.has_room(channel)?;
        let opening = Opening {
            reuse: adopted.reuse,
            v6_only: adopted.v6_only,
            cookie,
            flow_claim: Some(self.claim_flow(&adopted.flow, uid)?),
            ..opening_of(&adopted.flow, uid)
        };
        // Nobody has the number.
        let id = self.enter(Some(channel), opening, || id.0)?;
        if let Some(session) = self.registry.session_mut(id) {
            session.choose(&adopted.options);
        }
        let holder = Holder::Process(channel, adopted.slot);
        self.registry.adopt(id, holder, adopted.generation);
        Ok(id)
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

    fn claim_flow(&mut self, flow: &FlowKey, uid: u32) -> Result<ClaimId, Errno> {
        let claim = PortClaim {
            protocol: Protocol::Tcp,
            local: flow.local,
            reuse: Reuse::default(),
            v6_only: true,
            uid,
        };
        let adopted = self.ports.adopt(claim, flow.remote);
        adopted.map_err(ClaimError::errno)
    }
}

fn opening_of(flow: &FlowKey, uid: u32) -> Opening {
    Opening {
        life: Life::Connected,
        remote: Some(flow.remote),
        ..Opening::new(Protocol::Tcp, flow.local, uid)
    }
}
