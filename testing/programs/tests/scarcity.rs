//! Programs and servers that run out of descriptors: a call fails as on Linux, nothing is lost, and work continues
//! when a descriptor is free again.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{PYTHON, STACKS, bed, counter, eventually};

const SCARCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/scarce.py");
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/delegated.py");
const NUMBERS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/fixtures/descriptor_numbers.py"
);
const CROWD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/crowd.py");
const PORT: u16 = 7150;
const LIMIT: Duration = Duration::from_secs(20);

/// Four clients, in turn, each of which sends a word and waits for its echo.
const CLIENTS: &str = "
import socket, sys
for word in (b'first', b'second', b'third', b'fourth'):
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as client:
        client.sendall(word)
        assert client.recv(16) == word, word
";

#[test]
fn who_has_too_few_descriptors_fails_as_on_linux_and_recovers() {
    let ipv4 = bed();
    let ipv6 = bed().over_ipv6();
    for bed in [&ipv4, &ipv6] {
        for (limit, when) in [("64", "early"), ("64", "late"), ("1024", "early")] {
            let told = STACKS.map(|stack| told_by(bed, stack, Side::Client, &[limit, when], &[]));
            assert_eq!(told[0], told[1], "{limit} {when}");
            assert!(told[0].contains("free 1 served"), "{}", told[0]);
        }
        let local = told_by(bed, Stack::Portolan, Side::Server, &["64", "early"], &[]);
        let kernel = told_by(bed, Stack::Kernel, Side::Server, &["64", "early"], &[]);
        assert_eq!(kernel, local, "within one host");
        let delegate = [("PORTOLAN_DELEGATE", "1")];
        let words = ["64", "early"];
        let delegated = told_by(bed, Stack::Portolan, Side::Client, &words, &delegate);
        assert_eq!(kernel, delegated, "delegated");
        assert!(counter(bed, Side::Server, "server", "listeners_delegated") > 0);
    }
}

/// Returns the fixture's output, with clients on the kernel's stack of the other host, or on Portolan on the same host.
fn told_by(
    bed: &Bed,
    stack: Stack,
    clients: Side,
    words: &[&str],
    variables: &[(&str, &str)],
) -> String {
    let endpoint = bed.endpoint(PORT);
    let address = endpoint.ip().to_string();
    let mut server = bed.command(Side::Server, stack, PYTHON);
    server
        .envs(variables.iter().copied())
        .args([SCARCE, &address, &PORT.to_string()])
        .args(words)
        .stdout(Stdio::piped());
    let mut server = Background::start_with_output(&mut server).expect("it starts");
    assert!(eventually(LIMIT, || bed.is_listening(PORT)));
    let (clients_stack, served) = match clients {
        Side::Client => (Stack::Kernel, "passive_opens"),
        Side::Server => (stack, "local_sessions"),
    };
    let before = counter(bed, Side::Server, "server", served);
    let mut command = bed.command(clients, clients_stack, PYTHON);
    run(command.args(["-c", CLIENTS, &address, &PORT.to_string()])).expect("all are served");
    let by_portolan = counter(bed, Side::Server, "server", served) - before;
    let expected = if stack == Stack::Portolan { 4 } else { 0 };
    // A delegated listener's process opens them itself.
    assert!(
        by_portolan >= expected || !variables.is_empty(),
        "{by_portolan} {served}"
    );
    server.wait(LIMIT);
    server.finish()
}

/// Connects repeatedly, and prints whether the host refused descriptors in between.
const RETRIES: &str = "
import errno, socket, sys
refused = 0
for number in range(30):
    while True:
        try:
            client = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
            break
        except OSError as error:
            assert error.errno == errno.ENFILE, error
            refused += 1
    with client:
        client.sendall(b'word')
        got = client.makefile('rb').read(4)
        assert got == b'word', (number, refused, got)
print('some refused' if refused else 'none refused')
";

/// The host has no more open files for some of a program's calls. Strace makes them fail, since the limit holds for the
/// whole machine.
#[test]
fn only_those_calls_fail_for_which_the_host_has_too_few_files() {
    const FAILING: &str = "inject=socketpair,eventfd2,memfd_create:error=ENFILE:when=3+2";
    let ipv4 = bed();
    let ipv6 = bed().over_ipv6();
    for bed in [&ipv4, &ipv6] {
        let endpoint = bed.endpoint(PORT);
        let name = endpoint.to_string();
        let echo = ["echo", "tcp", &name];
        let _server = bed
            .serve(Stack::Portolan, PORT, "portolan-traffic", &echo)
            .expect("it starts");
        for (side, opened) in [
            (Side::Client, "active_opens"),
            (Side::Server, "local_sessions"),
        ] {
            let before = counter(bed, side, "server", opened);
            let mut command = bed.command(side, Stack::Kernel, "strace");
            let output = bed.file("strace").display().to_string();
            command
                .args(["-f", "-o", &output, "-e", FAILING])
                .args(bed.words(Stack::Portolan, PYTHON))
                .args(["-c", RETRIES, &endpoint.ip().to_string(), &PORT.to_string()]);
            let said = run(&mut command).unwrap_or_else(|error| panic!("{side}: {error}"));
            assert_eq!(said, "some refused", "{side}");
            assert!(
                counter(bed, side, "server", opened) >= before + 30,
                "{side}"
            );
        }
    }
}

