//! `posix-check` prints the same on Portolan as on the kernel's stack, whichever end is on Portolan,
//! except for the checks listed in `testing/posix/deviations.txt`.

use std::fs::{self, File};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PAIRINGS, Pairing, bed};

/// Time limit of all topics.
const LIMIT: Duration = Duration::from_secs(300);

const DEVIATIONS: &str = include_str!("../../posix/deviations.txt");

const KERNEL: Pairing = Pairing {
    server: Stack::Kernel,
    client: Stack::Kernel,
};

#[test]
fn sockets_behave_as_the_kernels_do() {
    assert_alike(bed);
}

#[test]
fn sockets_behave_as_the_kernels_do_over_ipv6() {
    assert_alike(|| bed().over_ipv6());
}

fn assert_alike(bed: impl Fn() -> Bed + Sync) {
    let topics = all_topics();
    let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
    let found = compare(bed, &topics);
    let deviations = Deviations::parse(DEVIATIONS);
    assert_judged(&deviations, &found);
}

fn assert_judged(deviations: &Deviations, found: &[String]) {
    let errors = deviations.judge(found);
    assert!(errors.is_empty(), "differences:\n{}", errors.join("\n"));
}

/// Additional deviations of streams within one host.
const LOCAL: &str = "\
tcp-options server TCP_INFO snd_mss | there are no segments; Linux shows half of what its window was
tcp-options server TCP_INFO rcv_mss | as above; neither is what it is over a wire
tcp-options client TCP_INFO snd_mss | as above
tcp-options client TCP_INFO rcv_mss | as above
fast-open client first: with the SYN | no cookie is asked for
listeners client refused, bound to any port: another: bind | the kernel refuses, whose socket has the port as one that was chosen
listeners client refused, bound to any port: another: bind, reusing | as above
listeners client refused, bound to any port: bind | as above
listeners client refused, bound to any port: name | as above
endings client refused, bound true: bind | as above
";

/// Additional deviations over IPv6.
const LOCAL_V6: &str = "\
tcp-options server TCP_INFO advmss | shows what IPv4 has
tcp-options client TCP_INFO advmss | as above
";

/// Both roles on one host: between two programs of Portolan there are no packets.
#[test]
fn streams_within_one_host_behave_as_the_kernels_do() {
    assert_alike_within_one_host("127.0.0.1", "");
}

#[test]
fn streams_within_one_host_behave_as_the_kernels_do_over_ipv6() {
    assert_alike_within_one_host("::1", LOCAL_V6);
}

fn assert_alike_within_one_host(address: &str, more: &'static str) {
    const TOPICS: [&str; 30] = [
        "completions",
        "connect",
        "accept",
        "receive",
        "send",
        "shutdown",
        "names",
        "duplicate",
        "poll",
        "epoll",
        "signals",
        "timeouts",
        "linger",
        "threads",
        "by-number",
        "faults",
        "urgent",
        "tcp-options",
        "stream-options",
        "fast-open",
        "stdio",
        "owners",
        "endings",
        "listeners",
        "order",
        "loops",
        "splice",
        "cancel",
        "limits",
        "descriptors",
    ];
    let bed = begun(bed);
    let account = |stack| -> Vec<String> {
        let program = bed.tools().beside("posix-check").display().to_string();
        let mut command = bed.command(Side::Server, stack, &program);
        command.args(["both", "--local", address, "--remote", address, "--meet"]);
        command.arg(bed.file("")).args(TOPICS).stderr(Stdio::null());
        let output = command.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        // The role that reports the ioctls depends on its address, and here both have the same.
        let by_address = [" SIOC", ": no interface: "];
        let is_alike = |line: &&str| !by_address.iter().any(|part| line.contains(part));
        let lines = text.lines().filter(is_alike);
        lines.map(str::to_owned).collect()
    };
    let kernel = account(Stack::Kernel);
    assert!(kernel.len() > 100, "{kernel:#?}");
    assert_whole(&kernel);
    let found = differences(&kernel, &account(Stack::Portolan));
    let mut deviations = Deviations::parse(DEVIATIONS).of(&TOPICS);
    deviations.0.retain(|check| !check.starts_with("options "));
    deviations.0.extend(Deviations::parse(LOCAL).0);
    deviations.0.extend(Deviations::parse(more).0);
    assert_judged(&deviations, &found);
}

