//! A program's time, layer by layer: probes in the library, and the sums that it keeps on request.

use std::fs;
use std::time::Instant;

use portolan::layers::Layer;
use portolan_bench::bed::{Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{bed, eventually};
use portolan_sys::probes::{NAMES, read_totals};

const TRAFFIC: &str = "portolan-traffic";
const PORT: u16 = 7098;
const COUNT: u64 = 2000;

#[test]
fn each_layer_is_passed_with_every_message_and_no_time_counts_twice() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    for protocol in ["tcp", "udp"] {
        let mut echo = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
        let _echo = Background::start(echo.args(["echo", protocol, &endpoint])).expect("it starts");
        let ping = |file: &std::path::Path| {
            let mut ping = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
            ping.env("PORTOLAN_LAYERS", file);
            ping.args(["ping", protocol, &endpoint, "--spin"]);
            run(ping.args(["--count", &COUNT.to_string()])).is_ok()
        };
        let file = bed.file(protocol);
        let mut begun = Instant::now();
        let serves = eventually(std::time::Duration::from_secs(10), || {
            begun = Instant::now();
            ping(&file)
        });
        assert!(serves, "{protocol}");
        let took = begun.elapsed();
        let rows = read_totals(&fs::read(&file).expect("the library made it"));
        for (layer, name) in Layer::ALL {
            let (nanoseconds, times) = rows[layer as usize];
            if matches!(layer, Layer::Sleep | Layer::Program) {
                continue;
            }
            assert!(times >= COUNT, "{protocol} {name}: {times} times");
            assert!(nanoseconds > 0, "{protocol} {name}");
        }
        // The program has one thread, and the background thread is nearly idle.
        let sum: u64 = rows.iter().map(|(nanoseconds, _)| nanoseconds).sum();
        assert!(
            u128::from(sum) <= 2 * took.as_nanos(),
            "{protocol}: {sum} ns"
        );
    }
}

#[test]
fn the_probes_are_in_the_library_that_programs_load() {
    let bed = bed();
    let library = bed.tools().beside("libportolan_preload.so");
    let file = fs::read(library).expect("cargo build has made it");
    for name in NAMES {
        let note = format!("portolan\0{name}\0\0");
        let is_there = file.windows(note.len()).any(|at| at == note.as_bytes());
        assert!(is_there, "{name}");
    }
}
