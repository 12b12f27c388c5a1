//! Servers that are started repeatedly, since stalls depend on timing.

use portolan_bench::bed::{Bed, Side};

use crate::{PAIRINGS, Pairing, bed, counter};

/// Number of starts for each pairing of stacks, unless `PORTOLAN_TEST_STARTS` is set.
const STARTS: usize = 3;

fn starts() -> usize {
    let chosen = std::env::var("PORTOLAN_TEST_STARTS").ok();
    let chosen = chosen.and_then(|starts| starts.parse().ok());
    chosen.unwrap_or(STARTS)
}

/// Starts a server several times for each pairing, and uses it each time.
///
/// # Panics
/// If `start` or `use_it` does, or if a server that should run on Portolan did not.
pub fn each_start<S>(start: impl Fn(&Bed, Pairing) -> S, use_it: impl Fn(&Bed, Pairing, usize)) {
    let bed = bed();
    for pairing in PAIRINGS {
        for turn in 0..starts() {
            eprintln!("{pairing:?}, {turn}");
            let _server = start(&bed, pairing);
            use_it(&bed, pairing, turn);
        }
    }
    let served = counter(&bed, Side::Server, "server", "passive_opens");
    assert!(
        served >= 2 * starts() as u64,
        "{served} connections were Portolan's"
    );
}

/// The server host's address, as an argument of programs.
pub fn address(bed: &Bed) -> String {
    bed.server.address.to_string()
}
