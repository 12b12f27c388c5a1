//! Concurrent servers: one process accepts and its children serve. A connection that has not been used
//! yet waits at the server, so that it migrates to a child directly.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, bed, client, counter, eventually, live_sessions, serve};
use rustix::net::sockopt::set_socket_linger;

const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/children.py");
const RELOADED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/reloaded.py");
const PORT: u16 = 7050;

/// Migrations of a connection that is cached by the parent, parked by it and cached by the child.
const BY_THE_PARENT: u64 = 3;
/// Migrations of a connection that goes directly to the process which uses it.
const STRAIGHT: u64 = 1;

fn start(bed: &Bed, way: &str, hint: &[&str]) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command
        .args([SERVER, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()])
        .args(hint)
        .stdout(Stdio::piped());
    Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the number of migrations of the only connection.
fn migrations(bed: &Bed) -> u64 {
    let text = bed
        .portolan(Side::Server, &["ss", "-a", "--json"])
        .expect("the server answers");
    let sessions: serde_json::Value = serde_json::from_str(&text).expect("ss prints JSON");
    let sessions = sessions.as_array().expect("a list");
    let mut live = sessions
        .iter()
        .filter(|session| session["state"] == "ESTAB");
    let session = live.next().expect("a connection");
    assert!(live.next().is_none(), "{text}");
    session["migrations"].as_u64().expect("a number")
}

/// Serves connections in turn, and returns the number of migrations of each while it was used.
fn served(bed: &Bed, connections: usize) -> Vec<u64> {
    (0..connections)
        .map(|_| {
            let mut stream = connect(bed, PORT);
            exchange(&mut stream, 4, 5000);
            let migrations = migrations(bed);
            assert_ends_in_order(stream);
            migrations
        })
        .collect()
}

fn delayed(bed: &Bed) -> u64 {
    counter(bed, Side::Server, "server", "sessions_delayed")
}

#[test]
fn connections_go_straight_to_the_children_that_are_seen_to_use_them() {
    let bed = bed();
    let _server = start(&bed, "forking", &[]);
    assert_eq!(
        served(&bed, 4),
        [BY_THE_PARENT, STRAIGHT, STRAIGHT, STRAIGHT]
    );
    assert_eq!(delayed(&bed), 3);
}

#[test]
fn a_server_that_serves_by_itself_has_nothing_delayed() {
    let bed = bed();
    let _server = start(&bed, "alone", &[]);
    assert_eq!(served(&bed, 3), [STRAIGHT; 3]);
    assert_eq!(delayed(&bed), 0);
}

#[test]
fn the_option_goes_before_what_is_seen() {
    for (way, hint, expected) in [
        ("forking", "1", [STRAIGHT; 3]),
        ("forking", "0", [BY_THE_PARENT; 3]),
        ("alone", "1", [STRAIGHT; 3]),
    ] {
        let bed = bed();
        let _server = start(&bed, way, &[hint]);
        assert_eq!(served(&bed, 3), expected, "{way} {hint}");
    }
}

#[test]
fn options_that_the_parent_sets_hold_for_the_child() {
    let bed = bed();
    let _server = start(&bed, "optioned", &["1"]);
    assert_eq!(served(&bed, 2), [STRAIGHT; 2]);
}

#[test]
fn children_that_answer_once_have_no_channel_made() {
    let bed = bed();
    let _server = start(&bed, "brief", &["1"]);
    let cached = || counter(&bed, Side::Server, "server", "sessions_cached");
    let before = cached();
    for _ in 0..5 {
        assert_answers_once(&bed);
    }
    assert_eq!(cached(), before);
    assert!(eventually(Duration::from_secs(5), || live_sessions(
        &bed,
        Side::Server
    ) == 1));
}

#[test]
fn children_answer_without_a_request_to_the_server() {
    let bed = bed();
    let _server = start(&bed, "brief", &["1"]);
    assert_answers_once(&bed);
    let requests = || counter(&bed, Side::Server, "server", "requests");
    let before = requests();
    for _ in 0..20 {
        assert_answers_once(&bed);
    }
    // One for each connection by the parent, and those of the counters.
    assert!((20..30).contains(&(requests() - before)));
}

