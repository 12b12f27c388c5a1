//! Checks of this process's privileges and of the installed tools.

use portolan_sys::capability::Capability;
use portolan_sys::sysctl::read_value;
use rustix::process::{Resource, getrlimit};

use super::{Check, output};

/// Descriptors that a busy program and its server need.
const WANTED_FILES: u64 = 4096;

pub(super) fn checks() -> Vec<Check> {
    vec![
        capabilities(),
        memlock(),
        files(),
        reserved_ports(),
        iproute(),
    ]
}

fn capabilities() -> Check {
    const NAME: &str = "capabilities";
    let missing: Vec<_> = Capability::missing().map(Capability::name).collect();
    if missing.is_empty() {
        return Check::ok(NAME, "enough for portoland");
    }
    Check::warn(
        NAME,
        format!("this user lacks {}", missing.join(" ")),
        "start portoland as root; programs under `portolan run` need none",
    )
}

/// Not needed since Linux 5.11, which charges BPF memory to the control group.
fn memlock() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or("unlimited".to_owned(), |bytes| {
        format!("{} KiB", bytes >> 10)
    });
    Check::ok("locked memory", format!("{limit}; BPF maps do not count"))
}

fn files() -> Check {
    const NAME: &str = "open files";
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < WANTED_FILES => Check::warn(
            NAME,
            limit.to_string(),
            "each session is a descriptor here and one at the server: ulimit -n 65536",
        ),
        Some(limit) => Check::ok(NAME, limit.to_string()),
        None => Check::ok(NAME, "unlimited"),
    }
}

fn reserved_ports() -> Check {
    const NAME: &str = "reserved ports";
    match read_value("net/ipv4/ip_local_reserved_ports") {
        Ok(ports) if ports.is_empty() => Check::ok(NAME, "none; portoland adds its own"),
        Ok(ports) => Check::ok(NAME, ports),
        Err(error) => Check::warn(NAME, error.to_string(), "is /proc mounted?"),
    }
}

fn iproute() -> Check {
    const NAME: &str = "iproute2";
    match output("ip", &["-V"]) {
        Ok(version) => Check::ok(NAME, version),
        Err(error) => Check::warn(
            NAME,
            error,
            "demo, bench and doctor use it: apt install iproute2",
        ),
    }
}
