//! Connections that the server itself holds when a service manager restarts it, and programs that start meanwhile.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run_within};
use portolan_programs::load::bulk;
use portolan_programs::stream::{assert_echoed, connect_once};
use portolan_programs::{
    PYTHON, Steps, bed, counter, eventually, live_sessions, sockets, status, stop_server,
};
use rustix::net::sockopt;
use rustix::process::Signal;

const PORT: u16 = 7090;
const SOON: Duration = Duration::from_secs(10);
/// How long a peer may rest that has retransmitted in vain in several restarts: the kernel doubles its intervals.
const PATIENCE: Duration = Duration::from_secs(60);

const MANAGER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/manager.py");
const CHAOS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/chaos.py");
const ECHO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/echo.py");
const HELD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/held.py");

/// Talks to [`HELD`] on its own host: by a connection that a child of that has, and by one that nobody has accepted yet.
const WITHIN_HOST: &str = r#"
import socket, sys
held, queued = (socket.create_connection((sys.argv[1], int(sys.argv[2]) + place)) for place in (0, 2))
lines = held.makefile("rw")
queued.sendall(b"early, ")
print("connected", flush=True)
while (line := sys.stdin.readline()) != "\n":
    print(line, file=lines, end="", flush=True)
    print(lines.readline(), end="", flush=True)
queued.sendall(b"late")
queued.shutdown(socket.SHUT_WR)
print(queued.makefile().read(), flush=True)
"#;

#[test]
fn connections_within_the_host_that_the_server_held_go_on() {
    let mut bed = bed();
    start_manager(&mut bed);
    let address = bed.server.address.to_string();
    let start = |arguments: &[&str]| {
        let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
        Steps::start(command.args(arguments))
    };
    let port = PORT.to_string();
    let mut program = start(&[HELD, &address, &port, "/dev/null"]);
    program.await_line("listens");
    let mut asker = start(&["-c", WITHIN_HOST, &address, &port]);
    asker.await_line("connected");
    for turn in 0..4 {
        let word = format!("turn {turn}");
        asker.say(&word);
        asker.await_line(&word);
        renew(&mut bed);
        let log = bed.daemon_log(Side::Server);
        let taken_up = counter(&bed, Side::Server, "server", "connections_taken_up");
        assert_eq!(taken_up, 2, "{turn}: {}\n{log}", sockets(&bed));
        let adopted = || counter(&bed, Side::Server, "server", "connections_adopted");
        assert!(eventually(SOON, || adopted() == 2), "{}", sockets(&bed));
    }
    program.go_on();
    asker.go_on();
    asker.await_line("early, late");
    program.await_line("echoed");
}

/// Under a service manager the next server continues also with what the previous one held itself: connections of programs
/// that share them, of programs that are gone, and those that nobody has accepted yet.
#[test]
fn connections_that_the_server_held_go_on() {
    const LENGTH: usize = 2_000_000;
    const QUEUED: usize = 3;
    let mut bed = bed();
    start_manager(&mut bed);
    let file = bed.file("sent");
    let text: Vec<u8> = (0..LENGTH).map(|at| (at % 251) as u8).collect();
    fs::write(&file, &text).expect("the bed's directory is writable");
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command.arg(HELD).arg(bed.server.address.to_string());
    command.arg(PORT.to_string()).arg(&file);
    let mut program = Steps::start(&mut command);
    program.await_line("listens");

    let loads = [0, 1].map(|_| {
        let stream = connect_once(&bed, PORT);
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        bulk(stream)
    });
    let mut late = connect_once(&bed, PORT + 1);
    late.read_exact(&mut [0; 1]).expect("it sends");
    let mut queued: Vec<TcpStream> = (0..QUEUED).map(|_| connect_once(&bed, PORT + 2)).collect();
    for stream in &mut queued {
        stream.write_all(b"early, ").expect("it is connected");
    }
    let all = loads.len() + 1 + QUEUED;
    let are_there = || live_sessions(&bed, Side::Server) >= all;
    assert!(eventually(SOON, are_there), "{}", sockets(&bed));
    for turn in 0..5 {
        renew(&mut bed);
        let taken_up = counter(&bed, Side::Server, "server", "connections_taken_up");
        let log = bed.daemon_log(Side::Server);
        assert_eq!(taken_up, all as u64, "{turn}: {}\n{log}", sockets(&bed));
        std::thread::sleep(Duration::from_millis(300));
    }
    for load in loads {
        assert!(load.finish() > 0);
    }
    let mut rest = vec![text[0]];
    late.read_to_end(&mut rest).expect("the end");
    assert!(rest == text, "{} of {LENGTH} bytes", rest.len());
    for mut stream in queued {
        program.go_on();
        stream.write_all(b"late").expect("it is connected");
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("it is connected");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the end");
        assert_eq!(answer, "early, late");
        program.await_line("echoed");
    }
}

