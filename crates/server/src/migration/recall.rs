//! Sessions that move between processes which share a descriptor (ADR 8). Who asks for one that
//! another process holds gets it once that one has given it back; from the second time on the server
//! keeps it and relays, since nobody could have it for long.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use portolan_control::{Command, Errno, Holder, SessionPhase};
use portolan_proto::control::{Capsule, Reader, ReplyBody};
use portolan_stack::TcpSession;
use portolan_sys::shm::{self, SetAside};
use portolan_sys::unix;
use portolan_types::{ChannelId, Instant, Protocol, SessionId, Slot};
use tracing::info;

use crate::control_socket::clients::{Answer, Client, ClientId};
use crate::server::Server;

/// How long the holder may take. One that is stopped or hung loses the session: its numbers are in
/// its memory only, and what it has published is not enough to go on from.
const RECALL_WITHIN: Duration = Duration::from_secs(2);

/// Closes here take microseconds, unless somebody sees to it that they do not: then the session stays where it is.
const CLOSED_WITHIN: Duration = Duration::from_millis(20);
const BETWEEN_LOOKS: Duration = Duration::from_micros(200);

/// Requests that may wait for that.
const PENDING_MAX: usize = 64;

/// Requests that may wait for one session.
const ASKERS_MAX: usize = 64;

/// What an asker wants of a session.
#[derive(Clone, Copy, Debug)]
pub enum RequestedState {
    CacheAt(Slot),
    Relay,
    /// Its kernel socket.
    Share,
}

/// A request that waits for a session.
#[derive(Clone, Copy, Debug)]
pub struct Requester {
    pub client: ClientId,
    pub request: u32,
    pub want: RequestedState,
}

/// A session and its descriptor, as a process shows it.
#[derive(Debug)]
pub struct ShownSession {
    id: SessionId,
    slot: Slot,
    near: OwnedFd,
}

/// A `Cache` that waits for copies of its descriptor to be closed here.
#[derive(Debug)]
pub struct PendingCache {
    client: ClientId,
    uid: u32,
    request: u32,
    shown: ShownSession,
    until: Instant,
}

