//! Handlers of UDP.PacketRecv in a thread of this program (PX §3.3): for work that takes longer
//! than a handler in the packet filter may, or needs more than its protection domain has. They see
//! the datagrams that handlers in the filter pass to the owner. Their run time is not limited;
//! datagrams that arrive in the meantime wait in the port's receive buffer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use portolan_proto::extension::layout::ExtensionStatistics;
use portolan_proto::report::ThreadedRow;
use portolan_sys::clock;
use portolan_sys::thread::spawn_masked;
use rustix::io::Errno;

use super::Port;
use crate::process::Process;
use crate::process::installed::Installed;
use crate::qos::Refused;

/// Maximum number of passed datagrams that wait for their owner.
const INBOX: usize = 1024;

/// Within this time an idle thread notices that it has to end.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Longest datagram, in bytes.
const LONGEST: usize = 1 << 16;

/// A datagram, in the handlers' own copy: each handler sees the edits of the previous ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Datagram {
    /// `None` before the first datagram.
    pub from: Option<SocketAddr>,
    pub payload: Vec<u8>,
}

/// A handler's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The next handler sees it; after the last one, it is delivered to the owner.
    Pass,
    /// It is discarded.
    Consume,
    /// The payload, as edited so far, is sent back to the sender.
    Reply,
    /// It is delivered to the owner; the remaining handlers are skipped.
    Deliver,
}

type Handler = Box<dyn FnMut(&mut Datagram) -> Verdict + Send>;

/// Handlers of one port, in calling order.
#[derive(Default)]
pub struct Chain {
    handlers: Vec<Placed>,
}

struct Placed {
    name: String,
    priority: u8,
    handler: Handler,
    account: Account,
}

/// Statistics of a handler, and the row where the server reads them.
#[derive(Default)]
struct Account {
    /// None before it is announced.
    announced: Option<(&'static Process, Arc<Installed>)>,
    statistics: ExtensionStatistics,
}

impl Account {
    /// Opens an account for a handler that the server knows.
    fn open(announced: Arc<Installed>) -> Account {
        let account = Account {
            announced: Process::running().map(|process| (process, announced)),
            ..Account::default()
        };
        account.publish();
        account
    }

    fn note_run(&mut self, took: Duration, verdict: Verdict) {
        let statistics = &mut self.statistics;
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        statistics.runs += 1;
        statistics.time += took;
        statistics.longest = statistics.longest.max(took);
        match verdict {
            Verdict::Pass => statistics.passed += 1,
            Verdict::Consume => statistics.consumed += 1,
            Verdict::Reply => statistics.replied += 1,
            Verdict::Deliver => statistics.delivered += 1,
        }
        self.publish();
    }

    /// Recounts the last reply as one that could not be sent.
    fn note_refusal(&mut self) {
        let statistics = &mut self.statistics;
        statistics.replied -= 1;
        statistics.refused += 1;
        self.publish();
    }

    fn publish(&self) {
        let Some((process, announced)) = &self.announced else {
            return;
        };
        let place = announced.place();
        if let Some(number) = place.number {
            let row = ThreadedRow {
                number: number.into(),
                statistics: self.statistics,
            };
            process.lock().statistics.publish_threaded(place.row, &row);
        }
    }
}

/// A chain's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decision {
    verdict: Verdict,
    /// Position of the handler that decided; `None` if all passed.
    by: Option<usize>,
}

impl Chain {
    /// Adds a handler. Handlers are called in ascending order of priority, those of equal priority
    /// in the order in which they were added.
    #[must_use]
    pub fn with(
        self,
        priority: u8,
        handler: impl FnMut(&mut Datagram) -> Verdict + Send + 'static,
    ) -> Chain {
        self.with_named("handler", priority, handler)
    }

    /// As [`Chain::with`], with the name that `portolan ext list` shows.
    #[must_use]
    pub fn with_named(
        mut self,
        name: &str,
        priority: u8,
        handler: impl FnMut(&mut Datagram) -> Verdict + Send + 'static,
    ) -> Chain {
        let place = self
            .handlers
            .partition_point(|other| other.priority <= priority);
        let placed = Placed {
            name: name.to_owned(),
            priority,
            handler: Box::new(handler),
            account: Account::default(),
        };
        self.handlers.insert(place, placed);
        self
    }

    fn decide(&mut self, datagram: &mut Datagram) -> Decision {
        for (position, placed) in self.handlers.iter_mut().enumerate() {
            let called = clock::now();
            let verdict = (placed.handler)(datagram);
            placed.account.note_run(clock::now().since(called), verdict);
            if verdict != Verdict::Pass {
                let by = Some(position);
                return Decision { verdict, by };
            }
        }
        Decision {
            verdict: Verdict::Deliver,
            by: None,
        }
    }
}

/// A port whose datagrams are seen by handlers in a thread. Dropping this ends the thread and
/// closes the port.
pub struct Threaded {
    inbox: Receiver<Datagram>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Process of the thread: a forked child does not have it.
    owner: u32,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    /// Datagrams that the owner did not fetch in time, and replies that could not be sent.
    dropped: AtomicU64,
    refused: AtomicU64,
}

