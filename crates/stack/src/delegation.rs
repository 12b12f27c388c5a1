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
use portolan_tcp::{Connection, Events, ListenAnswer, StateName, judge_at_listener};
use portolan_types::{FlowKey, Generation, Instant, SeqNum, SessionId, Slot};
use portolan_wire::tcp::TcpHeader;

use crate::counters::Fate;
use crate::frame::Wire;
use crate::packet::{Drop, Packet};
use crate::passive::{
    CookieClock, CookieUse, FastOpenUse, Handshake, Origin, PassiveOpen, Rules, Segment, Step,
    Terms, Unanswered, path_config,
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
    opens: PassiveOpen<Slot>,
    clock: CookieClock,
    flood: FloodReports,
    flows: HashMap<FlowKey, Known>,
    /// Accepted; until when their flows are known.
    leaving: VecDeque<(Instant, FlowKey, Known)>,
    answers: Vec<(FlowKey, TcpHeader)>,
    reset_limit: ResetLimit,
}

impl Delegation {
    pub fn new(rules: Rules, options: HandshakeOptions, backlog: u32) -> Delegation {
        Delegation {
            secret: Secret(rules.secret),
            rules,
            opens: PassiveOpen::new(options, backlog),
            clock: CookieClock::default(),
            flood: FloodReports::default(),
            flows: HashMap::new(),
            leaving: VecDeque::new(),
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
        let Some(segment) = Segment::of(&packet) else {
            return DelegateInput::Done;
        };
        let flow = segment.flow;
        if let Some(&known) = self.flows.get(&flow) {
            self.hold_handshake(stack, known.slot);
            let met = deliver(stack, (known.slot, flow), now, record, frame);
            self.look_at_handshake(stack, known.slot);
            if met == DelegateInput::Done || !known.is_followed_by(segment.header) {
                return met;
            }
            // The connection is over, else the frame would have come by its row.
            self.flows.remove(&flow);
        }
        let step = self.judge(routes, now, &segment);
        self.perform(stack, now, &segment, step);
        DelegateInput::Done
    }

    fn judge(&self, routes: &Routes, now: Instant, segment: &Segment<'_>) -> Step {
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
            lent_secret: None,
            clock: if self.flood.is_told() {
                CookieClock::ALWAYS
            } else {
                self.clock
            },
            config: &config,
            is_unfinished: &|_| false,
        };
        self.opens.on_segment(now, segment, &terms)
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
            let known = self.flows.keys().copied();
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
        self.flows.insert(flow, Known { slot, peer_isn });
        slot
    }

    /// Before a segment: while the accept queue is full no handshake completes.
    fn hold_handshake(&self, stack: &mut Stack, slot: Slot) {
        if self.opens.queue.is_handshake(slot)
            && let Some(session) = stack.tcp(slot)
        {
            session
                .connection
                .hold_handshake(self.opens.queue.is_full());
        }
    }

    /// After it: the next segment has to know how full the queue is.
    fn look_at_handshake(&mut self, stack: &mut Stack, slot: Slot) {
        if self.opens.queue.is_handshake(slot)
            && let Some(session) = stack.tcp(slot)
            && Handshake::of(&session.connection) != Handshake::Undone
        {
            self.opens.queue.handshake_done(slot);
        }
    }

    fn admit_crowded_out(&mut self) {
        while self.opens.queue.admit_crowded_out().is_some() {}
    }

    /// Heeds what has happened to a session; false if it is none of those here.
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
            self.flows.remove(&session.flow);
        }
    }

    pub fn cookies(&self) -> CookieCounts {
        self.opens.cookies
    }

    /// Connections that nobody has accepted.
    pub fn waiting(&self) -> u32 {
        self.opens.queue.waiting()
    }

    pub fn has_ready(&self) -> bool {
        self.opens.queue.next_ready().is_some()
    }

    /// Takes the connection that has waited longest, with its slot, which stays promised to it.
    pub fn accept(&mut self, stack: &mut Stack, now: Instant) -> Option<(Slot, Box<TcpSession>)> {
        let slot = self.opens.queue.note_offered()?;
        self.opens.queue.accepted(slot);
        self.admit_crowded_out();
        self.flood.note_queue(now, self.opens.queue.state());
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
        self.opens.queue.return_first(slot);
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

    /// What the server is to hear of a flood.
    pub fn flood_reports(&mut self) -> Vec<FloodReport> {
        self.flood.take()
    }

    /// Sends what is answered without a session.
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
