//! Ports under lease (ADR 31), and the connections that this process opens from them without a request to the server.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::control::{HandshakeOptions, LeasedPort};
use portolan_proto::filter::RecordHeader;
use portolan_proto::metastate::RouteKind;
use portolan_stack::passive::{OpenRules, path_config, tune_config, tune_connection};
use portolan_stack::{LeasedPorts, Path, Session, TcpSession};
use portolan_tcp::isn::{Secret, initial_sequence};
use portolan_tcp::{Connection, Events};
use portolan_types::{FlowKey, Instant, Protocol, SessionId, Slot, is_scoped};
use rustix::io::Errno;

use crate::runtime::{Core, NewSession};
use crate::socket::{Socket, SocketState};

/// A process that has opened that many connections by the server may open more: ports for a single one do not pay.
const OPENS_BEFORE: u32 = 4;

/// First and largest number of ports of an address.
const FIRST: usize = 32;
const MOST: usize = 512;

/// Ports looked at for one whose connection to the same peer is over.
const LOOKED_AT: usize = 64;

/// Age of a TIME-WAIT that another connection may replace: timestamps tell their segments apart (RFC 6191; Linux's
/// `tcp_tw_reuse`).
const REUSE_AFTER: Duration = Duration::from_secs(1);

/// How long ports stay under lease that nobody uses, and how long the server is not asked again after a refusal.
const UNUSED_FOR: Duration = Duration::from_secs(10);
const REFUSED_FOR: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// The slot of the ports' rows, once there are any.
    slot: Option<Slot>,
    pub(super) flows: LeasedPorts,
    pools: Vec<Pool>,
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

/// A connection that is about to be opened.
#[derive(Debug)]
pub(crate) struct OwnOpen {
    port: SessionId,
    pub(crate) flow: FlowKey,
    path: Path,
    rules: OpenRules,
}

impl OwnOpen {
    pub(crate) fn port(&self) -> SessionId {
        self.port
    }
}

impl Pool {
    /// Whether it has been unused for long enough, and no connection is on any of its ports.
    fn is_idle(&self, now: Instant, used: &HashSet<SessionId>) -> bool {
        let is_used = |port: &LeasedPort| used.contains(&port.id);
        self.used + UNUSED_FOR <= now && !self.ports.iter().any(is_used)
    }
}

impl Leases {
    /// Returns the ports' connections if the frame came by their rows.
    pub(super) fn of(&mut self, record: &RecordHeader) -> Option<&mut LeasedPorts> {
        let slot = self.slot?;
        let is_theirs = record.flags & RecordHeader::BINDING != 0 && record.slot == slot.0;
        is_theirs.then_some(&mut self.flows)
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

    pub(crate) fn note_open_by_server(&mut self) {
        self.opens_by_server = self.opens_by_server.saturating_add(1);
    }

    /// Returns when ports may have been unused for long enough.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.pools.iter().map(|pool| pool.used + UNUSED_FOR).min()
    }

    fn pool(&mut self, local: IpAddr) -> Option<&mut Pool> {
        self.pools.iter_mut().find(|pool| pool.local == local)
    }
}

impl Core {
    /// Returns how to open a connection to `remote` from an ephemeral port.
    pub(crate) fn way_to(&mut self, now: Instant, remote: SocketAddr) -> Way {
        if self.leases.opens_by_server < OPENS_BEFORE {
            return Way::Server;
        }
        self.refresh_routes();
        let Some((path, local)) = self.path_from_here(remote) else {
            return Way::Server;
        };
        if let Some((port, flow)) = self.choose_port(now, local, remote)
            && let Some(pool) = self.leases.pool(local)
        {
            pool.used = now;
            return Way::Here(OwnOpen {
                port: port.id,
                flow,
                path,
                rules: pool.rules.clone(),
            });
        }
        let have = self.leases.pool(local).map_or(0, |pool| pool.ports.len());
        if have >= MOST || self.leases.next_request > now {
            return Way::Server;
        }
        self.leases.next_request = Instant::FAR_FUTURE;
        let slot = match self.leases.slot {
            Some(slot) => slot,
            None => *self.leases.slot.insert(self.stack.reserve()),
        };
        let most = have.clamp(FIRST, MOST) as u32;
        Way::Lease { local, slot, most }
    }

    /// Returns the path to a peer on another host, and the address of this host's for it, if connections there may be
    /// opened here.
    fn path_from_here(&self, remote: SocketAddr) -> Option<(Path, IpAddr)> {
        let peer = remote.ip();
        if self.routes.obey_policy() || self.routes.is_local(peer) || is_scoped(peer) {
            return None;
        }
        let path = self.routes.path(peer).ok()?;
        let local = path.source.filter(|local| !is_scoped(*local))?;
        let is_fit = path.managed
            && path.kind == RouteKind::Unicast
            && remote.port() != 0
            && local.is_ipv4() == peer.is_ipv4()
            && self.routes.serves(local) == Some(true);
        is_fit.then_some((path, local))
    }

