//! Guarantees: who may ask for what, and what each kind of them does with the wish.

#![expect(dead_code)]

mod cpu;
mod groups;
mod receive;
mod scope;
mod transmit;

use portolan_proto::control::ReplyBody;
use portolan_proto::encode;
use portolan_proto::qos::{Kind, QosReply, QosReport, QosRequest, Refusal};
use portolan_sys::unix::Credentials;
use portolan_types::ChannelId;

use crate::clients::{Answer, ClientId};
use crate::listen::pack;
use crate::server::Server;

/// All guarantees of this server.
#[derive(Debug, Default)]
pub struct Qos {
    transmit: transmit::Reservations,
    groups: groups::Groups,
    receive: receive::Budgets,
    cpu: cpu::Reservations,
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
struct Asker {
    credentials: Credentials,
    /// If it said `Hello`.
    channel: Option<ChannelId>,
}

/// What a wish leads to.
type Outcome<T = ()> = Result<T, Refusal>;

fn refuse<T>(errno: i32, reason: impl Into<String>) -> Outcome<T> {
    Err(Refusal {
        errno,
        reason: reason.into(),
    })
}

impl Server {
    pub fn qos(&mut self, client: ClientId, request: QosRequest) -> Answer {
        let Some(client) = self.clients.get(&client) else {
            return Answer::Silence;
        };
        let asker = Asker {
            credentials: client.credentials,
            channel: client.channel,
        };
        let done = |()| QosReply::Done;
        let outcome = match request {
            QosRequest::Show => return self.show_qos(),
            QosRequest::Transmit { scope, wish } => {
                self.reserve_transmit(asker, scope, wish).map(done)
            }
            QosRequest::Receive { scope, wish } => self.set_budget(asker, scope, wish).map(done),
            QosRequest::Cpu { scope, wish } => self.reserve_cpu(asker, scope, wish).map(done),
            QosRequest::Delete { scope, kind } => match kind {
                Kind::Transmit => self.end_transmit(asker, &scope),
                Kind::Receive => self.end_budget(asker, &scope),
                Kind::Cpu => self.end_cpu(asker, &scope),
            }
            .map(done),
            QosRequest::Group { key, action } => self.change_multiplex_group(asker, key, action),
        };
        let reply = outcome.unwrap_or_else(|refusal| {
            self.counters.refused += 1;
            QosReply::Refused(refusal)
        });
        ReplyBody::Qos(reply).into()
    }

    fn show_qos(&mut self) -> Answer {
        let mut report = QosReport::default();
        self.report_transmit(&mut report);
        self.report_groups(&mut report);
        self.report_budgets(&mut report);
        self.report_cpu(&mut report);
        match pack(encode(&report)) {
            Ok((blob, fd)) => {
                let body = ReplyBody::Qos(QosReply::State(blob));
                Answer::Reply(body, fd.into_iter().collect())
            }
            Err(errno) => ReplyBody::Error { errno: errno.0 }.into(),
        }
    }
}
