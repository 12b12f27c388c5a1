//! The server and the service manager: what it is told (`sd_notify(3)`), and limits that it sets too low.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

use portolan_netns::{Bed, Daemon, Ready};

/// Time limit for a message of the server.
const LIMIT: Duration = Duration::from_secs(10);

/// The service manager's socket, whose file is removed with it.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    fn new() -> Manager {
        let path = std::env::temp_dir().join(format!("portolan-notify-{}", std::process::id()));
        let socket = UnixDatagram::bind(&path).expect("the directory is writable");
        socket.set_read_timeout(Some(LIMIT)).expect("a time");
        Manager { socket, path }
    }

    /// Returns the next message.
    fn hear(&self) -> String {
        let mut message = [0; 4096];
        let length = self.socket.recv(&mut message).expect("it says something");
        String::from_utf8_lossy(&message[..length]).into_owned()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn the_service_manager_hears_of_start_loop_and_end() {
    let bed = Bed::veth();
    let manager = Manager::new();
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
