//! The handshakes of one listener, performed where its connections are used (ADR 15): segments of the
//! port arrive here without rows of their own, and are distinguished by their flows. So do those of accepted
//! connections until they are registered (ADR 31): then a connection has a row, and segments still in transit by the
//! port's row are passed on to it.

mod flood;

use core::time::Duration;
use std::collections::VecDeque;

use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::RecordHeader;
use portolan_proto::report::CookieCounts;
use portolan_tcp::isn::Secret;
use portolan_tcp::{Connection, Events, StateName};
use portolan_types::{FlowKey, Instant, SeqNum, SessionId, Slot};
use portolan_wire::tcp::TcpHeader;

use crate::counters::Fate;
use crate::flow_table::{FlowTable, Known};
use crate::frame::Wire;
use crate::packet::{Drop, Packet};
use crate::passive::{
    CookieClock, CookieUse, FastOpenUse, Handshake, Origin, PassiveOpen, Rules, Segment, Step,
    Terms, Unanswered, path_config,
};
use crate::reset_limit::ResetLimit;
use crate::routes::Routes;
use crate::session::{Session, TcpSession};
use crate::stack::{Input, OF_NEXT, Stack, send_segment};

pub use flood::FloodReport;
use flood::FloodReports;

/// Limit of the answers waiting to be sent; further ones are dropped, like packets.
pub(crate) const ANSWERS_MAX: usize = 1024;

/// Connections that wait for their first bytes, before those are forgotten that do so no more.
const DEFERRED_LEAST: usize = 64;

/// The result for a frame of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelegateInput {
    /// It was processed or dropped.
    Done,
    /// Its connection was accepted, and has migrated since.
    Left,
    /// It was processed by the connection at that slot, for which registration pays by now.
    Busy(Slot),
    /// It opens a new connection between the endpoints of the one at that slot, which is over, or in TIME-WAIT.
    Reopened(Slot),
}

/// A listener's connections before they are accepted.
#[derive(Debug)]
pub struct Delegation {
    rules: Rules,
    secret: Secret,
    opens: PassiveOpen<Slot>,
    clock: CookieClock,
    flood: FloodReports,
    flows: FlowTable,
    /// Connections whose handshake is done, until the caller takes them.
    done: Vec<(Slot, FlowKey)>,
    /// Connections that wait for their first bytes, or did so, and until when.
    deferred: VecDeque<(Instant, Slot)>,
    /// With as many, those that do so no more are forgotten.
    deferred_most: usize,
    answers: Vec<(FlowKey, TcpHeader)>,
    reset_limit: ResetLimit,
}

impl Delegation {
    /// From `now` on, acknowledgements of cookies may come that the server has sent.
    pub fn new(now: Instant, rules: Rules, options: HandshakeOptions, backlog: u32) -> Delegation {
        let mut clock = CookieClock::default();
        clock.note(now);
        Delegation {
            secret: Secret(rules.secret),
            rules,
            opens: PassiveOpen::new(options, backlog),
            clock,
            flood: FloodReports::default(),
            flows: FlowTable::default(),
            done: Vec::new(),
            deferred: VecDeque::new(),
            deferred_most: DEFERRED_LEAST,
            answers: Vec::new(),
            reset_limit: ResetLimit::default(),
        }
    }

    /// `listen` was called again, or an option was set.
    pub fn change(&mut self, rules: Rules, options: HandshakeOptions, backlog: u32) {
        self.rules = rules;
        self.opens.options = options;
        self.opens.queue.resize(backlog);
        self.admit_crowded_out();
    }

    /// Another server has given the rules. It knows of no flood, and of no cookie that was sent before.
    pub fn follow(&mut self, rules: Rules, options: HandshakeOptions, backlog: u32) {
        self.secret = Secret(rules.secret);
        self.flood = FloodReports::default();
        self.change(rules, options, backlog);
    }

