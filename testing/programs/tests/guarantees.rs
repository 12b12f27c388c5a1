//! Guarantees as requested by users: by command, by policy, and by the program itself in C.

use std::process::Command;
use std::time::Instant;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::ProcessError;
use portolan_programs::{PYTHON, bed, bed_with, client, compiled, serve};

const SINK: &str = "import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    peer, _ = listener.accept()
    while peer.recv(1 << 20): pass
    peer.close()";
const PORT: u16 = 7_081;
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
