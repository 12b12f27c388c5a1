//! Ports under lease (ADR 31): ephemeral ports from which a process opens connections itself. Nobody else uses such a
//! port, and it is held back for a time when the lease ends, since connections may linger there.

use std::net::{IpAddr, SocketAddr};

use portolan_proto::control::{LeasedPort, Reuse};
use portolan_types::{ChannelId, Generation, Instant, Protocol, SessionId, Slot};

use crate::control::{Control, Effect, Effects, HOLD_BACK};
use crate::errno::Errno;
use crate::ports::PortClaim;
use crate::session::{Holder, Life, Opening};
use portolan_proto::filter::BindingKey;

/// Maximum number of ports leased to a process at a time, and per request.
const MOST: usize = 512;

impl Control {
    /// Leases at most `wanted` ports of an address to a process. There may be none: half of the ephemeral ports are neither
    /// for leases nor held back after them.
    pub fn lease_ports(
        &mut self,
        (channel, slot): (ChannelId, Slot),
        local: IpAddr,
        wanted: usize,
        mut random: impl FnMut() -> u64,
    ) -> Result<Vec<LeasedPort>, Errno> {
        let process = self.registry.process(channel).ok_or(Errno::PERM)?;
        let uid = process.uid;
        let own = self.leases_of(channel).len();
        let taken = self.leased + self.ports.held_back();
        let left = (self.ports.ephemeral() / 2).saturating_sub(taken);
        let most = wanted.min(MOST.saturating_sub(own)).min(left);
        let mut ports = Vec::with_capacity(most);
        while ports.len() < most {
            let claim = PortClaim {
                protocol: Protocol::Tcp,
                local: SocketAddr::new(local, 0),
                reuse: Reuse::default(),
                v6_only: false,
                uid,
            };
            match self.lease_port((channel, slot), claim, &mut random) {
                Ok(port) => ports.push(port),
                Err(errno) if ports.is_empty() => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(ports)
    }

    fn lease_port(
        &mut self,
        (channel, slot): (ChannelId, Slot),
        claim: PortClaim,
        random: &mut impl FnMut() -> u64,
    ) -> Result<LeasedPort, Errno> {
        self.registry.has_room(channel)?;
        let taken = self.ports.bind(claim, random() as u32);
        let (claim_id, local) = taken.map_err(|error| error.errno())?;
        let opening = Opening {
            life: Life::Leased,
            claim: Some(claim_id),
            ..Opening::new(Protocol::Tcp, local, claim.uid)
        };
        let id = self.enter(Some(channel), opening, random)?;
        self.leased += 1;
        if let Err(errno) = self.registry.charge_bindings(id, 1) {
            // It has no row yet, and was of no use to anybody.
            self.forget(id, &mut Effects::new());
            return Err(errno);
        }
        let holder = Holder::Process(channel, slot);
        self.registry.adopt(id, holder, Generation::UNREGISTERED);
        Ok(LeasedPort {
            id,
            number: local.port(),
        })
    }

    /// Returns the ports that the process has under lease.
    pub fn leases_of(&self, channel: ChannelId) -> Vec<SessionId> {
        let held = self.registry.held_by(channel).into_iter();
        held.filter(|&id| self.is_lease(id)).collect()
    }

    pub fn is_lease(&self, id: SessionId) -> bool {
        let session = self.registry.session(id);
        session.is_some_and(|session| matches!(session.life, Life::Leased))
    }

    /// The lease, if the session is one, ends now.
    pub(crate) fn end_lease(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        if !self.is_lease(id) {
            return;
        }
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        out.push(Effect::CloseRows(vec![BindingKey::new(
            Protocol::Tcp,
            session.local,
        )]));
        if let Some(claim) = session.claim.take() {
            self.ports.hold_back(claim, now + HOLD_BACK);
            self.watch_ports();
        }
    }
}

#[cfg(test)]
mod tests;