    /// Processes a frame that arrived by the port's row.
    pub fn input(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        record: &RecordHeader,
        frame: &[u8],
    ) -> DelegateInput {
        self.flows.forget_left(now);
        let Some(packet) = parse(stack, record, frame) else {
            return DelegateInput::Done;
        };
        let Some(segment) = Segment::of(&packet) else {
            return DelegateInput::Done;
        };
        let flow = segment.flow;
        if let Some(known) = self.flows.get(&flow)
            && !self.yields_to_cookie((stack, routes), now, known.slot, &segment)
        {
            if self.reopens((stack, routes), now, known.slot, &segment) {
                return DelegateInput::Reopened(known.slot);
            }
            self.hold_handshake(stack, known.slot);
            let met = deliver(stack, (known.slot, flow), now, record, frame);
            self.look_at_handshake(stack, now, known.slot);
            if met == DelegateInput::Done && self.flows.note_segment(&flow) {
                return DelegateInput::Busy(known.slot);
            }
            let is_over = met != DelegateInput::Done && !known.is_registered();
            if !is_over || !known.is_followed_by(segment.header) {
                // The server knows whether a registered one is over: the frame came before its row, or after.
                return met;
            }
            self.flows.remove(&flow);
            self.open(stack, routes, now, &segment);
            return DelegateInput::Reopened(known.slot);
        }
        self.open(stack, routes, now, &segment);
        DelegateInput::Done
    }

    /// Processes a frame that [`DelegateInput::Left`] passed on and no server takes: a SYN opens a connection here, since
    /// the one that had its flow ended with the server, or without one. Returns false for any other frame.
    pub fn input_without_server(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        frame: &[u8],
    ) -> bool {
        let record = RecordHeader {
            length: frame.len() as u32,
            ..RecordHeader::default()
        };
        let Some(packet) = parse(stack, &record, frame) else {
            return false;
        };
        let Some(segment) = Segment::of(&packet) else {
            return false;
        };
        let flow = segment.flow;
        let known = self.flows.get(&flow).filter(Known::is_registered);
        let Some(known) = known.filter(|known| known.is_followed_by(segment.header)) else {
            return false;
        };
        if stack.tcp(known.slot).is_some_and(|here| here.flow == flow) {
            return false;
        }
        self.flows.remove(&flow);
        self.open(stack, routes, now, &segment);
        true
    }

    fn open(&mut self, stack: &mut Stack, routes: &Routes, now: Instant, segment: &Segment<'_>) {
        let step = self.judge(routes, |opens, terms| opens.on_segment(now, segment, terms));
        self.perform(stack, now, segment, step);
    }

    /// Ends a handshake whose peer has done another one, by a cookie: the filter answered the peer's second SYN while the
    /// first one waited here.
    fn yields_to_cookie(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        slot: Slot,
        segment: &Segment<'_>,
    ) -> bool {
        let is_refused = stack
            .tcp(slot)
            .is_some_and(|session| session.connection.refuses_handshake(segment.header));
        if !is_refused
            || !self.opens.queue.is_handshake(slot)
            || self.by_cookie(routes, now, segment).is_none()
        {
            return false;
        }
        self.opens.queue.handshake_failed(slot);
        self.forget(stack, slot);
        true
    }

    /// Opens the connection that the peer of one in TIME-WAIT begins: by a SYN (RFC 6191), or by a cookie, if the filter
    /// answered its SYN.
    fn reopens(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        slot: Slot,
        segment: &Segment<'_>,
    ) -> bool {
        let session = stack.tcp(slot).filter(|it| it.flow == segment.flow);
        let Some(time_wait) = session.and_then(|it| it.connection.time_wait()) else {
            return false;
        };
        let step = if let Some(isn) = time_wait.reopens(now, segment.header) {
            Some(self.judge(routes, |opens, terms| {
                opens.on_syn(now, segment, isn, terms)
            }))
        } else if time_wait.is_followed_by(now, segment.header) {
            self.by_cookie(routes, now, segment)
        } else {
            None
        };
        let Some(step) = step else { return false };
        self.flows.remove(&segment.flow);
        self.perform(stack, now, segment, step);
        true
    }

    /// Returns the step that opens a connection, if the segment acknowledges a cookie.
    fn by_cookie(&self, routes: &Routes, now: Instant, segment: &Segment<'_>) -> Option<Step> {
        let step = self.judge(routes, |opens, terms| opens.on_segment(now, segment, terms));
        matches!(step, Step::Open(_, Origin::Cookie)).then_some(step)
    }