/// Connections of whose descriptors programs are made while the server is being restarted: the first is this program's
/// until then, and the second a shell's, from which nothing has been asked yet.
const STARTS_PROGRAMS: &str = r#"
import socket, subprocess, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
own, of_shell = (listener.accept()[0] for _ in range(2))
number = of_shell.fileno()
command = ["sh", "-c", f"read line; exec cat <&{number} >&{number}"]
shell = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
of_shell.close()
own.sendall(b"?")
print("accepted", flush=True)
sys.stdin.readline()
shell.stdin.write(b"go\n")
shell.stdin.flush()
# By fork, not vfork.
subprocess.Popen(["cat"], stdin=own, stdout=own, preexec_fn=lambda: None)
own.close()
print("started", flush=True)
sys.stdin.readline()
"#;

#[test]
fn programs_that_start_while_there_is_no_server_have_their_connections() {
    let (mut bed, mut program) = managed(STARTS_PROGRAMS);
    let mut streams = [connect_once(&bed, PORT), connect_once(&bed, PORT)];
    program.await_line("accepted");
    streams[0].read_exact(&mut [0; 1]).expect("it is connected");

    without_server(&mut bed, || program.go_on());
    program.await_line("started");
    for stream in &mut streams {
        assert_echoed(stream, b"word");
    }
}

/// Connects while there is no server, and has a program do so that starts meanwhile.
const CONNECTS: &str = r#"
import socket, subprocess, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
address = (sys.stdin.readline().strip(), int(sys.argv[2]))
connection = socket.create_connection(address)
connection.sendall(b"a")
code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(b'b')"
subprocess.run([sys.executable, "-c", code, address[0], str(address[1])], check=True)
print("connected", flush=True)
sys.stdin.readline()
"#;

#[test]
fn new_sockets_wait_for_the_next_server() {
    let (mut bed, mut program) = managed(CONNECTS);
    let there = bed.namespace(Side::Client);
    let peer = there.enter(|| TcpListener::bind((bed.client.address, PORT)));
    let peer = peer.expect("the port is free");
    let address = bed.client.address.to_string();
    without_server(&mut bed, || program.say(&address));
    program.await_line("connected");
    for byte in [b'a', b'b'] {
        let (mut stream, _) = peer.accept().expect("it connects");
        let mut received = [0; 1];
        stream.read_exact(&mut received).expect("it is connected");
        assert_eq!(received, [byte]);
    }
    let opened = counter(&bed, Side::Server, "server", "active_opens");
    assert_eq!(opened, 2, "connections are Portolan's");
}

/// Closes two connections while there is no server, far more than their peer reads at once after them: one that the server
/// has opened, and, after some others, one from a port under lease. Then exits, or stays.
const CLOSES: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
then = sys.stdin.readline().strip()
address = (sys.stdin.readline().strip(), int(sys.argv[2]))
connections = [socket.create_connection(address) for _ in range(8)]
print("connected", flush=True)
sys.stdin.readline()
for connection in connections:
    connection.setblocking(False)
    sent = connection.send(bytes(200_000))
    assert sent == 200_000, sent
    connection.close()
if then == "stay":
    print("closed", flush=True)
    sys.stdin.readline()
"#;

#[test]
fn what_is_closed_without_a_server_arrives() {
    /// After that a server resets what nobody has named.
    const UNTIL_RESET: Duration = Duration::from_secs(11);
    for then in ["stay", "exit"] {
        let (mut bed, mut program) = managed(CLOSES);
        let there = bed.namespace(Side::Client);
        let peer = there.enter(|| {
            let listener = TcpListener::bind((bed.client.address, PORT))?;
            sockopt::set_socket_recv_buffer_size(&listener, 8192)?;
            Ok::<_, std::io::Error>(listener)
        });
        let peer = peer.expect("the port is free");
        program.say(then);
        program.say(&bed.client.address.to_string());
        let accept = |_| peer.accept().expect("it connects").0;
        let streams: Vec<TcpStream> = (0..8).map(accept).collect();
        program.await_line("connected");
        without_server(&mut bed, || program.go_on());
        std::thread::sleep(UNTIL_RESET);
        for mut stream in streams {
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).expect("the end in order");
            assert_eq!(bytes.len(), 200_000, "{then}");
        }
    }
}

/// Leaves a connection that has not been used to a child, which answers later, without a request to the server.
const ANSWERS_LATER: &str = r#"
import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
listener.setsockopt(socket.SOL_SOCKET, 0x5043, 1)
print("listens", flush=True)
connection = listener.accept()[0]
go, said = os.pipe()
if os.fork() == 0:
    os.read(go, 1)
    connection.sendall(b"answer")
    os._exit(0)
