//! The handshakes of one listener, performed where its connections are used (ADR 15): segments of the
//! port arrive here without rows of their own, and are distinguished by their flows. An accepted
//! connection gets a row, and leaves; segments still in transit by the port's row are passed on to it.

mod flood;

use std::collections::{HashMap, VecDeque};

use core::time::Duration;

use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::RecordHeader;
use portolan_proto::report::CookieCounts;
use portolan_tcp::isn::Secret;
use portolan_tcp::{Config, Connection, Events, ListenAnswer, StateName, judge_at_listener};
use portolan_types::{FlowKey, Generation, Instant, SeqNum, SessionId, Slot};
use portolan_wire::tcp::TcpHeader;

use crate::backlog::{Backlog, CookieUse, SynVerdict};
use crate::counters::Fate;
use crate::frame::Wire;
use crate::packet::{Drop, Packet, Transport};
use crate::passive::{
    self, CookieClock, ListenerSegment, Rules, answer_by_cookie, clamp_for_cookie, first_number,
    open_by_cookie, passive_config, refusal,
};
use crate::reset_limit::ResetLimit;
use crate::routes::Routes;
use crate::session::{Session, TcpSession};
use crate::stack::{Input, Stack, send_segment};

pub use flood::FloodReport;
use flood::FloodReports;

/// How long segments may arrive by the port's row for a connection that has its own row.
const FOLLOW_FOR: Duration = Duration::from_secs(2);

/// Limit of the answers waiting to be sent; further ones are dropped, like packets.
const ANSWERS_MAX: usize = 1024;

/// The result for a frame of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelegateInput {
    /// It was processed or dropped.
    Done,
    /// Its connection was accepted, and has migrated since.
    Left,
}

/// The state of a connection that is not accepted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Handshake,
    Ready,
}

/// A connection that arrived by the port's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    slot: Slot,
    /// Initial sequence number of the peer: a SYN with another one belongs to another connection.
    peer_isn: SeqNum,
}

/// A listener's connections before they are accepted.
#[derive(Debug)]
pub struct Delegation {
    rules: Rules,
    secret: Secret,
    options: HandshakeOptions,
    backlog: Backlog,
    clock: CookieClock,
    flood: FloodReports,
    cookies: CookieCounts,
    flows: HashMap<FlowKey, Known>,
    stages: HashMap<Slot, Stage>,
    ready: VecDeque<Slot>,
    /// Accepted connections, and how long their flows are remembered.
    leaving: VecDeque<(Instant, FlowKey, Known)>,
    answers: Vec<(FlowKey, TcpHeader)>,
    reset_limit: ResetLimit,
    /// Connections that were reset, with the RST still to be sent.
    ending: Vec<Slot>,
}

impl Delegation {
    pub fn new(rules: Rules, options: HandshakeOptions, backlog: u32) -> Delegation {
        Delegation {
            secret: Secret(rules.secret),
            rules,
            options,
            backlog: Backlog::new(backlog),
            clock: CookieClock::default(),
            flood: FloodReports::default(),
            cookies: CookieCounts::default(),
            flows: HashMap::new(),
            stages: HashMap::new(),
            ready: VecDeque::new(),
            leaving: VecDeque::new(),
            answers: Vec::new(),
            reset_limit: ResetLimit::default(),
            ending: Vec::new(),
        }
    }

    /// `listen` was called again, or an option was set.
    pub fn change(&mut self, rules: Rules, options: HandshakeOptions, backlog: u32) {
        self.rules = rules;
        self.options = options;
        self.backlog.resize(backlog);
    }

    /// Processes a frame that arrived by the port's row.
    pub fn input(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        record: &RecordHeader,
        frame: &[u8],
    ) -> DelegateInput {
        self.forget_left(now);
        let packet = match Packet::parse(frame, record) {
            Ok(packet) => packet,
            Err(reason) => {
                stack.counters.count(Fate::Dropped(reason));
                return DelegateInput::Done;
            }
        };
        let Some(flow) = packet.flow() else {
            return DelegateInput::Done;
        };
        let Transport::Tcp {
            header, payload, ..
        } = packet.transport
        else {
            return DelegateInput::Done;
        };
        if let Some(&known) = self.flows.get(&flow) {
            self.hold_handshake(stack, known.slot);
            let met = deliver(stack, (known.slot, flow), now, record, frame);
            self.look_at_handshake(stack, known.slot);
            if met == DelegateInput::Done || !known.is_followed_by(&header) {
                return met;
            }
            // The connection is over; otherwise the frame would have arrived by its own row.
            self.flows.remove(&flow);
        }
        if packet.ttl < self.options.ip.min_ttl {
            stack.counters.count(Fate::Dropped(Drop::TooFar));
            return DelegateInput::Done;
        }
        self.on_segment((stack, routes), now, flow, (&header, payload));
        DelegateInput::Done
    }

