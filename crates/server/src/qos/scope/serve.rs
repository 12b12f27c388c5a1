//! Owners of the scopes in requests.

use std::fs;

use portolan_proto::qos::Scope;

use super::{cgroup, covers, is_leader};
use crate::qos::request::{Basis, Outcome, Requester, refuse};
use crate::server::Server;

impl Server {
    /// Checks that the requester may decide on the scope: root on everything, others on what is their own.
    pub(crate) fn may_decide(&self, requester: Requester, scope: &Scope) -> Outcome {
        if let Basis::Record { .. } = requester.basis {
            return Ok(());
        }
        let uid = requester.credentials.uid;
        let owner = match scope {
            Scope::Process { pid } => owner_of_task(*pid).filter(|_| is_leader(*pid)),
            Scope::Thread { tid } => owner_of_task(*tid),
            Scope::User { uid } => Some(*uid),
            // A user who may move processes into it could decide on them.
            Scope::Cgroup(path) => cgroup::exists(path).then_some(0),
            Scope::Flow(_) => self.owner_of_sessions(scope),
            // Not owned by anyone yet: a rule for future sessions.
            Scope::Port { .. } => self.owner_of_sessions(scope).or(Some(0)),
        };
        match owner {
            None => refuse(libc::ESRCH, format!("there is no {scope}")),
            Some(owner) if uid == 0 || uid == owner => Ok(()),
            Some(_) => refuse(libc::EPERM, format!("{scope} is not yours")),
        }
    }

    /// Returns the user that owns all sessions of the scope; root if there are several.
    fn owner_of_sessions(&self, scope: &Scope) -> Option<u32> {
        let mut covered = self
            .control
            .registry
            .sessions()
            .filter(|s| covers(scope, s));
        let first = covered.next()?.uid;
        Some(if covered.all(|other| other.uid == first) {
            first
        } else {
            0
        })
    }
}

/// Returns the user of a process or thread; root if it has, or may regain, the rights of another.
pub(super) fn owner_of_task(number: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{number}/status")).ok()?;
    owner_in(&status)
}

/// Returns the user if real, effective, saved and file system user are equal.
pub(super) fn owner_in(status: &str) -> Option<u32> {
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let mut users = users.split_ascii_whitespace();
    let first = users.next()?;
    if users.all(|user| user == first) {
        first.parse().ok()
    } else {
        Some(0)
    }
}
