//! The state machine: events come in as [`Input`]s, work to be done goes out as [`Effect`]s. It owns all that the
//! server knows of sessions, and their deadlines. The code that performs the effects owns descriptors, memory, the
//! engine and the packet filter, and decides nothing.
//!
//! # Call contract
//! Effects are performed in order. Each is completed, together with the inputs that it leads to, before the next. An
//! effect whose session an earlier one has removed does nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use portolan_proto::filter::{BindingKey, Flood};
use portolan_proto::report::MigrationTimes;
use portolan_timers::Queue;
use portolan_types::{ChannelId, FlowKey, Instant, Protocol, SessionId, Slot};

use crate::budget::Limit;
use crate::counters::Counters;
use crate::errno::Errno;
use crate::flooding::Floods;
use crate::listener_table::ListenerTable;
use crate::orphans::{OrphanLimits, Orphans};
use crate::ports::{ClaimId, PortTable};
use crate::recall::{REQUESTERS_MAX, Recall, RequestedState, Requester};
use crate::registry::{Limits, Registry};
use crate::relay::{Interest, RelayProgress, Relays, Start};
use crate::session::{Closing, Holder, Life, SessionEntry};
use crate::sharing::UdpEndpoint;
use crate::timer::{Deadline, Timer};

#[cfg(test)]
pub(crate) mod tests;

/// How long the port of an aborted connection is held back from reuse: as long as TIME-WAIT.
pub(crate) const HOLD_BACK: Duration = Duration::from_secs(60);

/// First wait for a peer's answer to the probe, doubled each time. Linux answers at most one segment outside the window
/// each 500 ms.
const PROBE_EVERY: Duration = Duration::from_millis(550);
const PROBES: u32 = 5;

/// Minimum age of a TIME-WAIT whose port a new connection to the same peer may take.
pub(crate) const REUSE_AFTER: Duration = Duration::from_secs(1);

/// How many of a user's own orphans are reset at once to make room for one more.
const EVICTED_AT_ONCE: usize = 64;

/// How long a holder may take to give a session back. A stopped or hung holder loses the session: the sequence numbers
/// are in its memory only, and what it has published is not enough to continue from.
const RECALL_WITHIN: Duration = Duration::from_secs(2);

/// Limits of what is admitted.
#[derive(Clone, Copy, Debug)]
pub struct ControlLimits {
    pub registry: Limits,
    pub orphans: OrphanLimits,
    /// Bytes held for relayed sessions.
    pub relay_memory: Limit,
    /// Sessions in TIME-WAIT.
    pub time_wait: usize,
}

/// State of a connection that the server is finishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Open,
    TimeWait,
    Closed,
}

/// An event.
#[derive(Clone, Debug)]
pub enum Input {
    /// Every copy of the session's descriptor is closed, and everything sent on it before was handled.
    HungUp(SessionId),
    /// Finish the session: send what is queued, FIN, TIME-WAIT.
    Close(SessionId),
    /// Reset the session.
    Abort(SessionId),
    /// Remove the session as it is.
    Forget(SessionId),
    /// The handshake of an active open failed: return to the state before `connect`.
    OpenFailed(SessionId),
    /// The program no longer wants connections: return to the state before `listen`.
    StoppedListening(SessionId),
    /// Stop steering packets to the session.
    Unsteer(SessionId),
    /// Keep the session for the next process that asks for it.
    Park(SessionId),
    /// The engine has begun to finish a session with `unsent` unacknowledged bytes.
    Finishing {
        id: SessionId,
        unsent: u64,
    },
    /// The engine's report on a closing session.
    Progress {
        id: SessionId,
        progress: Progress,
    },
    /// Answer to [`Effect::LookAtOrphan`].
    Unsent {
        id: SessionId,
        unsent: Option<u64>,
    },
    /// The process that held the session is gone, or its state is unusable.
    Orphaned(SessionId),
    /// The peer of a session whose holder died has sent its sequence numbers and was reset.
    ProbeAnswered(SessionId),
    /// The session begins to listen.
    Listens(SessionId),
    /// The session no longer listens.
    ListeningEnds(SessionId),
    /// A listener's accept queue was resized.
    Resized(SessionId),
    /// The handshake of a passive open is done, without data.
    Handshake(SessionId),
    /// The handshake of a passive open is done, and there is data to read.
    ReadableHandshake(SessionId),
    /// The handshake of a passive open failed.
    FailedHandshake(SessionId),
    /// The session's connection has ended, although its descriptor is open, and the peer opens another one with the same
    /// ports.
    FlowReused(SessionId),
    /// The session has left its listener's queue: a process has accepted it, or it is relayed.
    Accepted(SessionId, Option<ChannelId>),
    /// Both ends of an open within the host exist.
    LocalOpen(SessionId),
    /// Answer to [`Effect::TellLocalOpener`].
    LocalOpenerTold(SessionId, Result<(), Errno>),
    /// The port of a delegated listener is, or is about to be, used by others, too.
    WantBack(SessionId),
    /// Relay a session held by the server to the holders of its descriptor.
    Relay(SessionId, Start),
    /// Bytes of a relayed session were moved.
    Relayed(SessionId, RelayProgress),
    /// A requester wants a session that a process holds.
    Recall(SessionId, Requester),
    /// A session that was recalled is back.
    Returned(SessionId),
    Due(SessionId, Deadline),
}

