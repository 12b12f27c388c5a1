//! Checks of the devices that Portolan manages or could manage.

use std::fs;

use serde_json::Value;

use super::{Check, output};

/// Offloads without which throughput is lower.
const OFFLOADS: [&str; 3] = [
    "tcp-segmentation-offload",
    "generic-receive-offload",
    "tx-checksumming",
];

/// `managed` are the devices of the server, if one runs.
pub(super) fn checks(wanted: Option<&str>, managed: Option<&[String]>) -> Vec<Check> {
    let names = match (wanted, managed) {
        (Some(name), _) => vec![name.to_owned()],
        (None, None | Some([])) => present(),
        (None, Some(managed)) => managed.to_vec(),
    };
    let is_managed = |name: &String| managed.is_some_and(|managed| managed.contains(name));
    let check = |name: &String| one(name, is_managed(name));
    names.iter().flat_map(check).collect()
}

/// Returns the names of the Ethernet devices that are up.
fn present() -> Vec<String> {
    let Ok(links) = json("ip", &["-j", "link", "show", "up"]) else {
        return Vec::new();
    };
    let ethernet = |link: &&Value| link["link_type"] == "ether";
    let names = links.as_array().into_iter().flatten().filter(ethernet);
    names
        .filter_map(|link| Some(link["ifname"].as_str()?.to_owned()))
        .collect()
}

fn one(name: &str, is_managed: bool) -> Vec<Check> {
    match json("ip", &["-j", "-d", "link", "show", "dev", name]) {
        Ok(links) => {
            let link = &links[0];
            vec![
                state(name, link),
                xdp(name, link),
                offloads(name),
                qdisc(name, is_managed),
            ]
        }
        Err(error) => vec![Check::fail(name, error, "name a device of `ip link`")],
    }
}

fn json(program: &str, arguments: &[&str]) -> Result<Value, String> {
    let text = output(program, arguments)?;
    serde_json::from_str(&text).map_err(|error| format!("{program}: {error}"))
}

fn state(name: &str, link: &Value) -> Check {
    let title = format!("{name} state");
    if link["link_type"] != "ether" {
        return Check::fail(title, "not an Ethernet device", "manage another one");
    }
    let driver = fs::read_link(format!("/sys/class/net/{name}/device/driver")).ok();
    let driver = driver
        .as_deref()
        .and_then(|path| path.file_name())
        .map_or_else(
            || {
                link["linkinfo"]["info_kind"]
                    .as_str()
                    .unwrap_or("virtual")
                    .to_owned()
            },
            |driver| driver.to_string_lossy().into_owned(),
        );
    let detail = format!(
        "{}, mtu {}, {driver}",
        link["operstate"].as_str().unwrap_or("?"),
        link["mtu"]
    );
    match link["operstate"].as_str() {
        Some("UP" | "UNKNOWN") => Check::ok(title, detail),
        _ => Check::warn(
            title,
            detail,
            format!("ip link set {name} up; is the cable in?"),
        ),
    }
}

/// The names of Portolan's own XDP programs (`bpf/driver_filter.bpf.c`), and the XDP mode that each is for.
const DRIVER_FILTERS: [(&str, &str); 2] =
    [("driver_filter", "native"), ("generic_filter", "generic")];

/// An XDP program of somebody else sees packets before Portolan's filter does.
fn xdp(name: &str, link: &Value) -> Check {
    let title = format!("{name} XDP");
    let Some(xdp) = link.get("xdp") else {
        return Check::ok(title, "no program");
    };
    let program = &xdp["prog"];
    let mut ours = DRIVER_FILTERS.iter();
    match ours.find(|(own, _)| program["name"] == *own) {
        Some((_, hook)) => Check::ok(title, format!("Portolan's filter, {hook} (shm-ipf)")),
        None => Check::warn(
            title,
            format!("program {}", program["id"]),
            "it runs before Portolan's filter: packets it takes never reach Portolan, and shm-ipf is as shm",
        ),
    }
}

fn offloads(name: &str) -> Check {
    let title = format!("{name} offloads");
    let features = match output("ethtool", &["-k", name]) {
        Ok(features) => features,
        Err(error) => return Check::warn(title, error, "apt install ethtool"),
    };
    let off = missing_offloads(&features);
    if off.is_empty() {
        return Check::ok(title, "segmentation, receive coalescing and checksums on");
    }
    let off = off.join(" ");
    Check::warn(
        title,
        format!("off: {off}"),
        format!("ethtool -K {name} tso on gro on tx on"),
    )
}

fn missing_offloads(features: &str) -> Vec<&'static str> {
    let is_off = |offload: &&str| {
        let state = features
            .lines()
            .find_map(|line| line.trim().strip_prefix(*offload));
        state.is_some_and(|state| state.trim_start_matches(':').trim().starts_with("off"))
    };
    OFFLOADS.into_iter().filter(is_off).collect()
}

/// The tc handle that identifies Portolan's filters.
const HANDLE: &str = "handle 0x706f7274 ";

/// Selects them all, for a command.
const PREFERENCE: &str = "pref 28783";

/// Other programs on the same hook are no conflict: our filter passes on packets that are not Portolan's.
fn qdisc(name: &str, is_managed: bool) -> Check {
    let title = format!("{name} clsact");
    let filters = match output("tc", &["filter", "show", "dev", name, "ingress"]) {
        Ok(filters) => filters,
        Err(error) => return Check::warn(title, error, "run doctor as root"),
    };
    // tc prints one more line per filter, for its priority, without a handle.
    let programs: Vec<_> = filters
        .lines()
        .filter(|line| line.contains(" bpf ") && line.contains(" handle "))
        .collect();
    let foreign = programs
        .iter()
        .filter(|program| !program.contains(HANDLE))
        .count();
    if foreign > 0 {
        return Check::warn(
            title,
            format!("{foreign} other BPF filter(s) on ingress"),
            "one that redirects or drops packets hides them from Portolan",
        );
    }
    match (programs.is_empty(), is_managed) {
        (true, _) => Check::ok(title, "free"),
        (false, true) => Check::ok(title, "Portolan's filter"),
        // Connections of programs may go on by it.
        (false, false) => Check::warn(
            title,
            "the filter of a server that is gone",
            format!("start portoland, or tc filter del dev {name} ingress {PREFERENCE}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offloads_that_are_off_are_named() {
        let features = "Features for eth0:\ntx-checksumming: on\n\
                        tcp-segmentation-offload: off\n\ttx-tcp-segmentation: off\n\
                        generic-receive-offload: off [fixed]\n";
        assert_eq!(
            missing_offloads(features),
            ["tcp-segmentation-offload", "generic-receive-offload"]
        );
    }

    #[test]
    fn a_filter_of_ours_in_the_driver_is_told_from_another() {
        let link =
            |name: &str| serde_json::json!({"xdp": {"mode": 1, "prog": {"id": 7, "name": name}}});
        let ours = xdp("eth0", &link("driver_filter"));
        assert_eq!(ours.verdict, super::super::Verdict::Ok);
        assert_eq!(ours.detail, "Portolan's filter, native (shm-ipf)");
        let other = xdp("eth0", &link("katran"));
        assert_eq!(other.verdict, super::super::Verdict::Warn);
    }

    #[test]
    fn a_device_that_is_not_there_fails() {
        let checks = checks(Some("nosuch0"), Some(&[]));
        assert_eq!(checks[0].verdict, super::super::Verdict::Fail);
    }
}
