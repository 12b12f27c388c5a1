//! Whom a scope of a request means.

use std::fs;

use portolan_proto::qos::Scope;

use super::{cgroup, covers, is_leader};
use crate::qos::request::{Outcome, Requester, refuse};
use crate::server::Server;

impl Server {
    /// Root decides over everything, others over what is their own.
    pub(crate) fn may_decide(&self, requester: Requester, scope: &Scope) -> Outcome {
        let uid = requester.credentials.uid;
        let owner = match scope {
            Scope::Process { pid } => owner_of_task(*pid).filter(|_| is_leader(*pid)),
            Scope::Thread { tid } => owner_of_task(*tid),
            Scope::User { uid } => Some(*uid),
            // Whoever may move processes into it would decide over them.
            Scope::Cgroup(path) => cgroup::exists(path).then_some(0),
            Scope::Flow(_) => self.owner_of_sessions(scope),
            // Nobody's yet: a rule for whoever comes.
            Scope::Port { .. } => self.owner_of_sessions(scope).or(Some(0)),
        };
        match owner {
            None => refuse(libc::ESRCH, format!("there is no {scope}")),
            Some(owner) if uid == 0 || uid == owner => Ok(()),
            Some(_) => refuse(libc::EPERM, format!("{scope} is not yours")),
        }
    }

    /// The user whose all the scope's sessions are; root if several have some.
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

/// The user of a process or thread; root of one that has, or may take up again, another's rights.
pub(super) fn owner_of_task(number: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{number}/status")).ok()?;
    owner_in(&status)
}

/// Real, effective, saved and file system's user are one.
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
