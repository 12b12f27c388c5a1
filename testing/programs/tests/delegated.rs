//! Delegated listeners (ADR 15): programs that perform the handshakes of their own ports.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, assert_served, connect, exchange};
use portolan_programs::web::{self, assert_none_failed, start_load};
use portolan_programs::{
    PYTHON, bed, client, counter, eventually, live_sessions, restart_server, sessions_in,
    start_server, stop_server,
};
use rustix::process::Signal;

const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/delegated.py");
const PORT: u16 = 7090;
const PROMPTLY: Duration = Duration::from_secs(3);

/// The variable that `portolan run --delegate` sets.
const DELEGATE: (&str, &str) = ("PORTOLAN_DELEGATE", "1");

fn start_with(bed: &Bed, way: &str, more: &[&str], variables: &[(&str, &str)]) -> Background {
    start_on(bed, Stack::Portolan, (way, more), variables)
}

fn start_on(
    bed: &Bed,
    stack: Stack,
    (way, more): (&str, &[&str]),
    variables: &[(&str, &str)],
) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, stack, PYTHON);
    command
        .envs(variables.iter().copied())
        .args([SERVER, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()])
        .args(more);
    bed.serve_command(PORT, "delegated.py", &mut command)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn start(bed: &Bed, way: &str) -> Background {
    let server = start_with(bed, way, &[], &[DELEGATE]);
    assert!(eventually(PROMPTLY, || is_delegated(bed)), "{way}");
    server
}

/// Returns for each listener whether a program performs its handshakes.
fn delegations(bed: &Bed) -> Vec<bool> {
    let text = bed
        .portolan(Side::Server, &["ss", "-l", "--json"])
        .expect("the server answers");
    let sessions: serde_json::Value = serde_json::from_str(&text).expect("ss prints JSON");
    let state = |session: &serde_json::Value| session["listener"]["delegated"].as_bool();
    sessions
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(state)
        .collect()
}

fn is_delegated(bed: &Bed) -> bool {
    delegations(bed).contains(&true)
}

fn served(bed: &Bed, name: &str) -> u64 {
    counter(bed, Side::Server, "server", name)
}

/// Returns a counter of the program's stack, which the program reports periodically.
fn told(bed: &Bed, name: &str) -> u64 {
    counter(bed, Side::Server, "stack", name)
}

fn echo(bed: &Bed) {
    assert_served(connect(bed, PORT));
}

