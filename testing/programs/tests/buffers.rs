//! Programs that use Portolan's own interface without a preloaded library: sockets modelled on the standard library's,
//! and shared buffers. The data is a pattern from which the position of each byte follows.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Impairment;
use portolan_programs::{bed, compiled, counter, eventually, impaired_bed, live_sessions};
use serde_json::Value;

const NATIVE: &str = "portolan-native";
const PORT: u16 = 7300;
const PROMPTLY: Duration = Duration::from_secs(20);

/// Sets whether all sockets or none are on Portolan.
fn native(mut command: Command, words: &[&str], portolan: &str) -> Command {
    command.args(words).env("PORTOLAN", portolan);
    command
}

/// A program on the server host, and the files of its output.
struct Service {
    process: Background,
    output: PathBuf,
    errors: PathBuf,
}

impl Service {
    fn start(bed: &Bed, words: &[&str]) -> Service {
        let command = bed.command(Side::Server, Stack::Kernel, NATIVE);
        Service::run(bed, native(command, words, "require"))
    }

    fn run(bed: &Bed, mut command: Command) -> Service {
        let output = bed.file("native.out");
        command.stdout(File::create(&output).unwrap());
        let process = bed
            .serve_command(PORT, NATIVE, &mut command)
            .unwrap_or_else(|error| panic!("{error}"));
        Service {
            process,
            output,
            errors: bed.file("service.log"),
        }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.output).unwrap()
    }

    /// Returns the counts of the connection that ended last.
    fn moved(&self) -> Value {
        assert!(eventually(PROMPTLY, || self.said().ends_with('\n')));
        serde_json::from_str(self.said().lines().last().unwrap()).unwrap()
    }

    /// Waits for the end of a case, which must be successful.
    fn finish(mut self) -> String {
        assert!(self.process.wait(PROMPTLY), "it goes on: {}", self.said());
        let errors = fs::read_to_string(&self.errors).unwrap();
        assert_eq!(errors, "", "{}", self.said());
        self.said()
    }
}

fn pattern_to(bed: &Bed, seconds: &str) -> Command {
    let to = bed.endpoint(PORT).to_string();
    let words = ["bulk", &to, "--work", "check", "--seconds", seconds];
    native(
        bed.command(Side::Client, Stack::Kernel, NATIVE),
        &words,
        "require",
    )
}

fn report(command: &mut Command) -> Value {
    let report = run(command).unwrap_or_else(|error| panic!("{error}"));
    serde_json::from_str(&report).unwrap()
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{value}"))
}

fn over_both_families(test: impl Fn(&Bed)) {
    let bed = bed();
    test(&bed);
    test(&bed.over_ipv6());
}

/// Plays a case while a pattern is sent to it, and returns its output.
fn play(bed: &Bed, case: &str, seconds: &str) -> String {
    let to = bed.endpoint(PORT).to_string();
    let service = Service::start(bed, &["case", case, &to]);
    let sent = run(&mut pattern_to(bed, seconds));
    let said = service.finish();
    sent.unwrap_or_else(|error| panic!("{error}"));
    said
}

#[test]
fn bytes_are_read_in_the_ring_and_sent_from_where_they_were_written() {
    over_both_families(|bed| {
        let to = bed.endpoint(PORT).to_string();
        let sink = Service::start(bed, &["sink", &to]);
        let sent = report(&mut pattern_to(bed, "1"));
        let (bytes, moved) = (number(&sent, "bytes"), &sent["moved"]);
        assert_eq!(number(moved, "sent_in_place"), bytes, "{sent}");
        assert_eq!(number(moved, "sent_copied"), 0);
        let received = sink.moved();
        let in_place = number(&received, "received_in_place");
        assert_eq!(in_place + number(&received, "received_copied"), bytes);
        assert!(in_place > bytes / 4, "{received}");
    });
}

#[test]
fn the_socket_calls_use_none_of_it() {
    let bed = bed();
    let to = bed.endpoint(PORT).to_string();
    let sink = Service::start(&bed, &["sink", &to, "--by", "socket", "--work", "check"]);
    let sent = report(pattern_to(&bed, "0.3").args(["--by", "socket"]));
    assert!(number(&sent, "bytes") > 1 << 20);
    for moved in [&sent["moved"], &sink.moved()] {
        for name in [
            "received_in_place",
            "received_copied",
            "sent_in_place",
            "sent_copied",
        ] {
            assert_eq!(number(moved, name), 0, "{name}");
        }
    }
}

#[test]
fn what_arrives_is_what_was_sent() {
    over_both_families(|bed| {
        let to = bed.endpoint(PORT).to_string();
        let _sink = Service::start(bed, &["sink", &to, "--work", "check"]);
        // Pieces that are sent in place, that are copied, and both alternately.
        for size in ["131072", "65536", "65535", "1000"] {
            let sent = report(pattern_to(bed, "0.3").args(["--size", size]));
            let is_in_place = number(&sent["moved"], "sent_copied") == 0;
            assert_eq!(
                is_in_place,
                size.parse::<u32>().unwrap() >= 65_536,
                "{sent}"
            );
        }
    });
}

#[test]
fn losses_and_disorder_change_nothing() {
    let bed = impaired_bed(Impairment {
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.01,
        ..Impairment::default()
    });
    let to = bed.endpoint(PORT).to_string();
    let sink = Service::start(&bed, &["sink", &to, "--work", "check"]);
    report(&mut pattern_to(&bed, "2"));
    let received = sink.moved();
    assert!(number(&received, "received_copied") > 0, "{received}");
}

