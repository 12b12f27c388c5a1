//! Programs across restarts of the server: their connections go on, and listeners and bound sockets are Portolan's again
//! with the next server, whether the previous one was stopped or killed.
//!
//! `PORTOLAN_TEST_RESTARTS` sets the number of restarts (20); every twentieth server is of the build
//! `PORTOLAN_TEST_OTHER_BUILD`, if that is set to the path of a `portoland`.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::load::{Iperf, browsing, bulk, pinging, pipelining};
use portolan_programs::stream::{assert_echoed, connect_once};
use portolan_programs::{
    PYTHON, Steps, bed, counter, eventually, file, live_sessions, public_programs, restart_server,
    serve, sessions_in, sockets, start_server, status, stop_server,
};
use portolan_sys::namespace::control_path;
use rustix::process::{Pid, Signal, kill_process};

const REDIS: u16 = 6379;
const NGINX: u16 = 8084;
const PORT: u16 = 7090;
const RESTARTS: usize = 20;
/// Every so many servers are of the other build.
const OTHERS: usize = 20;
const SOON: Duration = Duration::from_secs(10);
/// Until a program has reported what it has counted.
const REPORT: Duration = Duration::from_millis(300);
/// How long after the start of a server a new connection may take until it is Portolan's; occasionally more if the
/// machine is busy.
const AT_ONCE: Duration = Duration::from_millis(500);
/// An answer that had to be sent again takes at least twice this long.
const NOT_SENT_AGAIN: Duration = Duration::from_millis(100);
/// How long requests are measured before the first restart.
const WHILE: Duration = Duration::from_secs(1);
/// Descriptors that a process opens on first use, at any time: one for each waiting thread, and one or two copies of
/// the connection to the server. A leak would grow with each restart.
const LAZY: usize = 3;

/// Ends the server of the server host, and starts the next one.
fn restart(bed: &mut Bed, end: Signal) {
    restart_server(bed, Side::Server, end);
}

fn restarts() -> usize {
    let chosen = std::env::var("PORTOLAN_TEST_RESTARTS").ok();
    chosen.map_or(RESTARTS, |count| count.parse().expect("a number"))
}

/// As [`restart`], by SIGTERM and SIGKILL in turns, now and then with a server of the other build.
fn restart_in_turn(bed: &mut Bed, turn: usize) {
    let other =
        std::env::var_os("PORTOLAN_TEST_OTHER_BUILD").filter(|_| turn % OTHERS == OTHERS - 1);
    stop(bed, [Signal::TERM, Signal::KILL][turn % 2]);
    match other {
        Some(program) => bed
            .start_daemon_of(Side::Server, Path::new(&program))
            .unwrap_or_else(|error| panic!("{error}")),
        None => start_server(bed, Side::Server),
    }
}

fn stop(bed: &mut Bed, end: Signal) {
    stop_server(bed, Side::Server, end);
}

