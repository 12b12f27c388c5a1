//! Sockets that share one local endpoint: who gets what comes to it, by Linux's rules, and an even
//! deal of flows among `SO_REUSEPORT` sockets that moves as few flows as it can.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use portolan_proto::control::Reuse;
use portolan_proto::filter::{BindingKey, SHARE_BUCKETS};
use portolan_types::{Protocol, SessionId};

use crate::session::SessionEntry;

#[cfg(test)]
mod tests;

/// Where a UDP session is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpEndpoint {
    pub local: SocketAddr,
    pub v6_only: bool,
}

impl From<&SessionEntry> for UdpEndpoint {
    fn from(session: &SessionEntry) -> UdpEndpoint {
        UdpEndpoint {
            local: session.local,
            v6_only: session.v6_only,
        }
    }
}

impl UdpEndpoint {
    /// The rows of the table of bindings that it has to do with, and whether it only sends from them.
    pub fn bindings(&self) -> Vec<(BindingKey, bool)> {
        let own = BindingKey::of(Protocol::Udp, self.local, self.v6_only);
        let mut keys: Vec<(BindingKey, bool)> = own.map(|key| (key, false)).collect();
        let address = self.local.ip();
        if is_for_many(address) {
            let any = SocketAddr::new(any_of(address), self.local.port());
            keys.push((BindingKey::new(Protocol::Udp, any), true));
        }
        keys
    }
}

/// Any address of the same family.
pub fn any_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// A multicast address, or one that ends in a way that only a broadcast address may: sockets bound
/// to it send from another.
fn is_for_many(address: IpAddr) -> bool {
    address.is_multicast() || matches!(address, IpAddr::V4(v4) if v4.is_broadcast())
}

/// One of the sockets bound to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharer {
    pub session: SessionId,
    pub reuse: Reuse,
    pub uid: u32,
}

/// Who gets unicast datagrams, of sockets in the order they were bound: the last (Linux finds it
/// first), with all of its `SO_REUSEPORT` group.
pub fn receivers(sharers: &[Sharer]) -> Vec<SessionId> {
    let Some(last) = sharers.last() else {
        return Vec::new();
    };
    if !last.reuse.port {
        return vec![last.session];
    }
    let is_of_group = |sharer: &&Sharer| sharer.reuse.port && sharer.uid == last.uid;
    sharers
        .iter()
        .filter(is_of_group)
        .map(|sharer| sharer.session)
        .collect()
}

/// Whose each bucket of flows is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deal {
    buckets: Vec<SessionId>,
}

impl Deal {
    /// Deals all buckets evenly to `members`. A member that stays keeps what it has, up to its new
    /// share: who goes leaves only his own buckets to others.
    pub fn among(&mut self, members: &[SessionId]) {
        let count = SHARE_BUCKETS as usize;
        if members.is_empty() {
            self.buckets.clear();
            return;
        }
        let places: HashMap<SessionId, usize> = members.iter().copied().zip(0..).collect();
        let mut room = self.shares(&places);
        let mut buckets = vec![None; count];
        for (bucket, owner) in buckets.iter_mut().zip(&self.buckets) {
            if let Some(&place) = places.get(owner)
                && room[place] > 0
            {
                room[place] -= 1;
                *bucket = Some(*owner);
            }
        }
        let mut free = members
            .iter()
            .zip(room)
            .flat_map(|(member, room)| std::iter::repeat_n(*member, room));
        self.buckets = buckets
            .into_iter()
            .filter_map(|owner| owner.or_else(|| free.next()))
            .collect();
    }

    /// How many buckets each member is to have: those that have more now get the odd ones.
    fn shares(&self, places: &HashMap<SessionId, usize>) -> Vec<usize> {
        let (count, members) = (SHARE_BUCKETS as usize, places.len());
        let mut held = vec![0_usize; members];
        for place in self.buckets.iter().filter_map(|owner| places.get(owner)) {
            held[*place] += 1;
        }
        let mut order: Vec<usize> = (0..members).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(held[place]));
        let mut shares = vec![count / members; members];
        for &place in order.iter().take(count % members) {
            shares[place] += 1;
        }
        shares
    }

    /// Every bucket with its owner; none if nothing is dealt.
    pub fn buckets(&self) -> impl Iterator<Item = (u32, SessionId)> + '_ {
        (0..).zip(self.buckets.iter().copied())
    }
}
