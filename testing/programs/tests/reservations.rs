//! CPU reservations of real programs, by the server that runs beside them: who may have them, what the kernel is told,
//! and when they end.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_bench::Effort;
use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, ProcessError, run};
use portolan_bench::suites::Suite;
use portolan_programs::{bed, eventually, public_programs};
use rustix::process::Signal;
use serde_json::Value;

const SPIN: &str = "while :; do :; done";
const SLEEP: &str = "exec sleep 60";

/// Twice as often as the server looks.
const A_WHILE: Duration = Duration::from_secs(2);

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(10);

/// One at a time has the CPUs to give away.
static CPUS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    CPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A shell on no particular core.
fn start(bed: &Bed, script: &str) -> Background {
    let mut command = bed.namespace(Side::Client).exec("sh");
    start_or_panic(command.args(["-c", script]))
}

fn start_as_nobody(bed: &Bed, script: &str) -> Background {
    start_or_panic(nobodys(bed).args(["sh", "-c", script]))
}

fn start_or_panic(command: &mut Command) -> Background {
    Background::start(command).unwrap_or_else(|error| panic!("{error}"))
}

fn nobodys(bed: &Bed) -> Command {
    let mut command = bed.namespace(Side::Client).exec("setpriv");
    command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
    command.args(["--no-new-privs", "--"]);
    command
}

fn portolan(bed: &Bed, words: &str) -> Result<String, ProcessError> {
    let words: Vec<&str> = words.split(' ').collect();
    bed.portolan(Side::Client, &words)
}

fn nobody_asks(bed: &Bed, programs: &Path, words: &str) -> Result<String, ProcessError> {
    run(nobodys(bed)
        .arg(programs.join("portolan"))
        .args(words.split(' ')))
}

fn reserve(bed: &Bed, pid: u32, words: &str) {
    portolan(bed, &format!("qos set pid {pid} cpu {words}"))
        .unwrap_or_else(|error| panic!("{error}"));
}

fn refusal(outcome: Result<String, ProcessError>) -> String {
    outcome.expect_err("the server refuses").to_string()
}

/// The kernel's words for how a process's first thread is scheduled.
fn policy(pid: u32) -> String {
    run(Command::new("chrt").args(["-p", &pid.to_string()])).unwrap_or_default()
}

fn has_deadline(pid: u32) -> bool {
    policy(pid).contains("SCHED_DEADLINE")
}

/// Runtime of its period that the kernel gives it, in millionths.
fn kernels_ppm(pid: u32) -> u64 {
    let policy = policy(pid);
    let times = policy
        .lines()
        .find(|line| line.contains("runtime/deadline/period"));
    let times = times
        .and_then(|line| line.rsplit(' ').next())
        .expect("chrt shows the runtime");
    let times: Vec<u64> = times
        .split('/')
        .map(|time| time.parse().expect("a number"))
        .collect();
    times[0] * 1_000_000 / times[2]
}

fn report(bed: &Bed) -> Value {
    let text = portolan(bed, "qos show --json").expect("the server answers");
    serde_json::from_str(&text).expect("it prints JSON")
}

fn reservation(bed: &Bed, pid: u32) -> Value {
    let report = report(bed);
    let all = report["cpu"].as_array().expect("a list");
    let own = all
        .iter()
        .find(|entry| entry["scope"] == format!("pid {pid}"));
    own.cloned().unwrap_or(Value::Null)
}

/// `R_k` of the only class.
fn class_rate(bed: &Bed) -> u64 {
    report(bed)["cpu_classes"][0]["rate_ppm"]
        .as_u64()
        .expect("a rate")
}

/// As `--rate` takes them.
fn share(ppm: u64) -> String {
    format!("0.{ppm:06}")
}