#[test]
fn a_child_may_write_what_follows_its_parents_first_bytes() {
    for turn in 0..5 {
        let bed = bed();
        let _server = start(&bed, "both", &["1"]);
        let mut stream = connect(&bed, PORT);
        let mut said = [0; 11];
        stream.read_exact(&mut said).expect("both write");
        assert_eq!(&said, b"parentchild", "{turn}");
        stream.write_all(b"on").expect("the child has it");
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("it ends in order");
        assert_eq!(rest, b"on");
    }
}

#[test]
fn children_may_answer_with_ancillary_data() {
    let bed = bed();
    let _server = start(&bed, "stamped", &["1"]);
    for _ in 0..3 {
        assert_answers_once(&bed);
    }
}

fn assert_answers_once(bed: &Bed) {
    let mut stream = connect(bed, PORT);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it ends in order");
    assert_eq!(answer, b"!");
}

#[test]
fn options_can_be_set_after_a_child_has_answered() {
    for hint in ["0", "1"] {
        let bed = bed();
        let _server = start(&bed, "optioned_late", &[hint]);
        for _ in 0..3 {
            let mut stream = connect(&bed, PORT);
            let mut first = [0];
            stream.read_exact(&mut first).expect("the child sends it");
            exchange(&mut stream, 4, 5000);
            assert_eq!(
                migrations(&bed),
                if hint == "1" { STRAIGHT } else { BY_THE_PARENT }
            );
            assert_ends_in_order(stream);
        }
    }
}

#[test]
fn a_program_that_a_child_becomes_serves_what_was_never_used() {
    let bed = bed();
    let _server = start(&bed, "executed", &[]);
    served(&bed, 3);
    assert_eq!(delayed(&bed), 2);
}

#[test]
fn what_nobody_uses_ends_in_order() {
    let bed = bed();
    let _server = start(&bed, "unused", &["1"]);
    for _ in 0..5 {
        let mut stream = connect(&bed, PORT);
        assert_eq!(stream.read(&mut [0; 1]).expect("no reset"), 0);
    }
    assert_eq!(delayed(&bed), 5);
    assert!(eventually(Duration::from_secs(5), || live_sessions(
        &bed,
        Side::Server
    ) == 1));
}

#[test]
fn a_child_hears_of_the_reset_that_came_before_its_first_use() {
    let bed = bed();
    let server = start(&bed, "late", &["1"]);
    let stream = connect(&bed, PORT);
    reset(stream);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(server.finish().trim(), "ConnectionResetError");
}

fn reset(stream: TcpStream) {
    set_socket_linger(&stream, Some(Duration::ZERO)).expect("a socket");
}

#[test]
fn what_waits_for_its_first_use_is_not_in_the_backlog() {
    let bed = bed();
    let _server = start(&bed, "hoarding", &["1"]);
    let mut streams: Vec<TcpStream> = (0..20).map(|_| connect(&bed, PORT)).collect();
    for stream in &mut streams {
        stream.write_all(b"hello").expect("connected");
        stream.shutdown(Shutdown::Write).expect("connected");
        let mut echoed = Vec::new();
        stream.read_to_end(&mut echoed).expect("it is served");
        assert_eq!(echoed, b"hello");
    }
    assert_eq!(delayed(&bed), 20);
}

#[test]
fn nobody_is_sent_to_a_listener_that_is_closed() {
    let bed = bed();
    let address = bed.server.address.to_string();
    let port = PORT.to_string();
    let arguments = [RELOADED, "serve", &address, &port];
    let _server = serve(&bed, Stack::Portolan, PORT, PYTHON, &arguments);
    let arguments = [RELOADED, "connect", &address, &port, "200"];
    assert_eq!(client(&bed, Stack::Kernel, PYTHON, &arguments), "served");
}
