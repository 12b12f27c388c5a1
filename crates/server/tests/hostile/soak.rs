//! All attackers at once beside another user's redis, nginx and iperf3: these run as without an attack, and nothing of
//! the attacks is left in the end.
//!
//! `PORTOLAN_TEST_SECONDS` sets the duration (20; `make soak` attacks for 20 minutes). All attackers
//! together weigh as much as one program of the usual priority, as a user's programs do in a slice of their own: anyone can
//! keep processors busy without Portolan.

mod attackers;
mod bystanders;
pub(crate) mod holdings;
mod wire;

use std::time::{Duration, Instant};

use portolan_netns::{Bed, Daemon};

use crate::budgets::allow_descriptors;
use crate::common::{Client, Configuration, control_path};
use crate::fuzzing::parameter;
use crate::meter::Meter;
use attackers::Field;
use bystanders::{Bystanders, PAGE_FLOOR};
use holdings::Holdings;
use wire::HostileHost;

const SECONDS: u64 = 20;

/// Small enough to be used up by an attacker; all users together leave room for others.
const LIMITS: &str = "[limits]
processes = 512
processes_per_user = 48
connections_per_user = 64
sessions_per_user = 6000
bindings_per_user = 1000
shared_ports_per_user = 50
orphan_memory = 128
orphan_memory_per_user = 16
[buffers]
send_initial = 1048576
";

/// Time for what ends by itself: connections without a peer, taps, closes of descriptors.
const SETTLED: Duration = Duration::from_secs(30);

/// Permitted growth of the server's memory, which its allocator keeps for later use.
const KEPT_KIB: u64 = 64 << 10;

/// Of the log of a server that has died.
const LAST_LINES: usize = 100;

/// Returns the processor time of the server's threads together.
fn processor_time(server: &Daemon) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // In hundredths of a second, in the kernel and outside.
    let ticks: u64 = fields[11..13]
        .iter()
        .map(|t| t.parse::<u64>().unwrap())
        .sum();
    Duration::from_millis(ticks * 10)
}

fn percent(part: Duration, whole: Duration) -> f64 {
    100.0 * part.as_secs_f64() / whole.as_secs_f64()
}

#[test]
fn attackers_all_at_once_harm_nobody_and_leave_nothing() {
    allow_descriptors();
    let attack = Duration::from_secs(parameter("PORTOLAN_TEST_SECONDS", SECONDS));
    let quiet = (attack / 8).clamp(Duration::from_secs(2), Duration::from_secs(20));
    let bed = Bed::veth();
    let mut server = Configuration::new(&bed.a, LIMITS).start(&bed.a);
    let path = control_path(&bed.a);
    let mut bystanders = Bystanders::start(&bed, attack + quiet);
    let field = Field::prepare(&bed);
    let begun = (Instant::now(), processor_time(&server));
    let meter = Meter::start_slowly(&bed, quiet);
    let in_quiet = percent(processor_time(&server) - begun.1, begun.0.elapsed());
    let before = Holdings::of(&bed, &server);
    bystanders.attack_begins();
    assert_runs(&mut server);

    let begun = (Instant::now(), processor_time(&server));
    let host = HostileHost::start(&bed, attack);
    let (tales, resident) = attackers::attack(&field, attack, &mut server);
    assert_runs(&mut server);
    let attacked = percent(processor_time(&server) - begun.1, begun.0.elapsed());
    let frames = host.finish();
    let compared = meter.compared();
    let fared = bystanders.finish();
    drop(field);
    let after = before.await_settled(&bed, &server, SETTLED);

    eprintln!(
        "{} s of quiet, {} s of attack\n",
        quiet.as_secs(),
        attack.as_secs()
    );
    eprintln!("{fared}\n{compared}");
    tales.iter().for_each(|tale| eprintln!("{tale}"));
    eprintln!("{frames} frames of the hostile host beside its floods\n");
    eprintln!("{:24} {:>10} {:>10}", "the server's", "before", "after");
    before.rows(&after).for_each(|row| eprintln!("{row}"));
    eprintln!("memory by tenths of the attack, MiB: {resident:?}");
    eprintln!("processor time: {in_quiet:.1} % in quiet, {attacked:.1} % attacked");
    for (name, value) in refusals(&path) {
        eprintln!("{name:32} {value}");
    }

    fared.assert_unharmed();
    // A page includes an open.
    compared.assert_unharmed_with_opens_of(PAGE_FLOOR);
    before.assert_nothing_more(&after);
    // A leak would continue to grow.
    if let [.., middle, _, _, _, last] = resident[..] {
        assert!(last < middle + (KEPT_KIB >> 10), "{resident:?}");
    }
    assert!(
        tales.iter().all(|tale| tale.rounds > 0),
        "each has attacked"
    );
    crate::assert_serves_others(&bed, &path);
}

/// If the server has ended, the failure shows its status and its last output.
fn assert_runs(server: &mut Daemon) {
    if server.is_running() {
        return;
    }
    let status = server.await_end();
    let output = server.output();
    let lines: Vec<&str> = output.lines().collect();
    let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
    panic!("the server has ended, {status:?}, after\n{last}");
}

/// Returns the server's counters of refusals, and of connections that were reset or lost.
fn refusals(path: &std::path::Path) -> Vec<(String, u64)> {
    let counters = Client::connect(path).counters();
    let is_refusal = |name: &str| {
        [
            "budget_",
            "refused",
            "drop_",
            "malformed",
            "withheld",
            "reset",
            "overflow",
        ]
        .iter()
        .any(|part| name.contains(part))
    };
    counters
        .into_iter()
        .filter(|c| c.holder.is_none() && c.value > 0 && is_refusal(&c.name))
        .map(|c| (format!("{} {}", c.group, c.name), c.value))
        .collect()
}
