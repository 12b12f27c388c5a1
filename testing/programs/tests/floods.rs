//! Floods of SYNs at one program's port (ADR 22): the packet filter answers them with cookies, from which
//! the port's owner makes connections.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, bed, counter, eventually};
use rustix::process::Signal;
use serde_json::Value;

const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/delegated.py");
const PORT: u16 = 7095;
const PROMPTLY: Duration = Duration::from_secs(5);

/// The performer of the handshakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Server,
    Program,
}

impl By {
    /// Returns a counter of cookies.
    fn counted(self, bed: &Bed, name: &str) -> u64 {
        match self {
            By::Server => served(bed, name),
            By::Program => counter(bed, Side::Server, "stack", name),
        }
    }
}

/// Serves in one of the ways of the fixture, with a backlog.
fn start(bed: &Bed, by: By, way: &str, backlog: &str) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    let delegate = if by == By::Program { "1" } else { "0" };
    command
        .env("PORTOLAN_DELEGATE", delegate)
        .args([SERVER, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()])
        .arg(backlog);
    bed.serve_command(PORT, "delegated.py", &mut command)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Routes the sources of floods, which do not exist, to the client's host.
fn route_back(bed: &Bed) {
    let client = bed.client.address.to_string();
    let back = if bed.client.address.is_ipv4() {
        "198.18.0.0/15"
    } else {
        "2001:2::/48"
    };
    let route = ["route", "replace", back, "via", &client];
    run(bed.namespace(Side::Server).exec("ip").args(route)).expect("a route back");
}

/// Starts a flood with more SYNs per second than legitimate hosts send.
fn flood(bed: &Bed) -> Background {
    route_back(bed);
    let to = bed.endpoint(PORT).to_string();
    let mut flood = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
    flood.args(["syns", &to, "--rate", "5000", "--seconds", "60"]);
    Background::start(&mut flood).expect("it starts")
}

fn filtered(bed: &Bed, name: &str) -> u64 {
    counter(bed, Side::Server, "receive", name)
}

fn served(bed: &Bed, name: &str) -> u64 {
    counter(bed, Side::Server, "server", name)
}

fn set_cookies(bed: &Bed, number: &str) {
    let set = || fs::write("/proc/sys/net/ipv4/tcp_syncookies", number).expect("it is ours");
    bed.namespace(Side::Server).enter(set);
}

fn echo(bed: &Bed) {
    let mut stream = connect(bed, PORT);
    exchange(&mut stream, 20, 50_000);
    assert_ends_in_order(stream);
}

fn await_answers(bed: &Bed, more: u64) {
    let before = filtered(bed, "answered_syn");
    let answered = || filtered(bed, "answered_syn") - before;
    assert!(eventually(PROMPTLY * 3, || answered() >= more));
}

/// Returns true if the filter has stopped answering.
fn is_over(bed: &Bed) -> bool {
    let before = filtered(bed, "answered_syn");
    std::thread::sleep(Duration::from_millis(50));
    filtered(bed, "answered_syn") == before
}

/// Checks that ten clients are served during the flood.
fn assert_clients_get_in(bed: &Bed) {
    for _ in 0..10 {
        echo(bed);
    }
}

/// Returns the `portolan ss` entry of the flooded port.
fn listener(bed: &Bed) -> Value {
    let text = bed.portolan(Side::Server, &["ss", "-l", "-t", "--json"]);
    let all: Vec<Value> = serde_json::from_str(&text.expect("the server answers")).expect("JSON");
    let local = bed.endpoint(PORT).to_string();
    let own = all.into_iter().find(|session| session["local"] == local);
    own.map_or(Value::Null, |session| session["listener"].clone())
}