/// Returns the answer to a line sent from the kernel's stack of the other host.
fn ask(bed: &Bed, port: u16, line: &str) -> std::io::Result<String> {
    let endpoint = bed.endpoint(port);
    bed.namespace(Side::Client).enter(|| {
        // A SYN that passed the filter just before the listener's row was written is dropped, and retransmitted after a
        // second, for which this does not wait.
        let mut stream = TcpStream::connect_timeout(&endpoint, AT_ONCE / 4)?;
        stream.set_read_timeout(Some(SOON))?;
        stream.write_all(line.as_bytes())?;
        let mut answer = [0; 4096];
        let length = stream.read(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    })
}

/// Returns the number of connections that the server or programs have accepted; programs report periodically.
fn accepted(bed: &Bed) -> u64 {
    let counts = [
        ("server", "passive_opens"),
        ("stack", "delegated_handshakes"),
    ];
    counts
        .map(|(group, name)| counter(bed, Side::Server, group, name))
        .iter()
        .sum()
}

/// Asks until an answer arrives by Portolan, and returns the time that took.
fn until_portolans(bed: &Bed, (port, line, answer): (u16, &str, &str)) -> Duration {
    let start = Instant::now();
    loop {
        let before = accepted(bed);
        let said = ask(bed, port, line);
        let took = start.elapsed();
        let is_portolans = || eventually(REPORT, || accepted(bed) > before);
        if said.as_ref().is_ok_and(|said| said.contains(answer)) && is_portolans() {
            return took;
        }
        assert!(
            start.elapsed() < SOON,
            "port {port}: {said:?}\n{}",
            sockets(bed)
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn descriptors(pid: u32) -> usize {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    open.count()
}

/// Lists the files that the descriptors of a process refer to.
fn open_files(pid: u32) -> Vec<String> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let shown = open.flatten().map(|entry| {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        format!("{:?} {}", entry.file_name(), target.display())
    });
    shown.collect()
}

/// Returns a process and its children.
fn family(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.expect("it runs");
    let children = children
        .split_whitespace()
        .map(|it| it.parse().expect("a number"));
    std::iter::once(pid).chain(children).collect()
}

fn nginx_config(bed: &Bed, port: u16, user: &str) -> String {
    let text = format!(
        "user {user}; daemon off; worker_processes 2; pid {}; error_log stderr crit;\n\
         events {{}}\nhttp {{ access_log off; keepalive_requests 1000000000; server {{ listen {};\n\
         location / {{ return 200 \"served\\n\"; }} }} }}\n",
        bed.file("nginx.pid").display(),
        bed.endpoint(port),
    );
    file(bed, "nginx.conf", text)
}

fn redis(bed: &Bed) -> Background {
    let address = bed.server.address.to_string();
    let port = REDIS.to_string();
    let arguments = ["--bind", &address, "--port", &port, "--save", ""];
    let unprotected = ["--protected-mode", "no"];
    serve(
        bed,
        Stack::Portolan,
        REDIS,
        "redis-server",
        &[&arguments[..], &unprotected].concat(),
    )
}

const PING: (u16, &str, &str) = (REDIS, "PING\r\n", "+PONG");
const GET: (u16, &str, &str) = (NGINX, "GET / HTTP/1.0\r\n\r\n", "served");

#[test]
fn services_are_portolans_again_after_each_of_twenty_restarts() {
    let mut bed = bed();
    let redis = redis(&bed);
    let config = nginx_config(&bed, NGINX, "root");
    let nginx = serve(&bed, Stack::Portolan, NGINX, "nginx", &["-c", &config]);
    for service in [PING, GET] {
        until_portolans(&bed, service);
    }
    let pids: Vec<u32> = [redis.pid(), nginx.pid()]
        .into_iter()
        .flat_map(family)
        .collect();
    let mut before = Vec::new();
    let mut times = Vec::new();
    for turn in 0..restarts() {
        // When the server ends, some clients are connected and idle.
        let endpoint = bed.endpoint(REDIS);
        let idle = bed
            .namespace(Side::Client)
            .enter(|| TcpStream::connect(endpoint));
        restart_in_turn(&mut bed, turn);
        for service in [PING, GET] {
            times.push(until_portolans(&bed, service));
        }
        drop(idle);
        if turn == 1 {
            before = pids.iter().map(|pid| descriptors(*pid)).collect();
        }
    }
    times.sort_unstable();
    let [median, late] = [times[times.len() / 2], times[times.len() * 99 / 100]];
    println!(
        "from a server's start to an answer: {median:?} in the median, {late:?} in the 99th percentile"
    );
    assert!(times[times.len() * 3 / 4] < AT_ONCE, "{times:?}");
    let settled = eventually(SOON, || {
        let after: Vec<usize> = pids.iter().map(|pid| descriptors(*pid)).collect();
        let is_same = after
            .iter()
            .zip(&before)
            .all(|(after, before)| *after <= before + LAZY);
        // The two listeners are left.
        is_same && live_sessions(&bed, Side::Server) == 2
    });
    let after: Vec<usize> = pids.iter().map(|pid| descriptors(*pid)).collect();
    let sessions = bed.portolan(Side::Server, &["ss", "-a"]);
    assert!(
        settled,
        "{before:?} descriptors, then {after:?}; {sessions:?}"
    );
}

fn reload_nginx(bed: &Bed) {
    let pid = fs::read_to_string(bed.file("nginx.pid")).expect("a process number");
    let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process");
    kill_process(pid, Signal::HUP).expect("it runs");
}

/// The parent of the workers never accepts: its new children inherit state that is older than the server.
#[test]
fn workers_that_are_forked_after_a_restart_accept_on_the_same_listener() {
    let mut bed = bed();
    let config = nginx_config(&bed, NGINX, "root");
    let nginx = serve(&bed, Stack::Portolan, NGINX, "nginx", &["-c", &config]);
    until_portolans(&bed, GET);
    for end in [Signal::TERM, Signal::KILL] {
        restart(&mut bed, end);
        until_portolans(&bed, GET);
        let old = family(nginx.pid());
        reload_nginx(&bed);
        let replaced = eventually(SOON, || {
            let now = family(nginx.pid());
            now.len() == 3 && now[1..].iter().all(|pid| !old.contains(pid))
        });
        assert!(replaced, "{old:?}, then {:?}", family(nginx.pid()));
        until_portolans(&bed, GET);
        assert_eq!(sessions_in(&bed, Side::Server, "LISTEN"), 1);
    }
}

/// Binds a port as root, and accepts as nobody.
const UNPRIVILEGED: &str = r#"
import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
if os.fork() == 0:
    os.setuid(65534)
    while True:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(b"by nobody")
        connection.close()
os.wait()
"#;

#[test]
fn a_low_port_stays_with_those_who_could_not_bind_it() {
    const LOW: u16 = 87;
    let mut bed = bed();
    // `nobody` may not read root's directories.
    let programs = public_programs(&bed);
    let launcher = programs.join("portolan").display().to_string();
    let endpoint = bed.endpoint(LOW);
    let mut command = bed.command(Side::Server, Stack::Kernel, &launcher);
    command.args(["run", "--", PYTHON, "-c", UNPRIVILEGED]);
    command.args([endpoint.ip().to_string(), LOW.to_string()]);
    let _service = bed
        .serve_command(LOW, "python", &mut command)
        .unwrap_or_else(|error| panic!("{error}"));
    let by_nobody = (LOW, "who\n", "by nobody");
    until_portolans(&bed, by_nobody);
    for end in [Signal::TERM, Signal::KILL] {
        restart(&mut bed, end);
        until_portolans(&bed, by_nobody);
    }
    stop(&mut bed, Signal::TERM);
    let answers = || ask(&bed, LOW, "who\n").is_ok_and(|said| said == "by nobody");
    assert!(
        eventually(SOON, answers),
        "the kernel does not listen meanwhile"
    );
}

/// Accepts by blocking calls.
const BLOCKING: &str = r#"
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
while True:
    connection, _ = listener.accept()
    try:
        connection.recv(100)
        connection.sendall(b"accepted")
        connection.close()
    except ConnectionError:
        # Its server went while it was open.
        pass
"#;

fn blocking(bed: &Bed, options: &[&str]) -> Background {
    accepting(bed, options, BLOCKING)
}

/// Starts a program that accepts connections on [`PORT`], and answers a line.
fn accepting(bed: &Bed, options: &[&str], code: &str) -> Background {
    accepting_with(bed, options, code, &[])
}

/// As [`accepting`], with variables of its environment.
fn accepting_with(
    bed: &Bed,
    options: &[&str],
    code: &str,
    variables: &[(&str, &str)],
) -> Background {
    let launcher = bed.tools().portolan.display().to_string();
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Kernel, &launcher);
    command
        .arg("run")
        .args(options)
        .args(["--", PYTHON, "-c", code]);
    command.args([endpoint.ip().to_string(), PORT.to_string()]);
    command.envs(variables.iter().copied());
    bed.serve_command(PORT, "python", &mut command)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Asks the program of [`accepting`] over a connection that was opened before.
fn assert_accepted(stream: &mut TcpStream) {
    stream.write_all(b"line\n").expect("it is connected");
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("it is served");
    assert_eq!(said, "accepted");
}

const LINE: (u16, &str, &str) = (PORT, "line\n", "accepted");

#[test]
fn a_call_of_accept_that_waits_wakes_for_the_next_servers_connections() {
    for options in [&[][..], &["--require"], &["--delegate"]] {
        eprintln!("{options:?}");
        let mut bed = bed();
        let _service = blocking(&bed, options);
        until_portolans(&bed, LINE);
        for end in [Signal::TERM, Signal::KILL] {
            restart(&mut bed, end);
            until_portolans(&bed, LINE);
        }
        // A process that performs the handshakes accepts before the next server knows its listener.
        let is_known = || sessions_in(&bed, Side::Server, "LISTEN") == 1;
        assert!(eventually(SOON, is_known), "{options:?}: {}", sockets(&bed));
    }
}

/// Of a program that may not use the kernel's stack.
#[test]
fn peers_wait_for_the_next_server_but_not_for_ever() {
    let mut bed = bed();
    let wait = [("PORTOLAN_WAIT", "2000")];
    let _service = accepting_with(&bed, &["--require"], BLOCKING, &wait);
    let endpoint = bed.endpoint(PORT);
    let open = |bed: &Bed| {
        let there = bed.namespace(Side::Client);
        there.enter(|| TcpStream::connect_timeout(&endpoint, SOON))
    };
    until_portolans(&bed, LINE);
    for end in [Signal::TERM, Signal::KILL] {
        stop(&mut bed, end);
        let peer = bed
            .namespace(Side::Client)
            .enter(|| std::thread::spawn(move || TcpStream::connect_timeout(&endpoint, SOON)));
        std::thread::sleep(WHILE / 2);
        start_server(&mut bed, Side::Server);
        let opened = peer.join().expect("it does not panic");
        let mut stream = opened.unwrap_or_else(|error| panic!("{end:?}: {error}"));
        assert_accepted(&mut stream);
        until_portolans(&bed, LINE);
    }
    stop(&mut bed, Signal::TERM);
    let refused = || open(&bed).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    assert!(eventually(SOON, refused));
}

/// Waits by `select` for a connection, which a blocking `accept` must find then.
const SELECTING: &str = r#"
import select, signal, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    select.select([listener], [], [])
    signal.alarm(2)
    connection = listener.accept()[0]
    signal.alarm(0)
    with connection:
        connection.recv(100)
        connection.sendall(b"accepted")
"#;

#[test]
fn a_program_that_waits_for_a_listener_is_told_of_connections_only() {
    for options in [&[][..], &["--require"], &["--delegate"]] {
        eprintln!("{options:?}");
        let mut bed = bed();
        let mut service = accepting(&bed, options, SELECTING);
        until_portolans(&bed, LINE);
        for end in [Signal::TERM, Signal::KILL] {
            restart(&mut bed, end);
            until_portolans(&bed, LINE);
        }
        stop(&mut bed, Signal::TERM);
        if options.is_empty() {
            let by_kernel = || ask(&bed, PORT, "line\n").is_ok_and(|said| said == "accepted");
            assert!(eventually(SOON, by_kernel));
        }
        start_server(&mut bed, Side::Server);
        until_portolans(&bed, LINE);
        assert!(
            service.is_running(),
            "{options:?}: a call of accept has found nothing"
        );
    }
}

#[test]
fn what_the_kernel_has_queued_meanwhile_is_accepted() {
    let mut bed = bed();
    let service = blocking(&bed, &[]);
    until_portolans(&bed, LINE);
    stop(&mut bed, Signal::TERM);
    let pid = Pid::from_raw(service.pid().cast_signed()).expect("a process");
    assert!(eventually(SOON, || ask(&bed, PORT, "line\n").is_ok()));
    // While it is stopped it cannot take the port back from the kernel.
    kill_process(pid, Signal::STOP).expect("it runs");
    let endpoint = bed.endpoint(PORT);
    let mut queued: Vec<TcpStream> = bed.namespace(Side::Client).enter(|| {
        (0..3)
            .map(|_| TcpStream::connect_timeout(&endpoint, SOON).expect("the kernel listens"))
            .collect()
    });
    start_server(&mut bed, Side::Server);
    kill_process(pid, Signal::CONT).expect("it is there");
    queued.iter_mut().for_each(assert_accepted);
    until_portolans(&bed, LINE);
}

#[test]
fn a_connection_of_the_kernels_stays_when_the_listener_is_portolans_again() {
    for mut bed in [bed(), bed().over_ipv6()] {
        let _service = blocking(&bed, &[]);
        until_portolans(&bed, LINE);
        stop(&mut bed, Signal::TERM);
        assert!(eventually(SOON, || ask(&bed, PORT, "line\n").is_ok()));
        let endpoint = bed.endpoint(PORT);
        let connect = || TcpStream::connect_timeout(&endpoint, SOON).expect("the kernel listens");
        let [mut accepted, mut queued] =
            bed.namespace(Side::Client).enter(|| [connect(), connect()]);
        start_server(&mut bed, Side::Server);
        let is_portolans = || sessions_in(&bed, Side::Server, "LISTEN") == 1;
        assert!(eventually(SOON, is_portolans));
        for stream in [&mut accepted, &mut queued] {
            stream.write_all(b"line\n").expect("it is connected");
            let mut said = String::new();
            stream.read_to_string(&mut said).expect("it is served");
            assert_eq!(said, "accepted");
        }
        let passed = counter(&bed, Side::Server, "receive", "pass_connection");
        assert!(passed > 0, "{passed}");
    }
}

/// Answers datagrams, and prints its peer if it has one.
const DATAGRAMS: &str = r#"
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], int(sys.argv[2])))
print("bound", flush=True)
while True:
    data, peer = sock.recvfrom(100)
    sock.sendto(data.upper(), peer)
