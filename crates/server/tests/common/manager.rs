//! A service manager, as systemd is one for the server: it hears its messages, and keeps descriptors.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use portolan_netns::{Bed, Daemon, Ready};
use portolan_sys::{descriptor, unix};

/// Time limit for a message of the server.
const LIMIT: Duration = Duration::from_secs(10);

/// The service manager's socket, whose file is removed with it.
pub(crate) struct Manager {
    socket: UnixDatagram,
    pub path: PathBuf,
}

impl Manager {
    pub(crate) fn new(name: &str) -> Manager {
        let path = format!("portolan-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(path);
        let socket = UnixDatagram::bind(&path).expect("the directory is writable");
        socket.set_read_timeout(Some(LIMIT)).expect("a time");
        Manager { socket, path }
    }

    /// Returns the next message that is not about descriptors.
    pub(crate) fn hear(&self) -> String {
        loop {
            let mut message = [0; 4096];
            let length = self.socket.recv(&mut message).expect("it says something");
            let message = String::from_utf8_lossy(&message[..length]).into_owned();
            if !message.contains("FDSTORE") {
                return message;
            }
        }
    }

    /// Returns the descriptors that it is to keep under a name.
    pub(crate) fn kept(&self, name: &str, count: usize) -> Vec<OwnedFd> {
        let name = format!("FDNAME={name}\n");
        let mut kept = Vec::new();
        while kept.len() < count {
            let (mut message, mut fds) = ([0; 4096], Vec::new());
            let received = super::await_some("descriptors", || {
                unix::receive_all(&self.socket, &mut message, &mut fds).ok()
            });
            let text = String::from_utf8_lossy(&message[..received.length]);
            if !text.contains("FDSTORE=1") {
                continue;
            }
            // Otherwise systemd closes descriptors that it finds readable by an error, as maps are.
            assert!(text.contains("FDPOLL=0"), "{text}");
            if text.contains(&name) {
                kept.extend(fds);
            }
        }
        kept
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Starts a server as the shipped unit does, without CAP_SYS_ADMIN, with descriptors of the service manager.
pub(crate) fn start_confined(bed: &Bed, manager: &Manager, kept: &[OwnedFd]) -> Daemon {
    let server = Daemon::start(
        confined(bed, manager, (kept, &[])),
        Ready::Line("ready".into()),
    );
    for fd in kept {
        descriptor::set_close_on_exec(fd, true).expect("it is open");
    }
    server
}

/// The command of such a server, which inherits the descriptors. `before` are the words of a command that executes it.
pub(crate) fn confined(
    bed: &Bed,
    manager: &Manager,
    (kept, before): (&[OwnedFd], &[&str]),
) -> Command {
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
    command.args(["-c", &script, "bash"]).args(before);
    command.args(["setpriv", "--bounding-set=-sys_admin"]);
    command.args([env!("CARGO_BIN_EXE_portoland"), "--interface", Bed::DEVICE]);
    command
        .env_remove("PORTOLAN_SOCKET")
        .env("NOTIFY_SOCKET", &manager.path);
    command
}
