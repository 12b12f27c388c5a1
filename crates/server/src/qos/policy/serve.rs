//! Applies the policies of the configuration.

use std::os::fd::AsFd;

use portolan_proto::qos::{Kind, QosRequest, Refusal, Scope};
use portolan_types::ChannelId;
use rustix::fs::{Mode, OFlags, open};
use tracing::{info, warn};

use super::PolicyError;
use crate::config::{Policy, Whom};
use crate::qos::request::Requester;
use crate::server::Server;

impl Server {
    /// Makes the guarantees that do not depend on processes.
    pub(crate) fn apply_policies(&mut self) -> Result<(), PolicyError> {
        let policies = self.qos.policies.clone();
        policies.iter().try_for_each(|policy| match &policy.whom {
            Whom::Scope(scope) => self.apply(policy, scope),
            Whom::Program { .. } => Ok(()),
        })
    }

    /// Makes those of a process that has registered.
    pub(crate) fn apply_policies_to(&mut self, channel: ChannelId) {
        let Some(process) = self.control.registry.process(channel) else {
            return;
        };
        let (pid, uid) = (process.pid, process.uid);
        let policies = self.qos.policies.clone();
        let is_meant = |policy: &Policy| match &policy.whom {
            Whom::Scope(_) => false,
            Whom::Program { path, uid: whose } => {
                whose.is_none_or(|whose| whose == uid) && self.runs(channel, path)
            }
        };
        let due: Vec<Policy> = policies.into_iter().filter(is_meant).collect();
        let scope = Scope::Process { pid };
        for policy in due {
            if let Err(refused) = self.apply(&policy, &scope) {
                self.control.counters.guarantees_refused += 1;
                warn!(%refused, "a process goes without its guarantee");
            }
        }
    }

    /// Returns whether the process runs the file. The name that a program gives itself proves
    /// nothing; the file that it runs does.
    fn runs(&mut self, channel: ChannelId, path: &str) -> bool {
        let client = self.channels.get(&channel).map(|channel| channel.client);
        let client = client.and_then(|client| self.clients.get(&client));
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        match (client, open(path, flags, Mode::empty())) {
            (Some(client), Ok(file)) => {
                let tells = self.holder_count.as_mut();
                tells.is_some_and(|tells| tells.runs_file(client.as_fd(), file.as_fd()))
            }
            _ => false,
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

/// Returns the name in the configuration.
fn key(kind: Kind) -> &'static str {
    match kind {
        Kind::Transmit => "`transmit`",
        Kind::Receive => "`receive`",
        Kind::Cpu => "`cpu`",
    }
}
