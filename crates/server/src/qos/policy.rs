//! Policies of the configuration: guarantees that somebody has without asking. Those of users, cgroups and ports are
//! made at the start, and one that cannot be kept keeps the server from starting. Those of programs are made for each
//! process as it comes; what is refused then is logged and counted, and the process goes on without.

use std::fs;
use std::os::unix::fs::MetadataExt;

use portolan_control::Process;
use portolan_proto::qos::{Kind, QosRequest, Refusal, Scope};
use portolan_sys::unix::Credentials;
use portolan_types::ChannelId;
use tracing::{info, warn};

use super::Requester;
use crate::config::{Policy, Whom};
use crate::server::Server;

/// A policy that cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("`qos.policy`: {kind} of {scope} is refused: {reason}")]
pub struct PolicyError {
    scope: Scope,
    kind: &'static str,
    reason: String,
}

impl Server {
    /// Makes the guarantees that need nobody's coming.
    pub fn apply_policies(&mut self) -> Result<(), PolicyError> {
        let policies = self.qos.policies.clone();
        policies.iter().try_for_each(|policy| match &policy.whom {
            Whom::Scope(scope) => self.apply(policy, scope),
            Whom::Program { .. } => Ok(()),
        })
    }

    /// Makes those of a process that has come.
    pub fn apply_policies_to(&mut self, channel: ChannelId) {
        let Some(process) = self.control.registry.process(channel) else {
            return;
        };
        let policies = self.qos.policies.iter();
        let due: Vec<Policy> = policies
            .filter(|policy| is_meant(process, &policy.whom))
            .cloned()
            .collect();
        let scope = Scope::Process { pid: process.pid };
        for policy in due {
            if let Err(refused) = self.apply(&policy, &scope) {
                self.control.counters.guarantees_refused += 1;
                warn!(%refused, "a process goes without its guarantee");
            }
        }
    }

    fn apply(&mut self, policy: &Policy, scope: &Scope) -> Result<(), PolicyError> {
        for (kind, spec) in specs(policy, scope) {
            self.decide(Requester::root(), spec)
                .map_err(|Refusal { reason, .. }| PolicyError {
                    scope: scope.clone(),
                    kind: key(kind),
                    reason,
                })?;
            info!(%scope, %kind, "guarantee given by policy");
        }
        Ok(())
    }
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

fn specs(policy: &Policy, scope: &Scope) -> impl Iterator<Item = (Kind, QosRequest)> {
    let scope = || scope.clone();
    let transmit = policy.transmit.clone().map(|spec| {
        let scope = scope();
        (Kind::Transmit, QosRequest::Transmit { scope, spec })
    });
    let receive = policy.receive.clone().map(|spec| {
        let scope = scope();
        (Kind::Receive, QosRequest::Receive { scope, spec })
    });
    let cpu = policy.cpu.clone().map(|spec| {
        let scope = scope();
        (Kind::Cpu, QosRequest::Cpu { scope, spec })
    });
    [transmit, receive, cpu].into_iter().flatten()
}

/// As the configuration calls it.
fn key(kind: Kind) -> &'static str {
    match kind {
        Kind::Transmit => "`transmit`",
        Kind::Receive => "`receive`",
        Kind::Cpu => "`cpu`",
    }
}

/// The name that a program gives itself proves nothing; the file that it runs does.
fn is_meant(process: &Process, whom: &Whom) -> bool {
    match whom {
        Whom::Scope(_) => false,
        Whom::Program { path, uid } => {
            uid.is_none_or(|uid| uid == process.uid) && runs(process.pid, path)
        }
    }
}

fn runs(pid: u32, path: &str) -> bool {
    let file = |path: &str| fs::metadata(path).map(|file| (file.dev(), file.ino()));
    match (file(&format!("/proc/{pid}/exe")), file(path)) {
        (Ok(running), Ok(named)) => running == named,
        (Err(error), Ok(_)) => {
            warn!(pid, %error, "cannot tell what a process runs");
            false
        }
        (_, Err(_)) => false,
    }
}