/// Work for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Close the connection in the engine; [`Input::Finishing`] follows.
    CloseConnection(SessionId, Slot),
    ResetConnection(Slot),
    /// Write the rows of a listener.
    SteerListener(SessionId),
    CloseRows(Vec<BindingKey>),
    /// The filter no longer needs to know these flows to a listener.
    ForgetExempt(Vec<FlowKey>),
    /// Have the filter answer the SYNs to listeners.
    AnswerFlood(BindingKey, Box<Flood>),
    /// Stop the filter from doing so; [`Control::on_flood_ended`] follows.
    EndFlood(BindingKey),
    /// Review what the filter answers for a listener, which may have changed.
    ReviewFloods(SessionId),
    /// Announce connections that wait to be accepted.
    Announce(SessionId),
    /// Close and forget the server's end of a local session.
    CloseLocal(SessionId),
    ResetLocal(SessionId),
    /// The local session has no holder any more.
    UnholdLocal(SessionId),
    /// End the guarantees of the flow: it sends and receives nothing more.
    EndGuarantees(FlowKey),
    /// End the extensions of the session's port.
    EndExtensions(SessionId),
    /// Remove the session with everything that belongs to it.
    Forget(SessionId),
    /// Like `Forget`, once its last segments are sent.
    ForgetWhenSent(SessionId),
    /// Remove the engine's connection, or packets held for a session that will not arrive.
    RemoveConnection(Slot),
    RemoveRow(FlowKey),
    /// Steer datagrams to the endpoint away from the session.
    LeaveEndpoint(SessionId, UdpEndpoint),
    /// Reset the server's end of a local session unless it has ended, and release it.
    DropLocalEnd(SessionId),
    /// Close the kernel socket on its port.
    ReleasePort(SessionId),
    /// Release all descriptors and memory that the server has for the session.
    Release(SessionId),
    /// Steer its packets to the server, where no session takes them.
    SteerToNobody(SessionId),
    /// Send a segment outside any window, which makes the peer acknowledge (RFC 9293 §3.10.7.4); the reset that answers
    /// this acknowledgement is exact.
    Probe(FlowKey),
    /// Close the server's end of the descriptor.
    ClosePeerEnd(SessionId),
    /// Query the unsent bytes of an orphan; [`Input::Unsent`] follows.
    LookAtOrphan(SessionId),
    /// Ask a process to give a session back.
    Recall(ChannelId, SessionId),
    /// Move the bytes of a relayed session that can be moved; [`Input::Relayed`] follows.
    MoveBytes(SessionId),
    WatchPeerEnd(SessionId, Interest),
    /// Serve the request as if it had arrived now.
    Serve(SessionId, Requester),
    Refuse(Requester, Errno),
    /// Give an opener within the host its end; [`Input::LocalOpenerTold`] follows.
    TellLocalOpener(SessionId),
    /// Watch the server's end of a local session for its first bytes.
    WatchLocal(SessionId),
    /// Notify the opener that there is no connection; [`Input::OpenFailed`] follows.
    FailOpen(SessionId, Errno),
    TakeHandshakes(SessionId),
    /// The listener, whose rows are closed, deals its flows no longer.
    EndDeal(SessionId),
    OpenPortAtKernel(SessionId),
}

