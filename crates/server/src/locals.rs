//! Local sessions (ADR 9): two of this host's programs, or one with itself, are introduced and then
//! need the server no more. It keeps both ends' memory, to close what its holder has left behind, to
//! move what it relays, and to say whose notifier wakes whom.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::time::Duration;

use portolan_control::{ClaimId, Deadline, Errno, Holder, Input, Life, SessionPhase, Timer};
use portolan_local::{Local, Remains, Stream, Wake, WakeBy};
use portolan_proto::control::{
    AfterFlush, DescriptorEvent, FastOpenMode, ReplyBody, SocketOptionsBlob,
};
use portolan_proto::local::{Side, holder};
use portolan_proto::metastate::RouteKind;
use portolan_stack::Path;
use portolan_sys::clock;
use portolan_sys::shm::Rings;
use portolan_sys::wait::{WakeAddress, WakeReceiver, WakeSender, wake_receiver};
use portolan_tcp::Events;
use portolan_types::{ChannelId, FlowKey, Protocol, SessionId, Slot, scope_of};
use tracing::debug;

use crate::connections::opens::{Fallback, Target};
use crate::control_socket::clients::Answer;
use crate::migration::sessions::NewDescriptor;
use crate::server::{Server, random_u64};

/// Bytes of a ring: what Linux's buffers hold at most. Memory that nothing was written to costs nothing.
const RING: usize = 8 << 20;

/// How long a caller waits for room in a listener's queue (Linux: six SYNs).
const CALL_WAITS: Duration = Duration::from_secs(127);

/// Linux's `TCP_TIMEWAIT_LEN`.
const TIME_WAIT: Duration = Duration::from_secs(60);

/// Rounds of moving bytes before others get their turn.
const ROUNDS: usize = 8;

/// Words of watched ends that are read in one turn.
const WORDS: usize = 256;

/// How long a turn attends to watched ends.
const TURN_LASTS: Duration = Duration::from_micros(500);

/// One end, whoever holds it.
#[derive(Debug)]
pub struct LocalEnd {
    side: Side,
    peer: SessionId,
    memory: Arc<Memory>,
    /// While the server moves its bytes, or waits for them.
    watched: Option<Local>,
    /// It stands in [`Locals::round`].
    is_listed: bool,
    /// It stands in [`Locals::due`].
    is_due: bool,
    /// The port of the other end, which was closed and waits for the FIN of this one.
    awaited_by: Option<ClaimId>,
    /// The server has closed or reset it. The flags in the memory do not tell: its holder writes them.
    has_ended: bool,
}

/// What both ends share.
#[derive(Debug)]
struct Memory {
    fd: OwnedFd,
    rings: Arc<Rings>,
}

impl LocalEnd {
    /// Says whose notifier is this end's.
    fn give_to(&self, number: u64) {
        let end = self.memory.rings.ends().of(self.side);
        end.notifier.0.number.store(number, Release);
    }

    /// The end as its last holder left it.
    pub fn open(&self) -> Local {
        Local::new(Arc::clone(&self.memory.rings), self.side)
    }
}

/// A process's notifier.
#[derive(Debug)]
pub struct ProcessBell {
    pub number: u64,
    wake_sender: WakeSender,
    /// Where its peers' sockets are connected to: each has its own.
    address: WakeAddress,
}

impl ProcessBell {
    pub fn new(address: WakeAddress) -> Result<ProcessBell, rustix::io::Errno> {
        Ok(ProcessBell {
            number: random_u64().max(holder::FIRST),
            wake_sender: address.wake_sender()?,
            address,
        })
    }
}

/// Whoever waits for room in a listener's queue.
#[derive(Clone, Copy, Debug)]
struct PendingLocalConnect {
    opener: SessionId,
    accepter: SessionId,
}

