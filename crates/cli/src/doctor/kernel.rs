//! Checks of the kernel's features.

use libbpf_rs::{MapType, ProgramType};

use super::{Check, output};

/// Older kernels lack BPF ring buffers or mappable arrays.
const OLDEST: (u32, u32) = (5, 11);

/// The oldest kernel on which Portolan's tests run.
const TESTED: (u32, u32) = (6, 1);

pub(super) fn checks() -> Vec<Check> {
    vec![
        version(),
        map("BPF ring buffers", MapType::RingBuf),
        map("BPF hash of flows", MapType::Hash),
        map("BPF array of rings", MapType::ArrayOfMaps),
        filter_programs(),
        taps(),
        clsact(),
        unprivileged_bpf(),
    ]
}

fn version() -> Check {
    const NAME: &str = "kernel";
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    match parse_version(&release) {
        Some(version) if version >= TESTED => Check::ok(NAME, release),
        Some(version) if version >= OLDEST => Check::warn(
            NAME,
            release,
            "older than 6.1, the oldest Portolan is tested on",
        ),
        Some(_) => Check::fail(NAME, release, "use Linux 6.1 or later"),
        None => Check::warn(
            NAME,
            release,
            "the version cannot be read; 6.1 or later is needed",
        ),
    }
}

fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn map(name: &str, map: MapType) -> Check {
    supported(name, map.is_supported())
}

fn filter_programs() -> Check {
    supported("BPF filters for tc", ProgramType::SchedCls.is_supported())
}

fn supported(name: &str, probe: libbpf_rs::Result<bool>) -> Check {
    match probe {
        Ok(true) => Check::ok(name, "the kernel takes them"),
        Ok(false) if rustix::process::geteuid().is_root() => Check::fail(
            name,
            "the kernel does not take them",
            "use a kernel with CONFIG_BPF_SYSCALL and CONFIG_NET_CLS_BPF",
        ),
        Ok(false) => Check::warn(name, "not permitted to try", "run doctor as root"),
        Err(error) => Check::warn(name, error.to_string(), "run doctor as root"),
    }
}

fn taps() -> Check {
    let attempt = in_own_namespace(&["ip", "tuntap", "add", "mode", "tap", "vnet_hdr"]);
    tried(
        "tap devices",
        attempt,
        "modprobe tun, or use a kernel with CONFIG_TUN",
    )
}

fn clsact() -> Check {
    let attempt = in_own_namespace(&["tc", "qdisc", "add", "dev", "lo", "clsact"]);
    tried(
        "clsact qdisc",
        attempt,
        "use a kernel with CONFIG_NET_SCH_INGRESS",
    )
}

/// The namespace is removed with its last process, so that the attempt leaves nothing behind.
fn in_own_namespace(command: &[&str]) -> Result<String, String> {
    output("unshare", &[&["--net"], command].concat())
}

fn tried(name: &str, attempt: Result<String, String>, advice: &str) -> Check {
    match attempt {
        Ok(_) => Check::ok(name, "created one, and removed it"),
        Err(error) if rustix::process::geteuid().is_root() => Check::fail(name, error, advice),
        // The name of the tool that was refused says nothing.
        Err(error) if error.ends_with("not permitted") => {
            Check::warn(name, "not permitted to try", "run doctor as root")
        }
        Err(error) => Check::warn(name, error, "run doctor as root"),
    }
}

/// Portolan does not need it: only the server makes BPF calls, and libraries map what the server hands them.
fn unprivileged_bpf() -> Check {
    const NAME: &str = "unprivileged BPF";
    match portolan_sys::sysctl::read_value("kernel/unprivileged_bpf_disabled") {
        Ok(value) if value == "0" => Check::warn(
            NAME,
            "open to every user",
            "Portolan does not need it: sysctl kernel.unprivileged_bpf_disabled=1",
        ),
        Ok(value) => Check::ok(NAME, format!("disabled ({value}); not needed")),
        Err(_) => Check::ok(NAME, "not there; not needed"),
    }
}

#[cfg(test)]
mod tests {
    use super::parse_version;

    #[test]
    fn releases_of_distributions_are_read() {
        assert_eq!(parse_version("6.1.0-37-amd64"), Some((6, 1)));
        assert_eq!(parse_version("5.15-rc1"), Some((5, 15)));
        assert_eq!(parse_version("next"), None);
    }
}
