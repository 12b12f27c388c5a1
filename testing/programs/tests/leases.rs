//! Connections that programs open from ports under lease, without the server (ADR 31).

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::stream::assert_served;
use portolan_programs::{
    PYTHON, Steps, bed, client, counter, each_pairing, eventually, over_both_families,
    restart_server, serve, sessions_in,
};
use rustix::process::Signal;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/leases.py");
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/delegated.py");
const PORT: u16 = 7095;
const PROMPTLY: Duration = Duration::from_secs(5);

/// Connections that the server opens before it leases ports: see `FIRST` in the fixture.
const BY_SERVER: u64 = 5;

/// An echo server.
fn start_server(bed: &Bed, stack: Stack) -> Background {
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let backlog = "512";
    serve(
        bed,
        stack,
        PORT,
        PYTHON,
        &[SERVER, "blocking", &address, &port, backlog],
    )
}

fn open(bed: &Bed, way: &str, count: usize) {
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let words = [FIXTURE, way, &address, &port, &count.to_string()];
    client(bed, Stack::Portolan, PYTHON, &words);
}

fn of_server(bed: &Bed, name: &str) -> u64 {
    counter(bed, Side::Client, "server", name)
}

fn assert_nothing_is_left(bed: &Bed) {
    let open =
        || sessions_in(bed, Side::Client, "ESTAB") + sessions_in(bed, Side::Client, "SYN-SENT");
    assert!(eventually(PROMPTLY, || open() == 0));
}

#[test]
fn many_connections_take_few_requests() {
    over_both_families(|bed, pairing| {
        if pairing.client != Stack::Portolan {
            return;
        }
        let _server = start_server(bed, pairing.server);
        let before = of_server(bed, "active_opens");
        open(bed, "many", 300);
        let opens = of_server(bed, "active_opens") - before;
        assert!(opens <= BY_SERVER, "{opens} requests");
        assert_nothing_is_left(bed);
    });
}

/// Says whether the timestamps of that many SYNs to a port are of one clock.
const CLOCK: &str = r#"
import socket, struct, sys, time
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
print("ready", flush=True)
offsets = []
while len(offsets) < int(sys.argv[2]):
    packet = packets.recv(100)
    segment = packet[(packet[0] & 15) * 4:]
    if packet[9] != 6 or segment[13] != 2 or segment[2:4] != struct.pack("!H", int(sys.argv[1])):
        continue
    options = segment[20:(segment[12] >> 4) * 4]
    while options[0] != 8:
        options = options[1 if options[0] == 1 else options[1]:]
    offsets.append(struct.unpack("!I", options[2:6])[0] - int(time.monotonic() * 1000) & 0xffffffff)
print("one clock" if max(offsets) - min(offsets) < 1000 else offsets, flush=True)
"#;

#[test]
fn timestamps_never_go_back_whoever_opens_and_whichever_server() {
    const OPENS: usize = 20;
    let mut bed = bed();
    let _server = start_server(&bed, Stack::Kernel);
    let mut command = bed.command(Side::Server, Stack::Kernel, PYTHON);
    command.args(["-c", CLOCK, &PORT.to_string(), &(2 * OPENS).to_string()]);
    let mut clock = Steps::start(&mut command);
    clock.await_line("ready");
    // The first ones by the server.
    open(&bed, "many", OPENS);
    restart_server(&mut bed, Side::Client, Signal::KILL);
    open(&bed, "many", OPENS);
    clock.await_line("one clock");
}

#[test]
fn a_refused_open_is_reported_and_its_socket_is_used_again() {
    let bed = bed();
    let _server = start_server(&bed, Stack::Kernel);
    open(&bed, "refused", 1);
    assert!(of_server(&bed, "active_opens") <= BY_SERVER);
}

#[test]
fn opens_at_once_get_a_port_each() {
    let bed = bed();
    each_pairing(&bed, |bed, pairing| {
        if pairing.client == Stack::Portolan {
            let _server = start_server(bed, pairing.server);
            open(bed, "crowd", 200);
        }
    });
    assert_nothing_is_left(&bed);
}

#[test]
fn threads_get_a_port_each() {
    let bed = bed();
    let _server = start_server(&bed, Stack::Kernel);
    open(&bed, "threads", 60);
    assert_nothing_is_left(&bed);
}

