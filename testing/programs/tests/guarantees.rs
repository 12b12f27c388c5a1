//! Guarantees as requested by users: by command, by policy, and by the program itself in C.

use std::process::Command;
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::ProcessError;
use portolan_programs::{
    PYTHON, Steps, bed, bed_with, client, compiled, counter, eventually, serve, start_server,
    stop_server,
};
use rustix::process::Signal;

const SINK: &str = "import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    peer, _ = listener.accept()
    while peer.recv(1 << 20): pass
    peer.close()";
const PORT: u16 = 7_081;
const SOON: Duration = Duration::from_secs(10);
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/guarantees.py");

/// Bits sent by `docs/examples/guarantees.c`.
const EXAMPLE_BITS: f64 = 8.0 * 4_194_304.0;

/// Makes a bed whose links have 100 Mbit/s to reserve.
fn bed_with_rates() -> Bed {
    let link = format!("[[qos.link]]\ndevice = \"{INTERFACE}\"\nrate = \"100mbit\"\n");
    bed_with(portolan_netns::Bed::veth(), &link)
}

fn sink(bed: &Bed) -> portolan_bench::process::Background {
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    serve(
        bed,
        Stack::Kernel,
        PORT,
        PYTHON,
        &["-c", SINK, &address, &port],
    )
}

/// Returns the exit status and the output of `portolan qos`.
fn qos(bed: &Bed, line: &str) -> (i32, String) {
    let words: Vec<&str> = ["qos"].into_iter().chain(line.split(' ')).collect();
    match bed.portolan(Side::Client, &words) {
        Ok(said) => (0, said),
        Err(ProcessError::Failed {
            status, message, ..
        }) => (status.code().unwrap_or(-1), message),
        Err(error) => panic!("{line}: {error}"),
    }
}

#[test]
fn the_command_tells_why_it_ends() {
    let bed = bed();
    assert_eq!(qos(&bed, "show").0, 0);
    let (status, said) = qos(&bed, "set pid 4194304 tx --rate 1mbit");
    assert_eq!(status, 4, "{said}");
    assert!(said.contains("there is no pid 4194304"), "{said}");
    let (status, said) = qos(&bed, "set pid 1 tx --rate 1mbps");
    assert_eq!(status, 2, "{said}");
    assert!(said.contains("1mbps"), "{said}");
    let (status, said) = qos(&bed, "show --socket /nowhere");
    assert_eq!(status, 3, "{said}");
    let (_, said) = qos(&bed, "show --json");
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert!(report["transmit"].is_array(), "{said}");
}

/// Compiles the example of the guide.
fn example(bed: &Bed) -> String {
    compiled(bed, "docs/examples/guarantees.c")
}

/// Runs the example and returns its output.
fn send(bed: &Bed, stack: Stack, program: &str, bits: &str) -> String {
    let address = bed.endpoint(PORT).ip().to_string();
    client(bed, stack, program, &[&address, &PORT.to_string(), bits])
}

#[test]
fn the_guides_program_runs_with_and_without_portolan() {
    let bed = bed();
    let _sink = sink(&bed);
    let program = example(&bed);
    let said = send(&bed, Stack::Kernel, &program, "20000000");
    assert_eq!(said, "not on Portolan\nsent");
    // More than the rate of any link.
    let said = send(&bed, Stack::Portolan, &program, "1000000000000");
    assert!(
        said.starts_with("refused: ") && said.ends_with("\nsent"),
        "{said}"
    );
}

/// The minimum time proves that the rate is enforced; how much longer it takes depends on the machine.
#[test]
fn the_guides_program_sends_at_the_rate_that_it_has_reserved() {
    const RATE: f64 = 20e6;
    let bed = bed_with_rates();
    let _sink = sink(&bed);
    let program = example(&bed);
    let start = Instant::now();
    let said = send(&bed, Stack::Portolan, &program, "20000000");
    let took = start.elapsed().as_secs_f64();
    assert_eq!(said, "reserved 20000000 bit/s\nsent");
    assert!(took > 0.8 * EXAMPLE_BITS / RATE, "{took} s");
}

/// TIME-WAIT, which the example's end of the connection enters, lasts a minute.
#[test]
fn a_connections_rate_is_free_again_when_it_has_ended() {
    let bed = bed_with_rates();
    let _sink = sink(&bed);
    let program = example(&bed);
    for _ in 0..3 {
        let said = send(&bed, Stack::Portolan, &program, "40000000");
        assert_eq!(said, "reserved 40000000 bit/s\nsent");
    }
}

#[test]
fn every_function_of_the_header_asks_the_server() {
    let bed = bed_with_rates();
    let _sink = sink(&bed);
    let address = bed.endpoint(PORT).ip().to_string();
    let words = [SCRIPT, &address, &PORT.to_string()];
    assert_eq!(client(&bed, Stack::Portolan, PYTHON, &words), "all right");
    // The program's guarantees ended with it.
    let (_, said) = qos(&bed, "show --json");
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    for kind in ["transmit", "groups", "receive", "cpu"] {
        assert_eq!(report[kind], serde_json::json!([]), "{said}");
    }
}