    fn on_segment(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        flow: FlowKey,
        segment: (&TcpHeader, &[u8]),
    ) {
        let (header, payload) = segment;
        let clock = match self.flood.is_told() {
            true => CookieClock::ALWAYS,
            false => self.clock,
        };
        match clock.judge(now, &flow, header, [&self.secret]) {
            ListenerSegment::Noise => stack.counters.count(Fate::Unclaimed),
            ListenerSegment::Syn => self.on_syn((stack, routes), now, flow, header),
            // The peer may retry; Linux drops it, too.
            ListenerSegment::Cookie(_) if self.backlog.is_full() => {
                stack.counters.count(Fate::AcceptOverflow);
            }
            ListenerSegment::Cookie(decoded) => {
                let Some(config) = self.config(routes, &flow) else {
                    return;
                };
                let config = clamp_for_cookie(config, &self.options);
                let connection = open_by_cookie(&config, &decoded, segment, now);
                stack.counters.count(Fate::CookieTaken);
                self.cookies.accepted += 1;
                let peer_isn = header.seq - 1;
                let slot = self.enter(stack, now, (flow, peer_isn), connection);
                self.queue(slot);
                let queue = self.backlog.accept_queue();
                self.flood.note_opened(now, flow, queue);
            }
            ListenerSegment::Stray { is_forgery } => {
                self.cookies.refused += u64::from(is_forgery);
                stack.counters.count(match is_forgery {
                    true => Fate::CookieRefused,
                    false => Fate::Unclaimed,
                });
                match refusal(header, payload) {
                    Some(reset) if self.reset_limit.allows(now) => self.answer_with(flow, reset),
                    Some(_) => stack.counters.count(Fate::ResetWithheld),
                    None => {}
                }
            }
        }
    }

    fn on_syn(
        &mut self,
        (stack, routes): (&mut Stack, &Routes),
        now: Instant,
        flow: FlowKey,
        syn: &TcpHeader,
    ) {
        let verdict = self.backlog.on_syn(self.rules.cookies);
        if verdict != SynVerdict::Open && self.rules.cookies != CookieUse::Never {
            let known = self.flows.keys().copied();
            let queue = self.backlog.accept_queue();
            self.flood.note_unkept(now, queue, known);
        }
        if verdict == SynVerdict::Drop {
            return stack.counters.count(Fate::SynDropped);
        }
        let Some(config) = self.config(routes, &flow) else {
            return;
        };
        if verdict == SynVerdict::Cookie {
            let config = clamp_for_cookie(config, &self.options);
            let answer = answer_by_cookie(&self.secret, &flow, syn, &config, now);
            self.clock.note(now);
            stack.counters.count(Fate::CookieSent);
            self.cookies.sent += 1;
            return self.answer_with(flow, answer);
        }
        let isn = first_number(&self.secret, &flow, now);
        let options = (&self.options, self.rules.syn_ack_retries);
        let connection = passive::open(&config, options, syn, isn, now);
        stack.counters.count(Fate::Handshake);
        let slot = self.enter(stack, now, (flow, syn.seq), connection);
        self.stages.insert(slot, Stage::Handshake);
        self.backlog.handshake_started();
        self.flood.note_kept(now, flow);
    }

    /// The parameters of a connection; none if there is no path to the peer.
    fn config(&self, routes: &Routes, flow: &FlowKey) -> Option<Config> {
        let path = routes.path(flow.remote.ip()).ok()?;
        let peer = (&path, flow);
        Some(passive_config(
            &self.rules.config,
            &self.options,
            peer,
            &self.secret,
        ))
    }

    fn enter(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        (flow, peer_isn): (FlowKey, SeqNum),
        connection: Connection,
    ) -> Slot {
        let session = TcpSession {
            ip: self.options.ip,
            ..TcpSession::new(SessionId(0), flow, connection)
        };
        let slot = stack.insert(now, Session::Tcp(Box::new(session)));
        self.flows.insert(flow, Known { slot, peer_isn });
        slot
    }

    /// Called before a segment: while the accept queue is full no handshake may complete.
    fn hold_handshake(&self, stack: &mut Stack, slot: Slot) {
        if self.stages.get(&slot) == Some(&Stage::Handshake)
            && let Some(session) = stack.tcp(slot)
        {
            session.connection.hold_handshake(self.backlog.is_full());
        }
    }

    /// Called after a segment, since the next one depends on whether the queue is full.
    fn look_at_handshake(&mut self, stack: &mut Stack, slot: Slot) {
        if self.stages.get(&slot) == Some(&Stage::Handshake)
            && let Some(session) = stack.tcp(slot)
            && !matches!(
                session.connection.state(),
                StateName::SynReceived | StateName::Closed
            )
        {
            self.backlog.handshake_ended();
            self.queue(slot);
        }
    }

    /// Queues a connection whose handshake is complete.
    fn queue(&mut self, slot: Slot) {
        self.backlog.queued();
        self.stages.insert(slot, Stage::Ready);
        self.ready.push_back(slot);
    }

    /// Processes the events of a session; returns false if the session is not one of these.
    pub fn on_changed(&mut self, stack: &mut Stack, (slot, events): (Slot, Events)) -> bool {
        let Some(&stage) = self.stages.get(&slot) else {
            return false;
        };
        let has_ended = events.intersects(Events::CLOSED | Events::ERROR);
        match stage {
            // As on Linux, a connection that ends before it is accepted is accepted nevertheless.
            Stage::Ready => {}
            Stage::Handshake if has_ended => {
                self.backlog.handshake_ended();
                self.forget(stack, slot);
            }
            Stage::Handshake if events.contains(Events::HELD) => {
                stack.counters.count(Fate::AcceptOverflow);
            }
            Stage::Handshake => {}
        }
        true
    }

