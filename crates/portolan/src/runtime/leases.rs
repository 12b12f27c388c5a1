//! Ports under lease (ADR 31), from which this process opens connections without a request to the server.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use portolan_proto::control::LeasedPort;
use portolan_proto::filter::RecordHeader;
use portolan_stack::passive::OpenRules;
use portolan_stack::{LeasedPorts, Path};
use portolan_types::{FlowKey, Instant, Protocol, SessionId, Slot};

/// A process that has opened that many connections by the server may open more: ports for a single one do not pay.
const OPENS_BEFORE: u32 = 4;

/// First and largest number of ports of an address that are requested at a time.
const FIRST: usize = 32;
const MOST_AT_A_TIME: usize = 512;

/// How long ports stay under lease that nobody uses, and how long the server is not asked again after a refusal.
const UNUSED_FOR: Duration = Duration::from_secs(10);
const REFUSED_FOR: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// The slot of the ports' rows, once there are any.
    slot: Option<Slot>,
    pub(super) flows: LeasedPorts,
    pools: Vec<Pool>,
    /// Ports that the server has connections of, with the times since when: no other connection is opened from them.
    spent: Vec<(Instant, SessionId)>,
    /// Connections opened by the server.
    opens_by_server: u32,
    /// When the server may be asked again; in the far future while a thread does.
    next_request: Instant,
}

/// The ports of one address.
#[derive(Debug)]
struct Pool {
    local: IpAddr,
    rules: OpenRules,
    /// The one that was used least recently first.
    ports: VecDeque<LeasedPort>,
    used: Instant,
}

/// How to open a connection.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart where it is made"
)]
pub(crate) enum Way {
    /// By a request to the server.
    Server,
    /// From a port that the process has.
    Here(OwnOpen),
    /// After a request for ports of this address, with their slot.
    Lease {
        local: IpAddr,
        slot: Slot,
        most: u32,
    },
}

/// A connection that is about to be opened: no other one gets its flow, or its slot.
#[derive(Debug)]
pub(crate) struct OwnOpen {
    pub(crate) port: SessionId,
    pub(super) slot: Slot,
    pub(crate) flow: FlowKey,
    pub(super) path: Path,
    pub(super) rules: OpenRules,
}

impl Leases {
    /// Does the process open enough connections?
    pub(super) fn pay(&self) -> bool {
        self.opens_by_server >= OPENS_BEFORE
    }

    pub(crate) fn note_open_by_server(&mut self) {
        self.opens_by_server = self.opens_by_server.saturating_add(1);
    }

    /// Returns the ports' connections if the frame came by their rows.
    pub(super) fn of(&mut self, record: &RecordHeader) -> Option<&mut LeasedPorts> {
        let slot = self.slot?;
        let is_theirs = record.flags & RecordHeader::BINDING != 0 && record.slot == slot.0;
        is_theirs.then_some(&mut self.flows)
    }

