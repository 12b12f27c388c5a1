//! The host's network as the kernel reports it, followed by a thread: the kernel answers under a lock that it may hold
//! for tens of milliseconds while devices are added or removed.

use std::net::IpAddr;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use portolan_sys::clock;
use portolan_sys::netlink::{Monitor, MonitorError, Tables};
use portolan_sys::wait::EventNotifier;
use portolan_types::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::warn;

/// Wait while nothing is due.
const LONG: Duration = Duration::from_secs(3600);

/// A neighbour for the kernel to resolve.
type Resolve = (u32, IpAddr);

/// The known state of the network, and its connection to the following thread.
#[derive(Debug)]
pub(crate) struct Network {
    pub tables: Tables,
    /// Becomes readable when there are new tables.
    pub news: Arc<EventNotifier>,
    latest: Latest,
    orders: Sender<Resolve>,
    ordered: Arc<EventNotifier>,
}

/// Tables not yet taken; older ones are obsolete.
type Latest = Arc<Mutex<Option<Tables>>>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    #[error("cannot make an eventfd: {0}")]
    EventNotifier(#[from] Errno),
}

impl Network {
    /// Reads everything once, then starts the thread that follows changes.
    pub(crate) fn follow() -> Result<Network, NetworkError> {
        let monitor = Monitor::new()?;
        let tables = monitor.tables().clone();
        let (news, ordered) = (
            Arc::new(EventNotifier::new()?),
            Arc::new(EventNotifier::new()?),
        );
        let latest = Latest::default();
        let (orders, to_do) = mpsc::channel();
        let follower = Follower {
            monitor,
            to_do,
            ordered: Arc::clone(&ordered),
            latest: Arc::clone(&latest),
            news: Arc::clone(&news),
        };
        std::thread::spawn(move || follower.run());
        Ok(Network {
            tables,
            news,
            latest,
            orders,
            ordered,
        })
    }

    /// Takes new tables. Returns true if there were any.
    pub(crate) fn take_news(&mut self) -> bool {
        self.news.drain();
        let latest = self.latest.lock();
        match latest.unwrap_or_else(PoisonError::into_inner).take() {
            Some(tables) => {
                self.tables = tables;
                true
            }
            None => false,
        }
    }

    /// Has the kernel resolve a neighbour.
    pub(crate) fn resolve(&self, ifindex: u32, address: IpAddr) {
        // The thread ends only with the server.
        let _ = self.orders.send((ifindex, address));
        self.ordered.notify();
    }
}

struct Follower {
    monitor: Monitor,
    to_do: Receiver<Resolve>,
    ordered: Arc<EventNotifier>,
    latest: Latest,
    news: Arc<EventNotifier>,
}

impl Follower {
    /// Runs until the server ends.
    fn run(mut self) {
        while self.obey() {
            self.read();
            self.sleep();
        }
    }

    /// Executes orders. Returns false if the server has ended.
    fn obey(&mut self) -> bool {
        self.ordered.drain();
        loop {
            match self.to_do.try_recv() {
                Ok((ifindex, address)) => {
                    if let Err(failure) = self.monitor.resolve(ifindex, address) {
                        warn!(%failure, "cannot resolve a neighbour");
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn read(&mut self) {
        let start = clock::now();
        match self.monitor.process(start) {
            Ok(true) => {
                let latest = self.latest.lock();
                let tables = self.monitor.tables().clone();
                *latest.unwrap_or_else(PoisonError::into_inner) = Some(tables);
                self.news.notify();
            }
            Ok(false) => {}
            Err(failure) => warn!(%failure, "routes are out of date until the next look"),
        }
        let now = clock::now();
        self.monitor.rest(now, now.since(start));
    }

    fn sleep(&self) {
        // While tables wait to be read, further changes may wait, too.
        let due = self.monitor.deadline();
        let limit = due.map_or(LONG, until);
        let mut fds = vec![PollFd::new(&*self.ordered, PollFlags::IN)];
        if due.is_none() {
            fds.push(PollFd::new(&self.monitor, PollFlags::IN));
        }
        let limit = Timespec::try_from(limit).ok();
        // When interrupted, it checks again.
        let _ = poll(&mut fds, limit.as_ref());
    }
}

fn until(due: Instant) -> Duration {
    let now = clock::now();
    if due > now {
        due.since(now)
    } else {
        Duration::ZERO
    }
}
