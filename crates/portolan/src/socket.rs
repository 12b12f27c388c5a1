//! A socket: the state behind one or more of the application's descriptors. Its session lies in
//! `Core`; this module has its phase and its watchers.

pub(crate) mod inboxes;
pub(crate) mod near_end;
pub(crate) mod options;
pub(crate) mod pair;
mod setup;
pub(crate) mod stamps;
pub(crate) mod state;
pub(crate) mod table;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_proto::control::{GroupChange, SocketOptionsBlob};
use portolan_stack::Sending;
use portolan_tcp::Events;
use portolan_types::{Instant, Protocol, Slot, canonical, is_scoped, scope_of, scoped};
use rustix::io::Errno;

use crate::descriptors::InternalFd;
use crate::socket::options::Options;
pub(crate) use crate::socket::setup::{Setup, Unregistered};
use crate::socket::stamps::Stamps;
use crate::socket::state::{PHASES, StateCell};
pub(crate) use crate::socket::state::{SocketPhase, SocketState, UseHere};
use crate::wait::epoll::Epoll;
use crate::wait::events::{ERR, HUP, IN, OUT, PRI, RDHUP};
use crate::wait::waiter::Waiter;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

/// Sockets in each phase: waits need not look for `Connecting` or `HeldElsewhere` ones if there are none.
static IN_PHASE: [AtomicUsize; PHASES.len()] = [const { AtomicUsize::new(0) }; PHASES.len()];

/// A socket of this process has an owner that gets signals.
static HAS_OWNER: AtomicBool = AtomicBool::new(false);

/// The program waits for sockets by system calls that the library does not see.
static HAS_UNSEEN_WAITS: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
pub(crate) struct Socket {
    /// IPv6, until `IPV6_ADDRFORM` changes it.
    is_v6: AtomicBool,
    pub(crate) protocol: Protocol,
    state: StateCell,
    is_nonblocking: AtomicBool,
    /// `O_ASYNC`: its events raise signals, too.
    is_async: AtomicBool,
    /// Other processes may have the descriptor.
    is_shared: AtomicBool,
    /// Of a listener: the descriptor that shows the connections of this process's part; -1 if it has none.
    own_near: AtomicI32,
    /// It has a connection that the server does not know yet, or had one.
    is_unregistered: AtomicBool,
    /// Descriptors of this process that refer to it.
    references: AtomicU32,
    /// Entries of the descriptor table that are this socket's.
    numbers: AtomicU32,
    setup: Mutex<Setup>,
    options: Mutex<Options>,
    watchers: Mutex<Watchers>,
    datagrams: Mutex<Datagrams>,
    stamps: Mutex<Stamps>,
    /// Was it ever asked to stamp sent data, or to report its completion? Otherwise no check is needed.
    is_stamping: AtomicBool,
    error: AtomicI32,
    /// An active open has ended or continues, and no `connect` has reported it yet.
    has_news: AtomicBool,
    /// An open waits for data that its SYN can carry.
    is_deferred: AtomicBool,
    /// Shut directions of a UDP socket, or of a stream without a connection: [`RECEIVE`], [`SEND`].
    shut: AtomicU8,
    /// Its options request arrival times: saves each read the check of all of them.
    wants_times: AtomicBool,
    /// Where the next peek begins (`SO_PEEK_OFF`); negative: always at the start.
    peek_offset: AtomicI32,
    /// The kernel may use its descriptor: in an epoll set, or in the background.
    is_with_kernel: AtomicBool,
    /// Of a listener: a thread has polled it.
    is_polled: AtomicBool,
    /// The server has to relay the session from its first byte on.
    is_for_server: AtomicBool,
    is_relayed_first: AtomicBool,
    /// It listens by a kernel socket, because there is no server.
    stands_in: AtomicBool,
    /// Incarnation of the server that knows that its connection is held here.
    known_to: AtomicU64,
    asking: Asking,
}

/// When a relayed session is requested again.
#[derive(Debug, Default)]
struct Asking {
    /// Nanoseconds of [`Instant`].
    next: AtomicU64,
    /// Milliseconds between requests.
    wait: AtomicU32,
}

impl Asking {
    const LONGEST: u32 = 4096;

