//! Data that a peer sends before the program uses its connection is received and acknowledged without a call of the
//! program: it is not returned to the server, and nothing is retransmitted because of it.

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_programs::{PYTHON, bed, client};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/early.py");
const PORT: u16 = 7031;
/// Less than the peer's initial window, so that it sends all at once.
const LENGTH: &str = "9000";
const COUNT: u64 = 20;

fn counter(bed: &Bed, name: &str) -> u64 {
    let text = bed
        .portolan(Side::Client, &["counters", "--all"])
        .expect("the server answers");
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {text}"))
}

#[test]
fn what_a_peer_sends_at_once_is_taken_while_the_program_looks_away() {
    let bed = bed();
    check(&bed);
    check(&bed.over_ipv6());
}

fn check(bed: &Bed) {
    let names = [
        "stack.drop_early",
        "stack.unclaimed",
        "server.reinjected_frames",
    ];
    let before = names.map(|name| counter(bed, name));
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let count = COUNT.to_string();
    let words = |role| [SCRIPT, role, &address, &port, LENGTH, &count];
    let _peer = bed
        .serve(Stack::Kernel, PORT, PYTHON, &words("serve"))
        .unwrap_or_else(|error| panic!("{error}"));
    let said = client(bed, Stack::Portolan, PYTHON, &words("ask"));
    assert_eq!(said, "all right");
    let after = names.map(|name| counter(bed, name));
    let counts: [u64; 3] = std::array::from_fn(|at| after[at] - before[at]);
    let [dropped, unclaimed, reinjected] = counts;
    assert_eq!(dropped, 0, "{names:?} {counts:?}");
    // Per connection, one segment may cross the session's migration in each direction.
    assert!(
        unclaimed <= 2 * COUNT && reinjected <= 2 * COUNT,
        "{names:?} {counts:?}"
    );
}
