//! Shared by the program tests: the pairings of stacks, Python, and waiting for conditions.
#![forbid(unsafe_code)]

pub mod load;
pub mod strangers;
pub mod stream;
pub mod web;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Impairment;
use rustix::process::Signal;

const SERVER_ENDS: Duration = Duration::from_secs(10);

/// Debian's interpreter, not one that a version manager wraps in a shell script.
pub const PYTHON: &str = "/usr/bin/python3";

/// The stacks of the two ends of a test.
#[derive(Clone, Copy, Debug)]
pub struct Pairing {
    pub server: Stack,
    pub client: Stack,
}

/// Portolan at both ends, and the kernel's stack at either end.
pub const PAIRINGS: [Pairing; 3] = [
    Pairing {
        server: Stack::Portolan,
        client: Stack::Portolan,
    },
    Pairing {
        server: Stack::Portolan,
        client: Stack::Kernel,
    },
    Pairing {
        server: Stack::Kernel,
        client: Stack::Portolan,
    },
];

/// The stacks of a client's sockets.
pub const STACKS: [Stack; 2] = [Stack::Kernel, Stack::Portolan];

/// Makes a bed with a server on each host.
///
/// # Panics
/// Without root, and without the programs that `cargo build` makes.
pub fn bed() -> Bed {
    Bed::new().unwrap_or_else(|error| panic!("no bed (root and `cargo build` are needed): {error}"))
}

/// Makes a bed on a wire with a server on each host, which has these lines in its configuration.
///
/// # Panics
/// As [`bed`].
pub fn bed_with(wire: portolan_netns::Bed, settings: &str) -> Bed {
    let mut bed = Bed::bare(wire).unwrap_or_else(|error| panic!("no bed: {error}"));
    bed.set_settings(settings);
    for side in [Side::Client, Side::Server] {
        bed.start_daemon(side)
            .unwrap_or_else(|error| panic!("{error}"));
    }
    bed
}

/// Makes a bed with a server on each host, on an impaired link.
///
/// # Panics
/// As [`bed`].
pub fn impaired_bed(impairment: Impairment) -> Bed {
    Bed::impaired(impairment).unwrap_or_else(|error| panic!("no bed: {error}"))
}

/// Makes a bed whose hosts are connected by routers with a narrow link.
///
/// # Panics
/// As [`bed`].
pub fn routed_bed(mtu: u32) -> Bed {
    Bed::routed(mtu).unwrap_or_else(|error| panic!("no bed: {error}"))
}

/// Runs a test for every pairing on one bed, and prints each pairing before its run.
pub fn each_pairing(bed: &Bed, mut test: impl FnMut(&Bed, Pairing)) {
    for pairing in PAIRINGS {
        eprintln!("{pairing:?}");
        test(bed, pairing);
    }
}

/// Runs a test for every pairing over both IP versions, on one bed.
pub fn over_both_families(mut test: impl FnMut(&Bed, Pairing)) {
    let bed = bed();
    each_pairing(&bed, &mut test);
    eprintln!("over IPv6");
    each_pairing(&bed.over_ipv6(), &mut test);
}

/// Writes a file to the bed's directory and returns its path.
///
/// # Panics
/// Without room on the disk.
pub fn file(bed: &Bed, name: &str, text: impl AsRef<[u8]>) -> String {
    let path = bed.file(name);
    fs::write(&path, text).expect("the bed's directory is writable");
    path.display().to_string()
}

/// Compiles a program in C, with as many warnings as a user of the headers may enable. `source` is its path in the
/// repository.
///
/// # Panics
/// If the compiler reports anything.
pub fn compiled(bed: &Bed, source: &str) -> String {
    let source = Path::new(source);
    let name = source.file_stem().expect("a file").to_string_lossy();
    let program = bed.file(&name).display().to_string();
    compile(source, &program, &C11, &[]);
    program
}

/// Compiles a protocol extension.
///
/// # Panics
/// If the compiler reports an error.
pub fn compiled_extension(bed: &Bed, name: &str, text: &str) -> PathBuf {
    const INCLUDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../include");
    let source = file(bed, &format!("{name}.c"), text);
    let object = bed.file(&format!("{name}.o"));
    let mut clang = Command::new("clang");
    clang.args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-I", INCLUDE]);
    clang.args(["-I", "/usr/include/x86_64-linux-gnu", "-c", &source, "-o"]);
    run(clang.arg(&object)).unwrap_or_else(|error| panic!("{error}"));
    object
}

/// As [`compiled`], linked with the library as an installed program would be.
///
/// # Panics
/// If the compiler reports anything, or without the library that `cargo build` makes.
pub fn linked(bed: &Bed, source: &str) -> String {
    let directory = bed.file("lib");
    fs::create_dir_all(&directory).expect("the bed's directory is writable");
    let library = bed.tools().beside("libportolan_preload.so");
    for name in ["libportolan.so.0", "libportolan.so"] {
        symlink(&library, directory.join(name)).expect("there is none");
    }
    let program = bed.file("linked").display().to_string();
    let directory = directory.display();
    let libraries = [
        &format!("-L{directory}"),
        "-Wl,--as-needed",
        "-lportolan",
        &format!("-Wl,-rpath,{directory}"),
    ];
    compile(Path::new(source), &program, &C11, &libraries);
    program
}

