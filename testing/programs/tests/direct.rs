//! Direct mapping (ADR 20): sessions with receive rings of their own.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, Steps, bed, client, counter, eventually, restart_server};
use rustix::process::{Pid, Signal, kill_process};

const ECHO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/delegated.py");
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/direct.py");
const TRAFFIC: &str = "portolan-traffic";
const PORT: u16 = 7095;
const OTHER: u16 = 7096;
const PROMPTLY: Duration = Duration::from_secs(5);

/// Maximum number of rings per process.
const MOST: usize = 8;

/// The variable that `portolan run --direct` sets.
const DIRECT: (&str, &str) = ("PORTOLAN_DIRECT", "1");

fn python(bed: &Bed, script: &str, way: &str, variables: &[(&str, &str)]) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command
        .envs(variables.iter().copied())
        .args([script, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()]);
    bed.serve_command(PORT, "python", &mut command)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn traffic(bed: &Bed, side: Side) -> Command {
    let mut command = bed.command(side, Stack::Portolan, TRAFFIC);
    command.env(DIRECT.0, DIRECT.1).stdout(Stdio::null());
    command
}

fn by_own_ring(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "receive", "delivered_direct")
}

fn served(bed: &Bed, name: &str) -> u64 {
    counter(bed, Side::Server, "server", name)
}

/// Returns the mappings of connections in `portolan ss`, with the reasons why a ring was refused.
fn mappings(bed: &Bed) -> Vec<[serde_json::Value; 2]> {
    let text = bed
        .portolan(Side::Server, &["ss", "-a", "--json"])
        .expect("the server answers");
    let sessions: serde_json::Value = serde_json::from_str(&text).expect("ss prints JSON");
    let connections = sessions.as_array().expect("a list").iter();
    connections
        .filter(|session| session["state"] == "ESTAB")
        .map(|session| ["mapping", "mapping_refused"].map(|key| session[key].clone()))
        .collect()
}

fn direct(bed: &Bed) -> usize {
    mappings(bed)
        .iter()
        .filter(|[mapping, _]| mapping == "direct")
        .count()
}

fn echo(bed: &Bed) {
    let mut stream = connect(bed, PORT);
    exchange(&mut stream, 4, 5000);
    assert_ends_in_order(stream);
}

#[test]
fn sessions_have_rings_of_their_own_whatever_their_way_of_waiting() {
    let bed = bed();
    for way in ["blocking", "poll", "edges"] {
        let _server = python(&bed, ECHO, way, &[DIRECT]);
        let (before, mapped) = (
            by_own_ring(&bed, Side::Server),
            served(&bed, "sessions_mapped_directly"),
        );
        for _ in 0..20 {
            echo(&bed);
        }
        assert_eq!(
            served(&bed, "sessions_mapped_directly") - mapped,
            20,
            "{way}"
        );
        let came = by_own_ring(&bed, Side::Server) - before;
        assert!(came >= 20 * 4, "{way}: {came}");
    }
    assert_eq!(served(&bed, "direct_refused_process_limit"), 0);
}

#[test]
fn who_says_nothing_shares_the_ring_and_an_option_goes_before_the_command_line() {
    let bed = bed();
    let silent = python(&bed, ECHO, "blocking", &[]);
    echo(&bed);
    drop(silent);
    assert_eq!(by_own_ring(&bed, Side::Server), 0);
    // The own ring exists soon after the connection. The program spins, since a sleeping one receives by the tap.
    let script = "
import socket, sys
for choice in (0, 1):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, 0x5046, choice)
    s.connect((sys.argv[1], int(sys.argv[2])))
    print('connected', flush=True)
    sys.stdin.readline()
    s.setblocking(False)
    for _ in range(20):
        s.send(b'x')
        while True:
            try:
                assert s.recv(1) == b'x'
                break
            except BlockingIOError:
                pass
    print(choice, flush=True)
    sys.stdin.readline()