"#;

#[test]
fn a_bound_socket_of_datagrams_is_portolans_again() {
    let mut bed = bed();
    let launcher = bed.tools().portolan.display().to_string();
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Kernel, &launcher);
    command.args(["run", "--", PYTHON, "-c", DATAGRAMS]);
    command.args([endpoint.ip().to_string(), PORT.to_string()]);
    let mut service = Steps::start(&mut command);
    service.await_line("bound");
    // The first wait opens a descriptor for the thread.
    assert!(eventually(SOON, || echoes(&bed, endpoint)));
    let before = descriptors(service.id());
    for turn in 0..2 * LAZY {
        let end = [Signal::TERM, Signal::KILL][turn % 2];
        restart(&mut bed, end);
        assert!(eventually(SOON, || live_sessions(&bed, Side::Server) == 1));
        assert!(eventually(SOON, || echoes(&bed, endpoint)), "{end:?}");
        let by_kernel = counter(&bed, Side::Server, "server", "kernel_datagrams");
        assert_eq!(by_kernel, 0);
    }
    let is_same = || descriptors(service.id()) <= before + LAZY;
    assert!(eventually(SOON, is_same), "{:#?}", open_files(service.id()));
}

fn echoes(bed: &Bed, endpoint: SocketAddr) -> bool {
    bed.namespace(Side::Client).enter(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        let second = Some(Duration::from_millis(100));
        socket.set_read_timeout(second).expect("a time");
        socket.send_to(b"word", endpoint).expect("it is sent");
        let mut answer = [0; 10];
        socket
            .recv(&mut answer)
            .is_ok_and(|length| &answer[..length] == b"WORD")
    })
}