/// The library's own descriptors count only if the hard limit leaves no numbers above the soft one.
#[test]
fn a_program_may_have_as_many_sockets_as_on_linux() {
    const OWN: usize = 24;
    let ipv4 = bed();
    let ipv6 = bed().over_ipv6();
    for bed in [&ipv4, &ipv6] {
        let address = bed.server.address.to_string();
        let told_with = |limits: &[&str]| {
            STACKS.map(|stack| {
                let mut program = bed.command(Side::Server, stack, PYTHON);
                let told = run(program.args([NUMBERS, &address]).args(limits));
                told.unwrap_or_else(|error| panic!("{stack:?} {limits:?}: {error}"))
            })
        };
        for soft in ["256", "1024"] {
            let [kernel, portolan] = told_with(&[soft]);
            assert_eq!(kernel, portolan, "{soft}");
        }
        let counts = |told: &str| -> Vec<usize> {
            let words = told.split_whitespace();
            words.map(|word| word.parse().expect("a number")).collect()
        };
        let [kernel, portolan] = told_with(&["256", "256"]);
        let pairs = counts(&kernel).into_iter().zip(counts(&portolan));
        for (kernel, portolan) in pairs {
            assert!(kernel - portolan <= OWN, "{portolan} of {kernel}");
        }
    }
}

/// Sets the limit of a running server.
fn limit(pid: u32, count: usize) {
    let mut prlimit = Command::new("prlimit");
    prlimit.args(["--pid", &pid.to_string()]);
    run(prlimit.arg(format!("--nofile={count}:"))).expect("root may");
}

#[test]
fn a_server_without_descriptors_harms_no_session_and_goes_on_with_some() {
    let mut bed = bed();
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let mut program = bed.command(Side::Server, Stack::Portolan, PYTHON);
    program.args([SERVER, "poll", &address, &port, "100"]);
    let _program = bed
        .serve_command(PORT, "delegated.py", &mut program)
        .unwrap_or_else(|error| panic!("{error}"));
    let mut session = connect(&bed, PORT);
    exchange(&mut session, 2, 1000);
    let daemon = bed.daemon(Side::Server).as_ref().expect("it runs").pid();
    let open = std::fs::read_dir(format!("/proc/{daemon}/fd")).expect("root may");
    let numbers = open
        .flatten()
        .filter_map(|file| file.file_name().to_str()?.parse().ok());
    let highest: usize = numbers.max().expect("some");
    limit(daemon, highest + 24);

    let mut crowd = bed.command(Side::Client, Stack::Kernel, PYTHON);
    let words = [CROWD, &address, &port, "60", "60", "15"];
    crowd.args(words).stdout(Stdio::piped());
    let mut crowd = Background::start_with_output(&mut crowd).expect("it starts");
    // Another program requests more than is available, and gets an error.
    let mut asking = bed.command(Side::Server, Stack::Portolan, PYTHON);
    const ASKING: &str = "
import errno, socket, sys
listener = socket.create_server((sys.argv[1], 0))
sockets = []
try:
    for _ in range(100):
        sockets.append(socket.create_server((sys.argv[1], 0)))
except OSError as error:
    print(errno.errorcode[error.errno])
";
    asking.args(["-c", ASKING, &address]).stdout(Stdio::piped());
    let mut asking = Background::start_with_output(&mut asking).expect("it starts");
    sleep(Duration::from_secs(2));
    exchange(&mut session, 2, 100_000);
    limit(daemon, highest + 500);
    assert!(crowd.wait(LIMIT));
    assert_eq!(crowd.finish().trim(), "served=60 waiting=0");
    assert!(asking.wait(LIMIT));
    assert!(counter(&bed, Side::Server, "server", "descriptors_short") > 0);
    assert_eq!(
        counter(&bed, Side::Server, "server", "malformed_messages"),
        0
    );
    exchange(&mut session, 2, 1000);
    assert_ends_in_order(session);
    assert!(
        bed.daemon_log(Side::Server)
            .contains("descriptors are short")
    );
}