    fn judge(
        &self,
        routes: &Routes,
        judge: impl FnOnce(&PassiveOpen<Slot>, &Terms<'_, Slot>) -> Step,
    ) -> Step {
        let config = |flow: &FlowKey| {
            let path = routes.path(flow.remote.ip()).ok()?;
            Some(path_config(&self.rules.config, &path, flow, &self.secret))
        };
        let terms = Terms {
            cookies: self.rules.cookies,
            // The server keeps such listeners to itself.
            fast_open: FastOpenUse::NEVER,
            syn_ack_retries: self.rules.syn_ack_retries,
            secret: &self.secret,
            fast_open_secret: &self.secret,
            clock: if self.flood.is_told() {
                CookieClock::ALWAYS
            } else {
                self.clock
            },
            config: &config,
            is_unfinished: &|_| false,
        };
        judge(&self.opens, &terms)
    }

    fn perform(&mut self, stack: &mut Stack, now: Instant, segment: &Segment<'_>, step: Step) {
        let flow = segment.flow;
        match step {
            Step::Ignore(why) => {
                if why == Unanswered::SynDropped {
                    self.note_unkept(now);
                }
                if let Some(fate) = fate_of(why) {
                    stack.counters.count(fate);
                }
            }
            Step::Cookie(answer) => {
                self.note_unkept(now);
                self.clock.note(now);
                stack.counters.count(Fate::CookieSent);
                self.opens.cookies.sent += 1;
                self.answer_with(flow, answer);
            }
            Step::Open(connection, Origin::Syn(_)) => {
                stack.counters.count(Fate::Handshake);
                let slot = self.enter(stack, now, (flow, segment.header.seq), connection);
                self.opens.queue.handshake_started(slot);
                self.flood.note_kept(now, flow);
            }
            Step::Open(connection, Origin::Cookie) => {
                stack.counters.count(Fate::CookieTaken);
                self.opens.cookies.accepted += 1;
                let slot = self.enter(stack, now, (flow, segment.header.seq - 1), connection);
                self.opens.queue.handshake_done(slot);
                self.done.push((slot, flow));
                self.flood.note_opened(now, flow, self.opens.queue.state());
            }
            Step::Refuse { reset, is_forgery } => {
                self.opens.cookies.refused += u64::from(is_forgery);
                stack.counters.count(if is_forgery {
                    Fate::CookieRefused
                } else {
                    Fate::Unclaimed
                });
                match reset {
                    Some(reset) if self.reset_limit.allows(now) => self.answer_with(flow, reset),
                    Some(_) => stack.counters.count(Fate::ResetWithheld),
                    None => {}
                }
            }
        }
    }

    /// A SYN was dropped, or answered by a cookie.
    fn note_unkept(&mut self, now: Instant) {
        let detector = &mut self.opens.flood_detector;
        detector.note(now);
        if self.rules.cookies != CookieUse::Never && detector.is_flood(now) {
            let known = self.flows.flows();
            self.flood.note_flood(now, self.opens.queue.state(), known);
        }
    }

    fn enter(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        (flow, peer_isn): (FlowKey, SeqNum),
        connection: Connection,
    ) -> Slot {
        let session = TcpSession {
            ip: self.opens.options.ip,
            ..TcpSession::new(SessionId(0), flow, connection)
        };
        let slot = stack.insert(now, Session::Tcp(Box::new(session)));
        self.flows.insert(flow, Known::new(slot, peer_isn));
        slot
    }

    /// Called before a segment: while the accept queue is full no handshake may complete.
    fn hold_handshake(&self, stack: &mut Stack, slot: Slot) {
        if self.opens.queue.is_handshake(slot)
            && let Some(session) = stack.tcp(slot)
        {
            session
                .connection
                .hold_handshake(self.opens.queue.is_full());
        }
    }

    /// Called after a segment, since the next one depends on whether the queue is full.
    fn look_at_handshake(&mut self, stack: &mut Stack, now: Instant, slot: Slot) {
        if !self.opens.queue.is_handshake(slot) {
            return;
        }
        let Some(session) = stack.tcp(slot) else {
            return;
        };
        let is_known_as_done = self.opens.queue.deferred_until(slot).is_some();
        let deferral = self.opens.options.defer_accept_seconds;
        match (Handshake::of(&session.connection), deferral) {
            (Handshake::Undone, _) => return,
            (Handshake::Done, Some(_)) if is_known_as_done => return,
            (Handshake::Done, Some(seconds)) => {
                let until = now + Duration::from_secs(u64::from(seconds));
                self.opens.queue.defer(slot, until);
                self.note_deferred(until, slot);
            }
            (Handshake::Done, None) | (Handshake::Readable, _) => {
                self.opens.queue.handshake_done(slot);
            }
        }
        if !is_known_as_done {
            self.done.push((slot, session.flow));
        }
    }

    fn note_deferred(&mut self, until: Instant, slot: Slot) {
        if self.deferred.len() >= self.deferred_most {
            let queue = &self.opens.queue;
            self.deferred
                .retain(|(until, slot)| queue.deferred_until(*slot) == Some(*until));
            self.deferred_most = (2 * self.deferred.len()).max(DEFERRED_LEAST);
        }
        self.deferred.push_back((until, slot));
    }

    /// When a connection will be accepted although no bytes have come.
    pub fn deferred_until(&self) -> Option<Instant> {
        self.deferred.front().map(|(until, _)| *until)
    }

    /// Connections whose first bytes have not come in time wait to be accepted, as others do.
    pub fn end_deferrals(&mut self, now: Instant) {
        while let Some((until, slot)) = self.deferred.front().copied()
            && until <= now
        {
            self.deferred.pop_front();
            if self.opens.queue.deferred_until(slot) == Some(until) {
                self.opens.queue.handshake_done(slot);
            }
        }
    }

    fn admit_crowded_out(&mut self) {
        while self.opens.queue.admit_crowded_out().is_some() {}
    }

    /// Processes the events of a session; returns false if the session is not one of these.
    pub fn on_changed(&mut self, stack: &mut Stack, (slot, events): (Slot, Events)) -> bool {
        if !self.opens.queue.has(slot) {
            return false;
        }
        // As on Linux, one that ends before it is accepted is accepted all the same.
        if self.opens.queue.is_handshake(slot) {
            if events.intersects(Events::CLOSED | Events::ERROR) {
                self.opens.queue.handshake_failed(slot);
                self.forget(stack, slot);
            } else if events.contains(Events::HELD) {
                stack.counters.count(Fate::AcceptOverflow);
            }
        }
        true
    }

    fn forget(&mut self, stack: &mut Stack, slot: Slot) {
        if let Some(Session::Tcp(session)) = stack.remove(slot) {
            self.flows.forget_ended(slot, &session.flow);
        }
    }

    pub fn cookies(&self) -> CookieCounts {
        self.opens.cookies
    }

    /// Takes the connections whose handshake is done since the last call, unless they are accepted by now: their peers rely
    /// on them.
    pub fn take_done(&mut self) -> impl Iterator<Item = (Slot, FlowKey)> + '_ {
        let queue = &self.opens.queue;
        self.done.drain(..).filter(|(slot, _)| queue.has(*slot))
    }

