//! A background program of a test. The test waits until it is ready, kills it at its end, and shows its
//! output if it fails.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Time limit for a program to become ready.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for a program to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(5);

/// How a program shows that it is ready.
#[derive(Clone, Debug)]
pub enum Ready {
    /// It is ready at once.
    Started,
    /// A line of its output contains this.
    Line(String),
    /// A socket of its namespace listens on this TCP port.
    TcpPort(u16),
    /// A socket of its namespace is bound to this UDP port.
    UdpPort(u16),
    /// This file or socket exists.
    Path(PathBuf),
}

/// A running program and its process group.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Daemon {
    /// Starts `command` and waits until it is ready.
    pub fn start(mut command: Command, ready: Ready) -> Daemon {
        let name = command.get_program().to_string_lossy().into_owned();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        capture(child.stdout.take(), &lines);
        capture(child.stderr.take(), &lines);
        let mut daemon = Daemon { name, child, lines };
        daemon.await_ready(&ready);
        daemon
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns all output so far, of both streams, line by line.
    pub fn output(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.join("\n")
    }

    /// Waits until a line of the output contains `text`.
    pub fn await_line(&mut self, text: &str) {
        self.await_ready(&Ready::Line(text.to_owned()));
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends `signal` to the program and its children.
    pub fn signal(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            // Fails if all of them have ended already.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Waits for the program's end, at most for [`GRACE`]; None if it still runs.
    pub fn await_end(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + GRACE;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() > deadline {
                return None;
            }
            sleep(TICK);
        }
    }

    fn await_ready(&mut self, ready: &Ready) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.is_ready(ready) {
            let running = self.is_running();
            // Its last output may still be in the pipe.
            if !running {
                sleep(20 * TICK);
            }
            if (!running && !self.is_ready(ready)) || Instant::now() > deadline {
                let what = if running { "is not ready" } else { "has ended" };
                panic!("{} {what} ({ready:?}):\n{}", self.name, self.output());
            }
            sleep(TICK);
        }
    }

    fn is_ready(&self, ready: &Ready) -> bool {
        match ready {
            Ready::Started => true,
            Ready::Line(text) => self.output().lines().any(|line| line.contains(text)),
            Ready::TcpPort(port) => {
                self.has_socket("tcp", *port, LISTEN) || self.has_socket("tcp6", *port, LISTEN)
            }
            Ready::UdpPort(port) => {
                self.has_socket("udp", *port, CLOSE) || self.has_socket("udp6", *port, CLOSE)
            }
            Ready::Path(path) => path.exists(),
        }
    }

    /// Looks for a socket in the program's namespace, as shown by `/proc/<pid>/net`.
    fn has_socket(&self, protocol: &str, port: u16, state: &str) -> bool {
        let path = format!("/proc/{}/net/{protocol}", self.pid());
        let table = std::fs::read_to_string(path).unwrap_or_default();
        let port = format!(":{port:04X}");
        table.lines().skip(1).any(|line| {
            // The fields are: number, local address, remote address, state.
            let mut words = line.split_whitespace().skip(1);
            let local = words.next().is_some_and(|local| local.ends_with(&port));
            local && words.nth(1) == Some(state)
        })
    }
}

/// Socket states in `/proc/net`: a TCP listener; a UDP socket without a peer.
const LISTEN: &str = "0A";
const CLOSE: &str = "07";

impl Drop for Daemon {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        if self.await_end().is_none() {
            self.child.kill().ok();
            self.child.wait().ok();
        }
        // Kills the rest of its process group.
        self.signal(Signal::KILL);
        if std::thread::panicking() {
            eprintln!("--- output of {}:\n{}\n---", self.name, self.output());
        }
    }
}

/// Collects the lines of `stream` until its last writer has closed it.
fn capture(stream: Option<impl Read + Send + 'static>, lines: &Arc<Mutex<Vec<String>>>) {
    let Some(stream) = stream else {
        return;
    };
    let lines = lines.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            lines
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_daemon_is_ready_by_its_line_and_gone_with_its_guard() {
        let daemon = Daemon::start(
            shell("echo warming up; echo ready; sleep 1000"),
            Ready::Line("ready".into()),
        );
        let proc = PathBuf::from(format!("/proc/{}", daemon.pid()));
        assert!(daemon.output().contains("warming up"));
        assert!(proc.exists());
        drop(daemon);
        assert!(!proc.exists());
    }

    #[test]
    fn a_daemon_that_ignores_the_request_is_killed() {
        let daemon = Daemon::start(
            shell("trap '' TERM; echo ready; while :; do sleep 0.1; done"),
            Ready::Line("ready".into()),
        );
        let proc = PathBuf::from(format!("/proc/{}", daemon.pid()));
        drop(daemon);
        assert!(!proc.exists());
    }

    #[test]
    #[should_panic(expected = "no such luck")]
    fn a_daemon_that_ends_too_early_fails_with_its_output() {
        Daemon::start(shell("echo no such luck; exit 3"), Ready::TcpPort(1));
    }

    #[test]
    fn an_end_is_noticed() {
        let mut daemon = Daemon::start(shell("exit 3"), Ready::Started);
        assert_eq!(daemon.await_end().and_then(|status| status.code()), Some(3));
        assert!(!daemon.is_running());
    }
}