connection.close()
print("accepted", flush=True)
sys.stdin.readline()
os.write(said, b"!")
sys.stdin.readline()
"#;

#[test]
fn a_child_answers_by_the_next_server() {
    let (mut bed, mut program) = managed(ANSWERS_LATER);
    let mut stream = connect_once(&bed, PORT);
    program.await_line("accepted");
    for _ in 0..2 {
        renew(&mut bed);
    }
    program.go_on();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the end");
    assert_eq!(answer, "answer");
}

/// Processes fork, copy, pass on, inherit and close connections at random, and are killed, while one server follows another.
#[test]
fn no_byte_of_a_chaos_is_lost_in_restarts() {
    const LINES: &str = "40";
    const STEPS: &str = "1000";
    let mut bed = bed();
    let _echo = echo_beside_manager(&mut bed);
    let [address, port] = peer(&bed);
    let mut chaos = bed.command(Side::Server, Stack::Portolan, PYTHON);
    chaos.args([CHAOS, "5", LINES, STEPS, &address, &port]);
    let said = restart_meanwhile(&mut bed, chaos);
    assert!(said.trim_end().ends_with("lines"), "{said}");
    let is_over = || live_sessions(&bed, Side::Server) == 0;
    assert!(eventually(PATIENCE, is_over), "{}", sockets(&bed));
}

/// Opens and uses connections for some seconds, and keeps some. Says how many there were, and how long the slowest took, in
/// seconds.
const OPENS: &str = r#"
import socket, sys, time
address, until = (sys.argv[1], int(sys.argv[2])), time.monotonic() + 8
kept, count, slowest = [], 0, 0
def use(connection):
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
while (start := time.monotonic()) < until:
    connection = socket.create_connection(address)
    use(connection)
    slowest = max(slowest, time.monotonic() - start)
    count += 1
    if count % 20 == 0:
        kept.append(connection)
    if len(kept) > 10:
        use(kept[0])
        use(kept.pop(5))
time.sleep(11)
for connection in kept:
    use(connection)
print(count, slowest)
"#;

#[test]
fn connections_are_opened_all_the_time_in_restarts() {
    let mut bed = bed();
    let _echo = echo_beside_manager(&mut bed);
    let mut program = bed.command(Side::Server, Stack::Portolan, PYTHON);
    program.args(["-c", OPENS]).args(peer(&bed));
    let said = restart_meanwhile(&mut bed, program);
    println!("connections, and the slowest: {said}");
    let [count, slowest] = numbers(&said);
    assert!(count > 100.0 && slowest < 2.0, "{said}");
}

/// Accepts connections in several processes, each of which answers a byte and closes. What `accept` says ends a process.
const ACCEPTS: &str = r#"
import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=200)
for _ in range(int(sys.argv[3]) - 1):
    if os.fork() == 0:
        break
else:
    print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    try:
        connection.sendall(connection.recv(1))
    except ConnectionResetError:
        pass
    connection.close()
"#;

/// Has such connections for some seconds. Says how many there were, how many failed, and how long the slowest took, in
/// seconds.
const COMES: &str = r#"
import socket, sys, threading, time
address, until = (sys.argv[1], int(sys.argv[2])), time.monotonic() + 6
times, failed = [], []
def come():
    while (start := time.monotonic()) < until:
        try:
            with socket.create_connection(address) as connection:
                connection.sendall(b"x")
                if connection.recv(2) != b"x":
                    raise ConnectionResetError
        except (ConnectionRefusedError, ConnectionResetError) as error:
            failed.append(error)
            time.sleep(0.001)
            continue
        times.append(time.monotonic() - start)
threads = [threading.Thread(target=come) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(times), len(failed), max(times))
"#;

/// The kernel listens for a program while there is no server.
#[test]
fn connections_come_all_the_time_in_restarts() {
    for processes in ["1", "3"] {
        let mut bed = bed();
        start_manager(&mut bed);
        let [address, port] = [bed.server.address.to_string(), PORT.to_string()];
        let launcher = bed.tools().portolan.display().to_string();
        let mut command = bed.command(Side::Server, Stack::Kernel, &launcher);
        command.args([
            "run", "--", PYTHON, "-c", ACCEPTS, &address, &port, processes,
        ]);
        let mut program = Steps::start(&mut command);
        program.await_line("listens");
        let mut clients = bed.command(Side::Client, Stack::Kernel, PYTHON);
        clients.args(["-c", COMES, &address, &port]);
        let said = restart_meanwhile(&mut bed, clients);
        println!("by {processes}: connections, failed, the slowest: {said}");
        let [count, failed, slowest] = numbers(&said);
        // Those in the very moment in which one stack takes the port over from the other.
        assert!(count > 1000.0 && failed < count / 100.0, "{said}");
        // The peer sends a SYN that is lost again after a second.
        assert!(slowest < 1.0, "{said}");
    }
}

