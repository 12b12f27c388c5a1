//! Local sessions (ADR 9): the server connects two programs of this host, or one with itself, which do not need it
//! afterwards. It keeps the memory of both ends, to close what a holder has left behind, to relay ends, and to tell
//! which notifier wakes which end.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use portolan_control::{
    Errno, Fallback, Holder, Input, Life, LocalPeer, SessionPhase, Start, Timer,
};
use portolan_local::{Local, Remains, Stream, Wake, WakeBy};
use portolan_proto::control::{
    AfterFlush, DescriptorEvent, FastOpenMode, ReplyBody, SocketOptionsBlob,
};
use portolan_proto::local::{Side, holder};
use portolan_sys::clock;
use portolan_sys::shm::Rings;
use portolan_sys::wait::WakeAddress;
use portolan_tcp::Events;
use portolan_types::{ChannelId, FlowKey, Protocol, SessionId, Slot};
use tracing::debug;

use crate::captures::ClosedEnd;
use crate::local_ends::{LocalEnd, ProcessNotifier};
use crate::random::random_u64;
use crate::requests::Answer;
use crate::requests::NewDescriptor;
use crate::requests::Target;
use crate::server::Server;

/// Bytes of a ring: the maximum of Linux's buffers. Memory that was never written costs nothing.
const RING: usize = 8 << 20;

/// Linux's `TCP_TIMEWAIT_LEN`.
const TIME_WAIT: Duration = Duration::from_secs(60);

/// When a process that still has an end hears from the server, too, that the other one has ended. Most have closed theirs
/// by then.
const TOLD_AFTER: Duration = Duration::from_secs(1);

/// Ends whose holders are told of in one turn.
const TOLD_AT_ONCE: usize = 4096;

/// Rounds of moving bytes before others have their turn.
const ROUNDS: usize = 8;

/// How long a turn processes watched ends.
const TURN_LASTS: Duration = Duration::from_micros(500);

impl Server {
    /// Opens a local session: both ends are made at once, and the listener is notified.
    pub(crate) fn connect_local(
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
            .choose_source(opener, remote, &path)
            .and_then(|local| self.introduce(opener, (channel, target), (local, local_peer)));
        match introduced {
            Ok(answer) => Ok(answer),
            Err(errno) => {
                match known {
                    Some(id) => self.input(Input::OpenFailed(id)),
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
        let LocalPeer {
            remote, opens_fast, ..
        } = local_peer;
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: remote,
            remote: local,
        };
        // It existed a moment ago; which one of a group it is, the port decides.
        let listener = self.listener_for(&flow).ok_or(Errno::CONNREFUSED)?;
        let to = (channel, target.slot);
        let ends = (local, remote);
        let accepter = self
            .control
            .introduce(opener, to, listener, ends, random_u64)?;
        let made = Rings::create(RING).ok().and_then(|fd| {
            let rings = Rings::map(&fd).ok()?;
            Some(self.locals.note_memory(fd, rings))
        });
        let Some(memory) = made else {
            self.forget(accepter);
            return Err(Errno::NOBUFS);
        };
        let end = |side, peer| Box::new(LocalEnd::new(side, peer, Arc::clone(&memory)));
        let early = match target.early {
            FastOpenMode::Payload { bytes, .. } if opens_fast => {
                let mut opener = Local::new(Arc::clone(&memory.rings), Side::Opener);
                let taken = opener.open_with(self.now, &bytes);
                // Nobody has the other end yet.
                let _ = opener.publish(self.now);
                u32::try_from(taken).unwrap_or(u32::MAX)
            }
            _ => 0,
        };
        self.handles.of(opener).local = Some(end(Side::Opener, accepter));
        self.handles.of(accepter).local = Some(end(Side::Accepter, opener));
        debug!(session = opener.0, %local, %remote, "connecting locally");
        self.input(Input::LocalOpen(opener));
        Ok(ReplyBody::Connecting {
            session: opener,
            local,
            early,
        }
        .into())
    }

    /// Gives the opener its end: there is room in the accept queue.
    pub(crate) fn tell_local_opener(&mut self, opener: SessionId) {
        let is_told = self.give_end_to_opener(opener).ok_or(Errno::NOBUFS);
        self.input(Input::LocalOpenerTold(opener, is_told));
    }

    fn give_end_to_opener(&mut self, opener: SessionId) -> Option<()> {
        let Holder::Process(channel, _) = self.holder(opener)? else {
            return None;
        };
        self.announce_end(opener, channel);
        let end = self.handles.local(opener)?;
        end.give_to(self.channels.get(&channel)?.notifier.number);
        let memory = Arc::clone(&end.memory);
        let event = DescriptorEvent::EstablishedLocal;
        let is_sent = self.send_event(opener, &event, &[memory.fd.as_fd()]);
        self.tell_of_end_later(opener);
        is_sent.then_some(())
    }

    /// `Cache` of an end that no process holds.
    pub(crate) fn give_local(
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
        let end = self.handles.local_mut(id).ok_or(Errno::BADF)?;
        end.watched = None;
        end.give_to(number);
        let fd = rustix::io::fcntl_dupfd_cloexec(&end.memory.fd, 0).map_err(|_| Errno::NOBUFS)?;
        let side = end.side;
        match self.phase(id) {
            Some(SessionPhase::Offered) => self.input(Input::Accepted(id, Some(channel))),
            _ => self.control.note_user(id, Some(channel)),
        }
        self.control.registry.entitle(id, channel);
        self.set_life(id, Life::Connected);
        self.control
            .registry
            .steer(id, Holder::Process(channel, slot));
        self.control.counters.handoffs += 1;
        self.note_migration(id);
        self.announce_end(id, channel);
        self.tell_of_end_later(id);
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        let options_blob = session.options_blob.clone();
        let body = ReplyBody::CachedLocal { side, options_blob };
        Ok(Answer::Reply(body, vec![fd]))
    }

    /// `Flush`: the holder gives the end back. Its state is in the shared memory.
    pub(crate) fn flush_local(
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
                self.input(Input::Relay(id, Start::AtOnce));
            }
            AfterFlush::Park => self.input(Input::Park(id)),
        }
        self.input(Input::Returned(id));
        ReplyBody::Done.into()
    }