impl Port {
    /// Has a chain of handlers called for received datagrams, in a new thread with all signals blocked.
    pub fn handle_in_thread(self, mut chain: Chain) -> Result<Threaded, Refused> {
        let failed = |errno: Errno| Refused::new(errno, format!("no thread for handlers: {errno}"));
        self.receive_within(LOOK_UP).map_err(failed)?;
        for placed in &mut chain.handlers {
            placed.account = Account::open(self.announce(&placed.name, placed.priority)?);
        }
        let shared = Arc::new(Shared::default());
        let (outbox, inbox) = sync_channel(INBOX);
        let work = Work {
            port: self,
            chain,
            outbox,
            shared: Arc::clone(&shared),
        };
        let thread = spawn_masked("portolan-handler", move || work.run());
        Ok(Threaded {
            inbox,
            shared,
            thread: Some(thread.map_err(|_| failed(Errno::AGAIN))?),
            owner: std::process::id(),
        })
    }
}

impl Threaded {
    /// Waits for the next datagram that the handlers pass to the owner. Returns `None` when the
    /// server is gone.
    pub fn receive(&self) -> Option<Datagram> {
        self.inbox.recv().ok()
    }

    /// As [`Threaded::receive`], at most as long as `timeout`.
    ///
    /// # Errors
    /// `AGAIN`: no datagram arrived in time. `CONNRESET`: the server is gone.
    pub fn receive_within(&self, timeout: Duration) -> Result<Datagram, Errno> {
        self.inbox
            .recv_timeout(timeout)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => Errno::AGAIN,
                RecvTimeoutError::Disconnected => Errno::CONNRESET,
            })
    }

    /// Returns the number of datagrams that were lost because the owner did not fetch them.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Returns the number of replies that could not be sent.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl Drop for Threaded {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == thread::current().id();
        if let Some(thread) = self.thread.take()
            && self.owner == std::process::id()
            && !is_own(&thread)
        {
            // A panic of a handler has been reported already.
            let _ = thread.join();
        }
    }
}

/// State of the handlers' thread.
struct Work {
    port: Port,
    chain: Chain,
    outbox: SyncSender<Datagram>,
    shared: Arc<Shared>,
}

impl Work {
    fn run(mut self) {
        let mut buffer = vec![0; LONGEST];
        let mut datagram = Datagram::default();
        while !self.shared.is_over.load(Ordering::Relaxed) {
            match self.port.receive_from(&mut buffer) {
                Ok((length, from)) => {
                    datagram.from = from;
                    datagram.payload.clear();
                    datagram.payload.extend_from_slice(&buffer[..length]);
                    self.handle(&mut datagram);
                }
                // Time-out, signal, or an ICMP error about an earlier reply, which is ignored here.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNREFUSED | Errno::HOSTUNREACH) => {}
                Err(_) => return,
            }
        }
    }

    fn handle(&mut self, datagram: &mut Datagram) {
        let decision = self.chain.decide(datagram);
        match decision.verdict {
            Verdict::Consume => {}
            Verdict::Reply => {
                let sent = datagram
                    .from
                    .map(|to| self.port.send(&datagram.payload, to));
                if !matches!(sent, Some(Ok(()))) {
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                    let decided = decision.by.and_then(|by| self.chain.handlers.get_mut(by));
                    decided
                        .into_iter()
                        .for_each(|one| one.account.note_refusal());
                }
            }
            Verdict::Pass | Verdict::Deliver => {
                if self.outbox.try_send(std::mem::take(datagram)).is_err() {
                    self.shared.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(chain: &mut Chain, payload: &[u8]) -> (Verdict, Vec<u8>) {
        let mut datagram = Datagram {
            from: None,
            payload: payload.to_vec(),
        };
        (chain.decide(&mut datagram).verdict, datagram.payload)
    }

    #[test]
    fn handlers_are_called_in_their_order_until_one_decides() {
        let adds = |letter: u8, verdict| {
            move |datagram: &mut Datagram| {
                datagram.payload.push(letter);
                verdict
            }
        };
        let mut chain = Chain::default()
            .with(200, adds(b'd', Verdict::Reply))
            .with(10, adds(b'a', Verdict::Pass))
            .with(100, adds(b'b', Verdict::Pass))
            .with(100, adds(b'c', Verdict::Pass))
            .with(201, adds(b'e', Verdict::Consume));
        assert_eq!(said(&mut chain, b"-"), (Verdict::Reply, b"-abcd".to_vec()));
        let mut passing = Chain::default().with(0, adds(b'a', Verdict::Pass));
        assert_eq!(said(&mut passing, b"-"), (Verdict::Deliver, b"-a".to_vec()));
        assert_eq!(said(&mut Chain::default(), b"-").0, Verdict::Deliver);
    }

    #[test]
    fn each_handler_has_an_account_of_its_own() {
        let mut chain = Chain::default()
            .with(1, |_| Verdict::Pass)
            .with(2, |datagram| match datagram.payload.as_slice() {
                b"ask" => Verdict::Reply,
                _ => Verdict::Consume,
            })
            .with(3, |_| Verdict::Deliver);
        for payload in [&b"ask"[..], b"ask", b"end"] {
            said(&mut chain, payload);
        }
        chain.handlers[1].account.note_refusal();
        let counted = |at: usize| {
            let one = &chain.handlers[at].account.statistics;
            [one.runs, one.passed, one.consumed, one.replied, one.refused]
        };
        assert_eq!(counted(0), [3, 3, 0, 0, 0]);
        assert_eq!(counted(1), [3, 0, 1, 1, 1]);
        assert_eq!(counted(2), [0; 5]);
        let timed = &chain.handlers[0].account.statistics;
        assert!(timed.time >= timed.longest);
    }
}