/// Checks that the peer's connection is reset.
fn assert_is_reset(mut stream: TcpStream) {
    stream.set_read_timeout(Some(PROMPTLY)).expect("a time-out");
    let end = stream.read(&mut [0; 1]).expect_err("no bytes");
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn programs_serve_whatever_their_way_of_waiting() {
    let bed = bed();
    for (round, way) in ["blocking", "poll", "edges"].into_iter().enumerate() {
        let _server = start(&bed, way);
        for _ in 0..20 {
            echo(&bed);
        }
        let accepted = 20 * (round as u64 + 1);
        assert_eq!(
            served(&bed, "connections_claimed"),
            0,
            "{way}: all ended early"
        );
        let handshakes = || told(&bed, "delegated_handshakes");
        assert!(eventually(PROMPTLY, || handshakes() >= accepted), "{way}");
    }
    assert_eq!(served(&bed, "passive_opens"), 0, "the server opened none");
}

#[test]
fn who_sends_nothing_is_accepted_later_if_the_program_defers() {
    const DEFERRED: Duration = Duration::from_secs(1);
    let bed = bed();
    let _server = start_with(&bed, "greeting", &[], &[DELEGATE, ("DEFER", "1")]);
    assert!(is_delegated(&bed));
    let greeted = |words: &[u8]| {
        let begun = Instant::now();
        let mut stream = connect(&bed, PORT);
        stream.set_read_timeout(Some(PROMPTLY)).expect("a time-out");
        stream.write_all(words).expect("it takes bytes");
        stream.read_exact(&mut [0; 5]).expect("a greeting");
        begun.elapsed()
    };
    let early = greeted(b"hi");
    let late = greeted(b"");
    assert!(early < DEFERRED / 2, "{early:?}");
    assert!((DEFERRED..2 * DEFERRED).contains(&late), "{late:?}");
    assert_eq!(served(&bed, "passive_opens"), 0, "the server opened none");
}

/// Connects from one port, reads until the server closes, and fails if that takes long.
const FROM_ONE_PORT: &str = r#"
import socket, sys, time
address, port = sys.argv[1], int(sys.argv[2])
sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind(("", 45555))
sock.settimeout(5)
begun = time.monotonic()
sock.connect((address, port))
assert sock.makefile("rb").read() == b"hello"
assert time.monotonic() - begun < 0.5, time.monotonic() - begun
"#;

/// Has the client's host a connection from that port?
fn has_port(bed: &Bed, port: &str) -> bool {
    let mut list = bed.namespace(Side::Client).exec("ss");
    let shown = list.args(["-Htan", "sport", "=", port]).output();
    !shown.expect("it runs").stdout.is_empty()
}

#[test]
fn who_comes_from_a_port_that_the_kernel_has_in_time_wait_is_served() {
    for bed in [bed(), bed().over_ipv6()] {
        let endpoint = bed.endpoint(PORT);
        let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
        let greeted = || {
            let words = ["-c", FROM_ONE_PORT, &address, &port];
            client(&bed, Stack::Kernel, PYTHON, &words);
            // A program that is killed at once leaves the end of the connection to the server, which takes a moment.
            assert!(eventually(PROMPTLY, || !has_port(&bed, "45555")));
        };
        let kernels = start_on(&bed, Stack::Kernel, ("greeting", &[]), &[]);
        greeted();
        drop(kernels);
        for variables in [&[][..], &[DELEGATE]] {
            let _server = start_with(&bed, "greeting", &[], variables);
            greeted();
        }
    }
}

#[test]
fn connections_come_over_ipv6_and_from_portolan() {
    let bed = bed().over_ipv6();
    let _server = start(&bed, "blocking");
    echo(&bed);
    let endpoint = bed.endpoint(PORT).to_string();
    let arguments = ["ping", "tcp", &endpoint, "--count", "10"];
    client(&bed, Stack::Portolan, "portolan-traffic", &arguments);
    assert!(eventually(PROMPTLY, || told(&bed, "delegated_handshakes") == 2));
}

#[test]
fn who_says_nothing_is_not_delegated_and_an_option_says_it() {
    let bed = bed();
    let silent = start_with(&bed, "blocking", &[], &[]);
    assert!(!is_delegated(&bed));
    drop(silent);
    let _server = start_with(&bed, "blocking", &[], &[("CHOICE", "1")]);
    assert!(is_delegated(&bed));
    echo(&bed);
    assert!(eventually(PROMPTLY, || told(&bed, "delegated_handshakes") == 1));
}

#[test]
fn a_busy_listener_is_delegated_unless_something_else_was_chosen() {
    for (variables, expected) in [(&[][..], true), (&[("PORTOLAN_DELEGATE", "0")], false)] {
        let bed = bed();
        let endpoint = bed.endpoint(PORT).to_string();
        let mut server = bed.command(Side::Server, Stack::Portolan, "portolan-traffic");
        server
            .envs(variables.iter().copied())
            .args(["greet", &endpoint]);
        let _server = bed
            .serve_command(PORT, "portolan-traffic", &mut server)
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(!is_delegated(&bed));
        let load = ["connect", &endpoint, "--seconds", "1"];
        client(&bed, Stack::Kernel, "portolan-traffic", &load);
        assert_eq!(is_delegated(&bed), expected, "{variables:?}");
        let opened = || told(&bed, "delegated_handshakes");
        assert_eq!(
            eventually(PROMPTLY, || opened() > 0),
            expected,
            "{variables:?}"
        );
    }
}

#[test]
fn an_option_goes_before_the_command_line() {
    let bed = bed();
    let _server = start_with(&bed, "blocking", &[], &[DELEGATE, ("CHOICE", "0")]);
    assert!(!is_delegated(&bed));
}

#[test]
fn who_wants_it_no_longer_loses_no_connection() {
    let bed = bed();
    let server = start(&bed, "changing");
    let streams = waiting(&bed);
    server.signal(Signal::USR1).expect("it runs");
    assert_served_late(streams);
    assert!(!is_delegated(&bed));
    assert_eq!(served(&bed, "connections_surrendered"), 3);
    echo(&bed);
}

#[test]
fn the_servers_configuration_has_the_last_word() {
    let mut forbidding = Bed::bare(portolan_netns::Bed::veth()).expect("a bed");
    forbidding.set_settings("[delegation]\nallow = false\n");
    forbidding.start_daemon(Side::Server).expect("a server");
    let _server = start_with(&forbidding, "blocking", &[], &[DELEGATE]);
    echo(&forbidding);
    assert!(!is_delegated(&forbidding));
    assert_eq!(served(&forbidding, "passive_opens"), 1);

    let mut wanting = Bed::bare(portolan_netns::Bed::veth()).expect("a bed");
    wanting.set_settings(&format!("[delegation]\nports = [{PORT}]\n"));
    wanting.start_daemon(Side::Server).expect("a server");
    let _server = start_with(&wanting, "blocking", &[], &[]);
    echo(&wanting);
    assert!(is_delegated(&wanting));
    assert!(eventually(PROMPTLY, || told(
        &wanting,
        "delegated_handshakes"
    ) == 1));
}

/// Opens three connections that wait to be accepted, and sends bytes on each.
fn waiting(bed: &Bed) -> Vec<TcpStream> {
    let open = |_| {
        let mut stream = connect(bed, PORT);
        stream.write_all(b"early").expect("it takes bytes");
        stream
    };
    (0..3).map(open).collect()
}

fn assert_served_late(streams: Vec<TcpStream>) {
    for mut stream in streams {
        let mut early = [0; 5];
        stream.read_exact(&mut early).expect("what was sent");
        assert_eq!(&early, b"early");
        exchange(&mut stream, 2, 3000);
        assert_ends_in_order(stream);
    }
}

#[test]
fn a_busy_programs_connections_wait_with_their_bytes() {
    let bed = bed();
    let server = start(&bed, "late");
    let streams = waiting(&bed);
    server.signal(Signal::USR1).expect("it runs");
    assert_served_late(streams);
    assert!(eventually(PROMPTLY, || told(&bed, "delegated_handshakes") == 3));
}

#[test]
fn a_child_accepts_what_has_waited_since_before_the_fork() {
    let bed = bed();
    let server = start(&bed, "forking");
    let streams = waiting(&bed);
    server.signal(Signal::USR1).expect("it runs");
    assert_served_late(streams);
    assert_eq!(served(&bed, "connections_surrendered"), 3);
    assert!(!is_delegated(&bed));
    echo(&bed);
}

#[test]
fn another_program_accepts_by_a_descriptor_that_it_is_handed() {
    let bed = bed();
    let path = bed.file("meeting").display().to_string();
    let server = start_with(&bed, "passing", &[], &[DELEGATE, ("MEETING", &path)]);
    let mut taker = bed.command(Side::Server, Stack::Portolan, PYTHON);
    taker.args([SERVER, "taking"]).env("MEETING", &path);
    let _taker = Background::start(&mut taker).expect("it starts");
    assert!(eventually(PROMPTLY, || bed.file("meeting").exists()));
    let streams = waiting(&bed);
    server.signal(Signal::USR1).expect("it runs");
    assert_served_late(streams);
    assert!(!is_delegated(&bed));
}

#[test]
fn who_waits_is_reset_when_the_listener_closes() {
    let bed = bed();
    let server = start(&bed, "idle");
    let streams = waiting(&bed);
    server.signal(Signal::USR1).expect("it runs");
    streams.into_iter().for_each(assert_is_reset);
    assert!(eventually(PROMPTLY, || live_sessions(&bed, Side::Server) == 0));
}

#[test]
fn who_waits_hears_that_the_program_was_killed_and_the_port_is_free() {
    let bed = bed();
    let server = start(&bed, "idle");
    let streams = waiting(&bed);
    server.signal(Signal::KILL).expect("it runs");
    assert!(eventually(PROMPTLY, || live_sessions(&bed, Side::Server) == 0));
    streams.into_iter().for_each(assert_is_reset);
    drop(server);
    let _server = start(&bed, "blocking");
    echo(&bed);
}

#[test]
fn in_a_flood_of_syns_clients_get_in_by_cookies() {
    let bed = bed();
    let _server = start_with(&bed, "blocking", &["8"], &[DELEGATE]);
    let client = bed.client.address.to_string();
    let back = ["route", "replace", "198.18.0.0/15", "via", &client];
    run(bed.namespace(Side::Server).exec("ip").args(back)).expect("a route back");
    let to = bed.endpoint(PORT).to_string();
    let mut flood = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
    flood.args(["syns", &to, "--rate", "2000", "--seconds", "20"]);
    let _flood = Background::start(&mut flood).expect("it starts");
    let in_filter = || counter(&bed, Side::Server, "receive", "answered_syn");
    let cookies = || told(&bed, "syn_cookies_sent") + in_filter();
    assert!(eventually(PROMPTLY * 3, || cookies() > 1000));
    for _ in 0..10 {
        echo(&bed);
    }
    assert!(eventually(PROMPTLY, || told(&bed, "syn_cookies_accepted") >= 10));
    assert_eq!(served(&bed, "syn_cookies_sent"), 0, "the server saw none");
    assert_eq!(served(&bed, "passive_opens"), 0);
}

/// Far more clients at once than the listener's queues hold, while the program does not accept. As on Linux, each is
/// eventually served or continues to try, and none is reset. How many are served at each attempt (after 1, 3, 7 and
/// 15 s) depends on how soon the program accepts: Linux serves 49 to 57 within 8 s, but if all attempts come before the
/// program's thread runs, no more than the queue holds, six each time.
#[test]
fn a_crowd_at_a_full_accept_queue_is_served_later() {
    const CROWD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/crowd.py");
    let ipv4 = bed();
    let ipv6 = bed().over_ipv6();
    for (bed, variables) in [(&ipv4, &[][..]), (&ipv6, &[][..]), (&ipv6, &[DELEGATE])] {
        let server = start_with(bed, "late", &["5"], variables);
        assert_eq!(is_delegated(bed), !variables.is_empty());
        let endpoint = bed.endpoint(PORT);
        let mut crowd = bed.command(Side::Client, Stack::Kernel, PYTHON);
        crowd
            .args([CROWD, &endpoint.ip().to_string(), &PORT.to_string()])
            .args(["60", "40", "20"])
            .stdout(Stdio::piped());
        let mut crowd = Background::start_with_output(&mut crowd).expect("it starts");
        sleep(Duration::from_millis(500));
        server.signal(Signal::USR1).expect("it runs");
        assert!(crowd.wait(Duration::from_secs(30)));
        let outcomes = crowd.finish();
        let count = |name: &str| {
            let words = outcomes.split_whitespace();
            let mut counts = words.filter_map(|word| word.split_once('='));
            let found = counts.find(|(known, _)| *known == name);
            found.map_or(0, |(_, count)| count.parse().expect("a number"))
        };
        assert!(count("served") >= 30, "{outcomes}");
        assert_eq!(count("served") + count("waiting"), 60, "{outcomes}");
    }
}

/// Starts an nginx of a single process.
fn nginx(bed: &Bed) -> Background {
    let page = "a page".repeat(1000);
    web::nginx(bed, PORT, ("master_process off;", page), |nginx| {
        nginx.env(DELEGATE.0, DELEGATE.1);
    })
}

#[test]
fn redis_and_nginx_serve_under_load() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let mut redis = bed.command(Side::Server, Stack::Portolan, "redis-server");
    redis.env(DELEGATE.0, DELEGATE.1);
    redis.args(["--bind", &address, "--port", &port]);
    redis.args(["--save", "", "--protected-mode", "no"]);
    let redis = bed.serve_command(PORT, "redis-server", &mut redis);
    let redis = redis.unwrap_or_else(|error| panic!("{error}"));
    assert!(is_delegated(&bed));
    let load = ["-h", &address, "-p", &port, "-t", "set,get"];
    let turns = ["-n", "4000", "-c", "20", "-k", "0", "-q"];
    let words = [&load[..], &turns[..]].concat();
    client(&bed, Stack::Kernel, "redis-benchmark", &words);
    let opened = || told(&bed, "delegated_handshakes");
    assert!(eventually(PROMPTLY, || opened() >= 8000));
    assert_eq!(served(&bed, "passive_opens"), 0);
    drop(redis);

    // A counter of programs that have ended stays. SYNs for the connections of the program before are the server's.
    let accepted = || opened() + served(&bed, "passive_opens");
    let before = accepted();
    let _nginx = nginx(&bed);
    let url = format!("http://{endpoint}/page");
    let words = ["-n", "2000", "-c", "10", &url];
    client(&bed, Stack::Kernel, "ab", &words);
    assert!(eventually(PROMPTLY, || accepted() - before >= 2000));
}

