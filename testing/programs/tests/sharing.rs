//! Several processes on one port, as SO_REUSEPORT allows.

use std::collections::BTreeMap;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_netns::{Daemon, Ready};
use portolan_programs::{PYTHON, bed, client, eventually};
use rustix::process::Signal;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/shared.py");
const PORT: &str = "7020";
const PROCESSES: usize = 4;
/// Ports that a client asks from.
const COUNT: usize = 400;

/// Longer than the server needs to learn of a death.
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn processes_that_share_a_udp_port_have_fair_parts_and_take_over_those_of_the_dead() {
    share_and_die("udp");
}

#[test]
fn processes_that_share_a_tcp_port_have_fair_parts_and_take_over_those_of_the_dead() {
    share_and_die("tcp");
}

fn share_and_die(protocol: &str) {
    let mut bed = bed();
    share(&bed, protocol);
    bed = bed.over_ipv6();
    share(&bed, protocol);
}

fn share(bed: &Bed, protocol: &str) {
    let mut processes: Vec<Daemon> = (0..PROCESSES).map(|_| serve(bed, protocol)).collect();
    fairly(&ask(bed, protocol), &processes);
    let dead = processes.remove(1);
    dead.signal(Signal::KILL);
    // What is on its way to the dead one while nobody knows of its death is lost.
    let mut answers = Answers::new();
    let recovered = eventually(LIMIT, || {
        answers = ask(bed, protocol);
        !answers.contains_key("nobody")
    });
    assert!(recovered, "{answers:?}");
    fairly(&ask(bed, protocol), &processes);
}

fn serve(bed: &Bed, protocol: &str) -> Daemon {
    let address = bed.server.address.to_string();
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command.args([SCRIPT, protocol, &address, PORT]);
    Daemon::start(command, Ready::Line("ready".to_owned()))
}

/// Process numbers, and how many ports each answered.
type Answers = BTreeMap<String, usize>;

fn ask(bed: &Bed, protocol: &str) -> Answers {
    let (address, count) = (bed.server.address.to_string(), COUNT.to_string());
    let json = client(
        bed,
        Stack::Kernel,
        PYTHON,
        &[SCRIPT, protocol, &address, PORT, &count],
    );
    let mut answers: Answers = serde_json::from_str(&json).expect("JSON");
    answers.retain(|_, count| *count > 0);
    answers
}

/// Every port was answered, by exactly these processes, and none of them has next to nothing.
fn fairly(answers: &Answers, processes: &[Daemon]) {
    assert_eq!(answers.values().sum::<usize>(), COUNT, "{answers:?}");
    let mut expected: Vec<String> = processes
        .iter()
        .map(|process| process.pid().to_string())
        .collect();
    expected.sort();
    let told: Vec<&String> = answers.keys().collect();
    assert_eq!(told, expected.iter().collect::<Vec<_>>(), "{answers:?}");
    assert!(
        answers.values().all(|count| *count * 10 >= COUNT),
        "{answers:?}"
    );
}
