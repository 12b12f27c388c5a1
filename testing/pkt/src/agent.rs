//! The program that makes the calls, as the runner sees it.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::wire::now;

/// One call, one line of JSON on the agent's standard input. Each runs on a thread of its own.
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

/// What came of it, one line on the standard output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    pub id: u32,
    /// By the monotonic clock.
    pub started: Duration,
    pub ended: Duration,
    /// The number, or errno.
    pub result: Result<i64, i32>,
    /// What was received.
    pub data: Option<Vec<u8>>,
    /// What poll found, or what a message had beside its data.
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

/// A running agent, killed when dropped.
pub struct Agent {
    child: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<Answer>,
    /// That somebody did not wait for yet.
    waiting: Vec<Answer>,
    next: u32,
}

impl Agent {
    pub fn start(mut command: Command) -> Result<Agent, AgentError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(AgentError::Start)?;
        let (sender, answers) = channel();
        let requests = child.stdin.take();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let Ok(answer) = serde_json::from_str(&line) else {
                        return;
                    };
                    if sender.send(answer).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Agent {
            child,
            requests,
            answers,
            waiting: Vec::new(),
            next: 0,
        })
    }

    /// Has a call made, and tells its number.
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

    /// What came of a call, waiting until `deadline`.
    pub fn answer(&mut self, id: u32, deadline: Duration) -> Result<Answer, AgentError> {
        loop {
            if let Some(at) = self.waiting.iter().position(|answer| answer.id == id) {
                return Ok(self.waiting.swap_remove(at));
            }
            let left = deadline.saturating_sub(now());
            match self.answers.recv_timeout(left) {
                Ok(answer) => self.waiting.push(answer),
                Err(RecvTimeoutError::Timeout) => return Err(AgentError::Late),
                Err(RecvTimeoutError::Disconnected) => return Err(AgentError::Gone),
            }
        }
    }

    /// Waits for the agent's end.
    pub fn await_end(&mut self) {
        // It has been told to.
        let _ = self.child.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
