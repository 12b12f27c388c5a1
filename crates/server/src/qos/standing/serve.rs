//! Records standing guarantees, and grants again what the previous server has recorded.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use portolan_control::Timer;
use portolan_control::qos::transmit::ClassId;
use portolan_proto::qos::{GroupAction, Kind, QosRequest, Refusal, Scope};
use portolan_sys::clock;
use portolan_types::{ChannelId, FlowKey};
use tracing::{debug, info, warn};

use super::{Granted, State, Subject, subject};
use crate::qos::request::{Basis, Requester};
use crate::qos::serve::takes_traffic;
use crate::server::Server;

/// So many are recorded in the turn in which one is granted: it takes a fraction of a millisecond. With more, of many users,
/// a record comes after a rest for each entry, twenty times what an entry takes.
const FEW: usize = 256;
const REST: Duration = Duration::from_micros(40);

/// Until what could not be granted yet is tried again.
const BETWEEN_TRIES: Duration = Duration::from_millis(200);

/// Time for what was granted before: until the server is ready, and in each turn. A rate takes the kernel a millisecond.
const AT_START: Duration = Duration::from_millis(100);
const PER_TURN: Duration = Duration::from_millis(5);

impl Server {
    /// Notes a request that was granted.
    pub(in crate::qos) fn note_granted(&mut self, requester: Requester, mut request: QosRequest) {
        self.qos.transmit.fix_rate(&mut request);
        let standing = &mut self.qos.standing;
        match &request {
            QosRequest::Group { key, action } => match *action {
                GroupAction::SetOptions(wanted) => standing.change_group(*key, |made| {
                    if let GroupAction::Create { options, .. } = made {
                        *options = wanted;
                    }
                }),
                GroupAction::SetRate { bits: wanted } => standing.change_group(*key, |made| {
                    if let GroupAction::Create { bits, .. } = made {
                        *bits = wanted;
                    }
                }),
                _ => {}
            },
            QosRequest::Show => return,
            _ => {}
        }
        let class = self.class_of_request(&request);
        if let Some(granted) = Granted::new(requester.credentials, request, class) {
            self.qos.standing.note(granted, State::InForce);
        }
        let at = self.qos.standing.next_record.max(self.now);
        self.control.timers.arm_once(Timer::Guarantees, at);
    }

    fn class_of_request(&self, request: &QosRequest) -> Option<ClassId> {
        match subject(request)? {
            Subject::Guarantee(Kind::Transmit, scope) => self.qos.transmit.class_of_scope(scope),
            Subject::Group(key) => self.qos.groups.class_of_key(key),
            Subject::Guarantee(..) | Subject::Link(_) => None,
        }
    }

    /// Goes on with what is late, and records what stands.
    pub(crate) fn on_guarantees_due(&mut self) {
        self.grant_late(PER_TURN);
        let next_record = self.qos.standing.next_record;
        if self.now >= next_record {
            self.record_guarantees();
        } else {
            self.control.timers.arm_once(Timer::Guarantees, next_record);
        }
    }

    /// What is refused for the moment arms the timer itself.
    fn grant_late(&mut self, time: Duration) {
        if self.qos.standing.late.is_empty() {
            return;
        }
        let end = clock::now() + time;
        for _ in 0..self.qos.standing.late.len() {
            if clock::now() >= end {
                return self.control.timers.defer(Timer::Guarantees);
            }
            if let Some(granted) = self.qos.standing.late.pop_front() {
                self.grant_recorded(granted);
            }
        }
        self.end_unused_groups();
    }

    /// Ends groups that nobody has made or joined, when all have come that could join one again.
    fn end_unused_groups(&mut self) {
        if self.inheritance.is_open() || !self.qos.standing.late.is_empty() {
            return;
        }
        for key in self.qos.groups.keys() {
            self.look_at_group(key);
        }
    }

    /// Writes what stands for the next server.
    pub(crate) fn record_guarantees(&mut self) {
        let qos = &mut self.qos;
        let budgets: HashSet<&Scope> = qos.receive.scopes().collect();
        let (transmit, groups, cpu) = (&qos.transmit, &qos.groups, &qos.cpu);
        qos.standing.prune(|subject| match subject {
            Subject::Link(_) => true,
            Subject::Group(key) => groups.class_of_key(key).is_some(),
            Subject::Guarantee(Kind::Transmit, scope) => transmit.has(scope),
            Subject::Guarantee(Kind::Receive, scope) => budgets.contains(scope),
            Subject::Guarantee(Kind::Cpu, scope) => cpu.has(scope),
        });
        qos.standing.record();
        let many = qos.standing.len().saturating_sub(FEW);
        qos.standing.next_record = self.now + REST * u32::try_from(many).unwrap_or(u32::MAX);
    }

