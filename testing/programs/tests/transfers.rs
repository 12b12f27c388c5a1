//! Streams arrive exactly, and without messages to the server while data flows.

use std::fs;
use std::io::Write;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{run, run_within};
use portolan_netns::{Daemon, Impairment, Ready};
use portolan_programs::{Pairing, bed, each_pairing, eventually, impaired_bed};

const PORT: u16 = 7009;

/// Size of the exact transfers; the acceptance test of a release sets it to 1024.
fn mebibytes(default: usize) -> usize {
    std::env::var("PORTOLAN_TEST_MIB").map_or(default, |text| text.parse().expect("a number"))
}

/// Writes a file in which no two blocks are alike: a xorshift sequence.
fn write_noise(bed: &Bed, mebibytes: usize) -> String {
    let path = bed.file("noise");
    let mut file = std::io::BufWriter::new(fs::File::create(&path).expect("a file"));
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..mebibytes << 17 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.write_all(&state.to_le_bytes())
            .expect("space on the disk");
    }
    path.display().to_string()
}

fn digest(path: &str) -> String {
    let line = run(std::process::Command::new("sha256sum").arg(path)).expect("sha256sum");
    line.split(' ').next().expect("a digest").to_owned()
}

/// Sends a file to a mirror; what returns must have its digest.
fn mirror(bed: &Bed, pairing: Pairing, mebibytes: usize) {
    let endpoint = bed.endpoint(PORT).to_string();
    let _mirror = bed
        .serve(
            pairing.server,
            PORT,
            "portolan-traffic",
            &["mirror", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let file = write_noise(bed, mebibytes);
    let copy = bed.file("copy").display().to_string();
    let mut send = bed.command(Side::Client, pairing.client, "portolan-traffic");
    let limit = Duration::from_secs(60 + 2 * mebibytes as u64);
    run_within(send.args(["send", &endpoint, &file, &copy]), limit)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(digest(&file), digest(&copy));
}

#[test]
fn a_file_comes_back_with_its_digest_both_ways_at_once() {
    each_pairing(&bed(), |bed, pairing| mirror(bed, pairing, mebibytes(64)));
}

#[test]
fn a_file_survives_loss_reordering_and_duplication() {
    for (loss, default) in [(0.01, 16), (0.05, 8)] {
        let bed = impaired_bed(Impairment {
            loss,
            duplicate: 0.01,
            reorder: 0.01,
            delay: Duration::from_micros(200),
            ..Impairment::default()
        });
        each_pairing(&bed, |bed, pairing| {
            mirror(bed, pairing, mebibytes(default))
        });
    }
}

/// Returns the number of system calls on the control connection during a run of `count` round trips. The
/// connection is the only SEQPACKET socket of a client.
fn control_calls(bed: &Bed, endpoint: &str, count: &str) -> usize {
    let trace = bed.file("trace").display().to_string();
    let mut strace = bed.command(Side::Client, Stack::Kernel, "strace");
    strace.args(["-f", "-yy", "-o", &trace]);
    strace.args(bed.words(Stack::Portolan, "portolan-traffic"));
    strace.args(["ping", "tcp", endpoint, "--count", count]);
    run(&mut strace).unwrap_or_else(|error| panic!("{error}"));
    let trace = fs::read_to_string(trace).expect("a trace");
    trace
        .lines()
        .filter(|line| line.contains("SEQPACKET"))
        .count()
}

#[test]
fn the_server_hears_nothing_while_data_flows() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let _echo = bed
        .serve(
            Stack::Portolan,
            PORT,
            "portolan-traffic",
            &["echo", "tcp", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let few = control_calls(&bed, &endpoint, "100");
    let many = control_calls(&bed, &endpoint, "5000");
    assert!(few > 0, "the trace shows no control connection at all");
    assert_eq!(few, many);
}

#[test]
fn tcpdump_sees_the_traffic_and_a_kernel_service_lives_beside_it() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let beside = bed.endpoint(PORT + 1).to_string();
    let greet = |stack, port, endpoint: &str| {
        bed.serve(stack, port, "portolan-traffic", &["greet", endpoint])
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let _portolan = greet(Stack::Portolan, PORT, &endpoint);
    let _kernel = greet(Stack::Kernel, PORT + 1, &beside);
    let mut tcpdump = bed.command(Side::Server, Stack::Kernel, "tcpdump");
    tcpdump.args([
        "-i",
        portolan_bench::bed::INTERFACE,
        "-nlq",
        "--immediate-mode",
    ]);
    let tcpdump = Daemon::start(tcpdump, Ready::Line("listening on".to_owned()));
    for (stack, endpoint) in [
        (Stack::Portolan, &endpoint),
        (Stack::Portolan, &beside),
        (Stack::Kernel, &endpoint),
        (Stack::Kernel, &beside),
    ] {
        let mut connect = bed.command(Side::Client, stack, "portolan-traffic");
        connect.args(["connect", endpoint, "--count", "5", "--seconds", "5"]);
        let report = run(&mut connect).unwrap_or_else(|error| panic!("{stack:?} {error}"));
        assert!(
            report.contains("\"connections\":5"),
            "{stack:?} {endpoint}: {report}"
        );
    }
    for port in [PORT, PORT + 1] {
        let at_port = format!(".{port}");
        let count = || {
            let seen = tcpdump.output();
            seen.lines().filter(|line| line.contains(&at_port)).count()
        };
        // A connection has at least a SYN, two acknowledgements, a greeting and two FINs.
        let all_seen = eventually(Duration::from_secs(10), || count() >= 10 * 5);
        assert!(all_seen, "port {port}: {}", tcpdump.output());
    }
}
