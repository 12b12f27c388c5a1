//! The server's ends of the descriptors of connections that processes hold. Several processes may have a copy of such a
//! descriptor, and only the holder of the connection comes to have it adopted: the copies stay what they are if the next
//! server has the other end. A request that shows a copy before the holder has come waits for that.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use portolan_control::{ClientId, Errno, Holder, Life};
use portolan_proto::control::{DescriptorOfAdopted, RequestBody};
use portolan_proto::filter::FilterKey;
use portolan_sys::unix;
use portolan_types::{ChannelId, FlowKey, Protocol, SessionId};
use serde::{Deserialize, Serialize};

use crate::adoption::unpaired::MemoryKey;
use crate::calls::RequestId;
use crate::requests::{Answer, NewDescriptor};
use crate::server::Server;

/// What shows that a connection is the one whose descriptor was left.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Identity {
    Flow(FlowKey),
    /// Of a session within the host.
    Memory(MemoryKey),
}

impl Identity {
    fn is(self, other: Identity) -> bool {
        match (self, other) {
            (Identity::Flow(one), Identity::Flow(other)) => {
                FilterKey::new(&one) == FilterKey::new(&other)
            }
            (Identity::Memory(one), Identity::Memory(other)) => one == other,
            _ => false,
        }
    }
}

/// A connection that a process holds, as the server knew it. The message carries the server's end.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LeftEnd {
    pub session: SessionId,
    pub identity: Identity,
    pub uid: u32,
    /// Socket cookie of the near end.
    pub cookie: u64,
    /// Does what a child writes to the descriptor begin a relay?
    pub relays_writes: bool,
}

/// The descriptor of an adopted connection: that of before, if the service manager has kept the end, or a new one.
#[derive(Debug)]
pub(crate) struct AdoptedDescriptor {
    pub which: DescriptorOfAdopted,
    pub cookie: u64,
    far: OwnedFd,
    relays_writes: bool,
}

/// A request that shows the descriptor of a connection that has not been adopted yet.
#[derive(Debug)]
struct Waiting {
    from: RequestId,
    body: RequestBody,
    fds: Vec<OwnedFd>,
}

/// The ends whose connections have not been adopted yet.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    left: HashMap<SessionId, (LeftEnd, OwnedFd)>,
    by_cookie: HashMap<u64, SessionId>,
    waiting: HashMap<SessionId, Vec<Waiting>>,
}

impl Ends {
    pub(crate) fn new(ends: Vec<(LeftEnd, OwnedFd)>) -> Ends {
        let by_cookie = ends.iter().map(|(end, _)| (end.cookie, end.session));
        Ends {
            by_cookie: by_cookie.collect(),
            left: ends.into_iter().map(|it| (it.0.session, it)).collect(),
            waiting: HashMap::new(),
        }
    }

    /// Returns the end of a connection that a process of `uid` has adopted.
    pub(crate) fn take(
        &mut self,
        (session, identity): (SessionId, Identity),
        uid: u32,
    ) -> Option<(LeftEnd, OwnedFd)> {
        let (end, _) = self.left.get(&session)?;
        if !end.identity.is(identity) || end.uid != uid {
            return None;
        }
        self.by_cookie.remove(&end.cookie);
        self.left.remove(&session)
    }

    /// The next server may still adopt them.
    fn take_all(&mut self) -> Vec<(LeftEnd, OwnedFd)> {
        self.by_cookie.clear();
        self.left.drain().map(|(_, it)| it).collect()
    }

    /// Returns the session that must be adopted before the request is answered.
    pub(crate) fn shown_by(&self, body: &RequestBody, fds: &[OwnedFd]) -> Option<SessionId> {
        let shows = matches!(
            body,
            RequestBody::Cache { .. } | RequestBody::Relay { .. } | RequestBody::Probe
        );
        if self.by_cookie.is_empty() || !shows {
            return None;
        }
        let cookie = unix::cookie(fds.first()?).ok()?;
        self.by_cookie.get(&cookie).copied()
    }

    fn has_waiting(&self, client: ClientId) -> bool {
        let mut waiting = self.waiting.values().flatten();
        waiting.any(|waiting| waiting.from.0 == client)
    }

