//! Sockets that share one local endpoint: which of them receives what, by Linux's rules, and an even
//! distribution of flows among `SO_REUSEPORT` sockets that moves as few flows as possible.

use std::collections::HashMap;
use std::hash::Hash;
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
    /// Returns its rows in the table of bindings, and whether each is only for sending.
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

/// Whether this is a multicast or the broadcast address: sockets bound to it send from another one.
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

/// Returns the receivers of unicast datagrams, of sockets in the order of their binds: the last
/// (Linux finds it first), with its whole `SO_REUSEPORT` group.
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

/// The owner of each bucket of flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deal<T> {
    buckets: Vec<T>,
}

impl<T> Default for Deal<T> {
    fn default() -> Deal<T> {
        Deal {
            buckets: Vec::new(),
        }
    }
}

impl<T: Copy + Eq + Hash> Deal<T> {
    /// Distributes all buckets evenly among `members`. A member that stays keeps its buckets, up to
    /// its new share: a leaving member gives up only its own.
    pub fn among(&mut self, members: &[T]) {
        if members.is_empty() {
            self.buckets.clear();
        } else {
            self.share_out(members, &[]);
        }
    }

    /// As [`Deal::among`], but for the buckets of `keepers`, which these keep.
    pub fn share_out(&mut self, members: &[T], keepers: &[T]) {
        if members.is_empty() {
            return;
        }
        let places: HashMap<T, usize> = members.iter().copied().zip(0..).collect();
        let kept = self.buckets.iter().filter(|owner| keepers.contains(owner));
        let count = SHARE_BUCKETS as usize - kept.count();
        let mut room = self.shares(&places, count);
        let mut buckets = vec![None; SHARE_BUCKETS as usize];
        for (bucket, owner) in buckets.iter_mut().zip(&self.buckets) {
            if keepers.contains(owner) {
                *bucket = Some(*owner);
            } else if let Some(&place) = places.get(owner)
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

    /// Returns how many of `count` buckets each member gets; the remainder goes to those that have most now.
    fn shares(&self, places: &HashMap<T, usize>, count: usize) -> Vec<usize> {
        let members = places.len();
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

    /// A deal of before.
    pub fn of(owner: impl Fn(u32) -> T) -> Deal<T> {
        Deal {
            buckets: (0..SHARE_BUCKETS).map(owner).collect(),
        }
    }

    /// All buckets of one owner become another's.
    pub fn give(&mut self, from: T, to: T) {
        for owner in self.buckets.iter_mut().filter(|owner| **owner == from) {
            *owner = to;
        }
    }

    /// Returns every bucket with its owner; nothing before the first deal.
    pub fn buckets(&self) -> impl Iterator<Item = (u32, T)> + '_ {
        (0..).zip(self.buckets.iter().copied())
    }
}