/// Compiles a shared library in C for preloading, with the given name and macro definitions.
///
/// # Panics
/// If the compiler reports anything.
pub fn compiled_library(bed: &Bed, source: &str, name: &str, options: &[&str]) -> String {
    let library = bed.file(&format!("{name}.so")).display().to_string();
    let options = [&["-shared", "-fPIC"], options].concat();
    compile(Path::new(source), &library, &options, &[]);
    library
}

const C11: [&str; 3] = ["-pedantic", "-std=c11", "-D_POSIX_C_SOURCE=200809L"];

fn compile(source: &Path, into: &str, options: &[&str], libraries: &[&str]) {
    const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Wextra", "-Werror"])
        .args(options)
        .args(["-I", &format!("{ROOT}/include"), "-o", into])
        .arg(Path::new(ROOT).join(source))
        .args(libraries);
    run(&mut compiler).unwrap_or_else(|error| panic!("{error}"));
}

/// Starts a TCP service on the server host and waits until it listens.
///
/// # Panics
/// If it does not start.
pub fn serve(bed: &Bed, stack: Stack, port: u16, program: &str, arguments: &[&str]) -> Background {
    bed.serve(stack, port, program, arguments)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Copies Portolan's programs to where every user may execute them, and returns their directory.
///
/// # Panics
/// Without the programs that `cargo build` makes.
pub fn public_programs(bed: &Bed) -> PathBuf {
    bed.public_programs()
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a program on the client host to its end and returns its output.
///
/// # Panics
/// If it fails.
pub fn client(bed: &Bed, stack: Stack, program: &str, arguments: &[&str]) -> String {
    run(bed.command(Side::Client, stack, program).args(arguments))
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the number of sessions in the server of one host, except those in TIME-WAIT, which stay for a minute.
///
/// # Panics
/// If the server does not answer.
pub fn live_sessions(bed: &Bed, side: Side) -> usize {
    sessions_where(bed, side, |state| state != "TIME-WAIT")
}

/// Lists the sockets of both stacks on the server host.
pub fn sockets(bed: &Bed) -> String {
    let shown = bed.portolan(Side::Server, &["ss", "--kernel", "-tuanpe"]);
    shown.unwrap_or_else(|error| error.to_string())
}

/// The state of the server of the server host; null if it does not answer.
pub fn status(bed: &Bed) -> serde_json::Value {
    let text = bed.portolan(Side::Server, &["status", "--json"]);
    serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default()
}

/// Returns the number of a server's sessions in a state, as spelled by `portolan ss`.
///
/// # Panics
/// If the server does not answer.
pub fn sessions_in(bed: &Bed, side: Side, state: &str) -> usize {
    sessions_where(bed, side, |its| its == state)
}

fn sessions_where(bed: &Bed, side: Side, has_state: impl Fn(&str) -> bool) -> usize {
    let text = bed
        .portolan(side, &["ss", "-a", "--json"])
        .expect("the server answers");
    let sessions: serde_json::Value = serde_json::from_str(&text).expect("ss prints JSON");
    let sessions = sessions.as_array().expect("a list");
    let states = sessions
        .iter()
        .filter_map(|session| session["state"].as_str());
    states.filter(|state| has_state(state)).count()
}

/// Waits until the condition holds. Returns false if it does not within `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// Ends the server of a host by a signal.
///
/// # Panics
///
/// If it does not end.
pub fn stop_server(bed: &mut Bed, side: Side, end: Signal) {
    let mut daemon = bed.daemon(side).take().expect("it runs");
    daemon.signal(end).expect("it runs");
    assert!(daemon.wait(SERVER_ENDS), "the server does not end");
}

/// Starts the next server of a host.
///
/// # Panics
///
/// If it does not start.
pub fn start_server(bed: &mut Bed, side: Side) {
    bed.start_daemon(side)
        .unwrap_or_else(|error| panic!("{error}"));
}

/// [`stop_server`], then [`start_server`].
pub fn restart_server(bed: &mut Bed, side: Side, end: Signal) {
    stop_server(bed, side, end);
    start_server(bed, side);
}

/// Returns a counter of a host's server; 0 if there is none with this name.
///
/// # Panics
/// If the server does not answer.
pub fn counter(bed: &Bed, side: Side, group: &str, name: &str) -> u64 {
    let text = bed
        .portolan(side, &["counters", "--all", "--json"])
        .expect("the server answers");
    let counters: serde_json::Value = serde_json::from_str(&text).expect("counters prints JSON");
    counters
        .as_array()
        .expect("a list")
        .iter()
        .find(|counter| counter["group"] == group && counter["name"] == name)
        .and_then(|counter| counter["value"].as_u64())
        .unwrap_or(0)
}

/// A program that reports its progress, and continues when it reads a line.
pub struct Steps {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Steps {
    /// # Panics
    /// If it does not start.
    pub fn start(command: &mut Command) -> Steps {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let output = BufReader::new(child.stdout.take().expect("is piped"));
        Steps { child, output }
    }

    /// # Panics
    /// If the next line is a different one.
    pub fn await_line(&mut self, expected: &str) {
        assert_eq!(self.line(), expected);
    }

    /// Returns the next line of its output.
    ///
    /// # Panics
    /// If that is not valid UTF-8.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("is text");
        line.trim().to_owned()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// # Panics
    /// If it has ended.
    pub fn go_on(&mut self) {
        self.say("");
    }

    /// # Panics
    /// If it has ended.
    pub fn say(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("is piped");
        writeln!(input, "{line}").expect("it reads");
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        // Fails if the program has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