/// Sends acknowledgements of SYN-ACKs that were never sent, as an attacker does who guesses cookies.
const GUESS: &str = r#"
import ipaddress, random, socket, struct, sys
own, peer, port = sys.argv[1:]
own, peer = (ipaddress.ip_address(text).packed for text in (own, peer))
family = socket.AF_INET if len(own) == 4 else socket.AF_INET6
s = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_TCP)
s.bind((sys.argv[1], 0))
for source in range(20000, 20010):
    fields = [source, int(port), random.getrandbits(32), random.getrandbits(32), 0x5010, 1000]
    segment = lambda checksum: struct.pack(">HHIIHHHH", *fields, checksum, 0)
    summed = own + peer + struct.pack(">HH", socket.IPPROTO_TCP, 20) + segment(0)
    total = sum(struct.unpack(">%dH" % (len(summed) // 2), summed))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    s.sendto(segment(~total & 0xffff), (sys.argv[2], 0))
"#;

fn guess(bed: &Bed) {
    let mut command = bed.namespace(Side::Client).exec(PYTHON);
    let (own, peer) = (bed.client.address, bed.server.address);
    command.args(["-c", GUESS, &own.to_string(), &peer.to_string()]);
    run(command.arg(PORT.to_string())).expect("root has raw sockets");
}

fn assert_listener_shows(bed: &Bed) {
    let has_come_back = || listener(bed)["cookies_good"].as_u64() >= Some(10);
    assert!(eventually(PROMPTLY, has_come_back), "{}", listener(bed));
    let is_flooded = || listener(bed)["flooded"] == true;
    assert!(eventually(PROMPTLY, is_flooded), "{}", listener(bed));
    let shown = listener(bed);
    assert!(shown["syns_answered"].as_u64() >= Some(3000), "{shown}");
    let refused = |shown: &Value| shown["cookies_bad"].as_u64();
    let before = refused(&shown).expect("a number");
    guess(bed);
    let is_counted = || refused(&listener(bed)) >= Some(before + 10);
    assert!(eventually(PROMPTLY, is_counted), "{}", listener(bed));
    let line = bed.portolan(Side::Server, &["ss", "-l", "-t", "-i"]);
    let line = line.expect("the server answers");
    assert!(line.contains(" syns_answered:"), "{line}");
    assert!(line.contains(" cookies_good:"), "{line}");
}

fn assert_clients_get_in_by_cookies(bed: &Bed, by: By) {
    let _server = start(bed, by, "blocking", "8");
    let flooding = flood(bed);
    await_answers(bed, 3000);
    assert_clients_get_in(bed);
    let taken = || by.counted(bed, "syn_cookies_accepted");
    assert!(eventually(PROMPTLY, || taken() >= 10), "{by:?}");
    let here = by.counted(bed, "syn_cookies_sent");
    let there = filtered(bed, "answered_syn");
    assert!(here < there / 4, "{here} by {by:?}, {there} by the filter");
    assert_listener_shows(bed);
    drop(flooding);
    assert!(eventually(PROMPTLY, || is_over(bed)));
    echo(bed);
    assert!(is_over(bed), "that was no flood");
    let is_shown = || listener(bed)["flooded"] == false;
    assert!(eventually(PROMPTLY, is_shown), "{}", listener(bed));
    let shown = listener(bed);
    assert!(shown["syns_answered"].as_u64() >= Some(3000), "{shown}");
}

#[test]
fn clients_get_in_by_cookies_that_the_filter_made() {
    assert_clients_get_in_by_cookies(&bed(), By::Server);
    assert_clients_get_in_by_cookies(&bed().over_ipv6(), By::Server);
}

#[test]
fn a_program_that_performs_its_handshakes_takes_the_filters_cookies() {
    for bed in [bed(), bed().over_ipv6()] {
        assert_clients_get_in_by_cookies(&bed, By::Program);
        assert_eq!(served(&bed, "syn_cookies_sent"), 0, "the server saw none");
    }
}

#[test]
fn a_host_that_wants_no_cookies_has_none() {
    let bed = bed();
    set_cookies(&bed, "0");
    let _server = start(&bed, By::Server, "blocking", "8");
    let _flood = flood(&bed);
    let dropped = || served(&bed, "syns_dropped_queue_full");
    assert!(eventually(PROMPTLY, || dropped() > 1000));
    assert_eq!(filtered(&bed, "answered_syn"), 0);
}

#[test]
fn a_host_that_always_wants_them_has_them_whatever_the_backlog() {
    let bed = bed();
    set_cookies(&bed, "2");
    let _server = start(&bed, By::Server, "blocking", "4096");
    let _flood = flood(&bed);
    await_answers(&bed, 1000);
    assert_clients_get_in(&bed);
    // The sysctl is changed during the flood.
    set_cookies(&bed, "0");
    assert!(eventually(PROMPTLY, || is_over(&bed)));
}

#[test]
fn while_nobody_accepts_the_filter_drops_and_then_answers_again() {
    for by in [By::Server, By::Program] {
        assert_drops_and_then_answers(&bed(), by);
    }
}

fn assert_drops_and_then_answers(bed: &Bed, by: By) {
    let server = start(bed, by, "late", "2");
    let open = |_| {
        let mut stream = connect(bed, PORT);
        stream.write_all(b"early").expect("it takes bytes");
        stream
    };
    let streams: Vec<TcpStream> = (0..3).map(open).collect();
    let _flood = flood(bed);
    let dropped = || filtered(bed, "drop_syn");
    assert!(eventually(PROMPTLY * 2, || dropped() > 1000));
    let shown = listener(bed);
    assert!(shown["syns_dropped"].as_u64() >= Some(1000), "{shown}");
    assert_eq!(filtered(bed, "answered_syn"), 0);
    server.signal(Signal::USR1).expect("it runs");
    for mut stream in streams {
        let mut early = [0; 5];
        stream.read_exact(&mut early).expect("what was sent");
        assert_eq!(&early, b"early");
        assert_ends_in_order(stream);
    }
    await_answers(bed, 1000);
    assert_clients_get_in(bed);
}

/// Returns the 95th percentile of clients' times, while such segments arrive.
fn usual_echo(bed: &Bed, flood: &mut Background) -> Duration {
    let mut times = Vec::new();
    while flood.is_running() {
        let start = Instant::now();
        echo(bed);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    // With fewer clients, one of them was delayed for long.
    assert!(times.len() >= 20, "{times:?}");
    times[times.len() * 19 / 20]
}

#[test]
fn segments_without_a_connection_get_few_resets_and_delay_nobody() {
    for (by, ipv6) in [
        (By::Server, false),
        (By::Program, false),
        (By::Server, true),
    ] {
        let mut bed = bed();
        if ipv6 {
            bed = bed.over_ipv6();
        }
        route_back(&bed);
        let _server = start(&bed, by, "blocking", "64");
        for segment in ["ack", "syn-ack"] {
            let sent = || served(&bed, "resets_sent");
            let withheld = || by.counted(&bed, "resets_withheld");
            let before = (sent(), withheld());
            let to = bed.endpoint(PORT).to_string();
            let mut flood = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
            flood.args(["syns", &to, "--segment", segment]);
            flood.args(["--rate", "50000", "--seconds", "3"]);
            let mut flood = Background::start(&mut flood).expect("it starts");
            let usual = usual_echo(&bed, &mut flood);
            let (sent, withheld) = (sent() - before.0, withheld() - before.1);
            eprintln!("{by:?} {segment}: {sent} resets, {withheld} withheld, echo {usual:?}");
            // The burst, and three seconds at the rate. The server does not count what a program sends.
            assert!(sent < 6000 && (sent > 1000 || by == By::Program), "{sent}");
            match by {
                // The filter drops the rest.
                By::Server => assert!(withheld < 6000, "{withheld}"),
                By::Program => assert!(withheld > 20_000, "{withheld}"),
            }
            assert!(usual < PROMPTLY / 20, "{usual:?}");
        }
    }
}

/// Connects from few ports, from each again and again, and reads until the server closes: there the port's last connection
/// is in TIME-WAIT.
const FROM_FEW_PORTS: &str = r#"
import socket, sys
address, port = sys.argv[1], int(sys.argv[2])
for turn in range(300):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", 45000 + turn % 40))
    sock.settimeout(5)
    sock.connect((address, port))
    assert sock.makefile("rb").read() == b"hello"
    sock.close()
"#;

#[test]
fn ports_of_connections_that_have_just_ended_come_in_a_flood() {
    let bed = bed();
    let _server = start(&bed, By::Program, "greeting", "64");
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let connect = || {
        let mut command = bed.namespace(Side::Client).exec(PYTHON);
        command.args(["-c", FROM_FEW_PORTS, &address, &port]);
        run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    };
    connect();
    for _ in 0..2 {
        let flooding = flood(&bed);
        await_answers(&bed, 1000);
        connect();
        drop(flooding);
        assert!(eventually(PROMPTLY, || is_over(&bed)));
    }
    let by_cookie = counter(&bed, Side::Server, "stack", "syn_cookies_accepted");
    assert!(by_cookie >= 300, "{by_cookie}");
}
