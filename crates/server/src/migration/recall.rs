//! Sessions that move between processes which share a descriptor (ADR 8). Who asks for one that
//! another process holds gets it once that one has given it back; from the second time on the server
//! keeps it and relays, since nobody could have it for long.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use portolan_control::{
    ClientId, Command, Errno, Holder, Input, RequestedState, Requester, SessionPhase, Start, Timer,
};
use portolan_proto::control::{Capsule, Reader, ReplyBody};
use portolan_stack::TcpSession;
use portolan_sys::shm::{self, SetAside};
use portolan_sys::unix;
use portolan_types::{ChannelId, Protocol, SessionId, Slot};

use crate::control_socket::client::Client;
use crate::requests::{Answer, PendingCache, ShownSession};
use crate::server::Server;

/// Closes here take microseconds, unless somebody sees to it that they do not: then the session stays where it is.
const CLOSED_WITHIN: Duration = Duration::from_millis(20);
const BETWEEN_LOOKS: Duration = Duration::from_micros(200);

/// Requests that may wait for that.
const PENDING_MAX: usize = 64;

impl Server {
    /// `Cache`: a session goes to the process.
    pub fn cache(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        slot: Slot,
        descriptor: Option<OwnedFd>,
    ) -> Result<Answer, Errno> {
        if let Some(descriptor) = &descriptor {
            self.recognise(channel, id, descriptor)?;
        }
        let session = self.control.registry.admit(channel, Command::Cache, id)?;
        if session.owner() != Some(channel) {
            self.control.registry.has_room(channel)?;
        }
        match (session.holder, session.phase()) {
            (Holder::Process(holder, _), _) if holder == channel => Err(Errno::INVAL),
            (Holder::Process(..), _) => Ok(Answer::Recall(id, RequestedState::CacheAt(slot))),
            (_, SessionPhase::Relayed) => {
                // Who else has the descriptor is counted.
                self.sink.drop_copies();
                match descriptor {
                    Some(near)
                        if self.pending_caches.len() < PENDING_MAX
                            && self.sink.is_closing(&near) =>
                    {
                        let shown = ShownSession { id, slot, near };
                        Ok(Answer::AfterCloses(shown))
                    }
                    near => self.cache_relayed(channel, (id, slot), near),
                }
            }
            _ => self.give(channel, id, slot),
        }
    }

    /// A relayed session goes to the process if nobody else has its descriptor.
    fn cache_relayed(
        &mut self,
        channel: ChannelId,
        (id, slot): (SessionId, Slot),
        near: Option<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let is_back = near
            .as_ref()
            .is_some_and(|near| self.is_left_alone(id, channel, near) && self.end_relay(id, near));
        let uid = self
            .control
            .registry
            .process(channel)
            .map(|process| process.uid);
        if let (Some(near), Some(uid)) = (near, uid) {
            self.sink.close_shown(uid, near);
        }
        if is_back {
            self.give(channel, id, slot)
        } else {
            self.control.registry.tell_relayed(id, channel);
            Ok(ReplyBody::Relayed.into())
        }
    }

    /// An earlier request showed the same descriptor, which is being closed here and would be counted.
    pub fn cache_later(&mut self, client: ClientId, request: u32, shown: ShownSession) {
        let Some(uid) = self.clients.get(&client).map(|c| c.credentials.uid) else {
            return;
        };
        self.pending_caches.push(PendingCache {
            client,
            uid,
            request,
            shown,
            until: self.now + CLOSED_WITHIN,
        });
        self.control.timers.defer(Timer::PendingCaches);
    }

    /// Goes on with requests whose descriptors' copies are closed.
    pub fn look_at_pending_caches(&mut self) {
        for pending in std::mem::take(&mut self.pending_caches) {
            if pending.until > self.now && self.sink.is_closing(&pending.shown.near) {
                self.pending_caches.push(pending);
                continue;
            }
            let PendingCache {
                client,
                uid,
                request,
                shown: ShownSession { id, slot, near },
                ..
            } = pending;
            let channel = self.clients.get(&client).and_then(|client| client.channel);
            let answer = match (channel, self.phase(id)) {
                (Some(channel), Some(SessionPhase::Relayed)) => {
                    self.cache_relayed(channel, (id, slot), Some(near))
                }
                (channel, _) => {
                    self.sink.close_shown(uid, near);
                    match channel {
                        Some(channel) => self.cache(channel, id, slot, None),
                        None => continue,
                    }
                }
            };
            match answer {
                Ok(Answer::Recall(id, want)) => {
                    let requester = Requester {
                        client,
                        request,
                        want,
                    };
                    self.input(Input::Recall(id, requester));
                }
                Ok(Answer::Reply(body, fds)) => self.reply(client, request, body, fds),
                Ok(_) => {}
                Err(Errno(errno)) => {
                    self.reply(client, request, ReplyBody::Error { errno }, Vec::new())
                }
            }
        }
        if !self.pending_caches.is_empty() {
            let next = self.now + BETWEEN_LOOKS;
            self.control.timers.arm(Timer::PendingCaches, next);
        }
    }

    /// Has nobody the descriptor but `requester` and processes that hold its session to be elsewhere? They
    /// would ask for it before they use it; of others nothing is known.
    fn is_left_alone(&mut self, id: SessionId, requester: ChannelId, near: &OwnedFd) -> bool {
        let Some(session) = self.control.registry.session(id) else {
            return false;
        };
        let connections: Vec<BorrowedFd<'_>> = session
            .idle_users(requester)
            .filter_map(|channel| self.clients.get(&self.channels.get(&channel)?.client))
            .map(Client::as_fd)
            .collect();
        let count = self.holder_count.as_mut();
        count.is_some_and(|count| count.is_only_with(&connections, near.as_fd()))
    }

