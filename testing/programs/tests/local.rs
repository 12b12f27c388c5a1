//! Programs that communicate within one host: between two of Portolan's no packet is sent; with
//! the kernel's sockets at one end it works as between any two programs.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PAIRINGS, PYTHON, bed, counter, eventually, live_sessions};
use rustix::process::Signal;

const ACCOUNT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/local.py");
const SHARING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/inherited.py");
const PROMPTLY: Duration = Duration::from_secs(5);

fn local_sessions(bed: &Bed) -> u64 {
    counter(bed, Side::Server, "server", "local_sessions")
}

fn on_host(bed: &Bed, stack: Stack, program: &str, arguments: &[&str]) -> String {
    run(bed.neighbour(stack, program).args(arguments)).unwrap_or_else(|error| panic!("{error}"))
}

fn serve(bed: &Bed, stack: Stack, port: u16, program: &str, arguments: &[&str]) -> Background {
    bed.serve(stack, port, program, arguments)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Both ends are in one program, and in its children.
#[test]
fn local_sockets_behave_as_the_kernels_do() {
    let bed = bed();
    let own = bed.server.address.to_string();
    for address in ["127.0.0.1", "::1", &own] {
        let kernel = on_host(&bed, Stack::Kernel, PYTHON, &[ACCOUNT, address]);
        let before = local_sessions(&bed);
        let portolan = on_host(&bed, Stack::Portolan, PYTHON, &[ACCOUNT, address]);
        assert_eq!(portolan, kernel, "{address}");
        assert!(local_sessions(&bed) > before + 20, "{address}");
    }
    let gone = eventually(PROMPTLY, || live_sessions(&bed, Side::Server) == 0);
    assert!(gone, "{:?}", bed.portolan(Side::Server, &["ss", "-a"]));
}

#[test]
fn kernel_and_portolan_meet_on_one_host_as_before() {
    let bed = bed();
    for (pairing, port) in PAIRINGS.into_iter().zip(7040..) {
        let before = local_sessions(&bed);
        let endpoint = format!("127.0.0.1:{port}");
        let _sink = serve(
            &bed,
            pairing.server,
            port,
            "portolan-traffic",
            &["sink", &endpoint],
        );
        let arguments = ["bulk", &endpoint, "--seconds", "0.5"];
        let report = on_host(&bed, pairing.client, "portolan-traffic", &arguments);
        assert!(report.contains("bytes"), "{pairing:?}: {report}");
        let is_local = pairing.server == Stack::Portolan && pairing.client == Stack::Portolan;
        assert_eq!(
            local_sessions(&bed) - before,
            u64::from(is_local),
            "{pairing:?}"
        );
    }
}

/// Sleeping and spinning, with both ends much faster and much slower than a wake-up.
#[test]
fn no_wake_up_is_lost_between_two_programs() {
    let bed = bed();
    for (wait, port) in [(None, 7050), (Some("--spin"), 7051)] {
        let endpoint = format!("127.0.0.1:{port}");
        let mut echo = vec!["echo", "tcp", &endpoint, "--size", "1"];
        let mut ping = vec!["ping", "tcp", &endpoint, "--size", "1", "--count", "30000"];
        echo.extend(wait);
        ping.extend(wait);
        let _echo = serve(&bed, Stack::Portolan, port, "portolan-traffic", &echo);
        let report = on_host(&bed, Stack::Portolan, "portolan-traffic", &ping);
        assert!(report.contains("\"round_trips\":30000"), "{report}");
    }
}

#[test]
fn redis_serves_its_own_host() {
    let bed = bed();
    let port = "6390";
    let _redis = serve(
        &bed,
        Stack::Portolan,
        6390,
        "redis-server",
        &[
            "--port",
            port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--protected-mode",
            "no",
        ],
    );
    let before = local_sessions(&bed);
    for pipeline in ["1", "16"] {
        let words = [
            "-h",
            "127.0.0.1",
            "-p",
            port,
            "-t",
            "get,set,lpush",
            "-n",
            "20000",
            "-P",
        ];
        let report = on_host(
            &bed,
            Stack::Portolan,
            "redis-benchmark",
            &[&words[..], &[pipeline, "--csv"]].concat(),
        );
        assert!(report.lines().count() >= 3, "{report}");
    }
    assert!(
        local_sessions(&bed) >= before + 300,
        "50 clients for each of six tests"
    );
    let said = on_host(
        &bed,
        Stack::Kernel,
        "redis-cli",
        &["-h", "127.0.0.1", "-p", port, "ping"],
    );
    assert_eq!(said.trim(), "PONG");
}

#[test]
fn nginx_serves_its_own_host() {
    let bed = bed();
    let config = bed.file("local.conf");
    let text = format!(
        "user root; daemon off; worker_processes 2; pid {}; error_log stderr crit;\n\
         events {{}}\n\
         http {{ access_log off; server {{ listen 127.0.0.1:8095; listen [::1]:8095;\n\
         location / {{ root {}; }} }} }}\n",
        bed.file("local.pid").display(),
        bed.file("").display(),
    );
    fs::write(&config, text).expect("the bed's directory is writable");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i * 31 % 251) as u8).collect();
    fs::write(bed.file("page"), &bytes).expect("the bed's directory is writable");
    let config = config.display().to_string();
    let _nginx = serve(&bed, Stack::Portolan, 8095, "nginx", &["-c", &config]);
    let before = local_sessions(&bed);
    let got = bed.file("got").display().to_string();
    for host in ["127.0.0.1", "[::1]"] {
        let url = format!("http://{host}:8095/page");
        for stack in [Stack::Portolan, Stack::Kernel] {
            let arguments = ["-sS", "--max-time", "40", "-o", &got, &url];
            on_host(&bed, stack, "curl", &arguments);
            assert!(
                fs::read(&got).expect("it was written") == bytes,
                "{stack:?} {url}"
            );
        }
    }
    let wrk = [
        "-t",
        "1",
        "-c",
        "20",
        "-d",
        "1s",
        "http://127.0.0.1:8095/local.conf",
    ];
    let report = on_host(&bed, Stack::Portolan, "wrk", &wrk);
    assert!(report.contains("Requests/sec:"), "{report}");
    assert!(!report.contains("Socket errors"), "{report}");
    assert!(local_sessions(&bed) >= before + 22);
}

