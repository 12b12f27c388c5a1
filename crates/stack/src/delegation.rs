//! The handshakes of one listener, performed where its connections are used (ADR 15): segments of
//! the port come here without a row of their own, and are told apart by their flows. A connection
//! that is accepted gets a row, and leaves; what is still on its way by the port's row follows it.

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

/// How long segments may come by the port's row for a connection that has one of its own.
const FOLLOW_FOR: Duration = Duration::from_secs(2);

/// Answers that may wait to be sent; more are dropped, like packets.
const ANSWERS_MAX: usize = 1024;

/// What a frame of the port has become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelegateInput {
    /// It was heeded, or dropped.
    Done,
    /// Its connection was accepted, and has left since.
    Left,
}

/// Where a connection stands that nobody has accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Handshake,
    Ready,
}

/// A connection that came by the port's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    slot: Slot,
    /// Of the peer's SYN: a SYN with another number is of another connection.
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
    /// Accepted; until when their flows are known.
    leaving: VecDeque<(Instant, FlowKey, Known)>,
    answers: Vec<(FlowKey, TcpHeader)>,
    reset_limit: ResetLimit,
    /// Reset, and yet to say so.
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

    /// Takes in a frame that came by the port's row.
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
            // The connection is over, else the frame would have come by its row.
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
            // The peer may try again: Linux drops it, too.
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

    /// None without a way to the peer.
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

    /// Before a segment: while the accept queue is full no handshake completes.
    fn hold_handshake(&self, stack: &mut Stack, slot: Slot) {
        if self.stages.get(&slot) == Some(&Stage::Handshake)
            && let Some(session) = stack.tcp(slot)
        {
            session.connection.hold_handshake(self.backlog.is_full());
        }
    }

    /// After it: the next segment has to know how full the queue is.
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

    /// A handshake is done.
    fn queue(&mut self, slot: Slot) {
        self.backlog.queued();
        self.stages.insert(slot, Stage::Ready);
        self.ready.push_back(slot);
    }

    /// Heeds what has happened to a session; false if it is none of those here.
    pub fn on_changed(&mut self, stack: &mut Stack, (slot, events): (Slot, Events)) -> bool {
        let Some(&stage) = self.stages.get(&slot) else {
            return false;
        };
        let has_ended = events.intersects(Events::CLOSED | Events::ERROR);
        match stage {
            // As on Linux, one that ends before it is accepted is accepted all the same.
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

    /// Connections that were reset since the last call: they go when they have said so.
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

    /// Connections that nobody has accepted.
    pub fn waiting(&self) -> u32 {
        self.backlog.waiting()
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the connection that has waited longest, with its slot, which stays promised to it.
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

    /// One that was taken by [`Delegation::accept`] waits again, as the first.
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
            // By now it may be another connection's.
            if self.flows.get(flow) == Some(known) {
                self.flows.remove(flow);
            }
            self.leaving.pop_front();
        }
    }

    /// Ends the delegation: takes out all connections that nobody has accepted.
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

    /// Resets all connections that nobody has accepted: nobody will.
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

    /// What the server is to hear of a flood.
    pub fn flood_reports(&mut self) -> Vec<FloodReport> {
        self.flood.take()
    }

    /// Sends what is answered without a session.
    pub fn answer(&mut self, routes: &Routes, wire: &mut impl Wire) {
        for (flow, answer) in self.answers.drain(..) {
            send_segment(&flow, self.options.ip, &answer, routes, wire);
        }
    }
}

impl Known {
    /// Does the segment open another connection between the same endpoints?
    fn is_followed_by(&self, header: &TcpHeader) -> bool {
        header.seq != self.peer_isn && judge_at_listener(header) == ListenAnswer::Open
    }
}

/// A frame of a connection that is known here goes where it is now, if it is.
fn deliver(
    stack: &mut Stack,
    (slot, flow): (Slot, FlowKey),
    now: Instant,
    record: &RecordHeader,
    frame: &[u8],
) -> DelegateInput {
    let generation = match stack.get(slot) {
        Some(Session::Tcp(session)) if session.flow == flow => session.generation,
        // It is between two places of this process, or has left.
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
