//! Where an open leads, from which endpoint, which session results, and what a failed open leaves behind.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use portolan_proto::control::KernelReason;
use portolan_proto::metastate::RouteKind;
use portolan_stack::{Path, Routes};
use portolan_types::{
    ChannelId, FlowKey, Instant, Protocol, SessionId, is_scoped, scope_of, scoped,
};

use crate::control::{Control, Effect, Effects};
use crate::errno::Errno;
use crate::legality::SessionPhase;
use crate::ports::{ClaimError, ClaimId, PortClaim};
use crate::session::{Holder, Life, Opening, SessionEntry};
use crate::sharing::any_of;
use crate::timer::Deadline;

#[cfg(test)]
mod tests;

/// Why a call does not result in a Portolan session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    Kernel(KernelReason),
    Error(Errno),
}

impl From<Errno> for Fallback {
    fn from(errno: Errno) -> Fallback {
        Fallback::Error(errno)
    }
}

impl From<KernelReason> for Fallback {
    fn from(reason: KernelReason) -> Fallback {
        Fallback::Kernel(reason)
    }
}

/// Where an active open leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To a Portolan listener, without leaving the host.
    WithinHost(LocalPeer),
    Network(Path),
}

/// A local address of this host that is to be reached, and the path to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalPeer {
    pub remote: SocketAddr,
    pub path: Path,
    /// The listener accepts data with the SYN (`TCP_FASTOPEN`).
    pub opens_fast: bool,
}

impl Control {
    /// Returns where an open to `remote` leads. `known` may be bound; `hash` chooses among listeners that share a port.
    pub fn way_to(
        &self,
        routes: &Routes,
        (protocol, remote): (Protocol, SocketAddr),
        known: Option<SessionId>,
        hash: impl Fn(&FlowKey, SessionId) -> u64,
    ) -> Result<Way, Fallback> {
        let bound = known.and_then(|id| self.registry.session(id));
        let bound = bound.map(|session| session.local.ip());
        let within = match protocol {
            Protocol::Tcp => self.local_peer(routes, remote, bound, hash),
            Protocol::Udp => None,
        };
        match within {
            Some(local_peer) => Ok(Way::WithinHost(local_peer)),
            None => path_to(routes, remote, bound).map(Way::Network),
        }
    }