    /// The next server is to grant nothing again.
    pub(crate) fn forget_guarantees(&mut self) {
        self.qos.standing.forget();
    }

    pub(crate) fn load_guarantees(&mut self, socket: &Path) {
        self.qos.standing.load(socket);
    }

    /// Grants again what the previous server has granted, except what is for connections and processes that have yet to
    /// come back: they get theirs when they do.
    pub(crate) fn grant_again(&mut self) {
        let recorded = self.qos.standing.take(|_| true);
        if recorded.is_empty() {
            return;
        }
        let takes_traffic = |granted: &Granted| takes_traffic(&granted.request);
        if recorded.iter().any(takes_traffic)
            && let Some(question) = self.qos.transmit.question(false)
        {
            let rates = question.ask().rates;
            self.qos.transmit.note_rates(&rates);
        }
        let sessions = self.control.registry.sessions();
        let flows = sessions.filter_map(|session| Some(session.flow()?.canonical()));
        let flows: HashSet<FlowKey> = flows.collect();
        for granted in recorded {
            if self.has_come(&granted, &flows) {
                self.qos.standing.late.push_back(granted);
            } else {
                self.qos.standing.note(granted, State::Awaited);
            }
        }
        self.grant_late(AT_START);
        info!(
            granted = self.control.counters.guarantees_renewed,
            awaited = self.qos.standing.awaited.len(),
            late = self.qos.standing.late.len(),
            "guarantees of the previous server"
        );
        if !self.inheritance.is_open() {
            self.forget_awaited_guarantees();
        }
        self.control.timers.arm_once(Timer::Guarantees, self.now);
    }

    /// A connection or process of before is there again.
    pub(crate) fn grant_awaited(&mut self, scope: &Scope) {
        for granted in self.qos.standing.take_awaited(scope) {
            self.grant_recorded(granted);
        }
    }

    /// As [`Server::grant_awaited`], for a process that has registered.
    pub(crate) fn grant_awaited_by(&mut self, channel: ChannelId) {
        if let Some(process) = self.control.registry.process(channel) {
            let scope = Scope::Process { pid: process.pid };
            self.grant_awaited(&scope);
        }
    }

    /// Who has not come will not: neither what is for them stands, nor groups without a member.
    pub(crate) fn forget_awaited_guarantees(&mut self) {
        let standing = &mut self.qos.standing;
        standing.awaited.clear();
        for granted in standing.take(|entry| entry.state == State::Awaited) {
            debug!(?granted, "nobody has come for a guarantee");
        }
        self.end_unused_groups();
        self.control.timers.arm_once(Timer::Guarantees, self.now);
    }

    fn grant_recorded(&mut self, granted: Granted) {
        if granted.has_ended() {
            return;
        }
        let requester = Requester {
            credentials: granted.sender(),
            basis: Basis::Record {
                class: granted.class.map(ClassId),
            },
        };
        match self.decide(requester, granted.request.clone()) {
            Ok(_) => {
                self.control.counters.guarantees_renewed += 1;
                self.qos.standing.note(granted, State::InForce);
            }
            Err(Refusal { errno, .. }) if errno == libc::EAGAIN => {
                self.qos.standing.late.push_back(granted);
                self.control
                    .timers
                    .arm_once(Timer::Guarantees, self.now + BETWEEN_TRIES);
            }
            Err(Refusal { reason, .. }) => {
                self.control.counters.guarantees_lost += 1;
                warn!(reason, request = ?granted.request, "a guarantee of the previous server is lost");
            }
        }
    }

    /// Is what the guarantee is for known to this server, which has these connections?
    fn has_come(&self, granted: &Granted, flows: &HashSet<FlowKey>) -> bool {
        match subject(&granted.request) {
            Some(Subject::Guarantee(_, Scope::Flow(flow))) => flows.contains(flow),
            // Only processes with a channel have budgets.
            Some(Subject::Guarantee(Kind::Receive, Scope::Process { .. })) => false,
            _ => true,
        }
    }
}
