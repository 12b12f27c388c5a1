//! Orphans: connections that programs have closed with data unsent, or with a peer that does not close.
//! The server finishes them. They are limited in number and in bytes, per user and in total; an orphan
//! that makes no progress in time is reset, as in Linux (`tcp_max_orphans`, `tcp_orphan_retries`).

use std::collections::BTreeMap;
use std::time::Duration;

use portolan_types::SessionId;

use crate::budget::{Budget, Exhausted, Limit};
use crate::session::Orphan;

/// How many orphans there may be, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct OrphanLimits {
    pub number: Limit,
    /// In bytes.
    pub memory: Limit,
    /// How long a peer may acknowledge nothing.
    pub patience: Duration,
}

/// The limits of orphans; the orphans themselves are in the entries of their sessions.
#[derive(Debug)]
pub(crate) struct Orphans {
    number: Budget,
    memory: Budget,
    pub(crate) patience: Duration,
    next_age: u64,
    /// By user, the oldest first.
    by_age: BTreeMap<(u32, u64), SessionId>,
}

impl Orphans {
    pub(crate) fn new(limits: &OrphanLimits) -> Orphans {
        Orphans {
            number: Budget::new(limits.number),
            memory: Budget::new(limits.memory),
            patience: limits.patience,
            next_age: 0,
            by_age: BTreeMap::new(),
        }
    }

    pub(crate) fn set_limits(&mut self, limits: &OrphanLimits) {
        self.number.set_limit(limits.number);
        self.memory.set_limit(limits.memory);
        self.patience = limits.patience;
    }

    pub(crate) fn admit(
        &mut self,
        id: SessionId,
        uid: u32,
        bytes: u64,
    ) -> Result<Orphan, Exhausted> {
        let orphan = Orphan {
            age: self.next_age,
            bytes,
            _number: self.number.charge(uid, 1)?,
            memory: self.memory.charge(uid, bytes)?,
        };
        self.next_age += 1;
        self.by_age.insert((uid, orphan.age), id);
        Ok(orphan)
    }

    /// Removes an orphan that is finished or reset.
    pub(crate) fn remove(&mut self, uid: u32, orphan: Orphan) {
        self.by_age.remove(&(uid, orphan.age));
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.by_age.len()
    }

    pub(crate) fn oldest_of(&self, uid: u32) -> Option<SessionId> {
        let mut its = self.by_age.range((uid, 0)..=(uid, u64::MAX));
        its.next().map(|(_, id)| *id)
    }
}

impl Orphan {
    /// Updates the unsent bytes. Returns whether they are fewer than at the last review.
    pub(crate) fn has_shrunk_to(&mut self, bytes: u64) -> bool {
        let has_shrunk = bytes < self.bytes;
        self.bytes = bytes;
        self.memory.shrink_to(bytes);
        has_shrunk
    }
}
