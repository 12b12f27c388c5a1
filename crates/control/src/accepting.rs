//! Connections to listeners, from the handshake to `accept`: connections from the network, and connections from within
//! the host, which wait for room in the accept queue.

use std::net::SocketAddr;
use std::time::Duration;

use portolan_stack::passive::Queueing;
use portolan_types::{ChannelId, FlowKey, Instant, Protocol, SessionId, Slot};

use crate::control::{Control, Effect, Effects};
use crate::errno::Errno;
use crate::legality::SessionPhase;
use crate::listener::Listener;
use crate::session::{Holder, Life, SessionEntry};
use crate::timer::Deadline;

#[cfg(test)]
mod tests;

/// How long an open within the host waits for room in the accept queue (Linux: the time of six SYNs).
const OPEN_WAITS: Duration = Duration::from_secs(127);

impl Control {
    /// Returns the listener that a session was opened by, if it still exists.
    fn listener_of(&mut self, id: SessionId) -> Option<(SessionId, &mut Listener)> {
        let listener = self.registry.session(id)?.listener?;
        Some((listener, self.registry.listener_mut(listener)?))
    }

    /// Handles a handshake that completed without data. With `TCP_DEFER_ACCEPT` the connection is offered when its
    /// first bytes arrive or the time-out expires.
    pub(crate) fn on_handshake(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let listener = self.listener_of(id);
        let seconds =
            listener.and_then(|(_, listener)| listener.opens.options.defer_accept_seconds);
        let Some(seconds) = seconds else {
            return self.on_readable_handshake(id, out);
        };
        let until = now + Duration::from_secs(u64::from(seconds));
        if let Some(session) = self.registry.session_mut(id) {
            let deferred_until = Some(until);
            session.life = Life::Handshake { deferred_until };
            if session.is_local() {
                out.push(Effect::WatchLocal(id));
            }
            self.arm(id, Deadline::Defer, until);
        }
    }

    /// Handles a completed handshake: the session waits to be accepted.
    pub(crate) fn on_readable_handshake(&mut self, id: SessionId, out: &mut Effects) {
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        let listener_id = session.listener;
        if let Life::Handshake { deferred_until } = &mut session.life
            && deferred_until.take().is_some()
        {
            self.disarm(id, Deadline::Defer);
        }
        let Some(listener_id) = listener_id else {
            return;
        };
        let Some(listener) = self.registry.listener_mut(listener_id) else {
            return self.abort(id, out);
        };
        match listener.opens.queue.handshake_done(id) {
            Queueing::Queued => {
                session_offered(self.registry.session_mut(id));
                out.extend([
                    Effect::ReviewFloods(listener_id),
                    Effect::Announce(listener_id),
                ]);
            }
            Queueing::CrowdedOut => self.counters.accept_overflow += 1,
            Queueing::Waits => {}
        }
    }

    /// Handles a failed handshake.
    pub(crate) fn on_failed_handshake(&mut self, id: SessionId, out: &mut Effects) {
        if let Some((_, listener)) = self.listener_of(id) {
            listener.opens.queue.handshake_failed(id);
        }
        self.forget(id, out);
    }

    /// Queues connections that had no room in the accept queue, as far as it has room now.
    pub(crate) fn admit_crowded_out(&mut self, listener_id: SessionId, out: &mut Effects) {
        while let Some(listener) = self.registry.listener_mut(listener_id)
            && let Some(id) = listener.opens.queue.admit_crowded_out()
        {
            session_offered(self.registry.session_mut(id));
            let announced = Effect::Announce(listener_id);
            if out.last() != Some(&announced) {
                out.extend([Effect::ReviewFloods(listener_id), announced]);
            }
        }
    }

    /// Handles a session that has left its listener's accept queue. If a process accepted it, that process becomes its
    /// acceptor.
    pub(crate) fn on_accepted(
        &mut self,
        id: SessionId,
        acceptor: Option<ChannelId>,
        out: &mut Effects,
    ) {
        if let Some((listener_id, listener)) = self.listener_of(id) {
            listener.opens.queue.accepted(id);
            listener.note_acceptor(acceptor);
            out.push(Effect::ReviewFloods(listener_id));
            self.admit_crowded_out(listener_id, out);
            self.admit_local_open(listener_id, out);
        }
        if let Some(session) = self.registry.session_mut(id)
            && acceptor.is_some()
        {
            session.acceptor = acceptor;
        }
    }

