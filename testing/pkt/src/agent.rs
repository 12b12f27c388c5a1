//! The runner's side of the program that makes the calls.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::wire::now;

/// A call: one line of JSON on the agent's standard input. Each call runs on a thread of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    pub id: u32,
    pub call: String,
    pub arguments: Vec<Value>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Value {
    Number(i64),
    Text(Vec<u8>),
    Words(Vec<String>),
    Address(SocketAddr),
}

/// The outcome of a call: one line of JSON on the agent's standard output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    pub id: u32,
    /// Start and end by the monotonic clock.
    pub started: Duration,
    pub ended: Duration,
    /// The return value, or errno.
    pub result: Result<i64, i32>,
    /// The received data.
    pub data: Option<Vec<u8>>,
    /// The events of poll, or properties of a received message other than its data.
    pub words: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("cannot start the agent: {0}")]
    Start(std::io::Error),
    #[error("the agent has ended")]
    Gone,
    #[error("the call has not returned")]
    Late,
}

/// A running agent, killed when dropped. Its answers are read by the waiting thread itself: a separate
/// reader thread could be late, or could wait for a core that the waiting thread occupies.
pub struct Agent {
    child: Child,
    requests: Option<ChildStdin>,
    answers: Option<ChildStdout>,
    /// Answers that were read, up to an incomplete line.
    unread: Vec<u8>,
    /// Answers that nobody has waited for yet.
    waiting: Vec<Answer>,
    next: u32,
}

impl Agent {
    pub fn start(mut command: Command) -> Result<Agent, AgentError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(AgentError::Start)?;
        Ok(Agent {
            requests: child.stdin.take(),
            answers: child.stdout.take(),
            child,
            unread: Vec::new(),
            waiting: Vec::new(),
            next: 0,
        })
    }

    /// Has the agent make a call, and returns the number of the request.
    pub fn request(&mut self, call: &str, arguments: Vec<Value>) -> Result<u32, AgentError> {
        self.next += 1;
        let request = Request {
            id: self.next,
            call: call.to_owned(),
            arguments,
        };
        let mut line = serde_json::to_vec(&request).map_err(|_| AgentError::Gone)?;
        line.push(b'\n');
        let pipe = self.requests.as_mut().ok_or(AgentError::Gone)?;
        pipe.write_all(&line).map_err(|_| AgentError::Gone)?;
        Ok(self.next)
    }

    /// Returns the outcome of a call, waiting until `deadline`.
    pub fn answer(&mut self, id: u32, deadline: Duration) -> Result<Answer, AgentError> {
        loop {
            if let Some(at) = self.waiting.iter().position(|answer| answer.id == id) {
                return Ok(self.waiting.swap_remove(at));
            }
            let answer = self.next_answer(deadline)?;
            self.waiting.push(answer);
        }
    }

    fn next_answer(&mut self, deadline: Duration) -> Result<Answer, AgentError> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|_| AgentError::Gone);
            }
            let pipe = self.answers.as_mut().ok_or(AgentError::Gone)?;
            let left = deadline.saturating_sub(now());
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(pipe, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) if left.is_zero() => return Err(AgentError::Late),
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(_) => return Err(AgentError::Gone),
            }
            let mut bytes = [0; 4096];
            match pipe.read(&mut bytes) {
                Ok(0) | Err(_) => return Err(AgentError::Gone),
                Ok(length) => self.unread.extend_from_slice(&bytes[..length]),
            }
        }
    }

    /// Waits for the agent's end.
    pub fn await_end(&mut self) {
        // The caller has told it to end.
        let _ = self.child.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Fails if the agent has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
