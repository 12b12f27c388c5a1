//! Local sessions (ADR 9): two of this host's programs, or one with itself, are introduced and then
//! need the server no more. It keeps both ends' memory, to close what its holder has left behind, to
//! move what it relays, and to say whose notifier wakes whom.

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
use portolan_tcp::Events;
use portolan_types::{ChannelId, FlowKey, Protocol, SessionId, Slot};
use tracing::debug;

use crate::local_ends::{LocalEnd, Memory};
use crate::random::random_u64;
use crate::requests::Answer;
use crate::requests::NewDescriptor;
use crate::requests::Target;
use crate::server::Server;

/// Bytes of a ring: what Linux's buffers hold at most. Memory that nothing was written to costs nothing.
const RING: usize = 8 << 20;

/// Linux's `TCP_TIMEWAIT_LEN`.
const TIME_WAIT: Duration = Duration::from_secs(60);

/// Rounds of moving bytes before others get their turn.
const ROUNDS: usize = 8;

/// How long a turn attends to watched ends.
const TURN_LASTS: Duration = Duration::from_micros(500);

impl Server {
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
        // It was there a moment ago; which one of a group, the port decides.
        let listener = self.listener_for(&flow).ok_or(Errno::CONNREFUSED)?;
        let to = (channel, target.slot);
        let ends = (local, remote);
        let accepter = self
            .control
            .introduce(opener, to, listener, ends, random_u64)?;
        let made = Rings::create(RING).ok().and_then(|fd| {
            let rings = Arc::new(Rings::map(&fd).ok()?);
            Some(Arc::new(Memory { fd, rings }))
        });
        let Some(memory) = made else {
            self.forget(accepter);
            return Err(Errno::NOBUFS);
        };
        let end = |side, peer| {
            Box::new(LocalEnd {
                side,
                peer,
                memory: Arc::clone(&memory),
                watched: None,
                is_listed: false,
                is_due: false,
                awaited_by: None,
                has_ended: false,
            })
        };
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

    /// There is room in the accept queue: the opener gets its end.
    pub fn tell_local_opener(&mut self, opener: SessionId) {
        let is_told = self.give_end_to_opener(opener).ok_or(Errno::NOBUFS);
        self.input(Input::LocalOpenerTold(opener, is_told));
    }

    fn give_end_to_opener(&mut self, opener: SessionId) -> Option<()> {
        let Holder::Process(channel, _) = self.holder(opener)? else {
            return None;
        };
        let end = self.handles.local(opener)?;
        end.give_to(self.channels.get(&channel)?.notifier.number);
        let memory = Arc::clone(&end.memory);
        let event = DescriptorEvent::EstablishedLocal;
        let is_sent = self.send_event(opener, &event, &[memory.fd.as_fd()]);
        is_sent.then_some(())
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
                self.input(Input::Relay(id, Start::AtOnce));
            }
            AfterFlush::Park => self.input(Input::Park(id)),
        }
        self.input(Input::Returned(id));
        ReplyBody::Done.into()
    }

    pub fn unhold_local(&mut self, id: SessionId) {
        self.control.registry.steer(id, Holder::None);
        if let Some(end) = self.handles.local(id) {
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
        let Some(end) = self.handles.local_mut(id) else {
            return;
        };
        if std::mem::replace(&mut end.has_ended, true) {
            return;
        }
        let (peer, awaited_by) = (end.peer, end.awaited_by.take());
        let mut local = end.watched.take().unwrap_or_else(|| end.open());
        finish(&mut local);
        // The wake-up that it asks for is among those that follow.
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
        if let (Remains::FinWait(_), Some(end)) = (remains, self.handles.local_mut(peer)) {
            end.awaited_by = Some(claim);
        }
    }

    /// An end that goes without a word is reset for its peer.
    pub fn drop_local_end(&mut self, id: SessionId) {
        let now = self.now;
        self.end_local(id, |end| end.abort(now));
        self.handles.of(id).local = None;
    }

    /// From now on the server moves the end's bytes, or waits for them.
    pub fn watch_local(&mut self, id: SessionId) {
        let Some(end) = self.handles.local_mut(id) else {
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
        self.locals.make_due(id, &mut self.handles);
        self.control.timers.defer(Timer::LocalSessions);
    }

    /// Attends to watched ends whose peers have news. Anybody with such a peer can ring without end, so one turn reads
    /// a bounded number of words and moves bytes for a bounded time.
    pub fn attend_locals(&mut self) {
        self.locals.read_words(&mut self.handles);
        let until = clock::now() + TURN_LASTS;
        // Those that become due again wait for the next turn.
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

    pub fn attend_local(&mut self, id: SessionId) {
        match self.phase(id) {
            Some(SessionPhase::Relayed) => self.pump(id),
            Some(SessionPhase::Handshake) => {
                let now = self.now;
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

    /// Tells the peer of a watched end what was done, and asks to hear more. True if there is more
    /// to move already.
    pub fn settle_local(&mut self, id: SessionId) -> bool {
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
        let peer = self.handles.local(id).ok_or(Errno::BADF)?.peer;
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
