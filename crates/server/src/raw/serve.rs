//! Requests for raw flows.

use portolan_bpf::TableError;
use portolan_control::{Errno, PortClaim};
use portolan_proto::control::{ReplyBody, Reuse};
use portolan_proto::encode;
use portolan_proto::filter::{BindingKey, FlowRow, RawKey};
use portolan_proto::raw::Guard;
use portolan_proto::report::{RAW_ROWS, RawReport};
use portolan_types::{ChannelId, Protocol, Slot, canonical, is_scoped, scope_of};
use tracing::{error, info};

use super::{Owner, Port};
use crate::report::reported;
use crate::requests::Answer;
use crate::server::Server;

/// Protocols that one process may have.
const PER_PROCESS: usize = RAW_ROWS;

impl Server {
    pub(crate) fn claim_protocol(
        &mut self,
        channel: ChannelId,
        guard: Guard,
        slot: Slot,
    ) -> Result<Answer, Errno> {
        let process = self.control.registry.process(channel).ok_or(Errno::BADF)?;
        let (pid, uid) = (process.pid, process.uid);
        if !guard.is_free() {
            return Err(Errno::INVAL);
        }
        if !self.may_run(uid, guard) {
            return Err(Errno::PERM);
        }
        if self.raw_flows.0.contains_key(&guard) {
            return Err(Errno::ADDRINUSE);
        }
        if self.raw_flows.of(channel).len() >= PER_PROCESS {
            return Err(Errno::NOBUFS);
        }
        let (guard, port) = self.take_port(channel, guard)?;
        let owner = Owner {
            channel,
            slot,
            port,
        };
        let written = self.write_raw(guard, &owner);
        self.raw_flows.0.insert(guard, owner);
        if let Err(failure) = written {
            error!(%failure, "the packet filter does not take a protocol");
            self.give_up(guard);
            return Err(Errno::NOBUFS);
        }
        info!(pid, %guard, "protocol of a program's own");
        self.control.counters.raw_flows += 1;
        Ok(ReplyBody::Claimed { guard }.into())
    }

    /// Reserves the port of a guard, here and in the kernel. Returns the guard with its port number.
    fn take_port(
        &mut self,
        channel: ChannelId,
        guard: Guard,
    ) -> Result<(Guard, Option<Port>), Errno> {
        let Guard::Port { protocol, local } = guard else {
            return Ok((guard, None));
        };
        let local = canonical(local);
        let address = local.ip();
        if is_scoped(address) && scope_of(local) == 0 {
            return Err(Errno::INVAL);
        }
        // Frames for other addresses of this host do not come by the filter.
        let is_managed = self.routes.serves(address) == Some(true);
        if !address.is_unspecified() && !is_managed {
            return Err(Errno::ADDRNOTAVAIL);
        }
        let process = self.control.registry.process(channel).ok_or(Errno::BADF)?;
        let claim = PortClaim {
            protocol,
            local,
            reuse: Reuse::default(),
            v6_only: false,
            uid: process.uid,
        };
        self.check_port(channel, claim)?;
        let (claim, local, reservation) = self.reserve(claim, local.is_ipv6())?;
        reservation.shrink();
        let port = Port {
            claim,
            _reservation: reservation,
        };
        Ok((Guard::Port { protocol, local }, Some(port)))
    }

    fn write_raw(&self, guard: Guard, owner: &Owner) -> Result<(), TableError> {
        let row = self.raw_row(guard, owner);
        match RawKey::new(guard) {
            Some(key) => self.filter.claim(&key, row),
            None => bindings_of(guard).try_for_each(|key| self.filter.bind(&key, row)),
        }
    }

    fn erase_raw(&self, guard: Guard) -> Result<(), TableError> {
        match RawKey::new(guard) {
            Some(key) => self.filter.unclaim(&key),
            None => bindings_of(guard).try_for_each(|key| self.filter.unbind(&key)),
        }
    }

    fn raw_row(&self, guard: Guard, owner: &Owner) -> FlowRow {
        let of_guard = match guard {
            Guard::EtherType(_) | Guard::IpProtocol(_) => 0,
            Guard::Port { protocol, .. } => match protocol {
                Protocol::Tcp => FlowRow::RAW | FlowRow::DELEGATED,
                Protocol::Udp => FlowRow::RAW,
            },
        };
        FlowRow {
            channel: owner.channel.0,
            slot: owner.slot.0,
            flags: of_guard | self.raw_extension_flags(guard, owner.channel),
            budget: self.budget_of_channel(owner.channel),
            ..FlowRow::default()
        }
    }

    pub(crate) fn has_protocol(&self, channel: ChannelId, guard: Guard) -> bool {
        let owner = self.raw_flows.0.get(&guard);
        owner.is_some_and(|owner| owner.channel == channel)
    }

    /// Rewrites the rows after changes of budgets or extensions.
    pub(crate) fn renew_raw_rows(&self) {
        for (guard, owner) in &self.raw_flows.0 {
            if let Err(failure) = self.write_raw(*guard, owner) {
                error!(%failure, %guard, "the packet filter keeps an old row");
            }
        }
    }

    fn may_run(&self, uid: u32, guard: Guard) -> bool {
        uid == 0 || self.config.raw.iter().any(|rule| rule.allows(uid, guard))
    }

    /// Releases a protocol, which another flow of the process may take.
    pub(crate) fn unclaim_protocol(&mut self, channel: ChannelId, guard: Guard, slot: Slot) {
        let owner = self.raw_flows.0.get(&guard);
        if owner.is_some_and(|owner| (owner.channel, owner.slot) == (channel, slot)) {
            self.give_up(guard);
        }
    }

    /// Releases the protocols of a process that has exited.
    pub(crate) fn end_raw_flows(&mut self, channel: ChannelId) {
        for guard in self.raw_flows.of(channel) {
            self.give_up(guard);
        }
    }

    fn give_up(&mut self, guard: Guard) {
        let owner = self.raw_flows.0.remove(&guard);
        self.end_extensions_of_protocol(guard);
        if let Err(failure) = self.erase_raw(guard) {
            error!(%failure, "a protocol stays with a program that gave it up");
        }
        if let Some(port) = owner.and_then(|owner| owner.port) {
            self.control.ports.release(port.claim);
        }
    }

    /// Returns all raw flows, for `portolan ss`.
    pub(crate) fn list_raw_flows(&self) -> Answer {
        let flows = self.raw_flows.0.iter();
        let reports: Vec<RawReport> = flows
            .filter_map(|(guard, owner)| self.report_raw(*guard, owner))
            .collect();
        Answer::List(encode(&reports), ReplyBody::RawFlows)
    }

    fn report_raw(&self, guard: Guard, owner: &Owner) -> Option<RawReport> {
        let process = self.control.registry.process(owner.channel)?;
        let ends = self.channels.get(&owner.channel);
        Some(RawReport {
            guard,
            holder: reported(process),
            uid: process.uid,
            channel: owner.channel.0,
            figures: ends.map_or_else(Default::default, |ends| ends.statistics.raw(owner.slot)),
        })
    }
}

/// Returns the keys of a port's rows; none for other guards.
fn bindings_of(guard: Guard) -> impl Iterator<Item = BindingKey> {
    let port = match guard {
        Guard::Port { protocol, local } => Some((protocol, local)),
        Guard::EtherType(_) | Guard::IpProtocol(_) => None,
    };
    port.into_iter()
        .flat_map(|(protocol, local)| BindingKey::of(protocol, local, false))
}
