//! The port namespace: who holds which local endpoint, by Linux's rules for `SO_REUSEADDR`, `SO_REUSEPORT` and
//! `IPV6_V6ONLY`. Owns claims and the set of live flows; never opens a socket.
//!
//! A claim is *bound* (by `bind`), *listening*, a *flow* (a connection on the port), a flow that *lingers* (FIN-WAIT-2
//! without a user, or TIME-WAIT, of a connection without a holder), or *held back* (for a time after a process died).
//! One port may carry many claims.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use portolan_proto::control::Reuse;
use portolan_types::{FlowKey, Instant, Protocol, canonical};

use crate::errno::Errno;

mod used;

#[cfg(test)]
mod tests;

use used::UsedPorts;

/// A request for a local endpoint. Port 0 asks for an ephemeral one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortClaim {
    pub protocol: Protocol,
    pub local: SocketAddr,
    pub reuse: Reuse,
    pub v6_only: bool,
    pub uid: u32,
}

impl PortClaim {
    /// Whether whoever may have this may have `other`, too: the same port and protocol, at the same address or one that
    /// this one includes.
    pub fn covers(&self, other: &PortClaim) -> bool {
        let (own, other_local) = (canonical(self.local), canonical(other.local));
        let is_included = match (own.ip(), other_local.ip()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => own.is_unspecified() || own == other,
            (IpAddr::V6(own), IpAddr::V6(address)) if own.is_unspecified() => {
                !(self.v6_only && address.is_unspecified()) || other.v6_only
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => own == other,
            (IpAddr::V6(own), IpAddr::V4(_)) => own.is_unspecified() && !self.v6_only,
            (IpAddr::V4(_), IpAddr::V6(_)) => false,
        };
        is_included && own.port() == other_local.port() && self.protocol == other.protocol
    }
}

/// Identifies a granted claim until it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId(u64);

/// Why a local endpoint is not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    #[error("the local endpoint is in use")]
    InUse,
    #[error("no ephemeral port is free")]
    Exhausted,
    #[error("the connection exists already")]
    FlowExists,
}