    pub(crate) fn unhold_local(&mut self, id: SessionId) {
        self.control.registry.steer(id, Holder::None);
        if let Some(end) = self.handles.local(id) {
            end.give_to(holder::NONE);
        }
    }

    /// Handles the close of the last descriptor as the kernel does for a socket.
    pub(crate) fn close_local(&mut self, id: SessionId) {
        let now = self.now;
        self.finish_local(id, |end| end.close(now));
    }

    /// Resets an end that nobody will accept or read.
    pub(crate) fn abort_local(&mut self, id: SessionId) {
        let now = self.now;
        self.finish_local(id, |end| end.abort(now));
    }

    fn finish_local(&mut self, id: SessionId, finish: impl FnOnce(&mut Local)) {
        self.end_local(id, finish);
        self.forget(id);
    }

    /// Ends an end without a holder, and notifies the holder of the other one. What its last holder has written into
    /// the memory, flags and wake-up words alike, may be wrong: the peer is always woken, based on the server's own
    /// knowledge.
    fn end_local(&mut self, id: SessionId, finish: impl FnOnce(&mut Local)) {
        let Some(end) = self.handles.local_mut(id) else {
            return;
        };
        if std::mem::replace(&mut end.has_ended, true) {
            return;
        }
        let (peer, awaited_by) = (end.peer, end.awaited_by.take());
        let side = end.side;
        let pair = (end.memory.number, side);
        let unpaired = end.unpaired.take();
        let mut local = end.watched.take().unwrap_or_else(|| end.open());
        if let Some(key) = unpaired {
            self.locals.unpaired.note_end(key, side);
        }
        finish(&mut local);
        // The wake-up that it requests is among those that follow.
        let _ = local.publish(self.now);
        local.wake_peer();
        if let Some(claim) = awaited_by {
            if local.has_reset() {
                self.control.ports.release(claim)
            } else {
                self.control.keep_port(claim, self.now + TIME_WAIT)
            }
        }
        self.leave_behind(id, peer, local.remains());
        let other = self.handles.local(peer);
        let is_last = other.is_none_or(|other| other.has_ended);
        let is_reset = local.has_reset();
        self.tell_of_closed_end(pair, ClosedEnd { is_reset, is_last });
        self.note_peer_has_ended(peer);
    }

