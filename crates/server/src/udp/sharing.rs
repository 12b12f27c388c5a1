//! Rows of the filter for UDP endpoints: one socket's, several sockets' that share one, and the
//! members of groups. What follows from who is bound to what is worked out anew on each change.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use portolan_bpf::TableError;
use portolan_control::sharing::{Deal, Sharer, receivers};
use portolan_control::{Budget, Charge, Errno, Holder, Limit, SessionEntry};
use portolan_proto::filter::{
    BindingKey, FlowRow, MEMBERS_MAX, MemberKey, SHARE_BUCKETS, SenderKey, ShareKey, mapped,
};
use portolan_types::{Protocol, SessionId};
use tracing::warn;

use crate::connections::opens::any_of;
use crate::server::Server;

/// What the server keeps of shared endpoints and of groups.
#[derive(Debug)]
pub struct Sharing {
    bindings: HashMap<BindingKey, Binding>,
    /// UDP sessions by their port.
    ports: HashMap<u16, Ordered>,
    /// Memberships of all sessions.
    memberships: usize,
    /// How many members the filter's table lists.
    listed: BTreeMap<(u16, IpAddr, u32), usize>,
    /// Endpoints and ports that sessions have left, and whose rows do not say so yet: thousands may leave one at once, and
    /// each time all its rows are written.
    left: HashSet<BindingKey>,
    left_ports: HashSet<u16>,
    /// Of dealt bindings.
    deals: Budget,
}

/// Sessions in the order they came.
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

/// One row of the binding table and what goes with it.
#[derive(Debug, Default)]
struct Binding {
    /// Bound to it, in that order.
    sharers: Ordered,
    /// Bound to a group or a broadcast address: they only send from it.
    guests: Ordered,
    deal: Deal,
    /// For the buckets.
    charge: Option<Charge>,
    /// Channels and their classes.
    senders: BTreeMap<u32, u16>,
    members: usize,
}

impl Sharing {
    pub fn new(deals: Limit) -> Sharing {
        Sharing {
            bindings: HashMap::new(),
            ports: HashMap::new(),
            memberships: 0,
            listed: BTreeMap::new(),
            left: HashSet::new(),
            left_ports: HashSet::new(),
            deals: Budget::new(deals),
        }
    }

    /// Endpoints that could not be dealt.
    pub fn refused(&self) -> u64 {
        self.deals.refused()
    }

    /// Groups and devices for which members of a port are listed.
    fn listed_of(&self, port: u16) -> impl Iterator<Item = (IpAddr, u32)> + '_ {
        let first = (port, IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let from = self.listed.range(first..);
        from.map(|(key, _)| *key)
            .take_while(move |(of, ..)| *of == port)
            .map(|(_, group, interface)| (group, interface))
    }
}

impl Server {
    /// The UDP session at `id` gets what comes to its endpoint; also when its row has changed.
    pub fn enter_endpoint(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let (local, is_connected) = (session.local, session.remote.is_some());
        let keys = keys_of(session);
        self.sharing.ports.entry(local.port()).or_default().add(id);
        for (key, is_guest) in keys {
            let binding = self.sharing.bindings.entry(key).or_default();
            let list = if is_guest {
                &mut binding.guests
            } else {
                &mut binding.sharers
            };
            if !is_connected {
                list.add(id);
            }
            self.tell_of_binding(&key);
        }
        self.tell_of_groups(local.port());
    }

    /// Charges the user of a `SO_REUSEPORT` socket for the deal of its endpoint, if it makes that necessary.
    pub fn charge_deals(&mut self, id: SessionId) -> Result<(), Errno> {
        let Some(session) = self.control.registry.session(id) else {
            return Ok(());
        };
        if !session.reuse.port {
            return Ok(());
        }
        for (key, _) in keys_of(session) {
            if let Some(binding) = self.sharing.bindings.get_mut(&key)
                && !binding.sharers.is_empty()
                && binding.charge.is_none()
            {
                binding.charge = Some(self.sharing.deals.charge(session.uid, 1)?);
            }
        }
        Ok(())
    }

    /// It gets nothing any more. The rows are written by [`Server::tell_of_left`].
    pub fn leave_endpoint(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let port = session.local.port();
        for (key, _) in keys_of(session) {
            if let Some(binding) = self.sharing.bindings.get_mut(&key) {
                binding.sharers.remove(id);
                binding.guests.remove(id);
                self.sharing.left.insert(key);
            }
        }
        if let Some(ids) = self.sharing.ports.get_mut(&port) {
            ids.remove(id);
            if ids.is_empty() {
                self.sharing.ports.remove(&port);
            }
            self.sharing.left_ports.insert(port);
        }
    }