/// Opens one connection, on a new socket, for each line that it reads.
const OPENER: &str = r#"
import socket, sys
for line in sys.stdin:
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as opened:
        opened.sendall(b"line\n")
        print(opened.recv(100).decode(), flush=True)
"#;

#[test]
fn a_program_with_nothing_open_is_registered_anew_with_its_next_socket() {
    let mut bed = bed();
    let mut listener = bed.command(Side::Server, Stack::Kernel, PYTHON);
    let endpoint = bed.endpoint(PORT);
    let address = [endpoint.ip().to_string(), PORT.to_string()];
    listener.args(["-c", BLOCKING]).args(&address);
    let _listener = bed
        .serve_command(PORT, "python", &mut listener)
        .unwrap_or_else(|error| panic!("{error}"));
    let launcher = bed.tools().portolan.display().to_string();
    let mut opener = bed.command(Side::Client, Stack::Kernel, &launcher);
    opener
        .args(["run", "--", PYTHON, "-c", OPENER])
        .args(&address);
    let mut opener = Steps::start(&mut opener);
    let opened = |bed: &Bed| counter(bed, Side::Client, "server", "active_opens");
    opener.say("open");
    opener.await_line("accepted");
    assert_eq!(opened(&bed), 1);
    for end in [Signal::TERM, Signal::KILL] {
        restart_server(&mut bed, Side::Client, end);
        opener.say("open");
        opener.await_line("accepted");
        assert_eq!(opened(&bed), 1);
    }
    assert!(Path::new(&format!("/proc/{}", opener.id())).exists());
}