#[test]
fn nobody_reserves_for_his_own_within_his_part_and_for_others_nothing() {
    let _alone = alone();
    let bed = bed();
    let programs = public_programs(&bed);
    let own = start_as_nobody(&bed, SLEEP);
    let roots = start(&bed, SLEEP);
    let set = |pid, rate: &str| {
        let words = format!("qos set pid {pid} cpu --rate {rate} --period 10ms");
        nobody_asks(&bed, &programs, &words)
    };
    // Until the program is nobody's.
    assert!(eventually(LONG, || set(own.pid(), "0.1").is_ok()));
    assert!(has_deadline(own.pid()), "{}", policy(own.pid()));
    assert_eq!(reservation(&bed, own.pid())["form"], "Deadline");

    let refused = refusal(set(own.pid(), &share(class_rate(&bed) / 2 + 1)));
    assert!(refused.contains("would fit"), "{refused}");
    assert!(has_deadline(own.pid()), "what it had stays");
    let refused = refusal(set(roots.pid(), "0.1"));
    assert!(refused.contains("not yours"), "{refused}");
    assert!(!has_deadline(roots.pid()));
    let words = format!("qos del pid {} cpu", roots.pid());
    assert!(refusal(nobody_asks(&bed, &programs, &words)).contains("not yours"));
    // What root has given him he neither changes nor ends.
    let words = format!("qos del pid {} cpu", own.pid());
    nobody_asks(&bed, &programs, &words).expect("it is his");
    reserve(&bed, own.pid(), "--rate 0.2 --period 10ms");
    for refused in [set(own.pid(), "0.1"), nobody_asks(&bed, &programs, &words)] {
        assert!(refusal(refused).contains("another user"));
    }
    portolan(&bed, &words).expect("it is root's");
    for (words, named) in [
        ("--rate 0.1 --period 50us", "period"),
        ("--rate 0.1 --period 5s", "period"),
        ("--rate 4000", "more than"),
        ("--rate 0.1 --class none", "no CPU class"),
    ] {
        let words = format!("qos set pid {} cpu {words}", own.pid());
        let refused = refusal(nobody_asks(&bed, &programs, &words));
        assert!(refused.contains(named), "{refused}");
    }
}

#[test]
fn what_a_killed_holder_had_is_free_within_a_second() {
    let _alone = alone();
    let bed = bed();
    let all = share(class_rate(&bed).min(850_000));
    let holder = start(&bed, SPIN);
    reserve(&bed, holder.pid(), &format!("--rate {all}"));
    let other = start(&bed, SLEEP);
    let words = format!("qos set pid {} cpu --rate {all}", other.pid());
    if class_rate(&bed) < 2 * 850_000 {
        assert!(refusal(portolan(&bed, &words)).contains("would fit"));
    }
    holder
        .signal(rustix::process::Signal::KILL)
        .expect("it is there");
    drop(holder);
    // Who asks has not to wait until the server looks.
    portolan(&bed, &words).unwrap_or_else(|error| panic!("{error}"));
    let effective = &reservation(&bed, other.pid())["effective_ppm"];
    assert_eq!(
        effective.as_u64(),
        Some(class_rate(&bed)),
        "alone in its class"
    );
    drop(other);
    let is_free = || report(&bed)["cpu"].as_array().is_some_and(Vec::is_empty);
    assert!(eventually(A_WHILE, is_free));
}

#[test]
fn effective_rates_follow_who_joins_and_leaves() {
    let _alone = alone();
    let bed = bed();
    let rate = class_rate(&bed);
    let (one, two) = (start(&bed, SLEEP), start(&bed, SLEEP));
    let effective = |pid| {
        reservation(&bed, pid)["effective_ppm"]
            .as_u64()
            .unwrap_or(0)
    };
    // To what the kernel's nanoseconds can say.
    let is_told = |pid| kernels_ppm(pid).abs_diff(effective(pid).min(900_000)) <= 1;
    reserve(&bed, one.pid(), "--rate 0.1 --period 20ms");
    assert_eq!(effective(one.pid()), rate);
    assert!(is_told(one.pid()), "{}", policy(one.pid()));
    reserve(&bed, two.pid(), "--rate 0.2 --period 10ms");
    assert_eq!(effective(one.pid()), rate / 3);
    assert_eq!(effective(two.pid()), rate * 2 / 3);
    assert!(
        is_told(one.pid()) && is_told(two.pid()),
        "{}",
        policy(two.pid())
    );
    portolan(&bed, &format!("qos del pid {} cpu", two.pid())).expect("it is there");
    assert_eq!(effective(one.pid()), rate);
    assert!(is_told(one.pid()));
    assert!(!has_deadline(two.pid()), "it is scheduled as before");
}