    /// Writes the rows of what sessions have left.
    pub fn tell_of_left(&mut self) {
        if self.sharing.left.is_empty() && self.sharing.left_ports.is_empty() {
            return;
        }
        for key in std::mem::take(&mut self.sharing.left) {
            self.tell_of_binding(&key);
        }
        for port in std::mem::take(&mut self.sharing.left_ports) {
            self.tell_of_groups(port);
        }
    }

    /// The devices on which a session is a member of a group.
    pub fn memberships(&self, id: SessionId) -> impl Iterator<Item = (IpAddr, u32)> + '_ {
        let session = self.control.registry.session(id);
        session
            .into_iter()
            .flat_map(|session| &session.memberships)
            .copied()
    }

    pub fn join_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        let session = self.control.registry.session_mut(id);
        if session.is_some_and(|session| session.memberships.insert((group, interface))) {
            self.sharing.memberships += 1;
        }
        self.tell_of_groups_of(id);
    }

    pub fn leave_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        let session = self.control.registry.session_mut(id);
        if session.is_some_and(|session| session.memberships.remove(&(group, interface))) {
            self.sharing.memberships -= 1;
        }
        self.tell_of_groups_of(id);
    }

    pub fn leave_all_groups(&mut self, id: SessionId) {
        let session = self.control.registry.session_mut(id);
        let left = session.map_or(0, |session| std::mem::take(&mut session.memberships).len());
        if left > 0 {
            self.sharing.memberships -= left;
            self.tell_of_groups_of(id);
        }
    }

    /// Where a session's packets go; `None` while no process holds it.
    fn row(&self, id: SessionId) -> Option<FlowRow> {
        let session = self.control.registry.session(id)?;
        match session.holder {
            Holder::Process(..) => self.row_of(session),
            _ => None,
        }
    }

    fn tell_of_binding(&mut self, key: &BindingKey) {
        let Some(mut binding) = self.sharing.bindings.remove(key) else {
            return;
        };
        if let Err(error) = self.write_binding(key, &mut binding) {
            warn!(%error, "cannot aim a UDP endpoint");
        }
        if !binding.sharers.is_empty() || !binding.guests.is_empty() {
            self.sharing.bindings.insert(*key, binding);
        }
    }

    /// Everything that a row refers to is there before the row is.
    fn write_binding(&self, key: &BindingKey, binding: &mut Binding) -> Result<(), TableError> {
        let sharers: Vec<Sharer> = binding
            .sharers
            .iter()
            .filter_map(|id| self.control.registry.session(id))
            .map(|session| Sharer {
                session: session.id,
                reuse: session.reuse,
                uid: session.uid,
            })
            .collect();
        let receivers = receivers(&sharers);
        let is_shared = sharers.len() + binding.guests.len() > 1 || !binding.guests.is_empty();
        if receivers.is_empty() {
            self.filter.unbind(key)?;
        }
        let before = binding.deal.buckets().count();
        let dealt = match self.may_deal(binding, &receivers) {
            true => receivers.as_slice(),
            false => &[],
        };
        binding.deal.among(dealt);
        for (bucket, owner) in binding.deal.buckets() {
            if let Some(row) = self.row(owner) {
                self.filter.deal(&share(key, bucket), row)?;
            }
        }
        self.write_senders(key, binding, is_shared)?;
        let copies = binding.sharers.iter().filter(|_| is_shared);
        binding.members =
            self.write_members(mapped_key(key), 0, key.local_port, copies, binding.members)?;
        if let Some(mut row) = receivers.last().and_then(|&id| self.row(id)) {
            if is_shared {
                row.flags |= FlowRow::SHARED;
            }
            if !dealt.is_empty() {
                row.flags |= FlowRow::DEALT;
            }
            self.filter.bind(key, row)?;
        }
        if before > 0 && dealt.is_empty() {
            for bucket in 0..SHARE_BUCKETS {
                self.filter.undeal(&share(key, bucket))?;
            }
        }
        Ok(())
    }

    /// Among several receivers, whose user was charged when the second was bound, or is now.
    fn may_deal(&self, binding: &mut Binding, receivers: &[SessionId]) -> bool {
        if receivers.len() < 2 {
            binding.charge = None;
        } else if binding.charge.is_none() {
            let first = self.control.registry.session(receivers[0]);
            let charge = first.map(|session| self.sharing.deals.charge(session.uid, 1));
            binding.charge = charge.and_then(Result::ok);
        }
        binding.charge.is_some()
    }

    fn write_senders(
        &self,
        key: &BindingKey,
        binding: &mut Binding,
        is_shared: bool,
    ) -> Result<(), TableError> {
        let all = binding.sharers.iter().chain(binding.guests.iter());
        let wanted: BTreeMap<u32, u16> = if is_shared {
            let rows = all.filter_map(|id| self.row(id));
            rows.map(|row| (row.channel, row.class)).collect()
        } else {
            BTreeMap::new()
        };
        let sender = |channel: u32| SenderKey {
            binding: *key,
            channel,
        };
        for (&channel, &class) in &wanted {
            if binding.senders.get(&channel) != Some(&class) {
                self.filter.allow_sender(&sender(channel), class)?;
            }
        }
        for &channel in binding.senders.keys() {
            if !wanted.contains_key(&channel) {
                self.filter.forbid_sender(&sender(channel))?;
            }
        }
        binding.senders = wanted;
        Ok(())
    }

    /// Lists those who get copies; answers how many there are now.
    fn write_members(
        &self,
        group: [u8; 16],
        interface: u32,
        port: [u8; 2],
        ids: impl Iterator<Item = SessionId>,
        before: usize,
    ) -> Result<usize, TableError> {
        let key = |index: usize| MemberKey {
            group,
            interface,
            port,
            // Below MEMBERS_MAX.
            index: index as u16,
        };
        let rows = ids.filter_map(|id| self.row(id)).take(MEMBERS_MAX);
        let mut count = 0;
        for row in rows {
            self.filter.set_member(&key(count), row)?;
            count += 1;
        }
        for index in count..before {
            self.filter.remove_member(&key(index))?;
        }
        Ok(count)
    }

    fn tell_of_groups_of(&mut self, id: SessionId) {
        if let Some(session) = self.control.registry.session(id) {
            self.tell_of_groups(session.local.port());
        }
    }

    /// Once one socket of a port is a member of a group, all that may hear of it there get copies:
    /// which of them want those (`IP_MULTICAST_ALL`, sources) their libraries know.
    fn tell_of_groups(&mut self, port: u16) {
        if self.sharing.memberships == 0 && self.sharing.listed.is_empty() {
            return;
        }
        let ids: Vec<SessionId> = self
            .sharing
            .ports
            .get(&port)
            .map_or_else(Vec::new, |ids| ids.iter().collect());
        let wanted: BTreeSet<(IpAddr, u32)> =
            ids.iter().flat_map(|&id| self.memberships(id)).collect();
        let listed = self.sharing.listed_of(port);
        let all: BTreeSet<(IpAddr, u32)> = wanted.iter().copied().chain(listed).collect();
        for (group, interface) in all {
            let before = self.sharing.listed.remove(&(port, group, interface));
            let is_wanted = wanted.contains(&(group, interface));
            let hearers = ids.iter().copied().filter(|_| is_wanted);
            let hearers = hearers.filter(|&id| self.may_hear(id, group));
            let written = self.write_members(
                mapped(group),
                interface,
                port.to_be_bytes(),
                hearers,
                before.unwrap_or(0),
            );
            match written {
                Ok(0) => {}
                Ok(count) => {
                    self.sharing.listed.insert((port, group, interface), count);
                }
                Err(error) => warn!(%error, %group, "cannot list the members of a group"),
            }
        }
    }

    /// Is the session bound so that datagrams to the group reach it?
    fn may_hear(&self, id: SessionId, group: IpAddr) -> bool {
        self.control.registry.session(id).is_some_and(|session| {
            let local = session.local.ip();
            local == group
                || local.is_unspecified()
                    && (local.is_ipv4() == group.is_ipv4() || local.is_ipv6() && !session.v6_only)
        })
    }
}

fn share(key: &BindingKey, bucket: u32) -> ShareKey {
    ShareKey {
        binding: *key,
        bucket,
    }
}

/// Rows that a UDP session may have in the table of bindings.
pub fn binding_rows(session: &SessionEntry) -> usize {
    keys_of(session).len()
}

fn mapped_key(key: &BindingKey) -> [u8; 16] {
    key.local
}

/// The rows that a session has to do with, and whether it only sends from them.
fn keys_of(session: &SessionEntry) -> Vec<(BindingKey, bool)> {
    let own = BindingKey::of(Protocol::Udp, session.local, session.v6_only);
    let mut keys: Vec<(BindingKey, bool)> = own.map(|key| (key, false)).collect();
    let address = session.local.ip();
    if is_for_many(address) {
        let any = SocketAddr::new(any_of(address), session.local.port());
        keys.push((BindingKey::new(Protocol::Udp, any), true));
    }
    keys
}

/// A multicast address, or one that ends in a way that only a broadcast address may: sockets bound
/// to it send from another.
fn is_for_many(address: IpAddr) -> bool {
    address.is_multicast() || matches!(address, IpAddr::V4(v4) if v4.is_broadcast())
}
