//! The server and the service manager: what it is told (`sd_notify(3)`), and limits that it sets too low.

mod common;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;

use common::manager::{Manager, start_confined};
use common::{Client, Library, control_path};
use portolan_netns::{Bed, Daemon, Ready};
use portolan_proto::PROTOCOL;
use portolan_proto::control::{ReplyBody, RequestBody};
use rustix::process::Signal;

/// The packet filter, its shared tables and its settings.
const TABLES: usize = 10;

#[test]
fn the_service_manager_hears_of_start_loop_and_end() {
    let bed = Bed::veth();
    let manager = Manager::new("turns");
    let mut command = bed.a.exec(env!("CARGO_BIN_EXE_portoland"));
    command.args(["--interface", Bed::DEVICE]);
    command
        .env_remove("PORTOLAN_SOCKET")
        .env_remove("WATCHDOG_PID");
    command
        .env("NOTIFY_SOCKET", &manager.path)
        .env("WATCHDOG_USEC", "400000");
    let server = Daemon::start(command, Ready::Line("ready".into()));

    let ready = manager.hear();
    assert!(ready.contains("READY=1"), "{ready}");
    assert!(
        ready.contains(&format!("STATUS=manages {}", Bed::DEVICE)),
        "{ready}"
    );
    for _ in 0..3 {
        assert!(manager.hear().contains("WATCHDOG=1"), "an idle loop turns");
    }
    drop(server);
    let mut last = manager.hear();
    while last.contains("WATCHDOG=1") {
        last = manager.hear();
    }
    assert!(last.contains("STOPPING=1"), "{last}");
}

#[test]
fn a_low_limit_of_open_files_is_raised_at_least_to_the_hard_limit() {
    let bed = Bed::veth();
    let mut command = bed.a.exec("prlimit");
    command
        .args(["--nofile=512:4096", env!("CARGO_BIN_EXE_portoland")])
        .args(["--interface", Bed::DEVICE])
        .env_remove("PORTOLAN_SOCKET");
    let server = Daemon::start(command, Ready::Line("ready".into()));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid()));
    let limits = limits.expect("it runs");
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let numbers: Vec<u64> = line
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [soft, hard] = numbers[..] else {
        panic!("{limits}")
    };
    assert!(soft == hard && soft >= 4096, "{limits}");
}

fn kill(mut server: Daemon) {
    server.signal(Signal::KILL);
    server.await_end();
}

#[test]
fn a_server_that_may_not_open_tables_gets_them_from_the_service_manager() {
    let bed = Bed::veth();
    let manager = Manager::new("keeps");
    let path = control_path(&bed.a);
    let server = start_confined(&bed, &manager, &[]);
    let mut library = Library::start(&path);
    let peer = SocketAddr::new(Bed::B4, 0);
    let peer = bed.b.enter(|| TcpListener::bind(peer)).expect("a port");
    library.open(peer.local_addr().expect("it is bound"));
    let kept = manager.kept("tables", TABLES);
    let continues = || {
        let mut client = Client::connect(&path);
        let hello = RequestBody::Hello {
            version: PROTOCOL,
            program: "test".into(),
        };
        let reply = client.ask_with(hello, &[library.maps.ring.as_fd()]).0;
        let ReplyBody::Welcome { continues, .. } = reply else {
            panic!("{reply:?}");
        };
        continues
    };
    kill(server);
    let server = start_confined(&bed, &manager, &kept);
    assert!(continues());
    kill(server);
    let server = start_confined(&bed, &manager, &[]);
    assert!(!continues());
    let mut command = Client::connect(&path);
    assert_eq!(command.counter("server", "inheritances_refused"), 1);
    assert!(
        server.output().contains("CAP_SYS_ADMIN"),
        "{}",
        server.output()
    );
}