";
    let _server = python(&bed, ECHO, "blocking", &[]);
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    command.env(DIRECT.0, DIRECT.1).args(["-c", script]);
    command.args([bed.endpoint(PORT).ip().to_string(), PORT.to_string()]);
    let mapped = || counter(&bed, Side::Client, "server", "sessions_mapped_directly");
    let mut steps = Steps::start(&mut command);
    steps.await_line("connected");
    steps.go_on();
    steps.await_line("0");
    assert_eq!(by_own_ring(&bed, Side::Client), 0);
    assert_eq!(mapped(), 0);
    steps.go_on();
    steps.await_line("connected");
    assert!(eventually(PROMPTLY, || mapped() == 1));
    steps.go_on();
    steps.await_line("1");
    assert!(by_own_ring(&bed, Side::Client) > 0);
}

#[test]
fn a_process_has_no_more_than_its_limit_and_those_of_sessions_that_ended_serve_others() {
    let bed = bed();
    let _server = python(&bed, ECHO, "poll", &[DIRECT]);
    let mut streams: Vec<_> = (0..MOST + 2).map(|_| connect(&bed, PORT)).collect();
    for stream in &mut streams {
        exchange(stream, 2, 3000);
    }
    assert_eq!(served(&bed, "direct_refused_process_limit"), 2);
    assert_eq!(direct(&bed), MOST);
    let shared = mappings(&bed)
        .into_iter()
        .filter(|[_, reason]| reason == "process-limit");
    assert_eq!(shared.count(), 2);
    let status = bed.portolan(Side::Server, &["status"]).expect("it answers");
    assert!(
        status.contains(&format!("{MOST} with a ring of its own")),
        "{status}"
    );

    for stream in streams.drain(..) {
        assert_ends_in_order(stream);
    }
    assert!(eventually(PROMPTLY, || direct(&bed) == 0));
    for _ in 0..MOST {
        echo(&bed);
    }
    assert_eq!(served(&bed, "sessions_mapped_directly"), 2 * MOST as u64);
    assert_eq!(served(&bed, "direct_refused_process_limit"), 2);
}

#[test]
fn the_configuration_decides_for_those_that_say_nothing_and_may_allow_none() {
    let mut wanting = Bed::bare(portolan_netns::Bed::veth()).expect("a bed");
    wanting.set_settings("[delivery]\nmapping = \"direct\"\ndirect_per_process = 1\n");
    wanting.start_daemon(Side::Server).expect("a server");
    let _server = python(&wanting, ECHO, "blocking", &[]);
    echo(&wanting);
    assert_eq!(served(&wanting, "sessions_mapped_directly"), 1);

    let mut forbidding = Bed::bare(portolan_netns::Bed::veth()).expect("a bed");
    forbidding.set_settings("[delivery]\ndirect_per_process = 0\n");
    forbidding.start_daemon(Side::Server).expect("a server");
    let _server = python(&forbidding, ECHO, "blocking", &[DIRECT]);
    echo(&forbidding);
    assert_eq!(served(&forbidding, "direct_refused_process_limit"), 1);

    let mut by_tap = Bed::bare(portolan_netns::Bed::veth()).expect("a bed");
    by_tap.set_settings("[delivery]\nform = \"ipc\"\n");
    by_tap.start_daemon(Side::Server).expect("a server");
    let _server = python(&by_tap, ECHO, "blocking", &[DIRECT]);
    echo(&by_tap);
    assert_eq!(served(&by_tap, "direct_refused_delivery"), 1);
}

