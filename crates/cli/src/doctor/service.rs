//! Whether a server runs, and whether programs find their way to it.

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::report::StatusReport;

use super::Check;
use crate::ServerAddress;
use crate::run::find_preload;

pub(super) fn status(server: &ServerAddress) -> Option<StatusReport> {
    match server.ask(RequestBody::ReadStatus) {
        Ok(ReplyBody::Status(status)) => Some(status),
        _ => None,
    }
}

pub(super) fn checks(server: &ServerAddress, status: Option<&StatusReport>) -> Vec<Check> {
    vec![running(server, status), preload()]
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

fn preload() -> Check {
    const NAME: &str = "socket proxy";
    match find_preload() {
        Ok(path) => Check::ok(NAME, path.display().to_string()),
        Err(error) => Check::fail(NAME, error.to_string(), "make build, or make install"),
    }
}
