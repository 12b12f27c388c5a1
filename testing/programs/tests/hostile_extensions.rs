//! The cost to unrelated programs of extensions that are as harmful as they can be: no more than that of the same
//! packets, and of the same starts and ends of programs, without them.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PYTHON, Steps, bed, compiled_extension, counter, eventually, serve};
use rustix::process::Signal;

const TRAFFIC: &str = "portolan-traffic";
/// Ports of the victim, the attacker, a harmless program, and a program whose extensions are installed and removed.
const PORT: u16 = 7080;
const ATTACKED: u16 = 7081;
const HARMLESS: u16 = 7082;
const TURNING: u16 = 7083;

/// Number of windows of each kind.
const WINDOWS: usize = 5;
/// Bound of the ratio of two p99s; windows of the same kind differ by as much if two processors do all the work.
const BOUND: f64 = 3.0;

/// Microseconds that are harmless even if more than that: a program that starts, whatever it does then, occupies a processor
/// until its time slice ends, which the kernel notices at its next tick.
const SLICE: f64 = 1500.0;

const CONSUMER: &str = "#include <portolan/extension.h>
PORTOLAN_HANDLER int nothing(struct portolan_view *view) { return PORTOLAN_CONSUME; }";

/// A handler that takes its whole time limit for each datagram.
const LOOPER: &str = "#include <portolan/extension.h>
PORTOLAN_MAP(cells, PORTOLAN_ARRAY, __u32, __u64, 64);
PORTOLAN_HANDLER int loops(struct portolan_view *view)
{
	for (__u32 i = 0; i < 1000; i++) {
		__u32 at = i & 63;
		__u64 *cell = portolan_find(&cells, &at);
		if (cell)
			*cell += view->time;
	}
	return PORTOLAN_CONSUME;
}";

/// Floods a port, which it reads from its input, for half a second, in bursts of a hundred.
const FLOOD: &str = "
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print('ready', flush=True)
for port in sys.stdin:
    to = (sys.argv[1], int(port))
    end, sent = time.monotonic() + 0.5, 0
    while time.monotonic() < end:
        for _ in range(100):
            s.sendto(b'x', to)
        sent += 100
        time.sleep(0.001)
    print(sent, flush=True)
";

fn owner(bed: &Bed, object: &Path, port: u16) -> Command {
    let mut owner = bed.own_command(Side::Server);
    owner.args(["ext", "install"]).arg(object);
    owner.args(["--udp", &port.to_string()]);
    owner
}

/// A program with a port and without extensions.
fn harmless(bed: &Bed) -> Command {
    let mut program = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
    program.args(["echo", "udp", &bed.endpoint(ATTACKED).to_string()]);
    program
}

/// Returns the p99 of a bystander's round trips while the port is flooded.
fn during_flood(bed: &Bed, flood: &mut Steps, port: u16) -> f64 {
    flood.say(&port.to_string());
    let mut ping = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
    ping.args(["ping", "tcp", &bed.endpoint(PORT).to_string()]);
    // A spinning bystander would complete its round trips before the flood begins.
    ping.env("PORTOLAN_SPIN", "0");
    let report = run(ping.args(["--count", "2000"])).expect("round trips");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert!(flood.line().parse::<u64>().expect("a number") > 500);
    report["p99_us"].as_f64().expect("a number")
}

/// As [`during_flood`], while programs are started and killed in turn, some before they are ready and some after; also
/// returns their number.
fn while_they_die(
    bed: &Bed,
    flood: &mut Steps,
    deaths: &AtomicU32,
    program: impl Fn() -> Command + Sync,
) -> f64 {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for life in [100, 400].map(Duration::from_millis).iter().cycle() {
                if is_over.load(Relaxed) {
                    break;
                }
                let mut doomed = Background::start(&mut program()).expect("it starts");
                thread::sleep(*life);
                // It may have been refused and have exited.
                let _ = doomed.signal(Signal::KILL);
                doomed.wait(Duration::from_secs(10));
                deaths.fetch_add(1, Relaxed);
            }
        });
        let p99 = during_flood(bed, flood, ATTACKED);
        is_over.store(true, Relaxed);
        p99
    })
}