#[test]
fn abandoned_opens_leave_nothing_behind() {
    let bed = bed();
    let _server = start_server(&bed, Stack::Kernel);
    open(&bed, "abandoned", 50);
    assert_nothing_is_left(&bed);
}

/// A client that holds a connection, does `then` with it when it gets a signal, and greets on each that it opens for us.
struct Held {
    listener: TcpListener,
    client: Background,
    stream: TcpStream,
}

fn held(bed: &Bed, then: &str) -> Held {
    let endpoint = bed.endpoint(PORT);
    let listener = bed
        .namespace(Side::Server)
        .enter(|| TcpListener::bind(endpoint))
        .expect("a free port");
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    command
        .args([
            FIXTURE,
            "held",
            &endpoint.ip().to_string(),
            &PORT.to_string(),
        ])
        .env("THEN", then);
    let client = Background::start(&mut command).expect("it starts");
    for _ in 0..BY_SERVER {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut bytes = [0; 4];
        stream.read_exact(&mut bytes).expect("bytes");
        stream.write_all(&bytes).expect("it takes bytes");
        // The client closes first, and has the TIME-WAIT.
        assert_eq!(stream.read(&mut bytes).expect("an end"), 0);
    }
    let stream = greeted(&listener);
    assert_eq!(of_server(bed, "connections_claimed"), 0);
    Held {
        listener,
        client,
        stream,
    }
}

fn greeted(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().expect("a connection");
    stream.set_read_timeout(Some(PROMPTLY)).expect("a time-out");
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting).expect("a greeting");
    stream
}

#[test]
fn a_connection_that_lasts_is_registered() {
    let bed = bed();
    let Held { client, stream, .. } = held(&bed, "serve");
    assert!(eventually(PROMPTLY, || of_server(
        &bed,
        "connections_claimed"
    ) == 1));
    assert_eq!(sessions_in(&bed, Side::Client, "ESTAB"), 1);
    client.signal(Signal::USR1).expect("it runs");
    assert_served(stream);
    assert_nothing_is_left(&bed);
}

#[test]
fn an_unregistered_connection_goes_wherever_its_descriptor_goes() {
    for then in ["fork", "execute", "pass"] {
        let bed = bed();
        let Held {
            listener,
            client,
            stream,
        } = held(&bed, then);
        client.signal(Signal::USR1).expect("it runs");
        let stream = if then == "pass" {
            greeted(&listener)
        } else {
            stream
        };
        assert_served(stream);
        assert!(of_server(&bed, "connections_claimed") >= 1, "{then}");
        assert_nothing_is_left(&bed);
    }
}

#[test]
fn who_holds_the_other_end_hears_that_the_program_was_killed() {
    let bed = bed();
    let Held {
        client, mut stream, ..
    } = held(&bed, "serve");
    client.signal(Signal::KILL).expect("it runs");
    let end = stream.read(&mut [0; 1]).expect_err("no bytes");
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    // The held one, and the last one before it where a lease was there for it: it is in TIME-WAIT.
    let own = BY_SERVER + 1 - of_server(&bed, "active_opens");
    assert_eq!(of_server(&bed, "unregistered_lost"), own);
}

/// The peer does not read until the program has closed the connection, or ended.
#[test]
fn what_a_closed_connection_has_to_send_arrives() {
    for then in ["exit", "close"] {
        let bed = bed();
        let Held {
            mut client,
            mut stream,
            ..
        } = held(&bed, then);
        client.signal(Signal::USR1).expect("it runs");
        assert!(then != "exit" || client.wait(PROMPTLY));
        let returned =
            || of_server(&bed, "unregistered_closed") + of_server(&bed, "connections_claimed");
        assert!(eventually(PROMPTLY, || returned() >= 1), "{then}");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("the end in order");
        assert_eq!(bytes.len(), 1 << 20, "{then}");
    }
}

/// The program registers the connection with the next server.
#[test]
fn an_unregistered_connection_survives_a_restart_of_the_server() {
    for end in [Signal::TERM, Signal::KILL] {
        let mut bed = bed();
        let Held { client, stream, .. } = held(&bed, "serve");
        restart_server(&mut bed, Side::Client, end);
        let adopted = || of_server(&bed, "connections_adopted");
        assert!(eventually(PROMPTLY, || adopted() == 1), "{end:?}");
        client.signal(Signal::USR1).expect("it runs");
        assert_served(stream);
        assert_nothing_is_left(&bed);
    }
}