    fn local_peer(
        &self,
        routes: &Routes,
        remote: SocketAddr,
        bound: Option<IpAddr>,
        hash: impl Fn(&FlowKey, SessionId) -> u64,
    ) -> Option<LocalPeer> {
        let remote = match scope_of(remote) {
            0 => SocketAddr::new(reached(remote.ip()), remote.port()),
            _ => remote,
        };
        let path = path_within(routes, remote, bound)?;
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: remote,
            remote: SocketAddr::new(path.source?, 0),
        };
        let listener = self.listeners.choose(&flow, |id| hash(&flow, id))?;
        let queue = self
            .registry
            .listener(listener)?
            .opens
            .options
            .fast_open_queue;
        Some(LocalPeer {
            remote,
            path,
            opens_fast: queue.is_some_and(|queue| queue > 0),
        })
    }

    /// Chooses source address and port for a TCP session to `remote`, and enters the connection in the port table. If
    /// that fails, a TIME-WAIT between the two hosts is reused if it is old enough.
    pub fn choose_source(
        &mut self,
        id: SessionId,
        (remote, path): (SocketAddr, &Path),
        (random, now): (u32, Instant),
        out: &mut Effects,
    ) -> Result<SocketAddr, Errno> {
        let session = self.registry.session(id).ok_or(Errno::BADF)?;
        let mut claim = session.port_claim();
        if claim.local.ip().is_unspecified() {
            let source = path.source.ok_or(Errno::ADDRNOTAVAIL)?;
            claim.local = scoped(source, claim.local.port(), path.interface);
        }
        if claim.local.is_ipv4() != remote.is_ipv4() {
            return Err(Errno::AFNOSUPPORT);
        }
        let mut joined = self.join_port(claim, remote, random);
        if joined.is_err()
            && let Some(old) = self.reusable_time_wait(claim.local, remote, now)
        {
            self.release_claims(old);
            out.push(Effect::Forget(old));
            joined = self.join_port(claim, remote, random);
        }
        let (claim_id, local) = joined.map_err(ClaimError::errno)?;
        if let Some(session) = self.registry.session_mut(id) {
            session.flow_claim = Some(claim_id);
        }
        Ok(local)
    }

    fn join_port(
        &mut self,
        claim: PortClaim,
        remote: SocketAddr,
        random: u32,
    ) -> Result<(ClaimId, SocketAddr), ClaimError> {
        if claim.local.port() == 0 {
            return self.ports.connect(claim, remote, random);
        }
        let id = self.ports.join(claim, remote)?;
        Ok((id, claim.local))
    }

    pub(crate) fn release_claims(&mut self, id: SessionId) {
        let claims = self.registry.session_mut(id).map(SessionEntry::take_claims);
        for claim in claims.into_iter().flatten() {
            self.ports.release(claim);
        }
    }

    /// Enters a session of a process or of a listener; on failure its claims are released.
    pub fn enter(
        &mut self,
        owner: Option<ChannelId>,
        opening: Opening,
        random: impl FnMut() -> u64,
    ) -> Result<SessionId, Errno> {
        let claims = opening.claims();
        let entered = self.registry.open(owner, opening, random);
        entered.inspect_err(|_| claims.for_each(|claim| self.ports.release(claim)))
    }

    /// Enters the session of a connection on the port of a listener or of a lease, which is charged to its user.
    pub fn enter_for(
        &mut self,
        listener: SessionId,
        flow: &FlowKey,
        life: Life,
        random: impl FnMut() -> u64,
    ) -> Result<SessionId, Errno> {
        let parent = self.registry.session(listener);
        let parent = parent.ok_or(Errno::CONNREFUSED)?;
        let is_accepted = parent.phase() == SessionPhase::Listening;
        let mut opening = Opening {
            life,
            remote: Some(flow.remote),
            reuse: parent.reuse,
            v6_only: parent.v6_only,
            listener: is_accepted.then_some(listener),
            ..Opening::new(Protocol::Tcp, flow.local, parent.uid)
        };
        let claim = PortClaim {
            local: flow.local,
            ..self.claim_of(listener).ok_or(Errno::CONNREFUSED)?
        };
        let joined = self.ports.admit(claim, flow.remote);
        opening.flow_claim = Some(joined.map_err(ClaimError::errno)?);
        let options = self.registry.listener(listener).map(|it| it.opens.options);
        let id = self.enter(None, opening, random)?;
        if let (Some(session), Some(options)) = (self.registry.session_mut(id), options) {
            session.choose(&options);
        }
        Ok(id)
    }

    /// Returns the claim of a session, for connections that join its port.
    pub fn claim_of(&self, id: SessionId) -> Option<PortClaim> {
        self.ports.claim(self.registry.session(id)?.claim?)
    }

    /// Returns a session whose open failed to its state before `connect`.
    pub(crate) fn on_open_failed(&mut self, id: SessionId, out: &mut Effects) {
        self.vacate(id, out);
        let bound = self.claim_of(id);
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        let any = SocketAddr::new(any_of(session.local.ip()), 0);
        session.local = bound.map_or(any, |claim| claim.local);
        session.remote = None;
        session.life = Life::Bound;
        if let Some(claim) = session.flow_claim.take() {
            self.ports.release(claim);
        }
        self.give_up_unchosen_port(id, out);
    }

    pub(crate) fn on_stopped_listening(&mut self, id: SessionId, out: &mut Effects) {
        if let Some(claim) = self.registry.session(id).and_then(|session| session.claim) {
            self.ports.stop_listening(claim);
        }
        self.disarm(id, Deadline::PortTransition);
        self.registry.release_bindings(id);
        out.push(Effect::EndExtensions(id));
        self.give_up_unchosen_port(id, out);
    }

    /// As in Linux, a socket that is disconnected or stops listening keeps its address, but its port only if the
    /// program chose it (`SOCK_BINDPORT_LOCK`).
    fn give_up_unchosen_port(&mut self, id: SessionId, out: &mut Effects) {
        let session = self.registry.session_mut(id);
        let Some(session) = session.filter(|session| !session.has_chosen_port) else {
            return;
        };
        session.local.set_port(0);
        if let Some(claim) = session.claim.take() {
            self.ports.release(claim);
            out.push(Effect::ReleasePort(id));
        }
    }

    /// Counts a call that falls back to the kernel. Returns the session whose port goes to the kernel, too, except a
    /// UDP session held by its process: there the library decides when.
    pub fn fall_back(
        &mut self,
        reason: KernelReason,
        known: Option<SessionId>,
    ) -> Option<SessionId> {
        self.counters.use_kernel(reason);
        let session = self.registry.session(known?)?;
        let is_left_by_library =
            session.protocol == Protocol::Udp && matches!(session.holder, Holder::Process(..));
        (!is_left_by_library).then_some(session.id)
    }
}

