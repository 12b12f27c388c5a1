//! Several processes on one port by SO_REUSEPORT.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_netns::{Daemon, Ready};
use portolan_programs::{PYTHON, bed, client, eventually};
use rustix::process::Signal;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/shared.py");
const PORT: &str = "7020";
const PROCESSES: usize = 4;
/// Number of ports that a client sends from.
const COUNT: usize = 400;

/// More time than the server needs to notice a death.
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn processes_that_share_a_udp_port_have_fair_parts_and_take_over_those_of_the_dead() {
    share_and_die("udp");
}

#[test]
fn processes_that_share_a_tcp_port_have_fair_parts_and_take_over_those_of_the_dead() {
    share_and_die("tcp");
}

/// The master binds a socket for each worker, which alone accepts on it.
#[test]
fn each_of_nginxs_workers_serves_from_its_own_socket_of_the_port() {
    let bed = bed();
    let endpoint = bed.endpoint(8090);
    let config = bed.file("nginx.conf");
    let text = format!(
        "user root; daemon off; worker_processes {PROCESSES}; pid {}; error_log stderr crit;\n\
         events {{}}\n\
         http {{ access_log off; server {{ listen {endpoint} reuseport;\n\
         location / {{ return 200 \"$pid\\n\"; }} }} }}\n",
        bed.file("nginx.pid").display(),
    );
    fs::write(&config, text).expect("the bed's directory is writable");
    let config = config.display().to_string();
    let _nginx = bed
        .serve(Stack::Portolan, 8090, "nginx", &["-c", &config])
        .unwrap_or_else(|error| panic!("{error}"));
    for stack in [Stack::Kernel, Stack::Portolan] {
        let url = format!("http://{endpoint}/?[1-120]");
        let said = client(
            &bed,
            stack,
            "curl",
            &["-sS", "--max-time", "40", "-H", "Connection: close", &url],
        );
        assert_eq!(said.lines().count(), 120, "{said}");
        let workers: BTreeSet<&str> = said.lines().collect();
        assert_eq!(workers.len(), PROCESSES, "{workers:?}");
        let url = format!("http://{endpoint}/");
        let wrk = ["-t", "1", "-c", "16", "-d", "1s", "-H", "Connection: close"];
        let report = client(&bed, stack, "wrk", &[&wrk[..], &[&url]].concat());
        assert!(report.contains("Requests/sec:"), "{report}");
        assert!(!report.contains("Socket errors"), "{report}");
        assert!(!report.contains("Non-2xx"), "{report}");
    }
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
    // Packets to the dead process are lost until the server notices its death.
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

/// Process IDs, and the number of ports each answered.
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

/// Checks that every port was answered, by exactly these processes, and that none answered only a few.
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
