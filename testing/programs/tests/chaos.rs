//! Processes that fork, copy, pass on, inherit and close their connections at random, and are killed:
//! on Portolan as on the kernel's stack every stream is exact, and nothing is left of them.

use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run_within;
use portolan_programs::{PYTHON, bed, counter, eventually, live_sessions, serve};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/chaos.py");
const ECHO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/echo.py");
const PORT: u16 = 7043;
const LINES: &str = "100";

/// Until what ends by a timer has ended.
const SETTLED: Duration = Duration::from_secs(20);

/// Steps of each run; a longer test sets it to thousands.
fn steps() -> u64 {
    let steps = std::env::var("PORTOLAN_TEST_STEPS");
    steps.map_or(300, |text| text.parse().expect("a number"))
}

fn play(bed: &Bed, stack: Stack, seed: u64) {
    let endpoint = bed.endpoint(PORT);
    let mut chaos = bed.command(Side::Client, stack, PYTHON);
    chaos.args([SCRIPT, &seed.to_string(), LINES, &steps().to_string()]);
    chaos.args([endpoint.ip().to_string(), endpoint.port().to_string()]);
    let limit = Duration::from_secs(30 + steps() / 4);
    let said = run_within(&mut chaos, limit);
    let said = said.unwrap_or_else(|error| panic!("seed {seed} on {stack:?}: {error}"));
    assert!(said.trim_end().ends_with("lines"), "{said}");
}

/// Those that the server knows now.
fn processes(bed: &Bed) -> u64 {
    let status = bed.portolan(Side::Client, &["status", "--json"]);
    let status: serde_json::Value =
        serde_json::from_str(&status.expect("the server answers")).expect("status prints JSON");
    status["processes"].as_u64().expect("a number")
}

#[test]
fn every_stream_is_exact_whoever_uses_it_and_nothing_is_left() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT);
    let arguments = [
        ECHO,
        "asyncio",
        &endpoint.ip().to_string(),
        &PORT.to_string(),
    ];
    let _echo = serve(&bed, Stack::Kernel, PORT, PYTHON, &arguments);
    play(&bed, Stack::Kernel, 1);
    for seed in [1, 2] {
        play(&bed, Stack::Portolan, seed);
    }
    let left = || (live_sessions(&bed, Side::Client), processes(&bed));
    let is_settled = eventually(SETTLED, || left() == (0, 0));
    assert!(is_settled, "sessions and processes: {:?}", left());
    let timeouts = counter(&bed, Side::Client, "server", "recall-timeouts");
    assert_eq!(timeouts, 0, "holders did not give sessions back");
}
