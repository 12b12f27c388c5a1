//! What the server says of guarantees, read, and as JSON.

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::{QosReply, QosReport, QosRequest, Scope};
use serde_json::Value;

use super::Arguments;
use crate::exit::Failure;

impl Arguments {
    pub fn report(&self) -> Result<QosReport, Failure> {
        let request = RequestBody::Qos(QosRequest::Show);
        self.server.ask_for(request, |reply| match reply {
            ReplyBody::Qos(QosReply::State(blob)) => Some(blob),
            _ => None,
        })
    }
}

/// The report with scopes as commands take them.
pub fn json(report: &QosReport) -> Result<Value, Failure> {
    let mut value = serde_json::to_value(report)?;
    let scopes = |name: &str| -> Vec<&Scope> {
        match name {
            "transmit" => report.transmit.iter().map(|entry| &entry.scope).collect(),
            "receive" => report.receive.iter().map(|entry| &entry.scope).collect(),
            _ => report.cpu.iter().map(|entry| &entry.scope).collect(),
        }
    };
    for name in ["transmit", "receive", "cpu"] {
        for (index, scope) in scopes(name).into_iter().enumerate() {
            value[name][index]["scope"] = scope.to_string().into();
        }
    }
    Ok(value)
}
