//! Active demultiplexing between two hosts (MS §VI): packets that name their receiver, and packets that lie.

use std::fs;
use std::process::Command;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Impairment;
use portolan_programs::{PYTHON, Steps, counter};

const ACTIVE: &str = "[demux]\nactive = true\n";
const TRAFFIC: &str = "portolan-traffic";
const FORGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/forging.py");
const PORT: u16 = 7060;
/// Of each lie.
const TIMES: u64 = 20;

fn bed(wire: portolan_netns::Bed, settings: [&str; 2]) -> Bed {
    let mut bed = Bed::bare(wire).unwrap_or_else(|error| panic!("no bed: {error}"));
    for (side, lines) in [Side::Client, Side::Server].into_iter().zip(settings) {
        bed.set_settings(lines);
        bed.start_daemon(side).unwrap();
    }
    bed
}

fn echo(bed: &Bed) -> Background {
    let endpoint = bed.endpoint(PORT).to_string();
    bed.serve(Stack::Portolan, PORT, TRAFFIC, &["echo", "tcp", &endpoint])
        .unwrap()
}

fn ping(bed: &Bed, count: u64) -> Command {
    let mut command = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
    command.args(["ping", "tcp", &bed.endpoint(PORT).to_string()]);
    command.args(["--count", &count.to_string()]);
    command
}

fn received(bed: &Bed, side: Side, name: &str) -> u64 {
    counter(bed, side, "receive", name)
}

#[test]
fn packets_between_two_hosts_that_want_it_need_no_search() {
    let bed = bed(portolan_netns::Bed::veth(), [ACTIVE; 2]);
    let _echo = echo(&bed);
    run(&mut ping(&bed, 2000)).unwrap();
    for side in [Side::Client, Side::Server] {
        let taken = received(&bed, side, "handle_taken");
        assert!(taken >= 1900, "{taken} on the {side} host");
        assert_eq!(received(&bed, side, "handle_stale"), 0);
        assert_eq!(counter(&bed, side, "server", "handles-given"), 1);
    }
}

#[test]
fn nothing_changes_for_hosts_that_do_not_want_it() {
    for settings in [[ACTIVE, ""], ["", ACTIVE]] {
        let bed = bed(portolan_netns::Bed::veth(), settings);
        let _echo = echo(&bed);
        run(&mut ping(&bed, 500)).unwrap();
        for side in [Side::Client, Side::Server] {
            assert_eq!(received(&bed, side, "handle_taken"), 0);
            assert_eq!(counter(&bed, side, "server", "handles-given"), 0);
        }
    }
    // Nor for the kernel's sockets.
    let bed = bed(portolan_netns::Bed::veth(), [ACTIVE; 2]);
    let endpoint = bed.endpoint(PORT).to_string();
    let arguments = ["echo", "tcp", &endpoint];
    let _echo = bed.serve(Stack::Kernel, PORT, TRAFFIC, &arguments).unwrap();
    run(&mut ping(&bed, 500)).unwrap();
    assert_eq!(received(&bed, Side::Client, "handle_taken"), 0);
}

#[test]
fn streams_in_large_segments_and_over_a_path_with_faults_are_exact() {
    let faults = Impairment {
        loss: 0.01,
        ..Impairment::default()
    };
    for wire in [
        portolan_netns::Bed::veth(),
        portolan_netns::Bed::impaired(faults),
    ] {
        let bed = bed(wire, [ACTIVE; 2]);
        let endpoint = bed.endpoint(PORT).to_string();
        let _mirror = bed
            .serve(Stack::Portolan, PORT, TRAFFIC, &["mirror", &endpoint])
            .unwrap();
        let (file, copy) = (bed.file("sent"), bed.file("came-back"));
        let octets: Vec<u8> = (0..4_000_000u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        fs::write(&file, &octets).unwrap();
        let mut send = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
        run(send.args(["send", &endpoint]).args([&file, &copy])).unwrap();
        assert!(fs::read(&copy).unwrap() == octets, "the stream was damaged");
        assert!(received(&bed, Side::Server, "handle_taken") > 0);
    }
}

/// Sends again what it sees, and lies.
fn forger(bed: &Bed) -> Steps {
    let mut command = bed.command(Side::Client, Stack::Kernel, PYTHON);
    command.args([FORGING, INTERFACE, &PORT.to_string(), &TIMES.to_string()]);
    Steps::start(&mut command)
}

#[test]
fn forged_replayed_and_stale_handles_harm_nobody() {
    let bed = bed(portolan_netns::Bed::veth(), [ACTIVE; 2]);
    let _echo = echo(&bed);
    let mut forger = forger(&bed);
    // All its octets come back in order, or it would wait for ever.
    run(&mut ping(&bed, 20_000)).unwrap();
    forger.await_line("forged");
    let server = Side::Server;
    // The last segments cross the connection's end.
    let stale = received(&bed, server, "handle_stale");
    assert!((TIMES..TIMES + 4).contains(&stale), "{stale}");
    let foreign = counter(&bed, server, "stack", "drop-foreign-peer");
    assert_eq!(foreign, TIMES);
    // The connection has ended: its handle leads nowhere.
    forger.go_on();
    forger.await_line("replayed");
    assert_eq!(received(&bed, server, "handle_stale") - stale, TIMES);
}
