//! Servers that are begun anew again and again, since stalls depend on the moment.

use portolan_bench::bed::{Bed, Side};

use crate::{PAIRINGS, Pairing, bed, counter};

/// For each pairing of stacks; `PORTOLAN_TEST_STARTS` says another number.
const STARTS: usize = 3;

fn starts() -> usize {
    let chosen = std::env::var("PORTOLAN_TEST_STARTS").ok();
    let chosen = chosen.and_then(|starts| starts.parse().ok());
    chosen.unwrap_or(STARTS)
}

/// Starts a server so often for each pairing, and uses it each time.
///
/// # Panics
/// Where the one or the other does, and if the servers that were to be Portolan's were not.
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

/// The server host's, as a program is told it.
pub fn address(bed: &Bed) -> String {
    bed.server.address.to_string()
}