/// A session on its way back.
#[derive(Debug)]
pub struct Recall {
    until: Instant,
    requesters: Vec<Requester>,
}

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
        let session = self.registry.admit(channel, Command::Cache, id)?;
        if session.owner() != Some(channel) {
            self.registry.has_room(channel)?;
        }
        match (session.holder, session.phase) {
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
        let uid = self.registry.process(channel).map(|process| process.uid);
        if let (Some(near), Some(uid)) = (near, uid) {
            self.sink.close_shown(uid, near);
        }
        match is_back {
            true => self.give(channel, id, slot),
            false => {
                self.registry.tell_relayed(id, channel);
                Ok(ReplyBody::Relayed.into())
            }
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
    }

    /// Goes on with requests whose descriptors' copies are closed. Returns when to look again.
    pub fn drive_pending_caches(&mut self) -> Option<Instant> {
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
                    self.recall(id, requester);
                }
                Ok(Answer::Reply(body, fds)) => self.reply(client, request, body, fds),
                Ok(_) => {}
                Err(Errno(errno)) => {
                    self.reply(client, request, ReplyBody::Error { errno }, Vec::new())
                }
            }
        }
        (!self.pending_caches.is_empty()).then(|| self.now + BETWEEN_LOOKS)
    }

    /// Has nobody the descriptor but `requester` and processes that hold its session to be elsewhere? They
    /// would ask for it before they use it; of others nothing is known.
    fn is_left_alone(&mut self, id: SessionId, requester: ChannelId, near: &OwnedFd) -> bool {
        let Some(session) = self.registry.session(id) else {
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
        self.note_user(id, None);
        let session = self.registry.session(id).ok_or(Errno::BADF)?;
        match (session.holder, session.phase) {
            (Holder::Process(..), SessionPhase::Connected) if session.protocol == Protocol::Tcp => {
                Ok(Answer::Recall(id, RequestedState::Relay))
            }
            (_, SessionPhase::Parked | SessionPhase::Offered) => {
                self.leave_queue(id);
                self.start_relay(id);
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
        self.registry.entitle(id, channel);
        Ok(())
    }

    /// Is that the session's descriptor?
    pub fn verify(&self, id: SessionId, descriptor: &OwnedFd) -> Result<(), Errno> {
        let cookie = unix::cookie(descriptor).map_err(|_| Errno::INVAL)?;
        let known = self.registry.by_cookie(cookie).map(|session| session.id);
        if known == Some(id) {
            Ok(())
        } else {
            Err(Errno::BADF)
        }
    }

    /// `channel` has had a session relayed.
    pub fn note_reader(&mut self, id: SessionId, channel: ChannelId, reader: Reader) {
        match reader {
            Reader::Sender => self.registry.tell_relayed(id, channel),
            Reader::Other => self.registry.entitle(id, channel),
        }
    }

    fn give(&mut self, channel: ChannelId, id: SessionId, slot: Slot) -> Result<Answer, Errno> {
        if self.locals.has(id) {
            return self.give_local(channel, id, slot);
        }
        self.server_slot(id).ok_or(Errno::INVAL)?;
        match self.phase(id) {
            Some(SessionPhase::Offered) => self.note_acceptor(id, channel),
            _ => self.note_user(id, Some(channel)),
        }
        self.registry.entitle(id, channel);
        let (session, generation) = self.hand_over(id, (channel, slot)).ok_or(Errno::INVAL)?;
        let (capsule, fds) = self.encapsulate(&session)?;
        let session = self.registry.session(id).ok_or(Errno::BADF)?;
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
        self.counters.capsule_bytes += bytes.len() as u64;
        let unread = match session.connection.handoff() {
            Some(prefix) => {
                self.counters.capsule_bytes += prefix.bytes_aside() as u64;
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

    /// Keeps a session for the next process that asks, as long as there is a descriptor.
    pub fn park(&mut self, id: SessionId) {
        if self.peer_ends.contains_key(&id) {
            self.set_phase(id, SessionPhase::Parked);
        } else {
            self.close_held(id);
        }
    }

    /// Asks the holder for a session that somebody else wants.
    pub fn recall(&mut self, id: SessionId, requester: Requester) {
        match self.recalls.get_mut(&id) {
            Some(recall) if recall.requesters.len() < ASKERS_MAX => {
                recall.requesters.push(requester);
                return;
            }
            Some(_) => {
                self.refuse_asker(requester, Errno::NOBUFS);
                return;
            }
            None => {}
        }
        let until = self.now + RECALL_WITHIN;
        let requesters = vec![requester];
        self.recalls.insert(id, Recall { until, requesters });
        self.recalls_due.add(until, id);
        self.counters.recalls += 1;
        if let Some(session) = self.registry.session_mut(id) {
            session.recalls += 1;
            if let Holder::Process(holder, _) = session.holder
                && let Some(channel) = self.channels.get_mut(&holder)
            {
                channel.recalled.push(id);
                channel.recall_event.wake();
            }
        }
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

    /// The session is here again: whoever waits for it hears how it goes on.
    pub fn end_recall(&mut self, id: SessionId) {
        let Some(recall) = self.recalls.remove(&id) else {
            return;
        };
        let is_first = self.registry.session(id).is_some_and(|s| s.recalls <= 1);
        let may_move = matches!(
            recall.requesters[..],
            [Requester {
                want: RequestedState::CacheAt(_),
                ..
            }]
        );
        if self.phase(id) == Some(SessionPhase::Parked) && !(is_first && may_move) {
            self.start_relay(id);
        }
        for requester in recall.requesters {
            self.answer_asker(id, requester);
        }
    }

    /// As if the request had come now.
    fn answer_asker(&mut self, id: SessionId, requester: Requester) {
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
            Ok(Answer::Recall(..)) => return self.recall(id, requester),
            Ok(Answer::Silence | Answer::Channel(..) | Answer::AfterCloses(_)) => return,
            Err(errno) => (ReplyBody::Error { errno: errno.0 }, Vec::new()),
        };
        self.reply(requester.client, requester.request, body, fds);
    }

    /// The session will not come back.
    pub fn fail_recall(&mut self, id: SessionId) {
        let Some(recall) = self.recalls.remove(&id) else {
            return;
        };
        for requester in recall.requesters {
            self.refuse_asker(requester, Errno::CONNRESET);
        }
    }

    fn refuse_asker(&mut self, requester: Requester, errno: Errno) {
        self.counters.refused += 1;
        let body = ReplyBody::Error { errno: errno.0 };
        self.reply(requester.client, requester.request, body, Vec::new());
    }

    /// Resets what holders did not give back. Returns when to come back.
    pub fn drive_recalls(&mut self) -> Option<Instant> {
        for (due, id) in self.recalls_due.take(self.now) {
            if self
                .recalls
                .get(&id)
                .is_none_or(|recall| recall.until != due)
            {
                continue;
            }
            info!(
                session = id.0,
                "its holder does not give a session back: reset"
            );
            self.counters.recall_timeouts += 1;
            if self.locals.has(id) {
                self.abort_local(id);
            } else {
                self.abort_orphan(id);
            }
        }
        self.recalls_due.next()
    }
}
