//! Rows of the filter for UDP endpoints: one socket's, several sockets' that share one, and the
//! members of groups. What follows from who is bound to what is worked out anew on each change.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use portolan_bpf::TableError;
use portolan_control::sharing::{Deal, Sharer, receivers};
use portolan_control::{Holder, Session};
use portolan_proto::filter::{
    BindingKey, FlowRow, MEMBERS_MAX, MemberKey, SHARE_BUCKETS, SenderKey, ShareKey, mapped,
};
use portolan_types::{Protocol, SessionId};
use tracing::warn;

use crate::opens::any_of;
use crate::server::Server;

/// What the server keeps of shared endpoints and of groups.
#[derive(Debug, Default)]
pub struct Sharing {
    bindings: HashMap<BindingKey, Binding>,
    /// UDP sessions by their port.
    ports: HashMap<u16, Vec<SessionId>>,
    memberships: HashMap<SessionId, BTreeSet<(IpAddr, u32)>>,
    /// How many members the filter's table lists.
    listed: HashMap<(IpAddr, u32, u16), usize>,
}

/// One row of the binding table and what goes with it.
#[derive(Debug, Default)]
struct Binding {
    /// Bound to it, in that order.
    sharers: Vec<SessionId>,
    /// Bound to a group or a broadcast address: they only send from it.
    guests: Vec<SessionId>,
    deal: Deal,
    /// Channels and their classes.
    senders: BTreeMap<u32, u16>,
    members: usize,
}

impl Sharing {
    /// The devices on which a session is a member of a group.
    pub fn memberships(&self, id: SessionId) -> impl Iterator<Item = (IpAddr, u32)> + '_ {
        self.memberships.get(&id).into_iter().flatten().copied()
    }
}

impl Server {
    /// The UDP session at `id` gets what comes to its endpoint; also when its row has changed.
    pub fn enter_endpoint(&mut self, id: SessionId) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        let (local, is_connected) = (session.local, session.remote.is_some());
        let keys = keys_of(session);
        let ids = self.sharing.ports.entry(local.port()).or_default();
        if !ids.contains(&id) {
            ids.push(id);
        }
        for (key, is_guest) in keys {
            let binding = self.sharing.bindings.entry(key).or_default();
            let list = if is_guest {
                &mut binding.guests
            } else {
                &mut binding.sharers
            };
            if !is_connected && !list.contains(&id) {
                list.push(id);
            }
            self.tell_of_binding(&key);
        }
        self.tell_of_groups(local.port());
    }

    /// It gets nothing any more.
    pub fn leave_endpoint(&mut self, id: SessionId) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        let port = session.local.port();
        for (key, _) in keys_of(session) {
            if let Some(binding) = self.sharing.bindings.get_mut(&key) {
                binding.sharers.retain(|other| *other != id);
                binding.guests.retain(|other| *other != id);
            }
            self.tell_of_binding(&key);
        }
        if let Some(ids) = self.sharing.ports.get_mut(&port) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.sharing.ports.remove(&port);
            }
        }
        self.tell_of_groups(port);
    }

    pub fn join_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        let memberships = self.sharing.memberships.entry(id).or_default();
        memberships.insert((group, interface));
        self.tell_of_groups_of(id);
    }

    pub fn leave_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        if let Some(memberships) = self.sharing.memberships.get_mut(&id) {
            memberships.remove(&(group, interface));
        }
        self.tell_of_groups_of(id);
    }

    pub fn leave_all_groups(&mut self, id: SessionId) {
        if self.sharing.memberships.remove(&id).is_some() {
            self.tell_of_groups_of(id);
        }
    }

    /// Where a session's packets go; `None` while no process holds it.
    fn row(&self, id: SessionId) -> Option<FlowRow> {
        let session = self.registry.session(id)?;
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
            .filter_map(|&id| self.registry.session(id))
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
        let dealt = if receivers.len() > 1 {
            receivers.as_slice()
        } else {
            &[]
        };
        binding.deal.among(dealt);
        for (bucket, owner) in binding.deal.buckets() {
            if let Some(row) = self.row(owner) {
                self.filter.deal(&share(key, bucket), row)?;
            }
        }
        self.write_senders(key, binding, is_shared)?;
        let copies = if is_shared {
            binding.sharers.as_slice()
        } else {
            &[]
        };
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

    fn write_senders(
        &self,
        key: &BindingKey,
        binding: &mut Binding,
        is_shared: bool,
    ) -> Result<(), TableError> {
        let all = binding.sharers.iter().chain(&binding.guests);
        let wanted: BTreeMap<u32, u16> = if is_shared {
            let rows = all.filter_map(|&id| self.row(id));
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
        ids: &[SessionId],
        before: usize,
    ) -> Result<usize, TableError> {
        let key = |index: usize| MemberKey {
            group,
            interface,
            port,
            // Below MEMBERS_MAX.
            index: index as u16,
        };
        let rows: Vec<FlowRow> = ids.iter().filter_map(|&id| self.row(id)).collect();
        let count = rows.len().min(MEMBERS_MAX);
        for (index, row) in rows.into_iter().take(MEMBERS_MAX).enumerate() {
            self.filter.set_member(&key(index), row)?;
        }
        for index in count..before {
            self.filter.remove_member(&key(index))?;
        }
        Ok(count)
    }

    fn tell_of_groups_of(&mut self, id: SessionId) {
        if let Some(session) = self.registry.session(id) {
            self.tell_of_groups(session.local.port());
        }
    }

    /// Once one socket of a port is a member of a group, all that may hear of it there get copies:
    /// which of them want those (`IP_MULTICAST_ALL`, sources) their libraries know.
    fn tell_of_groups(&mut self, port: u16) {
        let ids = self.sharing.ports.get(&port).cloned().unwrap_or_default();
        let wanted: BTreeSet<(IpAddr, u32)> = ids
            .iter()
            .flat_map(|&id| self.sharing.memberships(id))
            .collect();
        let listed: Vec<(IpAddr, u32)> = self
            .sharing
            .listed
            .keys()
            .filter(|(_, _, of)| *of == port)
            .map(|&(group, interface, _)| (group, interface))
            .collect();
        let all: BTreeSet<(IpAddr, u32)> = wanted.iter().copied().chain(listed).collect();
        for (group, interface) in all {
            let hearers: Vec<SessionId> = ids
                .iter()
                .copied()
                .filter(|_| wanted.contains(&(group, interface)))
                .filter(|&id| self.may_hear(id, group))
                .collect();
            let before = self.sharing.listed.remove(&(group, interface, port));
            let written = self.write_members(
                mapped(group),
                interface,
                port.to_be_bytes(),
                &hearers,
                before.unwrap_or(0),
            );
            match written {
                Ok(0) => {}
                Ok(count) => {
                    self.sharing.listed.insert((group, interface, port), count);
                }
                Err(error) => warn!(%error, %group, "cannot list the members of a group"),
            }
        }
    }

    /// Is the session bound so that datagrams to the group reach it?
    fn may_hear(&self, id: SessionId, group: IpAddr) -> bool {
        self.registry.session(id).is_some_and(|session| {
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

fn mapped_key(key: &BindingKey) -> [u8; 16] {
    key.local
}

/// The rows that a session has to do with, and whether it only sends from them.
fn keys_of(session: &Session) -> Vec<(BindingKey, bool)> {
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
