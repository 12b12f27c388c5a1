//! The server's view of the host's network: links, addresses, routes (main and local table) and
//! neighbours, kept up to date by rtnetlink. Events only tell which table to read again: the kernel does
//! not announce all consequences of a change (a link that goes down silently loses its IPv4 routes), and
//! a table that is read as a whole cannot drift. Of policy rules only their existence is noted; further tables are not
//! mirrored.

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

use parse::Rule;
use socket::Events;
pub(crate) use socket::Requests;

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

/// Removes the queueing discipline of a device that is down, so that its driver gets frames directly.
pub(crate) fn remove_discipline(ifindex: u32) -> Result<(), Errno> {
    Requests::open()?.acknowledged(parse::no_discipline(ifindex))
}

/// Brings a device up without ARP and multicast.
pub(crate) fn bring_up_quietly(ifindex: u32) -> Result<(), Errno> {
    Requests::open()?.acknowledged(parse::up_quietly(ifindex))
}

/// The group of devices to be deleted.
const DOOMED: u32 = u32::from_be_bytes(*b"PTLx");

/// Deletes devices, even if others hold them; those that no longer exist are ignored. The kernel waits tens of
/// milliseconds until a device is unused, and hardly longer for several devices of a group deleted at once.
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

/// A socket for requests whose messages another module builds.
pub(crate) fn request_socket() -> Result<OwnedFd, Errno> {
    socket::open(SocketFlags::empty(), None)
}

/// The tables that must be read again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stale {
    links: bool,
    addresses: bool,
    routes: bool,
    neighbours: bool,
    rules: bool,
}

/// Delay after a table that changed while it was read.
const READ_AGAIN_IN: Duration = Duration::from_millis(10);

/// Ratio of the pause to the time that reading took: a storm of changes takes a tenth of the server's time.
const PAUSE: u32 = 9;

/// Upper bound of the pause, for the sake of neighbours being resolved.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Number of changes processed per call.
const EVENTS_PER_TURN: usize = 256;

impl Stale {
    const ALL: Stale = Stale {
        links: true,
        addresses: true,
        routes: true,
        neighbours: true,
        rules: true,
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
            RouteNetlinkMessage::NewRule(_) | RouteNetlinkMessage::DelRule(_) => self.rules = true,
            _ => {}
        }
    }
}

/// The network as read last.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    links: Vec<Interface>,
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
    rules: Vec<Rule>,
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
            ..Metastate::default()
        }
    }

    /// Whether the namespace has policy rules (`ip rule`) other than those it begins with.
    pub fn has_policy_rules(&self) -> bool {
        let of = |is_v6: bool| self.rules.iter().filter(move |rule| rule.is_v6 == is_v6);
        let are_usual = |is_v6, usual: &[Rule]| of(is_v6).count() == 0 || of(is_v6).eq(usual);
        !are_usual(false, &Rule::USUAL) || !are_usual(true, &Rule::USUAL_V6)
    }

    /// The indices of all devices.
    pub fn devices(&self) -> Vec<u32> {
        self.links.iter().map(|link| link.index).collect()
    }
}

/// Follows one network namespace: that of the thread that created the monitor.
#[derive(Debug)]
pub struct Monitor {
    events: Events,
    requests: Requests,
    /// Changed since they were read.
    stale: Stale,
    /// Not to be read before this time.
    due: Instant,
    /// The snapshot has changed since `process` last returned true.
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

    /// Processes pending changes; returns true if the snapshot has changed. Call it when the descriptor is
    /// readable, and at the [`Monitor::deadline`], when failed reads are repeated.
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

    /// When changed tables are to be read, if there are any.
    pub fn deadline(&self) -> Option<Instant> {
        (self.stale != Stale::default()).then_some(self.due)
    }

    /// Sets the pause after `effort`, the time it took to read the tables and to process the changes.
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

    /// Asks the kernel to resolve the link-layer address of `address`, or to confirm it. The answer
    /// arrives as a change.
    pub fn resolve(&mut self, ifindex: u32, address: IpAddr) -> Result<(), ResolveError> {
        self.requests
            .acknowledged(parse::use_neighbour(ifindex, address))
            .map_err(|errno| ResolveError { address, errno })
    }

    /// Reads stale tables, until each was read undisturbed. Tables that others depend on come first.
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
        if self.stale.rules {
            let rules = match self.table("rule", parse::all_rules(), parse::rule) {
                // A kernel with a single table.
                Err(MonitorError::Read { errno, .. }) if errno == Errno::OPNOTSUPP => Vec::new(),
                rules => rules?,
            };
            self.stale.rules = false;
            self.changed |= replace(&mut self.tables.rules, rules);
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

/// Replaces `old` by `new`; returns true if they differ.
fn replace<T: PartialEq>(old: &mut Vec<T>, new: Vec<T>) -> bool {
    let changed = *old != new;
    *old = new;
    changed
}

#[cfg(test)]
mod tests;
