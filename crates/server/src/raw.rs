//! Raw flows: which program has which protocol of its own, and who may have one. The filters see to the rest
//! (ADR 17).

use std::collections::BTreeMap;

use portolan_control::Errno;
use portolan_proto::control::ReplyBody;
use portolan_proto::filter::{FlowRow, RawKey};
use portolan_proto::raw::Guard;
use portolan_types::{ChannelId, Slot};
use tracing::{error, info};

use crate::clients::Answer;
use crate::server::Server;

/// Protocols that one process may have.
const PER_PROCESS: usize = 64;

#[derive(Debug, Default)]
pub struct RawFlows(BTreeMap<Guard, Owner>);

/// Whose a protocol is.
#[derive(Clone, Copy, Debug)]
struct Owner {
    channel: ChannelId,
    slot: Slot,
}

impl RawFlows {
    fn of(&self, channel: ChannelId) -> Vec<Guard> {
        let owned = self.0.iter().filter(|(_, owner)| owner.channel == channel);
        owned.map(|(guard, _)| *guard).collect()
    }
}

impl Server {
    pub fn claim_protocol(
        &mut self,
        channel: ChannelId,
        guard: Guard,
        slot: Slot,
    ) -> Result<Answer, Errno> {
        let process = self.registry.process(channel).ok_or(Errno::BADF)?;
        if !guard.is_free() {
            return Err(Errno::INVAL);
        }
        if !self.may_run(process.uid, guard) {
            return Err(Errno::PERM);
        }
        if self.raw_flows.0.contains_key(&guard) {
            return Err(Errno::ADDRINUSE);
        }
        if self.raw_flows.of(channel).len() >= PER_PROCESS {
            return Err(Errno::NOBUFS);
        }
        let owner = Owner { channel, slot };
        if let Err(failure) = self.filter.claim(&RawKey::new(guard), self.raw_row(owner)) {
            error!(%failure, "the packet filter does not take a protocol");
            return Err(Errno::NOBUFS);
        }
        info!(pid = process.pid, %guard, "protocol of a program's own");
        self.raw_flows.0.insert(guard, owner);
        self.counters.raw_flows += 1;
        Ok(ReplyBody::Done.into())
    }

    fn raw_row(&self, owner: Owner) -> FlowRow {
        FlowRow {
            channel: owner.channel.0,
            slot: owner.slot.0,
            flags: self.budget_flags_of_channel(owner.channel),
            ..FlowRow::default()
        }
    }

    /// Budgets of processes have changed.
    pub fn renew_raw_rows(&self) {
        for (guard, owner) in &self.raw_flows.0 {
            if let Err(failure) = self
                .filter
                .claim(&RawKey::new(*guard), self.raw_row(*owner))
            {
                error!(%failure, %guard, "the packet filter keeps an old row");
            }
        }
    }

    fn may_run(&self, uid: u32, guard: Guard) -> bool {
        uid == 0 || self.config.raw.iter().any(|rule| rule.allows(uid, guard))
    }

    pub fn unclaim_protocol(&mut self, channel: ChannelId, guard: Guard) {
        let owner = self.raw_flows.0.get(&guard);
        if owner.is_some_and(|owner| owner.channel == channel) {
            self.give_up(guard);
        }
    }

    /// A process has gone.
    pub fn end_raw_flows(&mut self, channel: ChannelId) {
        for guard in self.raw_flows.of(channel) {
            self.give_up(guard);
        }
    }

    fn give_up(&mut self, guard: Guard) {
        self.raw_flows.0.remove(&guard);
        if let Err(failure) = self.filter.unclaim(&RawKey::new(guard)) {
            error!(%failure, "a protocol stays with a program that gave it up");
        }
    }
}
