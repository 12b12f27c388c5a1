//! CPU reservations of real programs, with a running server: who may have them, what the kernel is told,
//! and when they end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_bench::Effort;
use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, ProcessError, run};
use portolan_bench::suites::{self, Suite};
use portolan_programs::{PYTHON, bed, eventually, public_programs, start_server, stop_server};
use rustix::process::Signal;
use serde_json::Value;

const SPIN: &str = "while :; do :; done";
const SLEEP: &str = "exec sleep 60";

/// Twice the interval at which the server checks.
const A_WHILE: Duration = Duration::from_secs(2);

/// Time limit of every event here.
const LONG: Duration = Duration::from_secs(10);

/// Only one test at a time may reserve CPU time.
static CPUS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    CPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a shell that is not pinned to a core.
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

/// Returns chrt's description of how a process's first thread is scheduled.
fn policy(pid: u32) -> String {
    run(Command::new("chrt").args(["-p", &pid.to_string()])).unwrap_or_default()
}

fn has_deadline(pid: u32) -> bool {
    policy(pid).contains("SCHED_DEADLINE")
}

/// Returns the part of its period that the kernel gives a process, in millionths.
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
    reservation_of(bed, &format!("pid {pid}"))
}

fn reservation_of(bed: &Bed, scope: &str) -> Value {
    let report = report(bed);
    let all = report["cpu"].as_array().expect("a list");
    let own = all.iter().find(|entry| entry["scope"] == scope);
    own.cloned().unwrap_or(Value::Null)
}

/// Returns `R_k` of the only class.
fn class_rate(bed: &Bed) -> u64 {
    report(bed)["cpu_classes"][0]["rate_ppm"]
        .as_u64()
        .expect("a rate")
}

/// Restarts the server with these lines in its configuration.
fn restart_with(bed: &mut Bed, side: Side, settings: &str) {
    bed.set_settings(settings);
    *bed.daemon(side) = None;
    bed.start_daemon(side)
        .unwrap_or_else(|error| panic!("{error}"));
}

/// Formats a share as an argument of `--rate`.
fn share(ppm: u64) -> String {
    format!("0.{ppm:06}")
}

#[test]
fn nobody_reserves_for_his_own_within_his_part_and_for_others_nothing() {
    let _alone = alone();
    let mut bed = bed();
    // By default users may reserve nothing; a class of the configuration permits it.
    let class = "[[qos.cpu_class]]\nname = \"default\"\nshare = 0.5\n";
    restart_with(&mut bed, Side::Client, class);
    let programs = public_programs(&bed);
    let own = start_as_nobody(&bed, SLEEP);
    let roots = start(&bed, SLEEP);
    let set = |pid, rate: &str| {
        let words = format!("qos set pid {pid} cpu --rate {rate} --period 10ms");
        nobody_asks(&bed, &programs, &words)
    };
    // Fails until the program runs as nobody.
    assert!(eventually(LONG, || set(own.pid(), "0.1").is_ok()));
    assert!(has_deadline(own.pid()), "{}", policy(own.pid()));
    assert_eq!(reservation(&bed, own.pid())["form"]["kind"], "deadline");

    let refused = refusal(set(own.pid(), &share(class_rate(&bed) / 2 + 1)));
    assert!(refused.contains("would fit"), "{refused}");
    assert!(has_deadline(own.pid()), "what it had stays");
    let refused = refusal(set(roots.pid(), "0.1"));
    assert!(refused.contains("not yours"), "{refused}");
    assert!(!has_deadline(roots.pid()));
    let words = format!("qos del pid {} cpu", roots.pid());
    assert!(refusal(nobody_asks(&bed, &programs, &words)).contains("not yours"));
    // A user may neither change nor end what root has granted.
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
    // The request need not wait until the server checks again.
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
    // Up to the rounding of the kernel's nanoseconds.
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
    restart_with(
        &mut bed,
        Side::Client,
        "[[qos.cpu_class]]\nname = \"soft\"\nshare = 0.1\noverbooking = 1\n[[qos.cpu_class]]\nname = \"hard\"\nshare = 0.5\n",
    );
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
    let rate = || reservation(&bed, hog.pid())["rate_ppm"].as_u64();
    assert!(eventually(LONG, || rate() == Some(50_000)), "{:?}", rate());
}