/// All local sessions.
#[derive(Debug)]
pub struct Locals {
    ends: HashMap<SessionId, LocalEnd>,
    pending_connects: HashMap<SessionId, VecDeque<PendingLocalConnect>>,
    pub wake_receiver: WakeReceiver,
    wake_sender: WakeSender,
    /// The watched ends, in the order in which their words are read.
    round: VecDeque<SessionId>,
    /// How many words are still to be read since the notifier was set.
    unread: usize,
    /// Ends to attend to, in this order.
    due: VecDeque<SessionId>,
    address: WakeAddress,
}

impl Locals {
    /// Names of wake-up sockets stand in `directory` for a moment.
    pub fn new(directory: &std::path::Path) -> Result<Locals, rustix::io::Errno> {
        let (wake_receiver, address) = wake_receiver(directory)?;
        Ok(Locals {
            ends: HashMap::new(),
            pending_connects: HashMap::new(),
            wake_receiver,
            wake_sender: address.wake_sender()?,
            address,
            round: VecDeque::new(),
            unread: 0,
            due: VecDeque::new(),
        })
    }

    pub fn has(&self, id: SessionId) -> bool {
        self.ends.contains_key(&id)
    }

    pub fn end(&self, id: SessionId) -> Option<&LocalEnd> {
        self.ends.get(&id)
    }

    /// The end as the server moves it.
    pub fn watched(&mut self, id: SessionId) -> Option<&mut Local> {
        self.ends.get_mut(&id)?.watched.as_mut()
    }

    /// Has the end attended to in one of the next turns.
    fn make_due(&mut self, id: SessionId) {
        if let Some(end) = self.ends.get_mut(&id)
            && !std::mem::replace(&mut end.is_due, true)
        {
            self.due.push_back(id);
        }
    }

    /// Reads the words of some watched ends, and finds those whose peers have news.
    fn read_words(&mut self) {
        for _ in 0..self.unread.min(WORDS) {
            self.unread -= 1;
            let Some(id) = self.round.pop_front() else {
                self.unread = 0;
                return;
            };
            let Some(end) = self.ends.get_mut(&id) else {
                continue;
            };
            let Some(watched) = &end.watched else {
                end.is_listed = false;
                continue;
            };
            self.round.push_back(id);
            if watched.was_rung() {
                self.make_due(id);
            }
        }
    }

    /// Nobody is told: its holders go on without the server.
    pub fn release(&mut self, id: SessionId) {
        self.ends.remove(&id);
    }
}

/// An address of this host's that somebody wants to reach, and where from.
#[derive(Clone, Copy, Debug)]
pub struct LocalPeer {
    remote: SocketAddr,
    path: Path,
    /// The listener takes bytes with the opening (`TCP_FASTOPEN`).
    opens_fast: bool,
}

