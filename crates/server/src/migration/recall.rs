//! Sessions that move between processes that share a descriptor (ADR 8). A process that asks for a session that
//! another holds gets it once the holder has given it back; from the second time on the server keeps the session
//! and relays, since no process could keep it for long.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_control::{
    ClientId, Command, Errno, Holder, Input, RequestedState, Requester, SessionPhase, Start,
};
use portolan_proto::control::{Capsule, Reader, ReplyBody};
use portolan_stack::TcpSession;
use portolan_sys::shm::{self, SetAside};
use portolan_sys::unix;
use portolan_types::{ChannelId, Protocol, SessionId, Slot};
use rustix::event::epoll::EventFlags;

use crate::calls::{Call, Sequel};
use crate::control_socket::client::Client;
use crate::control_socket::clients::NO_REPLY;
use crate::migration::relay;
use crate::requests::{Answer, AwaitedClose, ShownSession};
use crate::server::Server;
use crate::user_threads::WaitsFor;

/// Ended peers named in one reply.
const ENDED_AT_ONCE: usize = 1024;

impl Server {
    /// `Cache`: moves a session to the process.
    pub(crate) fn cache(
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
        if matches!(session.holder, Holder::Server(_) | Holder::None) && self.is_written_to(id) {
            self.relay_what_is_written(id);
        }
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        match (session.holder, session.phase()) {
            (Holder::Process(holder, _), _) if holder == channel => Err(Errno::INVAL),
            (Holder::Process(..), _) => Ok(Answer::Recall(id, RequestedState::CacheAt(slot))),
            (_, SessionPhase::Relayed) => {
                // Who else has the descriptor is counted.
                if let Some(near) = &descriptor {
                    self.sink.drop_copies_of(near);
                }
                match descriptor {
                    Some(near) if self.may_await_closes() && self.sink.is_closing(&near) => {
                        let shown = ShownSession { id, slot, near };
                        Ok(Answer::AfterCloses(AwaitedClose::Descriptor(shown)))
                    }
                    near => self.cache_relayed(channel, (id, slot), near),
                }
            }
            _ => self.give(channel, id, slot),
        }
    }

    /// A relayed session goes to the process if nobody else has its descriptor.
    pub(crate) fn cache_relayed(
        &mut self,
        channel: ChannelId,
        (id, slot): (SessionId, Slot),
        near: Option<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let process = self.control.registry.process(channel);
        let uid = process.map(|process| process.uid);
        let (Some(near), Some(uid)) = (near, uid) else {
            return Ok(self.stay_relayed(channel, id));
        };
        let may_go = !self.is_stopping()
            && !self.is_suspended(id)
            && self.is_left_alone(id, channel, &near)
            && self.may_end_relay(id);
        if !may_go || relay::is_read(&near) {
            self.sink.close_shown(uid, near);
            return if may_go {
                self.take_from_relay(channel, (id, slot), &[])
            } else {
                Ok(self.stay_relayed(channel, id))
            };
        }
        if let Err(errno) = self.calls.check(uid, WaitsFor::Socket) {
            self.sink.close_shown(uid, near);
            return Err(errno);
        }
        self.suspend_relay(id);
        let make = move || {
            let unread = relay::unread(&near);
            let sequel = move |server: &mut Server| {
                server.sink.close_shown(uid, near);
                server.take_from_relay(channel, (id, slot), &unread)
            };
            Box::new(sequel) as Sequel
        };
        Ok(Answer::Call(Call {
            uid,
            waits_for: WaitsFor::Socket,
            make: Box::new(make),
        }))
    }

    /// What lay in the descriptor goes on from the session.
    fn take_from_relay(
        &mut self,
        channel: ChannelId,
        (id, slot): (SessionId, Slot),
        unread: &[u8],
    ) -> Result<Answer, Errno> {
        if self.phase(id) != Some(SessionPhase::Relayed) {
            return Err(Errno::CONNRESET);
        }
        match self.end_relay(id, unread) {
            // Nobody waits for it any more: it is there for others that have its descriptor.
            true if self.control.registry.process(channel).is_none() => Ok(Answer::Silence),
            true => self.give(channel, id, slot),
            false => Ok(self.stay_relayed(channel, id)),
        }
    }

