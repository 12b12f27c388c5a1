//! Scopes: who may decide over one, and whom it covers.

use std::fs;
use std::os::unix::fs::MetadataExt;

use portolan_control::{Process, Session};
use portolan_proto::qos::Scope;

use super::{Asker, Outcome, refuse};
use crate::server::Server;

impl Server {
    /// Root decides over everything, others over what is their own.
    pub(super) fn may_decide(&self, asker: Asker, scope: &Scope) -> Outcome {
        let uid = asker.credentials.uid;
        let owner = match scope {
            Scope::Process { pid } => owner_of(&format!("/proc/{pid}")),
            Scope::Thread { tid } => owner_of(&format!("/proc/{tid}")),
            Scope::User { uid } => Some(*uid),
            Scope::Cgroup(path) => fs::metadata(cgroup_folder(path)).ok().map(|_| 0),
            Scope::Flow(_) | Scope::Port { .. } => {
                let mut covered = self.registry.sessions().filter(|s| covers(scope, s));
                match covered.next() {
                    Some(first) => Some(match covered.all(|other| other.uid == first.uid) {
                        true => first.uid,
                        false => 0,
                    }),
                    // A policy for what may come.
                    None if matches!(scope, Scope::Port { .. }) => Some(0),
                    None => None,
                }
            }
        };
        match owner {
            None => refuse(libc::ESRCH, format!("{} does not exist", name(scope))),
            Some(owner) if uid == 0 || uid == owner => Ok(()),
            Some(_) => refuse(libc::EPERM, format!("{} is not yours", name(scope))),
        }
    }
}

fn owner_of(path: &str) -> Option<u32> {
    fs::metadata(path).ok().map(|metadata| metadata.uid())
}

fn cgroup_folder(path: &str) -> String {
    format!("/sys/fs/cgroup{path}")
}

/// As commands take and show it.
pub(super) fn name(scope: &Scope) -> String {
    match scope {
        Scope::Flow(flow) => format!("flow {}:{}-{}", flow.protocol, flow.local, flow.remote),
        Scope::Port { protocol, port } => format!("port {protocol}:{port}"),
        Scope::Process { pid } => format!("process {pid}"),
        Scope::Thread { tid } => format!("thread {tid}"),
        Scope::Cgroup(path) => format!("cgroup {path}"),
        Scope::User { uid } => format!("user {uid}"),
    }
}

/// Is the session one of the scope's by its own endpoints?
pub(super) fn covers(scope: &Scope, session: &Session) -> bool {
    match scope {
        Scope::Flow(flow) => session.flow().as_ref() == Some(flow),
        Scope::Port { protocol, port } => {
            session.protocol == *protocol && session.local.port() == *port
        }
        _ => false,
    }
}

/// Is all that the process has the scope's?
pub(super) fn covers_process(scope: &Scope, process: &Process) -> bool {
    match scope {
        Scope::Process { pid } => process.pid == *pid,
        Scope::User { uid } => process.uid == *uid,
        Scope::Cgroup(path) => cgroup_of(process.pid).is_some_and(|own| is_below(&own, path)),
        Scope::Flow(_) | Scope::Port { .. } | Scope::Thread { .. } => false,
    }
}

/// Narrower scopes go first.
pub(super) fn breadth(scope: &Scope) -> u8 {
    match scope {
        Scope::Flow(_) => 0,
        Scope::Port { .. } => 1,
        Scope::Thread { .. } => 2,
        Scope::Process { .. } => 3,
        Scope::Cgroup(_) => 4,
        Scope::User { .. } => 5,
    }
}

/// Path of a process's cgroup in the second version's hierarchy.
fn cgroup_of(pid: u32) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let line = groups.lines().find_map(|line| line.strip_prefix("0::"));
    line.map(str::to_owned)
}

fn is_below(path: &str, above: &str) -> bool {
    let above = above.trim_end_matches('/');
    path.strip_prefix(above)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_covers_those_below_it_and_none_beside_it() {
        assert!(is_below("/a/b", "/a"));
        assert!(is_below("/a", "/a"));
        assert!(is_below("/a", "/"));
        assert!(!is_below("/ab", "/a"));
        assert!(!is_below("/", "/a"));
    }
}