#[test]
fn a_thread_that_spins_has_its_rate_and_overruns_it_until_its_rate_is_adapted() {
    let _alone = alone();
    let mut bed = bed();
    bed.set_settings(
        "[[qos.cpu_class]]\nname = \"soft\"\nshare = 0.1\noverbooking = 1\n[[qos.cpu_class]]\nname = \"hard\"\nshare = 0.5\n",
    );
    *bed.daemon(Side::Client) = None;
    bed.start_daemon(Side::Client)
        .unwrap_or_else(|error| panic!("{error}"));
    let hog = start(&bed, SPIN);
    reserve(
        &bed,
        hog.pid(),
        "--class soft --rate 0.02 --period 10ms --adapt propose",
    );
    let value = |name: &str| reservation(&bed, hog.pid())[name].as_u64().unwrap_or(0);
    let has_overrun = || value("overruns") > 0 && value("proposed_ppm") > 20_000;
    assert!(
        eventually(LONG, has_overrun),
        "{}",
        reservation(&bed, hog.pid())
    );
    let (used, effective) = (value("used_ppm"), value("effective_ppm"));
    assert!(used < effective * 5 / 4, "{used} of {effective}");
    reserve(
        &bed,
        hog.pid(),
        "--class soft --rate 0.02 --period 10ms --adapt 0.01-0.05",
    );
    let rate = || reservation(&bed, hog.pid())["wish"]["rate_ppm"].as_u64();
    assert!(eventually(LONG, || rate() == Some(50_000)), "{:?}", rate());
}

#[test]
fn where_the_kernel_refuses_the_next_weaker_form_is_shown_until_it_does_not() {
    let _alone = alone();
    let bed = bed();
    let program = start(&bed, SPIN);
    let pin = |cores: &str| {
        let arguments = ["-pc", cores, &program.pid().to_string()];
        run(Command::new("taskset").args(arguments)).expect("root may pin");
    };
    let cores = std::thread::available_parallelism()
        .expect("there are cores")
        .get();
    if cores == 1 {
        return;
    }
    pin("0");
    reserve(&bed, program.pid(), "--rate 0.3 --period 10ms");
    let form = &reservation(&bed, program.pid())["form"]["Weaker"];
    assert!(
        form["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("affinity")),
        "{form}"
    );
    let name = form["form"].as_str().expect("a form");
    assert!(
        name.contains("cpu.shares") || name.contains("nice"),
        "{form}"
    );
    assert!(!has_deadline(program.pid()));
    pin(&format!("0-{}", cores - 1));
    assert!(eventually(A_WHILE, || has_deadline(program.pid())));
    assert_eq!(reservation(&bed, program.pid())["form"], "Deadline");
}

#[test]
fn a_server_that_stops_leaves_threads_as_they_were() {
    let _alone = alone();
    let mut bed = bed();
    let program = start(&bed, "exec nice -n 5 sleep 60");
    assert!(eventually(LONG, || nice(program.pid()) == Some(5)));
    reserve(&bed, program.pid(), "--rate 0.1");
    assert!(has_deadline(program.pid()));
    *bed.daemon(Side::Client) = None;
    assert!(!has_deadline(program.pid()));
    assert_eq!(nice(program.pid()), Some(5));
}

/// The 19th field of proc_pid_stat(5).
fn nice(pid: u32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?
        .1
        .split_ascii_whitespace()
        .nth(16)?
        .parse()
        .ok()
}

#[test]
fn the_threads_of_a_process_share_its_rate_by_what_they_use() {
    let _alone = alone();
    let bed = bed();
    let script = "import threading, time\nthreading.Thread(target=lambda: time.sleep(60)).start()\nwhile True: pass";
    let mut command = bed.namespace(Side::Client).exec("/usr/bin/python3");
    let program = start_or_panic(command.args(["-c", script]));
    let threads = || -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid()));
        let number = |task: std::io::Result<std::fs::DirEntry>| {
            task.ok()?.file_name().to_str()?.parse().ok()
        };
        tasks.into_iter().flatten().filter_map(number).collect()
    };
    assert!(eventually(LONG, || threads().len() == 2));
    let sleeper = threads()
        .into_iter()
        .find(|tid| *tid != program.pid())
        .expect("two");
    reserve(&bed, program.pid(), "--rate 0.2 --period 10ms");
    let rate = class_rate(&bed);
    assert!(has_deadline(program.pid()) && has_deadline(sleeper));
    // At first alike; then the one that runs has seven parts of eight.
    let is_by_use = || kernels_ppm(program.pid()) > 5 * kernels_ppm(sleeper);
    assert!(
        eventually(LONG, is_by_use),
        "{} {}",
        policy(program.pid()),
        policy(sleeper)
    );
    assert!(kernels_ppm(program.pid()) + kernels_ppm(sleeper) <= rate);
}

