//! Which sessions listen at which port, and which of several listeners gets a connection.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use portolan_proto::filter::BindingKey;
use portolan_types::{FlowKey, Protocol, SessionId};

/// Listeners by port.
#[derive(Debug, Default)]
pub struct ListenerTable(HashMap<u16, Vec<Endpoint>>);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint {
    pub(crate) id: SessionId,
    pub(crate) local: SocketAddr,
    pub(crate) v6_only: bool,
}

impl Endpoint {
    fn bindings(&self) -> impl Iterator<Item = BindingKey> + Clone {
        BindingKey::of(Protocol::Tcp, self.local, self.v6_only)
    }

    /// Returns whether it is bound to the unspecified address and accepts the flow's family.
    fn takes_any(&self, flow: &FlowKey) -> bool {
        let is_dual = self.local.is_ipv6() && !self.v6_only;
        self.local.ip().is_unspecified()
            && (self.local.is_ipv4() == flow.local.is_ipv4() || is_dual)
    }
}

impl ListenerTable {
    /// Adds a listener. Returns those that it shares its port with.
    pub(crate) fn open(&mut self, endpoint: Endpoint) -> Vec<SessionId> {
        let at_port = self.0.entry(endpoint.local.port()).or_default();
        let others = at_port.iter().map(|other| other.id).collect();
        at_port.push(endpoint);
        others
    }

    /// Removes a listener. Returns the bindings that no other listener has. A listener on loopback has none: no frame
    /// from a network is for it.
    pub(crate) fn close(&mut self, id: SessionId, port: u16) -> Vec<BindingKey> {
        let Some(at_port) = self.0.get_mut(&port) else {
            return Vec::new();
        };
        let Some(place) = at_port.iter().position(|endpoint| endpoint.id == id) else {
            return Vec::new();
        };
        let closed = at_port.remove(place);
        let kept: HashSet<BindingKey> = at_port.iter().flat_map(Endpoint::bindings).collect();
        if at_port.is_empty() {
            self.0.remove(&port);
        }
        if closed.local.ip().is_loopback() {
            return Vec::new();
        }
        closed
            .bindings()
            .filter(|key| !kept.contains(key))
            .collect()
    }

    /// Returns the listener that a connection is for: a specific address takes precedence over the unspecified one;
    /// among equals (`SO_REUSEPORT`) the highest hash wins. A new member takes flows evenly from all others; a leaving
    /// one gives up only its own.
    pub fn choose(&self, flow: &FlowKey, hash: impl Fn(SessionId) -> u64) -> Option<SessionId> {
        let at_port = self.0.get(&flow.local.port())?;
        let preferred = |group: &mut dyn Iterator<Item = &Endpoint>| {
            group.map(|endpoint| endpoint.id).max_by_key(|id| hash(*id))
        };
        let is_exact = |it: &&Endpoint| it.local.ip() == flow.local.ip();
        preferred(&mut at_port.iter().filter(is_exact))
            .or_else(|| preferred(&mut at_port.iter().filter(|it| it.takes_any(flow))))
    }

    /// Returns the listeners that have the binding.
    pub fn having<'a>(&'a self, binding: &'a BindingKey) -> impl Iterator<Item = SessionId> + 'a {
        let port = u16::from_be_bytes(binding.local_port);
        let at_port = self.0.get(&port).into_iter().flatten();
        let members = at_port.filter(|endpoint| endpoint.bindings().any(|key| key == *binding));
        members.map(|endpoint| endpoint.id)
    }

    pub(crate) fn is_alone(&self, port: u16) -> bool {
        self.0.get(&port).is_some_and(|at_port| at_port.len() == 1)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.0.values().flatten().map(|endpoint| endpoint.id)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::hash_map::RandomState;
    use std::hash::BuildHasher;

    use super::*;

    fn table(listeners: &[(u64, &str)]) -> ListenerTable {
        let mut table = ListenerTable::default();
        for (id, local) in listeners {
            table.open(endpoint(*id, local));
        }
        table
    }

    fn endpoint(id: u64, local: &str) -> Endpoint {
        Endpoint {
            id: SessionId(id),
            local: local.parse().expect("an address"),
            v6_only: false,
        }
    }

    fn flow(local: &str, remote_port: u16) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: local.parse().expect("an address"),
            remote: ([198, 51, 100, 1], remote_port).into(),
        }
    }

    #[test]
    fn the_very_address_goes_before_any_and_any_ipv6_has_ipv4_too() {
        let table = table(&[(1, "0.0.0.0:80"), (2, "192.0.2.1:80"), (3, "[::]:81")]);
        let chosen = |local| table.choose(&flow(local, 1), |id| id.0);
        assert_eq!(chosen("192.0.2.1:80"), Some(SessionId(2)));
        assert_eq!(chosen("192.0.2.2:80"), Some(SessionId(1)));
        assert_eq!(chosen("192.0.2.2:81"), Some(SessionId(3)));
        assert_eq!(chosen("192.0.2.1:82"), None);
    }

    #[test]
    fn a_listener_for_ipv6_alone_has_no_ipv4() {
        let mut table = ListenerTable::default();
        table.open(Endpoint {
            v6_only: true,
            ..endpoint(1, "[::]:80")
        });
        assert_eq!(table.choose(&flow("192.0.2.1:80", 1), |id| id.0), None);
    }

    fn dealt(hasher: &RandomState, group: &[u64]) -> Vec<SessionId> {
        let members: Vec<_> = group.iter().map(|&id| (id, "192.0.2.1:80")).collect();
        let table = table(&members);
        let choose = |port| {
            let flow = flow("192.0.2.1:80", port);
            table.choose(&flow, |id| hasher.hash_one((&flow, id)))
        };
        (0..1000)
            .map(|port| choose(port).expect("it has members"))
            .collect()
    }

    #[test]
    fn a_member_that_leaves_a_group_gives_up_only_its_own_flows() {
        let hasher = RandomState::new();
        let before = dealt(&hasher, &[1, 2, 3, 4]);
        let after = dealt(&hasher, &[1, 2, 4]);
        for (before, after) in before.iter().zip(&after) {
            assert!(before == after || *before == SessionId(3));
        }
        for member in [1, 2, 4].map(SessionId) {
            let share = after.iter().filter(|id| **id == member).count();
            assert!((230..440).contains(&share), "{share} of 1000");
        }
    }

    #[test]
    fn a_binding_goes_with_the_last_listener_that_has_it() {
        let mut table = table(&[(1, "[::]:80"), (2, "0.0.0.0:80"), (3, "127.0.0.1:80")]);
        let any_v4 = endpoint(2, "0.0.0.0:80").bindings().next();
        assert_eq!(table.having(&any_v4.expect("it has one")).count(), 2);
        // The unspecified IPv6 address has IPv4's binding, too, which the second listener keeps.
        assert_eq!(table.close(SessionId(1), 80).len(), 1);
        assert!(table.close(SessionId(3), 80).is_empty(), "loopback");
        assert!(table.close(SessionId(3), 80).is_empty(), "closed before");
        assert_eq!(table.close(SessionId(2), 80).as_slice(), any_v4.as_slice());
        assert_eq!(table.all().count(), 0);
    }

    #[test]
    fn the_port_tells_who_shares_it() {
        let mut table = table(&[(1, "192.0.2.1:80")]);
        assert!(table.is_alone(80));
        let others = table.open(endpoint(2, "192.0.2.1:80"));
        assert_eq!(others, [SessionId(1)]);
        assert!(!table.is_alone(80));
    }
}