/// Effects, in the order in which they are performed.
pub type Effects = Vec<Effect>;

/// What the server of one network namespace knows and decides.
#[derive(Debug)]
pub struct Control {
    pub registry: Registry,
    pub ports: PortTable,
    pub listeners: ListenerTable,
    pub timers: Queue<Timer>,
    pub counters: Counters,
    pub migration_times: MigrationTimes,
    pub(crate) relays: Relays,
    pub(crate) floods: Floods,
    orphans: Orphans,
    /// Number of ports under lease.
    pub(crate) leased: usize,
    /// Sessions in TIME-WAIT, the oldest first.
    time_wait: BTreeSet<(Instant, SessionId)>,
    time_wait_max: usize,
}

impl Control {
    pub fn new(limits: &ControlLimits, ports: PortTable, now: Instant) -> Control {
        Control {
            registry: Registry::new(limits.registry),
            ports,
            listeners: ListenerTable::default(),
            timers: Queue::new(now),
            counters: Counters::default(),
            migration_times: MigrationTimes::default(),
            relays: Relays::new(limits.relay_memory),
            floods: Floods::default(),
            orphans: Orphans::new(&limits.orphans),
            leased: 0,
            time_wait: BTreeSet::new(),
            time_wait_max: limits.time_wait,
        }
    }

    /// Changes the limits for requests from now on.
    pub fn set_limits(&mut self, limits: &ControlLimits) {
        self.registry.set_limits(&limits.registry);
        self.orphans.set_limits(&limits.orphans);
        self.relays.memory.set_limit(limits.relay_memory);
        self.time_wait_max = limits.time_wait;
    }

    pub fn handle(&mut self, input: Input, now: Instant) -> Effects {
        let mut effects = Effects::new();
        let out = &mut effects;
        match input {
            Input::HungUp(id) => self.on_hangup(id, now, out),
            Input::Close(id) => self.close(id, out),
            Input::Abort(id) => self.abort(id, out),
            Input::Forget(id) => {
                self.end_lease(id, now, out);
                self.forget(id, out);
            }
            Input::OpenFailed(id) => self.on_open_failed(id, out),
            Input::StoppedListening(id) => self.on_stopped_listening(id, out),
            Input::Unsteer(id) => self.unsteer(id, out),
            Input::Park(id) => self.park(id, out),
            Input::Finishing { id, unsent } => self.note_orphan(id, unsent, now, out),
            Input::Progress { id, progress } => self.on_progress(id, progress, now, out),
            Input::Unsent { id, unsent } => self.on_unsent(id, unsent, now, out),
            Input::Orphaned(id) => self.on_orphaned(id, now, out),
            Input::ProbeAnswered(id) => self.quarantine_port(id, now, out),
            Input::Listens(id) => self.open_port(id, now, out),
            Input::ListeningEnds(id) => self.end_listening(id, out),
            Input::Resized(id) => self.admit_crowded_out(id, out),
            Input::Handshake(id) => self.on_handshake(id, now, out),
            Input::ReadableHandshake(id) => self.on_readable_handshake(id, out),
            Input::FailedHandshake(id) => self.on_failed_handshake(id, out),
            Input::FlowReused(id) => self.on_flow_reused(id, out),
            Input::Accepted(id, acceptor) => self.on_accepted(id, acceptor, out),
            Input::LocalOpen(id) => self.on_local_open(id, now, out),
            Input::LocalOpenerTold(id, is_told) => {
                self.on_local_opener_told(id, is_told, now, out);
            }
            Input::WantBack(id) => self.want_back(id, now, out),
            Input::Relay(id, start) => self.start_relay(id, start, now, out),
            Input::Relayed(id, progress) => self.on_relayed(id, progress, now, out),
            Input::Recall(id, requester) => self.recall(id, requester, now, out),
            Input::Returned(id) => self.on_returned(id, now, out),
            Input::Due(id, deadline) => self.on_due(id, deadline, now, out),
        }
        effects
    }