#[test]
fn where_the_kernel_refuses_the_next_weaker_form_is_shown_until_it_does_not() {
    let _alone = alone();
    let bed = bed();
    let program = start(&bed, SPIN);
    let cores = std::thread::available_parallelism()
        .expect("there are cores")
        .get();
    if cores == 1 {
        return;
    }
    pin(program.pid(), "0");
    reserve(&bed, program.pid(), "--rate 0.3 --period 10ms");
    let form = &reservation(&bed, program.pid())["form"];
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
    pin(program.pid(), &all_cores());
    assert!(eventually(A_WHILE, || has_deadline(program.pid())));
    assert_eq!(reservation(&bed, program.pid())["form"]["kind"], "deadline");
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

/// Returns the 19th field of proc_pid_stat(5).
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
    // Equal at first; then the running one has seven eighths.
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
    let form = || reservation(&bed, program.pid())["form"]["form"].clone();
    let is_told = || {
        form()
            .as_str()
            .is_some_and(|form| form.contains("128 of its threads"))
    };
    assert!(eventually(LONG, is_told), "{}", form());
}

/// Measures a figure of the benchmark once.
fn figure(bed: &Bed, name: &str) -> f64 {
    let effort = Effort { quick: true };
    let case = suites::cases(Suite::Qos, effort)
        .into_iter()
        .find(|case| case.name == name);
    let measured = case
        .expect("a figure of this name")
        .run(bed, Stack::Portolan);
    measured.unwrap_or_else(|error| panic!("{error}")).value
}

#[test]
fn round_trips_of_who_has_reserved_are_hardly_longer_among_programs_that_compute() {
    let _alone = alone();
    let bed = bed();
    let reserved = figure(&bed, "ms-fig19-reserved");
    // The limit in the benchmark is 1.5; without reservations the ratio is in the tens.
    assert!(reserved < 5.0, "{reserved}");
}

#[test]
fn pictures_come_in_time_to_who_has_reserved_and_late_to_others() {
    let _alone = alone();
    let bed = bed();
    let reserved = figure(&bed, "ms-fig21-rate-reserved");
    let unreserved = figure(&bed, "ms-fig21-rate-unreserved");
    assert!(reserved > 29.0, "{reserved}");
    // With four programs computing on each core, a viewer usually gets half of the pictures, depending on the scheduler.
    assert!(unreserved < reserved - 1.0, "{unreserved} of {reserved}");
}

/// Kills the server, and takes away what would have the next one grant the same again.
fn kill_server(bed: &mut Bed) {
    stop_server(bed, Side::Client, Signal::KILL);
    let inode = bed.namespace(Side::Client).inode();
    let record = format!("/run/portolan/{inode}/control.guarantees");
    fs::remove_file(record).expect("there were guarantees");
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
    kill_server(&mut bed);
    assert!(has_deadline(kept.pid()));
    start_server(&mut bed, Side::Client);
    assert!(!has_deadline(kept.pid()), "{}", policy(kept.pid()));
}

#[test]
fn the_next_server_gives_back_the_nice_value_from_before_a_deadline() {
    let _alone = alone();
    let mut bed = bed();
    let program = start(&bed, "exec nice -n 5 sleep 60");
    assert!(eventually(LONG, || nice(program.pid()) == Some(5)));
    reserve(&bed, program.pid(), "--rate 0.1");
    kill_server(&mut bed);
    assert!(has_deadline(program.pid()));
    start_server(&mut bed, Side::Client);
    assert!(!has_deadline(program.pid()), "{}", policy(program.pid()));
    assert_eq!(nice(program.pid()), Some(5));
}

/// Returns the cgroup v1 that the server makes for a process's first thread.
fn own_group(bed: &mut Bed, pid: u32) -> PathBuf {
    let daemon = bed.daemon(Side::Client).as_ref().expect("it runs");
    PathBuf::from(format!(
        "/sys/fs/cgroup/cpu/portolan-{}-{pid}",
        daemon.pid()
    ))
}

/// Returns the path of a process in the `cpu` hierarchy of cgroup v1.
fn cpu_group(pid: u32) -> String {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let own = groups.lines().find_map(|line| line.split_once(":cpu:"));
    own.map_or_else(String::new, |(_, path)| path.to_owned())
}

