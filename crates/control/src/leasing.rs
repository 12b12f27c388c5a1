//! Ports under lease (ADR 31): ephemeral ports from which a process opens connections itself. Nobody else uses such a
//! port, and it is held back for a time when the lease ends, since connections may linger there.

use std::net::{IpAddr, SocketAddr};

use portolan_proto::control::{LeasedPort, Reuse};
use portolan_types::{ChannelId, FlowKey, Generation, Instant, Protocol, SessionId, Slot};

use crate::control::{Control, Effect, Effects, REUSE_AFTER};
use crate::errno::Errno;
use crate::ports::{ClaimId, PortClaim};
use crate::session::{Closing, Holder, Life, Opening};
use portolan_proto::filter::BindingKey;

/// Maximum number of ports leased by one request, which delays others for a few milliseconds.
const MOST: usize = 512;

/// The part of all ephemeral ports that one process may have under lease.
const SHARE: usize = 4;

impl Control {
    /// Leases at most `wanted` ports of an address to a process. There may be none: half of the ephemeral ports are neither
    /// for leases nor held back after them. A user gets the ports again that are held back after its own leases: its
    /// initial sequence numbers and timestamps go on.
    pub fn lease_ports(
        &mut self,
        (channel, slot): (ChannelId, Slot),
        local: IpAddr,
        wanted: usize,
        now: Instant,
        mut random: impl FnMut() -> u64,
        out: &mut Effects,
    ) -> Result<Vec<LeasedPort>, Errno> {
        let process = self.registry.process(channel).ok_or(Errno::PERM)?;
        let claim = PortClaim {
            protocol: Protocol::Tcp,
            local: SocketAddr::new(local, 0),
            reuse: Reuse::default(),
            v6_only: false,
            uid: process.uid,
        };
        let own = self.leases_of(channel).len();
        let taken = self.leased + self.ports.held_back();
        let left = (self.ports.ephemeral() / 2).saturating_sub(taken);
        let share = self.ports.ephemeral().div_ceil(SHARE).saturating_sub(own);
        let most = wanted.min(MOST).min(share);
        let mut again = self.bind_again(&claim, most.saturating_sub(left), now, out);
        let most = most.min(left + again.len());
        let mut ports = Vec::with_capacity(most);
        let mut outcome = Ok(());
        while ports.len() < most && outcome.is_ok() {
            let leased = self.registry.has_room(channel).and_then(|()| {
                let taken = match again.pop() {
                    Some(taken) => taken,
                    None => self
                        .ports
                        .bind(claim, random() as u32)
                        .map_err(|error| error.errno())?,
                };
                self.lease_port((channel, slot), claim.uid, taken, &mut random)
            });
            outcome = leased.map(|port| ports.push(port));
        }
        for (claim, _) in again {
            self.hold_port_back(claim, now);
        }
        match outcome {
            Err(errno) if ports.is_empty() => Err(errno),
            _ => Ok(ports),
        }
    }

    /// Claims ports that were under lease to the user before. Connections on them that are in TIME-WAIT, and old enough,
    /// end, as they would for a new connection to the same peer.
    fn bind_again(
        &mut self,
        claim: &PortClaim,
        most: usize,
        now: Instant,
        out: &mut Effects,
    ) -> Vec<(ClaimId, SocketAddr)> {
        let held = self.ports.held_back_of(claim);
        let former = held.filter_map(|(held, flows)| {
            let waiting = flows.iter().map(|flow| self.old_time_wait(flow, now));
            Some((held, waiting.collect::<Option<Vec<_>>>()?))
        });
        let former: Vec<_> = former.take(most).collect();
        let mut bound = Vec::with_capacity(former.len());
        for (held, waiting) in former {
            for id in waiting {
                self.release_claims(id);
                out.push(Effect::Forget(id));
            }
            bound.extend(self.ports.bind_again(held, claim));
        }
        bound
    }

    /// Returns the connection if it is in TIME-WAIT, and its ports may be used again.
    fn old_time_wait(&self, flow: &FlowKey, now: Instant) -> Option<SessionId> {
        let id = self.registry.by_flow(flow)?;
        match self.registry.session(id)?.life {
            Life::Closing(Closing::TimeWait { since }) if now.since(since) >= REUSE_AFTER => {
                Some(id)
            }
            _ => None,
        }
    }

    fn lease_port(
        &mut self,
        (channel, slot): (ChannelId, Slot),
        uid: u32,
        (claim, local): (ClaimId, SocketAddr),
        random: &mut impl FnMut() -> u64,
    ) -> Result<LeasedPort, Errno> {
        let opening = Opening {
            life: Life::Leased,
            claim: Some(claim),
            ..Opening::new(Protocol::Tcp, local, uid)
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
            self.hold_port_back(claim, now);
        }
    }
}

#[cfg(test)]
mod tests;
