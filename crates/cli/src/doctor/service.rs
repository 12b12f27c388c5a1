//! Checks whether a server runs, and whether programs can reach it.

use std::fs;

use portolan_proto::Speaks;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::report::StatusReport;
use portolan_sys::unix::ConnectError;
use rustix::io::Errno;

use super::Check;
use crate::ServerAddress;
use crate::exit::Failure;
use crate::run::find_preload;

/// Descriptors that a server with many sessions needs.
const WANTED_FILES: u64 = 65_536;

/// Returns the server's status, or the reason why there is none.
pub(super) fn status(server: &ServerAddress) -> Result<StatusReport, Silence> {
    match server.ask(RequestBody::ReadStatus) {
        Ok(ReplyBody::Status(status)) => Ok(status),
        Ok(_) => Err(Silence::OfAnotherVersion("an unexpected answer".to_owned())),
        Err(Failure::NoServer(error)) => Err(Silence::of(&error)),
        Err(_) => Err(Silence::OfAnotherVersion("no answer".to_owned())),
    }
}

/// Why no server answered.
#[derive(Debug, PartialEq)]
pub(super) enum Silence {
    /// There is no socket, or no process listens on it.
    None,
    /// A server may run, but this user may not connect to it.
    NotPermitted,
    /// This process has reached its limit of descriptors.
    NoDescriptor,
    OfAnotherVersion(String),
}

impl Silence {
    fn of(error: &anyhow::Error) -> Silence {
        let failed = error.chain().find_map(|cause| {
            let connect = cause
                .downcast_ref::<ConnectError>()
                .map(|error| match error {
                    ConnectError::NoServer => Errno::CONNREFUSED,
                    ConnectError::Failed(errno) => *errno,
                });
            connect.or_else(|| cause.downcast_ref::<Errno>().copied())
        });
        match failed {
            Some(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR) => Silence::None,
            Some(Errno::ACCESS | Errno::PERM) => Silence::NotPermitted,
            Some(Errno::MFILE | Errno::NFILE) => Silence::NoDescriptor,
            _ => Silence::OfAnotherVersion(format!("{error:#}")),
        }
    }

    fn check(&self, path: &str) -> Check {
        match self {
            Silence::None => Check::warn(
                NAME,
                format!("none at {path}"),
                "programs use the kernel's stack until `portoland --interface IFACE` runs",
            ),
            Silence::NotPermitted => Check::fail(
                NAME,
                format!("this user may not connect to {path}"),
                "join the group of socket_group in its configuration, or ask as root",
            ),
            Silence::NoDescriptor => Check::fail(
                NAME,
                "this process has no descriptor left to ask it",
                "raise the limit of open files: ulimit -n 4096",
            ),
            Silence::OfAnotherVersion(what) => Check::fail(
                NAME,
                format!("{what} at {path}"),
                format!(
                    "this is {}: is the server of another version, or stuck?",
                    own_version()
                ),
            ),
        }
    }
}

const NAME: &str = "server";

fn own_version() -> String {
    portolan_manual::version(portolan_proto::PROTOCOL)
}

pub(super) fn checks(server: &ServerAddress, status: &Result<StatusReport, Silence>) -> Vec<Check> {
    let mut checks = vec![running(server, status)];
    checks.extend(
        status
            .as_ref()
            .ok()
            .and_then(|status| open_files(status.pid)),
    );
    let faults = status.iter().flat_map(|status| &status.faults);
    checks.extend(faults.map(|fault| {
        let (what, advice) = fault.split_once(": ").unwrap_or((fault, ""));
        Check::fail("server's work", what, advice)
    }));
    checks.extend(status.as_ref().ok().and_then(host_policy));
    checks.push(preload());
    checks
}

fn running(server: &ServerAddress, status: &Result<StatusReport, Silence>) -> Check {
    let path = server
        .path()
        .map_or_else(|error| error.to_string(), |path| path.display().to_string());
    match status {
        Ok(status) if Speaks::OWN.fits(Speaks::only(status.protocol)) => Check::ok(
            NAME,
            format!(
                "{}, pid {}, {} sessions, {path}",
                status.version, status.pid, status.sessions
            ),
        ),
        Ok(status) => Check::fail(
            NAME,
            format!(
                "version {}, protocol {:08x} at {path}",
                status.version, status.protocol
            ),
            format!("this is {}: restart portoland", own_version()),
        ),
        Err(silence) => silence.check(&path),
    }
}

fn host_policy(status: &StatusReport) -> Option<Check> {
    let check = || {
        Check::warn(
            "host's policy",
            "netfilter or policy rules: new sockets are the kernel's",
            "remove them (nft list ruleset, ip rule), or set host_policy = \"ignore\"",
        )
    };
    status.obeys_policy.then(check)
}

/// Each session takes one or two descriptors; the server raises its limit at its start, if it may.
fn open_files(pid: u32) -> Option<Check> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let limit = soft_limit_of_files(&limits)?;
    // Readable by the server's user and by root only.
    let open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    Some(check_open_files(open, limit))
}

fn check_open_files(open: u64, limit: u64) -> Check {
    const NAME: &str = "server's open files";
    let told = format!("{open} of {limit}");
    match limit {
        _ if open + limit / 10 > limit => Check::warn(
            NAME,
            told,
            "new sessions are refused when none is left: raise its limit (LimitNOFILE=)",
        ),
        0..WANTED_FILES => Check::warn(
            NAME,
            told,
            "give it CAP_SYS_RESOURCE, or a higher limit (LimitNOFILE=, ulimit -Hn)",
        ),
        _ => Check::ok(NAME, told),
    }
}

/// Parses the soft limit of open files from `/proc/PID/limits`.
fn soft_limit_of_files(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn preload() -> Check {
    const NAME: &str = "socket proxy";
    match find_preload() {
        Ok(path) => Check::ok(NAME, path.display().to_string()),
        Err(error) => Check::fail(NAME, error.to_string(), "make build, or make install"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn silence_has_its_reason() {
        let of = |errno: Errno| Silence::of(&anyhow::Error::from(errno).context("/run/x"));
        assert_eq!(of(Errno::NOENT), Silence::None);
        assert_eq!(of(Errno::CONNREFUSED), Silence::None);
        assert_eq!(of(Errno::ACCESS), Silence::NotPermitted);
        let connect = |error: ConnectError| Silence::of(&anyhow::Error::from(error));
        assert_eq!(connect(ConnectError::NoServer), Silence::None);
        let refused = connect(ConnectError::Failed(Errno::ACCESS));
        assert_eq!(refused, Silence::NotPermitted);
        assert_eq!(of(Errno::MFILE), Silence::NoDescriptor);
        assert!(matches!(of(Errno::PROTO), Silence::OfAnotherVersion(_)));
        let told = Silence::NotPermitted.check("/run/x").to_string();
        assert!(told.contains("may not connect to /run/x"), "{told}");
    }

    #[test]
    fn few_open_files_are_warned_of() {
        let verdict = |open, limit| check_open_files(open, limit).verdict;
        assert_eq!(verdict(100, WANTED_FILES), Verdict::Ok);
        assert_eq!(verdict(100, WANTED_FILES - 1), Verdict::Warn);
        assert_eq!(verdict(WANTED_FILES - 1, WANTED_FILES), Verdict::Warn);
    }

    #[test]
    fn the_limit_of_open_files_is_found_among_others() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             63432                63432                processes \n\
                      Max open files            1024                 524288               files     \n";
        assert_eq!(soft_limit_of_files(limits), Some(1024));
        assert_eq!(soft_limit_of_files(""), None);
    }
}
