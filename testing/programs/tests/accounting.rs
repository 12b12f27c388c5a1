//! Which process's CPU time protocol processing takes (MS §IV-A, IV-D), and what `portolan top` shows of it.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::{bed, client, eventually, serve};
use serde_json::Value;

const PORT: u16 = 7060;
const IDLE_PORT: u16 = 7061;

/// CPU time of a program's threads, and how often they were scheduled.
#[derive(Clone, Copy, Debug, Default)]
struct Ran {
    nanoseconds: u64,
    times: u64,
}

impl Ran {
    fn since(self, before: Ran) -> Ran {
        Ran {
            nanoseconds: self.nanoseconds - before.nanoseconds,
            times: self.times - before.times,
        }
    }
}

/// Returns the sum over the program's threads, and the values of the library's background thread.
fn threads(pid: u32) -> (Ran, Ran) {
    let (mut program, mut helper) = (Ran::default(), Ran::default());
    for task in fs::read_dir(format!("/proc/{pid}/task"))
        .expect("it runs")
        .flatten()
    {
        let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let schedstat = read("schedstat");
        let fields: Vec<u64> = schedstat.split_whitespace().flat_map(str::parse).collect();
        let [nanoseconds, _, times] = fields[..] else {
            continue;
        };
        let ran = match read("comm").trim() {
            "portolan" => &mut helper,
            _ => &mut program,
        };
        ran.nanoseconds += nanoseconds;
        ran.times += times;
    }
    (program, helper)
}

#[test]
fn no_helper_works_while_an_application_thread_waits() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT).to_string();
    let arguments = ["echo", "tcp", &endpoint];
    let server = serve(&bed, Stack::Portolan, PORT, "portolan-traffic", &arguments);
    let before = threads(server.pid());
    let arguments = ["ping", "tcp", &endpoint, "--count", "20000"];
    client(&bed, Stack::Portolan, "portolan-traffic", &arguments);
    let after = threads(server.pid());
    let (program, helper) = (after.0.since(before.0), after.1.since(before.1));
    eprintln!("program {program:?}, helper {helper:?}");
    assert!(
        helper.times * 10 < program.times,
        "{helper:?} beside {program:?}"
    );
    assert!(
        helper.nanoseconds * 10 < program.nanoseconds,
        "{helper:?} beside {program:?}"
    );
}

/// Streams bytes to the server host until dropped, beside an idle connection.
fn streaming(bed: &Bed) -> [Background; 4] {
    let [busy, idle] = [PORT, IDLE_PORT].map(|port| bed.endpoint(port).to_string());
    let sink = serve(
        bed,
        Stack::Portolan,
        PORT,
        "portolan-traffic",
        &["sink", &busy],
    );
    let arguments = ["hold", &idle, "--listen"];
    let holder = serve(
        bed,
        Stack::Portolan,
        IDLE_PORT,
        "portolan-traffic",
        &arguments,
    );
    let from_client = |arguments: &[&str]| {
        let mut command = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
        Background::start(command.args(arguments)).expect("it starts")
    };
    let source = from_client(&["bulk", &busy, "--seconds", "60"]);
    let watcher = from_client(&["hold", &idle]);
    [sink, holder, source, watcher]
}

fn sessions(bed: &Bed) -> Vec<Value> {
    let text = bed
        .portolan(Side::Server, &["ss", "-a", "--json"])
        .expect("the server answers");
    serde_json::from_str(&text).expect("ss prints JSON")
}

fn cpu_us(bed: &Bed, port: u16) -> Option<u64> {
    let at = format!(":{port}");
    let sessions = sessions(bed);
    let session = sessions.iter().find(|session| {
        let local = session["local"].as_str().unwrap_or_default();
        session["state"] == "ESTAB" && local.ends_with(&at)
    });
    session?["figures"]["cpu_us"].as_u64()
}

#[test]
fn a_flow_is_charged_what_is_done_for_it() {
    let bed = bed();
    let programs = streaming(&bed);
    let limit = Duration::from_secs(20);
    let is_charged = || cpu_us(&bed, PORT).is_some_and(|used| used > 100_000);
    assert!(eventually(limit, is_charged), "{:?}", sessions(&bed));
    let busy = cpu_us(&bed, PORT).expect("it streams");
    let (program, helper) = threads(programs[0].pid());
    let all = (program.nanoseconds + helper.nanoseconds) / 1000;
    // Sampled operations may take longer than others on a busy machine; the copy to the program is not included.
    assert!(busy < all * 3 / 2, "{busy} of {all} us");
    let idle = cpu_us(&bed, IDLE_PORT).expect("it holds");
    assert!(idle * 10 < busy, "{idle} beside {busy} us");
}

#[test]
fn top_shows_what_is_busy_first() {
    let bed = bed();
    let programs = streaming(&bed);
    let limit = Duration::from_secs(20);
    assert!(eventually(limit, || cpu_us(&bed, IDLE_PORT).is_some()));
    sleep(Duration::from_millis(300));
    let top = |arguments: &[&str]| {
        let words = [&["top", "-n", "2", "-d", "0.5"], arguments].concat();
        bed.portolan(Side::Server, &words)
            .expect("the server answers")
    };
    let json = top(&["--json"]);
    let views: Vec<Value> = json
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON for each look"))
        .collect();
    assert_eq!(views.len(), 2);
    let (session, process) = (&views[1]["sessions"][0], &views[1]["processes"][0]);
    assert_eq!(session["local"], bed.endpoint(PORT).to_string(), "{json}");
    assert_eq!(process["pid"], programs[0].pid(), "{json}");
    let of = |value: &Value, name: &str| value[name].as_f64().unwrap_or(f64::NAN);
    assert!(of(session, "in_bits") > 1e6, "{json}");
    assert!(of(session, "in_bits") <= of(process, "in_bits"), "{json}");
    // The kernel accounts CPU time in ticks of 10 ms.
    assert!((0.01..1.2).contains(&of(process, "cpu")), "{json}");
    assert!((0.001..1.5).contains(&of(session, "cpu")), "{json}");

    let text = top(&["-b"]);
    assert_eq!(text.matches("portolan: ").count(), 2, "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    let line = |word: &str| text.lines().position(|line| line.contains(word));
    let (busy, idle) = (line(&format!(":{PORT}")), line(&format!(":{IDLE_PORT}")));
    assert!(busy.is_some() && busy < idle, "{text}");
}