fn numbers<const COUNT: usize>(said: &str) -> [f64; COUNT] {
    let words = said.split_whitespace().map(|word| word.parse());
    let numbers: Result<Vec<f64>, _> = words.collect();
    let numbers = numbers.ok().and_then(|numbers| numbers.try_into().ok());
    numbers.unwrap_or_else(|| panic!("{said}"))
}

/// Where [`echo_beside_manager`] echoes.
fn peer(bed: &Bed) -> [String; 2] {
    [bed.client.address.to_string(), PORT.to_string()]
}

/// Starts a server that echoes on the other host, on the kernel's stack, and a service manager.
fn echo_beside_manager(bed: &mut Bed) -> Background {
    start_manager(bed);
    let mut echo = bed.command(Side::Client, Stack::Kernel, PYTHON);
    let echo = Background::start(echo.args([ECHO, "asyncio"]).args(peer(bed)))
        .unwrap_or_else(|error| panic!("{error}"));
    let endpoint = SocketAddr::new(bed.client.address, PORT);
    let listens = || {
        let there = bed.namespace(Side::Client);
        there.enter(|| TcpStream::connect(endpoint)).is_ok()
    };
    assert!(eventually(SOON, listens), "nobody echoes");
    echo
}

/// Has one server follow another while a program runs, from when it has connections. Returns what the program says.
fn restart_meanwhile(bed: &mut Bed, mut program: Command) -> String {
    const LIMIT: Duration = Duration::from_secs(120);
    const BETWEEN: Duration = Duration::from_millis(300);
    let mut restarts = 0;
    let said = std::thread::scope(|scope| {
        let program = scope.spawn(|| run_within(&mut program, LIMIT));
        assert!(eventually(SOON, || live_sessions(bed, Side::Server) > 0));
        while !program.is_finished() {
            renew(bed);
            restarts += 1;
            std::thread::sleep(BETWEEN);
        }
        program.join().expect("it does not panic")
    });
    let said = said.unwrap_or_else(|error| panic!("after {restarts} restarts: {error}"));
    println!("{restarts} restarts");
    assert!(restarts >= 5, "{restarts} restarts");
    said
}

/// While this file is there no server starts.
const GATE: &str = "gate";

/// Makes a bed whose server has a service manager, and starts a program that listens on [`PORT`].
fn managed(code: &str) -> (Bed, Steps) {
    let mut bed = bed();
    start_manager(&mut bed);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command.args(["-c", code, &bed.server.address.to_string()]);
    let mut program = Steps::start(command.arg(PORT.to_string()));
    program.await_line("listens");
    (bed, program)
}

/// Replaces the server of the server host by a service manager that starts one.
fn start_manager(bed: &mut Bed) {
    stop_server(bed, Side::Server, Signal::TERM);
    let (notify, server) = (bed.file("notify"), bed.tools().portoland.clone());
    let gated = format!(
        "while [ -e '{}' ]; do sleep 0.01; done\nexec '{}' \"$@\"",
        bed.file(GATE).display(),
        server.display()
    );
    let gated = script(bed, "gated", &gated);
    let words = [PYTHON.as_ref(), MANAGER.as_ref(), &*notify, &*gated];
    let words = words.map(|word: &Path| format!("'{}'", word.display()));
    let managed = script(bed, "managed", &format!("exec {} \"$@\"", words.join(" ")));
    bed.start_daemon_of(Side::Server, &managed)
        .unwrap_or_else(|error| panic!("{error}"));
}

fn script(bed: &Bed, name: &str, text: &str) -> PathBuf {
    let path = bed.file(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("the bed's directory is writable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
    path
}

/// Has the service manager restart the server of the server host.
fn renew(bed: &mut Bed) {
    let before = server_pid(bed);
    signal_manager(bed);
    let is_new = || server_pid(bed).is_some_and(|pid| Some(pid) != before);
    assert!(eventually(SOON, is_new), "{}", bed.daemon_log(Side::Server));
}

/// As [`renew`], but the next server starts half a second after `act`.
fn without_server(bed: &mut Bed, act: impl FnOnce()) {
    let gate = bed.file(GATE);
    fs::write(&gate, "").expect("the bed's directory is writable");
    signal_manager(bed);
    assert!(eventually(SOON, || server_pid(bed).is_none()));
    act();
    std::thread::sleep(Duration::from_millis(500));
    fs::remove_file(&gate).expect("it is there");
}

fn signal_manager(bed: &mut Bed) {
    let manager = bed.daemon(Side::Server).as_mut().expect("it runs");
    manager.signal(Signal::HUP).expect("it runs");
}

fn server_pid(bed: &Bed) -> Option<u64> {
    status(bed)["pid"].as_u64()
}
