//! Orphans: connections that programs have closed with data unsent, or with a peer that does not close.
//! The server finishes them. They are limited in number and in bytes, for each user and in all, and one
//! that makes no progress in time: as Linux resets orphans (`tcp_max_orphans`, `tcp_orphan_retries`).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use portolan_control::{Budget, Charge, Exhausted};
use portolan_types::{Instant, SessionId};

use crate::config::LimitsConfig;
use crate::server::Server;

/// Of a user's own that are reset at once to make room for one more.
const EVICTED_AT_ONCE: usize = 64;

/// Looked at in one turn.
const LOOKS_PER_TURN: usize = 256;

#[derive(Debug)]
struct Orphan {
    uid: u32,
    age: u64,
    bytes: u64,
    _number: Charge,
    memory: Charge,
}

/// All of the server's.
#[derive(Debug)]
pub struct Orphans {
    number: Budget,
    memory: Budget,
    patience: Duration,
    next_age: u64,
    all: HashMap<SessionId, Orphan>,
    /// Each user's, the oldest first.
    by_age: BTreeMap<(u32, u64), SessionId>,
    /// When each is looked at; some have ended by then.
    looks: VecDeque<(Instant, SessionId)>,
}

impl Orphans {
    pub fn new(limits: &LimitsConfig) -> Orphans {
        Orphans {
            number: Budget::new(limits.orphans()),
            memory: Budget::new(limits.orphan_memory()),
            patience: limits.orphan_patience(),
            next_age: 0,
            all: HashMap::new(),
            by_age: BTreeMap::new(),
            looks: VecDeque::new(),
        }
    }

    fn add(
        &mut self,
        id: SessionId,
        (uid, bytes): (u32, u64),
        now: Instant,
    ) -> Result<(), Exhausted> {
        let orphan = Orphan {
            uid,
            age: self.next_age,
            bytes,
            _number: self.number.charge(uid, 1)?,
            memory: self.memory.charge(uid, bytes)?,
        };
        self.next_age += 1;
        self.by_age.insert((uid, orphan.age), id);
        self.all.insert(id, orphan);
        self.looks.push_back((now + self.patience, id));
        Ok(())
    }

    /// The session has nothing to send any more, or is gone.
    pub fn remove(&mut self, id: SessionId) {
        if let Some(orphan) = self.all.remove(&id) {
            self.by_age.remove(&(orphan.uid, orphan.age));
        }
    }

    fn oldest_of(&self, uid: u32) -> Option<SessionId> {
        let mut its = self.by_age.range((uid, 0)..=(uid, u64::MAX));
        its.next().map(|(_, id)| *id)
    }

    /// Is there less of it than at the last look?
    fn has_shrunk_to(&mut self, id: SessionId, bytes: u64) -> bool {
        let Some(orphan) = self.all.get_mut(&id) else {
            return false;
        };
        let has_shrunk = bytes < orphan.bytes;
        orphan.bytes = bytes;
        orphan.memory.shrink_to(bytes);
        has_shrunk
    }
}

impl Server {
    /// The server is to finish a connection that a program has closed. Where there are too many the oldest of the
    /// same user are reset.
    pub fn note_orphan(&mut self, id: SessionId) {
        let (Some(bytes), Some(session)) = (self.unsent(id), self.registry.session(id)) else {
            return;
        };
        let uid = session.uid;
        self.orphans.remove(id);
        for _ in 0..EVICTED_AT_ONCE {
            if self.orphans.add(id, (uid, bytes), self.now).is_ok() {
                return;
            }
            let Some(oldest) = self.orphans.oldest_of(uid) else {
                break;
            };
            self.end_orphan(oldest);
        }
        self.end_orphan(id);
    }

    fn end_orphan(&mut self, id: SessionId) {
        self.counters.orphans_reset += 1;
        self.orphans.remove(id);
        self.abort_held(id);
    }

    /// Bytes that the peer of a session held here has not acknowledged.
    fn unsent(&self, id: SessionId) -> Option<u64> {
        let slot = self.server_slot(id)?;
        match self.stack.get(slot)? {
            portolan_stack::Session::Tcp(session) => {
                Some(session.connection.tcp_info().send_queue as u64)
            }
            portolan_stack::Session::Udp(_) => None,
        }
    }

    /// Resets orphans whose peers have taken nothing for too long. Returns when to come back.
    pub fn drive_orphans(&mut self) -> Option<Instant> {
        for _ in 0..LOOKS_PER_TURN {
            let &(due, id) = self.orphans.looks.front()?;
            if due > self.now {
                return Some(due);
            }
            self.orphans.looks.pop_front();
            let is_known = self.orphans.all.contains_key(&id);
            let Some(bytes) = self.unsent(id).filter(|_| is_known) else {
                continue;
            };
            // A peer that does not close has a time-limit of its own (FIN-WAIT-2).
            if self.orphans.has_shrunk_to(id, bytes) || bytes == 0 {
                let next = self.now + self.orphans.patience;
                self.orphans.looks.push_back((next, id));
            } else {
                self.end_orphan(id);
            }
        }
        Some(self.now)
    }
}
