//! Ends of sessions within the host that have come after a restart, and their peers have not.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;

use portolan_proto::local::Side;
use portolan_types::{Instant, SessionId};
use rustix::fs::fstat;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Names a memory in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MemoryKey {
    device: u64,
    inode: u64,
}

impl MemoryKey {
    pub(crate) fn of(fd: impl AsFd) -> Result<MemoryKey, Errno> {
        let stat = fstat(fd)?;
        Ok(MemoryKey {
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }
}

/// The end that has come first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum First {
    Waits(SessionId),
    Ended(Side),
}

/// Ends whose peers have not come yet.
#[derive(Debug, Default)]
pub(crate) struct Unpaired {
    first: HashMap<MemoryKey, First>,
    /// Until when they wait, in this order.
    until: VecDeque<(Instant, MemoryKey)>,
}

impl Unpaired {
    pub(crate) fn first(&self, key: MemoryKey) -> Option<First> {
        self.first.get(&key).copied()
    }

    pub(crate) fn wait(&mut self, key: MemoryKey, id: SessionId, until: Instant) {
        self.first.insert(key, First::Waits(id));
        self.until.push_back((until, key));
    }

    /// Both ends have come.
    pub(crate) fn forget(&mut self, key: MemoryKey) {
        self.first.remove(&key);
    }

    /// An end has ended before its peer came.
    pub(crate) fn note_end(&mut self, key: MemoryKey, side: Side) {
        if let Some(first) = self.first.get_mut(&key) {
            *first = First::Ended(side);
        }
    }

    /// Returns the ends that have waited long enough.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<SessionId> {
        let mut due = Vec::new();
        while let Some(&(until, key)) = self.until.front()
            && until <= now
        {
            self.until.pop_front();
            if let Some(First::Waits(id)) = self.first.remove(&key) {
                due.push(id);
            }
        }
        due
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.until.front().map(|(until, _)| *until)
    }
}