    /// Sets a deadline of a session, replacing an earlier one of its kind. It is removed with the session.
    pub fn arm(&mut self, id: SessionId, deadline: Deadline, at: Instant) {
        if let Some(session) = self.registry.session_mut(id) {
            session.armed |= deadline.bit();
            self.timers.arm(Timer::Session(id, deadline), at);
        }
    }

    pub fn disarm(&mut self, id: SessionId, deadline: Deadline) {
        self.timers.disarm(Timer::Session(id, deadline));
    }

    fn on_due(&mut self, id: SessionId, deadline: Deadline, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        match (deadline, &session.life) {
            (Deadline::Defer, Life::Handshake { .. }) => self.on_readable_handshake(id, out),
            (Deadline::LocalConnect, Life::Connecting { .. }) => self.on_late_local_open(id, out),
            (Deadline::Recall, _) if session.recall.is_some() => {
                self.counters.recall_timeouts += 1;
                match session.local_peer {
                    Some(_) => self.abort(id, out),
                    None => self.on_orphaned(id, now, out),
                }
            }
            (Deadline::Relay, Life::Relayed(_)) => self.end_allowance(id, out),
            (Deadline::Probe, Life::Closing(Closing::Probing { .. })) => self.probe(id, now, out),
            (Deadline::Orphan, Life::Closing(Closing::Finishing(Some(_)))) => {
                out.push(Effect::LookAtOrphan(id));
            }
            (Deadline::Delegation, _) => self.on_delegation_due(id, out),
            (Deadline::PortTransition, _) => out.push(Effect::OpenPortAtKernel(id)),
            _ => {}
        }
    }

    // Descriptors.

    fn on_hangup(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        match (&session.life, session.protocol) {
            (Life::Connected, Protocol::Tcp) => self.on_orphaned(id, now, out),
            (Life::Offered, _) => self.abort(id, out),
            (Life::Parked, _) => self.close(id, out),
            (Life::Listening(_), _) => {
                self.end_listening(id, out);
                out.push(Effect::Forget(id));
            }
            (Life::Relayed(_), Protocol::Tcp) | (Life::Closing(_) | Life::Handshake { .. }, _) => {}
            (Life::Bound | Life::Leased | Life::Connecting { .. }, _)
            | (Life::Connected | Life::Relayed(_), Protocol::Udp) => out.push(Effect::Forget(id)),
        }
    }

    /// Keeps a session for the next process that asks for it, as long as its descriptor is open.
    fn park(&mut self, id: SessionId, out: &mut Effects) {
        match self.registry.session_mut(id) {
            Some(session) if session.is_closing() => {}
            Some(session) if session.has_descriptor => session.life = Life::Parked,
            Some(_) => self.close(id, out),
            None => {}
        }
    }

    // Closing.

    pub(crate) fn close(&mut self, id: SessionId, out: &mut Effects) {
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        if session.local_peer.is_some() {
            return out.push(Effect::CloseLocal(id));
        }
        session.begin_closing();
        if let Holder::Server(slot) = session.holder {
            out.push(Effect::CloseConnection(id, slot));
        }
    }

    pub(crate) fn abort(&mut self, id: SessionId, out: &mut Effects) {
        self.counters.aborts += 1;
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        if session.local_peer.is_some() {
            return out.push(Effect::ResetLocal(id));
        }
        session.begin_closing();
        out.push(match session.holder {
            Holder::Server(slot) => Effect::ResetConnection(slot),
            Holder::None | Holder::Process(..) => Effect::Forget(id),
        });
    }

