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

/// Probes of the server; all others are the library's.
const OF_SERVER: [&str; 3] = ["cached", "flushed", "recalled"];

#[test]
fn the_probes_are_in_the_programs_that_have_them() {
    let bed = bed();
    let read = |program: &str| fs::read(bed.tools().beside(program)).expect("cargo build made it");
    let (library, server) = (read("libportolan_preload.so"), read("portoland"));
    for name in NAMES {
        let (program, file) = if OF_SERVER.contains(name) {
            ("portoland", &server)
        } else {
            ("library", &library)
        };
        let note = "stapsdt\0";
        let names = format!("portolan\0{name}\0");
        // The owner, then address, base and semaphore, then the names.
        let length = note.len() + 24 + names.len();
        let is_there = file
            .windows(length)
            .any(|at| at.starts_with(note.as_bytes()) && at.ends_with(names.as_bytes()));
        assert!(is_there, "{name} in {program}");
    }
}
