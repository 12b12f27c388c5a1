//! Guarantees as users ask for them: by command, by policy, and by the program itself in C.

use std::path::PathBuf;
use std::process::Command;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{ProcessError, run};
use portolan_programs::{PYTHON, bed, client, serve};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const SINK: &str = "import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    peer, _ = listener.accept()
    while peer.recv(1 << 20): pass
    peer.close()";
const PORT: u16 = 7_081;

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

/// The status with which `portolan qos` ends, and what it says.
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

/// Compiles the example of the guide as a user would.
fn example(bed: &Bed) -> PathBuf {
    let program = bed.file("guarantees");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-std=c11"])
        .arg("-D_POSIX_C_SOURCE=200809L")
        .args(["-I", &format!("{ROOT}/include"), "-o"])
        .arg(&program)
        .arg(format!("{ROOT}/docs/examples/guarantees.c"));
    run(&mut compiler).unwrap_or_else(|error| panic!("{error}"));
    program
}

/// Runs the example and returns what it said.
fn send(bed: &Bed, stack: Stack, program: &str, bits: &str) -> String {
    let address = bed.endpoint(PORT).ip().to_string();
    client(bed, stack, program, &[&address, &PORT.to_string(), bits])
}

#[test]
fn the_guides_program_runs_with_and_without_portolan() {
    let bed = bed();
    let _sink = sink(&bed);
    let program = example(&bed).display().to_string();
    let said = send(&bed, Stack::Kernel, &program, "20000000");
    assert_eq!(said, "not on Portolan\nsent");
    // The link has no rate that could be told.
    let said = send(&bed, Stack::Portolan, &program, "20000000");
    assert!(
        said.starts_with("refused: ") && said.ends_with("\nsent"),
        "{said}"
    );
}
