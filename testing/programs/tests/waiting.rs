//! No wait ends late: threads that open, accept, add, remove and wait by every call there is, on sockets that
//! others of them opened (`docs/design/waiting.md`).

use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run;
use portolan_programs::{Pairing, bed, compiled, each_pairing, serve};

const SOURCE: &str = "testing/programs/fixtures/waiting.c";

/// Four times the cores of the machine that the project is built on.
const THREADS: &str = "8";

/// For how long each combination runs; `PORTOLAN_TEST_SECONDS` says another.
const SECONDS: u64 = 3;

fn seconds() -> String {
    let chosen = std::env::var("PORTOLAN_TEST_SECONDS").ok();
    let chosen = chosen.and_then(|seconds| seconds.parse::<u64>().ok());
    Duration::from_secs(chosen.unwrap_or(SECONDS))
        .as_secs()
        .to_string()
}

fn over_the_wire(bed: &Bed, pairing: Pairing, program: &str, port: u16) {
    let address = bed.server.address.to_string();
    let arguments = |what| vec![what, address.as_str()];
    let port = port.to_string();
    let mut serving = arguments("serve");
    serving.extend([port.as_str(), THREADS]);
    let number = port.parse().expect("a port");
    let _server = serve(bed, pairing.server, number, program, &serving);
    let seconds = seconds();
    let mut driving = arguments("drive");
    driving.extend([port.as_str(), THREADS, &seconds, "1"]);
    let mut command = bed.command(Side::Client, pairing.client, program);
    let report = run(command.args(driving)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{pairing:?} {address}: {report}");
}

#[test]
fn no_wait_ends_late_over_the_wire() {
    let bed = bed();
    let program = compiled(&bed, SOURCE);
    // The service of streams has a port of its own, one above.
    let mut ports = (7100..).step_by(2);
    let mut test = |bed: &Bed, pairing| {
        let port = ports.next().expect("there are more");
        over_the_wire(bed, pairing, &program, port);
    };
    each_pairing(&bed, &mut test);
    each_pairing(&bed.over_ipv6(), &mut test);
}

#[test]
fn no_wait_ends_late_within_one_host() {
    let bed = bed();
    let program = compiled(&bed, SOURCE);
    let own = bed.server.address.to_string();
    for (address, port) in [("127.0.0.1", "7130"), ("::1", "7140"), (&own, "7150")] {
        for seed in ["1", "2"] {
            let arguments = ["both", address, port, THREADS, &seconds(), seed];
            let mut command = bed.neighbour(Stack::Portolan, &program);
            let report =
                run(command.args(arguments)).unwrap_or_else(|error| panic!("{address}: {error}"));
            eprintln!("{address}: {report}");
        }
    }
}
