//! Writes the rows that result from the binds.

use std::collections::BTreeMap;
use std::net::IpAddr;

use portolan_bpf::TableError;
use portolan_control::sharing::{Sharer, UdpEndpoint, receivers};
use portolan_control::{Errno, Holder, SessionEntry};
use portolan_proto::filter::{
    BindingKey, FlowRow, MEMBERS_MAX, MemberKey, SHARE_BUCKETS, SenderKey, ShareKey, mapped,
};
use portolan_types::SessionId;
use tracing::warn;

use super::{Binding, Listed, Members};
use crate::server::Server;

/// Groups, each on a device, that sockets of one port may be members of.
const GROUPS_OF_PORT: usize = 512;

impl Server {
    /// Enters the UDP session at `id` as a receiver of its endpoint; also called when its row has changed.
    pub(crate) fn enter_endpoint(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let (local, is_connected) = (session.local, session.remote.is_some());
        let keys = UdpEndpoint::from(session).bindings();
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

    /// Charges the user of a `SO_REUSEPORT` socket for the deal of its endpoint, if this socket makes one necessary.
    pub(crate) fn charge_deals(&mut self, id: SessionId) -> Result<(), Errno> {
        let Some(session) = self.control.registry.session(id) else {
            return Ok(());
        };
        if !session.reuse.port {
            return Ok(());
        }
        for (key, _) in UdpEndpoint::from(session).bindings() {
            if let Some(binding) = self.sharing.bindings.get_mut(&key)
                && !binding.sharers.is_empty()
                && binding.charge.is_none()
            {
                binding.charge = Some(self.sharing.deals.charge(session.uid, 1)?);
            }
        }
        Ok(())
    }

    /// Removes a session from its endpoint. [`Server::tell_of_left`] rewrites the rows.
    pub(crate) fn leave_endpoint(&mut self, id: SessionId, endpoint: UdpEndpoint) {
        let port = endpoint.local.port();
        for (key, _) in endpoint.bindings() {
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

    /// Rewrites the rows that sessions have left.
    pub(crate) fn tell_of_left(&mut self) {
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

    /// Returns the devices on which a session is a member of a group.
    pub(crate) fn memberships(&self, id: SessionId) -> impl Iterator<Item = (IpAddr, u32)> + '_ {
        let session = self.control.registry.session(id);
        session.into_iter().flat_map(SessionEntry::memberships)
    }

    /// Refused where there is no room for one list more.
    pub(crate) fn join_group(
        &mut self,
        id: SessionId,
        group: IpAddr,
        interface: u32,
    ) -> Result<(), Errno> {
        self.control.registry.join_group(id, group, interface);
        let told = self.tell_of_group_of(id, (group, interface));
        if told.is_err() {
            self.control.registry.leave_group(id, group, interface);
        }
        told
    }

    pub(crate) fn leave_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        self.control.registry.leave_group(id, group, interface);
        // A list that is there has room.
        let _ = self.tell_of_group_of(id, (group, interface));
    }

    /// Returns the row of a session's packets; `None` if no process holds it.
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

    /// Everything that a row refers to is written before the row.
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
        let dealt = if self.may_deal(binding, &receivers) {
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
        let copies = binding.sharers.iter().filter(|_| is_shared);
        let list = (mapped_key(key), 0, key.local_port);
        self.write_members(list, copies, &mut binding.members)?;
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

    /// Returns whether flows may be dealt among the receivers, whose user was charged when the second was bound,
    /// or is now.
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

    /// Lists those who get copies, in any order; writes what differs from what is listed: a few rows when one comes or
    /// leaves.
    fn write_members(
        &self,
        (group, interface, port): ([u8; 16], u32, [u8; 2]),
        ids: impl Iterator<Item = SessionId>,
        Members(listed): &mut Members,
    ) -> Result<(), TableError> {
        let key = |index: usize| MemberKey {
            group,
            interface,
            port,
            // Below MEMBERS_MAX.
            index: index as u16,
        };
        let mut added: Vec<FlowRow> = ids
            .filter_map(|id| self.row(id))
            .take(MEMBERS_MAX)
            .collect();
        let mut left = Vec::new();
        for (index, row) in listed.iter().enumerate() {
            match added.iter().position(|wanted| wanted == row) {
                Some(known) => drop(added.swap_remove(known)),
                None => left.push(index),
            }
        }
        for row in added {
            if let Some(index) = left.pop() {
                self.filter.set_member(&key(index), row)?;
                listed[index] = row;
            } else {
                self.filter.set_member(&key(listed.len()), row)?;
                listed.push(row);
            }
        }
        // The last one takes the place of one that has left, from the end of the list.
        while let Some(index) = left.pop()
            && let Some(&last) = listed.last()
        {
            if index + 1 < listed.len() {
                self.filter.set_member(&key(index), last)?;
            }
            self.filter.remove_member(&key(listed.len() - 1))?;
            listed.swap_remove(index);
        }
        Ok(())
    }

    fn tell_of_group_of(&mut self, id: SessionId, membership: (IpAddr, u32)) -> Result<(), Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        let port = session.local.port();
        let ids = self.sharing.sessions_at(port);
        let is_member = |&id: &SessionId| self.memberships(id).any(|its| its == membership);
        let first = ids.iter().copied().find(is_member);
        self.tell_of_group((port, &ids), membership, first)
    }

    /// Rewrites the lists of all groups that sockets of the port are or were members of.
    fn tell_of_groups(&mut self, port: u16) {
        if !self.control.registry.has_members() && self.sharing.listed.is_empty() {
            return;
        }
        let ids = self.sharing.sessions_at(port);
        let listed = self.sharing.listed_of(port);
        let mut all: BTreeMap<(IpAddr, u32), Option<SessionId>> =
            listed.map(|membership| (membership, None)).collect();
        for &id in &ids {
            for membership in self.memberships(id) {
                all.entry(membership).or_default().get_or_insert(id);
            }
        }
        for ((group, interface), first) in all {
            if self
                .tell_of_group((port, &ids), (group, interface), first)
                .is_err()
            {
                warn!(%group, "there is no room to list the members of a group");
            }
        }
    }

    /// Once one socket of a port is a member of a group, all that may hear of it there get copies:
    /// which of them want those (`IP_MULTICAST_ALL`, sources) their libraries know.
    fn tell_of_group(
        &mut self,
        (port, ids): (u16, &[SessionId]),
        (group, interface): (IpAddr, u32),
        first: Option<SessionId>,
    ) -> Result<(), Errno> {
        let before = self.sharing.listed.remove(&(port, group, interface));
        let session = first.and_then(|id| self.control.registry.session(id));
        let payer = session.map(|session| session.uid);
        let groups = &self.sharing.groups;
        let mut listed = match (before, payer) {
            (None, None) => return Ok(()),
            (None, Some(uid)) => Listed {
                charge: groups.charge(uid, 1)?,
                members: Members::default(),
            },
            (Some(mut listed), Some(uid)) if listed.charge.uid() != uid => {
                // Who paid has left it. Where the next has no room he pays on.
                if let Ok(charge) = groups.charge(uid, 1) {
                    listed.charge = charge;
                }
                listed
            }
            (Some(listed), _) => listed,
        };
        let hearers = ids.iter().copied().filter(|_| first.is_some());
        let hearers = hearers.filter(|&id| self.may_hear(id, group));
        let list = (mapped(group), interface, port.to_be_bytes());
        let written = self.write_members(list, hearers, &mut listed.members);
        if let Err(error) = &written {
            warn!(%error, %group, "cannot list the members of a group");
        }
        if first.is_some() || !listed.members.0.is_empty() {
            self.sharing.listed.insert((port, group, interface), listed);
        }
        written.map_err(|_| Errno::NOBUFS)
    }

    /// Returns whether the port has room for another list. Each list is rewritten when a socket joins or leaves
    /// the port.
    pub(crate) fn has_room_for_group(&self, id: SessionId, membership: (IpAddr, u32)) -> bool {
        let Some(session) = self.control.registry.session(id) else {
            return false;
        };
        let port = session.local.port();
        let is_listed = self.sharing.listed_of(port).any(|its| its == membership);
        is_listed || self.sharing.listed_of(port).count() < GROUPS_OF_PORT
    }

    /// Returns whether datagrams to the group can reach the session by its bind.
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

fn mapped_key(key: &BindingKey) -> [u8; 16] {
    key.local
}
