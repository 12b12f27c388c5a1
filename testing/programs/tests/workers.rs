//! Listeners that several processes have: each performs the handshakes of the flows that it is dealt (ADR 39).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::stream::connect;
use portolan_programs::web::{self, assert_none_failed, start_load};
use portolan_programs::{PYTHON, bed, client, counter, eventually, live_sessions, restart_server};
use rustix::process::{Pid, Signal, kill_process};

const WORKERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/sharing_workers.py");
const PORT: u16 = 7095;
const PROMPTLY: Duration = Duration::from_secs(3);

fn start(bed: &Bed, how: &str, number: usize) -> Background {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command
        .args([WORKERS, how])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()])
        .arg(number.to_string());
    bed.serve_command(PORT, "sharing_workers.py", &mut command)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the number of the worker that has answered.
fn ask(bed: &Bed, line: &str) -> u32 {
    let mut stream = connect(bed, PORT);
    stream
        .set_read_timeout(Some(2 * PROMPTLY))
        .expect("a time-out");
    stream.write_all(line.as_bytes()).expect("it takes bytes");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer.trim().parse().expect("a number")
}

/// Asks from several threads at once. Returns how many answers each worker has given.
fn ask_often(bed: &Bed, threads: usize, each: usize) -> BTreeMap<u32, usize> {
    let workers: Vec<u32> = scope(|scope| {
        let ask_all = || (0..each).map(|_| ask(bed, "quick\n")).collect::<Vec<_>>();
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(ask_all)).collect();
        let all = all.into_iter().map(|one| one.join().expect("all answered"));
        all.flatten().collect()
    });
    let mut answers = BTreeMap::new();
    for worker in workers {
        *answers.entry(worker).or_default() += 1;
    }
    answers
}

/// Asks, too seldom for a worker to take part, until each of three has answered: who has not accepted lately takes no part
/// either when others do.
fn until_all_have_accepted(bed: &Bed) {
    let mut workers = BTreeSet::new();
    let have_all = || {
        workers.insert(ask(bed, "quick\n"));
        workers.len() == 3
    };
    assert!(eventually(2 * PROMPTLY, have_all), "one accepts nothing");
}

/// Returns the number of connections whose handshakes processes have performed.
fn performed(bed: &Bed) -> u64 {
    counter(bed, Side::Server, "stack", "delegated_handshakes")
}

#[test]
fn workers_perform_handshakes_whatever_their_way_of_waiting() {
    for how in ["blocking", "poll", "select", "epoll", "deferred"] {
        let bed = bed();
        let _workers = start(&bed, how, 3);
        until_all_have_accepted(&bed);
        ask_often(&bed, 4, 100);
        let before = performed(&bed);
        let answers = ask_often(&bed, 4, 100);
        let own = || performed(&bed) - before;
        assert!(
            eventually(PROMPTLY, || own() >= 360),
            "{how}: {} of 400",
            own()
        );
        assert_eq!(answers.len(), 3, "{how}: {answers:?}");
    }
}

#[test]
fn a_worker_that_computes_keeps_nobody_waiting() {
    let bed = bed();
    let _workers = start(&bed, "poll", 3);
    ask_often(&bed, 4, 150);
    scope(|scope| {
        let slow = scope.spawn(|| ask(&bed, "slow\n"));
        sleep(Duration::from_millis(50));
        let mut longest = Duration::ZERO;
        while !slow.is_finished() {
            let begun = Instant::now();
            ask(&bed, "quick\n");
            longest = longest.max(begun.elapsed());
        }
        slow.join().expect("it has answered, too");
        assert!(longest < Duration::from_millis(500), "{longest:?}");
    });
}

#[test]
fn the_others_serve_new_connections_of_a_worker_that_is_stopped() {
    let bed = bed();
    let _workers = start(&bed, "poll", 3);
    let answers = ask_often(&bed, 4, 150);
    let stopped = *answers.keys().next().expect("some have answered");
    signal(stopped, Signal::STOP);
    // The first SYN for it waits for its repetition.
    let answers = ask_often(&bed, 1, 100);
    assert!(!answers.contains_key(&stopped), "{answers:?}");
    assert!(counter(&bed, Side::Server, "receive", "syn_passed_by") > 0);
    signal(stopped, Signal::CONT);
    ask_often(&bed, 4, 50);
}

#[test]
fn the_others_serve_the_flows_of_a_worker_that_was_killed() {
    let bed = bed();
    let _workers = start(&bed, "epoll", 3);
    let answers = ask_often(&bed, 4, 150);
    let killed = *answers.keys().next().expect("some have answered");
    signal(killed, Signal::KILL);
    // The master ends with its first worker; the others go on.
    sleep(Duration::from_millis(300));
    let answers = ask_often(&bed, 4, 100);
    assert_eq!(answers.values().sum::<usize>(), 400);
    assert!(!answers.contains_key(&killed), "{answers:?}");
}

/// Starts an nginx as distributions do: a master and workers.
fn nginx(bed: &Bed) -> Background {
    let page = "a page".repeat(100);
    web::nginx(bed, PORT, ("user root; worker_processes 2;", page), |_| ())
}

fn signal(worker: u32, signal: Signal) {
    let process = Pid::from_raw(worker.cast_signed()).expect("a number");
    kill_process(process, signal).expect("it runs");
}

#[test]
fn no_request_fails_while_nginx_replaces_its_workers() {
    let bed = bed();
    let nginx = nginx(&bed);
    let load = start_load(&bed, PORT, 4);
    for _ in 0..3 {
        sleep(Duration::from_millis(900));
        nginx.signal(Signal::HUP).expect("it runs");
    }
    assert_none_failed(load);
    let performed = performed(&bed);
    let opened = counter(&bed, Side::Server, "server", "passive_opens");
    assert!(
        performed > 10 * opened,
        "{performed}, {opened} by the server"
    );
}

#[test]
fn no_request_fails_while_servers_are_restarted() {
    let mut bed = bed();
    let _nginx = nginx(&bed);
    let load = start_load(&bed, PORT, 6);
    for end in [Signal::TERM, Signal::KILL, Signal::TERM, Signal::KILL] {
        sleep(Duration::from_millis(900));
        restart_server(&mut bed, Side::Server, end);
    }
    assert_none_failed(load);
}

/// Workers that end hand what they have closed to the server, one connection after the other. Resets of these, which a client
/// that ends sends in the meantime, must not come before them.
#[test]
fn connections_of_workers_and_clients_that_end_leave_nothing_but_time_wait() {
    let bed = bed();
    let url = format!("http://{}/page", bed.endpoint(PORT));
    let load = ["-t", "1", "-c", "64", "-d", "1s", "-H", "Connection: close"];
    for _ in 0..5 {
        let processes = ("user root; worker_processes 2;", "p".repeat(612));
        let mut nginx = web::nginx(&bed, PORT, processes, |_| {});
        client(&bed, Stack::Portolan, "wrk", &[&load[..], &[&url]].concat());
        nginx.signal(Signal::TERM).expect("it runs");
        assert!(nginx.wait(PROMPTLY), "it does not end");
    }
    let handed_over = counter(&bed, Side::Server, "server", "unregistered_closed");
    assert!(handed_over > 100, "{handed_over}");
    let is_over = || live_sessions(&bed, Side::Server) == 0;
    assert!(eventually(PROMPTLY, is_over), "their peers have ended");
}
