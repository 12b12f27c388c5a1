//! Requests for guarantees: who may send them, and which part answers.

use std::thread;
use std::time::Duration;

use portolan_control::{ClientId, Errno};
use portolan_proto::control::ReplyBody;
use portolan_proto::encode;
use portolan_proto::qos::{GroupAction, Kind, QosReply, QosReport, QosRequest, Scope};
use portolan_types::FlowKey;

use crate::calls::{Call, Sequel};
use crate::control_socket::client::Client;
use crate::qos::request::{Basis, Outcome, Requester, refuse};
use crate::qos::transmit::{LinkAnswer, LinkCounts};
use crate::requests::Answer;
use crate::server::Server;
use crate::user_threads::WaitsFor;

/// Maximum length of the name of a device or service class; refusals repeat it.
const NAME_MAX: usize = 64;

/// Each try makes the main thread wait for a moment.
const BETWEEN_TRIES: Duration = Duration::from_millis(200);

/// Returns the device or class that the request names.
fn name_in(request: &QosRequest) -> Option<&str> {
    match request {
        QosRequest::Transmit { spec, .. } => spec.device.as_deref(),
        QosRequest::Cpu { spec, .. } => spec.class.as_deref(),
        QosRequest::Link { device, .. } => Some(device),
        QosRequest::Group {
            action: GroupAction::Create { device, .. },
            ..
        } => device.as_deref(),
        _ => None,
    }
}

fn is_short(name: Option<&str>) -> Outcome {
    match name {
        Some(name) if name.len() > NAME_MAX => refuse(
            libc::ENAMETOOLONG,
            format!("no name is longer than {NAME_MAX} bytes"),
        ),
        _ => Ok(()),
    }
}

/// Whether the request changes the traffic control of a link.
pub(super) fn takes_traffic(request: &QosRequest) -> bool {
    match request {
        QosRequest::Transmit { .. } | QosRequest::Link { .. } | QosRequest::Group { .. } => true,
        QosRequest::Delete { kind, .. } => *kind == Kind::Transmit,
        QosRequest::Show | QosRequest::Receive { .. } | QosRequest::Cpu { .. } => false,
    }
}

impl Server {
    /// Answers a request when all is known of the links that it takes.
    pub(crate) fn qos_when_asked(
        &mut self,
        client: ClientId,
        request: QosRequest,
    ) -> Result<Answer, Errno> {
        if takes_traffic(&request) && self.qos.transmit.traffic.is_late() {
            return self.qos_when_free(client, request, Duration::ZERO);
        }
        let is_report = request == QosRequest::Show;
        let Some(question) = self.qos.transmit.question(is_report) else {
            return Ok(self.qos(client, request, &LinkCounts::default()));
        };
        let uid = self
            .clients
            .get(&client)
            .ok_or(Errno::BADF)?
            .credentials
            .uid;
        self.calls.check(uid, WaitsFor::Network)?;
        let make = move || {
            let LinkAnswer { rates, counts } = question.ask();
            let sequel = move |server: &mut Server| {
                server.qos.transmit.note_rates(&rates);
                Ok(server.qos(client, request, &counts))
            };
            Box::new(sequel) as Sequel
        };
        Ok(Answer::Call(Call {
            uid,
            waits_for: WaitsFor::Network,
            make: Box::new(make),
        }))
    }

    /// Answers a request about transmit rates when the thread that asks the kernel can take it.
    fn qos_when_free(
        &mut self,
        client: ClientId,
        request: QosRequest,
        not_before: Duration,
    ) -> Result<Answer, Errno> {
        let client_uid = |client: &Client| client.credentials.uid;
        let uid = self.clients.get(&client).map(client_uid);
        let uid = uid.ok_or(Errno::BADF)?;
        self.calls.check(uid, WaitsFor::Network)?;
        let done = self.qos.transmit.traffic.when_done();
        let make = move || {
            // It says so, or the server ends.
            let _ = done.recv();
            thread::sleep(not_before);
            let sequel = move |server: &mut Server| server.qos_when_asked(client, request);
            Box::new(sequel) as Sequel
        };
        Ok(Answer::Call(Call {
            uid,
            waits_for: WaitsFor::Network,
            make: Box::new(make),
        }))
    }