/// Checks whether a Portolan session may have this local address.
pub fn check_local(routes: &Routes, protocol: Protocol, local: SocketAddr) -> Result<(), Fallback> {
    let address = local.ip();
    if is_scoped(address) && scope_of(local) == 0 {
        return Err(Errno::INVAL.into());
    }
    if address.is_unspecified() {
        return Ok(());
    }
    if address.is_loopback() {
        return match protocol {
            Protocol::Tcp if routes.path(address).is_ok() => Ok(()),
            Protocol::Tcp | Protocol::Udp => Err(KernelReason::LocalAddress.into()),
        };
    }
    let is_for_many = address.is_multicast() || routes.is_broadcast(address);
    match protocol {
        // A socket bound to a group receives that group only (the kernel socket is bound likewise).
        Protocol::Udp if is_for_many => return Ok(()),
        Protocol::Tcp if is_for_many => return Err(KernelReason::NotUnicast.into()),
        Protocol::Udp | Protocol::Tcp => {}
    }
    match routes.serves(address) {
        Some(true) => Ok(()),
        Some(false) => Err(KernelReason::UnmanagedDevice.into()),
        None => Err(Errno::ADDRNOTAVAIL.into()),
    }
}

/// Returns the path to `remote` through a managed device. The session may be bound to an address of one.
fn path_to(routes: &Routes, remote: SocketAddr, bound: Option<IpAddr>) -> Result<Path, Fallback> {
    let scope = scope_of(remote);
    let remote = remote.ip();
    // As in Linux, a link-local peer needs a scope.
    if is_scoped(remote) && scope == 0 {
        return Err(Errno::INVAL.into());
    }
    if remote.is_unspecified() || routes.is_local(remote) {
        return Err(KernelReason::LocalAddress.into());
    }
    if remote.is_multicast() || remote == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Err(KernelReason::NotUnicast.into());
    }
    let path = routes.path_in(remote, scope);
    let path = path.map_err(|_| Fallback::Kernel(KernelReason::NoRoute))?;
    match path.kind {
        RouteKind::Unicast if path.managed => {}
        RouteKind::Unicast => return Err(KernelReason::UnmanagedDevice.into()),
        RouteKind::Local => return Err(KernelReason::LocalAddress.into()),
        RouteKind::Broadcast | RouteKind::Multicast => {
            return Err(KernelReason::NotUnicast.into());
        }
        RouteKind::Refuse => return Err(KernelReason::NoRoute.into()),
    }
    match bound {
        // The kernel knows the right error for that.
        Some(local) if local.is_loopback() => Err(KernelReason::LocalAddress.into()),
        Some(local) if !local.is_unspecified() && local.is_ipv4() != remote.is_ipv4() => {
            Err(Errno::AFNOSUPPORT.into())
        }
        _ => Ok(path),
    }
}

/// Returns the path to an address of this host.
fn path_within(routes: &Routes, remote: SocketAddr, bound: Option<IpAddr>) -> Option<Path> {
    if !routes.is_local(remote.ip()) {
        return None;
    }
    let path = routes.path_in(remote.ip(), scope_of(remote)).ok()?;
    let bound = bound.filter(|ip| !ip.is_unspecified());
    let source = bound.or(path.source).unwrap_or(remote.ip());
    let is_possible = path.kind == RouteKind::Local && source.is_ipv4() == remote.is_ipv4();
    is_possible.then_some(Path {
        source: Some(source),
        ..path
    })
}

/// As in Linux, the unspecified address means this host.
fn reached(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        address => address,
    }
}
