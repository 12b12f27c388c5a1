//! Programs of a user without any privilege.

use std::path::Path;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run;
use portolan_programs::{PYTHON, bed, public_programs};

const PORT: u16 = 7012;

fn as_nobody(bed: &Bed, programs: &Path, arguments: &[&str]) -> String {
    let traffic = programs.join("portolan-traffic").display().to_string();
    run_as_nobody(bed, programs, &[&[traffic.as_str()], arguments].concat())
}

fn run_as_nobody(bed: &Bed, programs: &Path, words: &[&str]) -> String {
    let mut command = bed.command(Side::Client, Stack::Kernel, "setpriv");
    command.args([
        "--reuid=nobody",
        "--regid=nogroup",
        "--clear-groups",
        "--no-new-privs",
        "--",
    ]);
    command
        .arg(programs.join("portolan"))
        .args(["run", "--require", "--"])
        .args(words);
    run(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn nobody_can_run_programs_on_portolan() {
    let bed = bed();
    let programs = public_programs(&bed);
    let endpoint = bed.endpoint(PORT).to_string();
    let _greet = bed
        .serve(
            Stack::Portolan,
            PORT,
            "portolan-traffic",
            &["greet", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let report = as_nobody(
        &bed,
        &programs,
        &["connect", &endpoint, "--count", "20", "--seconds", "10"],
    );
    assert!(report.contains("\"connections\":20"), "{report}");
}

/// Binds a port of each protocol, and prints the results.
const BIND: &str = "import errno, socket, sys
for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
    s = socket.socket(socket.AF_INET, kind)
    try:
        s.bind(('', int(sys.argv[1])))
        print('bound', end=' ')
    except OSError as e:
        print(errno.errorcode[e.errno], end=' ')";

/// The setting is read when a program registers, without a restart of the server.
#[test]
fn the_hosts_first_unprivileged_port_is_portolans_too() {
    let bed = bed();
    let programs = public_programs(&bed);
    let bind = |first: u32, port: u16| {
        let setting = format!("net.ipv4.ip_unprivileged_port_start={first}");
        let mut sysctl = bed.command(Side::Client, Stack::Kernel, "sysctl");
        run(sysctl.args(["-qw", &setting])).expect("the host's own setting");
        let words = [PYTHON, "-c", BIND, &port.to_string()];
        run_as_nobody(&bed, &programs, &words)
    };
    for (first, port, expected) in [
        (1024, 81, "EACCES EACCES"),
        (81, 81, "bound bound"),
        (82, 81, "EACCES EACCES"),
        (0, 1, "bound bound"),
        (8000, PORT, "EACCES EACCES"),
        (1024, PORT, "bound bound"),
    ] {
        assert_eq!(bind(first, port), expected, "{port} of {first} on");
    }
}
