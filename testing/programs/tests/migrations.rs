//! A busy connection whose session migrates to the server and back repeatedly: its stream
//! stays exact.

use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run_within;
use portolan_netns::{Daemon, Impairment, Ready};
use portolan_programs::{PYTHON, counter, impaired_bed};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/moving.py");
const PORT: u16 = 7041;

/// Number of migrations to the server and back; the acceptance test of a release sets it to 1000.
fn moves() -> u64 {
    let moves = std::env::var("PORTOLAN_TEST_MOVES");
    moves.map_or(60, |text| text.parse().expect("a number"))
}

/// Bytes between two migrations. With the loss of this test the link takes 45 ms for those that the kernel's stack
/// receives and 10 ms for those that it sends: it loses whole TSO segments, which are fewer and longer.
const WAYS: [(&str, u64); 2] = [("send", 256 << 10), ("receive", 1 << 20)];

/// Minimum part of the throughput without migrations, even if other work takes most of the cores, and losses happen to
/// spare the run at rest. Usual are 0.4 and more.
const LEAST: f64 = 0.15;

/// Returns the seconds that all blocks took.
fn play(bed: &Bed, (way, block): (&str, u64), movement: &str) -> f64 {
    let endpoint = bed.endpoint(PORT);
    let arguments = |role: &str| {
        let mut all = vec![
            SCRIPT.to_owned(),
            role.to_owned(),
            endpoint.ip().to_string(),
        ];
        all.extend([endpoint.port().to_string(), way.to_owned()]);
        all.extend([moves(), block].map(|number| number.to_string()));
        all.push(movement.to_owned());
        all
    };
    let mut peer = bed.command(Side::Server, Stack::Kernel, PYTHON);
    peer.args(arguments("peer"));
    let peer = Daemon::start(peer, Ready::Line("ready".to_owned()));
    let mut takers = bed.command(Side::Client, Stack::Portolan, PYTHON);
    let limit = Duration::from_secs(30 + moves());
    let output = run_within(takers.args(arguments("take")), limit)
        .unwrap_or_else(|error| panic!("{way}, {movement}: {error}\n{}", peer.output()));
    output.trim().parse().expect("seconds")
}

/// Returns how often a session migrated to the library.
fn cached(bed: &Bed) -> u64 {
    counter(bed, Side::Client, "server", "sessions_cached")
}

/// Returns the bytes of all capsules in both directions, with the data that accompanies them.
fn carried(bed: &Bed) -> u64 {
    counter(bed, Side::Client, "server", "capsule_bytes")
}

#[test]
fn a_busy_stream_whose_session_moves_is_exact() {
    let bed = impaired_bed(Impairment {
        loss: 0.02,
        delay: Duration::from_micros(500),
        ..Impairment::default()
    });
    for (way, block) in WAYS {
        let at_rest = play(&bed, (way, block), "rest");
        let before = (cached(&bed), carried(&bed));
        let moving = play(&bed, (way, block), "move");
        let came_back = cached(&bed) - before.0;
        let kibibytes = (carried(&bed) - before.1) / 1024 / came_back.max(1);
        let ratio = at_rest / moving;
        eprintln!(
            "{way}: came back {came_back} times with {kibibytes} KiB there and back, \
             {ratio:.2} of the throughput at rest ({at_rest:.2} s)"
        );
        assert!(came_back >= moves() / 2, "{came_back} of {}", moves());
        assert!(
            ratio >= LEAST,
            "{way}: {ratio:.2} of the throughput at rest"
        );
    }
}
