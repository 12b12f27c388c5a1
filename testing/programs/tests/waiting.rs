//! No wait ends late: threads that open, accept, add, remove and wait by all calls available, on sockets that
//! other threads opened (`docs/design/waiting.md`).

use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{ProcessError, TIME_LIMIT, run, run_within};
use portolan_programs::{
    PAIRINGS, PYTHON, Pairing, STACKS, Steps, bed, client, compiled, each_pairing, serve,
};

const COMPUTING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/computing.py");
const MOUNTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/mounts.py");
const SOURCE: &str = "testing/programs/fixtures/waiting.c";

/// Four times the cores.
fn threads() -> String {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    (4 * cores).max(8).to_string()
}

/// Duration of each combination, unless `PORTOLAN_TEST_SECONDS` is set.
const SECONDS: u64 = 3;

fn seconds() -> u64 {
    let chosen = std::env::var("PORTOLAN_TEST_SECONDS").ok();
    let chosen = chosen.and_then(|seconds| seconds.parse().ok());
    chosen.unwrap_or(SECONDS)
}

/// Runs one combination to its end.
fn drive(command: &mut Command) -> Result<String, ProcessError> {
    run_within(command, TIME_LIMIT + Duration::from_secs(seconds()))
}

fn over_the_wire(bed: &Bed, pairing: Pairing, program: &str, port: u16) {
    let address = bed.server.address.to_string();
    let arguments = |what| vec![what, address.as_str()];
    let port = port.to_string();
    let mut serving = arguments("serve");
    let threads = threads();
    serving.extend([port.as_str(), &threads]);
    let number = port.parse().expect("a port");
    let _server = serve(bed, pairing.server, number, program, &serving);
    let seconds = seconds().to_string();
    let mut driving = arguments("drive");
    driving.extend([port.as_str(), &threads, &seconds, "1"]);
    let mut command = bed.command(Side::Client, pairing.client, program);
    let report = drive(command.args(driving)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{pairing:?} {address}: {report}");
    assert!(!report.contains(" 0 refused"), "{report}");
}

/// One test, so that nothing runs in parallel with its threads.
#[test]
fn no_wait_ends_late() {
    let bed = bed();
    let program = compiled(&bed, SOURCE);
    reuse_ports(&bed);
    within_one_host(&bed, &program);
    // The service of streams has the next port.
    let mut ports = (7100..).step_by(2);
    let mut test = |bed: &Bed, pairing| {
        let port = ports.next().expect("there are more");
        over_the_wire(bed, pairing, &program, port);
    };
    each_pairing(&bed, &mut test);
    each_pairing(&bed.over_ipv6(), &mut test);
}

/// In a long run the kernel's clients would use up their ports.
fn reuse_ports(bed: &Bed) {
    let mut sysctl = bed.command(Side::Client, Stack::Kernel, "sysctl");
    run(sysctl.args(["-qw", "net.ipv4.tcp_tw_reuse=1"])).expect("the host's own setting");
}

fn within_one_host(bed: &Bed, program: &str) {
    let own = bed.server.address.to_string();
    for (address, port) in [("127.0.0.1", "7130"), ("::1", "7140"), (&own, "7150")] {
        let arguments = [
            "both",
            address,
            port,
            &threads(),
            &seconds().to_string(),
            "1",
        ];
        let mut command = bed.neighbour(Stack::Portolan, program);
        let report =
            drive(command.args(arguments)).unwrap_or_else(|error| panic!("{address}: {error}"));
        eprintln!("{address}: {report}");
    }
}

/// While a program computes its connection continues: written data is sent as the peer acknowledges, and received data
/// is acknowledged. The best of several runs shows the mechanism without the delays of a busy machine. It takes up to
/// three round trips with a turn of the background thread each, which waits for a time slice of the program (1.4 ms) if
/// both processors are busy; with ticks it would take 20 ms.
#[test]
fn a_program_that_computes_does_not_hold_its_connections_up() {
    let bed = bed();
    compute_while_connected(&bed);
    compute_while_connected(&bed.over_ipv6());
}

fn compute_while_connected(bed: &Bed) {
    const PORT: &str = "7160";
    const TIMES: usize = 12;
    let mut server = bed.command(Side::Server, Stack::Kernel, PYTHON);
    let mut server = Steps::start(server.args([COMPUTING, "serve", PORT]));
    server.await_line("ready");
    let address = bed.server.address.to_string();
    // Less than half a tick; what is received takes three round trips.
    for (what, within_ms) in [
        (&["send"][..], 1.5),
        (&["receive"], 3.0),
        (&["send", "often"], 1.5),
        (&["receive", "often"], 3.0),
    ] {
        let arguments = [&[COMPUTING, what[0], &address, PORT], &what[1..]].concat();
        let mut took_ms = || -> f64 {
            client(bed, Stack::Portolan, PYTHON, &arguments);
            server.line().parse().expect("milliseconds")
        };
        let times: Vec<f64> = (0..TIMES).map(|_| took_ms()).collect();
        eprintln!("{what:?} to {address}: {times:?} ms");
        let best = times.into_iter().fold(f64::INFINITY, f64::min);
        assert!(best < within_ms, "{what:?} to {address}: {best} ms");
    }
}

/// Some descriptors report an event only once to each waiting thread, and with `EPOLLPRI` only.
#[test]
fn a_change_of_mounts_is_told_beside_sockets() {
    let bed = bed();
    for stack in STACKS {
        assert_eq!(
            client(&bed, stack, PYTHON, &[MOUNTS]),
            "mounts\nsocket\nmounts",
            "{stack:?}"
        );
    }
}

/// A program whose sockets are libc's and whose waits are system calls that the library does not see is detected, and
/// served by events of the kernel.
#[test]
fn waits_that_no_symbol_shows_end() {
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/own_system_calls.c");
    wait_unseen(&bed, &program, 7170);
    wait_unseen(&bed.over_ipv6(), &program, 7190);
}

/// Takes nine ports from `first`.
fn wait_unseen(bed: &Bed, program: &str, first: u16) {
    const COUNT: &str = "3";
    let address = bed.server.address.to_string();
    let ways = ["epoll", "poll", "select"];
    let cases = ways
        .into_iter()
        .flat_map(|way| PAIRINGS.map(|pairing| (way, pairing)));
    for ((way, pairing), port) in cases.zip(first..) {
        let number = port.to_string();
        let serving = [way, "serve", &address, &number];
        let _server = serve(bed, pairing.server, port, program, &serving);
        let asking = [way, "ask", &address, &number, COUNT];
        let is_ours = |stack| stack == Stack::Portolan;
        let over_wire = bed.command(Side::Client, pairing.client, program);
        let neighbour = bed.neighbour(pairing.client, program);
        for (mut command, is_warned) in [
            (over_wire, is_ours(pairing.client)),
            // The server's own host: by the kernel if the server is the kernel's.
            (
                neighbour,
                is_ours(pairing.server) && is_ours(pairing.client),
            ),
        ] {
            let output = command.args(asking).output().expect("it starts");
            let said = String::from_utf8_lossy(&output.stdout);
            assert_eq!(said.trim(), "all right", "{way}, {pairing:?}");
            let warned = String::from_utf8_lossy(&output.stderr);
            let warnings = warned.matches("waits for sockets by system calls of its own");
            assert_eq!(
                warnings.count(),
                usize::from(is_warned),
                "{way}, {pairing:?}: {warned}"
            );
        }
    }
}
