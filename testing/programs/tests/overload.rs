//! Which program loses packets when more arrive than it can take (NE §5.2), or than its budget allows.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{bed, eventually, public_programs};
use serde_json::Value;

const STEADY: u16 = 7070;
const BUSY: u16 = 7071;

const SETTLE: Duration = Duration::from_millis(500);
const LIMIT: Duration = Duration::from_secs(30);

/// Starts a program that receives datagrams, and prints the result at its end.
fn start(command: &mut Command, arguments: &[&str]) -> Background {
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    Background::start_with_output(command).expect("it starts")
}

/// Sends datagrams from the client host at a rate per second.
fn source(bed: &Bed, port: u16, rate: &str, size: &str) -> Background {
    let endpoint = bed.endpoint(port).to_string();
    let mut command = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
    command.args([
        "pace",
        &endpoint,
        "--rate",
        rate,
        "--size",
        size,
        "--seconds",
        "30",
    ]);
    Background::start(&mut command).expect("it starts")
}

fn end(mut program: Background) -> Value {
    assert!(program.wait(LIMIT), "it ends by itself");
    let text = program.finish();
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}"))
}

fn json(bed: &Bed, arguments: &[&str]) -> Value {
    let text = bed
        .portolan(Side::Server, arguments)
        .expect("the server answers");
    serde_json::from_str(&text).expect("it prints JSON")
}

/// Returns the packets of a process that were dropped, by the filter (`receive`) or by its stack.
fn dropped(bed: &Bed, group: &str, pid: u32) -> u64 {
    let counters = json(bed, &["counters", "-p", "--json"]);
    let of = |counter: &&Value| {
        let is_drop = counter["name"]
            .as_str()
            .is_some_and(|name| name.starts_with("drop"));
        is_drop && counter["group"] == group && counter["holder"]["pid"] == pid
    };
    let counters = counters.as_array().expect("a list");
    counters
        .iter()
        .filter(of)
        .filter_map(|counter| counter["value"].as_u64())
        .sum()
}

#[test]
fn a_consumer_that_falls_behind_loses_only_its_own() {
    let bed = bed();
    let [steady, busy] = [STEADY, BUSY].map(|port| bed.endpoint(port).to_string());
    let steady = start(
        &mut bed.command(Side::Server, Stack::Portolan, "portolan-traffic"),
        &["take", &steady, "--seconds", "6"],
    );
    // It takes one per 4 ms of 32 that arrive, and of 160 in every other half-second, so that its ring fills.
    let busy = start(
        &mut bed.neighbour(Stack::Portolan, "portolan-traffic"),
        &["take", &busy, "--seconds", "6", "--work-us", "20000"],
    );
    sleep(SETTLE);
    let _sources = [
        source(&bed, STEADY, "500", "64"),
        source(&bed, BUSY, "8000", "1400"),
    ];
    let pids = [steady.pid(), busy.pid()];
    let falls_behind = || dropped(&bed, "stack", pids[1]) > 100;
    assert!(eventually(Duration::from_secs(5), falls_behind));
    let steady_dropped = ["receive", "stack"].map(|group| dropped(&bed, group, pids[0]));
    let (steady, busy) = (end(steady), end(busy));
    eprintln!("steady {steady}, busy {busy}");
    assert!(busy["lost"].as_u64() > Some(100), "{busy}");
    assert_eq!(steady["lost"], 0, "{steady}");
    assert_eq!(steady_dropped, [0, 0]);
}

/// Runs a command of Portolan as the user `nobody`.
fn as_nobody(bed: &Bed, programs: &Path) -> Command {
    let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
    command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
    command
        .args(["--no-new-privs", "--"])
        .arg(programs.join("portolan"));
    command
}

#[test]
fn nobody_gets_round_a_budget_that_root_has_set() {
    let bed = bed();
    let programs = public_programs(&bed);
    let (endpoint, port) = (bed.endpoint(BUSY).to_string(), format!("udp:{BUSY}"));
    let traffic = programs.join("portolan-traffic").display().to_string();
    let arguments = [
        "run",
        "--require",
        "--",
        &traffic,
        "take",
        &endpoint,
        "--seconds",
        "60",
    ];
    let taker = start(&mut as_nobody(&bed, &programs), &arguments);
    let budget = ["qos", "set", "user", "nobody", "rx", "--packets", "100"];
    bed.portolan(Side::Server, &budget).expect("root may");
    let pid = taker.pid();
    // The owner of a port may set its budget, once it has the port.
    let wider = ["qos", "set", "port", &port, "rx", "--packets", "1000000"];
    let may = || run(as_nobody(&bed, &programs).args(wider)).is_ok();
    assert!(eventually(LIMIT, may), "its own port");
    let foreign = ["qos", "set", "user", "root", "rx", "--packets", "1"];
    assert!(run(as_nobody(&bed, &programs).args(foreign)).is_err());
    let others = ["qos", "del", "user", "nobody", "rx"];
    assert!(run(as_nobody(&bed, &programs).args(others)).is_err());

    let _source = source(&bed, BUSY, "5000", "64");
    assert!(
        eventually(LIMIT, || dropped(&bed, "receive", pid) > 1000),
        "{}",
        dropped(&bed, "receive", pid)
    );
    let report = json(&bed, &["qos", "show", "--json"]);
    let budgets = report["receive"].as_array().expect("a list");
    let of = |uid: u64| budgets.iter().find(|budget| budget["uid"] == uid);
    assert!(
        of(0).is_some_and(|root| root["dropped"].as_u64() > Some(1000)),
        "{report}"
    );
    assert!(
        budgets
            .iter()
            .any(|own| own["uid"] != 0 && own["passed"] == 0),
        "{report}"
    );

    // Without root's budget, the program's own applies.
    let end = ["qos", "del", "user", "nobody", "rx"];
    bed.portolan(Side::Server, &end).expect("root may");
    let passes = || {
        let report = json(&bed, &["qos", "show", "--json"]);
        report["receive"][0]["passed"].as_u64() > Some(1000)
    };
    assert!(eventually(LIMIT, passes));
}
