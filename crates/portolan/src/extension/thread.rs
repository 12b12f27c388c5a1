//! Handlers of UDP.PacketRecv in a thread of this program (PX §3.3): for what takes longer than a
//! handler in the packet filter may, or needs more than its protection domain has. They get what
//! handlers in the filter leave to the owner. Nothing limits how long they take; what comes meanwhile
//! waits in the port's receive buffer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use portolan_proto::report::ThreadedRow;
use portolan_sys::clock;
use portolan_sys::thread::spawn_masked;
use rustix::io::Errno;

use super::Port;
use crate::process::Process;
use crate::qos::Refused;

/// What is passed waits for its owner, so many datagrams at most.
const INBOX: usize = 1024;

/// How soon a thread for which nothing comes sees that it is to end.
const LOOK_UP: Duration = Duration::from_millis(100);

/// The longest there is.
const LONGEST: usize = 1 << 16;

/// What came, in the handlers' own copy: they see each other's edits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Datagram {
    /// Nobody if nothing has come.
    pub from: Option<SocketAddr>,
    pub payload: Vec<u8>,
}

/// What a handler decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The next handler sees it; after the last one, the owner gets it.
    Pass,
    /// It ends here.
    Consume,
    /// The payload, as it is by now, goes back to the sender.
    Reply,
    /// The owner gets it, past the handlers that would follow.
    Deliver,
}

type Handler = Box<dyn FnMut(&mut Datagram) -> Verdict + Send>;

/// Handlers of one port, in the order in which they are called.
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

/// What a handler did, and where the server looks for it.
#[derive(Default)]
struct Account {
    place: Option<(&'static Process, u8)>,
    said: ThreadedRow,
}

impl Account {
    /// Opens one for a handler that the server knows by that number.
    fn open(number: u16, row: u8) -> Account {
        let account = Account {
            place: Process::running().map(|process| (process, row)),
            said: ThreadedRow {
                number: number.into(),
                ..ThreadedRow::default()
            },
        };
        account.publish();
        account
    }

    fn note_run(&mut self, took: Duration, verdict: Verdict) {
        let statistics = &mut self.said.statistics;
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

    /// The answer that was counted last could not be sent.
    fn note_refusal(&mut self) {
        let statistics = &mut self.said.statistics;
        statistics.replied -= 1;
        statistics.refused += 1;
        self.publish();
    }

    fn publish(&self) {
        if let Some((process, row)) = self.place {
            process.lock().statistics.publish_threaded(row, &self.said);
        }
    }
}

/// What a chain decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decision {
    verdict: Verdict,
    /// Position of the handler that did not pass; none if all did.
    by: Option<usize>,
}

impl Chain {
    /// Of several handlers the one with the lowest priority comes first; of equals, the one that came
    /// first.
    #[must_use]
    pub fn with(
        self,
        priority: u8,
        handler: impl FnMut(&mut Datagram) -> Verdict + Send + 'static,
    ) -> Chain {
        self.with_named("handler", priority, handler)
    }

    /// The same, with the name that `portolan ext list` shows.
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

/// A port whose datagrams handlers in a thread see. The thread ends when this is dropped, and the
/// port with it.
pub struct Threaded {
    inbox: Receiver<Datagram>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// A forked child has not the thread.
    owner: u32,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    /// Datagrams that the owner did not fetch in time, and answers that could not be sent.
    dropped: AtomicU64,
    refused: AtomicU64,
}

impl Port {
    /// Has handlers in a thread of their own called for what comes. Signals are other threads' to handle.
    pub fn handle_in_thread(self, mut chain: Chain) -> Result<Threaded, Refused> {
        let failed = |errno: Errno| Refused::new(errno, format!("no thread for handlers: {errno}"));
        self.receive_within(LOOK_UP).map_err(failed)?;
        for placed in &mut chain.handlers {
            let (number, row) = self.announce(&placed.name, placed.priority)?;
            placed.account = Account::open(number, row);
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
    /// Waits for the next datagram that the handlers leave to the owner; nothing comes any more when the
    /// server has gone.
    pub fn receive(&self) -> Option<Datagram> {
        self.inbox.recv().ok()
    }

    /// The same, for as long as `timeout`.
    ///
    /// # Errors
    /// `AGAIN`: nothing came in time. `CONNRESET`: the server has gone.
    pub fn receive_within(&self, timeout: Duration) -> Result<Datagram, Errno> {
        self.inbox
            .recv_timeout(timeout)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => Errno::AGAIN,
                RecvTimeoutError::Disconnected => Errno::CONNRESET,
            })
    }

    /// Datagrams that were lost because the owner did not fetch them.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Answers that could not be sent.
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
            // A handler that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// What the thread has.
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
                // Or an error about what was sent, which is nobody's here.
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
            let one = &chain.handlers[at].account.said.statistics;
            [one.runs, one.passed, one.consumed, one.replied, one.refused]
        };
        assert_eq!(counted(0), [3, 3, 0, 0, 0]);
        assert_eq!(counted(1), [3, 0, 1, 1, 1]);
        assert_eq!(counted(2), [0; 5]);
        let timed = &chain.handlers[0].account.said.statistics;
        assert!(timed.time >= timed.longest);
    }
}