    fn reset(&mut self, stack: &mut Stack, now: Instant, slot: Slot) {
        self.stages.remove(&slot);
        if let Some(session) = stack.tcp(slot) {
            session.connection.abort(now);
            self.flows.remove(&session.flow);
        }
        stack.touch(slot);
        self.ending.push(slot);
    }

    /// Returns the connections reset since the last call: they are removed once the RST is sent.
    pub fn ending(&mut self) -> impl Iterator<Item = Slot> + '_ {
        self.ending.drain(..)
    }

    fn forget(&mut self, stack: &mut Stack, slot: Slot) {
        self.stages.remove(&slot);
        if let Some(Session::Tcp(session)) = stack.remove(slot) {
            self.flows.remove(&session.flow);
        }
    }

    pub fn cookies(&self) -> CookieCounts {
        self.cookies
    }

    /// Number of connections not accepted yet.
    pub fn waiting(&self) -> u32 {
        self.backlog.waiting()
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the connection that has waited longest, with its slot, which stays reserved for it.
    pub fn accept(&mut self, stack: &mut Stack, now: Instant) -> Option<(Slot, Box<TcpSession>)> {
        let slot = self.ready.pop_front()?;
        self.backlog.accepted();
        self.flood.note_queue(now, self.backlog.accept_queue());
        self.stages.remove(&slot);
        match stack.take(slot)? {
            Session::Tcp(session) => {
                let known = self.flows.get(&session.flow);
                let known = known.map(|known| (now + FOLLOW_FOR, session.flow, *known));
                self.leaving.extend(known);
                Some((slot, session))
            }
            Session::Udp(_) => None,
        }
    }

    /// Puts a connection taken by [`Delegation::accept`] back, at the head of the queue.
    pub fn return_accepted(
        &mut self,
        (stack, now): (&mut Stack, Instant),
        (slot, session): (Slot, Box<TcpSession>),
    ) {
        let flow = session.flow;
        self.leaving
            .retain(|(_, left, known)| *left != flow || known.slot != slot);
        stack.insert_at(now, slot, Session::Tcp(session));
        self.backlog.queued();
        self.stages.insert(slot, Stage::Ready);
        self.ready.push_front(slot);
    }

    fn forget_left(&mut self, now: Instant) {
        while let Some((until, flow, known)) = self.leaving.front()
            && *until <= now
        {
            // The flow may belong to another connection by now.
            if self.flows.get(flow) == Some(known) {
                self.flows.remove(flow);
            }
            self.leaving.pop_front();
        }
    }

    /// Ends the delegation: removes and returns all connections not accepted yet.
    pub fn surrender(mut self, stack: &mut Stack) -> Vec<TcpSession> {
        let waiting = self.ready.drain(..).collect::<Vec<_>>();
        let handshakes = self.stages.iter();
        let handshakes = handshakes.filter(|(_, stage)| **stage == Stage::Handshake);
        let slots = waiting.into_iter().chain(handshakes.map(|(slot, _)| *slot));
        let taken = |slot| match stack.remove(slot) {
            Some(Session::Tcp(session)) => Some(*session),
            Some(Session::Udp(_)) | None => None,
        };
        slots
            .filter_map(taken)
            .filter(|session| session.connection.state() != StateName::Closed)
            .collect()
    }

    /// Resets all connections not accepted yet, since they never will be.
    pub fn abort(&mut self, stack: &mut Stack, now: Instant) {
        let slots: Vec<Slot> = self.stages.keys().copied().collect();
        for slot in slots {
            self.reset(stack, now, slot);
        }
        self.ready.clear();
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
            send_segment(&flow, self.options.ip, &answer, routes, wire);
        }
    }
}

impl Known {
    /// Whether the segment opens another connection between the same endpoints.
    fn is_followed_by(&self, header: &TcpHeader) -> bool {
        header.seq != self.peer_isn && judge_at_listener(header) == ListenAnswer::Open
    }
}

/// Delivers a frame of a known connection to its present slot, if it is here.
fn deliver(
    stack: &mut Stack,
    (slot, flow): (Slot, FlowKey),
    now: Instant,
    record: &RecordHeader,
    frame: &[u8],
) -> DelegateInput {
    let generation = match stack.get(slot) {
        Some(Session::Tcp(session)) if session.flow == flow => session.generation,
        // It is migrating within this process, or has left.
        _ => Generation(u32::MAX),
    };
    let record = RecordHeader {
        slot: slot.0,
        generation: generation.0,
        ..*record
    };
    match stack.input(now, &record, frame) {
        Input::Unclaimed(_) => DelegateInput::Left,
        Input::Delivered(_) | Input::Held(_) | Input::Dropped(_) => DelegateInput::Done,
    }
}

#[cfg(test)]
mod tests;
