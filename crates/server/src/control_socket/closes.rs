//! Requests deferred until the server has closed a descriptor.

use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_control::{ClientId, Errno, SessionPhase, Timer};
use portolan_proto::control::RequestBody;
use portolan_types::Protocol;

use crate::calls::RequestId;
use crate::requests::{Answer, AwaitedClose, PendingClose, ShownSession};
use crate::server::Server;

/// Closing takes microseconds unless a program delays it; then the session is not moved.
const CLOSED_WITHIN: Duration = Duration::from_millis(20);

/// Kernel sockets leave their groups first, which takes rtnl.
const LEFT_WITHIN: Duration = Duration::from_secs(1);

const BETWEEN_LOOKS: Duration = Duration::from_micros(200);

/// Maximum of deferred requests.
const PENDING_MAX: usize = 64;

/// Maximum of one user.
const PENDING_OF_USER: usize = 8;

impl Server {
    pub(crate) fn may_await_closes(&self) -> bool {
        self.pending_closes.len() < PENDING_MAX
    }

    /// Returns the port of a `Bind` whose previous kernel socket is still being closed.
    pub(crate) fn closing_port_of(&self, id: ClientId, body: &RequestBody) -> Option<u16> {
        let RequestBody::Bind {
            protocol: Protocol::Udp,
            local,
            ..
        } = body
        else {
            return None;
        };
        if !self.sink.is_closing_port(local.port()) || !self.may_await_closes() {
            return None;
        }
        let uid = self.clients.get(&id)?.credentials.uid;
        let own = self.pending_closes.iter().filter(|it| it.uid == uid);
        (own.count() < PENDING_OF_USER).then_some(local.port())
    }

    /// Defers a request: the server still closes a copy of its descriptor, which would be counted, or the previous holder
    /// of its port.
    pub(crate) fn await_close(&mut self, (client, request): RequestId, awaited: AwaitedClose) {
        let Some(uid) = self.clients.get(&client).map(|c| c.credentials.uid) else {
            return;
        };
        let within = match &awaited {
            AwaitedClose::Descriptor(_) => CLOSED_WITHIN,
            AwaitedClose::Port(..) => LEFT_WITHIN,
        };
        self.pending_closes.push(PendingClose {
            client,
            uid,
            request,
            awaited,
            until: self.now + within,
        });
        self.control.timers.defer(Timer::PendingCloses);
    }

    /// Continues deferred requests whose descriptors are closed.
    pub(crate) fn look_at_pending_closes(&mut self) {
        for pending in std::mem::take(&mut self.pending_closes) {
            if pending.until > self.now && self.is_closing(&pending.awaited) {
                self.pending_closes.push(pending);
                continue;
            }
            let PendingClose {
                client,
                uid,
                request,
                awaited,
                ..
            } = pending;
            let answer = match awaited {
                AwaitedClose::Descriptor(shown) => self.cache_after_close((client, uid), shown),
                AwaitedClose::Port(_, body, fds) => {
                    self.bind_after_close((client, request), uid, (body, fds))
                }
            };
            if let Some(answer) = answer {
                self.answer((client, request), answer);
            }
        }
        if !self.pending_closes.is_empty() {
            let next = self.now + BETWEEN_LOOKS;
            self.control.timers.arm(Timer::PendingCloses, next);
        }
    }

    fn is_closing(&self, awaited: &AwaitedClose) -> bool {
        match awaited {
            AwaitedClose::Descriptor(shown) => self.sink.is_closing(&shown.near),
            AwaitedClose::Port(port, ..) => self.sink.is_closing_port(*port),
        }
    }

    /// Returns `None` if the client is gone.
    fn cache_after_close(
        &mut self,
        (client, uid): (ClientId, u32),
        shown: ShownSession,
    ) -> Option<Result<Answer, Errno>> {
        let ShownSession { id, slot, near } = shown;
        let channel = self.clients.get(&client).and_then(|client| client.channel);
        if let (Some(channel), Some(SessionPhase::Relayed)) = (channel, self.phase(id)) {
            return Some(self.cache_relayed(channel, (id, slot), Some(near)));
        }
        self.sink.close_shown(uid, near);
        channel.map(|channel| self.cache(channel, id, slot, None))
    }

    fn bind_after_close(
        &mut self,
        (client, request): RequestId,
        uid: u32,
        (body, fds): (RequestBody, Vec<OwnedFd>),
    ) -> Option<Result<Answer, Errno>> {
        if !self.clients.contains_key(&client) {
            fds.into_iter().for_each(|fd| self.sink.close_of(uid, fd));
            return None;
        }
        Some(self.perform_now(client, request, body, fds))
    }
}