    /// Returns whether it is time, and then doubles the interval.
    fn is_due(&self, now: Instant) -> bool {
        if now.as_nanos() < self.next.load(Ordering::Relaxed) {
            return false;
        }
        let wait = (self.wait.load(Ordering::Relaxed) * 2).clamp(1, Asking::LONGEST);
        self.wait.store(wait, Ordering::Relaxed);
        let next = now + Duration::from_millis(u64::from(wait));
        self.next.store(next.as_nanos(), Ordering::Relaxed);
        true
    }

    /// Resets the interval.
    fn begin_anew(&self) {
        self.begin_at(0);
    }

    fn begin_at(&self, nanoseconds: u64) {
        self.wait.store(0, Ordering::Relaxed);
        self.next.store(nanoseconds, Ordering::Relaxed);
    }
}

/// Directions of `shutdown`.
pub(crate) const RECEIVE: u8 = 1;
pub(crate) const SEND: u8 = 2;

/// State of a UDP socket beside its session.
#[derive(Debug, Default)]
pub(crate) struct Datagrams {
    /// The kernel socket on the same port, once a datagram had to be sent by it.
    pub(crate) kernel_socket: Option<InternalFd>,
    /// The corked datagram (`UDP_CORK`, `MSG_MORE`).
    pub(crate) corked: Option<Corked>,
    /// Membership changes made before the socket had a port.
    pub(crate) joined_early: Vec<GroupChange>,
    /// Number of datagrams sent with a time stamp (`SOF_TIMESTAMPING_OPT_ID`).
    pub(crate) stamped: u32,
}

/// A corked datagram.
#[derive(Debug)]
pub(crate) struct Corked {
    pub(crate) to: Option<SocketAddr>,
    pub(crate) sending: Sending,
    pub(crate) data: Vec<u8>,
}

#[derive(Debug, Default)]
struct Watchers {
    threads: Vec<Arc<Waiter>>,
    epolls: Vec<(Arc<Epoll<Socket>>, RawFd)>,
}

impl Socket {
    pub(crate) fn new(family: Family, protocol: Protocol) -> Socket {
        let (setup, options) = (Setup::default(), Options::default());
        Socket::with(family, protocol, SocketState::Idle, setup, options)
    }

    /// Notes the server that knows that the connection is held here.
    pub(crate) fn note_server(&self, incarnation: u64) {
        self.known_to.store(incarnation, Ordering::Release);
    }

    /// Has another server than this one given the connection to this process?
    pub(crate) fn is_unknown_to(&self, incarnation: u64) -> bool {
        self.known_to.load(Ordering::Acquire) != incarnation
    }

    /// Creates a socket for an accepted session, which the server holds.
    pub(crate) fn accepted(listener: &Socket, setup: Setup) -> Socket {
        let options = listener.options().inherited();
        let state = SocketState::HeldElsewhere {
            use_here: UseHere::Never,
        };
        Socket::with(listener.family(), Protocol::Tcp, state, setup, options)
    }

    /// Creates a socket that another process opened, or this one's program before `exec`.
    pub(crate) fn attached(
        family: Family,
        protocol: Protocol,
        state: SocketState,
        setup: Setup,
        options: Options,
    ) -> Socket {
        let socket = Socket::with(family, protocol, state, setup, options);
        socket.share();
        socket
    }

    fn with(
        family: Family,
        protocol: Protocol,
        state: SocketState,
        setup: Setup,
        options: Options,
    ) -> Socket {
        IN_PHASE[state.phase() as usize].fetch_add(1, Ordering::Release);
        Socket {
            is_v6: AtomicBool::new(family == Family::V6),
            protocol,
            state: StateCell::new(state),
            is_nonblocking: AtomicBool::new(false),
            is_async: AtomicBool::new(false),
            is_shared: AtomicBool::new(false),
            own_near: AtomicI32::new(-1),
            is_unregistered: AtomicBool::new(setup.unregistered.is_some()),
            references: AtomicU32::new(1),
            numbers: AtomicU32::new(0),
            setup: Mutex::new(setup),
            wants_times: AtomicBool::new(options.wants_times()),
            is_stamping: AtomicBool::new(options.timestamping() != 0),
            options: Mutex::new(options),
            watchers: Mutex::default(),
            datagrams: Mutex::default(),
            stamps: Mutex::default(),
            error: AtomicI32::new(0),
            has_news: AtomicBool::new(false),
            is_deferred: AtomicBool::new(false),
            shut: AtomicU8::new(0),
            peek_offset: AtomicI32::new(-1),
            is_with_kernel: AtomicBool::new(false),
            is_for_server: AtomicBool::new(false),
            is_relayed_first: AtomicBool::new(false),
            is_polled: AtomicBool::new(false),
            stands_in: AtomicBool::new(false),
            known_to: AtomicU64::new(0),
            asking: Asking::default(),
        }
    }