impl ClaimError {
    /// Returns the errno that `bind`, `listen` and `connect` of Linux return.
    pub fn errno(self) -> Errno {
        match self {
            ClaimError::InUse => Errno::ADDRINUSE,
            ClaimError::Exhausted | ClaimError::FlowExists => Errno::ADDRNOTAVAIL,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Bound,
    Listening,
    Flow(SocketAddr),
    /// A connection of an earlier server's time, whose `bind` or listener may return to the port.
    Adopted(SocketAddr),
    /// Likewise, but its process has not named it yet.
    Expected(SocketAddr),
    Lingering {
        remote: SocketAddr,
        until: Instant,
    },
    HeldBack {
        remote: Option<SocketAddr>,
        until: Instant,
    },
}

impl Use {
    /// Returns the peer of a connection.
    fn remote(&self) -> Option<SocketAddr> {
        match *self {
            Use::Flow(remote)
            | Use::Adopted(remote)
            | Use::Expected(remote)
            | Use::Lingering { remote, .. } => Some(remote),
            Use::HeldBack { remote, .. } => remote,
            Use::Bound | Use::Listening => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct ClaimEntry {
    claim: PortClaim,
    usage: Use,
}

/// All claims of one network namespace.
#[derive(Debug)]
pub struct PortTable {
    ephemeral: RangeInclusive<u16>,
    ports: HashMap<(Protocol, u16), BTreeMap<ClaimId, ClaimEntry>>,
    /// The keys of `ports`.
    used: UsedPorts,
    index: HashMap<ClaimId, (Protocol, u16)>,
    flows: HashMap<FlowKey, ClaimId>,
    held: BTreeSet<(Instant, ClaimId)>,
    lingering: BTreeSet<(Instant, ClaimId)>,
    next: u64,
}

impl PortTable {
    pub fn new(ephemeral: RangeInclusive<u16>) -> PortTable {
        PortTable {
            ephemeral,
            ports: HashMap::new(),
            used: UsedPorts::default(),
            index: HashMap::new(),
            flows: HashMap::new(),
            held: BTreeSet::new(),
            lingering: BTreeSet::new(),
            next: 1,
        }
    }

    /// Grants `claim`; `random` chooses where the search for an ephemeral port starts.
    pub fn bind(
        &mut self,
        claim: PortClaim,
        random: u32,
    ) -> Result<(ClaimId, SocketAddr), ClaimError> {
        let claim = normalised(claim);
        if claim.local.port() != 0 {
            if self.conflicts(&claim, false, None) {
                return Err(ClaimError::InUse);
            }
            return Ok(self.grant(claim, Use::Bound));
        }
        // An ephemeral port is never shared, whatever the reuse flags say.
        let port = self.unused(claim.protocol, random).next();
        let port = port.ok_or(ClaimError::InUse)?;
        let mut candidate = claim;
        candidate.local.set_port(port);
        Ok(self.grant(candidate, Use::Bound))
    }

    /// Grants an ephemeral port for a connection to `remote`. A bound endpoint is never shared, but connections to
    /// different peers may share a port if there is no unused one: a later bind with `SO_REUSEADDR` must share with each of
    /// them. Both ends of a connection within the host are in the table: the other end of the last one on
    /// this port may still be closing.
    pub fn connect(
        &mut self,
        claim: PortClaim,
        remote: SocketAddr,
        random: u32,
    ) -> Result<(ClaimId, SocketAddr), ClaimError> {
        let mut candidate = normalised(claim);
        let mut is_possible = |port: &u16| {
            candidate.local.set_port(*port);
            let flow = flow_of(&candidate, remote);
            let mut flows = [flow, flow.reversed()].into_iter();
            !flows.any(|flow| self.flows.contains_key(&flow)) && !self.bound(&candidate)
        };
        let unused = self.unused(claim.protocol, random).find(&mut is_possible);
        let port = unused.or_else(|| self.search(random).find(is_possible));
        candidate.local.set_port(port.ok_or(ClaimError::Exhausted)?);
        Ok(self.grant(candidate, Use::Flow(remote)))
    }

    /// Records one more connection on a port that its listener or a `bind` holds. It replaces a lingering one (Linux's
    /// `tcp_twsk_unique` for a port that was chosen, and its SYN in TIME-WAIT).
    pub fn join(&mut self, claim: PortClaim, remote: SocketAddr) -> Result<ClaimId, ClaimError> {
        self.join_as(Use::Flow(remote), claim, remote)
    }

    /// Likewise for a connection that a peer opens: it has lost the one whose flow is held back.
    pub fn admit(&mut self, claim: PortClaim, remote: SocketAddr) -> Result<ClaimId, ClaimError> {
        let flow = flow_of(&normalised(claim), remote);
        self.release_flow(&flow, |usage| {
            matches!(usage, Use::HeldBack { .. } | Use::Expected(_))
        });
        self.join(claim, remote)
    }

    /// Keeps others from opening a connection of an earlier server's time, until it is adopted or no longer expected.
    pub fn expect(&mut self, claim: PortClaim, remote: SocketAddr) -> Result<(), ClaimError> {
        self.join_as(Use::Expected(remote), claim, remote)?;
        Ok(())
    }

    /// Nobody will name the connection.
    pub fn expect_no_longer(&mut self, flow: &FlowKey) {
        self.release_flow(flow, |usage| matches!(usage, Use::Expected(_)));
    }

    /// Records a connection of an earlier server's time.
    pub fn adopt(&mut self, claim: PortClaim, remote: SocketAddr) -> Result<ClaimId, ClaimError> {
        self.expect_no_longer(&flow_of(&normalised(claim), remote));
        self.join_as(Use::Adopted(remote), claim, remote)
    }

    fn release_flow(&mut self, flow: &FlowKey, is_over: impl Fn(Use) -> bool) {
        if let Some(&earlier) = self.flows.get(flow)
            && self
                .entry(earlier)
                .is_some_and(|entry| is_over(entry.usage))
        {
            self.release(earlier);
        }
    }

    fn join_as(
        &mut self,
        usage: Use,
        claim: PortClaim,
        remote: SocketAddr,
    ) -> Result<ClaimId, ClaimError> {
        let claim = normalised(claim);
        if let Some(&earlier) = self.flows.get(&flow_of(&claim, remote)) {
            match self.entry(earlier).map(|entry| entry.usage) {
                Some(Use::Lingering { .. }) => self.release(earlier),
                _ => return Err(ClaimError::FlowExists),
            }
        }
        Ok(self.grant(claim, usage).0)
    }

    /// Turns a bound claim into a listening one (`inet_csk_listen_start`: the port is checked
    /// again, now against other listeners).
    pub fn listen(&mut self, id: ClaimId) -> Result<(), ClaimError> {
        let Some(entry) = self.entry(id).copied() else {
            return Err(ClaimError::InUse);
        };
        if self.conflicts(&entry.claim, true, Some(id)) {
            return Err(ClaimError::InUse);
        }
        if let Some(entry) = self.entry_mut(id) {
            entry.usage = Use::Listening;
        }
        Ok(())
    }

    /// Turns a listening claim into a bound one.
    pub fn stop_listening(&mut self, id: ClaimId) {
        if let Some(entry) = self.entry_mut(id)
            && entry.usage == Use::Listening
        {
            entry.usage = Use::Bound;
        }
    }

    /// Frees a claim at once.
    pub fn release(&mut self, id: ClaimId) {
        let Some(key) = self.index.remove(&id) else {
            return;
        };
        let Some(entries) = self.ports.get_mut(&key) else {
            return;
        };
        let Some(entry) = entries.remove(&id) else {
            return;
        };
        if entries.is_empty() {
            self.ports.remove(&key);
            self.used.remove(key);
        }
        match entry.usage {
            Use::HeldBack { until, .. } => self.held.remove(&(until, id)),
            Use::Lingering { until, .. } => self.lingering.remove(&(until, id)),
            Use::Bound | Use::Listening | Use::Flow(_) | Use::Adopted(_) | Use::Expected(_) => {
                false
            }
        };
        if let Some(remote) = entry.usage.remote() {
            self.flows.remove(&flow_of(&entry.claim, remote));
        }
    }

    /// Holds a claim's port back from reuse until `until`: only a bind with `SO_REUSEADDR` gets it, and no connection
    /// to the same peer.
    pub fn hold_back(&mut self, id: ClaimId, until: Instant) {
        let Some(entry) = self.entry_mut(id) else {
            return;
        };
        let remote = match entry.usage {
            Use::Flow(remote) | Use::Adopted(remote) => Some(remote),
            Use::Bound | Use::Listening => None,
            Use::HeldBack { .. } | Use::Lingering { .. } | Use::Expected(_) => return,
        };
        entry.usage = Use::HeldBack { remote, until };
        self.held.insert((until, id));
    }

    /// Keeps the claim of a closed connection until `until`, or extends it if it lingers already: a `bind` shares the
    /// port as with a live connection, and a connection to the same peer from a chosen port replaces it. Returns true
    /// if there were more than `most` and the next to expire was evicted.
    pub fn linger(&mut self, id: ClaimId, until: Instant, most: usize) -> bool {
        let Some(entry) = self.entry_mut(id) else {
            return false;
        };
        let (remote, before) = match entry.usage {
            Use::Flow(remote) | Use::Adopted(remote) => (remote, None),
            Use::Lingering { remote, until } => (remote, Some(until)),
            Use::Bound | Use::Listening | Use::HeldBack { .. } | Use::Expected(_) => return false,
        };
        entry.usage = Use::Lingering { remote, until };
        if let Some(before) = before {
            self.lingering.remove(&(before, id));
        }
        self.lingering.insert((until, id));
        if self.lingering.len() <= most {
            return false;
        }
        if let Some(&(_, first)) = self.lingering.first() {
            self.release(first);
        }
        true
    }

    /// Returns whether a connection to another peer could have the port of these claims if they were released.
    pub fn would_be_free_without(&self, claims: impl Iterator<Item = ClaimId>) -> bool {
        let released: Vec<ClaimId> = claims.collect();
        let key = released.first().and_then(|id| self.index.get(id));
        let entries = key.and_then(|key| self.ports.get(key));
        entries.is_some_and(|entries| {
            let mut kept = entries.iter().filter(|(id, _)| !released.contains(id));
            kept.all(|(_, entry)| entry.usage.remote().is_some())
        })
    }

    /// Returns the ports that are held back after the same user had bound them, to whichever address, the oldest first, each
    /// with the connections on it.
    pub fn held_back_of(
        &self,
        wanted: &PortClaim,
    ) -> impl Iterator<Item = (ClaimId, Vec<FlowKey>)> {
        let (protocol, uid) = (wanted.protocol, wanted.uid);
        self.held.iter().filter_map(move |&(_, id)| {
            let entries = self.ports.get(self.index.get(&id)?)?;
            let ClaimEntry { claim, usage } = entries.get(&id)?;
            let is_its_own = claim.protocol == protocol && claim.uid == uid;
            let was_bound = matches!(usage, Use::HeldBack { remote: None, .. });
            let others = entries.iter().filter(|(other, _)| **other != id);
            let flows = others.map(|(_, entry)| Some(flow_of(&entry.claim, entry.usage.remote()?)));
            let flows = flows.collect::<Option<_>>()?;
            (is_its_own && was_bound).then_some((id, flows))
        })
    }

    /// Grants a port again that is held back, and that has no connections.
    pub fn bind_again(
        &mut self,
        held: ClaimId,
        claim: &PortClaim,
    ) -> Option<(ClaimId, SocketAddr)> {
        let (_, port) = *self.index.get(&held)?;
        self.release(held);
        let mut claim = normalised(*claim);
        claim.local.set_port(port);
        Some(self.grant(claim, Use::Bound))
    }

    /// Returns the number of claims that are held back.
    pub fn held_back(&self) -> usize {
        self.held.len()
    }

    /// Returns the size of the ephemeral range.
    pub fn ephemeral(&self) -> usize {
        self.ephemeral.len()
    }

    /// Frees claims whose hold-back or lingering has expired. Returns when to call again.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        while let Some((until, id)) = self.next_to_expire()
            && until <= now
        {
            self.release(id);
        }
        self.next_expiry()
    }

    /// Returns when the next claim expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.next_to_expire().map(|(until, _)| until)
    }

    fn next_to_expire(&self) -> Option<(Instant, ClaimId)> {
        let first = [self.held.first(), self.lingering.first()];
        first.into_iter().flatten().min().copied()
    }

    pub fn claim(&self, id: ClaimId) -> Option<PortClaim> {
        self.entry(id).map(|entry| entry.claim)
    }

    /// Whether the user has `wanted` already.
    pub fn has(&self, wanted: &PortClaim) -> bool {
        let key = (wanted.protocol, wanted.local.port());
        let known = self.ports.get(&key);
        known.is_some_and(|entries| {
            let claims = entries.values().map(|entry| &entry.claim);
            let mut own = claims.filter(|claim| claim.uid == wanted.uid);
            own.any(|claim| claim.covers(wanted))
        })
    }

    pub fn len(&self) -> usize {
        self.index.len()
    }

    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    fn search(&self, random: u32) -> impl Iterator<Item = u16> + use<> {
        let first = u32::from(*self.ephemeral.start());
        let count = u32::from(*self.ephemeral.end()).saturating_sub(first) + 1;
        let start = random % count;
        // `first + count - 1` is a u16 by construction.
        (0..count).map(move |i| (first + (start + i) % count) as u16)
    }

    fn grant(&mut self, claim: PortClaim, usage: Use) -> (ClaimId, SocketAddr) {
        let id = ClaimId(self.next);
        self.next += 1;
        if let Some(remote) = usage.remote() {
            self.flows.insert(flow_of(&claim, remote), id);
        }
        let key = (claim.protocol, claim.local.port());
        self.ports
            .entry(key)
            .or_default()
            .insert(id, ClaimEntry { claim, usage });
        self.used.insert(key);
        self.index.insert(id, key);
        (id, claim.local)
    }

    /// Returns the ephemeral ports without any claim.
    fn unused(&self, protocol: Protocol, random: u32) -> impl Iterator<Item = u16> {
        let (first, last) = (*self.ephemeral.start(), *self.ephemeral.end());
        let start = self.search(random).next().unwrap_or(first);
        let above = self.used.unused(protocol, start..=last);
        above.chain(self.used.unused(protocol, first..=start))
    }

    /// Returns whether the port is held by anything but connections.
    fn bound(&self, claim: &PortClaim) -> bool {
        let key = (claim.protocol, claim.local.port());
        self.ports.get(&key).is_some_and(|entries| {
            entries
                .values()
                .any(|entry| entry.usage.remote().is_none() && overlap(claim, &entry.claim))
        })
    }

    fn conflicts(&self, claim: &PortClaim, listening: bool, except: Option<ClaimId>) -> bool {
        let key = (claim.protocol, claim.local.port());
        self.ports.get(&key).is_some_and(|entries| {
            entries.iter().any(|(id, entry)| {
                Some(*id) != except
                    && overlap(claim, &entry.claim)
                    && !may_share(claim, entry, listening)
            })
        })
    }

    fn entry(&self, id: ClaimId) -> Option<&ClaimEntry> {
        self.ports.get(self.index.get(&id)?)?.get(&id)
    }

    fn entry_mut(&mut self, id: ClaimId) -> Option<&mut ClaimEntry> {
        self.ports.get_mut(self.index.get(&id)?)?.get_mut(&id)
    }
}

/// `inet_csk_bind_conflict` and `inet_rcv_saddr_equal` of Linux, for claims that overlap.
fn may_share(new: &PortClaim, old: &ClaimEntry, listening: bool) -> bool {
    if new.reuse.port && old.claim.reuse.port && new.uid == old.claim.uid {
        return true;
    }
    match old.usage {
        // What lingers after a lease is the user's own.
        Use::HeldBack { remote: None, .. } if new.uid == old.claim.uid => true,
        Use::HeldBack { .. } => new.reuse.address || listening,
        // The process whose it was may bind again before it names the connection, as another user than the one that has it.
        Use::Expected(_) => true,
        Use::Adopted(_) => new.reuse.address || listening || new.uid == old.claim.uid,
        Use::Listening if new.protocol == Protocol::Tcp => false,
        Use::Flow(_) | Use::Lingering { .. } | Use::Bound | Use::Listening => {
            new.reuse.address && old.claim.reuse.address
        }
    }
}

fn overlap(a: &PortClaim, b: &PortClaim) -> bool {
    match (a.local.ip(), b.local.ip()) {
        (IpAddr::V4(x), IpAddr::V4(y)) => x == y || x.is_unspecified() || y.is_unspecified(),
        (IpAddr::V6(x), IpAddr::V6(y)) => x == y || x.is_unspecified() || y.is_unspecified(),
        (IpAddr::V4(_), IpAddr::V6(y)) => y.is_unspecified() && !b.v6_only,
        (IpAddr::V6(x), IpAddr::V4(_)) => x.is_unspecified() && !a.v6_only,
    }
}

fn normalised(claim: PortClaim) -> PortClaim {
    PortClaim {
        local: canonical(claim.local),
        ..claim
    }
}

fn flow_of(claim: &PortClaim, remote: SocketAddr) -> FlowKey {
    FlowKey {
        protocol: claim.protocol,
        local: claim.local,
        remote,
    }
}