    /// Counts a connection that the server finishes for a program. Where there are too many, the oldest of the same
    /// user are reset.
    fn note_orphan(&mut self, id: SessionId, unsent: u64, now: Instant, out: &mut Effects) {
        let Some(uid) = self.registry.session(id).map(|session| session.uid) else {
            return;
        };
        self.release_orphan(id);
        for _ in 0..EVICTED_AT_ONCE {
            if let Ok(orphan) = self.orphans.admit(id, uid, unsent) {
                match self
                    .registry
                    .session_mut(id)
                    .map(|session| &mut session.life)
                {
                    Some(Life::Closing(Closing::Finishing(place))) => {
                        *place = Some(orphan);
                        self.arm(id, Deadline::Orphan, now + self.orphans.patience);
                    }
                    _ => self.orphans.remove(uid, orphan),
                }
                return;
            }
            let Some(oldest) = self.orphans.oldest_of(uid) else {
                break;
            };
            self.reset_orphan(oldest, out);
        }
        self.reset_orphan(id, out);
    }

    fn reset_orphan(&mut self, id: SessionId, out: &mut Effects) {
        self.counters.orphans_reset += 1;
        self.release_orphan(id);
        self.abort(id, out);
    }

    fn release_orphan(&mut self, id: SessionId) {
        if let Some(session) = self.registry.session_mut(id)
            && let Life::Closing(Closing::Finishing(orphan)) = &mut session.life
            && let Some(orphan) = orphan.take()
        {
            let uid = session.uid;
            self.orphans.remove(uid, orphan);
        }
    }

    fn on_unsent(&mut self, id: SessionId, unsent: Option<u64>, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        let Life::Closing(Closing::Finishing(Some(orphan))) = &mut session.life else {
            return;
        };
        let Some(unsent) = unsent else {
            return;
        };
        // For a peer that does not close, FIN-WAIT-2 has its own time-out.
        if orphan.has_shrunk_to(unsent) || unsent == 0 {
            self.arm(id, Deadline::Orphan, now + self.orphans.patience);
        } else {
            self.reset_orphan(id, out);
        }
    }

    fn on_progress(&mut self, id: SessionId, progress: Progress, now: Instant, out: &mut Effects) {
        let session = self.registry.session(id);
        let is_closing = session.is_some_and(SessionEntry::is_closing);
        match progress {
            Progress::TimeWait if is_closing => self.enter_time_wait(id, now, out),
            Progress::Closed if is_closing => out.push(Effect::ForgetWhenSent(id)),
            Progress::Open | Progress::TimeWait | Progress::Closed => {}
        }
    }

    /// Enters TIME-WAIT: nothing more is sent or received. Above the limit the oldest entries are removed.
    fn enter_time_wait(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        self.release_orphan(id);
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        match &mut session.life {
            Life::Closing(closing @ Closing::Finishing(_)) => {
                *closing = Closing::TimeWait { since: now };
            }
            _ => return,
        }
        // It has no descriptor, and a limit of its own.
        session.charge = None;
        out.extend(session.flow().map(Effect::EndGuarantees));
        self.time_wait.insert((now, id));
        while self.time_wait.len() > self.time_wait_max
            && let Some((_, oldest)) = self.time_wait.pop_first()
        {
            self.counters.time_wait_evicted += 1;
            out.push(Effect::Forget(oldest));
        }
    }

    /// Returns the oldest TIME-WAIT to `remote` that is old enough for reuse of its ports: timestamps tell its late segments
    /// from the new connection's (RFC 6191; Linux's `tcp_tw_reuse`). If `local` has no port, it has one that is free without
    /// it: a lease, or what is held back after one, would keep it.
    pub fn reusable_time_wait(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        now: Instant,
    ) -> Option<SessionId> {
        let is_between = |session: &SessionEntry| {
            session.local.ip() == local.ip() && session.remote == Some(remote)
        };
        let is_on_port = |session: &SessionEntry| match local.port() {
            0 => self.ports.would_be_free_without(session.claims()),
            port => session.local.port() == port,
        };
        let old = self.time_wait.iter();
        old.take_while(|(since, _)| now.since(*since) >= REUSE_AFTER)
            .filter_map(|(_, id)| self.registry.session(*id))
            .find(|session| is_between(session) && is_on_port(session))
            .map(|session| session.id)
    }