    pub(crate) fn family(&self) -> Family {
        if self.is_v6.load(Ordering::Relaxed) {
            Family::V6
        } else {
            Family::V4
        }
    }

    /// `IPV6_ADDRFORM`: makes it an IPv4 socket, as its peer is.
    pub(crate) fn become_v4(&self) {
        self.is_v6.store(false, Ordering::Relaxed);
    }

    pub(crate) fn state(&self) -> SocketState {
        self.state.state()
    }

    pub(crate) fn phase(&self) -> SocketPhase {
        self.state.phase()
    }

    /// Returns the session's slot while `Cached`, or the promised one while `Connecting`; otherwise
    /// a slot without a session. Valid as long as `Core` is locked.
    pub(crate) fn slot(&self) -> Slot {
        self.state.slot()
    }

    /// Returns the previous state, or that which does not allow the change. Changes into and out of
    /// `Cached` are made with `Core` locked, together with moving the session.
    pub(crate) fn change(&self, next: SocketState) -> Result<SocketState, SocketState> {
        let before = self.state.change(next)?;
        IN_PHASE[next.phase() as usize].fetch_add(1, Ordering::Release);
        IN_PHASE[before.phase() as usize].fetch_sub(1, Ordering::Release);
        Ok(before)
    }

    /// As [`Socket::change`], where only a close may have come first: it remains in force.
    pub(crate) fn become_unless_closed(&self, next: SocketState) {
        let changed = self.change(next);
        debug_assert!(
            matches!(changed, Ok(_) | Err(SocketState::Closed)),
            "{changed:?} to {next:?}"
        );
    }

