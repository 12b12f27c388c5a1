//! Passive opens: the results of segments to a listener, as determined by `portolan_stack::passive`, and the handshakes
//! of its connections, until they wait to be accepted.

use portolan_control::{Input, Life, SessionEntry};
use portolan_stack::passive::{
    FastOpenOutcome, Handshake, Origin, PassiveOpen, Segment, Step, Terms, Unanswered,
};
use portolan_stack::{IpOptions, Session, TcpSession, send_segment};
use portolan_tcp::{Connection, StateName, reset_for};
use portolan_types::{FlowKey, SeqNum, SessionId, Slot};
use portolan_wire::tcp::TcpHeader;

use crate::random::random_u64;
use crate::server::Server;

impl Server {
    /// Handles a segment that belongs to no session.
    pub(crate) fn on_stranger(&mut self, segment: &Segment<'_>) {
        let Some(listener) = self.listener_for(&segment.flow) else {
            return self.reset(segment);
        };
        self.sysctls.refresh(self.now);
        let now = self.now;
        let step = self.judge(listener, |opens, terms| {
            opens.on_segment(now, segment, terms)
        });
        self.perform_step(listener, segment, step);
    }

    /// Handles a SYN for a listener; a connection that it opens begins with `isn`.
    pub(crate) fn on_syn(&mut self, listener: SessionId, syn: &Segment<'_>, isn: SeqNum) {
        self.sysctls.refresh(self.now);
        let now = self.now;
        let step = self.judge(listener, |opens, terms| opens.on_syn(now, syn, isn, terms));
        self.perform_step(listener, syn, step);
    }

    /// Replaces a handshake by a connection, if the segment acknowledges a cookie of its listener.
    pub(crate) fn open_by_cookie_instead(
        &mut self,
        handshake: SessionId,
        segment: &Segment<'_>,
    ) -> bool {
        let Some(listener) = self.listener_for(&segment.flow) else {
            return false;
        };
        let now = self.now;
        let step = self.judge(listener, |opens, terms| {
            opens.on_segment(now, segment, terms)
        });
        match step {
            Some(Step::Open(_, Origin::Cookie)) => self.input(Input::FailedHandshake(handshake)),
            Some(Step::Ignore(Unanswered::AcceptQueueFull)) => {}
            _ => return false,
        }
        self.perform_step(listener, segment, step);
        true
    }