    /// The peer of this end has ended.
    pub(crate) fn note_peer_has_ended(&mut self, id: SessionId) {
        if let Some(end) = self.handles.local_mut(id) {
            end.peer_has_ended = true;
        }
        match self.holder(id) {
            Some(Holder::Process(channel, _)) => {
                if let Some(channel) = self.channels.get(&channel) {
                    channel.notifier.wake_sender.wake();
                }
                self.tell_of_end_later(id);
            }
            Some(_) => self.attend_later(id),
            None => {}
        }
    }

    /// If the peer of this end has ended: whoever shares the memory can write its flags back before the holder of this
    /// one reads them, so the holder is told by a message.
    pub(crate) fn tell_of_end_later(&mut self, id: SessionId) {
        let due = self.now + TOLD_AFTER;
        if let Some(end) = self.handles.local_mut(id)
            && end.peer_has_ended
            && !std::mem::replace(&mut end.is_untold, true)
        {
            self.locals.untold.push_back((due, id));
            self.control.timers.arm_once(Timer::EndedPeers, due);
        }
    }

    /// Tells processes of the ended peers of the ends that they still have.
    pub(crate) fn tell_of_ended_peers(&mut self) {
        for _ in 0..TOLD_AT_ONCE {
            let next = self.locals.untold.front().copied();
            let Some((_, id)) = next.filter(|(due, _)| *due <= self.now) else {
                break;
            };
            self.locals.untold.pop_front();
            let holder = self.holder(id);
            let Some(end) = self.handles.local_mut(id) else {
                continue;
            };
            end.is_untold = false;
            if let Some(Holder::Process(holder, _)) = holder
                && let Some(channel) = self.channels.get_mut(&holder)
            {
                end.told = Some(holder);
                channel.ended.insert(id);
                channel.recall_event.wake();
            }
        }
        if let Some(&(due, _)) = self.locals.untold.front() {
            self.control.timers.arm_once(Timer::EndedPeers, due);
        }
    }

