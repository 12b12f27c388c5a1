//! What the server says of guarantees, as JSON.

use portolan_proto::qos::{QosReport, Scope};
use serde_json::Value;

use crate::exit::Failure;

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
