//! Programs in C that are linked with the library, and its headers.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::stream::{connect, exchange};
use portolan_programs::{bed, counter, linked};

const PORT: u16 = 7240;

fn echo(bed: &Bed, stack: Stack, program: &str) -> Background {
    let address = bed.server.address.to_string();
    let arguments = [address.as_str(), &PORT.to_string()];
    bed.serve(stack, PORT, program, &arguments)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the files that contain the library, as mapped by a program.
fn copies(program: &str) -> Vec<String> {
    let is_it = |maps: &String| maps.lines().any(|line| line.ends_with(program));
    let processes = fs::read_dir("/proc").expect("it is mounted");
    let mut maps = processes
        .flatten()
        .filter_map(|process| fs::read_to_string(process.path().join("maps")).ok())
        .filter(is_it);
    let maps = maps.next().expect("the program runs");
    let code = maps.lines().filter(|line| line.contains("r-xp"));
    let libraries = code.filter(|line| line.contains("libportolan"));
    libraries.map(str::to_owned).collect()
}

#[test]
fn a_program_that_is_linked_with_the_library_runs_on_it() {
    let bed = bed();
    let program = linked(&bed, "docs/examples/echo.c");
    for stack in [Stack::Kernel, Stack::Portolan] {
        let _server = echo(&bed, stack, &program);
        let before = counter(&bed, Side::Server, "server", "passive_opens");
        let mut stream = connect(&bed, PORT);
        exchange(&mut stream, 5, 30_000);
        drop(stream);
        let opened = counter(&bed, Side::Server, "server", "passive_opens") - before;
        assert_eq!(opened, 1, "{stack:?}");
        let copies = copies(&program);
        assert_eq!(copies.len(), 1, "{stack:?}: {copies:?}");
    }
}

/// As on Linux, since there is no server in the namespace.
#[test]
fn without_a_server_it_runs_on_the_kernels_sockets() {
    let mut bed = bed();
    let program = linked(&bed, "docs/examples/echo.c");
    *bed.daemon(Side::Server) = None;
    let _server = echo(&bed, Stack::Kernel, &program);
    exchange(&mut connect(&bed, PORT), 5, 30_000);
}

#[test]
fn each_header_is_c11_and_cplusplus17() {
    let headers = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../include/portolan");
    let headers: Vec<PathBuf> = fs::read_dir(headers)
        .expect("the headers are there")
        .map(|entry| entry.expect("it is readable").path())
        // For programs in eBPF, which clang compiles.
        .filter(|header| !header.ends_with("extension.h"))
        .collect();
    assert!(headers.len() > 6, "{headers:?}");
    for header in headers {
        for (compiler, language, standard) in [("cc", "c", "c11"), ("c++", "c++", "c++17")] {
            let options = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"];
            let mut command = Command::new(compiler);
            command.args(options).arg(format!("-std={standard}"));
            let output = command.args(["-x", language]).arg(&header).output();
            let output = output.expect("the compiler runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {said}", header.display());
        }
    }
}
