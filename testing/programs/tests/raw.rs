//! Protocols of programs' own, beside all else on the same hosts.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, ProcessError, run};
use portolan_netns::Impairment;
use portolan_programs::{bed, client, counter, eventually, impaired_bed, public_programs};

const CALLS: u64 = 2_000;
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const OCTETS: &str = "8388608";

/// The users of Debian whom no policy names, and one does.
const STRANGER: &str = "65534";
const FRIEND: &str = "2";

fn example(bed: &Bed, name: &str) -> PathBuf {
    bed.tools().beside(name)
}

fn command(bed: &Bed, side: Side, name: &str, words: &[&str]) -> Command {
    let program = example(bed, name).display().to_string();
    let mut command = bed.command(side, Stack::Kernel, &program);
    command.args(words);
    command
}

/// One that has its protocol when this returns.
fn serve(bed: &Bed, side: Side, name: &str) -> Background {
    let before = counter(bed, side, "server", "raw-flows-opened");
    let server = Background::start(&mut command(bed, side, name, &["serve"])).unwrap();
    let opened = || counter(bed, side, "server", "raw-flows-opened") > before;
    assert!(eventually(Duration::from_secs(10), opened));
    server
}

fn failure(outcome: Result<String, ProcessError>) -> String {
    match outcome {
        Err(ProcessError::Failed { message, .. }) => message,
        other => panic!("{other:?}"),
    }
}

fn call(bed: &Bed, count: u64) -> Result<String, ProcessError> {
    let address = bed.endpoint(0).ip().to_string();
    let words = ["call", &address, &count.to_string()];
    run(&mut command(bed, Side::Client, "active-messages", &words))
}

#[test]
fn active_messages_run_handlers_over_ethernet() {
    let bed = bed();
    let _server = serve(&bed, Side::Server, "active-messages");
    let said = call(&bed, CALLS).unwrap();
    let sum = CALLS * (CALLS + 1) / 2;
    assert!(said.contains(&format!("sum {sum}\n")), "{said}");
    // Calls, answers, the last reading; and the kernel saw none of it.
    for side in [Side::Client, Side::Server] {
        assert!(counter(&bed, side, "receive", "delivered_raw") > CALLS);
    }
    let address = bed.endpoint(0).ip().to_string();
    client(&bed, Stack::Kernel, "ping", &["-c1", "-W5", &address]);
}

/// Compiles the example of the guide as a user would.
fn greetings(bed: &Bed) -> String {
    let program = bed.file("greetings");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-std=c11"])
        .arg("-D_POSIX_C_SOURCE=200809L")
        .args(["-I", &format!("{ROOT}/include"), "-o"])
        .arg(&program)
        .arg(format!("{ROOT}/docs/examples/greetings.c"));
    run(&mut compiler).unwrap_or_else(|error| panic!("{error}"));
    program.display().to_string()
}

#[test]
fn a_program_in_c_has_a_protocol_of_its_own() {
    let bed = bed();
    let program = greetings(&bed);
    let on = |side, stack, words: &[&str]| {
        let mut command = bed.command(side, stack, &program);
        command.args(words);
        command
    };
    let without = run(&mut on(Side::Client, Stack::Kernel, &["serve"]));
    assert!(failure(without).contains("not on Portolan"));
    let before = counter(&bed, Side::Server, "server", "raw-flows-opened");
    let mut serve = on(Side::Server, Stack::Portolan, &["serve"]);
    let _server = Background::start(&mut serve).unwrap();
    let opened = || counter(&bed, Side::Server, "server", "raw-flows-opened") > before;
    assert!(eventually(Duration::from_secs(10), opened));
    let address = bed.endpoint(0).ip().to_string();
    let said = run(&mut on(
        Side::Client,
        Stack::Portolan,
        &["call", &address, "500"],
    ));
    assert_eq!(said.unwrap().trim(), "500 greetings, 0 dropped");
    let second = run(&mut on(Side::Server, Stack::Portolan, &["serve"]));
    assert!(failure(second).contains("in use"));
}

#[test]
fn a_protocol_is_one_programs_and_free_when_that_is_killed() {
    let bed = bed();
    let server = serve(&bed, Side::Server, "active-messages");
    let second = run(&mut command(
        &bed,
        Side::Server,
        "active-messages",
        &["serve"],
    ));
    assert!(failure(second).contains("in use"));
    server.signal(rustix::process::Signal::KILL).unwrap();
    let _next = serve_when_free(&bed);
    assert!(call(&bed, 10).unwrap().contains("sum 55\n"));
}

/// The server learns of the end of the one before by its connection.
fn serve_when_free(bed: &Bed) -> Background {
    let mut server = None;
    let comes_up = || {
        let mut candidate = Background::start(&mut command(
            bed,
            Side::Server,
            "active-messages",
            &["serve"],
        ))
        .unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let runs = candidate.is_running();
        server = runs.then_some(candidate);
        runs
    };
    assert!(eventually(Duration::from_secs(10), comes_up));
    server.unwrap()
}

#[test]
fn users_have_the_protocols_that_a_rule_gives_them() {
    let mut bed = Bed::bare(portolan_netns::Bed::veth()).unwrap();
    bed.set_settings(&format!(
        "[[raw]]\nuser = \"{FRIEND}\"\nethertypes = [0x88b5]\n"
    ));
    bed.start_daemon(Side::Server).unwrap();
    let directory = public_programs(&bed);
    let program = directory.join("active-messages");
    std::fs::copy(example(&bed, "active-messages"), &program).unwrap();
    let as_user = |user: &str| {
        let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
        command
            .args(["--reuid", user, "--regid", user, "--clear-groups"])
            .arg(&program)
            .arg("serve");
        command
    };
    let refused = failure(run(&mut as_user(STRANGER)));
    assert!(refused.contains("not permitted"), "{refused}");
    let mut served = Background::start(&mut as_user(FRIEND)).unwrap();
    let opened = || counter(&bed, Side::Server, "server", "raw-flows-opened") == 1;
    assert!(eventually(Duration::from_secs(10), opened));
    assert!(served.is_running());
}

/// Beside it the same hosts talk TCP as ever.
#[test]
fn a_tcp_of_ones_own_carries_a_stream_over_a_lossy_wire() {
    let bed = impaired_bed(Impairment {
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.01,
        ..Impairment::default()
    });
    let mut server = command(&bed, Side::Server, "special-tcp", &["serve"]);
    let before = counter(&bed, Side::Server, "server", "raw-flows-opened");
    let mut server = Background::start_with_output(server.stdout(Stdio::piped())).unwrap();
    let opened = || counter(&bed, Side::Server, "server", "raw-flows-opened") > before;
    assert!(eventually(Duration::from_secs(10), opened));
    let mut lines = BufReader::new(server.output().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "serving");
    let address = bed.endpoint(0).ip().to_string();
    let words = ["send", &address, OCTETS];
    let sent = run(&mut command(&bed, Side::Client, "special-tcp", &words)).unwrap();
    let received = lines.next().unwrap().unwrap();
    assert!(received.ends_with(" wrong 0"), "{received}");
    let (sent, _) = sent.split_once('\n').unwrap();
    assert!(sent.starts_with(&format!("octets {OCTETS} ")), "{sent}");
    assert_eq!(received.trim_end_matches(" wrong 0"), sent);
    let dropped = |name| counter(&bed, Side::Client, "transmit", name);
    assert_eq!(dropped("drop_protocol") + dropped("drop_foreign"), 0);
}