/// Starts a server that holds a connection, and does `then` with it when it gets a signal.
fn held(bed: &Bed, then: &str) -> (Background, TcpStream) {
    let path = bed.file("meeting").display().to_string();
    let variables = [DELEGATE, ("THEN", then), ("MEETING", &path)];
    let server = start_with(bed, "held", &[], &variables);
    assert!(eventually(PROMPTLY, || is_delegated(bed)));
    let mut stream = connect(bed, PORT);
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(served(bed, "connections_claimed"), 0);
    (server, stream)
}

fn established(bed: &Bed) -> usize {
    sessions_in(bed, Side::Server, "ESTAB")
}

#[test]
fn a_connection_that_lasts_is_registered() {
    let bed = bed();
    let (server, stream) = held(&bed, "serve");
    assert!(eventually(PROMPTLY, || served(&bed, "connections_claimed") == 1));
    assert_eq!(established(&bed), 1);
    server.signal(Signal::USR1).expect("it runs");
    assert_served(stream);
    assert!(eventually(PROMPTLY, || established(&bed) == 0));
}

#[test]
fn an_unregistered_connection_goes_wherever_its_descriptor_goes() {
    for then in ["fork", "pass", "leave"] {
        let bed = bed();
        let path = bed.file("meeting").display().to_string();
        let mut taker = bed.command(Side::Server, Stack::Portolan, PYTHON);
        taker.args([SERVER, "taking"]).env("MEETING", &path);
        let _taker = (then == "pass").then(|| Background::start(&mut taker).expect("it starts"));
        let (server, stream) = held(&bed, then);
        assert!(then != "pass" || eventually(PROMPTLY, || bed.file("meeting").exists()));
        server.signal(Signal::USR1).expect("it runs");
        assert_served(stream);
        assert_eq!(served(&bed, "connections_claimed"), 1, "{then}");
        assert!(eventually(PROMPTLY, || established(&bed) == 0), "{then}");
    }
}