    /// Learns from the first user of an accepted session whom the listener accepts for: the accepting process itself,
    /// or a child of it. `user` is `None` for a child that has not registered.
    pub fn note_user(&mut self, id: SessionId, user: Option<ChannelId>) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        let is_acceptor = session.acceptor == user;
        let is_first = match session.migrations {
            0 => session.acceptor.is_some(),
            // It went to the acceptor with `accept`, and may have been flushed since.
            1 | 2 => !is_acceptor,
            _ => false,
        };
        if is_first && let Some((_, listener)) = self.listener_of(id) {
            listener.is_for_children = !is_acceptor;
        }
    }

    /// Ends a listener: connections not accepted yet are reset, and new ones find no listener.
    pub(crate) fn end_listening(&mut self, id: SessionId, out: &mut Effects) {
        self.forget_exempt(id, out);
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        let port = session.local.port();
        // The session is not listening yet if its port could not be opened at the kernel.
        out.push(Effect::CloseRows(self.listeners.close(id, port)));
        if session.phase() != SessionPhase::Listening {
            return;
        }
        let Life::Listening(listener) = std::mem::replace(&mut session.life, Life::Bound) else {
            return;
        };
        if !listener.performers.is_empty() {
            out.push(Effect::EndDeal(id));
        }
        out.push(Effect::ReviewFloods(id));
        for unaccepted in listener.opens.queue.unaccepted() {
            self.abort(unaccepted, out);
        }
        for opener in listener.local_opens {
            self.refuse_local_open(opener, Errno::CONNREFUSED, out);
        }
    }

    // Opens within the host.

    /// Makes the two ends of a connection within the host: `opener`'s, held by the process at `channel`, and the
    /// listener's. Returns the latter.
    pub fn introduce(
        &mut self,
        opener: SessionId,
        (channel, slot): (ChannelId, Slot),
        listener: SessionId,
        (local, remote): (SocketAddr, SocketAddr),
        random: impl FnMut() -> u64,
    ) -> Result<SessionId, Errno> {
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: remote,
            remote: local,
        };
        let accepter = self.enter_for(listener, &flow, Life::handshake(), random)?;
        if let Some(session) = self.registry.session_mut(accepter) {
            session.local_peer = Some(opener);
        }
        if let Some(session) = self.registry.session_mut(opener) {
            session.local = local;
            session.remote = Some(remote);
            session.life = Life::Connecting { channel, slot };
            session.local_peer = Some(accepter);
        }
        self.registry.steer(opener, Holder::Process(channel, slot));
        self.counters.opens += 1;
        Ok(accepter)
    }

    fn accepter_of(&self, opener: SessionId) -> Option<SessionId> {
        self.registry.session(opener)?.local_peer
    }

    /// Opens a connection within the host: at once, or when there is room in the accept queue.
    pub(crate) fn on_local_open(&mut self, opener: SessionId, now: Instant, out: &mut Effects) {
        let accepter = self.accepter_of(opener);
        let Some((_, listener)) = accepter.and_then(|id| self.listener_of(id)) else {
            return self.refuse_local_open(opener, Errno::CONNREFUSED, out);
        };
        if listener.opens.queue.has_room() {
            return out.push(Effect::TellLocalOpener(opener));
        }
        listener.local_opens.push_back(opener);
        self.counters.syn_dropped += 1;
        self.arm(opener, Deadline::LocalConnect, now + OPEN_WAITS);
    }

    /// Completes a local open if its opener could be notified, and passes the other end to the listener.
    pub(crate) fn on_local_opener_told(
        &mut self,
        opener: SessionId,
        is_told: Result<(), Errno>,
        now: Instant,
        out: &mut Effects,
    ) {
        let Some(accepter) = self.accepter_of(opener) else {
            return;
        };
        let listener = self.listener_of(accepter).map(|(listener, _)| listener);
        if is_told.is_ok() {
            if let Some(session) = self.registry.session_mut(opener) {
                session.life = Life::Connected;
            }
            self.counters.local_sessions += 1;
            self.on_handshake(accepter, now, out);
        } else {
            out.extend([Effect::Forget(accepter), Effect::Forget(opener)]);
        }
        if let Some(listener) = listener {
            self.admit_local_open(listener, out);
        }
    }

    /// Admits the next waiting opener if there is room; its completion admits the one after it.
    fn admit_local_open(&mut self, listener_id: SessionId, out: &mut Effects) {
        if let Some(listener) = self.registry.listener_mut(listener_id)
            && listener.opens.queue.has_room()
            && let Some(opener) = listener.local_opens.pop_front()
        {
            self.disarm(opener, Deadline::LocalConnect);
            out.push(Effect::TellLocalOpener(opener));
        }
    }

    fn refuse_local_open(&mut self, opener: SessionId, errno: Errno, out: &mut Effects) {
        out.extend(self.accepter_of(opener).map(Effect::Forget));
        out.push(Effect::FailOpen(opener, errno));
    }

    /// Refuses an opener that has waited too long.
    pub(crate) fn on_late_local_open(&mut self, opener: SessionId, out: &mut Effects) {
        if self.leave_local_opens(opener, self.accepter_of(opener)) {
            self.refuse_local_open(opener, Errno::TIMEDOUT, out);
        }
    }

    /// Removes the opener from the queue of `accepter`'s listener. Returns whether it was waiting there.
    pub(crate) fn leave_local_opens(
        &mut self,
        opener: SessionId,
        accepter: Option<SessionId>,
    ) -> bool {
        let Some((_, listener)) = accepter.and_then(|id| self.listener_of(id)) else {
            return false;
        };
        let place = listener.local_opens.iter().position(|id| *id == opener);
        place.is_some_and(|place| listener.local_opens.remove(place).is_some())
    }
}

fn session_offered(session: Option<&mut SessionEntry>) {
    if let Some(session) = session {
        session.life = Life::Offered;
    }
}
