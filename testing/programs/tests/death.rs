//! Killed programs and servers: peers are notified promptly, and no state is left over.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::{PYTHON, Steps, bed, eventually, live_sessions, sessions_in};
use rustix::process::Signal;

const PORT: u16 = 7010;
const PROMPTLY: Duration = Duration::from_secs(3);

/// A connection between a program that will be killed and one that watches for its end.
struct Scene {
    victim: Background,
    watcher: Background,
}

/// Connects the host `victim`, whose program uses Portolan, to a watcher on the stack `watcher`.
fn scene(bed: &Bed, victim: Side, watcher: Stack) -> Scene {
    let endpoint = bed.endpoint(PORT).to_string();
    let start = |side, stack, role: &str| {
        let mut command = bed.command(side, stack, "portolan-traffic");
        command
            .args([role, &endpoint])
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        if side == Side::Server {
            command.arg("--listen");
        }
        Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"))
    };
    let role = |side| {
        if side == victim {
            ("hold", Stack::Portolan)
        } else {
            ("watch", watcher)
        }
    };
    let (server_role, server_stack) = role(Side::Server);
    let server = start(Side::Server, server_stack, server_role);
    assert!(
        eventually(PROMPTLY, || bed.is_listening(PORT)),
        "nobody listens"
    );
    let (client_role, client_stack) = role(Side::Client);
    let client = start(Side::Client, client_stack, client_role);
    await_one_in("ESTAB", bed, victim);
    std::thread::sleep(Duration::from_millis(300));
    match victim {
        Side::Server => Scene {
            victim: server,
            watcher: client,
        },
        Side::Client => Scene {
            victim: client,
            watcher: server,
        },
    }
}

impl Scene {
    fn kill(&self) {
        self.victim.signal(Signal::KILL).expect("the victim runs");
    }

    fn assert_end_seen(mut self, case: &str) {
        assert!(self.watcher.wait(PROMPTLY), "{case}: the peer saw no end");
        let report = self.watcher.finish();
        assert!(
            report.contains("reset") || report.contains("eof"),
            "{case}: {report}"
        );
    }
}

#[test]
fn the_peer_of_a_killed_program_sees_the_end() {
    let bed = bed();
    for victim in [Side::Client, Side::Server] {
        for watcher in [Stack::Kernel, Stack::Portolan] {
            let scene = scene(&bed, victim, watcher);
            scene.kill();
            scene.assert_end_seen(&format!("{victim:?} killed, {watcher:?} watches"));
        }
    }
}

#[test]
fn nothing_stays_after_all_programs_are_killed() {
    let bed = bed();
    let scene = scene(&bed, Side::Client, Stack::Portolan);
    for program in [&scene.victim, &scene.watcher] {
        program.signal(Signal::KILL).expect("it runs");
    }
    for side in [Side::Client, Side::Server] {
        let gone = eventually(PROMPTLY, || live_sessions(&bed, side) == 0);
        assert!(gone, "{side:?}: {:?}", bed.portolan(side, &["ss", "-a"]));
    }
}

