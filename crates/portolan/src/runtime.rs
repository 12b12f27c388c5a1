//! The sessions of this process and the channel that feeds them, behind one lock.

mod arrivals;
pub(crate) mod busy_listeners;
pub(crate) mod delegations;
pub(crate) mod leases;
pub(crate) mod lending;
pub(crate) mod locals;
pub(crate) mod migrated_flows;
pub(crate) mod openings;
pub(crate) mod orphans;
mod own_opens;
mod readiness;
mod tx_queues;
pub(crate) mod unregistered;

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use portolan_local::WakeBy;
use portolan_proto::control::RequestBody;
use portolan_stack::{NextHop, Routes, Session, Stack};
use portolan_sys::clock;
use portolan_sys::owner::IoEvent;
use portolan_sys::probes;
use portolan_sys::rx_path::RxPath;
use portolan_sys::shm::{JournalWriter, MetastateReader, StatisticsWriter};
use portolan_tcp::Events;
use portolan_types::{Instant, SessionId, Slot};
use rustix::io::Errno;

use crate::channel::Channel;
use crate::channel::captures::Captures;
use crate::channel::layers::{self, Layer};
use crate::channel::rings::OwnRing;
use crate::runtime::busy_listeners::BusyListeners;
use crate::runtime::delegations::Delegations;
use crate::runtime::leases::Leases;
use crate::runtime::lending::Lending;
use crate::runtime::locals::{Locals, NewEnd};
use crate::runtime::migrated_flows::MigratedFlows;
use crate::runtime::openings::{Openings, Taker};
use crate::runtime::orphans::{Orphan, Orphans};
use crate::runtime::tx_queues::TxQueueMap;
use crate::runtime::unregistered::Unregistered;
use crate::socket::inboxes::Inboxes;
use crate::socket::{Socket, SocketPhase};
use crate::wait::spin::Spread;
use crate::wait::waiter::Waiter;
use crate::wait::watch::{Leader, Needs, Role, SleepsOn, Watch};

/// Maximum number of batches processed for a session that leaves.
const LAST_BATCHES: usize = 32;

/// How long frames may arrive for a session that has left.
const WIRE_LINGERS: Duration = Duration::from_secs(1);

/// Messages to the server that may wait for the lock to be released; more are dropped, like packets.
const OUTBOX_MAX: usize = 256;

pub(crate) struct Core {
    pub(crate) stack: Stack,
    pub(crate) channel: Channel,
    pub(crate) tx_queues: TxQueueMap,
    pub(crate) locals: Locals,
    pub(crate) inboxes: Inboxes,
    pub(crate) delegations: Delegations,
    /// The listener whose connections the thread that polls accepts next: they are not announced.
    pub(crate) accepts_next: Option<SessionId>,
    pub(crate) busy_listeners: BusyListeners,
    pub(crate) unregistered: Unregistered,
    pub(crate) leases: Leases,
    pub(crate) lending: Lending,
    pub(crate) routes: Routes,
    metastate: MetastateReader,
    pub(crate) statistics: StatisticsWriter,
    sockets: Vec<Option<Arc<Socket>>>,
    /// Sessions of closed sockets that no server took over; they are finished here.
    orphans: Orphans,
    migrated_flows: MigratedFlows,
    pub(crate) watch: Watch<Arc<Waiter>>,
    pub(crate) openings: Openings,
    /// Counts additions to the descriptors that a leader polls.
    additions: u64,
    /// Streams with bytes that are tracked for time stamps.
    stamped: Vec<Slot>,
    pub(crate) outbox: Vec<RequestBody>,
    /// Connections that have left for the server, which did not know them and has not been told yet: what arrives for them
    /// follows them.
    pub(crate) leaving: usize,
    /// Signals to be sent to owners of sockets.
    pending_signals: Vec<(Arc<Socket>, OwnerSignal)>,
    /// Until when, at least, frames are expected.
    wire_until: Instant,
    /// Counts how often a thread has polled the channel.
    pub(crate) attended: u64,
    /// The latest time that a caller has named: another one may have read its clock earlier, and waited for the lock.
    latest: Instant,
    /// A thread spins: no other thread has to be asked to read frames.
    is_spinning: bool,
    /// The leader sleeps in an event loop of the program, which may compute instead of waking it.
    pub(crate) leader_computes: bool,
    /// Counts the notifications of sockets' watchers.
    pub(crate) notify_seq: u64,
    pub(crate) spread: Spread,
}

