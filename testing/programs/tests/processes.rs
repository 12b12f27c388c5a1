//! A connection that several processes share: forked, inherited by another program, used alternately.
//! The peer sees one stream, whichever process uses it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, STACKS, bed, client, compiled, counter};

const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/inherited.py");
const PORT: u16 = 7030;
const TIMEOUT: Duration = Duration::from_secs(20);

fn serve(bed: &Bed, way: &str) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command
        .args([SERVER, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()])
        .stdout(Stdio::piped());
    Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

fn echoes(way: &str, connections: usize) -> Bed {
    echoes_on(bed(), way, connections)
}

fn echoes_on(bed: Bed, way: &str, connections: usize) -> Bed {
    let _server = serve(&bed, way);
    for _ in 0..connections {
        let mut stream = connect(&bed, PORT);
        exchange(&mut stream, 8, 5000);
        assert_ends_in_order(stream);
    }
    bed
}

fn recalled(bed: &Bed) -> u64 {
    counter(bed, Side::Server, "server", "sessions_recalled")
}

#[test]
fn a_child_serves_what_its_parent_accepted() {
    echoes("forking", 10);
}

/// The server has no channel for the children.
#[test]
fn a_child_that_cannot_register_is_relayed() {
    for way in ["forking", "alternating", "together"] {
        let mut bed = Bed::bare(portolan_netns::Bed::veth()).expect("root");
        bed.set_settings("[limits]\nprocesses = 1\n");
        bed.start_daemon(Side::Server).expect("it starts");
        let bed = echoes_on(bed, way, 3);
        assert_eq!(counter(&bed, Side::Server, "server", "processes"), 1);
    }
}

#[test]
fn a_program_that_knows_no_sockets_serves_an_inherited_one() {
    echoes("inherited", 10);
}

#[test]
fn a_long_stream_passes_through_a_program_that_knows_no_sockets() {
    let bed = bed();
    let _server = serve(&bed, "inherited");
    let mut stream = connect(&bed, PORT);
    let mut writer = stream.try_clone().expect("a descriptor is free");
    let sent: Vec<u8> = (0..16u32 << 20).map(|i| (i ^ (i >> 11)) as u8).collect();
    let got = std::thread::scope(|scope| {
        scope.spawn(|| {
            writer.write_all(&sent).expect("it takes bytes");
            writer.shutdown(Shutdown::Write).expect("connected");
        });
        let mut got = Vec::new();
        stream.read_to_end(&mut got).expect("they come back");
        got
    });
    assert!(got == sent, "{} bytes of {}", got.len(), sent.len());
}

#[test]
fn a_program_that_knows_no_sockets_hears_that_its_peer_has_gone() {
    let bed = bed();
    let mut server = serve(&bed, "talkative");
    let mut stream = connect(&bed, PORT);
    stream.read_exact(&mut [0; 1000]).expect("it talks");
    drop(stream);
    assert!(server.wait(TIMEOUT), "it still writes");
    assert_eq!(portolan_programs::live_sessions(&bed, Side::Server), 0);
}

#[test]
fn children_that_do_not_use_a_connection_cost_nothing() {
    let bed = echoes("bystander", 3);
    assert_eq!(recalled(&bed), 0);
    let cached = counter(&bed, Side::Server, "server", "sessions_cached");
    assert_eq!(cached, 3, "once for each connection");
}

#[test]
fn parent_and_child_use_a_connection_by_turns() {
    let bed = echoes("alternating", 3);
    assert!(recalled(&bed) >= 3);
}

#[test]
fn a_parent_that_waits_for_events_shares_with_its_children() {
    let bed = echoes("together", 3);
    assert!(recalled(&bed) >= 3);
}

#[test]
fn a_child_goes_on_where_its_parent_ends() {
    echoes("left_behind", 1);
}

#[test]
fn a_holder_that_is_stopped_loses_the_connection() {
    let bed = bed();
    let mut server = serve(&bed, "hung");
    let mut stream = connect(&bed, PORT);
    stream.write_all(b"go\n").expect("connected");
    let mut all = Vec::new();
    let ended = stream.read_to_end(&mut all);
    assert_eq!(all, b"mine\n");
    assert_eq!(
        ended.map_err(|error| error.kind()),
        Err(std::io::ErrorKind::ConnectionReset)
    );
    assert_eq!(counter(&bed, Side::Server, "server", "recall_timeouts"), 1);
    server
        .signal(rustix::process::Signal::TERM)
        .expect("it runs");
    assert!(server.wait(TIMEOUT));
    assert!(server.finish().contains("reset"));
}

/// Made before the fork, opened by the child, and by the parent with another descriptor after it.
#[test]
fn parent_and_child_open_a_socket_that_was_made_before() {
    const BOTH: &str = "
import os, socket, sys
sockets = [socket.socket(), socket.socket()]
for each in sockets:
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
child = os.fork()
for each in sockets:
    assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    each.connect((sys.argv[1], int(sys.argv[2])))
    each.sendall(b'hello')
    assert each.recv(5) == b'hello'
    each.close()
if child:
    assert os.waitpid(child, 0)[1] == 0
";
    let bed = bed();
    let endpoint = bed.endpoint(PORT);
    let address = endpoint.to_string();
    let arguments = ["echo", "tcp", &address, "--size", "5"];
    let _echo = portolan_programs::serve(&bed, Stack::Kernel, PORT, "portolan-traffic", &arguments);
    let (ip, port) = (endpoint.ip().to_string(), PORT.to_string());
    client(&bed, Stack::Portolan, PYTHON, &["-c", BOTH, &ip, &port]);
    assert_eq!(counter(&bed, Side::Client, "server", "active_opens"), 4);
}

/// Handlers that run only while the program sleeps may do more than others.
#[test]
fn a_handler_may_fork_while_the_program_sleeps() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT);
    let mut command = fixture(&bed, Stack::Portolan, "handlers_that_fork.c");
    command.args([endpoint.ip().to_string(), endpoint.port().to_string()]);
    let said = run(command.arg("2000")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(said, "forks 2000");
}

/// A handler may make async-signal-safe calls at any time, and they return what they would elsewhere.
#[test]
fn handlers_use_sockets_while_their_program_does() {
    let bed = bed();
    for stack in STACKS {
        let mut command = fixture(&bed, stack, "handlers_that_use_sockets.c");
        command.args([bed.client.address.to_string(), PORT.to_string()]);
        let said = run(command.arg("2000")).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(said, "sum 125250");
    }
}

/// Runs a C fixture on the server host with a time limit of a minute.
fn fixture(bed: &Bed, stack: Stack, source: &str) -> Command {
    let program = compiled(bed, &format!("testing/programs/fixtures/{source}"));
    let mut command = bed.command(Side::Server, stack, "timeout");
    command.args(["--signal=KILL", "60", &program]);
    command
}