    fn stay_relayed(&mut self, channel: ChannelId, id: SessionId) -> Answer {
        self.control.registry.tell_relayed(id, channel);
        ReplyBody::Relayed.into()
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

    /// `Relay`: a user of the descriptor cannot hold the session.
    pub(crate) fn relay(
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
                self.relay_unused(id);
                Ok(ReplyBody::Relayed.into())
            }
            (_, SessionPhase::Relayed) => Ok(ReplyBody::Relayed.into()),
            _ => Err(Errno::INVAL),
        }
    }

    /// Relays a session that no process has had.
    fn relay_unused(&mut self, id: SessionId) {
        self.input(Input::Accepted(id, None));
        self.input(Input::Relay(id, Start::AtOnce));
    }

    /// A child has written to the descriptor without a request, since the server had the session when it was made.
    pub(crate) fn relay_what_is_written(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        match (session.holder, session.phase()) {
            (_, SessionPhase::Parked | SessionPhase::Offered) => {
                self.control.note_user(id, None);
                self.relay_unused(id);
            }
            (Holder::Process(channel, _), SessionPhase::Connected) => {
                // Another process has begun to use it.
                self.watch_far(id, EventFlags::empty());
                if let Some(client) = self.client_of(channel) {
                    let requester = Requester {
                        client,
                        request: NO_REPLY,
                        want: RequestedState::Relay,
                    };
                    self.input(Input::Recall(id, requester));
                }
            }
            _ => self.watch_far(id, EventFlags::empty()),
        }
    }

    /// Entitles the process, which has shown the descriptor, to the session.
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

    /// Checks that this is the session's descriptor.
    pub(crate) fn verify(&self, id: SessionId, descriptor: &OwnedFd) -> Result<(), Errno> {
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

    /// Notes that `channel` has had a session relayed.
    pub(crate) fn note_reader(&mut self, id: SessionId, channel: ChannelId, reader: Reader) {
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

    /// Returns a session's capsule, with the descriptors that go with it: unread bytes stay in the memory in which
    /// they arrived.
    pub(crate) fn encapsulate(
        &mut self,
        session: &TcpSession,
    ) -> Result<(Capsule, Vec<OwnedFd>), Errno> {
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

    /// `FetchRecalls`: returns the sessions to give back.
    pub(crate) fn take_recalls(&mut self, channel: ChannelId) -> Answer {
        let Some(channel) = self.channels.get_mut(&channel) else {
            return Answer::Silence;
        };
        let ended = &mut channel.ended;
        let told = std::iter::from_fn(|| ended.pop_first()).take(ENDED_AT_ONCE);
        let told = told.collect();
        if !channel.ended.is_empty() {
            channel.recall_event.wake();
        }
        ReplyBody::Recalled {
            sessions: std::mem::take(&mut channel.recalled),
            ended: told,
            has_tx_queues: channel.tx_queues.has_news(),
            has_captures: channel.captures.has_news(),
        }
        .into()
    }

    /// Serves a request as if it had arrived now.
    pub(crate) fn serve_requester(&mut self, id: SessionId, requester: Requester) {
        let channel = self
            .clients
            .get(&requester.client)
            .and_then(|client| client.channel);
        let answer = match (requester.want, channel) {
            (RequestedState::CacheAt(slot), Some(channel)) => self.cache(channel, id, slot, None),
            // The requester has disconnected.
            (RequestedState::CacheAt(_), None) => return,
            (RequestedState::Share, _) => self.shared(id),
            (RequestedState::Relay, _) if self.phase(id) == Some(SessionPhase::Relayed) => {
                Ok(ReplyBody::Relayed.into())
            }
            (RequestedState::Relay, _) => Err(Errno::CONNRESET),
        };
        self.answer((requester.client, requester.request), answer);
    }
}