#[test]
fn the_next_server_puts_threads_back_into_the_groups_from_which_a_killed_one_took_them() {
    let _alone = alone();
    let mut bed = bed();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let Some(cgroup) = Cgroup::new("cpu", "killed").filter(|_| cores > 1) else {
        return;
    };
    let [stays, moves, ends] = ["60", "61", "62"].map(|seconds| {
        let program = start(&bed, &format!("exec sleep {seconds}"));
        pin(program.pid(), "0");
        cgroup.admit(program.pid());
        program
    });
    let groups = [&stays, &moves, &ends].map(|program| {
        reserve(&bed, program.pid(), "--rate 0.1 --period 10ms");
        own_group(&mut bed, program.pid())
    });
    assert!(groups.iter().all(|group| group.is_dir()));
    assert!(groups[0].ends_with(cpu_group(stays.pid()).trim_start_matches('/')));
    kill_server(&mut bed);
    cgroup.expel(moves.pid());
    drop(ends);
    start_server(&mut bed, Side::Client);
    assert_eq!(cpu_group(stays.pid()), format!("/{}", cgroup.name));
    assert_eq!(cpu_group(moves.pid()), "/", "somebody has moved it since");
    assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
}

/// A group whose owner has filled it so that no limit can be set on it.
struct Crowded(PathBuf);

impl Crowded {
    fn new(group: PathBuf) -> Crowded {
        fs::create_dir(&group).expect("root may make cgroups");
        let child = group.join("child");
        fs::create_dir(&child).expect("root may make cgroups");
        // More than the parent's limit would be, so that the kernel refuses that limit.
        for (file, value) in [
            ("cpu.cfs_period_us", "10000"),
            ("cpu.cfs_quota_us", "10000"),
        ] {
            fs::write(child.join(file), value).expect("it may have one CPU");
        }
        Crowded(group)
    }
}

impl Drop for Crowded {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.0.join("child"));
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn the_next_server_gives_back_the_nice_values_that_a_killed_one_took() {
    let _alone = alone();
    let mut bed = bed();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores == 1 {
        return;
    }
    let programs = ["60", "61"].map(|seconds| {
        let program = start(&bed, &format!("exec nice -n 5 sleep {seconds}"));
        assert!(eventually(LONG, || nice(program.pid()) == Some(5)));
        pin(program.pid(), "0");
        program
    });
    let is_first = Path::new("/sys/fs/cgroup/cpu/tasks").exists();
    let _crowded = programs.each_ref().map(|program| {
        let crowded = is_first.then(|| Crowded::new(own_group(&mut bed, program.pid())));
        reserve(&bed, program.pid(), "--rate 0.3 --period 10ms");
        crowded
    });
    let [kept, changed] = &programs;
    let form = &reservation(&bed, kept.pid())["form"];
    assert!(
        form["form"]
            .as_str()
            .is_some_and(|form| form.contains("nice")),
        "{form}"
    );
    assert!(nice(kept.pid()) < Some(0));
    kill_server(&mut bed);
    run(Command::new("renice").args(["-n", "7", "-p", &changed.pid().to_string()]))
        .expect("root may");
    start_server(&mut bed, Side::Client);
    assert_eq!(nice(kept.pid()), Some(5));
    assert_eq!(nice(changed.pid()), Some(7), "somebody has chosen it since");
}

/// Pins all threads of a process to these cores.
fn pin(pid: u32, cores: &str) {
    run(Command::new("taskset").args(["-apc", cores, &pid.to_string()])).expect("root may pin");
}

fn all_cores() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("0-{}", cores - 1)
}

/// Starts a program that uses Portolan, is not pinned to a core, and then runs `then`.
fn start_served(bed: &Bed, then: &str) -> Background {
    let script = format!(
        "import os, socket, time\nos.sched_setaffinity(0, range(os.cpu_count()))\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('0.0.0.0', 0))\n{then}"
    );
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    start_or_panic(command.args(["-c", &script]))
}

const SLEEPS: &str = "time.sleep(60)";
const SPINS: &str = "while True: pass";