    /// Number of connections not accepted yet.
    pub fn waiting(&self) -> u32 {
        self.opens.queue.waiting()
    }

    pub fn has_ready(&self) -> bool {
        self.opens.queue.next_ready().is_some()
    }

    /// Takes the connection that has waited longest, with its slot, which stays reserved for it. Its segments arrive here
    /// until it is registered ([`Delegation::registered`]), or over ([`Delegation::forget_ended`]).
    pub fn accept(&mut self, stack: &mut Stack, now: Instant) -> Option<(Slot, Box<TcpSession>)> {
        let slot = self.opens.queue.note_offered()?;
        self.opens.queue.accepted(slot);
        self.admit_crowded_out();
        self.flood.note_queue(now, self.opens.queue.state());
        match stack.take(slot)? {
            Session::Tcp(session) => Some((slot, session)),
            Session::Udp(_) => None,
        }
    }

    /// Takes out the connections that wait to be accepted: others accept them. Their segments that still come here are
    /// passed on.
    pub fn give_up_waiting(&mut self, stack: &mut Stack, now: Instant) -> Vec<(Slot, TcpSession)> {
        let mut given_up = Vec::new();
        while let Some((slot, session)) = self.accept(stack, now) {
            stack.remove(slot);
            self.flows.registered(now, slot, &session.flow);
            if session.connection.state() != StateName::Closed {
                given_up.push((slot, *session));
            }
        }
        given_up
    }