    /// Returns the descriptors that a client has shown.
    pub(crate) fn forget_client(&mut self, client: ClientId) -> Vec<OwnedFd> {
        let mut shown = Vec::new();
        for requests in self.waiting.values_mut() {
            let gone = requests.extract_if(.., |waiting| waiting.from.0 == client);
            shown.extend(gone.flat_map(|waiting| waiting.fds));
        }
        shown
    }
}

impl Server {
    /// Takes the ends that the next server is to have: of all connections that processes hold.
    pub(crate) fn take_ends(&mut self) -> Vec<(LeftEnd, OwnedFd)> {
        let mut ends = self.inheritance.ends.take_all();
        if !self.supervisor.keeps() {
            return Vec::new();
        }
        let sessions = self.control.registry.sessions();
        let held = sessions.filter_map(|session| {
            let is_held = session.protocol == Protocol::Tcp
                && matches!(session.life, Life::Connected)
                && matches!(session.holder, Holder::Process(..));
            let identity = match self.handles.local(session.id) {
                Some(end) => Identity::Memory(MemoryKey::of(&end.memory.fd).ok()?),
                None => Identity::Flow(session.flow()?),
            };
            is_held.then_some(LeftEnd {
                session: session.id,
                identity,
                uid: session.uid,
                cookie: session.cookie,
                relays_writes: self.handles.peer_end(session.id)?.relays_writes,
            })
        });
        for end in held.collect::<Vec<_>>() {
            ends.extend(self.take_far(end.session).map(|far| (end, far)));
        }
        ends
    }

    pub(crate) fn descriptor_of_adopted(
        &mut self,
        channel: ChannelId,
        whose: (SessionId, Identity),
        fds: &mut Vec<OwnedFd>,
    ) -> Result<AdoptedDescriptor, Errno> {
        let process = self.control.registry.process(channel);
        let uid = process.ok_or(Errno::PERM)?.uid;
        if let Some((end, far)) = self.inheritance.ends.take(whose, uid) {
            return Ok(AdoptedDescriptor {
                which: DescriptorOfAdopted::Kept,
                cookie: end.cookie,
                far,
                relays_writes: end.relays_writes,
            });
        }
        let NewDescriptor { far, cookie } = self.take_new_descriptor(fds)?;
        Ok(AdoptedDescriptor {
            which: DescriptorOfAdopted::New,
            cookie,
            far,
            relays_writes: false,
        })
    }

    pub(crate) fn watch_adopted(
        &mut self,
        id: SessionId,
        descriptor: AdoptedDescriptor,
    ) -> Result<(), Errno> {
        if descriptor.relays_writes {
            self.watch_peer_end_of_parked(id, descriptor.far)
        } else {
            self.watch_peer_end(id, descriptor.far)
        }
    }

    /// Defers a request until the session whose descriptor it shows is adopted.
    pub(crate) fn await_adoption(
        &mut self,
        from: RequestId,
        session: SessionId,
        (body, fds): (RequestBody, Vec<OwnedFd>),
    ) -> Result<Answer, Errno> {
        let ends = &mut self.inheritance.ends;
        // A library sends one request at a time.
        if ends.has_waiting(from.0) {
            return Err(Errno::AGAIN);
        }
        let waiting = ends.waiting.entry(session).or_default();
        waiting.push(Waiting { from, body, fds });
        Ok(Answer::Silence)
    }

    /// Answers the requests that have waited for a connection, which is adopted, or will not be.
    pub(crate) fn answer_waiting(&mut self, session: SessionId) {
        let waiting = self.inheritance.ends.waiting.remove(&session);
        for Waiting { from, body, fds } in waiting.into_iter().flatten() {
            let answer = self.perform_now(from.0, from.1, body, fds);
            self.answer(from, answer);
        }
    }

    /// The holders of what is left have not come: the other processes see the end of their descriptors.
    pub(crate) fn close_ends(&mut self) {
        for (_, far) in self.inheritance.ends.take_all() {
            self.sink.close(far);
        }
        let waiting = &self.inheritance.ends.waiting;
        for session in waiting.keys().copied().collect::<Vec<_>>() {
            self.answer_waiting(session);
        }
    }
}