#[test]
fn who_holds_an_unregistered_connection_hears_that_the_program_was_killed() {
    for bed in [bed(), bed().over_ipv6()] {
        let (server, stream) = held(&bed, "serve");
        server.signal(Signal::KILL).expect("it runs");
        // It sends nothing: it would not hear of it by a reset of its own segment.
        assert_is_reset(stream);
        assert_eq!(served(&bed, "unregistered_lost"), 1);
        drop(server);
        let _server = start(&bed, "blocking");
        echo(&bed);
    }
}

/// The peer does not read until the program has closed the connection, or ended.
#[test]
fn what_a_closed_connection_has_to_send_arrives() {
    for then in ["exit", "close"] {
        let bed = bed();
        let (mut server, mut stream) = held(&bed, then);
        server.signal(Signal::USR1).expect("it runs");
        assert!(then != "exit" || server.wait(PROMPTLY));
        // The server finishes what takes longer than two seconds.
        let returned = || served(&bed, "unregistered_closed") + served(&bed, "connections_claimed");
        assert!(eventually(2 * PROMPTLY, || returned() == 1), "{then}");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("the end in order");
        assert_eq!(bytes.len(), 1 << 20, "{then}");
    }
}

/// The server closes first, so that it has the TIME-WAIT, and the client uses the same port again at once.
#[test]
fn a_port_of_the_peer_in_time_wait_opens_another_connection() {
    const CLIENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/same_port.py");
    let bed = bed();
    let _server = start(&bed, "greeting");
    let endpoint = bed.endpoint(PORT);
    let words = [CLIENT, &endpoint.ip().to_string(), &PORT.to_string(), "200"];
    client(&bed, Stack::Kernel, PYTHON, &words);
    assert_eq!(served(&bed, "passive_opens"), 0);
    assert_eq!(served(&bed, "connections_claimed"), 0);
}

