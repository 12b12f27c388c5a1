//! Policies of the configuration: guarantees given without a request. Those of users, cgroups and ports are made at
//! the start; if one cannot be kept, the server does not start. Those of programs are made for each process when it
//! registers; refusals are logged and counted, and the process continues without.

mod serve;

use portolan_proto::qos::Scope;
use portolan_sys::unix::Credentials;

use crate::qos::request::{Basis, Requester};

/// A policy that cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("`qos.policy`: {kind} of {scope} is refused: {reason}")]
pub(crate) struct PolicyError {
    scope: Scope,
    kind: &'static str,
    reason: String,
}

impl Requester {
    /// The administrator, through the configuration.
    fn root() -> Requester {
        Requester {
            credentials: Credentials {
                pid: std::process::id(),
                uid: 0,
                gid: 0,
            },
            basis: Basis::Policy,
        }
    }
}