    /// `Relay`: who uses the descriptor cannot have the session.
    pub fn relay(
        &mut self,
        client: ClientId,
        id: SessionId,
        reader: Reader,
        fds: &[OwnedFd],
    ) -> Result<Answer, Errno> {
        self.verify(id, fds.first().ok_or(Errno::INVAL)?)?;
        if let Some(channel) = self.clients.get(&client).and_then(|client| client.channel) {
            self.note_reader(id, channel, reader);
        }
        self.control.note_user(id, None);
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        match (session.holder, session.phase()) {
            (Holder::Process(..), SessionPhase::Connected) if session.protocol == Protocol::Tcp => {
                Ok(Answer::Recall(id, RequestedState::Relay))
            }
            (_, SessionPhase::Parked | SessionPhase::Offered) => {
                self.input(Input::Accepted(id, None));
                self.input(Input::Relay(id, Start::AtOnce));
                Ok(ReplyBody::Relayed.into())
            }
            (_, SessionPhase::Relayed) => Ok(ReplyBody::Relayed.into()),
            _ => Err(Errno::INVAL),
        }
    }

    /// The descriptor shows that the process may have the session.
    fn recognise(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        descriptor: &OwnedFd,
    ) -> Result<(), Errno> {
        self.verify(id, descriptor)?;
        self.control.registry.entitle(id, channel);
        Ok(())
    }

    /// Is that the session's descriptor?
    pub fn verify(&self, id: SessionId, descriptor: &OwnedFd) -> Result<(), Errno> {
        let cookie = unix::cookie(descriptor).map_err(|_| Errno::INVAL)?;
        let known = self
            .control
            .registry
            .by_cookie(cookie)
            .map(|session| session.id);
        if known == Some(id) {
            Ok(())
        } else {
            Err(Errno::BADF)
        }
    }

    /// `channel` has had a session relayed.
    pub fn note_reader(&mut self, id: SessionId, channel: ChannelId, reader: Reader) {
        match reader {
            Reader::Sender => self.control.registry.tell_relayed(id, channel),
            Reader::Other => self.control.registry.entitle(id, channel),
        }
    }

    fn give(&mut self, channel: ChannelId, id: SessionId, slot: Slot) -> Result<Answer, Errno> {
        if self.handles.local(id).is_some() {
            return self.give_local(channel, id, slot);
        }
        self.server_slot(id).ok_or(Errno::INVAL)?;
        match self.phase(id) {
            Some(SessionPhase::Offered) => self.input(Input::Accepted(id, Some(channel))),
            _ => self.control.note_user(id, Some(channel)),
        }
        self.control.registry.entitle(id, channel);
        let (session, generation) = self.hand_over(id, (channel, slot)).ok_or(Errno::INVAL)?;
        let (capsule, fds) = self.encapsulate(&session)?;
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        let options_blob = session.options_blob.clone();
        Ok(Answer::Reply(
            ReplyBody::Cached {
                capsule,
                generation,
                options_blob,
            },
            fds,
        ))
    }

    /// A session as it travels, and the descriptors that go with it: unread bytes go on in the memory
    /// in which they came.
    fn encapsulate(&mut self, session: &TcpSession) -> Result<(Capsule, Vec<OwnedFd>), Errno> {
        let bytes = session.to_capsule();
        self.control.counters.capsule_bytes += bytes.len() as u64;
        let unread = match session.connection.handoff() {
            Some(prefix) => {
                self.control.counters.capsule_bytes += prefix.bytes_aside() as u64;
                let memory = prefix.memory().as_any().downcast_ref::<SetAside>();
                Some((
                    memory.ok_or(Errno::NOBUFS)?,
                    prefix.start(),
                    prefix.length(),
                ))
            }
            None => None,
        };
        shm::pack_capsule(bytes, unread).map_err(|_| Errno::NOBUFS)
    }

    /// `FetchRecalls`.
    pub fn take_recalls(&mut self, channel: ChannelId) -> Answer {
        let Some(channel) = self.channels.get_mut(&channel) else {
            return Answer::Silence;
        };
        ReplyBody::Recalled {
            sessions: std::mem::take(&mut channel.recalled),
            has_tx_queues: channel.tx_queues.has_news(),
        }
        .into()
    }

    /// As if the request had come now.
    pub fn serve_requester(&mut self, id: SessionId, requester: Requester) {
        let channel = self
            .clients
            .get(&requester.client)
            .and_then(|client| client.channel);
        let answer = match (requester.want, channel) {
            (RequestedState::CacheAt(slot), Some(channel)) => self.cache(channel, id, slot, None),
            // The asker is gone.
            (RequestedState::CacheAt(_), None) => return,
            (RequestedState::Share, _) => self.shared(id),
            (RequestedState::Relay, _) if self.phase(id) == Some(SessionPhase::Relayed) => {
                Ok(ReplyBody::Relayed.into())
            }
            (RequestedState::Relay, _) => Err(Errno::CONNRESET),
        };
        let (body, fds) = match answer {
            Ok(Answer::Reply(body, fds)) => (body, fds),
            Ok(Answer::Recall(..)) => return self.input(Input::Recall(id, requester)),
            Ok(Answer::Silence | Answer::Channel(..) | Answer::AfterCloses(_)) => return,
            Err(errno) => (ReplyBody::Error { errno: errno.0 }, Vec::new()),
        };
        self.reply(requester.client, requester.request, body, fds);
    }
}