/// The program continues with the connections that it has accepted, and with those that wait, and accepts others meanwhile.
#[test]
fn connections_go_on_over_a_restart_of_the_server() {
    for end in [Signal::TERM, Signal::KILL] {
        let mut bed = bed();
        let (server, stream) = held(&bed, "serve");
        restart_server(&mut bed, Side::Server, end);
        assert!(eventually(PROMPTLY, || is_delegated(&bed)), "{end:?}");
        server.signal(Signal::USR1).expect("it runs");
        assert_served(stream);
        drop(server);

        let server = start(&bed, "late");
        let mut streams = waiting(&bed);
        stop_server(&mut bed, Side::Server, end);
        streams.extend(waiting(&bed));
        start_server(&mut bed, Side::Server);
        assert!(eventually(PROMPTLY, || is_delegated(&bed)), "{end:?}");
        server.signal(Signal::USR1).expect("it runs");
        assert_served_late(streams);
        assert_eq!(served(&bed, "unregistered_lost"), 0, "{end:?}");
        assert!(eventually(PROMPTLY, || live_sessions(&bed, Side::Server) == 1));
    }
}

/// The journal goes on, too.
#[test]
fn who_waits_since_before_a_restart_hears_that_the_program_was_killed() {
    let mut bed = bed();
    let server = start(&bed, "idle");
    let streams = waiting(&bed);
    restart_server(&mut bed, Side::Server, Signal::KILL);
    assert!(eventually(PROMPTLY, || is_delegated(&bed)));
    server.signal(Signal::KILL).expect("it runs");
    streams.into_iter().for_each(assert_is_reset);
    assert_eq!(served(&bed, "unregistered_lost"), 3);
}

#[test]
fn no_request_fails_while_servers_are_restarted() {
    let mut bed = bed();
    let _nginx = nginx(&bed);
    let load = start_load(&bed, PORT, 6);
    for end in [Signal::TERM, Signal::KILL, Signal::TERM, Signal::KILL] {
        sleep(Duration::from_millis(500));
        restart_server(&mut bed, Side::Server, end);
        assert!(eventually(PROMPTLY, || is_delegated(&bed)), "{end:?}");
    }
    assert_none_failed(load);
}
