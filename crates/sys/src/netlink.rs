//! The server's view of the host's network: links, addresses, routes (main and local table) and
//! neighbours, kept true by rtnetlink. Events only say which table to read again: the kernel does
//! not announce everything that follows from a change (a link that goes down takes its IPv4 routes
//! with it in silence), and a table that is read whole cannot drift. Policy rules and further
//! tables are not mirrored.

mod parse;
mod socket;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use netlink_packet_route::RouteNetlinkMessage;
use portolan_proto::metastate::{Address, Interface, Metastate, Neighbour, Route};
use portolan_types::Instant;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use socket::{Events, Requests};

#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    #[error("cannot open a netlink socket: {0}")]
    Open(Errno),
    #[error("cannot listen for network changes: {0}")]
    Subscribe(Errno),
    #[error("cannot read the kernel's {table} table: {errno}")]
    Read { table: &'static str, errno: Errno },
    #[error("cannot follow network changes: {0}")]
    Follow(Errno),
}

#[derive(Debug, thiserror::Error)]
#[error("cannot have {address} resolved: {errno}")]
pub struct ResolveError {
    pub address: IpAddr,
    pub errno: Errno,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot delete device {ifindex}: {errno}")]
pub struct DeleteError {
    pub ifindex: u32,
    pub errno: Errno,
}

/// Has the driver of a device that is down get its frames without a queueing discipline before it.
pub(crate) fn remove_discipline(ifindex: u32) -> Result<(), Errno> {
    Requests::open()?.acknowledged(parse::no_discipline(ifindex))
}

/// Of devices that are to be deleted.
const DOOMED: u32 = u32::from_be_bytes(*b"PTLx");

/// Removes devices, whoever keeps them; nothing to do for those that have gone. The kernel waits tens of milliseconds
/// until nobody uses a device any more, and no longer for many of a group that it deletes at once.
pub fn delete_devices(devices: &[u32]) -> Result<(), DeleteError> {
    let failed = |ifindex| move |errno| DeleteError { ifindex, errno };
    let mut requests = Requests::open().map_err(failed(0))?;
    if let [ifindex] = *devices {
        let deleted = requests.acknowledged(parse::delete_link(ifindex));
        return unless_gone(deleted).map_err(failed(ifindex));
    }
    for &ifindex in devices {
        let marked = requests.acknowledged(parse::set_group(ifindex, DOOMED));
        unless_gone(marked).map_err(failed(ifindex))?;
    }
    unless_gone(requests.acknowledged(parse::delete_group(DOOMED))).map_err(failed(0))
}

fn unless_gone(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::NODEV) => Ok(()),
        result => result,
    }
}

/// For requests whose messages another module makes.
pub(crate) fn request_socket() -> Result<OwnedFd, Errno> {
    socket::open(SocketFlags::empty())
}

/// Which tables have to be read again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stale {
    links: bool,
    addresses: bool,
    routes: bool,
    neighbours: bool,
}

/// After a table could not be read undisturbed.
const READ_AGAIN_IN: Duration = Duration::from_millis(10);

/// Between two readings ten times as long passes as one took: a storm of changes takes a tenth of the server's time.
const PAUSE: u32 = 9;

/// But no neighbour is waited for longer than that.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Changes heard of at a time.
const EVENTS_PER_TURN: usize = 256;

impl Stale {
    const ALL: Stale = Stale {
        links: true,
        addresses: true,
        routes: true,
        neighbours: true,
    };

    fn note(&mut self, message: &RouteNetlinkMessage) {
        match message {
            // These come and go with processes, and have neither addresses nor routes.
            RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link)
                if parse::is_own_tap(link) => {}
            RouteNetlinkMessage::NewLink(_) | RouteNetlinkMessage::DelLink(_) => *self = Stale::ALL,
            RouteNetlinkMessage::NewAddress(_) | RouteNetlinkMessage::DelAddress(_) => {
                self.addresses = true;
                self.routes = true;
            }
            RouteNetlinkMessage::NewRoute(_) | RouteNetlinkMessage::DelRoute(_) => {
                self.routes = true;
            }
            RouteNetlinkMessage::NewNeighbour(_) | RouteNetlinkMessage::DelNeighbour(_) => {
                self.neighbours = true;
            }
            _ => {}
        }
    }
}

/// The network as last read.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    links: Vec<Interface>,
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
}

impl Tables {
    /// `managed` are the devices with Portolan's filter.
    pub fn snapshot(&self, managed: &BTreeSet<u32>) -> Metastate {
        let links = self.links.iter().map(|link| Interface {
            managed: managed.contains(&link.index),
            ..link.clone()
        });
        Metastate {
            interfaces: links.collect(),
            addresses: self.addresses.clone(),
            routes: self.routes.clone(),
            neighbours: self.neighbours.clone(),
        }
    }

