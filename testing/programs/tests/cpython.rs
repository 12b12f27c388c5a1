//! CPython's own tests of sockets have the same results on Portolan as on the kernel's stack, test by test. Their
//! servers and clients are on one host; `localhost` is its address on the link.
//!
//! More modules, which take longer: `PORTOLAN_CPYTHON="test_ssl test_asyncio" cargo test -p portolan-programs --test
//! cpython`. All that are known to have the same results: test_socket test_selectors test_socketserver test_select
//! test_epoll test_poll test_signal test_httplib test_ftplib test_ssl test_asyncio.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::{PYTHON, bed};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/cpython.py");
const MODULES: &str = "test_socket test_selectors test_socketserver test_select test_epoll";

/// Tests with different results, as listed in `docs/reference/deviations.md`.
const KNOWN: [(&str, &str); 0] = [];

/// Time limit for all modules.
const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn cpythons_own_tests_end_as_on_the_kernel() {
    let modules = std::env::var("PORTOLAN_CPYTHON").unwrap_or_else(|_| MODULES.to_owned());
    let modules: Vec<_> = modules.split_whitespace().collect();
    let bed = bed();
    let sides = [
        (Side::Server, Stack::Kernel),
        (Side::Client, Stack::Portolan),
    ];
    let mut running = sides.map(|(side, stack)| start(&bed, side, stack, &modules));
    for tests in &mut running {
        tests.wait(LIMIT);
    }
    let [kernel, portolan] = sides.map(|(side, _)| outcomes(&bed, side));
    assert!(kernel.len() > modules.len(), "{}", said(&bed, Side::Server));
    let (known, differences): (Vec<_>, Vec<_>) = portolan
        .symmetric_difference(&kernel)
        .partition(|line| KNOWN.iter().any(|(test, _)| line.starts_with(test)));
    assert!(
        differences.is_empty(),
        "{differences:#?}\n{}",
        said(&bed, Side::Client)
    );
    for (test, reason) in KNOWN {
        let is_needed = known.iter().any(|line| line.starts_with(test));
        assert!(
            is_needed || !ran(&kernel, test),
            "no longer so: {test}, {reason}"
        );
    }
}

fn ran(outcomes: &BTreeSet<String>, test: &str) -> bool {
    outcomes.iter().any(|line| line.starts_with(test))
}

fn start(bed: &Bed, side: Side, stack: Stack, modules: &[&str]) -> Background {
    let hosts = bed.file(&format!("{side}.hosts"));
    let address = bed.host(side).address;
    fs::write(&hosts, format!("{address} localhost\n")).expect("the bed's directory is writable");
    let create = |suffix: &str| File::create(bed.file(&format!("{side}.{suffix}")));
    let words = bed.words(stack, PYTHON);
    let mut command = bed.command(side, Stack::Kernel, "unshare");
    command
        .args([
            "--mount",
            "sh",
            "-c",
            "mount --bind $0 /etc/hosts && exec \"$@\"",
        ])
        .arg(&hosts)
        .args(words)
        // -P: fixtures may have the names of modules.
        .args(["-P", SCRIPT, "localhost"])
        .args(modules)
        .current_dir(bed.file(""))
        .stdout(create("outcomes").expect("the bed's directory is writable"))
        .stderr(create("said").expect("the bed's directory is writable"));
    Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

fn outcomes(bed: &Bed, side: Side) -> BTreeSet<String> {
    let text = fs::read_to_string(bed.file(&format!("{side}.outcomes"))).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn said(bed: &Bed, side: Side) -> String {
    fs::read_to_string(bed.file(&format!("{side}.said"))).unwrap_or_default()
}