#[test]
fn what_a_user_has_is_divided_among_his_programs_as_they_come_and_go() {
    let _alone = alone();
    let bed = bed();
    let other = start(&bed, SLEEP);
    portolan(&bed, "qos set user root cpu --rate 0.2 --period 10ms").expect("it fits");
    let form = reservation_of(&bed, "user 0")["form"]["reason"].clone();
    assert!(
        form.as_str()
            .is_some_and(|text| text.contains("no process")),
        "{form}"
    );
    let (spins, sleeps) = (start_served(&bed, SPINS), start_served(&bed, SLEEPS));
    let have_it = || has_deadline(spins.pid()) && has_deadline(sleeps.pid());
    assert!(eventually(LONG, have_it));
    assert!(!has_deadline(other.pid()), "it runs without Portolan");
    assert_eq!(reservation_of(&bed, "user 0")["form"]["kind"], "deadline");
    let is_by_use = || kernels_ppm(spins.pid()) > 3 * kernels_ppm(sleeps.pid());
    assert!(eventually(LONG, is_by_use), "{}", policy(spins.pid()));
    let together = kernels_ppm(spins.pid()) + kernels_ppm(sleeps.pid());
    assert!(together <= class_rate(&bed), "{together}");

    // A narrower reservation takes a process out of the user's, and returns it when it ends.
    reserve(&bed, sleeps.pid(), "--rate 0.05 --period 20ms");
    let period = || policy(sleeps.pid()).contains("/20000000/");
    assert!(period(), "{}", policy(sleeps.pid()));
    portolan(&bed, &format!("qos del pid {} cpu", sleeps.pid())).expect("it is there");
    assert!(eventually(A_WHILE, || has_deadline(sleeps.pid()) && !period()));
    drop(spins);
    // One of its two threads is the library's.
    let has_all = || kernels_ppm(sleeps.pid()) >= class_rate(&bed).min(900_000) / 2;
    assert!(eventually(LONG, has_all), "{}", policy(sleeps.pid()));
    portolan(&bed, "qos del user root cpu").expect("it is there");
    assert!(!has_deadline(sleeps.pid()), "{}", policy(sleeps.pid()));
}

/// A cgroup of this test, whose processes are moved to the root at its end.
struct Cgroup {
    hierarchy: PathBuf,
    name: String,
}

impl Cgroup {
    /// Returns None if the hierarchy is not mounted.
    fn new(hierarchy: &str, name: &str) -> Option<Cgroup> {
        let hierarchy = PathBuf::from("/sys/fs/cgroup").join(hierarchy);
        let name = format!("portolan-test-{}-{name}", std::process::id());
        let is_there = hierarchy.join("cgroup.procs").exists();
        is_there.then(|| fs::create_dir(hierarchy.join(&name)).expect("root may make cgroups"))?;
        Some(Cgroup { hierarchy, name })
    }

    fn path(&self) -> PathBuf {
        self.hierarchy.join(&self.name)
    }

    fn scope(&self) -> String {
        let path = self.path();
        let below = path.strip_prefix("/sys/fs/cgroup").expect("it is there");
        format!("cgroup /{}", below.display())
    }

    fn admit(&self, pid: u32) {
        fs::write(self.path().join("cgroup.procs"), pid.to_string()).expect("it may be moved");
    }

    fn expel(&self, pid: u32) {
        fs::write(self.hierarchy.join("cgroup.procs"), pid.to_string()).expect("it may be moved");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let inside = fs::read_to_string(self.path().join("cgroup.procs")).unwrap_or_default();
        for pid in inside.lines() {
            let _ = fs::write(self.hierarchy.join("cgroup.procs"), pid);
        }
        let _ = fs::remove_dir(self.path());
    }
}

/// Returns the directory of cgroup v2, wherever it is mounted.
fn second_version() -> &'static str {
    if Path::new("/sys/fs/cgroup/unified/cgroup.procs").exists() {
        "unified"
    } else {
        ""
    }
}

#[test]
fn what_a_cgroup_has_is_for_the_processes_in_it_wherever_they_come_from() {
    let _alone = alone();
    let bed = bed();
    let Some(cgroup) = Cgroup::new(second_version(), "moves") else {
        return;
    };
    let program = start_served(&bed, SLEEPS);
    let words = format!("qos set {} cpu --rate 0.1 --period 10ms", cgroup.scope());
    assert!(eventually(LONG, || portolan_programs::live_sessions(
        &bed,
        Side::Client
    ) > 0));
    portolan(&bed, &words).expect("it fits");
    assert!(!has_deadline(program.pid()), "it is elsewhere");
    cgroup.admit(program.pid());
    assert!(eventually(A_WHILE, || has_deadline(program.pid())));
    cgroup.expel(program.pid());
    assert!(eventually(A_WHILE, || !has_deadline(program.pid())));
}