/// Returns lines that differ from the kernel's, for each pairing. A run mostly waits, so all run at once, the topics in
/// parts, each on hosts of its own.
fn compare(bed: impl Fn() -> Bed + Sync, topics: &[&str]) -> Vec<String> {
    const PART: usize = 17;
    let part = |pairing: Pairing, topics: &[&str]| {
        let bed = begun(&bed);
        let_each_error_count(&bed);
        account(&bed, pairing, topics)
    };
    let part = &part;
    let accounts: Vec<(Pairing, Vec<String>)> = thread::scope(|scope| {
        let begin = |pairing| {
            let parts = topics.chunks(PART);
            let parts = parts.map(|topics| scope.spawn(move || part(pairing, topics)));
            (pairing, parts.collect())
        };
        let end = |(pairing, parts): (Pairing, Vec<thread::ScopedJoinHandle<'_, _>>)| {
            let lines = parts
                .into_iter()
                .map(|part| part.join().expect("an account"));
            (pairing, lines.collect::<Vec<Vec<String>>>().concat())
        };
        let begun: Vec<_> = [&[KERNEL], &PAIRINGS[..]]
            .concat()
            .into_iter()
            .map(begin)
            .collect();
        begun.into_iter().map(end).collect()
    });
    let (_, kernel) = &accounts[0];
    assert!(kernel.len() > 20, "{kernel:#?}");
    assert_whole(kernel);
    let found = accounts[1..].iter().flat_map(|(pairing, lines)| {
        let differences = differences(kernel, lines).into_iter();
        differences.map(move |line| format!("{line} ({pairing:?})"))
    });
    found.collect()
}

/// A topic that crashes or hangs on both stacks would compare nothing.
fn assert_whole(account: &[String]) {
    let is_cut = |line: &&String| {
        [": ended by ", ": hung", ": lost: ", ": no peer: "]
            .iter()
            .any(|mark| line.contains(mark))
    };
    let cut: Vec<_> = account.iter().filter(is_cut).collect();
    assert!(cut.is_empty(), "topics without an end: {cut:?}");
}

/// Makes one bed at a time, since that takes CPU time, unlike the runs.
fn begun(bed: impl Fn() -> Bed) -> Bed {
    static MAKES: Mutex<()> = Mutex::new(());
    let _makes = MAKES.lock().unwrap_or_else(PoisonError::into_inner);
    bed()
}

/// The names of all topics.
fn all_topics() -> Vec<String> {
    let bed = begun(bed);
    let program = bed.tools().beside("posix-check").display().to_string();
    let mut command = bed.command(Side::Client, Stack::Kernel, &program);
    let names = run(command.arg("topics")).expect("a list");
    names.lines().map(str::to_owned).collect()
}

fn let_each_error_count(bed: &Bed) {
    for side in [Side::Client, Side::Server] {
        let limits = ["net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0"];
        let mut sysctl = bed.command(side, Stack::Kernel, "sysctl");
        run(sysctl.arg("-qw").args(limits)).expect("the bed's own settings");
    }
}

#[test]
fn a_difference_that_nobody_listed_is_told() {
    let found = differences(&lines("a: 1|b: 2|b: 2"), &lines("a: 1|b: 2|b: 3"));
    assert_eq!(found, ["- b: 2", "+ b: 3"]);
    let deviations = Deviations::parse("b | a reason\n");
    assert!(deviations.judge(&found).is_empty());
    assert_eq!(deviations.judge(&["- bb: 2".to_owned()]).len(), 2);
}

