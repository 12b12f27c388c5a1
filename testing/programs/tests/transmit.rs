//! Rates of a link with real programs: reserved traffic arrives whatever others do, without losses.

use std::thread::sleep;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_netns::Bed as Wire;
use portolan_programs::{PYTHON, Steps, file};
use serde_json::Value;

const RATES: &str = include_str!("../fixtures/rates.py");
const PORT: u16 = 7_400;
const SECONDS: &str = "30";

/// Time until accumulated bursts are over.
const SETTLE: Duration = Duration::from_millis(1_000);
const WINDOW: Duration = Duration::from_secs(3);

/// The deviation from a rate that a busy machine or a burst may cause.
const ROOM: f64 = 0.08;

const MBIT: f64 = 1e6;

/// Hosts on a link of 100 Mbit/s, and the senders on it.
struct Link {
    bed: Bed,
    script: String,
    senders: Vec<Steps>,
}

impl Link {
    fn new() -> Link {
        let mut bed = Bed::bare(Wire::veth()).expect("root and `cargo build` are needed");
        bed.set_settings("[[qos.link]]\ndevice = \"eth0\"\nrate = \"100mbit\"\n");
        bed.start_daemon(Side::Client).expect("the server starts");
        let script = file(&bed, "rates.py", RATES);
        Link {
            bed,
            script,
            senders: Vec::new(),
        }
    }

    /// Adds a sender and returns its process ID.
    fn add_sender(&mut self) -> u32 {
        let endpoint = self.bed.endpoint(PORT + self.senders.len() as u16);
        let mut command = self.bed.command(Side::Client, Stack::Portolan, PYTHON);
        let (address, port) = (endpoint.ip().to_string(), endpoint.port().to_string());
        command.args([&self.script, "send", &address, &port, SECONDS]);
        let mut sender = Steps::start(&mut command);
        sender.await_line("ready");
        let pid = sender.id();
        self.senders.push(sender);
        pid
    }

    fn set(&self, pid: u32, words: &str) {
        let line = format!("qos set pid {pid} tx {words}");
        let words: Vec<&str> = line.split(' ').collect();
        self.bed
            .portolan(Side::Client, &words)
            .unwrap_or_else(|error| panic!("{line}: {error}"));
    }

    /// Returns the bits per second of each sender while all send.
    fn measure(&mut self) -> Vec<f64> {
        let ports: Vec<String> = (0..self.senders.len())
            .map(|at| (usize::from(PORT) + at).to_string())
            .collect();
        let mut command = self.bed.command(Side::Server, Stack::Kernel, PYTHON);
        let address = self.bed.endpoint(PORT).ip().to_string();
        command.args([&self.script, "count", &address]).args(&ports);
        let mut counter = Steps::start(&mut command);
        counter.await_line("ready");
        for sender in &mut self.senders {
            sender.say("go");
        }
        sleep(SETTLE);
        counter.say("start");
        sleep(WINDOW);
        counter.say("stop");
        let rates: Value = serde_json::from_str(&counter.line()).expect("it prints JSON");
        ports
            .iter()
            .map(|port| rates[port].as_f64().expect("a rate"))
            .collect()
    }

    fn report(&self) -> Value {
        let said = self.bed.portolan(Side::Client, &["qos", "show", "--json"]);
        serde_json::from_str(&said.expect("the server answers")).expect("it prints JSON")
    }

    fn dropped(&self) -> u64 {
        let report = self.report();
        let reserved = report["transmit"].as_array().expect("a list");
        reserved
            .iter()
            .map(|one| one["traffic"]["drops"].as_u64().expect("a number"))
            .sum()
    }
}

fn assert_close(rate: f64, mbit: f64) {
    let error = rate / (mbit * MBIT) - 1.0;
    assert!(
        error.abs() < ROOM,
        "{:.2} Mbit/s instead of {mbit}",
        rate / MBIT
    );
}

#[test]
fn senders_have_what_is_reserved_beside_a_flood() {
    let mut link = Link::new();
    let reserved = [8.0, 16.0, 24.0];
    for mbit in reserved {
        let pid = link.add_sender();
        // As slices, except one.
        match mbit {
            16.0 => link.set(pid, "--rate 16mbit"),
            _ => link.set(pid, &format!("--slice {mbit}ms --period 100ms")),
        }
    }
    link.add_sender();
    let rates = link.measure();
    for (rate, mbit) in rates.iter().zip(reserved) {
        assert_close(*rate, mbit);
    }
    // Best effort has the rest, and no more.
    assert!(rates[3] < 52.0 * (1.0 + ROOM) * MBIT, "{rates:?}");
    assert!(rates[3] > 52.0 * (1.0 - 2.0 * ROOM) * MBIT, "{rates:?}");
    assert_eq!(link.dropped(), 0);
}

#[test]
fn a_live_senders_rate_is_changed_and_taken_away() {
    let mut link = Link::new();
    let pid = link.add_sender();
    link.set(pid, "--rate 10mbit");
    assert_close(link.measure()[0], 10.0);
    link.set(pid, "--rate 40mbit");
    assert_close(link.measure()[0], 40.0);
    let words = format!("qos del pid {pid} tx");
    let words: Vec<&str> = words.split(' ').collect();
    link.bed.portolan(Side::Client, &words).expect("it has one");
    let alone = link.measure()[0];
    assert!(alone > 80.0 * MBIT, "all of the link: {alone}");
}

#[test]
fn slack_is_used_and_given_back() {
    let mut link = Link::new();
    let pid = link.add_sender();
    link.set(pid, "--rate 10mbit --slack");
    let alone = link.measure()[0];
    assert!(alone > 80.0 * MBIT, "all of the link: {alone}");
    let other = link.add_sender();
    link.set(other, "--rate 60mbit");
    let rates = link.measure();
    assert_close(rates[1], 60.0);
    assert!(
        rates[0] > 20.0 * MBIT && rates[0] < 41.0 * MBIT,
        "{rates:?}"
    );
    assert_eq!(link.dropped(), 0);
}
