//! Dependencies between the crates of the workspace go down only, and the sans-IO layers do not depend on
//! the operating system.

use std::process::Command;

use serde_json::Value;

/// The table of docs/design.md. A crate may use crates of lower layers, and of its own layer if
/// [`may_use`] allows it.
const LAYERS: [(&str, Layer); 25] = [
    ("portolan-types", Layer::Vocabulary),
    ("portolan-wire", Layer::Vocabulary),
    ("portolan-timers", Layer::Vocabulary),
    ("portolan-tcp", Layer::Logic),
    ("portolan-stack", Layer::Logic),
    ("portolan-control", Layer::Logic),
    ("portolan-proto", Layer::Logic),
    ("portolan-sys", Layer::System),
    ("portolan-bpf", Layer::System),
    ("portolan-local", Layer::System),
    ("portolan", Layer::Library),
    ("portolan-preload", Layer::Program),
    ("portolan-server", Layer::Program),
    ("portolan-cli", Layer::Program),
    ("portolan-manual", Layer::Vocabulary),
    ("portolan-bench", Layer::Tool),
    ("portolan-bench-arguments", Layer::Vocabulary),
    ("portolan-sim", Layer::Tool),
    ("portolan-fuzz", Layer::Tool),
    ("portolan-requirements", Layer::Tool),
    ("portolan-netns", Layer::Tool),
    ("portolan-pkt", Layer::Tool),
    ("portolan-posix-check", Layer::Tool),
    ("portolan-programs", Layer::Tool),
    ("portolan-examples", Layer::Tool),
];

/// The crate of this test, which depends on nothing.
const SELF: &str = "portolan-layers";

/// Crates that access the operating system; the sans-IO layers take time, randomness and I/O as
/// arguments instead.
const OPERATING_SYSTEM: [&str; 9] = [
    "getrandom",
    "libbpf-rs",
    "libc",
    "mio",
    "netlink-sys",
    "nix",
    "rand",
    "rustix",
    "tokio",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Layer {
    /// L0: types, wire formats, timers.
    Vocabulary,
    /// L1: sans-IO protocol and control logic.
    Logic,
    /// L2: the operating system.
    System,
    /// L3: the protocol library.
    Library,
    /// L4: the programs for users.
    Program,
    /// Beds, benchmarks and tests: outside the layers, and not used by the programs for users.
    Tool,
}

fn layer(name: &str) -> Option<Layer> {
    LAYERS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, layer)| *layer)
}

fn may_use(user: Layer, used: Layer) -> bool {
    match (user, used) {
        (Layer::Tool, _) => true,
        (Layer::Program, Layer::Program) => false,
        (user, used) => used <= user,
    }
}

/// One dependency of a crate of the workspace.
struct Edge {
    user: String,
    used: String,
    for_tests: bool,
}

fn metadata() -> Value {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .args(["--manifest-path", manifest])
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
}

fn packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    metadata["packages"].as_array().expect("packages").iter()
}

fn name(value: &Value) -> String {
    value["name"].as_str().expect("a name").to_owned()
}

fn edges(metadata: &Value) -> Vec<Edge> {
    packages(metadata)
        .flat_map(|package| {
            let dependencies = package["dependencies"].as_array().expect("dependencies");
            dependencies.iter().map(|dependency| Edge {
                user: name(package),
                used: name(dependency),
                for_tests: dependency["kind"] == "dev",
            })
        })
        .collect()
}

/// Returns why an edge is not allowed; None if it is.
fn complaint(edge: &Edge) -> Option<String> {
    let user = layer(&edge.user)?;
    if let Some(used) = layer(&edge.used) {
        // Tests of a crate may use beds and simulators, but no higher layer.
        let allowed = may_use(user, used) || edge.for_tests && used == Layer::Tool;
        return (!allowed)
            .then(|| format!("{} ({user:?}) uses {} ({used:?})", edge.user, edge.used));
    }
    let sans_io = user <= Layer::Logic && !edge.for_tests;
    (sans_io && OPERATING_SYSTEM.contains(&edge.used.as_str())).then(|| {
        format!(
            "{} ({user:?}) names the operating system: {}",
            edge.user, edge.used
        )
    })
}

#[test]
fn every_crate_has_a_layer() {
    let metadata = metadata();
    let unknown: Vec<_> = packages(&metadata)
        .map(name)
        .filter(|name| name != SELF && layer(name).is_none())
        .collect();
    assert!(
        unknown.is_empty(),
        "add to LAYERS and to docs/design.md: {unknown:?}"
    );
}

#[test]
fn dependencies_go_down_only() {
    let complaints: Vec<_> = edges(&metadata()).iter().filter_map(complaint).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn upward_and_sideways_edges_are_found() {
    let edge = |user: &str, used: &str, for_tests| Edge {
        user: user.to_owned(),
        used: used.to_owned(),
        for_tests,
    };
    assert!(complaint(&edge("portolan-tcp", "portolan-sys", false)).is_some());
    assert!(complaint(&edge("portolan-tcp", "portolan-sys", true)).is_some());
    assert!(complaint(&edge("portolan-tcp", "rustix", false)).is_some());
    assert!(complaint(&edge("portolan-cli", "portolan-server", false)).is_some());
    assert!(complaint(&edge("portolan-tcp", "portolan-sim", false)).is_some());
    assert!(complaint(&edge("portolan-cli", "portolan-bench", false)).is_some());
    assert!(complaint(&edge("portolan-tcp", "portolan-sim", true)).is_none());
    assert!(complaint(&edge("portolan-stack", "portolan-tcp", false)).is_none());
    assert!(complaint(&edge("portolan-server", "portolan-control", false)).is_none());
}