    /// Handles the loss of the holder, and with it of a connection's sequence numbers.
    pub(crate) fn on_orphaned(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        if session.local_peer.is_some() {
            out.push(Effect::UnholdLocal(id));
            // Other processes may have the descriptor.
            self.park(id, out);
            if self.is_parked(id) {
                self.on_returned(id, now, out);
            }
            return;
        }
        let is_closing = session.is_closing();
        let has_no_peer = session.remote.is_none() || session.is_flow_reused;
        if session.protocol == Protocol::Udp || has_no_peer {
            return out.push(Effect::Forget(id));
        }
        self.fail_recall(id, out);
        if is_closing {
            return;
        }
        self.counters.aborts += 1;
        self.registry.detach(id);
        self.drop_awaited(id, out);
        if let Some(session) = self.registry.session_mut(id) {
            session.life = Life::Closing(Closing::Probing { tries: 0 });
        }
        out.extend([Effect::ClosePeerEnd(id), Effect::SteerToNobody(id)]);
        self.probe(id, now, out);
    }

    /// The session will not arrive: discards packets that wait for it.
    fn drop_awaited(&mut self, id: SessionId, out: &mut Effects) {
        let session = self.registry.session_mut(id);
        if let Some((slot, _)) = session.and_then(|session| session.awaited.take()) {
            out.push(Effect::RemoveConnection(slot));
        }
    }

    fn probe(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        let flow = session.flow();
        let Life::Closing(Closing::Probing { tries }) = &mut session.life else {
            return;
        };
        let before = *tries;
        match flow {
            Some(flow) if before < PROBES => {
                *tries += 1;
                self.arm(id, Deadline::Probe, now + PROBE_EVERY * (1 << before));
                out.push(Effect::Probe(flow));
            }
            _ => self.quarantine_port(id, now, out),
        }
    }

    /// Forgets a connection that ended abnormally, and holds its port back.
    fn quarantine_port(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let session = self.registry.session_mut(id);
        if let Some(claim) = session.and_then(|session| session.flow_claim.take()) {
            self.hold_port_back(claim, now);
        }
        out.push(Effect::Forget(id));
    }

    /// Nobody else gets the claim's port for a while.
    pub(crate) fn hold_port_back(&mut self, claim: ClaimId, now: Instant) {
        self.ports.hold_back(claim, now + HOLD_BACK);
        self.watch_ports();
    }

    /// Keeps the port of a closed connection in TIME-WAIT. At most half of the ephemeral ports are kept, so that new
    /// connections always find one.
    pub fn keep_port(&mut self, claim: ClaimId, until: Instant) {
        let most = self.time_wait_max.min(self.ports.ephemeral() / 2);
        if self.ports.linger(claim, until, most) {
            self.counters.time_wait_evicted += 1;
        }
        self.watch_ports();
    }

    pub(crate) fn watch_ports(&mut self) {
        if let Some(next) = self.ports.next_expiry() {
            self.timers.arm(Timer::Ports, next);
        }
    }

    /// Frees ports whose time has expired.
    pub fn expire_ports(&mut self, now: Instant) {
        if let Some(next) = self.ports.expire(now) {
            self.timers.arm(Timer::Ports, next);
        }
    }

    /// Removes the session with all that is known of it. The effects release its other resources; pending requesters
    /// are refused.
    pub(crate) fn forget(&mut self, id: SessionId, out: &mut Effects) {
        self.release_orphan(id);
        let accepter = self.registry.session(id).and_then(|it| it.local_peer);
        if self.leave_local_opens(id, accepter) {
            out.extend(accepter.map(Effect::Forget));
        }
        self.vacate(id, out);
        let Some(mut session) = self.registry.remove(id) else {
            return;
        };
        let flow = session.flow().filter(|_| !session.is_flow_reused);
        out.extend(flow.map(Effect::EndGuarantees));
        out.extend([Effect::EndExtensions(id), Effect::Release(id)]);
        match session.life {
            Life::Closing(Closing::TimeWait { since }) => {
                self.time_wait.remove(&(since, id));
            }
            Life::Leased => self.leased = self.leased.saturating_sub(1),
            _ => {}
        }
        for deadline in Deadline::ALL {
            if session.armed & deadline.bit() != 0 {
                self.disarm(id, deadline);
            }
        }
        for claim in session.take_claims() {
            self.ports.release(claim);
        }
        for requester in session.recall.into_iter().flat_map(|it| it.requesters) {
            self.refuse(requester, Errno::CONNRESET, out);
        }
    }