/// Sends back what each connection brings, by a thread for each that waits.
const ECHO: &str = r#"
import socket, sys, threading
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
def serve(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)
    connection.close()
while True:
    try:
        connection, _ = listener.accept()
    except ConnectionAbortedError:
        # The server ended between two calls.
        continue
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
"#;

/// Keeps one connection, by which it asks for each line that it reads.
const KEEPER: &str = r#"
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as kept:
    print("open", flush=True)
    for line in sys.stdin:
        kept.sendall(line.encode())
        print(kept.recv(100).decode(), end="", flush=True)
"#;

/// Counts the taps of programs on the server host.
fn taps(bed: &Bed) -> usize {
    let mut list = bed.command(Side::Server, Stack::Kernel, "ip");
    let shown = list.args(["-o", "link", "show"]).output().expect("it runs");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    shown.matches(": ptl").count()
}

fn python(bed: &Bed, (side, stack): (Side, Stack), port: u16, code: &str) -> Background {
    let address = match side {
        Side::Server => bed.server.address,
        Side::Client => bed.client.address,
    };
    let mut command = bed.command(side, stack, PYTHON);
    command.args(["-c", code, &address.to_string(), &port.to_string()]);
    let service = Background::start(&mut command).unwrap_or_else(|error| panic!("{error}"));
    let listens = || {
        let endpoint = SocketAddr::new(address, port);
        let from = bed.namespace(Side::Client);
        from.enter(|| TcpStream::connect_timeout(&endpoint, SOON))
            .is_ok()
    };
    assert!(eventually(SOON, listens), "nobody listens at {port}");
    service
}