    /// Keeps the port of a closed end for as long as a connection would be in FIN-WAIT-2 and TIME-WAIT.
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
        if let (Remains::FinWait(_), Some(end)) = (remains, self.handles.local_mut(peer)) {
            end.awaited_by = Some(claim);
        }
    }

    /// Resets an end that is dropped without being closed.
    pub(crate) fn drop_local_end(&mut self, id: SessionId) {
        let now = self.now;
        self.end_local(id, |end| end.abort(now));
        let end = self.handles.of(id).local.take();
        if let Some(channel) = end.and_then(|end| self.channels.get_mut(&end.told?)) {
            channel.ended.remove(&id);
        }
    }

    /// Makes the server relay the end, or wait for its bytes.
    pub(crate) fn watch_local(&mut self, id: SessionId) {
        let Some(end) = self.handles.local_mut(id) else {
            return;
        };
        end.give_to(holder::SERVER);
        end.watched = Some(end.open());
        if !std::mem::replace(&mut end.is_listed, true) {
            self.locals.round.push_back(id);
        }
    }

    /// Handles a notification of the server: the words of all watched ends are to be read.
    pub(crate) fn on_notifier(&mut self) {
        self.locals.wake_receiver.drain();
        self.locals.unread = self.locals.round.len();
        self.control.timers.defer(Timer::LocalSessions);
    }

    fn attend_later(&mut self, id: SessionId) {
        self.locals.make_due(id, &mut self.handles);
        self.control.timers.defer(Timer::LocalSessions);
    }

    /// Processes watched ends whose peers have made changes. A malicious peer can notify without end, so one turn reads
    /// a bounded number of words and moves bytes for a bounded time.
    pub(crate) fn attend_locals(&mut self) {
        self.locals.read_words(&mut self.handles);
        let until = clock::now() + TURN_LASTS;
        // Ends that become due again wait for the next turn.
        for _ in 0..self.locals.due.len() {
            let Some(id) = self.locals.due.pop_front() else {
                break;
            };
            if let Some(end) = self.handles.local_mut(id) {
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

    pub(crate) fn attend_local(&mut self, id: SessionId) {
        let now = self.now;
        if let Some(end) = self.handles.local_mut(id)
            && end.peer_has_ended
            && let Some(watched) = &mut end.watched
        {
            watched.note_peer_end(now);
        }
        match self.phase(id) {
            Some(SessionPhase::Relayed) => self.pump(id),
            Some(SessionPhase::Handshake) => {
                let Some(end) = self.handles.watched(id) else {
                    return;
                };
                end.arm(WakeBy::Notifier);
                end.look(now);
                if end.readable() > 0 || end.is_receive_shut() {
                    self.input(Input::ReadableHandshake(id));
                }
            }
            _ => {}
        }
    }

    /// Publishes the changes of a watched end to its peer, and requests notification of the peer's. Returns true if
    /// there is more to move already.
    pub(crate) fn settle_local(&mut self, id: SessionId) -> bool {
        let now = self.now;
        let Some(end) = self.handles.watched(id) else {
            return false;
        };
        let wake = end.publish(now);
        end.arm(WakeBy::Notifier);
        let has_news = end.look(now) != Events::NONE;
        self.notify(wake);
        has_news
    }

    /// Repeats `settle_local` until nothing is left to move; a peer that never stops waits for the next turn.
    pub(crate) fn pump_local(&mut self, id: SessionId, pump: impl Fn(&mut Server)) {
        for _ in 0..ROUNDS {
            pump(self);
            if !self.settle_local(id) {
                return;
            }
        }
        self.attend_later(id);
    }

    /// Notifies the notifier that an end has requested, if any.
    pub(crate) fn notify(&self, wake: Option<Wake>) {
        match wake.and_then(Wake::notifier) {
            None | Some(holder::NONE) => {}
            Some(holder::SERVER) => self.locals.wake_sender.wake(),
            Some(number) => {
                if let Some(notifier) = self.notifier(number) {
                    notifier.wake_sender.wake();
                }
            }
        }
    }

    fn notifier(&self, number: u64) -> Option<&ProcessNotifier> {
        let mut notifiers = self.channels.values().map(|channel| &channel.notifier);
        notifiers.find(|notifier| notifier.number == number)
    }

    /// `PeerNotifier`: returns the notifier of the peer. Numbers of notifiers are random, and in the memory of those only
    /// whom they wake: who knows one may have it.
    pub(crate) fn notifier_of_peer(
        &mut self,
        channel: ChannelId,
        (id, number): (SessionId, u64),
    ) -> Result<Answer, Errno> {
        if let Some(session) = self.control.registry.session(id) {
            if !matches!(session.holder, Holder::Process(holder, _) if holder == channel) {
                return Err(Errno::BADF);
            }
            let end = self.handles.local(id).ok_or(Errno::BADF)?;
            if end.unpaired.is_none() {
                return self.notifier_of_holder(end.peer);
            }
        }
        // Of before a restart: the server does not know the peer, or not even this end.
        let notifier = self.notifier(number).ok_or(Errno::BADF)?;
        wake_sender_of(number, &notifier.address)
    }

    fn notifier_of_holder(&self, id: SessionId) -> Result<Answer, Errno> {
        let (number, address) = match self.holder(id) {
            Some(Holder::Process(holder, _)) => {
                let notifier = &self.channels.get(&holder).ok_or(Errno::BADF)?.notifier;
                (notifier.number, &notifier.address)
            }
            _ => (holder::SERVER, &self.locals.address),
        };
        wake_sender_of(number, address)
    }
}

fn wake_sender_of(number: u64, address: &WakeAddress) -> Result<Answer, Errno> {
    let wake_sender = address.wake_sender().map_err(|_| Errno::NOBUFS)?;
    let body = ReplyBody::PeerNotifier { number };
    Ok(Answer::Reply(body, vec![wake_sender.into()]))
}