    /// Removes the session from the engine, the filter and local shared memory.
    pub(crate) fn vacate(&mut self, id: SessionId, out: &mut Effects) {
        self.drop_awaited(id, out);
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        out.extend(session.server_slot().map(Effect::RemoveConnection));
        if session.local_peer.take().is_some() {
            out.push(Effect::DropLocalEnd(id));
        }
        self.unsteer(id, out);
    }

    /// From now on the flow is another session's.
    fn on_flow_reused(&mut self, id: SessionId, out: &mut Effects) {
        let Some(flow) = self.registry.give_up_flow(id) else {
            return;
        };
        out.extend([Effect::RemoveRow(flow), Effect::EndGuarantees(flow)]);
        let session = self.registry.session_mut(id);
        let Some(session) = session else {
            return;
        };
        // Probes would meet the other connection.
        if session.is_probing() {
            out.push(Effect::Forget(id));
        }
        if let Some(claim) = session.flow_claim.take() {
            self.ports.release(claim);
        }
    }

    fn unsteer(&mut self, id: SessionId, out: &mut Effects) {
        let row = self.registry.unsteer(id);
        out.extend(row.map(Effect::RemoveRow));
        if let Some(session) = self.registry.session(id)
            && session.protocol == Protocol::Udp
        {
            out.push(Effect::LeaveEndpoint(id, session.into()));
        }
    }

    // Recalls.

    fn recall(&mut self, id: SessionId, requester: Requester, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session_mut(id) else {
            return self.refuse(requester, Errno::BADF, out);
        };
        match &mut session.recall {
            Some(recall) if recall.requesters.len() < REQUESTERS_MAX => {
                recall.requesters.push(requester);
            }
            Some(_) => self.refuse(requester, Errno::NOBUFS, out),
            None => {
                session.recall = Some(Recall {
                    requesters: vec![requester],
                    since: now,
                });
                session.recalls += 1;
                self.counters.recalls += 1;
                if let Holder::Process(holder, _) = session.holder {
                    out.push(Effect::Recall(holder, id));
                }
                self.arm(id, Deadline::Recall, now + RECALL_WITHIN);
            }
        }
    }

    fn take_recall(&mut self, id: SessionId) -> Option<Recall> {
        let session = self.registry.session_mut(id);
        let recall = session.and_then(|session| session.recall.take())?;
        self.disarm(id, Deadline::Recall);
        Some(recall)
    }

    /// Serves the requesters of a session that is back. From the second recall on the session is relayed, since no
    /// process could keep it for long.
    fn on_returned(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(Recall { requesters, since }) = self.take_recall(id) else {
            return;
        };
        self.migration_times.recalled.observe(now.since(since));
        let is_first = self.registry.session(id).is_some_and(|s| s.recalls <= 1);
        let may_move = matches!(
            requesters[..],
            [Requester {
                want: RequestedState::CacheAt(_),
                ..
            }]
        );
        if self.is_parked(id) && !(is_first && may_move) {
            self.start_relay(id, Start::AtOnce, now, out);
        }
        let serve = requesters.into_iter().map(|it| Effect::Serve(id, it));
        out.extend(serve);
    }

    fn is_parked(&self, id: SessionId) -> bool {
        let session = self.registry.session(id);
        session.is_some_and(|session| matches!(session.life, Life::Parked))
    }

    /// Refuses the requesters of a session that will not come back.
    fn fail_recall(&mut self, id: SessionId, out: &mut Effects) {
        let recall = self.take_recall(id);
        for requester in recall.into_iter().flat_map(|recall| recall.requesters) {
            self.refuse(requester, Errno::CONNRESET, out);
        }
    }

    fn refuse(&mut self, requester: Requester, errno: Errno, out: &mut Effects) {
        self.counters.refused += 1;
        out.push(Effect::Refuse(requester, errno));
    }
}