#[test]
fn streams_and_datagrams_are_exact_over_both_families() {
    for bed in [bed(), bed().over_ipv6()] {
        let endpoint = bed.endpoint(PORT).to_string();
        let (file, copy) = (bed.file("sent"), bed.file("came-back"));
        let bytes: Vec<u8> = (0..8_000_000u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        fs::write(&file, &bytes).unwrap();
        let mut mirror = traffic(&bed, Side::Server);
        let _mirror = bed
            .serve_command(PORT, TRAFFIC, mirror.args(["mirror", &endpoint]))
            .unwrap();
        let mut send = traffic(&bed, Side::Client);
        run(send.args(["send", &endpoint]).args([&file, &copy])).unwrap();
        assert!(fs::read(&copy).unwrap() == bytes, "the stream was damaged");
        let endpoint = bed.endpoint(OTHER).to_string();
        let mut echo = traffic(&bed, Side::Server);
        let _echo =
            Background::start(echo.args(["echo", "udp", &endpoint, "--size", "9"])).unwrap();
        let before = [Side::Client, Side::Server].map(|side| by_own_ring(&bed, side));
        let mut ping = traffic(&bed, Side::Client);
        run(ping.args(["ping", "udp", &endpoint, "--size", "9", "--count", "1000"])).unwrap();
        let after = [Side::Client, Side::Server].map(|side| by_own_ring(&bed, side));
        for (before, after) in before.into_iter().zip(after) {
            assert!(after - before >= 1000, "{}", after - before);
        }
    }
}

/// The connection migrates to the server while two processes share it, and back when only one has it.
#[test]
fn a_session_that_migrates_leaves_its_ring_and_may_have_one_again() {
    let bed = bed();
    let _server = python(&bed, SCRIPT, "forking", &[DIRECT]);
    for round in 1..=5 {
        let mut stream = connect(&bed, PORT);
        exchange(&mut stream, 3, 700);
        assert_ends_in_order(stream);
        assert!(served(&bed, "sessions_mapped_directly") >= round);
    }
    assert!(eventually(PROMPTLY, || direct(&bed) == 0));
}

#[test]
fn a_session_has_a_ring_of_its_own_from_the_next_server() {
    let mut bed = bed();
    let _server = python(&bed, ECHO, "poll", &[DIRECT]);
    let mut stream = connect(&bed, PORT);
    exchange(&mut stream, 4, 5000);
    for end in [Signal::KILL, Signal::TERM] {
        restart_server(&mut bed, Side::Server, end);
        assert!(eventually(PROMPTLY, || direct(&bed) == 1));
        let before = by_own_ring(&bed, Side::Server);
        exchange(&mut stream, 4, 5000);
        assert!(by_own_ring(&bed, Side::Server) - before >= 4);
    }
    assert_ends_in_order(stream);
}

#[test]
fn a_process_that_is_killed_gives_its_rings_back() {
    let bed = bed();
    for _ in 0..3 {
        let server = python(&bed, ECHO, "poll", &[DIRECT]);
        let mut streams: Vec<_> = (0..4).map(|_| connect(&bed, PORT)).collect();
        for stream in &mut streams {
            exchange(stream, 1, 1000);
        }
        assert_eq!(direct(&bed), 4);
        server.signal(Signal::KILL).expect("it runs");
        assert!(eventually(PROMPTLY, || mappings(&bed).is_empty()));
    }
    assert_eq!(served(&bed, "sessions_mapped_directly"), 12);
}

/// The program is stopped, so that its rings fill.
#[test]
fn a_flood_at_one_session_loses_nothing_of_one_with_a_ring_of_its_own() {
    const DATAGRAMS: u64 = 100;
    let bed = bed();
    for (choice, is_kept) in [("0", false), ("1", true)] {
        let [steady, busy] = [PORT, OTHER].map(|port| bed.endpoint(port).to_string());
        let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
        command.env("CHOICE", choice).args([SCRIPT, "beside"]);
        command.args([bed.endpoint(PORT).ip().to_string()]);
        command.args([PORT, OTHER].map(|port| port.to_string()));
        let mut program = Steps::start(&mut command);
        program.await_line("ready");
        let pid = Pid::from_raw(program.id().cast_signed()).expect("a process");
        kill_process(pid, Signal::STOP).expect("it runs");
        let flood = ["pace", &busy, "--rate", "20000", "--seconds", "1"];
        client(&bed, Stack::Kernel, TRAFFIC, &flood);
        let rate = DATAGRAMS.to_string();
        let few = [
            "pace",
            &steady,
            "--rate",
            &rate,
            "--seconds",
            "1",
            "--size",
            "60",
        ];
        client(&bed, Stack::Kernel, TRAFFIC, &few);
        kill_process(pid, Signal::CONT).expect("it is there");
        program.go_on();
        let came: u64 = program.line().parse().expect("a number");
        assert_eq!(came >= DATAGRAMS * 9 / 10, is_kept, "{choice}: {came} came");
    }
}