    /// Takes the port of `local` that was used least recently, for a connection to `remote`.
    pub(super) fn next_port(
        &mut self,
        local: IpAddr,
        remote: SocketAddr,
    ) -> Option<(LeasedPort, FlowKey)> {
        let pool = self.pool(local)?;
        let port = pool.ports.pop_front()?;
        pool.ports.push_back(port);
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: SocketAddr::new(local, port.number),
            remote,
        };
        Some((port, flow))
    }

    /// A connection is opened from a port of `local`. Returns the rules for it.
    pub(super) fn note_use(&mut self, now: Instant, local: IpAddr) -> Option<OpenRules> {
        let pool = self.pool(local)?;
        pool.used = now;
        Some(pool.rules.clone())
    }

    pub(super) fn count_of(&mut self, local: IpAddr) -> usize {
        self.pool(local).map_or(0, |pool| pool.ports.len())
    }

    /// The server may be asked for more ports of `local`: returns how many. Nobody else asks until [`Leases::add`].
    pub(super) fn begin_request(&mut self, now: Instant, local: IpAddr) -> Option<u32> {
        if self.next_request > now {
            return None;
        }
        self.next_request = Instant::FAR_FUTURE;
        let have = self.count_of(local);
        Some(have.clamp(FIRST, MOST_AT_A_TIME) as u32)
    }

    /// The slot of the ports' rows.
    pub(super) fn slot_or(&mut self, reserve: impl FnOnce() -> Slot) -> Slot {
        *self.slot.get_or_insert_with(reserve)
    }

    /// Adds the ports that the server has leased, if it has.
    pub(crate) fn add(
        &mut self,
        now: Instant,
        local: IpAddr,
        leased: Option<(Vec<LeasedPort>, OpenRules)>,
    ) {
        let leased = leased.filter(|(ports, _)| !ports.is_empty());
        let Some((ports, rules)) = leased else {
            self.next_request = now + REFUSED_FOR;
            return;
        };
        self.next_request = now;
        match self.pool(local) {
            Some(pool) => {
                pool.rules = rules;
                // They are used first.
                ports
                    .into_iter()
                    .for_each(|port| pool.ports.push_front(port));
            }
            None => self.pools.push(Pool {
                local,
                rules,
                ports: ports.into(),
                used: now,
            }),
        }
    }

    /// The server has a connection of the port from now on, and keeps it in TIME-WAIT later: its row would take the segments
    /// of another one to the same peer.
    pub(super) fn spend(&mut self, now: Instant, id: SessionId) {
        for pool in &mut self.pools {
            let before = pool.ports.len();
            pool.ports.retain(|port| port.id != id);
            if pool.ports.len() < before {
                self.spent.push((now, id));
            }
        }
    }

    /// Takes the ports with that number, which the program wants for itself.
    pub(crate) fn take_port(&mut self, number: u16) -> Vec<SessionId> {
        let mut taken = Vec::new();
        for pool in &mut self.pools {
            let wanted = pool.ports.iter().filter(|port| port.number == number);
            taken.extend(wanted.map(|port| port.id));
            pool.ports.retain(|port| port.number != number);
        }
        taken
    }

    /// Returns when ports may have been unused for long enough.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let unused = self.pools.iter().map(|pool| pool.used + UNUSED_FOR);
        let spent = self.spent.first().map(|(since, _)| *since + UNUSED_FOR);
        unused.chain(spent).min()
    }

    /// Takes the ports of addresses that were unused for long enough, with no connection on any port of theirs, and those
    /// that are spent.
    pub(super) fn take_unused(
        &mut self,
        now: Instant,
        used: &HashSet<SessionId>,
    ) -> Vec<SessionId> {
        let is_due = |pool: &Pool| pool.used + UNUSED_FOR <= now;
        let is_used = |port: &LeasedPort| used.contains(&port.id);
        let is_unused = |pool: &mut Pool| is_due(pool) && !pool.ports.iter().any(is_used);
        let unused = self.pools.extract_if(.., is_unused);
        let ports = unused.flat_map(|pool| pool.ports).map(|port| port.id);
        let mut ports: Vec<SessionId> = ports.collect();
        let is_free = |(_, id): &mut (Instant, SessionId)| !used.contains(id);
        ports.extend(self.spent.extract_if(.., is_free).map(|(_, id)| id));
        for (since, _) in &mut self.spent {
            *since = now;
        }
        // Looked at again after the same time.
        for pool in self.pools.iter_mut().filter(|pool| is_due(pool)) {
            pool.used = now;
        }
        ports
    }

    pub(super) fn has(&self, id: SessionId) -> bool {
        let mut ports = self.pools.iter().flat_map(|pool| &pool.ports);
        ports.any(|port| port.id == id) || self.spent.iter().any(|(_, spent)| *spent == id)
    }

    /// The server that has leased the ports is gone; their connections may continue.
    pub(super) fn forget_ports(&mut self, now: Instant) {
        self.pools.clear();
        self.spent.clear();
        self.next_request = now;
    }

    /// Returns the slot of the ports' rows, which nothing arrives at any more.
    pub(super) fn forget(&mut self) -> Option<Slot> {
        std::mem::take(self).slot
    }

    fn pool(&mut self, local: IpAddr) -> Option<&mut Pool> {
        self.pools.iter_mut().find(|pool| pool.local == local)
    }
}
