//! `posix-check` says the same on Portolan as on the kernel's stack, whichever end is on Portolan.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PAIRINGS, Pairing, bed};

/// Longer than all topics take.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

/// What one run printed, in both roles.
struct Account {
    server: Vec<String>,
    client: Vec<String>,
}

/// The topics to run: those that are not deviations as a whole.
fn topics(program: &str) -> Vec<String> {
    let all = run(Command::new(program).arg("topics")).expect("posix-check runs");
    let is_left_out = |topic: &&str| deviations().any(|start| start == *topic);
    all.lines()
        .filter(|topic| !is_left_out(topic))
        .map(str::to_owned)
        .collect()
}

/// How lines begin that are known to differ.
fn deviations() -> impl Iterator<Item = &'static str> {
    let lines = include_str!("../fixtures/posix-deviations.txt").lines();
    lines
        .filter_map(|line| line.split_once(" # "))
        .map(|(start, _why)| start)
}

fn account(bed: &Bed, pairing: Pairing) -> Account {
    let (server, client) = (
        bed.server.address.to_string(),
        bed.client.address.to_string(),
    );
    let meet = bed.file(&format!("meet-{:?}-{:?}", pairing.server, pairing.client));
    fs::create_dir_all(&meet).expect("the bed's directory is writable");
    let program = bed.tools().beside("posix-check").display().to_string();
    let topics = topics(&program);
    let start = |side, stack, role: &str, local: &str, remote: &str| {
        let file = File::create(bed.file(role)).expect("the bed's directory is writable");
        let mut command = bed.command(side, stack, &program);
        command
            .args([role, "--local", local, "--remote", remote, "--meet"])
            .arg(&meet);
        command.args(&topics).stdout(file).stderr(Stdio::null());
        Background::start_with_output(&mut command).expect("it starts")
    };
    let mut roles = [
        start(Side::Server, pairing.server, "server", &server, &client),
        start(Side::Client, pairing.client, "client", &client, &server),
    ];
    for role in &mut roles {
        role.wait(LIMIT);
    }
    let lines = |role| {
        let text = fs::read_to_string(bed.file(role)).expect("it was written");
        text.lines().map(str::to_owned).collect()
    };
    Account {
        server: lines("server"),
        client: lines("client"),
    }
}

/// Lines that differ, of one role, known deviations aside.
fn differences(kernel: &[String], portolan: &[String]) -> Vec<String> {
    let missing = kernel
        .iter()
        .filter(|line| !portolan.contains(line))
        .map(|line| ('-', line));
    let added = portolan
        .iter()
        .filter(|line| !kernel.contains(line))
        .map(|line| ('+', line));
    let unknown = missing.chain(added).filter(|(_, line)| !is_known(line));
    unknown
        .map(|(sign, line)| format!("{sign} {line}"))
        .collect()
}

fn is_known(line: &str) -> bool {
    deviations().any(|start| line.starts_with(start))
}

#[test]
fn sockets_behave_as_the_kernels_do() {
    let bed = bed();
    let kernel = account(
        &bed,
        Pairing {
            server: Stack::Kernel,
            client: Stack::Kernel,
        },
    );
    assert!(kernel.client.len() > 50, "{:#?}", kernel.client);
    let mut all = Vec::new();
    for pairing in PAIRINGS {
        let portolan = account(&bed, pairing);
        let mut found = differences(&kernel.server, &portolan.server);
        found.extend(differences(&kernel.client, &portolan.client));
        all.extend(found.iter().map(|line| format!("{pairing:?} {line}")));
    }
    assert!(all.is_empty(), "{all:#?}");
}
