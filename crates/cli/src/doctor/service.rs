//! Whether a server runs, and whether programs find their way to it.

use std::fs;

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::report::StatusReport;

use super::Check;
use crate::ServerAddress;
use crate::run::find_preload;

/// Descriptors that a server of many sessions wants.
const WANTED_FILES: u64 = 65_536;

pub(super) fn status(server: &ServerAddress) -> Option<StatusReport> {
    match server.ask(RequestBody::ReadStatus) {
        Ok(ReplyBody::Status(status)) => Some(status),
        _ => None,
    }
}

pub(super) fn checks(server: &ServerAddress, status: Option<&StatusReport>) -> Vec<Check> {
    let mut checks = vec![running(server, status)];
    checks.extend(status.and_then(|status| open_files(status.pid)));
    checks.push(preload());
    checks
}

fn running(server: &ServerAddress, status: Option<&StatusReport>) -> Check {
    const NAME: &str = "server";
    let path = server
        .path()
        .map_or_else(|error| error.to_string(), |path| path.display().to_string());
    match status {
        Some(status) if status.version == env!("CARGO_PKG_VERSION") => Check::ok(
            NAME,
            format!("pid {}, {} sessions, {path}", status.pid, status.sessions),
        ),
        Some(status) => Check::fail(
            NAME,
            format!("version {} at {path}", status.version),
            format!("this is {}: restart portoland", env!("CARGO_PKG_VERSION")),
        ),
        None => Check::warn(
            NAME,
            format!("none at {path}"),
            "programs use the kernel's stack until `portoland --interface IFACE` runs",
        ),
    }
}

/// Each session takes one or two; the server raises its limit when it starts, if it may.
fn open_files(pid: u32) -> Option<Check> {
    const NAME: &str = "server's open files";
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let limit = soft_limit_of_files(&limits)?;
    // Only its own user and root may look.
    let open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    let told = format!("{open} of {limit}");
    Some(match limit {
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
    })
}

/// Of `/proc/PID/limits`.
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

    #[test]
    fn the_limit_of_open_files_is_found_among_others() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             63432                63432                processes \n\
                      Max open files            1024                 524288               files     \n";
        assert_eq!(soft_limit_of_files(limits), Some(1024));
        assert_eq!(soft_limit_of_files(""), None);
    }
}