    /// Puts a connection taken by [`Delegation::accept`] back, at the head of the queue.
    pub fn return_accepted(
        &mut self,
        (stack, now): (&mut Stack, Instant),
        (slot, session): (Slot, Box<TcpSession>),
    ) {
        stack.insert_at(now, slot, Session::Tcp(session));
        self.opens.queue.return_first(slot);
    }

    /// An accepted connection has a row of its own from now on.
    pub fn registered(&mut self, now: Instant, slot: Slot, flow: &FlowKey) {
        self.flows.registered(now, slot, flow);
    }

    /// An accepted connection is over.
    pub fn forget_ended(&mut self, slot: Slot, flow: &FlowKey) {
        self.flows.forget_ended(slot, flow);
    }

    /// Ends the delegation: takes out all connections that nobody has accepted.
    pub fn surrender(self, stack: &mut Stack) -> Vec<TcpSession> {
        let taken = |slot| match stack.remove(slot) {
            Some(Session::Tcp(session)) => Some(*session),
            Some(Session::Udp(_)) | None => None,
        };
        let slots = self.opens.queue.unaccepted();
        slots
            .filter_map(taken)
            .filter(|session| session.connection.state() != StateName::Closed)
            .collect()
    }

    /// Resets all connections that nobody has accepted: nobody will. They go when they have said so.
    pub fn abort(self, stack: &mut Stack, now: Instant) -> Vec<Slot> {
        let slots: Vec<Slot> = self.opens.queue.unaccepted().collect();
        for &slot in &slots {
            if let Some(session) = stack.tcp(slot) {
                session.connection.abort(now);
            }
            stack.touch(slot);
        }
        slots
    }

    fn answer_with(&mut self, flow: FlowKey, answer: TcpHeader) {
        if self.answers.len() < ANSWERS_MAX {
            self.answers.push((flow, answer));
        }
    }

    /// Takes the reports about floods for the server.
    pub fn flood_reports(&mut self) -> Vec<FloodReport> {
        self.flood.take()
    }

    /// Sends the answers that belong to no session.
    pub fn answer(&mut self, routes: &Routes, wire: &mut impl Wire) {
        for (flow, answer) in self.answers.drain(..) {
            send_segment(&flow, self.opens.options.ip, &answer, routes, wire);
        }
    }
}

fn fate_of(why: Unanswered) -> Option<Fate> {
    match why {
        Unanswered::Noise => Some(Fate::Unclaimed),
        Unanswered::TooFar => Some(Fate::Dropped(Drop::TooFar)),
        Unanswered::SynDropped => Some(Fate::SynDropped),
        Unanswered::AcceptQueueFull => Some(Fate::AcceptOverflow),
        Unanswered::NoRoute => None,
    }
}

/// Parses a frame, or counts why it is dropped.
pub(crate) fn parse<'a>(
    stack: &mut Stack,
    record: &RecordHeader,
    frame: &'a [u8],
) -> Option<Packet<'a>> {
    let dropped = |reason| stack.counters.count(Fate::Dropped(reason));
    Packet::parse(frame, record).map_err(dropped).ok()
}

/// Delivers a frame of a known connection to its present slot, if it is here.
pub(crate) fn deliver(
    stack: &mut Stack,
    (slot, flow): (Slot, FlowKey),
    now: Instant,
    record: &RecordHeader,
    frame: &[u8],
) -> DelegateInput {
    let generation = match stack.get(slot) {
        Some(Session::Tcp(session)) if session.flow == flow => session.generation,
        // It is migrating within this process, or has left.
        _ => OF_NEXT,
    };
    let record = RecordHeader {
        slot: slot.0,
        generation: generation.0,
        // As if it had come by a row of its own.
        flags: record.flags & !RecordHeader::BINDING,
        ..*record
    };
    match stack.input(now, &record, frame) {
        Input::Unclaimed(_) => DelegateInput::Left,
        Input::Delivered(_) | Input::Held(_) | Input::Dropped(_) => DelegateInput::Done,
    }
}

#[cfg(test)]
pub(crate) mod tests;