    /// The numbers of all devices.
    pub fn devices(&self) -> Vec<u32> {
        self.links.iter().map(|link| link.index).collect()
    }
}

/// Follows one network namespace: the one its creator's thread was in.
#[derive(Debug)]
pub struct Monitor {
    events: Events,
    requests: Requests,
    /// Not read since they changed.
    stale: Stale,
    /// Not to be read before.
    due: Instant,
    /// The snapshot is another one than its reader knows.
    changed: bool,
    tables: Tables,
}

impl Monitor {
    /// Subscribes to changes, then reads everything once.
    pub fn new() -> Result<Monitor, MonitorError> {
        let mut monitor = Monitor {
            events: Events::subscribe()?,
            requests: Requests::open().map_err(MonitorError::Open)?,
            stale: Stale::ALL,
            due: Instant::ZERO,
            changed: false,
            tables: Tables::default(),
        };
        monitor.read_stale()?;
        Ok(monitor)
    }

    /// Takes the changes that wait; true if the snapshot is another one now. Call when the
    /// descriptor is readable, and at the [`Monitor::deadline`]. What could not be read is read again then.
    pub fn process(&mut self, now: Instant) -> Result<bool, MonitorError> {
        self.hear()?;
        if now < self.due || self.stale == Stale::default() {
            return Ok(false);
        }
        if let Err(error) = self.read_stale() {
            self.due = now + READ_AGAIN_IN;
            return Err(error);
        }
        Ok(std::mem::take(&mut self.changed))
    }

    /// When tables are to be read, if some have changed.
    pub fn deadline(&self) -> Option<Instant> {
        (self.stale != Stale::default()).then_some(self.due)
    }

    /// It took so long to read the tables and to do what follows from them.
    pub fn rest(&mut self, now: Instant, effort: Duration) {
        let pause = (effort * PAUSE).min(LONGEST_PAUSE);
        self.due = self.due.max(now + pause);
    }

    fn hear(&mut self) -> Result<(), MonitorError> {
        for _ in 0..EVENTS_PER_TURN {
            let stale = &mut self.stale;
            match self.events.next(|message| stale.note(message)) {
                Ok(()) => {}
                Err(Errno::AGAIN) => break,
                // Events were lost: everything may have changed.
                Err(Errno::NOBUFS) => self.stale = Stale::ALL,
                Err(errno) => return Err(MonitorError::Follow(errno)),
            }
        }
        Ok(())
    }

    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Asks the kernel to find the link-layer address of `address`, or to confirm it. The answer
    /// comes as a change.
    pub fn resolve(&mut self, ifindex: u32, address: IpAddr) -> Result<(), ResolveError> {
        self.requests
            .acknowledged(parse::use_neighbour(ifindex, address))
            .map_err(|errno| ResolveError { address, errno })
    }

    /// A table is stale until it was read undisturbed. Those that come first are the ones that others follow from.
    fn read_stale(&mut self) -> Result<(), MonitorError> {
        if self.stale.links {
            let links = self.table("link", parse::all_links(), parse::link)?;
            self.stale.links = false;
            self.changed |= replace(&mut self.tables.links, links);
        }
        if self.stale.addresses {
            let addresses = self.table("address", parse::all_addresses(), parse::address)?;
            self.stale.addresses = false;
            self.changed |= replace(&mut self.tables.addresses, addresses);
        }
        if self.stale.routes {
            let mut routes = self.table("route", parse::all_routes(), parse::route)?;
            self.stale.routes = false;
            routes.sort_by_key(parse::route_order);
            let routes = routes.into_iter().map(|ranked| ranked.route).collect();
            self.changed |= replace(&mut self.tables.routes, routes);
        }
        if self.stale.neighbours {
            let neighbours = self.table("neighbour", parse::all_neighbours(), parse::neighbour)?;
            self.stale.neighbours = false;
            self.changed |= replace(&mut self.tables.neighbours, neighbours);
        }
        Ok(())
    }

    fn table<T>(
        &mut self,
        table: &'static str,
        request: RouteNetlinkMessage,
        parse: fn(&RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, MonitorError> {
        self.requests
            .dump(&request, parse)
            .map_err(|errno| MonitorError::Read { table, errno })
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

/// Puts `new` in place of `old`; true if they differ.
fn replace<T: PartialEq>(old: &mut Vec<T>, new: Vec<T>) -> bool {
    let changed = *old != new;
    *old = new;
    changed
}

#[cfg(test)]
mod tests;