#[test]
fn who_has_more_threads_than_are_looked_at_is_told() {
    let _alone = alone();
    let bed = bed();
    let script = "import threading, time\nfor _ in range(140):\n threading.Thread(target=lambda: time.sleep(60)).start()";
    let mut command = bed.namespace(Side::Client).exec("/usr/bin/python3");
    let program = start_or_panic(command.args(["-c", script]));
    reserve(&bed, program.pid(), "--rate 0.2 --period 10ms");
    let form = || reservation(&bed, program.pid())["form"]["Weaker"]["form"].clone();
    let is_told = || {
        form()
            .as_str()
            .is_some_and(|form| form.contains("128 of its threads"))
    };
    assert!(eventually(LONG, is_told), "{}", form());
}

/// A figure of the benchmark, once.
fn figure(bed: &Bed, name: &str) -> f64 {
    let effort = Effort {
        runs: 1,
        quick: true,
    };
    let case = Suite::Qos
        .cases(effort)
        .into_iter()
        .find(|case| case.name == name);
    let measured = case
        .expect("a figure of this name")
        .run(bed, Stack::Portolan);
    measured.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn round_trips_of_who_has_reserved_are_hardly_longer_among_programs_that_compute() {
    let _alone = alone();
    let bed = bed();
    let reserved = figure(&bed, "ms-fig19-reserved");
    // The bar of the benchmark is 1.5; without reservations it is tens.
    assert!(reserved < 5.0, "{reserved}");
}

#[test]
fn pictures_come_in_time_to_who_has_reserved_and_late_to_others() {
    let _alone = alone();
    let bed = bed();
    let reserved = figure(&bed, "ms-fig21-rate-reserved");
    let unreserved = figure(&bed, "ms-fig21-rate-unreserved");
    assert!(reserved > 29.0, "{reserved}");
    assert!(
        unreserved < 25.0,
        "four programs compute on each core: {unreserved}"
    );
}

#[test]
fn what_a_killed_server_gave_the_next_takes_back() {
    let _alone = alone();
    let mut bed = bed();
    let programs = ["60", "61"].map(|seconds| start(&bed, &format!("exec sleep {seconds}")));
    for program in &programs {
        reserve(&bed, program.pid(), "--rate 0.1");
    }
    let [ended, kept] = &programs;
    let delete = format!("qos del pid {} cpu", ended.pid());
    portolan(&bed, &delete).expect("it is there");
    let mut daemon = bed.daemon(Side::Client).take().expect("it runs");
    daemon.signal(Signal::KILL).expect("it is ours");
    assert!(daemon.wait(LONG));
    assert!(has_deadline(kept.pid()));
    bed.start_daemon(Side::Client)
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(!has_deadline(kept.pid()), "{}", policy(kept.pid()));
}
