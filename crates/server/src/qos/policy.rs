//! Policies of the configuration: guarantees that somebody has without asking. Those of users, cgroups and ports are
//! made at the start, and one that cannot be kept keeps the server from starting. Those of programs are made for each
//! process as it comes; what is refused then is logged and counted, and the process goes on without.

mod serve;

use portolan_proto::qos::Scope;
use portolan_sys::unix::Credentials;

use crate::qos::request::Requester;

/// A policy that cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("`qos.policy`: {kind} of {scope} is refused: {reason}")]
pub struct PolicyError {
    scope: Scope,
    kind: &'static str,
    reason: String,
}

impl Requester {
    /// The administrator, by the configuration.
    fn root() -> Requester {
        Requester {
            credentials: Credentials {
                pid: std::process::id(),
                uid: 0,
                gid: 0,
            },
        }
    }
}