#[test]
fn connections_go_on_over_twenty_restarts() {
    const IDLE: usize = 5;
    const LISTENERS: usize = 4;
    let mut bed = bed();
    let redis = redis(&bed);
    let config = nginx_config(&bed, NGINX, "root");
    let nginx = serve(&bed, Stack::Portolan, NGINX, "nginx", &["-c", &config]);
    let echo = python(&bed, (Side::Server, Stack::Portolan), PORT, ECHO);
    let _kernels = python(&bed, (Side::Client, Stack::Kernel), PORT, ECHO);
    let launcher = bed.tools().portolan.display().to_string();
    let mut keeper = bed.command(Side::Server, Stack::Kernel, &launcher);
    keeper.args(["run", "--", PYTHON, "-c", KEEPER]);
    keeper.args([bed.client.address.to_string(), PORT.to_string()]);
    let mut keeper = Steps::start(&mut keeper);
    keeper.await_line("open");
    let mut iperf = Iperf::start(&bed);
    let loads = [
        pipelining(connect_once(&bed, REDIS)),
        bulk(connect_once(&bed, PORT)),
        bulk(connect_once(&bed, PORT)),
        browsing(connect_once(&bed, NGINX), b"served\n"),
    ];
    let before_restarts = pinging(connect_once(&bed, REDIS));
    std::thread::sleep(WHILE);
    let before_restarts = before_restarts.finish();
    let during_restarts = pinging(connect_once(&bed, REDIS));
    let mut idle: Vec<TcpStream> = (0..IDLE).map(|_| connect_once(&bed, PORT)).collect();
    for stream in &mut idle {
        assert_echoed(stream, b"before");
    }
    let connections = loads.len() + IDLE + 2 + Iperf::CONNECTIONS;
    let services = [redis.pid(), echo.pid(), keeper.id(), iperf.server()];
    let pids = [services.to_vec(), family(nginx.pid())].concat();
    let is_settled = || live_sessions(&bed, Side::Server) == connections + LISTENERS;
    assert!(eventually(SOON, is_settled), "{}", sockets(&bed));
    let mut before = Vec::new();
    let mut taps_before = 0;
    for turn in 0..restarts() {
        restart_in_turn(&mut bed, turn);
        let adopted = || counter(&bed, Side::Server, "server", "connections_adopted");
        let all = || adopted() == connections as u64;
        assert!(
            eventually(SOON, all),
            "{turn}: {} of {connections}, refused {:?}\n{}\n{}",
            adopted(),
            ["adoptions_refused", "channels_refused", "refused_requests"].map(|name| counter(
                &bed,
                Side::Server,
                "server",
                name
            )),
            sockets(&bed),
            bed.daemon_log(Side::Server)
        );
        keeper.say("line");
        keeper.await_line("line");
        assert_echoed(&mut idle[turn % IDLE], b"between");
        if turn == 1 {
            before = pids.iter().map(|pid| descriptors(*pid)).collect();
            taps_before = taps(&bed);
        }
    }
    let during_restarts = during_restarts.finish();
    let [usual, restarting] = [&before_restarts, &during_restarts]
        .map(|times| [times[times.len() / 2], times[times.len() * 99 / 100]]);
    println!("an answer's median and 99th percentile: {usual:?}, during restarts {restarting:?}");
    assert!(
        restarting[1] < NOT_SENT_AGAIN,
        "{restarting:?}, usually {usual:?}"
    );
    let least = iperf.finish();
    println!("iperf3's slowest second and direction: {least:e} bytes");
    assert!(least > 0.0, "it stalled");
    for load in loads {
        assert!(load.finish() > 0);
    }
    for stream in &mut idle {
        assert_echoed(stream, b"after");
    }
    let after: Vec<usize> = pids.iter().map(|pid| descriptors(*pid)).collect();
    let grew = after.iter().zip(&before);
    let is_same = grew
        .into_iter()
        .all(|(after, before)| *after <= before + LAZY);
    assert!(is_same, "{before:?} descriptors, then {after:?}");
    drop(idle);
    drop(keeper);
    let is_over = || live_sessions(&bed, Side::Server) == LISTENERS;
    assert!(eventually(SOON, is_over), "{}", sockets(&bed));
    // The pool of channels shrinks some seconds after programs have started.
    let is_as_before = || taps(&bed) <= taps_before;
    assert!(
        eventually(SOON, is_as_before),
        "{taps_before}, then {}",
        taps(&bed)
    );
    let refused = counter(&bed, Side::Server, "server", "adoptions_refused");
    assert_eq!(refused, 0);
}

