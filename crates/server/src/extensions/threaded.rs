//! Handlers that run in threads of their owners: there is nothing to admit but the endpoint, and nothing to call. They
//! are known to be listed.

use std::collections::BTreeMap;

use portolan_proto::extension::layout::{EXTENSIONS, GuardKey};
use portolan_proto::extension::{
    Cost, Event, Extension, ExtensionReply, ExtensionReport, Guard, Placement, Standing,
};
use portolan_types::ChannelId;

use super::{Outcome, refuse};
use crate::clients::ClientId;
use crate::server::Server;

/// Of one process.
const PER_PROCESS: usize = 64;

/// One of them.
pub(super) struct Threaded {
    owner: ChannelId,
    pub(super) uid: u32,
    pid: u32,
    name: String,
    event: Event,
    guard: Guard,
    key: GuardKey,
    priority: u8,
}

/// All of them, by numbers that no handler in the filter has.
#[derive(Default)]
pub(super) struct ThreadedHandlers(BTreeMap<u16, Threaded>);

impl ThreadedHandlers {
    pub(super) fn end_of(&mut self, owner: ChannelId) {
        self.0.retain(|_, one| one.owner != owner);
    }

    pub(super) fn end_at(&mut self, guard: Guard) {
        self.0.retain(|_, one| one.guard != guard);
    }

    /// True if it was the owner's.
    pub(super) fn remove(&mut self, owner: ChannelId, number: u16) -> bool {
        let is_own = self.0.get(&number).is_some_and(|one| one.owner == owner);
        if is_own {
            self.0.remove(&number);
        }
        is_own
    }

    fn count_of(&self, owner: ChannelId) -> usize {
        self.0.values().filter(|one| one.owner == owner).count()
    }

    fn enter(&mut self, one: Threaded) -> Option<u16> {
        let number = (EXTENSIONS..=u16::MAX).find(|number| !self.0.contains_key(number))?;
        self.0.insert(number, one);
        Some(number)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (u16, &Threaded)> {
        self.0.iter().map(|(number, one)| (*number, one))
    }
}

impl Threaded {
    pub(super) fn report(&self, number: u16) -> ExtensionReport {
        ExtensionReport {
            number,
            name: self.name.clone(),
            pid: self.pid,
            uid: self.uid,
            event: self.event,
            ports: vec![self.key.number()],
            priority: self.priority,
            placement: Placement::Thread,
            standing: Standing::Running,
            cost: Cost::default(),
            limit: 0,
            statistics: Default::default(),
        }
    }
}

impl Server {
    pub(super) fn announce_handler(
        &mut self,
        client: ClientId,
        (name, priority): (String, u8),
        guard: Guard,
        event: Event,
    ) -> Outcome<ExtensionReply> {
        if name.len() > Extension::NAME_MAX || name.is_empty() {
            let most = Extension::NAME_MAX;
            return refuse(libc::EINVAL, format!("a name has 1 to {most} octets"));
        }
        let asker = self.clients.get(&client);
        let Some((owner, credentials)) = asker.and_then(|a| Some((a.channel?, a.credentials)))
        else {
            return refuse(
                libc::EPERM,
                "only a process with sockets on Portolan has handlers",
            );
        };
        let Some(&key) = self.admit_guards(owner, &[guard], event)?.first() else {
            return refuse(libc::EINVAL, "a handler has a guard");
        };
        if self.extensions.threaded.count_of(owner) >= PER_PROCESS {
            return refuse(
                libc::EDQUOT,
                format!("the process has {PER_PROCESS} handlers in threads, the most it may have"),
            );
        }
        let one = Threaded {
            owner,
            uid: credentials.uid,
            pid: credentials.pid,
            name,
            event,
            guard,
            key,
            priority,
        };
        match self.extensions.threaded.enter(one) {
            Some(number) => Ok(ExtensionReply::Announced { number }),
            None => refuse(libc::EDQUOT, "there are too many handlers in threads"),
        }
    }
}
