//! Echo services as Python's and Java's libraries have them, and many clients of Python's asyncio
//! that check each octet.

use std::process::Command;

use portolan_bench::bed::{Bed, Stack};
use portolan_bench::process::run;
use portolan_programs::{PYTHON, STACKS, bed, client, each_pairing, serve};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/echo.py");

fn serve_python(bed: &Bed, stack: Stack, way: &str) -> portolan_bench::process::Background {
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
