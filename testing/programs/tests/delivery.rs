//! The delivery forms (MB §4.1): streams and messages are exact in each of them.

use std::fs;
use std::process::Command;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PYTHON, Steps, bed, counter};

const TRAFFIC: &str = "portolan-traffic";
const PORT: u16 = 7070;

fn start(bed: &Bed, form: &str, arguments: &[&str]) -> Background {
    let mut command = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
    command.env("PORTOLAN_DELIVERY", form).args(arguments);
    command.stdout(std::process::Stdio::null());
    bed.serve_command(PORT, TRAFFIC, &mut command).unwrap()
}

fn client(bed: &Bed, form: &str) -> Command {
    let mut command = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
    command.env("PORTOLAN_DELIVERY", form);
    command
}

fn by_tap(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "receive", "delivered_on_tap")
}

fn by_ring(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "receive", "delivered")
}

fn ping(bed: &Bed, form: &str, protocol: &str) {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut ping = client(bed, form);
    ping.args(["ping", protocol, &endpoint, "--count", "2000", "--spin"]);
    run(&mut ping).unwrap();
}

#[test]
fn a_program_that_wants_messages_gets_each_packet_by_its_tap() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let arguments = ["echo", "tcp", &endpoint, "--spin"];
    for (form, is_by_tap) in [("shm", false), ("ipc", true)] {
        let _echo = start(&bed, form, &arguments);
        let before = [Side::Client, Side::Server].map(|side| by_tap(&bed, side));
        // Both programs spin.
        ping(&bed, form, "tcp");
        let after = [Side::Client, Side::Server].map(|side| by_tap(&bed, side));
        for (before, after) in before.into_iter().zip(after) {
            assert_eq!(
                after - before >= 2000,
                is_by_tap,
                "{form}: {}",
                after - before
            );
        }
    }
    // A connected UDP socket uses the tap, too; the other end's is not connected.
    let mut echo = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
    let _echo = Background::start(echo.args(["echo", "udp", &endpoint, "--spin"])).unwrap();
    let before = by_tap(&bed, Side::Client);
    ping(&bed, "ipc", "udp");
    assert!(by_tap(&bed, Side::Client) - before >= 2000);
}

#[test]
fn streams_are_exact_in_each_form() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let (file, copy) = (bed.file("sent"), bed.file("came-back"));
    let bytes: Vec<u8> = (0..8_000_000u32)
        .map(|i| (i.wrapping_mul(i) >> 7) as u8)
        .collect();
    fs::write(&file, &bytes).unwrap();
    for form in ["ipc", "server", "shm"] {
        let _mirror = start(&bed, form, &["mirror", &endpoint]);
        let mut send = client(&bed, form);
        run(send.args(["send", &endpoint]).args([&file, &copy])).unwrap();
        assert!(
            fs::read(&copy).unwrap() == bytes,
            "{form}: the stream was damaged"
        );
    }
}

#[test]
fn what_is_for_the_server_stays_there() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let _echo = start(&bed, "server", &["echo", "tcp", &endpoint]);
    let before = [Side::Client, Side::Server].map(|side| moves(&bed, side));
    let mut ping = client(&bed, "server");
    run(ping.args(["ping", "tcp", &endpoint, "--count", "500"])).unwrap();
    let after = [Side::Client, Side::Server].map(|side| moves(&bed, side));
    // To the program with the handshake, and back to the server with the first byte.
    assert_eq!(before.map(|moves| moves + 2), after);
}

fn moves(bed: &Bed, side: Side) -> u64 {
    ["sessions_cached", "sessions_flushed"]
        .map(|name| counter(bed, side, "server", name))
        .iter()
        .sum()
}

#[test]
fn a_socket_and_a_configuration_choose_as_well() {
    let mut bed = Bed::bare(portolan_netns::Bed::veth()).unwrap();
    bed.set_settings("[delivery]\nform = \"ipc\"\n");
    bed.start_daemon(Side::Client).unwrap();
    bed.start_daemon(Side::Server).unwrap();
    let endpoint = bed.endpoint(PORT).to_string();
    let mirror = ["mirror", &endpoint];
    let _mirror = bed.serve(Stack::Portolan, PORT, TRAFFIC, &mirror).unwrap();
    // SO_DELIVERY: one socket in the process's form, one by the ring. Both spin.
    let script = "
import socket, sys
for form in (-1, 0):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, 0x5045, form)
    assert s.getsockopt(socket.SOL_SOCKET, 0x5045) == form
    s.connect((sys.argv[1], int(sys.argv[2])))
    s.setblocking(False)
    for _ in range(300):
        s.send(b'x')
        while True:
            try:
                s.recv(1)
                break
            except BlockingIOError:
                pass
    s.close()
    print(form, flush=True)
    sys.stdin.readline()
";
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    command.args(["-c", script]);
    command.args([endpoint.rsplit_once(':').unwrap().0, &PORT.to_string()]);
    let mut steps = Steps::start(&mut command);
    steps.await_line("-1");
    let (tap, ring) = (by_tap(&bed, Side::Client), by_ring(&bed, Side::Client));
    assert!(
        tap >= 300 && ring < 50,
        "{tap} by the tap, {ring} by the ring"
    );
    steps.go_on();
    steps.await_line("0");
    let more = by_ring(&bed, Side::Client) - ring;
    // All except the segments that arrived while it slept.
    assert!(more >= 100, "{more} by the ring");
}