#[test]
fn a_listed_deviation_that_is_gone_is_told() {
    let deviations = Deviations::parse("# a comment\n\na: 1 | a reason\n");
    assert_eq!(deviations.judge(&[]), ["no longer needed: a: 1"]);
}

fn lines(text: &str) -> Vec<String> {
    text.split('|').map(str::to_owned).collect()
}

/// Returns the output of one run, the server's lines before the client's.
fn account(bed: &Bed, pairing: Pairing, topics: &[&str]) -> Vec<String> {
    let (server, client) = (
        bed.server.address.to_string(),
        bed.client.address.to_string(),
    );
    let meet = bed.file("meet");
    fs::create_dir_all(&meet).expect("the bed's directory is writable");
    let program = bed.tools().beside("posix-check").display().to_string();
    let arguments = |role: &str, local: &str, remote: &str| {
        let words = [role, "--local", local, "--remote", remote, "--meet"];
        let mut words = words.map(str::to_owned).to_vec();
        words.push(meet.display().to_string());
        words
    };
    let start = |side, stack, role: &str, local: &str, remote: &str| {
        let file = File::create(bed.file(role)).expect("the bed's directory is writable");
        let mut command = bed.command(side, stack, &program);
        command
            .args(arguments(role, local, remote))
            .args(topics)
            .stdout(file)
            .stderr(Stdio::null());
        Background::start_with_output(&mut command).expect("it starts")
    };
    let mut roles = [
        start(Side::Server, pairing.server, "server", &server, &client),
        start(Side::Client, pairing.client, "client", &client, &server),
    ];
    for role in &mut roles {
        role.wait(LIMIT);
    }
    let lines = |role| {
        let text = fs::read_to_string(bed.file(role)).expect("it was written");
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    [lines("server"), lines("client")].concat()
}

/// Returns the lines that are in only one of the two.
fn differences(kernel: &[String], portolan: &[String]) -> Vec<String> {
    let missing = without(kernel, portolan);
    let added = without(portolan, kernel);
    missing
        .iter()
        .map(|line| format!("- {line}"))
        .chain(added.iter().map(|line| format!("+ {line}")))
        .collect()
}

/// Returns `lines` without those of `others`, counting repeated lines.
fn without(lines: &[String], others: &[String]) -> Vec<String> {
    let mut others = others.to_vec();
    let is_new = |line: &&String| {
        let known = others.iter().position(|other| other == *line);
        known.map(|at| others.swap_remove(at)).is_none()
    };
    lines.iter().filter(is_new).cloned().collect()
}

/// Checks that may differ: `check | reason`, one per line.
struct Deviations(Vec<&'static str>);

impl Deviations {
    fn parse(text: &'static str) -> Deviations {
        let rows = text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        let check = |row: &'static str| {
            let (check, reason) = row.split_once(" | ").expect("a check and a reason");
            assert!(!reason.is_empty(), "{check} has no reason");
            check
        };
        Deviations(rows.map(check).collect())
    }

    /// Returns those of some topics.
    fn of(mut self, topics: &[&str]) -> Deviations {
        let is_of = |check: &&str| topics.contains(&check.split(' ').next().unwrap_or_default());
        self.0.retain(is_of);
        self
    }

    /// Returns errors: differences that are not listed, and listed deviations that do not occur.
    fn judge(&self, found: &[String]) -> Vec<String> {
        let is_of = |check: &str, line: &str| {
            let said = line[2..].strip_prefix(check);
            said.is_some_and(|said| said.starts_with(": "))
        };
        let unlisted = found
            .iter()
            .filter(|line| !self.0.iter().any(|check| is_of(check, line)))
            .cloned();
        let unused = self
            .0
            .iter()
            .filter(|check| !found.iter().any(|line| is_of(check, line)))
            .map(|check| format!("no longer needed: {check}"));
        unlisted.chain(unused).collect()
    }
}
