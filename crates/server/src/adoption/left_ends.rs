//! The server's ends of the descriptors of connections that processes hold. Several processes may have a copy of such a
//! descriptor, and only the holder of the connection comes to have it adopted: the copies stay what they are if the next
//! server has the other end. A request that shows a copy before the holder has come waits for that.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use portolan_control::ClientId;
use portolan_proto::control::RequestBody;
use portolan_proto::filter::FilterKey;
use portolan_sys::unix;
use portolan_types::{FlowKey, SessionId};
use serde::{Deserialize, Serialize};

use crate::adoption::unpaired::MemoryKey;

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

/// A request that shows the descriptor of a connection that has not been adopted yet.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Client and number.
    pub from: (ClientId, u32),
    pub body: RequestBody,
    pub fds: Vec<OwnedFd>,
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
    pub(crate) fn take_all(&mut self) -> Vec<(LeftEnd, OwnedFd)> {
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

    /// Has a request wait for a session. False if its client has one that waits: a library sends one at a time.
    pub(crate) fn wait(&mut self, session: SessionId, request: Waiting) -> bool {
        let may_wait = !self.has_waiting(request.from.0);
        if may_wait {
            self.waiting.entry(session).or_default().push(request);
        }
        may_wait
    }

    /// Returns the requests that wait for a session.
    pub(crate) fn take_waiting(&mut self, session: SessionId) -> Vec<Waiting> {
        self.waiting.remove(&session).unwrap_or_default()
    }

    /// Returns the sessions that requests wait for.
    pub(crate) fn awaited(&self) -> Vec<SessionId> {
        self.waiting.keys().copied().collect()
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
