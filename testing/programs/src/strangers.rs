//! Servers that are started repeatedly, since stalls depend on timing: for clients on another host and on their own one,
//! over both IP versions.

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run;

use crate::{PAIRINGS, bed, counter};

/// Number of starts for each pairing of stacks over the wire, unless `PORTOLAN_TEST_STARTS` is set. For a client on the
/// same host, and over IPv6, a third of them.
const STARTS: usize = 3;

fn starts() -> usize {
    let chosen = std::env::var("PORTOLAN_TEST_STARTS").ok();
    let chosen = chosen.and_then(|starts| starts.parse().ok());
    chosen.unwrap_or(STARTS)
}

/// The programs that use a server: their stack, and the host on which they run.
#[derive(Clone, Copy)]
pub struct Client<'a> {
    pub bed: &'a Bed,
    stack: Stack,
    host: Side,
}

impl Client<'_> {
    /// Runs a program to its end and returns its output.
    ///
    /// # Panics
    /// If it fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let mut command = match self.host {
            Side::Client => self.bed.command(Side::Client, self.stack, program),
            Side::Server => self.bed.neighbour(self.stack, program),
        };
        run(command.args(arguments)).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Starts a server several times for each pairing of stacks and each place of its client, and uses it each time.
///
/// # Panics
/// If `start` or `use_it` does, or if a server that should run on Portolan did not.
pub fn each_start<S>(start: impl Fn(&Bed, Stack) -> S, use_it: impl Fn(Client<'_>)) {
    let few = starts().div_ceil(3);
    let bed = bed();
    each_client(&bed, starts(), few, &start, &use_it);
    eprintln!("over IPv6");
    each_client(&bed.over_ipv6(), few, few, &start, &use_it);
}

fn each_client<S>(
    bed: &Bed,
    over_the_wire: usize,
    within_the_host: usize,
    start: &impl Fn(&Bed, Stack) -> S,
    use_it: &impl Fn(Client<'_>),
) {
    // Within the host only two programs on Portolan have a session of its own.
    for (host, starts, (connections, pairings)) in [
        (Side::Client, over_the_wire, ("passive_opens", 2)),
        (Side::Server, within_the_host, ("local_sessions", 1)),
    ] {
        let before = counter(bed, Side::Server, "server", connections);
        for pairing in PAIRINGS {
            for turn in 0..starts {
                eprintln!("{pairing:?}, {turn}, from the {host} host");
                let _server = start(bed, pairing.server);
                use_it(Client {
                    bed,
                    stack: pairing.client,
                    host,
                });
            }
        }
        let made = counter(bed, Side::Server, "server", connections) - before;
        assert!(
            made >= pairings * starts as u64,
            "{made} {connections} were Portolan's"
        );
    }
}

/// The server host's address, as an argument of programs.
pub fn address(bed: &Bed) -> String {
    bed.server.address.to_string()
}
