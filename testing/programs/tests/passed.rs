//! Sockets that are passed to a program which did not open them: over `exec`, by `posix_spawn`, in
//! messages, taken by `pidfd_getfd`. They look to it like sockets of the kernel.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::UdpSocket;
use std::process::Stdio;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, STACKS, bed, counter, eventually};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/passed.py");
const PORT: u16 = 7040;

fn serve(bed: &Bed, way: &str) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command
        .args([FIXTURE, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()])
        .stdout(Stdio::piped());
    Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs several connections, each echoed by the program that got it, and returns that program's output.
fn echoes(bed: &Bed, way: &str, connections: usize) -> String {
    let mut server = serve(bed, way);
    for _ in 0..connections {
        let mut stream = connect(bed, PORT);
        exchange(&mut stream, 8, 5000);
        assert_ends_in_order(stream);
    }
    server
        .signal(rustix::process::Signal::TERM)
        .expect("it runs");
    assert!(server.wait(Duration::from_secs(10)));
    server.finish()
}

fn shown(bed: &Bed, kind: &str, listens: u8) -> String {
    let (family, address) = match bed.server.address {
        address if address.is_ipv4() => ("AF_INET", address),
        address => ("AF_INET6", address),
    };
    format!("{family} {kind} ('{address}', {PORT}) {listens}")
}

#[test]
fn a_listener_is_known_after_exec() {
    for bed in [bed(), bed().over_ipv6()] {
        for way in ["execed_listener", "bare_environment"] {
            let said = echoes(&bed, way, 4);
            assert!(said.contains(&shown(&bed, "SOCK_STREAM", 1)), "{said}");
        }
    }
}

#[test]
fn a_connection_is_known_after_exec() {
    for bed in [bed(), bed().over_ipv6()] {
        let said = echoes(&bed, "execed", 4);
        let client = bed.client.address;
        let expected = format!("{}\n{client}\n1", shown(&bed, "SOCK_STREAM", 0));
        assert!(said.contains(&expected), "{said}");
    }
}

#[test]
fn a_connection_is_known_to_a_program_that_was_spawned() {
    let bed = bed();
    for way in ["spawned", "started"] {
        let said = echoes(&bed, way, 4);
        assert!(said.contains(&shown(&bed, "SOCK_STREAM", 0)), "{said}");
    }
}

#[test]
fn what_was_not_read_before_exec_is_read_after_it() {
    let bed = bed();
    let _server = serve(&bed, "half_read");
    let mut stream = connect(&bed, PORT);
    stream.write_all(b"before after").expect("connected");
    let mut rest = [0; 5];
    stream.read_exact(&mut rest).expect("it comes back");
    assert_eq!(&rest, b"after");
    exchange(&mut stream, 4, 100_000);
    assert_ends_in_order(stream);
}

#[test]
fn programs_that_know_no_sockets_serve_on_their_standard_streams() {
    let bed = bed();
    for way in ["cat", "static"] {
        echoes(&bed, way, 4);
    }
}

#[test]
fn stdio_works_on_an_inherited_connection() {
    let bed = bed();
    let _server = serve(&bed, "stdio");
    let mut stream = connect(&bed, PORT);
    for line in ["one\n", "two\n"] {
        stream.write_all(line.as_bytes()).expect("connected");
        let mut got = [0; 4];
        stream.read_exact(&mut got).expect("it comes back");
        assert_eq!(got, line.as_bytes());
    }
    assert_ends_in_order(stream);
}

#[test]
fn a_connection_is_served_by_who_it_was_sent_to() {
    let bed = bed();
    for way in ["sent", "sent_to_stranger", "multiprocessed"] {
        echoes(&bed, way, 4);
    }
}

#[test]
fn a_connection_is_served_by_who_took_it() {
    echoes(&bed(), "fetched", 4);
}

/// Every process with a bound socket may call `listen`, and all of them accept afterwards, as workers of Python's
/// servers do.
#[test]
fn a_bound_socket_is_listened_on_by_all_who_have_it() {
    const WORKERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/workers.py");
    let ipv4 = bed();
    let ipv6 = bed().over_ipv6();
    for bed in [&ipv4, &ipv6] {
        for (way, servers) in [
            ("fork", 3),
            ("spawn", 3),
            ("sent", 2),
            ("waits", 2),
            ("receiver", 2),
        ] {
            for stack in STACKS {
                eprintln!("{way}, {stack:?}");
                let address = bed.server.address.to_string();
                let words = [WORKERS, &address, &PORT.to_string(), way];
                let mut server = bed.serve(stack, PORT, PYTHON, &words).expect("it listens");
                let said = (0..servers).map(|_| {
                    let mut stream = connect(bed, PORT);
                    let mut line = String::new();
                    let mut reader = BufReader::new(&mut stream);
                    reader.read_line(&mut line).expect("one serves");
                    line
                });
                let pids: HashSet<String> = said.collect();
                assert_eq!(pids.len(), servers, "{way}: each serves one");
                assert!(server.wait(Duration::from_secs(10)), "{way}");
            }
        }
        let accepted = counter(bed, Side::Server, "server", "passive_opens");
        assert_eq!(accepted, 12, "they are Portolan's");
    }
}

#[test]
fn what_was_set_on_a_bound_socket_comes_with_it() {
    const OPTIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/bound_options.py");
    let bed = bed();
    let (address, port) = (bed.server.address.to_string(), PORT.to_string());
    for (way, shown) in [
        ("sent", "[True, True, False]"),
        ("set_later", "[True, True, False]\n[True, True, True]"),
        ("execed", "[True, True, False]"),
    ] {
        for stack in STACKS {
            let mut program = bed.command(Side::Server, stack, PYTHON);
            let program = program.args([OPTIONS, way, &address, &port]);
            let said = run(program).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(said.trim(), shown, "{way}, {stack:?}");
        }
    }
}

/// A session that is passed on is relayed at first, since its receiver may not run Portolan.
#[test]
fn a_session_that_one_process_is_left_with_is_no_longer_relayed() {
    for way in ["execed", "started", "sent", "kept", "multiprocessed"] {
        let bed = bed();
        let _server = serve(&bed, way);
        let mut stream = connect(&bed, PORT);
        let is_back = eventually(Duration::from_secs(10), || {
            exchange(&mut stream, 1, 5000);
            counter(&bed, Side::Server, "server", "relays_ended") == 1
        });
        assert!(is_back, "{way}");
        exchange(&mut stream, 4, 200_000);
        assert_ends_in_order(stream);
    }
}

/// It becomes the kernel's socket, with the same port.
#[test]
fn a_udp_socket_goes_on_after_exec() {
    let bed = bed();
    let _server = serve(&bed, "datagrams");
    let client = bed
        .namespace(Side::Client)
        .enter(|| UdpSocket::bind((bed.client.address, 0)).expect("a socket"));
    client
        .set_read_timeout(Some(Duration::from_millis(200)))
        .expect("a time-out");
    let mut got = [0; 16];
    assert!(eventually(Duration::from_secs(10), || {
        client.send_to(b"hello", bed.endpoint(PORT)).expect("sent");
        client
            .recv(&mut got)
            .is_ok_and(|length| &got[..length] == b"hello")
    }));
}
