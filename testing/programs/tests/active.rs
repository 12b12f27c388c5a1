//! Active demultiplexing between two hosts (MS §VI): packets that name their receiver, and forged packets.

use std::fs;
use std::process::Command;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Impairment;
use portolan_programs::{PYTHON, Steps, counter};

const ACTIVE: &str = "[demux]\nactive = true\n";
const TRAFFIC: &str = "portolan-traffic";
const FORGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/forging.py");
const FLOODING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/flooding.py");
const PORT: u16 = 7060;
/// Number of forged packets of each kind.
const TIMES: u64 = 20;

fn bed(wire: portolan_netns::Bed, settings: [&str; 2]) -> Bed {
    let mut bed = Bed::bare(wire).unwrap_or_else(|error| panic!("no bed: {error}"));
    for (side, lines) in [Side::Client, Side::Server].into_iter().zip(settings) {
        bed.set_settings(lines);
        bed.start_daemon(side).unwrap();
    }
    bed
}

fn family(bed: Bed, is_v6: bool) -> Bed {
    if is_v6 { bed.over_ipv6() } else { bed }
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
    for is_v6 in [false, true] {
        let bed = family(bed(portolan_netns::Bed::veth(), [ACTIVE; 2]), is_v6);
        let _echo = echo(&bed);
        run(&mut ping(&bed, 2000)).unwrap();
        for side in [Side::Client, Side::Server] {
            let taken = received(&bed, side, "handle_taken");
            assert!(taken >= 1900, "{taken} on the {side} host");
            // The last packets of a connection may arrive after its receiver has ended.
            let stale = received(&bed, side, "handle_stale");
            assert!(stale <= 5, "{stale} on the {side} host");
            assert_eq!(counter(&bed, side, "server", "handles_given"), 1);
        }
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
            assert_eq!(counter(&bed, side, "server", "handles_given"), 0);
        }
    }
    // The same holds for the kernel's sockets.
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
    for (wire, is_v6) in [
        (portolan_netns::Bed::veth(), false),
        (portolan_netns::Bed::veth(), true),
        (portolan_netns::Bed::impaired(faults), false),
        (portolan_netns::Bed::impaired(faults), true),
    ] {
        let bed = family(bed(wire, [ACTIVE; 2]), is_v6);
        let endpoint = bed.endpoint(PORT).to_string();
        let _mirror = bed
            .serve(Stack::Portolan, PORT, TRAFFIC, &["mirror", &endpoint])
            .unwrap();
        let (file, copy) = (bed.file("sent"), bed.file("came-back"));
        let bytes: Vec<u8> = (0..4_000_000u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        fs::write(&file, &bytes).unwrap();
        let mut send = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
        run(send.args(["send", &endpoint]).args([&file, &copy])).unwrap();
        assert!(fs::read(&copy).unwrap() == bytes, "the stream was damaged");
        assert!(received(&bed, Side::Server, "handle_taken") > 0);
    }
}

/// Starts a program that replays and forges packets that it captures.
fn forger(bed: &Bed) -> Steps {
    let mut command = bed.command(Side::Client, Stack::Kernel, PYTHON);
    command.args([FORGING, INTERFACE, &PORT.to_string(), &TIMES.to_string()]);
    Steps::start(&mut command)
}

#[test]
fn forged_replayed_and_stale_handles_harm_nobody() {
    for is_v6 in [false, true] {
        let bed = bed(portolan_netns::Bed::veth(), [ACTIVE; 2]);
        forge_and_replay(&family(bed, is_v6));
    }
}

fn forge_and_replay(bed: &Bed) {
    let _echo = echo(bed);
    let mut forger = forger(bed);
    // Returns only if all bytes are echoed in order.
    run(&mut ping(bed, 20_000)).unwrap();
    forger.await_line("forged");
    let server = Side::Server;
    // The last segments cross the connection's end.
    let stale = received(bed, server, "handle_stale");
    assert!((TIMES..TIMES + 4).contains(&stale), "{stale}");
    let foreign = counter(bed, server, "stack", "drop_foreign_peer");
    assert_eq!(foreign, TIMES);
    // The connection has ended: its handle leads nowhere.
    forger.go_on();
    forger.await_line("replayed");
    assert_eq!(received(bed, server, "handle_stale") - stale, TIMES);
}

/// Returns the minimum p99 of a connection's round trips during several floods of a kind at another program's
/// connection, and the number of the floods' packets.
fn during(bed: &Bed, flooding: &mut Steps, kind: &str) -> (f64, u64) {
    const FLOODS: usize = 3;
    let mut least = f64::INFINITY;
    let mut sent = 0;
    for _ in 0..FLOODS {
        flooding.say(kind);
        let report = run(&mut ping(bed, 2000)).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        least = least.min(report["p99_us"].as_f64().unwrap());
        sent += flooding.line().parse::<u64>().unwrap();
    }
    (least, sent)
}

/// Compares with a flood of the same packets unchanged: forging them must not cost others more.
#[test]
fn floods_of_forged_handles_and_of_advertisements_cost_others_no_more_than_other_packets() {
    let bed = bed(portolan_netns::Bed::veth(), [ACTIVE; 2]);
    let _echo = echo(&bed);
    let victim = bed.endpoint(PORT + 1).to_string();
    let arguments = ["echo", "tcp", &victim];
    let _flooded = bed
        .serve(Stack::Portolan, PORT + 1, TRAFFIC, &arguments)
        .unwrap();
    let mut command = bed.command(Side::Client, Stack::Kernel, PYTHON);
    command.args([FLOODING, INTERFACE, &(PORT + 1).to_string()]);
    let mut flooding = Steps::start(&mut command);
    flooding.await_line("looking");
    let mut busy = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
    busy.args(["ping", "tcp", &victim, "--count", "100000000"]);
    let mut busy = Background::start(&mut busy).unwrap();
    flooding.await_line("ready");

    let (plain, _) = during(&bed, &mut flooding, "plain");
    let stale = received(&bed, Side::Server, "handle_stale");
    let (forged, sent) = during(&bed, &mut flooding, "forged");
    let seen = received(&bed, Side::Server, "handle_stale") - stale;
    assert!(seen >= sent / 2, "{seen} of {sent}");
    let (advertised, sent) = during(&bed, &mut flooding, "advertise");
    assert!(sent > 1000);
    for (kind, p99) in [("forged", forged), ("advertised", advertised)] {
        assert!(p99 <= 5.0 * plain, "{kind}: {p99} us, else {plain} us");
    }
    // The floods do not end the connection that they target.
    assert!(busy.is_running());
}
