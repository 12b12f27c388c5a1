//! Echo services of Python's and Java's libraries, and many clients of Python's asyncio
//! that check each byte.

use std::process::Command;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PYTHON, STACKS, bed, client, counter, each_pairing, serve};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/echo.py");

fn serve_python(bed: &Bed, stack: Stack, way: &str) -> Background {
    let address = bed.server.address.to_string();
    serve(bed, stack, 7041, PYTHON, &[SCRIPT, way, &address, "7041"])
}

fn load(bed: &Bed, stack: Stack, connections: &str, blocks: &str) {
    let address = bed.server.address.to_string();
    let arguments = [SCRIPT, "load", &address, "7041", connections, blocks];
    assert_eq!(client(bed, stack, PYTHON, &arguments), "exact");
}

#[test]
fn asyncio_holds_five_hundred_connections() {
    each_pairing(&bed(), |bed, pairing| {
        let _server = serve_python(bed, pairing.server, "asyncio");
        load(bed, pairing.client, "500", "10");
    });
}

/// The kernel, which reserves the port, must not answer packets that the filter is about to handle.
#[test]
fn who_tries_to_connect_when_a_program_begins_to_listen_is_refused_or_served() {
    const SERVE: &str = "import socket, sys
for port in map(int, sys.argv[2:]):
    with socket.create_server((sys.argv[1], port)) as listener:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(1))";
    const INSIST: &str = "import socket, sys
for port in map(int, sys.argv[2:]):
    while True:
        s = socket.socket()
        s.settimeout(20)
        try:
            s.connect((sys.argv[1], port))
            break
        except ConnectionRefusedError:
            s.close()
    s.sendall(b'x')
    assert s.recv(1) == b'x'";
    let bed = bed();
    let ports: Vec<String> = (7100..7200).map(|port: u16| port.to_string()).collect();
    let address = bed.server.address.to_string();
    let arguments = |script| {
        let fixed = ["-c", script, &address].map(str::to_owned);
        [&fixed[..], &ports].concat()
    };
    let mut server = bed.command(Side::Server, Stack::Portolan, PYTHON);
    let _server = Background::start(server.args(arguments(SERVE))).expect("python3 is there");
    run(bed
        .command(Side::Client, Stack::Kernel, PYTHON)
        .args(arguments(INSIST)))
    .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(counter(&bed, Side::Server, "server", "kernel_accepts"), 0);
}

#[test]
fn a_process_for_each_connection() {
    let bed = bed();
    let _server = serve_python(&bed, Stack::Portolan, "forking");
    for stack in STACKS {
        load(&bed, stack, "60", "20");
    }
}

#[test]
fn a_thread_for_each_connection() {
    let bed = bed();
    let _server = serve_python(&bed, Stack::Portolan, "threading");
    for stack in STACKS {
        load(&bed, stack, "200", "20");
    }
}

#[test]
fn a_selector_of_javas() {
    const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/Echo.java");
    let bed = bed();
    let classes = bed.file("classes").display().to_string();
    run(Command::new("javac").args(["-d", &classes, SOURCE])).unwrap_or_else(|e| panic!("{e}"));
    let address = bed.server.address.to_string();
    let arguments = ["-cp", &classes, "Echo", &address, "7041"];
    let _java = serve(&bed, Stack::Portolan, 7041, "java", &arguments);
    for stack in STACKS {
        load(&bed, stack, "200", "20");
    }
}
