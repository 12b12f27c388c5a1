//! What extensions that do all the harm they may cost programs that have nothing to do with them: nothing more than
//! the same packets, and the same programs coming and going, do without.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PYTHON, Steps, bed, counter, file, serve};
use rustix::process::Signal;

const TRAFFIC: &str = "portolan-traffic";
const INCLUDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../include");
/// The victim's, and the attacker's.
const PORT: u16 = 7080;
const ATTACKED: u16 = 7081;

const CONSUMER: &str = "#include <portolan/extension.h>
PORTOLAN_HANDLER int nothing(struct portolan_view *view) { return PORTOLAN_CONSUME; }";

/// As long as a handler may take, and with each datagram.
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

/// Floods for as long as it is told to, in bursts of a hundred.
const FLOOD: &str = "
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
to = (sys.argv[1], int(sys.argv[2]))
print('ready', flush=True)
for _ in sys.stdin:
    end, sent = time.monotonic() + 1.0, 0
    while time.monotonic() < end:
        for _ in range(100):
            s.sendto(b'x', to)
        sent += 100
        time.sleep(0.001)
    print(sent, flush=True)
";

fn compile(bed: &Bed, name: &str, text: &str) -> PathBuf {
    let source = file(bed, &format!("{name}.c"), text);
    let object = bed.file(&format!("{name}.o"));
    let mut clang = Command::new("clang");
    clang.args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-I", INCLUDE]);
    clang.args(["-I", "/usr/include/x86_64-linux-gnu", "-c", &source, "-o"]);
    run(clang.arg(&object)).unwrap_or_else(|error| panic!("{error}"));
    object
}

fn owner(bed: &Bed, object: &std::path::Path) -> Command {
    let mut owner = bed.own_command(Side::Server);
    owner.args(["ext", "install"]).arg(object);
    owner.args(["--udp", &ATTACKED.to_string()]);
    owner
}

/// A program with a port, and nothing else.
fn harmless(bed: &Bed) -> Command {
    let mut program = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
    program.args(["echo", "udp", &bed.endpoint(ATTACKED).to_string()]);
    program
}

/// The least p99 of a bystander's round trips in a few floods at the attacker's port.
fn during_floods(bed: &Bed, flood: &mut Steps) -> f64 {
    const FLOODS: usize = 4;
    let mut least = f64::INFINITY;
    for _ in 0..FLOODS {
        flood.say("");
        let mut ping = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
        ping.args(["ping", "tcp", &bed.endpoint(PORT).to_string()]);
        let report = run(ping.args(["--count", "2000"])).expect("round trips");
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        least = least.min(report["p99_us"].as_f64().expect("a number"));
        assert!(flood.line().parse::<u64>().expect("a number") > 1000);
    }
    least
}

/// As [`during_floods`], while programs come, and are killed, one after the other; and how many those were.
fn while_they_die(
    bed: &Bed,
    flood: &mut Steps,
    program: impl Fn() -> Command + Sync,
) -> (f64, u32) {
    let (is_over, deaths) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                let mut doomed = Background::start(&mut program()).expect("it starts");
                thread::sleep(Duration::from_millis(150));
                // It may have been refused, and have ended.
                let _ = doomed.signal(Signal::KILL);
                doomed.wait(Duration::from_secs(10));
                deaths.fetch_add(1, Relaxed);
            }
        });
        let p99 = during_floods(bed, flood);
        is_over.store(true, Relaxed);
        (p99, deaths.load(Relaxed))
    })
}

#[test]
fn others_pay_nothing_more_for_handlers_that_loop_and_owners_that_crash() {
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
        compile(&bed, "consumer", CONSUMER),
        compile(&bed, "looper", LOOPER),
    );
    let mut flood = bed.command(Side::Client, Stack::Kernel, PYTHON);
    let (address, port) = (bed.server.address.to_string(), ATTACKED.to_string());
    let mut flood = Steps::start(flood.args(["-c", FLOOD, &address, &port]));
    flood.await_line("ready");
    let extension = |name| counter(&bed, Side::Server, "extension", name);

    let quick = Background::start(&mut owner(&bed, &consumer)).expect("an owner");
    let plain = during_floods(&bed, &mut flood);
    assert!(extension("consumed") > 1000);
    drop(quick);
    let consumed = extension("consumed");
    let slow = Background::start(&mut owner(&bed, &looper)).expect("an owner");
    let looping = during_floods(&bed, &mut flood);
    assert!(extension("consumed") > consumed);
    drop(slow);
    assert!(looping <= 5.0 * plain, "{looping} us, else {plain} us");

    let (coming, programs) = while_they_die(&bed, &mut flood, || harmless(&bed));
    let installed = counter(&bed, Side::Server, "server", "extensions-installed");
    let (crashing, owners) = while_they_die(&bed, &mut flood, || owner(&bed, &looper));
    let more = counter(&bed, Side::Server, "server", "extensions-installed") - installed;
    assert!(
        programs > 5 && owners > 5,
        "{programs} programs, {owners} owners"
    );
    assert!(more > 5, "{more} were installed");
    assert!(crashing <= 5.0 * coming, "{crashing} us, else {coming} us");
    eprintln!("{looping} of {plain} us, {crashing} of {coming} us, {owners} owners");
}