    /// Replies when the kernel has all that was decided.
    fn qos_when_settled(
        &mut self,
        client: ClientId,
        reply: QosReply,
        not_before: Duration,
    ) -> Answer {
        let is_settled = !self.qos.transmit.traffic.is_behind();
        let uid = self.clients.get(&client).map(|it| it.credentials.uid);
        let waiting = uid.filter(|uid| self.calls.check(*uid, WaitsFor::Network).is_ok());
        let Some(uid) = waiting.filter(|_| !is_settled) else {
            return ReplyBody::Qos(reply).into();
        };
        let done = self.qos.transmit.traffic.when_done();
        let make = move || {
            // It says so, or the server ends.
            let _ = done.recv();
            thread::sleep(not_before);
            let sequel = move |server: &mut Server| {
                server.look_at_leaving_classes();
                Ok(server.qos_when_settled(client, reply, BETWEEN_TRIES))
            };
            Box::new(sequel) as Sequel
        };
        Answer::Call(Call {
            uid,
            waits_for: WaitsFor::Network,
            make: Box::new(make),
        })
    }

    fn qos(&mut self, id: ClientId, request: QosRequest, counts: &LinkCounts) -> Answer {
        let Some(client) = self.clients.get(&id) else {
            return Answer::Silence;
        };
        let requester = Requester {
            credentials: client.credentials,
            basis: Basis::Request,
        };
        if request == QosRequest::Show {
            return self.show_qos(requester, counts);
        }
        let decided = self.decide(requester, request.clone());
        self.look_at_leaving_classes_soon();
        let is_held = matches!(&decided, Err(refusal) if refusal.errno == libc::EAGAIN);
        if is_held && takes_traffic(&request) {
            let later = self.qos_when_free(id, request, BETWEEN_TRIES);
            return later.unwrap_or_else(|Errno(errno)| ReplyBody::Error { errno }.into());
        }
        match decided {
            Ok(reply) if takes_traffic(&request) => {
                self.qos_when_settled(id, reply, Duration::ZERO)
            }
            Ok(reply) => ReplyBody::Qos(reply).into(),
            Err(refusal) => {
                self.control.counters.guarantees_refused += 1;
                ReplyBody::Qos(QosReply::Refused(refusal)).into()
            }
        }
    }

    pub(crate) fn decide(
        &mut self,
        requester: Requester,
        request: QosRequest,
    ) -> Outcome<QosReply> {
        is_short(name_in(&request))?;
        let request = requester.canonical(request)?;
        let reply = self.grant(requester, request.clone())?;
        if requester.basis == Basis::Request {
            self.note_granted(requester, request);
        }
        Ok(reply)
    }

    fn grant(&mut self, requester: Requester, request: QosRequest) -> Outcome<QosReply> {
        match request {
            QosRequest::Show => return Ok(QosReply::Done),
            QosRequest::Transmit { scope, spec } => self.reserve_transmit(requester, scope, spec),
            QosRequest::Receive { scope, spec } => self.set_budget(requester, scope, spec),
            QosRequest::Cpu { scope, spec } => self.reserve_cpu(requester, scope, spec),
            QosRequest::Delete { scope, kind } => match kind {
                Kind::Transmit => self.end_transmit(requester, &scope),
                Kind::Receive => self.end_budget(requester, &scope),
                Kind::Cpu => self.end_cpu(requester, &scope),
            },
            QosRequest::Link { device, bits } => self.set_link_rate(requester, &device, bits),
            QosRequest::Group { key, action } => {
                return self.change_multiplex_group(requester, key, action);
            }
        }
        .map(|()| QosReply::Done)
    }

    /// Ends the guarantees of a flow, when its session ends or leaves its peer.
    pub(crate) fn end_guarantees_of_flow(&mut self, flow: &FlowKey) {
        let flow = Scope::Flow(flow.canonical());
        self.end_transmit_of(&flow);
        self.end_budget_of(&flow);
    }

    fn show_qos(&mut self, requester: Requester, counts: &LinkCounts) -> Answer {
        let mut report = QosReport {
            links: self.qos.transmit.report_links(counts),
            ..QosReport::default()
        };
        self.report_transmit(counts, &mut report);
        self.report_groups(counts, &mut report);
        self.report_budgets(&mut report);
        self.report_cpu(&mut report);
        self.redact(&mut report, requester);
        let state = |part| ReplyBody::Qos(QosReply::State(part));
        Answer::List(encode(&report), state)
    }

    /// Reduces a report to what the user may see: its own requests, promises to it by name, and sums of the rest. To
    /// find the owner of each port or flow would take a walk through all sessions.
    fn redact(&self, report: &mut QosReport, requester: Requester) {
        let uid = requester.credentials.uid;
        if uid == 0 {
            return;
        }
        let shows = |owner, scope: &_| owner == uid || *scope == Scope::User { uid };
        report
            .transmit
            .retain(|entry| shows(entry.uid, &entry.scope));
        report
            .receive
            .retain(|entry| shows(entry.uid, &entry.scope));
        report.cpu.retain(|entry| shows(entry.uid, &entry.scope));
        let looks = |key| self.may_look_at_group(requester.credentials, key);
        report.groups.retain(|group| looks(group.key));
    }
}
