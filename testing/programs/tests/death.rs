//! Killed programs and servers: peers learn of it promptly and nothing stays behind.

use std::process::Stdio;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::{bed, eventually, live_sessions};
use rustix::process::Signal;

const PORT: u16 = 7010;
const PROMPTLY: Duration = Duration::from_secs(3);

/// A connection between a program that will be killed and one that watches it.
struct Scene {
    victim: Background,
    watcher: Background,
}

/// The side in `victim` holds its end with Portolan; the other watches on its own stack.
fn scene(bed: &Bed, victim: Side, watcher: Stack) -> Scene {
    let endpoint = bed.endpoint(PORT).to_string();
    let start = |side, stack, role: &str| {
        let mut command = bed.command(side, stack, "portolan-traffic");
        command
            .args([role, &endpoint])
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        if side == Side::Server {
            command.arg("--listen");
        }
        Background::start_with_output(&mut command).unwrap_or_else(|error| panic!("{error}"))
    };
    let role = |side| {
        if side == victim {
            ("hold", Stack::Portolan)
        } else {
            ("watch", watcher)
        }
    };
    let (server_role, server_stack) = role(Side::Server);
    let server = start(Side::Server, server_stack, server_role);
    std::thread::sleep(Duration::from_millis(700));
    let (client_role, client_stack) = role(Side::Client);
    let client = start(Side::Client, client_stack, client_role);
    std::thread::sleep(Duration::from_millis(700));
    match victim {
        Side::Server => Scene {
            victim: server,
            watcher: client,
        },
        Side::Client => Scene {
            victim: client,
            watcher: server,
        },
    }
}

impl Scene {
    fn kill(&self) {
        self.victim.signal(Signal::KILL).expect("the victim runs");
    }

    fn assert_end_seen(mut self, case: &str) {
        assert!(self.watcher.wait(PROMPTLY), "{case}: the peer saw no end");
        let report = self.watcher.finish();
        assert!(
            report.contains("reset") || report.contains("eof"),
            "{case}: {report}"
        );
    }
}

#[test]
fn the_peer_of_a_killed_program_sees_the_end() {
    let bed = bed();
    for victim in [Side::Client, Side::Server] {
        for watcher in [Stack::Kernel, Stack::Portolan] {
            let scene = scene(&bed, victim, watcher);
            scene.kill();
            scene.assert_end_seen(&format!("{victim:?} killed, {watcher:?} watches"));
        }
    }
}

#[test]
fn nothing_stays_after_all_programs_are_killed() {
    let bed = bed();
    let scene = scene(&bed, Side::Client, Stack::Portolan);
    for program in [&scene.victim, &scene.watcher] {
        program.signal(Signal::KILL).expect("it runs");
    }
    for side in [Side::Client, Side::Server] {
        let gone = eventually(PROMPTLY, || live_sessions(&bed, side) == 0);
        assert!(gone, "{side:?}: {:?}", bed.portolan(side, &["ss"]));
    }
}

#[test]
fn a_new_server_serves_after_the_old_one_was_killed() {
    let mut bed = bed();
    let mut scene = scene(&bed, Side::Server, Stack::Kernel);
    let daemon = bed.daemon(Side::Server).take().expect("it runs");
    daemon.signal(Signal::KILL).expect("it runs");
    drop(daemon);
    scene.kill();
    scene.victim.wait(PROMPTLY);
    bed.start_daemon(Side::Server)
        .unwrap_or_else(|error| panic!("{error}"));
    scene.assert_end_seen("server and program killed");
    let endpoint = bed.endpoint(PORT + 1).to_string();
    let _greet = bed
        .serve(
            Stack::Portolan,
            PORT + 1,
            "portolan-traffic",
            &["greet", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let report = portolan_programs::client(
        &bed,
        Stack::Portolan,
        "portolan-traffic",
        &["connect", &endpoint, "--count", "10", "--seconds", "5"],
    );
    assert!(report.contains("\"connections\":10"), "{report}");
}