#[test]
fn iperf3_measures_its_own_host() {
    let bed = bed();
    let port = ["-p", "5210"];
    let _server = serve(
        &bed,
        Stack::Portolan,
        5210,
        "iperf3",
        &["-s", port[0], port[1]],
    );
    for more in [&[][..], &["-R"], &["-P", "4"]] {
        let words = ["-c", "127.0.0.1", port[0], port[1], "-t", "1", "-J"];
        let report = on_host(
            &bed,
            Stack::Portolan,
            "iperf3",
            &[&words[..], more].concat(),
        );
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        let rate = report["end"]["sum_received"]["bits_per_second"].as_f64();
        assert!(rate.is_some_and(|rate| rate > 1e8), "{more:?}: {rate:?}");
    }
    assert!(local_sessions(&bed) >= 9);
}

/// A connection that several processes of the server share, with a client on the same host.
#[test]
fn local_sessions_follow_whoever_uses_them() {
    const CLIENT: &str = r#"
import os, socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
for _ in range(8):
    bytes = os.urandom(5000)
    end.sendall(bytes)
    assert end.recv(5000, socket.MSG_WAITALL) == bytes
end.shutdown(socket.SHUT_WR)
assert end.recv(1) == b""
print("well")
"#;
    let bed = bed();
    for (way, port) in ["forking", "inherited", "bystander", "alternating"]
        .into_iter()
        .zip(7060..)
    {
        let port = port.to_string();
        let _server = serve(
            &bed,
            Stack::Portolan,
            port.parse().expect("a number"),
            PYTHON,
            &[SHARING, way, "127.0.0.1", &port],
        );
        for _ in 0..3 {
            let said = on_host(&bed, Stack::Portolan, PYTHON, &["-c", CLIENT, &port]);
            assert_eq!(said.trim(), "well", "{way}");
        }
    }
    assert_eq!(local_sessions(&bed), 12);
}

fn with_output(command: &mut Command) -> Background {
    let command = command.stdout(Stdio::piped()).stderr(Stdio::null());
    Background::start_with_output(command).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_killed_program_ends_its_local_sessions() {
    let bed = bed();
    for (opened, (victim, port)) in (1..).zip([("server", 7070), ("client", 7071)]) {
        let endpoint = format!("127.0.0.1:{port}");
        let roles = match victim {
            "server" => ["hold", "watch"],
            _ => ["watch", "hold"],
        };
        let mut server = bed.command(Side::Server, Stack::Portolan, "portolan-traffic");
        server.args([roles[0], &endpoint, "--listen"]);
        let server = bed
            .serve_command(port, "portolan-traffic", server.stdout(Stdio::piped()))
            .unwrap_or_else(|error| panic!("{error}"));
        let mut client = bed.neighbour(Stack::Portolan, "portolan-traffic");
        let client = with_output(client.args([roles[1], &endpoint]));
        assert!(eventually(PROMPTLY, || local_sessions(&bed) == opened));
        let (killed, mut watcher) = match victim {
            "server" => (server, client),
            _ => (client, server),
        };
        killed.signal(Signal::KILL).expect("it runs");
        assert!(
            watcher.wait(PROMPTLY),
            "{victim} killed: its peer saw no end"
        );
        let report = watcher.finish();
        assert!(
            report.contains("eof") || report.contains("reset"),
            "{report}"
        );
        let gone = eventually(PROMPTLY, || live_sessions(&bed, Side::Server) == 0);
        assert!(gone, "{:?}", bed.portolan(Side::Server, &["ss", "-a"]));
    }
    assert_eq!(local_sessions(&bed), 2);
}

#[test]
fn local_sessions_outlive_the_server() {
    const BOTH: &str = r#"
import socket, sys, threading
listener = socket.create_server(("127.0.0.1", 0))
opener = socket.create_connection(listener.getsockname())
accepter = listener.accept()[0]
def echo():
    while bytes := accepter.recv(65536):
        accepter.sendall(bytes)
    accepter.close()
threading.Thread(target=echo).start()
for line in sys.stdin:
    opener.sendall(line.encode())
    print(opener.recv(100).decode(), end="", flush=True)
opener.shutdown(socket.SHUT_WR)
print("then", opener.recv(1), flush=True)
"#;
    let mut bed = bed();
    let mut program = bed
        .neighbour(Stack::Portolan, PYTHON)
        .args(["-c", BOTH])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("python runs");
    let mut input = program.stdin.take().expect("piped");
    let mut lines = BufReader::new(program.stdout.take().expect("piped")).lines();
    let mut line = || lines.next().expect("it runs").expect("text");
    writeln!(input, "before").expect("it listens");
    assert_eq!(line(), "before");
    assert_eq!(local_sessions(&bed), 1);
    let daemon = bed.daemon(Side::Server).take().expect("it runs");
    daemon.signal(Signal::KILL).expect("it runs");
    drop(daemon);
    std::thread::sleep(Duration::from_millis(1500));
    writeln!(input, "after").expect("it listens");
    assert_eq!(line(), "after");
    drop(input);
    assert_eq!(line(), "then b''");
    assert!(program.wait().expect("it ends").success());
}