    /// Is any socket of this process in `phase`?
    pub(crate) fn any(phase: SocketPhase) -> bool {
        IN_PHASE[phase as usize].load(Ordering::Acquire) > 0
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    pub(crate) fn set_nonblocking(&self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// Does any socket have an owner that gets signals (`F_SETOWN`)?
    pub(crate) fn has_owner() -> bool {
        HAS_OWNER.load(Ordering::Relaxed)
    }

    /// Notes that a socket has an owner.
    pub(crate) fn note_owner() {
        HAS_OWNER.store(true, Ordering::Relaxed);
    }

    /// Does the program wait for sockets by system calls that the library does not see (`threads/unseen.rs`)?
    pub(crate) fn has_unseen_waits() -> bool {
        HAS_UNSEEN_WAITS.load(Ordering::Relaxed)
    }

    /// Notes that it does. Returns true if that was known.
    pub(crate) fn note_unseen_waits() -> bool {
        HAS_UNSEEN_WAITS.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn is_async(&self) -> bool {
        self.is_async.load(Ordering::Relaxed)
    }

    pub(crate) fn set_async(&self, is_async: bool) {
        self.is_async.store(is_async, Ordering::Relaxed);
    }

    /// Returns the descriptor that becomes readable for connections whose handshakes this process has performed in place of
    /// others that have the listener, too.
    pub(crate) fn own_near(&self) -> Option<RawFd> {
        let near = self.own_near.load(Ordering::Acquire);
        (near >= 0).then_some(near)
    }

    pub(crate) fn set_own_near(&self, near: Option<RawFd>) {
        self.own_near.store(near.unwrap_or(-1), Ordering::Release);
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// Was it accepted, and its session not needed here yet? Then only this process has its options.
    pub(crate) fn accepted_unused(&self) -> bool {
        let unused = SocketState::HeldElsewhere {
            use_here: UseHere::Never,
        };
        self.state() == unused
    }

    /// Does the server not know its connection yet?
    pub(crate) fn is_unregistered(&self) -> bool {
        self.is_unregistered.load(Ordering::Acquire)
    }

    pub(crate) fn note_registered(&self) {
        self.is_unregistered.store(false, Ordering::Release);
    }

    pub(crate) fn note_unregistered(&self) {
        self.is_unregistered.store(true, Ordering::Release);
    }

    /// Notes that other processes may have the descriptor.
    pub(crate) fn share(&self) {
        self.is_shared.store(true, Ordering::Relaxed);
    }

    /// Notes that the kernel uses the descriptor: in its epoll sets, whose registrations cannot be queried, or in calls
    /// that the library does not see.
    pub(crate) fn leave_to_kernel(&self) {
        self.is_with_kernel.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_with_kernel(&self) -> bool {
        self.is_with_kernel.load(Ordering::Relaxed)
    }

    /// Notes that the session, which has arrived, must be returned to the server.
    pub(crate) fn leave_to_server(&self) {
        self.is_for_server.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_for_server(&self) -> bool {
        self.is_for_server.load(Ordering::Relaxed)
    }

    /// Is it time to request a relayed session again?
    pub(crate) fn may_reclaim(&self, now: Instant) -> bool {
        self.asking.is_due(now)
    }

    /// Notes that a relayed session has come back.
    pub(crate) fn note_return(&self) {
        self.asking.begin_anew();
    }

    /// Notes that it is relayed although this process could hold it, and will request it after `until`.
    pub(crate) fn note_first_relay(&self, until: Instant) {
        self.asking.begin_at(until.as_nanos());
        self.is_relayed_first.store(true, Ordering::Relaxed);
    }

    /// Returns true once, if the session is relayed only at first and a call needs more than a relay can do.
    pub(crate) fn end_first_relay(&self) -> bool {
        let is_first = self.is_relayed_first.load(Ordering::Relaxed)
            && self.is_relayed_first.swap(false, Ordering::Relaxed);
        if is_first {
            self.asking.begin_anew();
        }
        is_first
    }

    pub(crate) fn note_polled(&self) {
        if !self.is_polled.load(Ordering::Relaxed) {
            self.is_polled.store(true, Ordering::Relaxed);
        }
    }

    /// Of a listener: may the program accept because it was told that a connection waits?
    pub(crate) fn announces_connections(&self) -> bool {
        self.is_polled.load(Ordering::Relaxed) || self.is_with_kernel() || self.is_async()
    }

    /// Is the descriptor of a listener a kernel socket, for as long as there is no server?
    pub(crate) fn stands_in(&self) -> bool {
        self.stands_in.load(Ordering::Acquire)
    }

    pub(crate) fn set_stands_in(&self, stands_in: bool) {
        self.stands_in.store(stands_in, Ordering::Release);
    }

    /// Does a thread or an epoll set of this process wait for its events?
    pub(crate) fn is_watched(&self) -> bool {
        let watchers = self.watchers();
        !(watchers.threads.is_empty() && watchers.epolls.is_empty())
    }

    /// Returns the phase. Of an idle socket, first waits for a thread that is about to open it: its
    /// peer may have answered already.
    pub(crate) fn settled_phase(&self) -> SocketPhase {
        match self.phase() {
            SocketPhase::Idle => {
                let _opened = self.setup();
                self.phase()
            }
            phase => phase,
        }
    }

    pub(crate) fn setup(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn options(&self) -> MutexGuard<'_, Options> {
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wants_times(&self) -> bool {
        self.wants_times.load(Ordering::Relaxed)
    }

    /// Adopts the options of the process that had the session before.
    pub(crate) fn adopt(&self, options_blob: &SocketOptionsBlob) {
        if let Some((_, options)) = Options::from_options_blob(options_blob, self.protocol) {
            *self.options() = options;
            self.note_wanted_times();
        }
    }

    pub(crate) fn options_blob(&self) -> SocketOptionsBlob {
        self.options().to_options_blob(self.family())
    }

    /// Called after an option was set.
    pub(crate) fn note_wanted_times(&self) {
        let wanted = self.options().wants_times();
        self.wants_times.store(wanted, Ordering::Relaxed);
    }

    /// State that only UDP sockets have; locked before `Core`, and never together with `setup`.
    pub(crate) fn datagrams(&self) -> MutexGuard<'_, Datagrams> {
        self.datagrams
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports of sent data; no further lock is taken while this is held.
    pub(crate) fn stamps(&self) -> MutexGuard<'_, Stamps> {
        self.stamps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called when `SO_TIMESTAMPING` was set, or came with a message, and before the first completion is reported.
    pub(crate) fn start_stamping(&self) {
        self.is_stamping.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stamping(&self) -> bool {
        self.is_stamping.load(Ordering::Relaxed)
    }

    fn watchers(&self) -> MutexGuard<'_, Watchers> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_reference(&self) {
        self.references.fetch_add(1, Ordering::Relaxed);
    }

    /// Called by the table of descriptors, under its lock, when one more number refers to the socket.
    pub(crate) fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn drop_number(&self) {
        self.numbers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn has_one_number(&self) -> bool {
        self.numbers.load(Ordering::Relaxed) == 1
    }

    /// Returns true if it was the last one.
    pub(crate) fn drop_reference(&self) -> bool {
        self.references.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Stores an error that the next call reports.
    pub(crate) fn set_error(&self, errno: i32) {
        self.error.store(errno, Ordering::Release);
    }

    /// The pending error of the socket, without that of its session; reading clears it (`SO_ERROR`).
    pub(crate) fn take_error(&self) -> Option<Errno> {
        let errno = self.error.swap(0, Ordering::AcqRel);
        (errno != 0).then(|| Errno::from_raw_os_error(errno))
    }

    /// Notes an active open that `connect` has to report.
    pub(crate) fn expect_news(&self) {
        self.has_news.store(true, Ordering::Release);
    }

    /// Is there an active open that no `connect` has reported? Marks it as reported.
    pub(crate) fn take_news(&self) -> bool {
        self.has_news.swap(false, Ordering::AcqRel)
    }

    /// Is there an active open that no `connect` has reported?
    pub(crate) fn has_news(&self) -> bool {
        self.has_news.load(Ordering::Acquire)
    }

    /// Does an open wait for data that its SYN can carry?
    pub(crate) fn is_deferred(&self) -> bool {
        self.is_deferred.load(Ordering::Acquire)
    }

    pub(crate) fn note_deferred(&self, is_deferred: bool) {
        self.is_deferred.store(is_deferred, Ordering::Release);
    }

    pub(crate) fn peek_offset(&self) -> i32 {
        self.peek_offset.load(Ordering::Relaxed)
    }

    pub(crate) fn set_peek_offset(&self, offset: i32) {
        self.peek_offset.store(offset, Ordering::Relaxed);
    }

    /// Returns the number of bytes that a peek skips; `None` if each begins at the start.
    pub(crate) fn peek_start(&self) -> Option<usize> {
        usize::try_from(self.peek_offset()).ok()
    }

    /// Moves the peek offset by bytes that were peeked (positive) or consumed (negative).
    pub(crate) fn move_peek_offset(&self, bytes: i32) {
        let offset = self.peek_offset();
        if offset >= 0 {
            self.set_peek_offset(offset.saturating_add(bytes).max(0));
        }
    }

    /// Shuts directions of a UDP socket, or of a stream without a connection.
    pub(crate) fn shut(&self, directions: u8) {
        self.shut.fetch_or(directions, Ordering::AcqRel);
    }

    /// Opens both directions again.
    pub(crate) fn reopen(&self) {
        self.shut.store(0, Ordering::Release);
    }

    pub(crate) fn is_shut(&self, direction: u8) -> bool {
        self.shut.load(Ordering::Acquire) & direction != 0
    }

    pub(crate) fn has_error(&self) -> bool {
        self.error.load(Ordering::Acquire) != 0
    }

    pub(crate) fn watch(&self, waiter: &Arc<Waiter>) {
        self.watchers().threads.push(Arc::clone(waiter));
    }

    pub(crate) fn unwatch(&self, waiter: &Arc<Waiter>) {
        let mut watchers = self.watchers();
        if let Some(at) = watchers.threads.iter().position(|w| Arc::ptr_eq(w, waiter)) {
            watchers.threads.swap_remove(at);
        }
    }

    /// Renames the socket in an epoll set: the descriptor it was known by is closed, and another keeps it open.
    pub(crate) fn rename_in_epoll(&self, epoll: &Arc<Epoll<Socket>>, fd: RawFd, name: RawFd) {
        for (other, known) in &mut self.watchers().epolls {
            if Arc::ptr_eq(other, epoll) && *known == fd {
                *known = name;
            }
        }
    }

    pub(crate) fn join_epoll(&self, epoll: &Arc<Epoll<Socket>>, fd: RawFd) {
        self.watchers().epolls.push((Arc::clone(epoll), fd));
    }

    pub(crate) fn leave_epoll(&self, epoll: &Arc<Epoll<Socket>>, fd: RawFd) {
        self.watchers()
            .epolls
            .retain(|(e, f)| !(Arc::ptr_eq(e, epoll) && *f == fd));
    }

    /// Returns the epoll sets that contain this socket, with the descriptor they know it by.
    pub(crate) fn epolls(&self) -> Vec<(Arc<Epoll<Socket>>, RawFd)> {
        self.watchers().epolls.clone()
    }

    /// Reports events of the session: wakes threads and marks epoll sets.
    pub(crate) fn notify(&self, events: Events) {
        let watchers = self.watchers();
        for waiter in &watchers.threads {
            waiter.signal();
        }
        for (epoll, fd) in &watchers.epolls {
            epoll.mark(*fd, poll_bits(events));
        }
    }

    /// Returns an address as the application sees it: an IPv6 socket sees IPv4 peers mapped (RFC
    /// 4291 §2.5.5.2).
    pub(crate) fn shown(&self, address: SocketAddr) -> SocketAddr {
        match (self.family(), address.ip()) {
            (Family::V6, IpAddr::V4(v4)) => {
                SocketAddr::new(v4.to_ipv6_mapped().into(), address.port())
            }
            _ => address,
        }
    }

    /// Returns what `getsockname` shows before there is a port.
    pub(crate) fn unspecified(&self) -> SocketAddr {
        match self.family() {
            Family::V4 => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            Family::V6 => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
        }
    }

    /// Checks an address given by the application against the socket's family.
    pub(crate) fn given(&self, address: SocketAddr) -> Result<SocketAddr, Errno> {
        match (self.family(), address) {
            (Family::V4, SocketAddr::V6(_)) => Err(Errno::AFNOSUPPORT),
            (Family::V6, SocketAddr::V4(_)) if self.protocol == Protocol::Tcp => Err(Errno::INVAL),
            (Family::V6, SocketAddr::V4(_)) if self.options().v6_only() => Err(Errno::NETUNREACH),
            (Family::V6, SocketAddr::V6(v6))
                if v6.ip().to_ipv4_mapped().is_some() && self.options().v6_only() =>
            {
                Err(Errno::NETUNREACH)
            }
            _ if address.ip().is_unspecified() => Ok(canonical(address)),
            _ => self.on_a_link(canonical(address)),
        }
    }

    /// Resolves the link of a link-local address: the one it names, or that of the socket's own address.
    fn on_a_link(&self, address: SocketAddr) -> Result<SocketAddr, Errno> {
        let (ip, is_named) = (address.ip(), scope_of(address) != 0);
        if is_named || ip.is_multicast() || !is_scoped(ip) {
            return Ok(address);
        }
        match self.setup().local.map_or(0, scope_of) {
            0 => Err(Errno::INVAL),
            interface => Ok(scoped(ip, address.port(), interface)),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        IN_PHASE[self.phase() as usize].fetch_sub(1, Ordering::Release);
    }
}

fn poll_bits(events: Events) -> u32 {
    let mut bits = 0;
    if events.intersects(Events::READABLE) {
        bits |= IN;
    }
    if events.intersects(Events::WRITABLE | Events::CONNECTED) {
        bits |= OUT;
    }
    if events.intersects(Events::PEER_CLOSED) {
        bits |= IN | RDHUP;
    }
    if events.intersects(Events::PRIORITY) {
        bits |= PRI;
    }
    if events.intersects(Events::ERROR | Events::CLOSED) {
        bits |= IN | OUT | ERR | HUP | RDHUP;
    }
    bits
}
