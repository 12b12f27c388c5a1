//! `portolan capture` (ADR 36): which processes record what they send and receive, and what the commands hear of
//! processes and ends. What is recorded does not pass through the server.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::OwnedFd;

use portolan_control::{ClientId, Process};
use portolan_proto::capture::{CaptureRequest, CaptureRing};

mod serve;

const ROOT: u32 = 0;

/// The captures of all commands.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    by_client: BTreeMap<ClientId, Capture>,
    rings: u64,
}

#[derive(Debug)]
struct Capture {
    /// The number of the request that all news answers.
    number: u32,
    uid: u32,
    request: CaptureRequest,
    /// Local sessions of which it has heard, until both ends are closed.
    pairs: HashSet<u64>,
}

impl Capture {
    fn includes(&self, process: &Process) -> bool {
        let is_wanted = self.request.pid.is_none_or(|pid| pid == process.pid);
        is_wanted && (self.uid == ROOT || self.uid == process.uid)
    }
}

/// A capture of one process.
#[derive(Debug)]
struct ProcessCapture {
    client: ClientId,
    ring: CaptureRing,
    /// Until the process fetches it.
    memory: Option<OwnedFd>,
}

/// The captures of one process.
#[derive(Debug, Default)]
pub(crate) struct ProcessCaptures {
    list: Vec<ProcessCapture>,
    /// Until the process fetches the list.
    has_news: bool,
}

impl ProcessCaptures {
    pub(crate) fn has_news(&self) -> bool {
        self.has_news
    }

    fn fetch(&mut self) -> (Vec<CaptureRing>, Vec<OwnedFd>) {
        self.has_news = false;
        let (mut rings, mut memory) = (Vec::new(), Vec::new());
        for capture in &mut self.list {
            let fd = capture.memory.take();
            rings.push(CaptureRing {
                is_new: fd.is_some(),
                ..capture.ring
            });
            memory.extend(fd);
        }
        (rings, memory)
    }
}

/// How an end of a local session was closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClosedEnd {
    pub is_reset: bool,
    /// The other one was closed before.
    pub is_last: bool,
}
