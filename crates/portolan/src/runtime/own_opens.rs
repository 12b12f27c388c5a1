//! Connections that this process opens from ports under lease, without a request to the server (ADR 31).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::control::{HandshakeOptions, LeasedPort};
use portolan_proto::metastate::RouteKind;
use portolan_stack::passive::{path_config, tune_config, tune_connection};
use portolan_stack::{Path, Session, TcpSession};
use portolan_tcp::isn::{Secret, initial_sequence};
use portolan_tcp::{Connection, Events};
use portolan_types::{FlowKey, Instant, SessionId, Slot, is_scoped};
use rustix::io::Errno;

use crate::runtime::leases::{OwnOpen, Way};
use crate::runtime::{Core, NewSession};
use crate::socket::{Socket, SocketState};

/// Ports looked at for one whose connection to the same peer is over.
const LOOKED_AT: usize = 64;

/// Age of a TIME-WAIT that another connection may replace: timestamps tell their segments apart (RFC 6191; Linux's
/// `tcp_tw_reuse`).
const REUSE_AFTER: Duration = Duration::from_secs(1);

impl Core {
    /// Returns how to open a connection to `remote` from an ephemeral port.
    pub(crate) fn way_to(&mut self, now: Instant, remote: SocketAddr) -> Way {
        if !self.leases.pay() {
            return Way::Server;
        }
        self.refresh_routes();
        let Some((path, local)) = self.path_from_here(remote) else {
            return Way::Server;
        };
        if let Some((port, flow)) = self.choose_port(now, local, remote)
            && let Some(rules) = self.leases.note_use(now, local)
        {
            let slot = self.stack.reserve();
            self.leases.flows.opened(slot, flow);
            return Way::Here(OwnOpen {
                port: port.id,
                slot,
                flow,
                path,
                rules,
            });
        }
        match self.leases.begin_request(now, local) {
            Some(most) => {
                let stack = &mut self.stack;
                let slot = self.leases.slot_or(|| stack.reserve());
                Way::Lease { local, slot, most }
            }
            None => Way::Server,
        }
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
        for _ in 0..self.leases.count_of(local).min(LOOKED_AT) {
            let (port, flow) = self.leases.next_port(local, remote)?;
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

    /// The connection is not opened after all.
    pub(crate) fn give_up_open(&mut self, open: &OwnOpen) {
        self.leases.flows.forget_ended(open.slot, &open.flow);
        self.stack.remove(open.slot);
    }

    /// Opens a connection for the socket: sends its SYN. Returns false if there is no room for it in the journal.
    pub(crate) fn open_here(
        &mut self,
        now: Instant,
        socket: &Arc<Socket>,
        open: &OwnOpen,
        options: &HandshakeOptions,
    ) -> bool {
        let flow = open.flow;
        let secret = Secret(open.rules.secret);
        let timestamp_secret = Secret(open.rules.timestamp_secret);
        let mut config = path_config(&open.rules.config, &open.path, &flow, &timestamp_secret);
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
        let slot = open.slot;
        if !self.enter_unregistered(now, open.port, (slot, flow)) {
            self.give_up_open(open);
            return false;
        }
        socket.become_unless_closed(SocketState::Connecting { slot });
        self.put(now, slot, NewSession::Session(session));
        self.attach(slot, Arc::clone(socket));
        self.poll(now);
        true
    }

    /// A connection that is being opened here has had events: notes its outcome, if it has one.
    pub(super) fn note_open(&mut self, slot: Slot, socket: &Arc<Socket>, events: Events) {
        if events.contains(Events::CONNECTED) {
            if socket.change(SocketState::Cached { slot }).is_err() {
                return;
            }
            if let Some(session) = self.stack.get_mut(slot) {
                // Options may have been set since.
                socket.options().apply(session);
            }
            self.notify_seq += 1;
            socket.notify(events | Events::WRITABLE);
        } else if events.intersects(Events::CLOSED | Events::ERROR) {
            let session = self.stack.tcp(slot);
            let error = session.and_then(|session| session.connection.take_error());
            let errno = error.map_or(Errno::TIMEDOUT.raw_os_error(), |error| error.errno());
            socket.set_error(errno);
            if socket.change(SocketState::Idle).is_ok() {
                self.abandon_open(slot);
                self.notify_seq += 1;
                socket.notify(Events::ERROR);
            }
        }
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
        self.leases.take_unused(now, &used)
    }

    /// Without a server, and without its rows in the filters.
    pub(super) fn forget_leases(&mut self) {
        if let Some(slot) = self.leases.forget() {
            self.stack.remove(slot);
        }
    }

    /// Sends the answers to segments of no connection.
    pub(super) fn answer_strays(&mut self) {
        if self.leases.flows.has_answers() {
            self.leases.flows.answer(&self.routes, &mut self.channel);
        }
    }
}
