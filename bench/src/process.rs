//! Child processes that never outlive their owner, and programs with a time limit.

use std::io;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of programs that [`run`] starts.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// How long a program may take to end after SIGTERM.
const TIMEOUT: Duration = Duration::from_secs(3);

const POLL: Duration = Duration::from_millis(5);

/// Why a program did not run successfully.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("cannot start {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error("{command}: {status}: {message}")]
    Failed {
        command: String,
        status: std::process::ExitStatus,
        message: String,
    },
}

/// Runs a program to its end, within [`TIME_LIMIT`], and returns its output.
pub fn run(command: &mut Command) -> Result<String, ProcessError> {
    run_within(command, TIME_LIMIT)
}

/// Runs a program to its end, kills it after `limit`, and returns its output.
pub fn run_within(command: &mut Command, limit: Duration) -> Result<String, ProcessError> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| start_error(command, source))?;
    let pid = Pid::from_child(&child);
    let (ended, watched) = mpsc::channel::<()>();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                // The process may have ended at this moment.
                let _ = kill_process(pid, Signal::KILL);
            }
        });
        let output = child.wait_with_output();
        drop(ended);
        output
    });
    let Output {
        status,
        stdout,
        stderr,
    } = output.map_err(|source| start_error(command, source))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if status.success() {
        return Ok(text(&stdout));
    }
    let message = match text(&stderr) {
        empty if empty.is_empty() => text(&stdout),
        message => message,
    };
    Err(ProcessError::Failed {
        command: name(command),
        status,
        message,
    })
}

/// A background process. Dropping it terminates the process, at first by SIGTERM.
#[derive(Debug)]
pub struct Background {
    child: Child,
}

impl Background {
    /// Starts a program and discards its output; its standard error is ours.
    pub fn start(command: &mut Command) -> Result<Background, ProcessError> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Background::start_with_output(command)
    }

    /// Starts a program with the output that `command` specifies.
    pub fn start_with_output(command: &mut Command) -> Result<Background, ProcessError> {
        match command.spawn() {
            Ok(child) => Ok(Background { child }),
            Err(source) => Err(start_error(command, source)),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the program's piped standard output; once.
    pub fn output(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Closes the program's piped standard input.
    pub fn end_input(&mut self) {
        self.child.stdin.take();
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(self.handle(), signal)?)
    }

    /// Waits until the program has ended by itself. Returns false if it has not within `limit`.
    pub fn wait(&mut self, limit: Duration) -> bool {
        let start = Instant::now();
        while self.is_running() {
            if start.elapsed() > limit {
                return false;
            }
            std::thread::sleep(POLL);
        }
        true
    }

    /// Terminates the program and returns what it has written to a piped standard output.
    pub fn finish(mut self) -> String {
        self.stop();
        let mut text = String::new();
        if let Some(mut stdout) = self.child.stdout.take() {
            // Output that is not UTF-8 is left out.
            let _ = io::Read::read_to_string(&mut stdout, &mut text);
        }
        text
    }

    fn stop(&mut self) {
        // Fails if the process has ended already.
        let _ = self.signal(Signal::TERM);
        if !self.wait(TIMEOUT) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn handle(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop();
    }
}

fn start_error(command: &Command, source: io::Error) -> ProcessError {
    ProcessError::Start {
        command: name(command),
        source,
    }
}

fn name(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|word| word.to_string_lossy()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_program_reports_its_complaint() {
        let error = run(Command::new("sh").args(["-c", "echo no >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().ends_with("exit status: 3: no"), "{error}");
    }

    #[test]
    fn a_program_that_takes_too_long_is_killed() {
        let error = run_within(Command::new("sleep").arg("60"), Duration::from_millis(50));
        assert!(error.unwrap_err().to_string().contains("signal: 9"));
    }

    #[test]
    fn a_dropped_background_program_is_gone() {
        let background = Background::start(Command::new("sleep").arg("60")).unwrap();
        let pid = background.handle();
        drop(background);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }
}
