//! Processes that fork, copy, pass on, inherit and close their connections at random, and are killed:
//! on Portolan as on the kernel's stack every stream is exact, and no state is left over.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run_within};
use portolan_programs::{PYTHON, bed, counter, eventually, live_sessions, serve};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/chaos.py");
const ECHO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/echo.py");
const PORT: u16 = 7043;
const LINES: &str = "100";

/// Time limit for states that end by a timer.
const SETTLED: Duration = Duration::from_secs(20);

/// Steps of each run; longer tests set thousands.
fn steps() -> u64 {
    let steps = std::env::var("PORTOLAN_TEST_STEPS");
    steps.map_or(300, |text| text.parse().expect("a number"))
}

fn play(bed: &Bed, side: Side, stack: Stack, endpoint: SocketAddr, seed: u64) {
    let mut chaos = bed.command(side, stack, PYTHON);
    chaos.args([SCRIPT, &seed.to_string(), LINES, &steps().to_string()]);
    chaos.args([endpoint.ip().to_string(), endpoint.port().to_string()]);
    let limit = Duration::from_secs(30 + steps() / 4);
    let said = run_within(&mut chaos, limit);
    let said = said.unwrap_or_else(|error| panic!("seed {seed} on {stack:?}: {error}"));
    assert!(said.trim_end().ends_with("lines"), "{said}");
}

fn echo(bed: &Bed, stack: Stack, endpoint: SocketAddr) -> Background {
    let (address, port) = (endpoint.ip().to_string(), endpoint.port());
    let arguments = [ECHO, "asyncio", &address, &port.to_string()];
    serve(bed, stack, port, PYTHON, &arguments)
}

/// Returns the number of processes that the server knows.
fn processes(bed: &Bed, side: Side) -> u64 {
    let status = bed.portolan(side, &["status", "--json"]);
    let status: serde_json::Value =
        serde_json::from_str(&status.expect("the server answers")).expect("status prints JSON");
    status["processes"].as_u64().expect("a number")
}

fn assert_nothing_is_left(bed: &Bed, side: Side) {
    let left = || (live_sessions(bed, side), processes(bed, side));
    let is_settled = eventually(SETTLED, || left() == (0, 0));
    assert!(is_settled, "sessions and processes: {:?}", left());
    let timeouts = counter(bed, side, "server", "recall_timeouts");
    assert_eq!(timeouts, 0, "holders did not give sessions back");
}

#[test]
fn every_stream_is_exact_whoever_uses_it_and_nothing_is_left() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT);
    let _echo = echo(&bed, Stack::Kernel, endpoint);
    play(&bed, Side::Client, Stack::Kernel, endpoint, 1);
    for seed in [1, 2] {
        play(&bed, Side::Client, Stack::Portolan, endpoint, seed);
    }
    assert_nothing_is_left(&bed, Side::Client);
}

#[test]
fn so_is_every_stream_within_one_host() {
    let bed = bed();
    let endpoint = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let service = echo(&bed, Stack::Portolan, endpoint);
    for seed in [3, 4] {
        play(&bed, Side::Server, Stack::Portolan, endpoint, seed);
    }
    assert_ne!(counter(&bed, Side::Server, "server", "local_sessions"), 0);
    drop(service);
    assert_nothing_is_left(&bed, Side::Server);
}