#[test]
fn the_peer_of_a_program_that_was_killed_without_a_server_sees_the_end() {
    for end in [Signal::TERM, Signal::KILL] {
        let mut bed = bed();
        let echo = python(&bed, (Side::Server, Stack::Portolan), PORT, ECHO);
        let mut peer = connect_once(&bed, PORT);
        assert_echoed(&mut peer, b"word");
        // The connection that showed that the program listens has ended.
        assert!(eventually(SOON, || live_sessions(&bed, Side::Server) == 2));
        stop(&mut bed, end);
        assert_echoed(&mut peer, b"without a server");
        echo.signal(Signal::KILL).expect("it runs");
        start_server(&mut bed, Side::Server);
        let end = peer.read(&mut [0]).expect_err("nothing is sent");
        assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
        assert_eq!(
            counter(&bed, Side::Server, "server", "connections_abandoned"),
            1
        );
    }
}

/// A server that starts removes the socket of a dead one and makes its own.
#[test]
fn connections_outlast_the_replacement_of_the_control_socket() {
    let mut bed = bed();
    let _echo = python(&bed, (Side::Server, Stack::Portolan), PORT, ECHO);
    let mut peer = connect_once(&bed, PORT);
    assert_echoed(&mut peer, b"word");
    stop(&mut bed, Signal::KILL);
    let control = bed.namespace(Side::Server).enter(control_path);
    fs::remove_file(control.expect("a namespace")).expect("it was left");
    // Longer than the pause of the library's thread.
    std::thread::sleep(SOON / 5);
    assert_echoed(&mut peer, b"without a server");
    start_server(&mut bed, Side::Server);
    let adopted = || counter(&bed, Side::Server, "server", "connections_adopted") == 1;
    assert!(eventually(SOON, adopted), "{}", sockets(&bed));
    assert_echoed(&mut peer, b"with the next one");
}

/// SIGINT is an operator who will not start another.
#[test]
fn a_server_that_is_stopped_for_good_resets_connections_and_leaves_no_filter() {
    let mut bed = bed();
    let _echo = python(&bed, (Side::Server, Stack::Portolan), PORT, ECHO);
    let mut peer = connect_once(&bed, PORT);
    assert_echoed(&mut peer, b"word");
    stop(&mut bed, Signal::INT);
    let end = peer.read(&mut [0]).expect_err("nothing is sent");
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
    let mut list = bed.command(Side::Server, Stack::Kernel, "tc");
    let shown = list
        .args(["qdisc", "show", "dev", "eth0"])
        .output()
        .expect("it runs");
    assert!(!String::from_utf8_lossy(&shown.stdout).contains("clsact"));
}

#[test]
fn doctor_names_the_filter_of_a_server_that_is_gone() {
    let mut bed = bed();
    let doctor = |bed: &Bed| {
        let said = bed.own_command(Side::Server).arg("doctor").output();
        String::from_utf8_lossy(&said.expect("it runs").stdout).into_owned()
    };
    assert!(doctor(&bed).contains("Portolan's filter"));
    stop(&mut bed, Signal::KILL);
    let said = doctor(&bed);
    assert!(
        said.contains("the filter of a server that is gone"),
        "{said}"
    );
}