    fn choose_port(
        &mut self,
        now: Instant,
        local: IpAddr,
        remote: SocketAddr,
    ) -> Option<(LeasedPort, FlowKey)> {
        let count = self.leases.pool(local)?.ports.len().min(LOOKED_AT);
        for _ in 0..count {
            let pool = self.leases.pool(local)?;
            let port = pool.ports.pop_front()?;
            pool.ports.push_back(port);
            let flow = FlowKey {
                protocol: Protocol::Tcp,
                local: SocketAddr::new(local, port.number),
                remote,
            };
            let is_free = match self.leases.flows.slot_of(&flow) {
                None => true,
                Some(slot) => self.end_old_time_wait(now, slot),
            };
            if is_free {
                return Some((port, flow));
            }
        }
        None
    }

    /// Ends the closed connection at `slot` if it has been in TIME-WAIT for long enough.
    fn end_old_time_wait(&mut self, now: Instant, slot: Slot) -> bool {
        if !self.unregistered.is_closed(slot) {
            return false;
        }
        let session = self.stack.tcp(slot);
        let since = session.and_then(|it| it.connection.time_wait().map(|it| it.since()));
        let is_old = since.is_some_and(|since| since + REUSE_AFTER <= now);
        is_old && self.drop_unregistered(slot)
    }

    /// Opens a connection for the socket: sends its SYN. Returns false if there is no room for it in the journal.
    pub(crate) fn open_here(
        &mut self,
        now: Instant,
        socket: &Arc<Socket>,
        open: &OwnOpen,
        options: &HandshakeOptions,
    ) -> bool {
        let (flow, secret) = (open.flow, Secret(open.rules.secret));
        let mut config = path_config(&open.rules.config, &open.path, &flow, &secret);
        tune_config(&mut config, options);
        let isn = initial_sequence(&secret, &flow, now);
        let ports = (flow.local.port(), flow.remote.port());
        let mut connection = Connection::connect(&config, ports.0, ports.1, isn, now);
        tune_connection(&mut connection, options, open.rules.syn_retries);
        let session = TcpSession {
            ip: options.ip,
            ..TcpSession::new(SessionId(0), flow, connection)
        };
        let mut session = Session::Tcp(Box::new(session));
        socket.options().apply(&mut session);
        let slot = self.stack.reserve();
        if !self.enter_unregistered(now, open.port, (slot, flow)) {
            self.stack.remove(slot);
            return false;
        }
        self.leases.flows.opened(slot, flow);
        socket.become_unless_closed(SocketState::Connecting { slot });
        self.put(now, slot, NewSession::Session(session));
        self.attach(slot, Arc::clone(socket));
        self.poll(now);
        true
    }

    /// A connection that is being opened here has had events. Returns whether it is open.
    pub(super) fn note_open(&mut self, slot: Slot, socket: &Arc<Socket>, events: Events) -> bool {
        if events.contains(Events::CONNECTED) {
            let is_open = socket.change(SocketState::Cached { slot }).is_ok();
            if let (true, Some(session)) = (is_open, self.stack.get_mut(slot)) {
                // Options may have been set since.
                socket.options().apply(session);
            }
            return is_open;
        }
        if events.intersects(Events::CLOSED | Events::ERROR) {
            let error = self.stack.tcp(slot);
            let error = error.and_then(|session| session.connection.take_error());
            let errno = error.map_or(Errno::TIMEDOUT.raw_os_error(), |error| error.errno());
            socket.set_error(errno);
            if socket.change(SocketState::Idle).is_ok() {
                self.abandon_open(slot);
                socket.notify(Events::ERROR);
            }
        }
        false
    }

    /// The open at `slot` has failed, or nobody wants it any more. Returns false if it is the server's.
    pub(crate) fn abandon_open(&mut self, slot: Slot) -> bool {
        self.detach(slot);
        self.drop_unregistered(slot)
    }

    /// Takes ports that have been unused for long enough, to be returned.
    pub(crate) fn take_unused_ports(&mut self, now: Instant) -> Vec<SessionId> {
        if self.leases.deadline().is_none_or(|due| due > now) {
            return Vec::new();
        }
        let used = self.unregistered.used_ports();
        let is_idle = |pool: &mut Pool| pool.is_idle(now, &used);
        let idle = self.leases.pools.extract_if(.., is_idle);
        let ports = idle.flat_map(|pool| pool.ports).map(|port| port.id);
        let ports = ports.collect();
        for pool in &mut self.leases.pools {
            // Looked at again after the same time.
            if pool.used + UNUSED_FOR <= now {
                pool.used = now;
            }
        }
        ports
    }

    /// The server that has leased them is gone.
    pub(super) fn forget_leases(&mut self) {
        if let Some(slot) = self.leases.slot {
            self.stack.remove(slot);
        }
        self.leases = Leases::default();
    }

    /// Sends the answers to segments of no connection.
    pub(super) fn answer_strays(&mut self) {
        if self.leases.flows.has_answers() {
            self.leases.flows.answer(&self.routes, &mut self.channel);
        }
    }
}