#[test]
fn a_weaker_form_takes_no_process_out_of_its_cgroup() {
    let _alone = alone();
    let bed = bed();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let Some(cgroup) = Cgroup::new("cpu", "bound").filter(|_| cores > 1) else {
        return;
    };
    let program = start_served(&bed, SPINS);
    assert!(eventually(LONG, || portolan_programs::live_sessions(
        &bed,
        Side::Client
    ) > 0));
    pin(program.pid(), "0");
    cgroup.admit(program.pid());
    let scope = cgroup.scope();
    portolan(
        &bed,
        &format!("qos set {scope} cpu --rate 0.1 --period 10ms"),
    )
    .expect("it fits");
    let form = || reservation_of(&bed, &scope)["form"].clone();
    let is_weak = || {
        form()["form"]
            .as_str()
            .is_some_and(|form| form.contains("cpu.shares"))
    };
    let own = || {
        let text = fs::read_to_string(format!("/proc/{}/cgroup", program.pid()));
        text.unwrap_or_default()
            .contains(&format!("cpu:/{}\n", cgroup.name))
    };
    assert!(is_weak() && !own(), "{}", form());
    // The process is still in the cgroup when the server has checked again.
    std::thread::sleep(A_WHILE);
    assert!(is_weak() && !own(), "{}", form());
    assert!(
        form()["reason"]
            .as_str()
            .is_some_and(|text| text.contains("affinity"))
    );
    pin(program.pid(), &all_cores());
    assert!(eventually(A_WHILE, || has_deadline(program.pid()) && own()));
    assert_eq!(reservation_of(&bed, &scope)["form"]["kind"], "deadline");
}

#[test]
fn servers_of_one_machine_do_not_promise_the_same_time_to_two() {
    let _alone = alone();
    let mut bed = bed();
    for side in [Side::Client, Side::Server] {
        let all = "[[qos.cpu_class]]\nname = \"all\"\nshare = 1\n";
        restart_with(&mut bed, side, all);
    }
    let whole = class_rate(&bed);
    let programs = [start(&bed, SLEEP), start(&bed, SLEEP)];
    let ask = |bed: &Bed, side: Side, tenths: u64| {
        let pid = match side {
            Side::Client => programs[0].pid(),
            Side::Server => programs[1].pid(),
        };
        let rate = whole * tenths / 10;
        let rate = format!("{}.{:06}", rate / 1_000_000, rate % 1_000_000);
        let words = format!("qos set pid {pid} cpu --rate {rate} --period 10ms");
        bed.portolan(side, &words.split(' ').collect::<Vec<_>>())
    };
    let given = |bed: &Bed, side: Side| {
        let text = bed.portolan(side, &["qos", "show", "--json"]);
        let report: Value = serde_json::from_str(&text.expect("it answers")).expect("JSON");
        report["cpu"][0]["effective_ppm"].as_u64().unwrap_or(0)
    };
    ask(&bed, Side::Client, 6).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(given(&bed, Side::Client), whole, "it is alone");
    let refused = refusal(ask(&bed, Side::Server, 6));
    assert!(refused.contains("other servers"), "{refused}");
    ask(&bed, Side::Server, 3).unwrap_or_else(|error| panic!("{error}"));
    let sum = || given(&bed, Side::Client) + given(&bed, Side::Server);
    let is_divided = || sum() <= whole && given(&bed, Side::Client) >= whole * 6 / 10;
    assert!(eventually(A_WHILE, is_divided), "{} of {whole}", sum());
    assert!(sum() + 2 >= whole, "all is given: {}", sum());
    let classes = bed.portolan(Side::Server, &["qos", "classes"]);
    assert!(classes.is_ok_and(|text| text.contains("(other servers)")));

    // The share of a dead server is free at once.
    kill_server(&mut bed);
    ask(&bed, Side::Server, 10).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(given(&bed, Side::Server), whole);
    start_server(&mut bed, Side::Client);
    assert!(refusal(ask(&bed, Side::Client, 1)).contains("0 would fit"));
}