/// Sends each line of its input by the connection that the line's first word numbers.
const TELLER: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
connections = [listener.accept()[0] for _ in range(2)]
for line in sys.stdin:
    connections[int(line.split()[0])].sendall(line.encode())
"#;

/// Prints what comes by any of its connections.
const HEARER: &str = r#"
import select, socket, sys
connections = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(2)]
print("connected", flush=True)
while True:
    for connection in select.select(connections, [], [], 60)[0]:
        print(connection.recv(100).decode(), end="", flush=True)
"#;

/// Starts two programs on the server host, of which the second connects to the first.
fn start_within_host(bed: &Bed, [listens, connects]: [&str; 2]) -> (Steps, Steps) {
    let start = |code, says| {
        let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
        command.args(["-c", code, &bed.server.address.to_string()]);
        let mut program = Steps::start(command.arg(PORT.to_string()));
        program.await_line(says);
        program
    };
    (start(listens, "listens"), start(connects, "connected"))
}

fn processes(bed: &Bed) -> u64 {
    status(bed)["processes"].as_u64().unwrap_or_default()
}

/// Programs of one host that have not woken each other yet have to ask the server how: without one they look for themselves.
#[test]
fn programs_of_one_host_wake_each_other_without_a_server_and_with_the_next_one() {
    const PROMPTLY: Duration = Duration::from_millis(500);
    let mut bed = bed();
    let (mut teller, mut hearer) = start_within_host(&bed, [TELLER, HEARER]);
    let mut heard = |line: &str| {
        let start = Instant::now();
        teller.say(line);
        hearer.await_line(line);
        assert!(start.elapsed() < PROMPTLY, "{line}: {:?}", start.elapsed());
    };
    std::thread::sleep(PROMPTLY);
    stop(&mut bed, Signal::KILL);
    std::thread::sleep(PROMPTLY);
    heard("0 without a server");
    start_server(&mut bed, Side::Server);
    let are_back = || processes(&bed) == 2;
    assert!(eventually(SOON, are_back), "{}", processes(&bed));
    std::thread::sleep(PROMPTLY);
    heard("1 with the next server");
    heard("0 with the next server");
}

/// Connects, and then does as the lines of its input say: receives itself, has a child receive that inherits the
/// connection, or waits for the end.
const WITNESS: &str = r#"
import socket, subprocess, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
for line in sys.stdin:
    if line == "receive\n":
        print(connection.recv(100).decode(), end="", flush=True)
    elif line == "share\n":
        subprocess.run(["head", "-n", "1"], stdin=connection)
    else:
        try:
            print("ended:", connection.recv(100), flush=True)
        except ConnectionResetError:
            print("reset", flush=True)
"#;

/// One connection after another; a line of its input goes to the latest.
const SPEAKER: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
connection = listener.accept()[0]
for line in sys.stdin:
    connection.sendall(line.encode())
"#;

/// The server is not needed for the data of such a connection, but it moves ends, and notices the death of a program.
#[test]
fn connections_within_the_host_are_known_to_the_next_server() {
    let mut bed = bed();
    let (mut speaker, mut witness) = start_within_host(&bed, [SPEAKER, WITNESS]);
    restart(&mut bed, Signal::KILL);
    let adopted = || counter(&bed, Side::Server, "server", "connections_adopted");
    assert!(eventually(SOON, || adopted() == 2), "{}", sockets(&bed));
    for (way, line) in [("share", "to a child"), ("receive", "to itself")] {
        witness.say(way);
        speaker.say(line);
        witness.await_line(line);
    }
    witness.say("wait");
    drop(speaker);
    let start = Instant::now();
    witness.await_line("ended: b''");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    drop(witness);
    assert!(eventually(SOON, || live_sessions(&bed, Side::Server) == 0));
}

#[test]
fn the_death_of_a_program_without_a_server_is_told_to_its_peer_within_the_host() {
    let mut bed = bed();
    let (speaker, mut witness) = start_within_host(&bed, [SPEAKER, WITNESS]);
    stop(&mut bed, Signal::KILL);
    drop(speaker);
    start_server(&mut bed, Side::Server);
    witness.say("wait");
    witness.await_line("reset");
}