/// Memory that the process shares with the server.
pub(crate) struct SharedMemory {
    pub(crate) metastate: MetastateReader,
    pub(crate) statistics: StatisticsWriter,
    pub(crate) journal: JournalWriter,
}

/// The signal that a socket's owner gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnerSignal {
    /// SIGURG
    Urgent,
    /// SIGIO, with `O_ASYNC` only
    Io(IoEvent),
}

impl OwnerSignal {
    fn of(events: Events) -> Option<OwnerSignal> {
        let ended = Events::PEER_CLOSED | Events::ERROR | Events::CLOSED;
        if events.intersects(Events::READABLE | ended) {
            Some(OwnerSignal::Io(IoEvent::In))
        } else if events.intersects(Events::WRITABLE) {
            Some(OwnerSignal::Io(IoEvent::Out))
        } else {
            None
        }
    }
}

/// A session that moves to this process.
pub(crate) enum NewSession {
    Session(Session),
    Local(Box<NewEnd>),
}

impl Core {
    pub(crate) fn new(
        now: Instant,
        channel: Channel,
        locals: Locals,
        SharedMemory {
            metastate,
            statistics,
            journal,
        }: SharedMemory,
    ) -> Core {
        let routes = read_routes(&metastate).unwrap_or_default();
        let mut stack = Stack::new(now);
        stack.defer_acknowledgements();
        Core {
            stack,
            channel,
            tx_queues: TxQueueMap::default(),
            locals,
            inboxes: Inboxes::default(),
            delegations: Delegations::default(),
            accepts_next: None,
            busy_listeners: BusyListeners::default(),
            unregistered: Unregistered::new(journal),
            leases: Leases::default(),
            lending: Lending::default(),
            routes,
            metastate,
            statistics,
            sockets: Vec::new(),
            orphans: Orphans::default(),
            migrated_flows: MigratedFlows::default(),
            watch: Watch::default(),
            openings: Openings::default(),
            additions: 0,
            stamped: Vec::new(),
            outbox: Vec::new(),
            leaving: 0,
            pending_signals: Vec::new(),
            wire_until: Instant::ZERO,
            attended: 0,
            latest: now,
            is_spinning: false,
            leader_computes: false,
            notify_seq: 0,
            spread: Spread::default(),
        }
    }

    /// Inserts a session at the slot that was promised to it.
    pub(crate) fn put(&mut self, now: Instant, slot: Slot, arrival: NewSession) {
        self.channel.accounts.clear(slot);
        match arrival {
            NewSession::Session(session) => {
                probes::arrived(session.id().0, slot.0.into());
                if let Session::Tcp(session) = &session {
                    self.migrated_flows.has_come(&session.flow, slot);
                }
                self.stack.insert_at(now, slot, session);
                self.choose_tx_queue(slot);
            }
            NewSession::Local(mut arrival) => {
                probes::arrived(arrival.id.0, slot.0.into());
                arrival.end.begin(now);
                self.locals.insert(slot, *arrival);
                if self.watch.sleeps_on_words() {
                    self.additions += 1;
                }
                self.note_owner();
            }
        }
    }