#[test]
fn who_keeps_pieces_is_sent_no_more_until_they_are_given_back() {
    over_both_families(|bed| {
        let said = play(bed, "keep", "2");
        assert!(
            said.contains("stopped at") && said.contains("all "),
            "{said}"
        );
    });
}

#[test]
fn a_piece_that_is_kept_neither_stops_other_connections_nor_keeps_the_program_awake() {
    let bed = bed();
    let to = bed.endpoint(PORT).to_string();
    let service = Service::start(&bed, &["case", "keep-one", &to]);
    let mut first = Background::start_with_output(&mut pattern_to(&bed, "0.5")).unwrap();
    let keeps = || service.said().contains("keeps one");
    assert!(eventually(PROMPTLY, keeps), "{}", service.said());
    std::thread::sleep(Duration::from_secs(1));
    report(&mut pattern_to(&bed, "1.5"));
    assert!(first.wait(PROMPTLY));
    let said = service.finish();
    assert_eq!(said.matches("all ").count(), 2);
    let waits = said.lines().find_map(|line| line.strip_prefix("waited "));
    let (waited, busy) = waits
        .and_then(|waits| waits.strip_suffix(" ms")?.split_once(" ms, busy "))
        .expect("it waited");
    let (waited, busy): (u64, u64) = (waited.parse().unwrap(), busy.parse().unwrap());
    assert!(waited > 500 && busy * 5 < waited, "{said}");
}

#[test]
fn pieces_outlive_their_connection() {
    let bed = bed();
    let to = bed.endpoint(PORT).to_string();
    let service = Service::start(&bed, &["case", "after-close", &to]);
    for _ in 0..2 {
        report(&mut pattern_to(&bed, "0.3"));
    }
    assert_eq!(service.finish().matches("all ").count(), 2);
}

#[test]
fn other_threads_give_pieces_back() {
    let said = play(&bed(), "threads", "0.5");
    assert!(said.contains("all "), "{said}");
}

#[test]
fn a_child_has_the_pieces_and_the_rest_of_the_stream() {
    over_both_families(|bed| {
        let said = play(bed, "fork", "1");
        assert!(said.contains("all "), "{said}");
    });
}

#[test]
fn socket_calls_see_what_has_stayed_in_the_ring() {
    over_both_families(|bed| {
        let said = play(bed, "mixed", "0.7");
        assert!(said.contains("all "), "{said}");
    });
}

#[test]
fn within_a_host_and_with_the_kernels_sockets_it_is_the_same_to_the_program() {
    let bed = bed();
    let to = format!("127.0.0.1:{PORT}");
    let before = counter(&bed, Side::Server, "server", "local_sessions");
    let server = |portolan| {
        let words = ["sink", &to, "--work", "check"];
        native(
            bed.command(Side::Server, Stack::Kernel, NATIVE),
            &words,
            portolan,
        )
    };
    let client = |portolan| {
        let words = ["bulk", &to, "--work", "check", "--seconds", "0.3"];
        report(&mut native(
            bed.neighbour(Stack::Kernel, NATIVE),
            &words,
            portolan,
        ))
    };
    let sink = Service::run(&bed, server("require"));
    let sent = client("require");
    assert_eq!(
        counter(&bed, Side::Server, "server", "local_sessions"),
        before + 1
    );
    // In memory that the peer can write, nothing is used in place.
    assert_eq!(number(&sink.moved(), "received_in_place"), 0);
    assert_eq!(number(&sent["moved"], "sent_in_place"), 0);
    client("off");
    drop(sink);
    let _sink = Service::run(&bed, server("off"));
    client("off");
    client("require");
}

#[test]
fn datagrams_come_and_go_by_either_interface() {
    over_both_families(|bed| {
        let to = bed.endpoint(PORT).to_string();
        for (server, client) in [("shared", "socket"), ("socket", "shared")] {
            let mut echo = native(
                bed.command(Side::Server, Stack::Kernel, NATIVE),
                &["echo", "udp", &to, "--by", server],
                "require",
            );
            let _echo = Background::start(&mut echo).unwrap();
            let bound = || live_sessions(bed, Side::Server) > 0;
            assert!(eventually(PROMPTLY, bound));
            let words = ["ping", "udp", &to, "--by", client, "--size", "1400"];
            let mut ping = native(
                bed.command(Side::Client, Stack::Kernel, NATIVE),
                &words,
                "require",
            );
            assert!(report(&mut ping)["p50_us"].as_f64().unwrap() > 0.0);
            drop(_echo);
            let gone = || live_sessions(bed, Side::Server) == 0;
            assert!(eventually(PROMPTLY, gone));
        }
    });
}

/// As C11 and as C++17, without a library that defines the functions.
#[test]
fn a_program_in_c_has_them_too() {
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/buffers.c");
    let port = PORT.to_string();
    let without = run(bed
        .command(Side::Server, Stack::Kernel, &program)
        .arg(&port));
    assert!(without.is_err_and(|error| error.to_string().contains("not on Portolan")));
    let mut command = bed.command(Side::Server, Stack::Portolan, &program);
    command.arg(&port);
    let service = Service::run(&bed, command);
    let (sent, back) = (bed.file("sent"), bed.file("back"));
    let bytes: Vec<u8> = (0..8u32 << 20).map(|at| ((at * 31) >> 7) as u8).collect();
    fs::write(&sent, &bytes).unwrap();
    let to = bed.endpoint(PORT).to_string();
    let mut command = bed.command(Side::Client, Stack::Portolan, "portolan-traffic");
    command.args(["send", &to]).args([&sent, &back]);
    run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    assert!(fs::read(&back).unwrap() == bytes);
    assert_eq!(service.finish(), "done\n");
}