#[test]
fn what_is_asked_for_by_command_is_shown() {
    let bed = bed_with_rates();
    let mut idle = Command::new("sleep");
    let idle = portolan_bench::process::Background::start(idle.arg("60")).unwrap();
    let pid = idle.pid();
    let granted = |line: &str| {
        let (status, said) = qos(&bed, line);
        assert_eq!(status, 0, "{line}: {said}");
        said
    };
    granted(&format!("set pid {pid} tx --rate 20mbit --ceil 50mbit"));
    granted("set port udp:9053 rx --packets 10000 --prio 3");
    granted(&format!("set pid {pid} cpu --rate 0.05 --period 20ms"));
    granted("group create 7 --rate 10mbit");
    let said = granted("show");
    for word in [
        "20mbit",
        "50mbit",
        "10mbit",
        "port udp:9053",
        &format!("pid {pid}"),
        "0.05",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(granted("classes").contains("best effort"));
    // More than the link's rate.
    let (status, said) = qos(&bed, "set port udp:9 tx --rate 90mbit");
    assert_eq!(status, 4, "{said}");
    granted(&format!("del pid {pid} tx"));
    granted("group del 7");
    granted("set port udp:9 tx --rate 80mbit");
    granted("del port udp:9053 rx");
    let (status, said) = qos(&bed, "del port udp:9053 rx");
    assert_eq!(status, 4, "{said}");
}

/// Connects, and each time that it is told to, sends 10 Mbit. Says how long it took until all was acknowledged.
const SENDS: &str = "import fcntl, socket, sys, termios, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(connection.getsockname()[1], flush=True)
while sys.stdin.readline():
    start = time.monotonic()
    connection.sendall(bytes(1_250_000))
    while any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))):
        time.sleep(0.001)
    print(time.monotonic() - start, flush=True)";

/// Returns the guarantees without what changes from one moment to the next.
fn standing(bed: &Bed) -> serde_json::Value {
    let (_, said) = qos(bed, "show --json");
    let mut report: serde_json::Value = serde_json::from_str(&said).unwrap();
    for kind in ["links", "transmit", "groups", "receive", "cpu"] {
        let all = report[kind].as_array_mut().expect("a list");
        for entry in all.iter_mut() {
            let entry = entry.as_object_mut().expect("an object");
            for changing in [
                "traffic",
                "best_effort",
                "passed",
                "dropped",
                "early",
                "used_ppm",
                "overruns",
                "effective_ppm",
                "replaced",
            ] {
                entry.remove(changing);
            }
        }
        all.sort_by_key(ToString::to_string);
    }
    report["cpu_classes"].take();
    report
}

/// A server that follows another one, killed or not, grants again what that has granted: to processes, threads, connections,
/// ports, users and groups; with the same numbers, under the link's rate of before.
#[test]
fn guarantees_stand_over_restarts() {
    let mut bed = bed_with_rates();
    let _sink = sink(&bed);
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let mut sender = Steps::start(command.args(["-c", SENDS, &address, &port]));
    let own = format!("{}:{}", bed.client.address, sender.line());
    let mut sleep = Command::new("sleep");
    let idle = portolan_bench::process::Background::start(sleep.arg("60")).unwrap();
    let mut sleep = Command::new("sleep");
    let brief = portolan_bench::process::Background::start(sleep.arg("60")).unwrap();
    let (pid, idle, ended) = (sender.id(), idle.pid(), brief.pid());
    for line in [
        &format!("set pid {ended} cpu --rate 0.03"),
        "group create 7 --rate 10mbit --mode 0711 --share",
        &format!("group join 7 pid {idle} --rate 2mbit"),
        &format!("set flow tcp:{own}-{endpoint} tx --rate 15mbit"),
        &format!("set pid {pid} rx --packets 10000"),
        &format!("set pid {pid} tx --rate 5mbit --ceil 30mbit"),
        &format!("set pid {idle} cpu --rate 0.05 --period 20ms"),
        &format!("set tid {pid} cpu --rate 0.04"),
        "set port udp:9053 rx --packets 10000 --prio 3",
        "set user nobody tx --rate 1mbit",
        "set port tcp:9 tx --slice 30ms --period 100ms",
        "group set 7 --rate 8mbit",
        &format!("set pid {pid} tx --rate 6mbit --ceil 30mbit"),
        // All are reduced.
        &format!("link {INTERFACE} --rate 50mbit"),
        "set user nobody rx --packets 5",
        "del user nobody rx",
    ] {
        let (status, said) = qos(&bed, line);
        assert_eq!(status, 0, "{line}: {said}");
    }
    let mut before = standing(&bed);
    let reduced = before["transmit"].as_array().unwrap().iter();
    let reduced = reduced.filter(|entry| entry["kept"] != "full").count();
    assert_eq!(reduced, 5, "{before}");
    let cpu = before["cpu"].as_array_mut().unwrap();
    assert_eq!(cpu.len(), 3);
    // It ends with its process, while there is no server.
    cpu.retain(|entry| entry["scope"] != format!("pid {ended}"));
    let mut brief = Some(brief);
    for end in [Signal::KILL, Signal::TERM, Signal::KILL] {
        stop_server(&mut bed, Side::Client, end);
        drop(brief.take());
        start_server(&mut bed, Side::Client);
        let are_back = || standing(&bed) == before;
        assert!(
            eventually(SOON, are_back),
            "{}\n{before}\n{}",
            standing(&bed),
            bed.daemon_log(Side::Client)
        );
        let lost = counter(&bed, Side::Client, "server", "guarantees_lost");
        assert_eq!(lost, 0, "{}", bed.daemon_log(Side::Client));
        sender.go_on();
        let took: f64 = sender.line().parse().expect("a time");
        // Two thirds of a second at its own rate, a third at that of its process.
        assert!(took > 0.5, "{took} s");
    }
    stop_server(&mut bed, Side::Client, Signal::INT);
    start_server(&mut bed, Side::Client);
    for kind in ["transmit", "groups", "receive", "cpu"] {
        assert_eq!(standing(&bed)[kind], serde_json::json!([]));
    }
}