    fn judge(
        &self,
        listener: SessionId,
        judge: impl FnOnce(&PassiveOpen<SessionId>, &Terms<'_, SessionId>) -> Step,
    ) -> Option<Step> {
        let listener = self.control.registry.listener(listener)?;
        let sysctls = self.sysctls.values();
        let terms = Terms {
            cookies: sysctls.cookies,
            fast_open: sysctls.fast_open,
            syn_ack_retries: sysctls.syn_ack_retries,
            secret: &listener.secret,
            fast_open_secret: &self.secret,
            clock: self.cookie_clock,
            config: &|flow| {
                let path = self.path_of(flow.remote).ok()?;
                Some(self.tcp_config(&path, flow, &listener.secret))
            },
            is_unfinished: &|id| self.is_unfinished(id),
        };
        Some(judge(&listener.opens, &terms))
    }

    fn perform_step(&mut self, listener: SessionId, segment: &Segment<'_>, step: Option<Step>) {
        match step {
            Some(Step::Ignore(why)) => self.count_unanswered(listener, &segment.flow, why),
            Some(Step::Cookie(answer)) => self.send_cookie(listener, &segment.flow, &answer),
            Some(Step::Open(connection, origin)) => {
                self.open_passive(listener, segment.flow, connection, origin);
            }
            Some(Step::Refuse { reset, is_forgery }) => {
                self.control.counters.cookies_bad += u64::from(is_forgery);
                if let Some(opens) = self.passive_opens(listener) {
                    opens.cookies.refused += u64::from(is_forgery);
                }
                self.send_reset(&segment.flow, reset);
            }
            None => {}
        }
    }

    fn passive_opens(&mut self, listener: SessionId) -> Option<&mut PassiveOpen<SessionId>> {
        let listener = self.control.registry.listener_mut(listener)?;
        Some(&mut listener.opens)
    }

    fn count_unanswered(&mut self, listener: SessionId, flow: &FlowKey, why: Unanswered) {
        let counters = &mut self.control.counters;
        match why {
            Unanswered::Noise => counters.dropped += 1,
            Unanswered::TooFar => counters.too_far += 1,
            Unanswered::AcceptQueueFull => counters.accept_overflow += 1,
            Unanswered::NoRoute => {}
            Unanswered::SynDropped => {
                counters.syn_dropped += 1;
                self.note_unkept(listener, flow);
            }
        }
    }

    fn send_cookie(&mut self, listener: SessionId, flow: &FlowKey, answer: &TcpHeader) {
        let ip = self.ip_options(listener);
        // The acknowledgement may arrive before the call returns.
        self.note_cookies();
        if send_segment(flow, ip, answer, &self.routes, &mut self.wire) {
            self.control.counters.cookies_sent += 1;
            if let Some(opens) = self.passive_opens(listener) {
                opens.cookies.sent += 1;
            }
            self.note_unkept(listener, flow);
            self.rx_throttle.give_way(self.now);
        }
    }

    fn open_passive(
        &mut self,
        listener: SessionId,
        flow: FlowKey,
        connection: Connection,
        origin: Origin,
    ) {
        let counters = &mut self.control.counters;
        match origin {
            Origin::Syn(FastOpenOutcome::QueueFull) => counters.fast_open_overflow += 1,
            Origin::Syn(FastOpenOutcome::Refused) => counters.fast_open_refused += 1,
            Origin::Syn(FastOpenOutcome::Accepted) => counters.fast_accepts += 1,
            Origin::Syn(FastOpenOutcome::Unused) | Origin::Cookie => {}
        }
        let Some(id) = self.enter_passive(listener, flow, connection) else {
            return;
        };
        match origin {
            Origin::Syn(FastOpenOutcome::Accepted) => self.note_fast_open(listener, id),
            Origin::Syn(_) => {
                if let Some(opens) = self.passive_opens(listener) {
                    opens.queue.handshake_started(id);
                }
                return;
            }
            Origin::Cookie => {
                self.control.counters.cookies_taken += 1;
                if let Some(opens) = self.passive_opens(listener) {
                    opens.cookies.accepted += 1;
                }
            }
        }
        self.input(Input::ReadableHandshake(id));
    }

    /// Enters a session that a listener opens, held by the server.
    pub(crate) fn enter_passive(
        &mut self,
        listener: SessionId,
        flow: FlowKey,
        connection: Connection,
    ) -> Option<SessionId> {
        let life = Life::handshake;
        let entered = self.control.enter_for(listener, &flow, life(), random_u64);
        let id = entered.ok()?;
        let session = TcpSession {
            ip: self.ip_options(listener),
            ..TcpSession::new(id, flow, connection)
        };
        self.hold(session, life());
        Some(id)
    }

    fn ip_options(&self, listener: SessionId) -> IpOptions {
        let listener = self.control.registry.listener(listener);
        listener.map_or_else(IpOptions::default, |listener| listener.opens.options.ip)
    }

    /// Counts a Fast Open; those whose handshake is done by now are no longer counted.
    fn note_fast_open(&mut self, listener: SessionId, id: SessionId) {
        let Some(opens) = self.passive_opens(listener) else {
            return;
        };
        let mut fast = std::mem::take(&mut opens.fast);
        fast.retain(|id| self.is_unfinished(*id));
        fast.push(id);
        if let Some(opens) = self.passive_opens(listener) {
            opens.fast = fast;
        }
    }

    fn is_unfinished(&self, id: SessionId) -> bool {
        let slot = self.server_slot(id);
        match slot.and_then(|slot| self.stack.get(slot)) {
            Some(Session::Tcp(session)) => session.connection.state() == StateName::SynReceived,
            Some(Session::Udp(_)) | None => false,
        }
    }

    /// Sends a reset by RFC 9293 §3.10.7.1.
    pub(crate) fn reset(&mut self, segment: &Segment<'_>) {
        let reset = reset_for(segment.header, segment.payload.len());
        self.send_reset(&segment.flow, reset);
    }

    /// Sends a reset within the rate limit.
    fn send_reset(&mut self, flow: &FlowKey, reset: Option<TcpHeader>) {
        let Some(reset) = reset else {
            return;
        };
        if !self.reset_limit.allows(self.now) {
            self.control.counters.resets_withheld += 1;
            // Resets above the limit count as a flood, too.
            return self.rx_throttle.note(self.now);
        }
        let ip = IpOptions::default();
        if send_segment(flow, ip, &reset, &self.routes, &mut self.wire) {
            self.control.counters.resets += 1;
        }
    }

    /// Before a segment: no handshake completes while the accept queue is full.
    pub(crate) fn hold_handshake(&mut self, slot: Slot) {
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        if session.connection.state() != StateName::SynReceived {
            return;
        }
        let listener = self
            .control
            .registry
            .session(session.id)
            .and_then(|known| self.control.registry.listener(known.listener?));
        let has_room = listener.is_none_or(|listener| listener.opens.queue.has_room());
        session.connection.hold_handshake(!has_room);
    }

    /// After a segment: the next one needs to know how full the queue is.
    pub(crate) fn look_at_handshake(&mut self, id: SessionId, slot: Slot) {
        let known = self.control.registry.session(id);
        let is_deferred = known.is_some_and(SessionEntry::is_deferred);
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        match Handshake::of(&session.connection) {
            Handshake::Readable => self.input(Input::ReadableHandshake(id)),
            Handshake::Done if !is_deferred => self.input(Input::Handshake(id)),
            Handshake::Done | Handshake::Undone => {}
        }
    }
}