/// As [`during_flood`], while the server verifies extensions of the port as fast as possible and, if the order says so,
/// installs and removes them; also returns their number.
fn while_they_turn_over(
    bed: &Bed,
    flood: &mut Steps,
    owner: &mut Steps,
    order: &str,
    count: &AtomicU32,
) -> f64 {
    owner.say(order);
    let p99 = during_flood(bed, flood, TURNING);
    count.fetch_add(owner.line().parse().expect("a number"), Relaxed);
    p99
}

/// Compares a bystander's median p99 in hostile windows with that in windows without hostility. They alternate, so that
/// other load of the machine affects both.
fn assert_unharmed_in_turns(
    flood: &mut Steps,
    mut beside: impl FnMut(&mut Steps) -> f64,
    mut hostile: impl FnMut(&mut Steps) -> f64,
) {
    let (mut plain, mut with) = ([0.0; WINDOWS], [0.0; WINDOWS]);
    for (plain, with) in plain.iter_mut().zip(&mut with) {
        *plain = beside(flood);
        *with = hostile(flood);
    }
    eprintln!("p99 in us: {plain:.0?} beside, {with:.0?} with it");
    assert!(median(with) <= (BOUND * median(plain)).max(SLICE));
}

fn median(mut values: [f64; WINDOWS]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[WINDOWS / 2]
}

#[test]
fn others_pay_nothing_more_for_handlers_that_loop_and_owners_that_come_and_go() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let _echo = serve(
        &bed,
        Stack::Portolan,
        PORT,
        TRAFFIC,
        &["echo", "tcp", &endpoint],
    );
    let (consumer, looper) = (
        compiled_extension(&bed, "consumer", CONSUMER),
        compiled_extension(&bed, "looper", LOOPER),
    );
    let mut flood = bed.command(Side::Client, Stack::Kernel, PYTHON);
    let mut flood = Steps::start(flood.args(["-c", FLOOD, &bed.server.address.to_string()]));
    flood.await_line("ready");
    let extension = |name| counter(&bed, Side::Server, "extension", name);
    let installed = || counter(&bed, Side::Server, "server", "extensions_installed");

    let quick = Background::start(&mut owner(&bed, &consumer, HARMLESS)).expect("an owner");
    let slow = Background::start(&mut owner(&bed, &looper, ATTACKED)).expect("an owner");
    assert!(eventually(Duration::from_secs(10), || installed() == 2));
    assert_unharmed_in_turns(
        &mut flood,
        |flood| during_flood(&bed, flood, HARMLESS),
        |flood| during_flood(&bed, flood, ATTACKED),
    );
    assert!(extension("consumed") > 1000);
    drop((quick, slow));

    let (programs, owners) = (AtomicU32::new(0), AtomicU32::new(0));
    let before = installed();
    assert_unharmed_in_turns(
        &mut flood,
        |flood| while_they_die(&bed, flood, &programs, || harmless(&bed)),
        |flood| while_they_die(&bed, flood, &owners, || owner(&bed, &looper, ATTACKED)),
    );
    let (programs, owners) = (programs.into_inner(), owners.into_inner());
    assert!(
        programs > 5 && owners > 5,
        "{programs} programs, {owners} owners"
    );
    assert!(installed() - before > 2);

    let mut turning = bed.owner_command(Side::Server);
    turning.args(["turn-over", &bed.endpoint(TURNING).to_string()]);
    let mut turning = Steps::start(turning.arg(&consumer));
    turning.await_line("ready");
    let turning = std::cell::RefCell::new(turning);
    let (checks, turns) = (AtomicU32::new(0), AtomicU32::new(0));
    let before = installed();
    assert_unharmed_in_turns(
        &mut flood,
        |flood| while_they_turn_over(&bed, flood, &mut turning.borrow_mut(), "check", &checks),
        |flood| while_they_turn_over(&bed, flood, &mut turning.borrow_mut(), "install", &turns),
    );
    let (checks, turns) = (checks.into_inner(), turns.into_inner());
    assert!(checks > 50 && turns > 50, "{checks} checks, {turns} turns");
    assert_eq!(installed() - before, u64::from(turns) + WINDOWS as u64);
    eprintln!("{owners} owners were killed; {turns} installations beside {checks} checks");
}