#[test]
fn a_new_server_serves_after_the_old_one_was_killed() {
    let mut bed = bed();
    let mut scene = scene(&bed, Side::Server, Stack::Kernel);
    let daemon = bed.daemon(Side::Server).take().expect("it runs");
    daemon.signal(Signal::KILL).expect("it runs");
    drop(daemon);
    scene.kill();
    scene.victim.wait(PROMPTLY);
    bed.start_daemon(Side::Server)
        .unwrap_or_else(|error| panic!("{error}"));
    scene.assert_end_seen("server and program killed");
    let endpoint = bed.endpoint(PORT + 1).to_string();
    let _greet = bed
        .serve(
            Stack::Portolan,
            PORT + 1,
            "portolan-traffic",
            &["greet", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let report = portolan_programs::client(
        &bed,
        Stack::Portolan,
        "portolan-traffic",
        &["connect", &endpoint, "--count", "10", "--seconds", "5"],
    );
    assert!(report.contains("\"connections\":10"), "{report}");
}

/// Waits until one session is in a state; a busy machine takes some time.
fn await_one_in(state: &str, bed: &Bed, side: Side) {
    let is_there = || sessions_in(bed, side, state) == 1;
    assert!(eventually(Duration::from_secs(20), is_there), "{state}");
}

fn kill_daemon(bed: &mut Bed, side: Side) {
    let daemon = bed.daemon(side).take().expect("it runs");
    daemon.signal(Signal::KILL).expect("it runs");
}

#[test]
fn a_transfer_outlives_both_servers() {
    let mut bed = bed();
    let endpoint = bed.endpoint(PORT + 2).to_string();
    let _sink = bed
        .serve(
            Stack::Portolan,
            PORT + 2,
            "portolan-traffic",
            &["sink", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let mut command = bed.command(Side::Client, Stack::Portolan, "portolan-traffic");
    command
        .args(["bulk", &endpoint, "--seconds", "2"])
        .stdout(Stdio::piped());
    let mut bulk =
        Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"));
    await_one_in("ESTAB", &bed, Side::Client);
    await_one_in("ESTAB", &bed, Side::Server);
    kill_daemon(&mut bed, Side::Client);
    kill_daemon(&mut bed, Side::Server);
    assert!(bulk.wait(Duration::from_secs(10)), "the transfer hangs");
    // It prints a report only if the sink has read exactly the bytes sent, to the end.
    let report = bulk.finish();
    assert!(report.contains("bytes"), "{report}");
}

/// Greets three connections, and prints how the first one ends.
const GREETER: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
taken = []
for _ in range(3):
    taken.append(listener.accept()[0])
    taken[-1].sendall(b"!")
print("the end is", taken[0].recv(10))
"#;

/// Opens one connection before the server's death and two after it, one of them on an old socket.
const SURVIVOR: &str = r#"
import socket, sys, time
peer = (sys.argv[1], int(sys.argv[2]))
old = socket.create_connection(peer)
assert old.recv(1) == b"!"
idle = socket.socket()
print("ready", flush=True)
sys.stdin.readline()
for new in (idle, socket.socket()):
    new.connect(peer)
    assert new.recv(1) == b"!"
old.close()
print("done", flush=True)
time.sleep(1)
"#;

/// Python's arguments to run a script with the tests' endpoint.
fn arguments(script: &str, bed: &Bed) -> [String; 4] {
    let endpoint = bed.endpoint(PORT + 3);
    let (address, port) = (endpoint.ip().to_string(), endpoint.port().to_string());
    ["-c".to_owned(), script.to_owned(), address, port]
}

fn python(mut command: Command, script: &str, bed: &Bed) -> std::process::Child {
    command
        .args(arguments(script, bed))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python runs")
}

#[test]
fn without_its_server_a_program_ends_its_sessions_and_opens_the_kernels() {
    let mut bed = bed();
    let mut greeter = bed.command(Side::Server, Stack::Kernel, PYTHON);
    let mut greeter = Steps::start(greeter.args(arguments(GREETER, &bed)));
    greeter.await_line("ready");
    let launcher = bed.tools().portolan.display().to_string();
    let mut survivor = bed.command(Side::Client, Stack::Kernel, &launcher);
    survivor.args(["run", "--", PYTHON]);
    let mut survivor = python(survivor, SURVIVOR, &bed);
    let mut line = String::new();
    let said = survivor.stdout.as_mut().expect("a pipe");
    BufReader::new(said).read_line(&mut line).expect("text");
    assert_eq!(line, "ready\n");
    assert_eq!(live_sessions(&bed, Side::Client), 1);
    kill_daemon(&mut bed, Side::Client);
    let mut words = survivor.stdin.take().expect("a pipe");
    words.write_all(b"go on\n").expect("it reads");

    greeter.await_line("the end is b''");
    let survivor = survivor.wait_with_output().expect("it ends");
    let complaints = String::from_utf8_lossy(&survivor.stderr);
    assert!(survivor.status.success(), "{complaints}");
    assert_eq!(complaints.lines().count(), 1, "{complaints}");
    assert!(complaints.contains("the server has gone"), "{complaints}");
}

/// Accepts by epoll, and prints the number of spurious wake-ups in a second without a server; then greets one more
/// client.
const PATIENT: &str = r#"
import select, socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
listener.setblocking(False)
events = select.epoll()
events.register(listener, select.EPOLLIN)
def accept(until):
    woken = 0
    while time.monotonic() < until:
        for _ in events.poll(max(until - time.monotonic(), 0)):
            woken += 1
            try:
                return listener.accept()[0], woken
            except BlockingIOError:
                pass
    return None, woken
accept(time.monotonic() + 5)[0].sendall(b"!")
print("ready", flush=True)
sys.stdin.readline()
print(accept(time.monotonic() + 1)[1], flush=True)
accepted = accept(time.monotonic() + 5)[0]
if accepted:
    accepted.sendall(b"!")
print("greeted" if accepted else "nobody", flush=True)
"#;

/// The same by blocking calls, without waiting for readiness first.
const BLOCKING: &str = r#"
import socket, sys, threading, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
listener.accept()[0].sendall(b"!")
print("ready", flush=True)
failed = 0
greeted = threading.Event()
def serve():
    global failed
    while True:
        try:
            listener.accept()[0].sendall(b"!")
            greeted.set()
        except OSError:
            failed += 1
threading.Thread(target=serve, daemon=True).start()
sys.stdin.readline()
time.sleep(1)
print(failed, flush=True)
print("greeted" if greeted.wait(5) else "nobody", flush=True)
"#;

/// Runs a listener whose server ends; returns the number of failed attempts, and the result of one more client.
fn outlive(bed: &mut Bed, (script, options): (&str, &[&str]), end: Signal) -> (u32, String) {
    let launcher = bed.tools().portolan.display().to_string();
    let mut listener = bed.command(Side::Server, Stack::Kernel, &launcher);
    listener.arg("run").args(options).args(["--", PYTHON]);
    let mut listener = python(listener, script, bed);
    let mut words = listener.stdin.take().expect("a pipe");
    let mut said = BufReader::new(listener.stdout.take().expect("a pipe")).lines();
    let mut next = || said.next().expect("a line").expect("text");
    let greet = |bed: &Bed| {
        let client = bed.command(Side::Client, Stack::Kernel, PYTHON);
        python(client, ONE_CLIENT, bed)
    };
    await_one_in("LISTEN", bed, Side::Server);
    let first = greet(bed).wait_with_output().expect("it ends");
    assert!(first.status.success(), "{first:?}");
    assert_eq!(next(), "ready");
    let daemon = bed.daemon(Side::Server).take().expect("it runs");
    daemon.signal(end).expect("it runs");
    drop(daemon);
    words.write_all(b"go on\n").expect("it reads");
    let failures = next().parse().expect("a number");
    let mut second = greet(bed);
    let greeted = next();
    second.kill().expect("it is a child");
    second.wait().expect("it is a child");
    listener.kill().expect("it is a child");
    listener.wait().expect("it is a child");
    (failures, greeted)
}

const ONE_CLIENT: &str = r#"
import socket, sys
client = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
assert client.recv(1) == b"!"
"#;

#[test]
fn a_listener_waits_quietly_when_its_server_has_gone_and_the_kernel_listens_for_it() {
    for mut bed in [bed(), bed().over_ipv6()] {
        for script in [PATIENT, BLOCKING] {
            let (failures, greeted) = outlive(&mut bed, (script, &[]), Signal::TERM);
            assert!(failures <= 2, "{failures} calls in vain");
            assert_eq!(greeted, "greeted");
            bed.start_daemon(Side::Server)
                .unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

#[test]
fn a_listener_that_may_not_be_the_kernels_waits_quietly_when_its_server_has_gone() {
    for script in [PATIENT, BLOCKING] {
        let mut bed = bed();
        let (failures, greeted) = outlive(&mut bed, (script, &["--require"]), Signal::KILL);
        assert!(failures <= 2, "{failures} calls in vain");
        assert_eq!(greeted, "nobody");
    }
}

#[test]
fn sessions_end_when_their_server_stops_for_good() {
    let mut bed = bed();
    let scene = scene(&bed, Side::Server, Stack::Portolan);
    let daemon = bed.daemon(Side::Client).take().expect("it runs");
    daemon.signal(Signal::INT).expect("it runs");
    scene.assert_end_seen("the watcher's server has stopped");
}

#[test]
fn sessions_go_on_when_another_server_takes_the_place_of_a_dead_one_and_end_with_their_peer() {
    let mut bed = bed();
    let mut scene = scene(&bed, Side::Server, Stack::Portolan);
    kill_daemon(&mut bed, Side::Client);
    assert!(!scene.watcher.wait(PROMPTLY), "nothing happens at first");
    bed.start_daemon(Side::Client)
        .unwrap_or_else(|error| panic!("{error}"));
    await_one_in("ESTAB", &bed, Side::Client);
    assert!(!scene.watcher.wait(PROMPTLY), "it goes on");
    scene.kill();
    scene.assert_end_seen("its peer was killed");
}

#[test]
fn sessions_end_when_the_next_server_cannot_take_over_the_tables() {
    let mut bed = bed();
    let mut scene = scene(&bed, Side::Server, Stack::Portolan);
    kill_daemon(&mut bed, Side::Client);
    assert!(!scene.watcher.wait(PROMPTLY), "nothing happens at first");
    bed.set_settings("[limits]\ntime_wait = 1000");
    bed.start_daemon(Side::Client)
        .unwrap_or_else(|error| panic!("{error}"));
    scene.assert_end_seen("tables of another size");
}
