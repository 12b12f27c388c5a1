//! The host's network as the kernel tells of it, followed by a thread: the kernel answers under a lock that it may hold
//! for tens of milliseconds while devices come and go.

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

/// While nothing is due.
const LONG: Duration = Duration::from_secs(3600);

/// A neighbour that the kernel is to look for.
type Resolve = (u32, IpAddr);

/// What the server knows of the network, and who tells it.
#[derive(Debug)]
pub struct Network {
    pub tables: Tables,
    /// Becomes readable when the tables are to be taken.
    pub news: Arc<EventNotifier>,
    latest: Latest,
    orders: Sender<Resolve>,
    ordered: Arc<EventNotifier>,
}

/// Tables that nobody has taken yet; those before them are of no use.
type Latest = Arc<Mutex<Option<Tables>>>;

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    #[error("cannot make an eventfd: {0}")]
    EventNotifier(#[from] Errno),
}

impl Network {
    /// Reads everything once, then has the thread follow it.
    pub fn follow() -> Result<Network, NetworkError> {
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

    /// True if the tables are others now.
    pub fn take_news(&mut self) -> bool {
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

    /// Has the kernel look for a neighbour.
    pub fn resolve(&self, ifindex: u32, address: IpAddr) {
        // The thread ends with the server only.
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
    /// Until the server ends.
    fn run(mut self) {
        while self.obey() {
            self.read();
            self.sleep();
        }
    }

    /// False if nobody orders any more.
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
        // Interrupted, it looks once more.
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