impl Server {
    /// The listener of ours that an active open leads to without leaving the host, if it does.
    pub fn local_peer(&self, target: &Target, known: Option<SessionId>) -> Option<LocalPeer> {
        if target.protocol != Protocol::Tcp {
            return None;
        }
        let remote = SocketAddr::new(reached(target.remote.ip()), target.remote.port());
        let remote = match target.remote {
            SocketAddr::V6(v6) if scope_of(target.remote) != 0 => SocketAddr::V6(v6),
            _ => remote,
        };
        if !self.routes.is_local(remote.ip()) {
            return None;
        }
        let path = self.routes.path_in(remote.ip(), scope_of(remote)).ok()?;
        let bound = known
            .and_then(|id| self.control.registry.session(id))
            .map(|session| session.local.ip())
            .filter(|ip| !ip.is_unspecified());
        let source = bound.or(path.source).unwrap_or(remote.ip());
        if path.kind != RouteKind::Local || source.is_ipv4() != remote.is_ipv4() {
            return None;
        }
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: remote,
            remote: SocketAddr::new(source, 0),
        };
        let listener = self.listener_for(&flow)?;
        let queue = self.handshake_options(listener).fast_open_queue;
        let path = Path {
            source: Some(source),
            ..path
        };
        Some(LocalPeer {
            remote,
            path,
            opens_fast: queue.is_some_and(|queue| queue > 0),
        })
    }

    /// Opens a local session: both ends come to be at once, and the listener hears of it.
    pub fn connect_local(
        &mut self,
        channel: ChannelId,
        known: Option<SessionId>,
        (target, local_peer): (Target, LocalPeer),
        descriptor: Option<NewDescriptor>,
    ) -> Result<Answer, Fallback> {
        if self.defers_open(&target.early, |_| local_peer.opens_fast)? {
            return Ok(ReplyBody::Deferred.into());
        }
        let LocalPeer { remote, path, .. } = local_peer;
        let opener = match known {
            Some(id) => id,
            None => self.enter_unbound(channel, &target, descriptor)?,
        };
        let introduced = self
            .local_for(opener, remote, &path)
            .and_then(|local| self.introduce(opener, (channel, target), (local, local_peer)));
        match introduced {
            Ok(answer) => Ok(answer),
            Err(errno) => {
                match known {
                    Some(id) => self.back_to_bound(id),
                    None => self.forget(opener),
                }
                Err(errno.into())
            }
        }
    }

    fn introduce(
        &mut self,
        opener: SessionId,
        (channel, target): (ChannelId, Target),
        (local, local_peer): (SocketAddr, LocalPeer),
    ) -> Result<Answer, Errno> {
        let remote = local_peer.remote;
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: remote,
            remote: local,
        };
        // It was there a moment ago; which one of a group, the port decides.
        let listener = self.listener_for(&flow).ok_or(Errno::CONNREFUSED)?;
        let accepter = self.enter_for(
            listener,
            &flow,
            Life::Handshake {
                deferred_until: None,
            },
        )?;
        let made = Rings::create(RING).ok().and_then(|fd| {
            let rings = Arc::new(Rings::map(&fd).ok()?);
            Some(Arc::new(Memory { fd, rings }))
        });
        let Some(memory) = made else {
            self.forget(accepter);
            return Err(Errno::NOBUFS);
        };
        let end = |side, peer| LocalEnd {
            side,
            peer,
            memory: Arc::clone(&memory),
            watched: None,
            is_listed: false,
            is_due: false,
            awaited_by: None,
            has_ended: false,
        };
        let early = match target.early {
            FastOpenMode::Payload { bytes, .. } if local_peer.opens_fast => {
                let mut opener = Local::new(Arc::clone(&memory.rings), Side::Opener);
                let taken = opener.open_with(self.now, &bytes);
                // Nobody has the other end yet.
                let _ = opener.publish();
                u32::try_from(taken).unwrap_or(u32::MAX)
            }
            _ => 0,
        };
        let ends = &mut self.locals.ends;
        ends.insert(opener, end(Side::Opener, accepter));
        ends.insert(accepter, end(Side::Accepter, opener));
        let slot = target.slot;
        self.control
            .registry
            .steer(opener, Holder::Process(channel, slot));
        if let Some(session) = self.control.registry.session_mut(opener) {
            session.local = local;
            session.remote = Some(remote);
            session.life = Life::Connecting { channel, slot };
            session.local_peer = Some(accepter);
        }
        if let Some(session) = self.control.registry.session_mut(accepter) {
            session.local_peer = Some(opener);
        }
        self.control.counters.opens += 1;
        debug!(session = opener.0, %local, %remote, "connecting locally");
        let has_room = self
            .control
            .registry
            .listener(listener)
            .is_some_and(|l| l.has_room());
        let caller = PendingLocalConnect { opener, accepter };
        if has_room {
            self.complete(caller);
        } else {
            self.control.counters.syn_dropped += 1;
            self.locals
                .pending_connects
                .entry(listener)
                .or_default()
                .push_back(caller);
            let until = self.now + CALL_WAITS;
            self.control.arm(opener, Deadline::LocalConnect, until);
        }
        Ok(ReplyBody::Connecting {
            session: opener,
            local,
            early,
        }
        .into())
    }

    /// There is room: the opener gets its end, the listener hears of the other.
    fn complete(&mut self, caller: PendingLocalConnect) {
        let PendingLocalConnect { opener, accepter } = caller;
        self.control.disarm(opener, Deadline::LocalConnect);
        let channel = match self
            .control
            .registry
            .session(opener)
            .map(|session| session.holder)
        {
            Some(Holder::Process(channel, _)) => channel,
            _ => return,
        };
        let (Some(end), Some(number)) = (
            self.locals.ends.get(&opener),
            self.channels.get(&channel).map(|c| c.notifier.number),
        ) else {
            return;
        };
        end.give_to(number);
        let memory = Arc::clone(&end.memory);
        let event = DescriptorEvent::EstablishedLocal;
        if !self.send_event(opener, &event, &[memory.fd.as_fd()]) {
            self.forget(accepter);
            self.forget(opener);
            return;
        }
        self.set_life(opener, Life::Connected);
        self.control.counters.local_sessions += 1;
        self.defer_or_offer(accepter);
        if self.is_deferred(accepter) {
            self.watch_local(accepter);
            self.attend_local(accepter);
        }
    }

    /// Somebody was accepted: whoever waits for room comes next.
    pub fn admit_pending_connects(&mut self, listener: SessionId) {
        while self
            .control
            .registry
            .listener(listener)
            .is_some_and(|l| l.has_room())
        {
            let Some(pending_connects) = self.locals.pending_connects.get_mut(&listener) else {
                return;
            };
            match pending_connects.pop_front() {
                Some(caller) => self.complete(caller),
                None => {
                    self.locals.pending_connects.remove(&listener);
                    return;
                }
            }
        }
    }

    /// The listener is gone.
    pub fn refuse_pending_connects(&mut self, listener: SessionId) {
        for caller in self
            .locals
            .pending_connects
            .remove(&listener)
            .unwrap_or_default()
        {
            self.refuse_caller(caller, Errno::CONNREFUSED);
        }
    }

    fn refuse_caller(&mut self, caller: PendingLocalConnect, errno: Errno) {
        self.forget(caller.accepter);
        self.open_failed(caller.opener, errno);
    }

    /// Sends away one who has waited for too long.
    pub fn refuse_late_connect(&mut self, opener: SessionId) {
        let queues = self.locals.pending_connects.values_mut();
        let late = queues.into_iter().find_map(|queue| {
            let at = queue.iter().position(|caller| caller.opener == opener)?;
            queue.remove(at)
        });
        if let Some(caller) = late {
            self.refuse_caller(caller, Errno::TIMEDOUT);
        }
    }

    /// `Cache` of an end that no process holds.
    pub fn give_local(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        slot: Slot,
    ) -> Result<Answer, Errno> {
        let number = self
            .channels
            .get(&channel)
            .ok_or(Errno::PERM)?
            .notifier
            .number;
        let end = self.locals.ends.get_mut(&id).ok_or(Errno::BADF)?;
        end.watched = None;
        end.give_to(number);
        let fd = rustix::io::fcntl_dupfd_cloexec(&end.memory.fd, 0).map_err(|_| Errno::NOBUFS)?;
        let side = end.side;
        match self.phase(id) {
            Some(SessionPhase::Offered) => self.note_acceptor(id, channel),
            _ => self.note_user(id, Some(channel)),
        }
        self.control.registry.entitle(id, channel);
        self.set_life(id, Life::Connected);
        self.control
            .registry
            .steer(id, Holder::Process(channel, slot));
        self.control.counters.handoffs += 1;
        self.note_migration(id);
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        let options_blob = session.options_blob.clone();
        let body = ReplyBody::CachedLocal { side, options_blob };
        Ok(Answer::Reply(body, vec![fd]))
    }

    /// `Flush`: the holder gives the end back. What it did is in the memory.
    pub fn flush_local(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        then: AfterFlush,
        options_blob: SocketOptionsBlob,
    ) -> Answer {
        self.unhold_local(id);
        self.note_migration(id);
        self.control.registry.detach(id);
        self.control.registry.describe(id, options_blob);
        match then {
            AfterFlush::Close => self.close_local(id),
            AfterFlush::Relay(reader) => {
                self.note_reader(id, channel, reader);
                self.start_relay(id);
            }
            AfterFlush::Park => self.input(Input::Park(id)),
        }
        self.input(Input::Returned(id));
        ReplyBody::Done.into()
    }

    pub fn unhold_local(&mut self, id: SessionId) {
        self.control.registry.steer(id, Holder::None);
        if let Some(end) = self.locals.ends.get(&id) {
            end.give_to(holder::NONE);
        }
    }

    /// The last descriptor has gone: as the kernel closes a socket.
    pub fn close_local(&mut self, id: SessionId) {
        let now = self.now;
        self.finish_local(id, |end| end.close(now));
    }

    /// Resets what nobody will accept or read.
    pub fn abort_local(&mut self, id: SessionId) {
        let now = self.now;
        self.finish_local(id, |end| end.abort(now));
    }

    fn finish_local(&mut self, id: SessionId, finish: impl FnOnce(&mut Local)) {
        self.end_local(id, finish);
        self.forget(id);
    }

    /// Ends an end that nobody holds any more, and has the holder of the other one look. What its last holder has
    /// written into the memory, flags and wake-up words alike, may be false: the peer is woken in any case, and by what
    /// the server itself knows of it.
    fn end_local(&mut self, id: SessionId, finish: impl FnOnce(&mut Local)) {
        let Some(end) = self.locals.ends.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut end.has_ended, true) {
            return;
        }
        let (peer, awaited_by) = (end.peer, end.awaited_by.take());
        let mut local = end.watched.take().unwrap_or_else(|| end.open());
        finish(&mut local);
        // The wake-up that it asks for is among those that follow.
        let _ = local.publish();
        local.wake_peer();
        if let Some(claim) = awaited_by {
            match local.has_reset() {
                true => self.control.ports.release(claim),
                false => self.control.keep_port(claim, self.now + TIME_WAIT),
            }
        }
        self.leave_behind(id, peer, local.remains());
        match self
            .control
            .registry
            .session(peer)
            .map(|session| session.holder)
        {
            Some(Holder::Process(channel, _)) => {
                if let Some(channel) = self.channels.get(&channel) {
                    channel.notifier.wake_sender.wake();
                }
            }
            Some(_) => self.attend_later(peer),
            None => {}
        }
    }

    /// The port of an end that was closed stays for as long as a connection would be in FIN-WAIT-2 and TIME-WAIT.
    fn leave_behind(&mut self, id: SessionId, peer: SessionId, remains: Remains) {
        let wait = match remains {
            Remains::Nothing => return,
            Remains::FinWait(wait) => wait,
            Remains::TimeWait => TIME_WAIT,
        };
        let session = self.control.registry.session_mut(id);
        let Some(claim) = session.and_then(|session| session.flow_claim.take()) else {
            return;
        };
        self.control.keep_port(claim, self.now + wait);
        if let (Remains::FinWait(_), Some(end)) = (remains, self.locals.ends.get_mut(&peer)) {
            end.awaited_by = Some(claim);
        }
    }

    /// `forget`: an end that goes without a word is reset for its peer, and who waited to be let in
    /// waits no more.
    pub fn forget_local(&mut self, id: SessionId) {
        let now = self.now;
        self.end_local(id, |end| end.abort(now));
        if self.locals.ends.remove(&id).is_none() {
            return;
        }
        if let Some(session) = self.control.registry.session_mut(id) {
            session.local_peer = None;
        }
        let is_caller = |caller: &PendingLocalConnect| caller.opener == id;
        let mut left = Vec::new();
        for pending_connects in self.locals.pending_connects.values_mut() {
            left.extend(pending_connects.iter().copied().filter(is_caller));
            pending_connects.retain(|caller| !is_caller(caller));
        }
        for caller in left {
            self.forget(caller.accepter);
        }
    }

    /// From now on the server moves the end's bytes, or waits for them.
    pub fn watch_local(&mut self, id: SessionId) {
        let Some(end) = self.locals.ends.get_mut(&id) else {
            return;
        };
        end.give_to(holder::SERVER);
        end.watched = Some(end.open());
        if !std::mem::replace(&mut end.is_listed, true) {
            self.locals.round.push_back(id);
        }
    }

    /// The server's notifier was set: the words of all ends that it watches are to be read.
    pub fn on_notifier(&mut self) {
        self.locals.wake_receiver.drain();
        self.locals.unread = self.locals.round.len();
        self.control.timers.defer(Timer::LocalSessions);
    }

    fn attend_later(&mut self, id: SessionId) {
        self.locals.make_due(id);
        self.control.timers.defer(Timer::LocalSessions);
    }

    /// Attends to watched ends whose peers have news. Anybody with such a peer can ring without end, so one turn reads
    /// a bounded number of words and moves bytes for a bounded time.
    pub fn attend_locals(&mut self) {
        self.locals.read_words();
        let until = clock::now() + TURN_LASTS;
        // Those that become due again wait for the next turn.
        for _ in 0..self.locals.due.len() {
            let Some(id) = self.locals.due.pop_front() else {
                break;
            };
            if let Some(end) = self.locals.ends.get_mut(&id) {
                end.is_due = false;
                self.attend_local(id);
                if clock::now() >= until {
                    break;
                }
            }
        }
        if self.locals.unread > 0 || !self.locals.due.is_empty() {
            self.control.timers.defer(Timer::LocalSessions);
        }
    }

    fn attend_local(&mut self, id: SessionId) {
        match self.phase(id) {
            Some(SessionPhase::Relayed) => self.pump(id),
            Some(SessionPhase::Handshake) => {
                let now = self.now;
                let Some(end) = self.locals.watched(id) else {
                    return;
                };
                end.arm(WakeBy::Notifier);
                end.look(now);
                if end.readable() > 0 || end.is_receive_shut() {
                    self.handshake_done(id);
                }
            }
            _ => {}
        }
    }

    /// Tells the peer of a watched end what was done, and asks to hear more. True if there is more
    /// to move already.
    pub fn settle_local(&mut self, id: SessionId) -> bool {
        let now = self.now;
        let Some(end) = self.locals.watched(id) else {
            return false;
        };
        let wake = end.publish();
        end.arm(WakeBy::Notifier);
        let has_news = end.look(now) != Events::NONE;
        self.notify(wake);
        has_news
    }

    /// `settle_local` until there is no more to move; a peer that never stops waits for its turn.
    pub fn pump_local(&mut self, id: SessionId, pump: impl Fn(&mut Server)) {
        for _ in 0..ROUNDS {
            pump(self);
            if !self.settle_local(id) {
                return;
            }
        }
        self.attend_later(id);
    }

    /// Rings the notifier that an end has asked for, if any.
    pub fn notify(&self, wake: Option<Wake>) {
        match wake.and_then(Wake::notifier) {
            None | Some(holder::NONE) => {}
            Some(holder::SERVER) => self.locals.wake_sender.wake(),
            Some(number) => {
                let mut notifiers = self.channels.values().map(|channel| &channel.notifier);
                if let Some(notifier) = notifiers.find(|notifier| notifier.number == number) {
                    notifier.wake_sender.wake();
                }
            }
        }
    }

    /// `EventNotifier`.
    pub fn notifier_of_peer(&mut self, channel: ChannelId, id: SessionId) -> Result<Answer, Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        if !matches!(session.holder, Holder::Process(holder, _) if holder == channel) {
            return Err(Errno::BADF);
        }
        let peer = self.locals.ends.get(&id).ok_or(Errno::BADF)?.peer;
        let holder = self
            .control
            .registry
            .session(peer)
            .map(|session| session.holder);
        let (number, address) = match holder {
            Some(Holder::Process(holder, _)) => {
                let notifier = &self.channels.get(&holder).ok_or(Errno::BADF)?.notifier;
                (notifier.number, &notifier.address)
            }
            _ => (holder::SERVER, &self.locals.address),
        };
        let wake_sender = address.wake_sender().map_err(|_| Errno::NOBUFS)?;
        Ok(Answer::Reply(
            ReplyBody::PeerNotifier { number },
            vec![wake_sender.into()],
        ))
    }
}

/// Linux takes "any address" for this host's own.
fn reached(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        address => address,
    }
}
