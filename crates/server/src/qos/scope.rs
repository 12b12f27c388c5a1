//! Scopes: the meaning of each, who may decide on it, and what it covers.

mod cgroup;
mod serve;

use std::fs;
use std::path::{Path, PathBuf};

use portolan_control::{Process, SessionEntry};
use portolan_proto::qos::{GroupAction, QosRequest, Scope};
use portolan_sys::sched;

use crate::instance::LifeRecord;
use crate::qos::request::{Basis, Outcome, Requester, refuse};

/// Maximum length of a cgroup's path.
const PATH_MAX: usize = 4096;

impl Requester {
    /// Returns the request with its scope in canonical form, as it was when it was recorded.
    pub(super) fn canonical(&self, mut request: QosRequest) -> Outcome<QosRequest> {
        if let Basis::Record { .. } = self.basis {
            return Ok(request);
        }
        let scope = match &mut request {
            QosRequest::Transmit { scope, .. }
            | QosRequest::Receive { scope, .. }
            | QosRequest::Cpu { scope, .. }
            | QosRequest::Delete { scope, .. }
            | QosRequest::Group {
                action: GroupAction::Join { scope, .. },
                ..
            } => scope,
            QosRequest::Show | QosRequest::Link { .. } | QosRequest::Group { .. } => {
                return Ok(request);
            }
        };
        *scope = self.canonicalize(scope.clone())?;
        Ok(request)
    }

    /// Returns the scope in canonical form, for comparison: the number 0 becomes the requester's own, addresses are
    /// canonical.
    fn canonicalize(&self, scope: Scope) -> Outcome<Scope> {
        match scope {
            Scope::Process { pid: 0 } if self.credentials.pid == 0 => {
                refuse(libc::ESRCH, "your process has no number here")
            }
            Scope::Process { pid: 0 } => Ok(Scope::Process {
                pid: self.credentials.pid,
            }),
            Scope::Process { .. } if self.counts_apart() => refuse(
                libc::ESRCH,
                "your PID namespace is not the server's: only your own process can be meant",
            ),
            Scope::Thread { tid } if self.counts_apart() => {
                match thread_called(tid, self.credentials.pid) {
                    Some(tid) => Ok(Scope::Thread { tid }),
                    None => refuse(
                        libc::ESRCH,
                        "your PID namespace is not the server's: only your own threads can be meant",
                    ),
                }
            }
            Scope::User { uid: u32::MAX } => refuse(libc::EINVAL, "no user has this number"),
            Scope::Flow(flow) => Ok(Scope::Flow(flow.canonical())),
            Scope::Port { port: 0, .. } => refuse(libc::EINVAL, "port 0 is nobody's"),
            Scope::Cgroup(path) if !is_plain(&path) => refuse(
                libc::EINVAL,
                "a cgroup is a path below /sys/fs/cgroup that begins with a slash",
            ),
            Scope::Cgroup(path) if path.len() > 1 => {
                Ok(Scope::Cgroup(path.trim_end_matches('/').to_owned()))
            }
            scope => Ok(scope),
        }
    }

    /// Returns whether it is in a PID namespace of its own, so that its numbers differ from the server's.
    fn counts_apart(&self) -> bool {
        numbers_of(format!("/proc/{}/status", self.credentials.pid)).len() > 1
    }
}

/// Returns whether the path leads nowhere else, and has no characters that a terminal would interpret.
fn is_plain(path: &str) -> bool {
    path.starts_with('/')
        && path.len() <= PATH_MAX
        && !path.split('/').any(|part| part == "..")
        && !path.chars().any(char::is_control)
}

/// Returns the directory of a process's control group of version 2, if that hierarchy is mounted.
pub(crate) fn cgroup_of(pid: u32) -> Option<PathBuf> {
    cgroup::folder_of(&memberships_of(pid)?)
}

/// Returns whether the number is a process's: `/proc` has an entry for every thread, although it lists processes only.
fn is_leader(number: u32) -> bool {
    leader_of(number) == Some(number)
}

/// Returns the process that a thread belongs to.
fn leader_of(tid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let leader = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    leader.trim().parse().ok()
}

/// Returns the thread of a process that has this number in the process's own PID namespace, if it is among the first.
fn thread_called(tid: u32, pid: u32) -> Option<u32> {
    /// Maximum number of files read for a request.
    const LOOKED_AT: usize = 256;
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.flatten().take(LOOKED_AT).find_map(|task| {
        let status = task.path().join("status");
        let is_meant = numbers_of(&status).last() == Some(&tid);
        is_meant.then(|| task.file_name().to_str()?.parse().ok())?
    })
}

/// Returns the numbers of a task, from this PID namespace to its own.
fn numbers_of(status: impl AsRef<Path>) -> Vec<u32> {
    let status = fs::read_to_string(status).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let numbers = numbers.unwrap_or_default().split_ascii_whitespace();
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// Identifies one run of a process or thread: its number may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    number: u32,
    /// Start time in clock ticks since boot.
    started: u64,
}

impl Life {
    /// Returns the process or thread that has the number now.
    pub(super) fn of(number: u32) -> Option<Life> {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let started = started(&stat)?;
        Some(Life { number, started })
    }

    /// Returns all threads of a process; a thread alone.
    pub(super) fn threads(self) -> Vec<u32> {
        if is_leader(self.number) {
            sched::threads_of(self.number, usize::MAX)
        } else {
            vec![self.number]
        }
    }

    pub(super) fn record(self) -> LifeRecord {
        (self.number, self.started)
    }

    pub(super) fn recorded((number, started): LifeRecord) -> Life {
        Life { number, started }
    }

    pub(super) fn lasts(self) -> bool {
        Life::of(self.number) == Some(self)
    }
}

/// Returns the 22nd field of proc_pid_stat(5); the second, in brackets, may contain spaces and brackets. Returns none
/// for a zombie.
fn started(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

/// Returns whether the scope covers the session by its endpoints.
pub(super) fn covers(scope: &Scope, session: &SessionEntry) -> bool {
    scope.has_session(session.protocol, session.local, session.remote)
}

/// Returns whether the scope covers everything that the process has.
pub(super) fn covers_process(scope: &Scope, process: &Process) -> bool {
    match scope {
        Scope::Process { pid } => process.pid == *pid,
        Scope::User { uid } => process.uid == *uid,
        Scope::Cgroup(path) => cgroup::has(path, process.pid),
        Scope::Flow(_) | Scope::Port { .. } | Scope::Thread { .. } => false,
    }
}

/// Returns the cgroups of a process as the kernel reports them, without the server's own changes; none if it has ended.
pub(super) fn memberships_of(pid: u32) -> Option<String> {
    let told = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    Some(sched::memberships(pid, &told))
}

/// Sort key of scopes: narrower ones take precedence.
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

#[cfg(test)]
mod tests;
