//! The server and the service manager: what it is told (`sd_notify(3)`), and limits that it sets too low.

mod common;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

use common::{Client, Library, control_path};
use portolan_netns::{Bed, Daemon, Ready};
use portolan_proto::PROTOCOL;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_sys::{descriptor, unix};
use rustix::process::Signal;

/// Time limit for a message of the server.
const LIMIT: Duration = Duration::from_secs(10);

/// The packet filter, its shared tables and its settings.
const KEPT: usize = 10;

/// The service manager's socket, whose file is removed with it.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    fn new(name: &str) -> Manager {
        let path = format!("portolan-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(path);
        let socket = UnixDatagram::bind(&path).expect("the directory is writable");
        socket.set_read_timeout(Some(LIMIT)).expect("a time");
        Manager { socket, path }
    }

    /// Returns the next message that is not about descriptors.
    fn hear(&self) -> String {
        loop {
            let mut message = [0; 4096];
            let length = self.socket.recv(&mut message).expect("it says something");
            let message = String::from_utf8_lossy(&message[..length]).into_owned();
            if !message.contains("FDSTORE") {
                return message;
            }
        }
    }

    /// Returns the descriptors that it is to keep.
    fn kept(&self) -> Vec<OwnedFd> {
        let mut fds = Vec::new();
        while fds.len() < KEPT {
            let mut message = [0; 4096];
            let received = common::await_some("descriptors", || {
                unix::receive_all(&self.socket, &mut message, &mut fds).ok()
            });
            // Otherwise systemd closes descriptors that it finds readable by an error, as maps are.
            let text = String::from_utf8_lossy(&message[..received.length]);
            assert!(
                received_nothing(&text) || text.contains("FDPOLL=0"),
                "{text}"
            );
        }
        fds
    }
}

/// Is a message without descriptors to keep?
fn received_nothing(text: &str) -> bool {
    !text.contains("FDSTORE=1")
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

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

/// Starts a server as the shipped unit does, without CAP_SYS_ADMIN, with descriptors of the service manager.
fn start_confined(bed: &Bed, manager: &Manager, kept: &[OwnedFd]) -> Daemon {
    let numbers = kept.iter().zip(3..);
    let places = numbers.map(|(fd, place)| {
        descriptor::set_close_on_exec(fd, false).expect("it is open");
        format!("{place}<&{} ", fd.as_fd().as_raw_fd())
    });
    let script = format!(
        "LISTEN_PID=$$ LISTEN_FDS={} exec \"$@\" {}",
        kept.len(),
        places.collect::<String>()
    );
    let mut command = bed.a.exec("bash");
    command.args([
        "-c",
        &script,
        "bash",
        "setpriv",
        "--bounding-set=-sys_admin",
    ]);
    command.args([env!("CARGO_BIN_EXE_portoland"), "--interface", Bed::DEVICE]);
    command
        .env_remove("PORTOLAN_SOCKET")
        .env("NOTIFY_SOCKET", &manager.path);
    let server = Daemon::start(command, Ready::Line("ready".into()));
    for fd in kept {
        descriptor::set_close_on_exec(fd, true).expect("it is open");
    }
    server
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
    let kept = manager.kept();
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
