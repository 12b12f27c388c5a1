//! The filter's rows for UDP endpoints: of one socket, of several sockets that share one, and of group members. The
//! result of all binds is recomputed on each change.

mod serve;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use portolan_control::sharing::Deal;
use portolan_control::{Budget, Charge, Exhausted, Limit};
use portolan_proto::filter::{BindingKey, FlowRow};
use portolan_types::SessionId;

/// Lists of groups' members, one for each port, group and device: the filter's table has room for so many.
pub(crate) const GROUPS: Limit = Limit {
    total: 2048,
    per_user: 512,
    reserve: 128,
};

/// Those who get copies, as the filter's table has them.
#[derive(Debug, Default)]
struct Members(Vec<FlowRow>);

/// Of a group. The first member of it pays.
#[derive(Debug)]
struct Listed {
    members: Members,
    charge: Charge,
}

/// What the server keeps of shared endpoints and of groups.
#[derive(Debug)]
pub(crate) struct Sharing {
    bindings: HashMap<BindingKey, Binding>,
    /// UDP sessions by port.
    ports: HashMap<u16, Ordered>,
    /// Members that the filter's table lists.
    listed: BTreeMap<(u16, IpAddr, u32), Listed>,
    groups: Budget,
    /// Endpoints and ports that sessions have left, and whose rows do not say so yet: thousands may leave one at once, and
    /// each time all its rows are written.
    left: HashSet<BindingKey>,
    left_ports: HashSet<u16>,
    /// Budget of bindings with a deal.
    deals: Budget,
}

/// Sessions in order of arrival.
#[derive(Debug, Default)]
struct Ordered {
    by_age: BTreeMap<u64, SessionId>,
    ages: HashMap<SessionId, u64>,
    next: u64,
}

impl Ordered {
    fn add(&mut self, id: SessionId) {
        if !self.ages.contains_key(&id) {
            self.ages.insert(id, self.next);
            self.by_age.insert(self.next, id);
            self.next += 1;
        }
    }

    fn remove(&mut self, id: SessionId) {
        if let Some(age) = self.ages.remove(&id) {
            self.by_age.remove(&age);
        }
    }

    fn iter(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.by_age.values().copied()
    }

    fn len(&self) -> usize {
        self.by_age.len()
    }

    fn is_empty(&self) -> bool {
        self.by_age.is_empty()
    }
}

/// One row of the binding table and its data.
#[derive(Debug, Default)]
struct Binding {
    /// Sessions bound to it, in that order.
    sharers: Ordered,
    /// Sessions bound to a group or a broadcast address, which only send from it.
    guests: Ordered,
    deal: Deal<SessionId>,
    /// For the buckets.
    charge: Option<Charge>,
    /// Channels and their classes.
    senders: BTreeMap<u32, u16>,
    members: Members,
}

impl Sharing {
    pub(crate) fn set_limit(&self, deals: Limit) {
        self.deals.set_limit(deals);
    }

    /// Charges a user for the buckets of endpoints.
    pub(crate) fn charge_deals_of(&self, uid: u32, endpoints: u64) -> Result<Charge, Exhausted> {
        self.deals.charge(uid, endpoints)
    }

    pub(crate) fn new(deals: Limit) -> Sharing {
        Sharing {
            bindings: HashMap::new(),
            ports: HashMap::new(),
            listed: BTreeMap::new(),
            groups: Budget::new(GROUPS),
            left: HashSet::new(),
            left_ports: HashSet::new(),
            deals: Budget::new(deals),
        }
    }

    /// Returns how many deals were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.deals.refused()
    }

    /// Groups that could not be listed.
    pub(crate) fn refused_groups(&self) -> u64 {
        self.groups.refused()
    }

    fn sessions_at(&self, port: u16) -> Vec<SessionId> {
        let ids = self.ports.get(&port);
        ids.map_or_else(Vec::new, |ids| ids.iter().collect())
    }

    /// Returns the groups and devices for which members of a port are listed.
    fn listed_of(&self, port: u16) -> impl Iterator<Item = (IpAddr, u32)> + '_ {
        let first = (port, IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let from = self.listed.range(first..);
        from.map(|(key, _)| *key)
            .take_while(move |(of, ..)| *of == port)
            .map(|(_, group, interface)| (group, interface))
    }
}