    /// Removes the session at `slot`, which moves elsewhere and may come back.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.detach(slot);
        if let Some(Session::Tcp(session)) = self.stack.remove(slot) {
            self.migrated_flows.has_left(session.flow);
        }
    }

    /// Called for a new owner of sockets, or a new local session: the background thread may have to listen for signals.
    pub(crate) fn note_owner(&self) {
        if Socket::has_owner() {
            wake(self.watch.call_helper());
        }
    }

    /// Called when a session arrives with unread data, which no frame will announce: the background thread, if it
    /// sleeps as the leader, must check whether the program waits for it by calls that the library does not see
    /// (`threads/unseen.rs`).
    pub(crate) fn call_helper(&self) {
        wake(self.watch.call_helper());
    }

    /// Records the socket whose session is at `slot`.
    pub(crate) fn attach(&mut self, slot: Slot, socket: Arc<Socket>) {
        let index = slot.0 as usize;
        if self.sockets.len() <= index {
            self.sockets.resize(index + 1, None);
        }
        self.sockets[index] = Some(socket);
    }

    pub(crate) fn socket_at(&self, slot: Slot) -> Option<Arc<Socket>> {
        self.sockets.get(slot.0 as usize)?.clone()
    }

    /// Returns all sockets whose sessions are here.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = &Arc<Socket>> {
        self.sockets.iter().flatten()
    }

    pub(crate) fn detach(&mut self, slot: Slot) {
        self.end_lending(slot);
        if let Some(socket) = self.sockets.get_mut(slot.0 as usize) {
            *socket = None;
        }
    }

    /// Processes received frames and due timers, without sending yet.
    pub(crate) fn poll_rx(&mut self, now: Instant) {
        let now = self.at_latest(now);
        self.attended += 1;
        self.channel.note_look(now);
        self.refresh_routes();
        self.receive(now);
        self.stack.expire(now);
        self.dispatch();
        self.look_at_locals(now);
    }

    /// Returns whether polling would bring nothing for a reader of `socket`. Programs that poll by `recv` ask
    /// this most of the time, so that it must be cheap: it does not read the exact clock.
    pub(crate) fn has_nothing_for(&mut self, socket: &Socket) -> bool {
        if let Some(has_nothing) = self.local_has_nothing(socket.slot()) {
            return has_nothing && !socket.has_error();
        }
        if self.lending.is_active() && self.lending.has_some(socket.slot()) {
            return false;
        }
        let channel = &self.channel;
        if channel.may_have_received()
            || channel.full().is_any()
            || self.stack.has_output()
            || self.stack.owes_acknowledgements()
        {
            return false;
        }
        let soon = clock::recent() + clock::RECENT;
        if self.stack.deadline().is_some_and(|next| next <= soon) {
            return false;
        }
        self.attended += 1;
        self.channel.note_looks();
        !socket.has_error()
            && match self.stack.get(socket.slot()) {
                Some(Session::Tcp(session)) => {
                    let connection = &session.connection;
                    connection.readable() == 0
                        && !connection.is_at_mark()
                        && !connection.is_receive_finished()
                        && connection.error().is_none()
                }
                Some(Session::Udp(session)) => {
                    session.queue.is_empty()
                        && session.error.is_none()
                        && session.path_mtu.is_none()
                }
                None => false,
            }
    }

    /// Sends the pending output of the sessions.
    pub(crate) fn poll_tx(&mut self, now: Instant) {
        let now = self.at_latest(now);
        self.note_done_handshakes();
        if self.stack.awaits_output(&self.routes) || self.channel.has_backlog() {
            self.send(now);
        }
        self.dispatch();
        if !self.delegations.is_empty() {
            self.attend_delegations(now);
        }
        self.answer_strays();
        self.pass_stamps(now);
        self.remove_ended_orphans();
        self.remove_ended();
        self.pass_on_urgent();
        if self.tx_queues.change() {
            self.close_tx_queues();
        }
    }

    /// Time does not go back: peers would discard segments for their time stamps (RFC 7323 §5).
    fn at_latest(&mut self, now: Instant) -> Instant {
        self.latest = self.latest.max(now);
        self.latest
    }

    fn send(&mut self, now: Instant) {
        self.channel.flush();
        let output = layers::enter(Layer::OutputSession);
        self.stack.output(now, &self.routes, &mut self.channel);
        drop(output);
        self.channel.note_awaited_window(self.stack.awaits_window());
        self.channel.accounts.end();
        for NextHop { interface, address } in self.stack.unresolved() {
            if self.outbox.len() < OUTBOX_MAX {
                self.outbox
                    .push(RequestBody::Resolve { interface, address });
            }
        }
    }

    /// Tracks the last byte that was given to the stream at `slot`.
    pub(crate) fn stamp(&mut self, now: Instant, slot: Slot, flags: u32) {
        let Some(edges) = self.stream(slot).map(|stream| stream.edges()) else {
            return;
        };
        let Some(Some(socket)) = self.sockets.get(slot.0 as usize) else {
            return;
        };
        socket.stamps().mark(&edges, flags);
        if !self.stamped.contains(&slot) {
            self.stamped.push(slot);
        }
        self.pass_stamps(now);
    }

    fn pass_stamps(&mut self, now: Instant) {
        if self.stamped.is_empty() {
            return;
        }
        for slot in std::mem::take(&mut self.stamped) {
            let Some(edges) = self.stream(slot).map(|stream| stream.edges()) else {
                continue;
            };
            let Some(Some(socket)) = self.sockets.get(slot.0 as usize) else {
                continue;
            };
            let has_news = socket.stamps().pass(now, &edges);
            if has_news {
                socket.notify(Events::ERROR);
            }
            if socket.stamps().is_waiting() {
                self.stamped.push(slot);
            }
        }
    }

    /// Returns what a leader has to watch now.
    fn needs(&self) -> Needs {
        Needs {
            timer: self.deadline(),
            full: self.channel.full(),
            wire: self.has_wire(),
            local: !self.locals.is_empty(),
            additions: self.additions,
        }
    }

    /// Called before the lock is released: makes the sleeping leader watch what is needed now.
    pub(crate) fn settle_watch(&mut self) {
        if self.is_attended() {
            self.rearm_locals();
        }
        wake(self.watch.settle(|| self.needs()));
    }

    /// Registers an active open, whose outcome arrives on the descriptor `fd` of the socket.
    pub(crate) fn add_opening(&mut self, socket: &Arc<Socket>, fd: RawFd, taker: Taker) {
        self.openings.add(socket, fd, taker);
        if taker == Taker::Leader {
            self.additions += 1;
        }
    }

    /// Called by a thread that no longer waits itself for the outcome of an open.
    pub(crate) fn leave_opening(&mut self, socket: &Arc<Socket>) {
        if self.openings.leave(socket) {
            self.additions += 1;
        }
    }

    /// Adds a ring for the frames of one session. A leader that sleeps on the others has to watch it, too.
    pub(crate) fn add_ring(&mut self, now: Instant, ring: OwnRing) {
        self.channel.add_ring(ring);
        self.additions += 1;
        self.poll(now);
    }

    /// Inserts a session whose socket is closed, at its slot. It goes on here until a server has it.
    pub(crate) fn keep_orphan(&mut self, now: Instant, orphan: Orphan, session: Session) {
        self.stack.insert_at(now, orphan.slot, session);
        self.orphans.push(orphan);
        self.poll_tx(now);
    }

    /// Takes those that the next server can finish. Each must come back by [`Core::keep_orphan`] or [`Core::put_back`],
    /// unless its session has left.
    pub(crate) fn take_orphans(&mut self) -> Vec<Orphan> {
        self.leave_closed_of_before();
        self.orphans.take_unfinished(&mut self.stack)
    }

    pub(crate) fn put_back(&mut self, orphan: Orphan) {
        self.orphans.push(orphan);
    }

    fn remove_ended_orphans(&mut self) {
        let leased = &mut self.leases.flows;
        self.orphans.remove_ended(&mut self.stack, leased);
    }

    /// Ends all connections as if the peers had reset them, because packets no longer reach them.
    fn end_all(&mut self, now: Instant) {
        self.cut_off_all_unregistered(now);
        self.forget_leases();
        self.delegations = Delegations::default();
        for slot in 0..self.sockets.len() {
            self.end_one(now, Slot(slot as u32));
        }
        self.remove_ended_orphans();
    }

    /// As [`Core::end_all`], when no server follows.
    pub(crate) fn end_for_good(&mut self, now: Instant) {
        self.end_all(now);
        self.inboxes.cut_off();
    }

    /// Ends one connection as if its peer had reset it, and resets that.
    pub(crate) fn cut_off_one(&mut self, now: Instant, slot: Slot) {
        self.end_one(now, slot);
        self.poll_tx(now);
    }

    /// Ends the connection at `slot` likewise.
    fn end_one(&mut self, now: Instant, slot: Slot) {
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        if session.connection.is_closed() {
            return;
        }
        session.connection.abort(now);
        // The reset is sent by the next poll.
        self.stack.touch(slot);
        if let Some(Some(socket)) = self.sockets.get(slot.0 as usize) {
            socket.set_error(libc::ECONNRESET);
            socket.notify(Events::ERROR);
        }
    }

    /// Switches to another server. Connections end, and their resets are sent through the filter of
    /// the previous server, if that is still there. Unconnected sessions stay, and receive nothing
    /// until the new server knows them.
    pub(crate) fn renew(
        &mut self,
        now: Instant,
        (tap, ring_fd): (BorrowedFd<'_>, BorrowedFd<'_>),
        rx_path: RxPath,
        shared: SharedMemory,
    ) -> Result<(), Errno> {
        self.take_in_all(now);
        self.abort_delegations(now);
        self.end_all(now);
        self.poll_tx(now);
        self.channel.renew((tap, ring_fd), rx_path)?;
        self.begin_anew(now, shared);
        Ok(())
    }

    /// Switches to another server that knows this process's channel, and to which the rows of leased ports and delegated
    /// listeners still lead. The caller has the connections adopted and the listeners opened again, and what closed sockets
    /// have left here finished.
    pub(crate) fn carry_on(
        &mut self,
        now: Instant,
        tap: BorrowedFd<'_>,
        shared: SharedMemory,
    ) -> Result<(), Errno> {
        // What has come by the old tap, and by rings to which no row leads any more.
        self.take_in_all(now);
        self.leases.forget_ports(now);
        self.poll_tx(now);
        self.channel.carry_on(tap)?;
        self.begin_anew(now, shared);
        Ok(())
    }

    fn begin_anew(
        &mut self,
        now: Instant,
        SharedMemory {
            metastate,
            statistics,
            journal,
        }: SharedMemory,
    ) {
        self.forget_tx_queues(now);
        self.channel.captures = Captures::default();
        self.migrated_flows = MigratedFlows::default();
        self.metastate = metastate;
        self.routes = read_routes(&self.metastate).unwrap_or_default();
        self.statistics = statistics;
        self.unregistered.continue_in(journal);
        self.busy_listeners = BusyListeners::default();
        self.outbox.clear();
        // A sleeping leader polls descriptors that were replaced.
        self.additions += 1;
    }

    /// Does everything that is due: [`Core::poll_rx`], then [`Core::poll_tx`].
    pub(crate) fn poll(&mut self, now: Instant) {
        self.poll_rx(now);
        self.poll_tx(now);
    }

    /// As [`Core::poll`], for a thread that has nothing to send: acknowledgements no longer wait for its data.
    pub(crate) fn poll_idle(&mut self, now: Instant) {
        self.poll_rx(now);
        self.stack.settle_acknowledgements();
        self.poll_tx(now);
    }

    /// As [`Core::poll_rx`], for a session that leaves: frames on the ring or the tap are processed
    /// before, instead of following it through the server.
    pub(crate) fn take_in_all(&mut self, now: Instant) {
        self.stop_leading(now);
        for _ in 0..LAST_BATCHES {
            self.poll_rx(now);
            if !self.channel.has_received() {
                break;
            }
        }
    }

    /// Is there anything to send once the lock is released?
    pub(crate) fn has_messages(&self) -> bool {
        !self.outbox.is_empty()
            || !self.pending_signals.is_empty()
            || self.locals.has_unknown_peers()
            || self.stack.has_released()
    }

    /// Takes the messages to the server, to be sent once the lock is released.
    pub(crate) fn take_outbox(&mut self) -> Vec<RequestBody> {
        for frame in self.stack.released() {
            if self.outbox.len() < OUTBOX_MAX {
                self.outbox.push(RequestBody::MisdeliveredFrame { frame });
            }
        }
        let mut outbox = std::mem::take(&mut self.outbox);
        if self.leaving > 0 {
            let is_frame =
                |it: &mut RequestBody| matches!(it, RequestBody::MisdeliveredFrame { .. });
            self.outbox.extend(outbox.extract_if(.., is_frame));
        }
        outbox
    }

    /// Takes the signals to be sent once the lock is released, which their handlers may need.
    pub(crate) fn take_pending_signals(&mut self) -> Vec<(Arc<Socket>, OwnerSignal)> {
        std::mem::take(&mut self.pending_signals)
    }

    fn refresh_routes(&mut self) {
        if self.metastate.generation() != self.routes.generation()
            && let Some(routes) = read_routes(&self.metastate)
        {
            self.routes = routes;
        }
    }

    /// Notifies the watchers of sockets whose sessions have changed.
    fn dispatch(&mut self) {
        if !self.stack.has_changed() {
            return;
        }
        let changed: Vec<(Slot, Events)> = self.stack.changed().collect();
        for (slot, events) in changed {
            if !self.delegations.is_empty()
                && self.delegations.on_changed(&mut self.stack, (slot, events))
            {
                if self.stack.get(slot).is_none() {
                    self.unregistered.forget_waiting(slot);
                }
                continue;
            }
            if events.contains(Events::CLOSED) {
                self.unregistered.note_end(slot);
            }
            self.tell(slot, events);
        }
    }

    /// Notifies the watchers of the socket at `slot`.
    pub(crate) fn tell(&mut self, slot: Slot, events: Events) {
        if events != Events::NONE
            && let Some(Some(socket)) = self.sockets.get(slot.0 as usize)
        {
            if socket.phase() == SocketPhase::Connecting {
                let socket = Arc::clone(socket);
                return self.note_open(slot, &socket, events);
            }
            self.notify_seq += 1;
            self.spread.note(slot);
            socket.notify(events);
            if events.contains(Events::URGENT) {
                self.pending_signals
                    .push((Arc::clone(socket), OwnerSignal::Urgent));
            }
            if socket.is_async()
                && let Some(event) = OwnerSignal::of(events)
            {
                self.pending_signals.push((Arc::clone(socket), event));
            }
        }
    }

    /// Assigns a role to an application thread that is about to sleep. Returns `None` if frames have arrived
    /// and it must poll again. While it sleeps only [`Core::wake`] takes the role back.
    pub(crate) fn fall_asleep(
        &mut self,
        now: Instant,
        waiter: &Arc<Waiter>,
        by: WakeBy,
    ) -> Option<Role> {
        if !self.arm_locals(by) {
            return None;
        }
        if self.is_attended() {
            wake(self.watch.follow(waiter));
            return Some(Role::Follow);
        }
        let sleeps_on = match by {
            WakeBy::Notifier => SleepsOn::Descriptors,
            WakeBy::Word => SleepsOn::Words,
        };
        self.lead(now, Leader::Application, waiter, sleeps_on)
            .then_some(Role::Lead)
    }

    pub(crate) fn wake(&mut self, now: Instant, waiter: &Arc<Waiter>, role: Role) {
        match role {
            Role::Lead => self.stop_leading(now),
            Role::Follow => self.watch.unfollow(waiter),
        }
    }

    /// Called by a thread that begins to spin, and reads frames as they come.
    pub(crate) fn begin_spin(&mut self) {
        if !std::mem::replace(&mut self.is_spinning, true) {
            self.channel.want_attention(false);
        }
    }

    /// Called by the thread that spun. Returns true if something arrived at the last moment, which
    /// has been processed.
    pub(crate) fn end_spin(&mut self, now: Instant) -> bool {
        if !std::mem::replace(&mut self.is_spinning, false) {
            return false;
        }
        self.channel.want_attention(true);
        let has_come = self.channel.may_have_received();
        if has_come {
            self.poll(now);
        }
        has_come
    }

    /// Called by a thread that has waited, before it returns to its application.
    pub(crate) fn leave_wait(&mut self, now: Instant) {
        self.end_spin(now);
        self.hand_over();
    }

    /// Called by a thread that returns to its application: another one has to lead.
    pub(crate) fn hand_over(&mut self) {
        wake(self.watch.hand_over());
    }

    /// Makes the background thread the leader, if no application thread leads and no frame is pending.
    pub(crate) fn helper_leads(&mut self, now: Instant, waiter: &Arc<Waiter>) -> bool {
        !self.is_attended() && self.lead(now, Leader::Helper, waiter, SleepsOn::Descriptors)
    }

    pub(crate) fn helper_wakes(&mut self, now: Instant) {
        if self.watch.is_led_by(Leader::Helper) {
            self.stop_leading(now);
        }
    }

    pub(crate) fn is_attended(&self) -> bool {
        self.watch.is_led_by(Leader::Application)
    }

    fn lead(
        &mut self,
        now: Instant,
        leader: Leader,
        waiter: &Arc<Waiter>,
        sleeps_on: SleepsOn,
    ) -> bool {
        let wire = leader == Leader::Helper || self.expects_frames(now);
        if wire && !self.channel.fall_asleep() {
            self.stop_leading(now);
            return false;
        }
        let watched = Needs {
            wire,
            ..self.needs()
        };
        wake(self.watch.lead(leader, waiter, (watched, sleeps_on)));
        true
    }

    /// Is there anything that frames may arrive for?
    fn has_wire(&self) -> bool {
        !(self.stack.is_empty() && self.inboxes.is_empty() && self.delegations.is_empty())
    }

    /// May frames arrive? True also for a while after the last session of packets has left. If all
    /// sessions are local the channel need not be watched: each descriptor makes a sleep longer.
    pub(crate) fn expects_frames(&mut self, now: Instant) -> bool {
        if self.has_wire() || self.channel.full().is_any() || self.channel.may_have_received() {
            self.wire_until = now + WIRE_LINGERS;
        }
        now < self.wire_until
    }

    /// Does the leader wait for frames?
    pub(crate) fn watches_wire(&self) -> bool {
        self.watch.has_wire()
    }

    pub(crate) fn stop_leading(&mut self, now: Instant) {
        wake(self.watch.stop());
        self.channel.wake_up(now);
        self.receive(now);
    }
}

fn wake(waiter: Option<Arc<Waiter>>) {
    if let Some(waiter) = waiter {
        waiter.signal();
    }
}

fn read_routes(metastate: &MetastateReader) -> Option<Routes> {
    let generation = metastate.generation();
    Some(Routes::new(generation, metastate.read()?))
}
