//! A socket: what stands behind one of the application's descriptors, whichever of them refer to
//! it. Its session lies in `Core`; here is where it stands in its life and who watches it.

pub(crate) mod inboxes;
pub(crate) mod options;
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

use portolan_local::Stream;
use portolan_proto::control::{GroupChange, SocketOptionsBlob};
use portolan_stack::{Sending, UdpSession};
use portolan_tcp::Events;
use portolan_types::{Instant, Protocol, SessionId, Slot, canonical, is_scoped, scope_of, scoped};
use rustix::io::Errno;

use crate::runtime::Core;
use crate::socket::options::Options;
use crate::socket::stamps::Stamps;
use crate::socket::state::{PHASES, StateCell};
pub(crate) use crate::socket::state::{SocketPhase, SocketState, UseHere};
use crate::socket::table::InternalFd;
use crate::wait::Waiter;
use crate::wait::epoll::Epoll;

// poll(2) and epoll(7) use the same bits.
pub(crate) const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
pub(crate) const OUT: u32 = libc::EPOLLOUT as u32 | libc::EPOLLWRNORM as u32;
pub(crate) const ERR: u32 = libc::EPOLLERR as u32;
pub(crate) const HUP: u32 = libc::EPOLLHUP as u32;
pub(crate) const PRI: u32 = libc::EPOLLPRI as u32;
pub(crate) const RDHUP: u32 = libc::EPOLLRDHUP as u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

/// Sockets in each phase: waits that find none `Connecting` or `HeldElsewhere` need not look for them.
static IN_PHASE: [AtomicUsize; PHASES.len()] = [const { AtomicUsize::new(0) }; PHASES.len()];

/// A socket of this process has an owner who is to get signals.
static HAS_OWNER: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
pub(crate) struct Socket {
    /// Of IPv6, as long as it is.
    is_v6: AtomicBool,
    pub(crate) protocol: Protocol,
    state: StateCell,
    is_nonblocking: AtomicBool,
    /// `O_ASYNC`: its events are signals, too.
    is_async: AtomicBool,
    /// Other processes may have the descriptor.
    is_shared: AtomicBool,
    /// Descriptors of this process that refer to it.
    references: AtomicU32,
    /// Numbers in the table of descriptors that are this socket's.
    numbers: AtomicU32,
    setup: Mutex<Setup>,
    options: Mutex<Options>,
    watchers: Mutex<Watchers>,
    datagrams: Mutex<Datagrams>,
    stamps: Mutex<Stamps>,
    /// Was it ever asked to stamp what it sends? Others need not look.
    is_stamping: AtomicBool,
    error: AtomicI32,
    /// An active open has ended, or goes on, that no `connect` has told of yet.
    has_news: AtomicBool,
    /// An open waits for bytes that its SYN could carry.
    is_deferred: AtomicBool,
    /// Directions of a UDP socket, or of a stream without a connection, that are shut: [`RECEIVE`], [`SEND`].
    shut: AtomicU8,
    /// Its options ask when bytes came: spares each read the look at all of them.
    wants_times: AtomicBool,
    /// Where the next look begins (`SO_PEEK_OFF`); less than 0: always at the start.
    peek_offset: AtomicI32,
    /// The kernel may be at work on its descriptor: in an epoll set, or in the background.
    is_with_kernel: AtomicBool,
    /// The server is to do its work, from its first byte on.
    is_for_server: AtomicBool,
    is_relayed_first: AtomicBool,
    /// It listens by the kernel, since there is no server.
    stands_in: AtomicBool,
    asking: Asking,
}

/// When a relayed session is asked for again.
#[derive(Debug, Default)]
struct Asking {
    /// Nanoseconds of [`Instant`].
    next: AtomicU64,
    /// Milliseconds from one time to the next.
    wait: AtomicU32,
}

impl Asking {
    const LONGEST: u32 = 4096;

    /// True if it is time; the next is twice as far.
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

    /// It was not in vain.
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

/// What opening, binding and closing need; locked across calls to the server.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// Once the server knows the socket.
    pub(crate) session: Option<SessionId>,
    /// The run of the server under which it was opened, or 0 if that is not known.
    pub(crate) incarnation: u64,
    /// Of a listener: a kernel socket on its port, to listen on while there is no server.
    pub(crate) port_token: Option<InternalFd>,
    /// Of a listener whose server has gone: the other end of a descriptor that nobody writes to.
    pub(crate) silent_far: Option<InternalFd>,
    /// Its descriptor keeps messages apart: a bound TCP socket's does, so that whoever has a copy finds the connections to
    /// accept there, whichever of them calls `listen`.
    pub(crate) carries_messages: bool,
    /// The near end, once the application has closed it under a call that still needs it.
    pub(crate) kept: Option<InternalFd>,
    pub(crate) local: Option<SocketAddr>,
    /// The application chose `local`.
    pub(crate) is_bound: bool,
    /// It chose the port, too: that stays when the connection ends or the listener stops.
    pub(crate) has_chosen_port: bool,
    /// `local` is what the socket had last; as on Linux `getsockname` shows it still.
    pub(crate) is_local_stale: bool,
    pub(crate) remote: Option<SocketAddr>,
    /// Whom an open waits to reach until there are bytes for the SYN (`TCP_FASTOPEN_CONNECT`).
    pub(crate) deferred: Option<SocketAddr>,
    /// Of the last `listen`.
    pub(crate) backlog: u32,
}

/// What a UDP socket keeps beside its session.
#[derive(Debug, Default)]
pub(crate) struct Datagrams {
    /// The kernel socket on the same port, once something had to be sent that way.
    pub(crate) kernel_socket: Option<InternalFd>,
    /// What is corked (`UDP_CORK`, `MSG_MORE`).
    pub(crate) corked: Option<Corked>,
    /// Changes of memberships made before there was a port.
    pub(crate) joined_early: Vec<GroupChange>,
    /// Datagrams sent with a time stamp (`SOF_TIMESTAMPING_OPT_ID`).
    pub(crate) stamped: u32,
}

/// A datagram that grows.
#[derive(Debug)]
pub(crate) struct Corked {
    pub(crate) to: Option<SocketAddr>,
    pub(crate) sending: Sending,
    pub(crate) data: Vec<u8>,
}

#[derive(Debug, Default)]
struct Watchers {
    threads: Vec<Arc<Waiter>>,
    epolls: Vec<(Arc<Epoll>, RawFd)>,
}

impl Socket {
    pub(crate) fn new(family: Family, protocol: Protocol) -> Socket {
        let (setup, options) = (Setup::default(), Options::default());
        Socket::with(family, protocol, SocketState::Idle, setup, options)
    }

    /// An accepted session, which the server holds.
    pub(crate) fn accepted(listener: &Socket, setup: Setup) -> Socket {
        let options = listener.options().inherited();
        let state = SocketState::HeldElsewhere {
            use_here: UseHere::Never,
        };
        Socket::with(listener.family(), Protocol::Tcp, state, setup, options)
    }

    /// One that another process opened, or this one's program before `exec`.
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
            stands_in: AtomicBool::new(false),
            asking: Asking::default(),
        }
    }

    pub(crate) fn family(&self) -> Family {
        match self.is_v6.load(Ordering::Relaxed) {
            true => Family::V6,
            false => Family::V4,
        }
    }

    /// `IPV6_ADDRFORM`: its peer is one of IPv4, and so is the socket from now on.
    pub(crate) fn become_v4(&self) {
        self.is_v6.store(false, Ordering::Relaxed);
    }

    pub(crate) fn state(&self) -> SocketState {
        self.state.state()
    }

    pub(crate) fn phase(&self) -> SocketPhase {
        self.state.phase()
    }

    /// Where the session lies while `Cached`, or is to come while `Connecting`; otherwise a slot without a session. It
    /// means something for as long as `Core` is locked.
    pub(crate) fn slot(&self) -> Slot {
        self.state.slot()
    }

    /// Returns the state before, or that which does not allow the change. Into `Cached` and out of it with `Core`
    /// locked, together with the session.
    pub(crate) fn change(&self, next: SocketState) -> Result<SocketState, SocketState> {
        let before = self.state.change(next)?;
        IN_PHASE[next.phase() as usize].fetch_add(1, Ordering::Release);
        IN_PHASE[before.phase() as usize].fetch_sub(1, Ordering::Release);
        Ok(before)
    }

    /// As [`Socket::change`], where only a close may have been faster: it stands.
    pub(crate) fn become_unless_closed(&self, next: SocketState) {
        let changed = self.change(next);
        debug_assert!(
            matches!(changed, Ok(_) | Err(SocketState::Closed)),
            "{changed:?} to {next:?}"
        );
    }

    /// Is any socket of this process there?
    pub(crate) fn any(phase: SocketPhase) -> bool {
        IN_PHASE[phase as usize].load(Ordering::Acquire) > 0
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    pub(crate) fn set_nonblocking(&self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// Is anybody to get signals (`F_SETOWN`)?
    pub(crate) fn has_owner() -> bool {
        HAS_OWNER.load(Ordering::Relaxed)
    }

    /// Somebody is, from now on.
    pub(crate) fn note_owner() {
        HAS_OWNER.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_async(&self) -> bool {
        self.is_async.load(Ordering::Relaxed)
    }

    pub(crate) fn set_async(&self, is_async: bool) {
        self.is_async.store(is_async, Ordering::Relaxed);
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// Is it accepted, and was its session not needed here yet? Its options are only here then.
    pub(crate) fn accepted_unused(&self) -> bool {
        let unused = SocketState::HeldElsewhere {
            use_here: UseHere::Never,
        };
        self.state() == unused
    }

    /// From now on other processes may have the descriptor.
    pub(crate) fn share(&self) {
        self.is_shared.store(true, Ordering::Relaxed);
    }

    /// The kernel's epoll sets know it, and cannot be asked what for, or calls that nobody sees use it.
    pub(crate) fn leave_to_kernel(&self) {
        self.is_with_kernel.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_with_kernel(&self) -> bool {
        self.is_with_kernel.load(Ordering::Relaxed)
    }

    /// The session has come, and is to go back.
    pub(crate) fn leave_to_server(&self) {
        self.is_for_server.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_for_server(&self) -> bool {
        self.is_for_server.load(Ordering::Relaxed)
    }

    /// Is it time to ask for a session again that is relayed?
    pub(crate) fn may_reclaim(&self, now: Instant) -> bool {
        self.asking.is_due(now)
    }

    /// A relayed session has come back.
    pub(crate) fn note_return(&self) {
        self.asking.begin_anew();
    }

    /// It is relayed although this process could have it, which will ask for it after that moment.
    pub(crate) fn note_first_relay(&self, until: Instant) {
        self.asking.begin_at(until.as_nanos());
        self.is_relayed_first.store(true, Ordering::Relaxed);
    }

    /// True once, if the session is relayed only at first: a call needs more than a relay can do.
    pub(crate) fn end_first_relay(&self) -> bool {
        let is_first = self.is_relayed_first.load(Ordering::Relaxed)
            && self.is_relayed_first.swap(false, Ordering::Relaxed);
        if is_first {
            self.asking.begin_anew();
        }
        is_first
    }

    /// Is the descriptor of a listener the kernel's, for as long as there is no server?
    pub(crate) fn stands_in(&self) -> bool {
        self.stands_in.load(Ordering::Acquire)
    }

    pub(crate) fn set_stands_in(&self, stands_in: bool) {
        self.stands_in.store(stands_in, Ordering::Release);
    }

    /// Does anybody here wait for its events?
    pub(crate) fn is_watched(&self) -> bool {
        let watchers = self.watchers();
        !(watchers.threads.is_empty() && watchers.epolls.is_empty())
    }

    /// The phase, once a thread has said that is about to open the socket: its peer may have
    /// answered already.
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

    /// As the process says that had the session before.
    pub(crate) fn adopt(&self, options_blob: &SocketOptionsBlob) {
        if let Some((_, options)) = Options::from_options_blob(options_blob, self.protocol) {
            *self.options() = options;
            self.note_wanted_times();
        }
    }

    pub(crate) fn options_blob(&self) -> SocketOptionsBlob {
        self.options().to_options_blob(self.family())
    }

    /// An option was set.
    pub(crate) fn note_wanted_times(&self) {
        let wanted = self.options().wants_times();
        self.wants_times.store(wanted, Ordering::Relaxed);
    }

    /// What only a UDP socket has; taken before `Core`, and never together with `setup`.
    pub(crate) fn datagrams(&self) -> MutexGuard<'_, Datagrams> {
        self.datagrams
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Of what a stream sends; nothing else is locked while it is.
    pub(crate) fn stamps(&self) -> MutexGuard<'_, Stamps> {
        self.stamps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `SO_TIMESTAMPING` was set, or came with a message.
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

    /// One more number refers to it, as the table of descriptors says, which has it locked.
    pub(crate) fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn drop_number(&self) {
        self.numbers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn has_one_number(&self) -> bool {
        self.numbers.load(Ordering::Relaxed) == 1
    }

    /// True when the last one has gone.
    pub(crate) fn drop_reference(&self) -> bool {
        self.references.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Stores an error that the next call reports.
    pub(crate) fn set_error(&self, errno: i32) {
        self.error.store(errno, Ordering::Release);
    }

    /// The pending error of the socket or of its session; reading clears it (`SO_ERROR`).
    pub(crate) fn take_error(&self, core: Option<&mut Core>) -> Option<Errno> {
        let own = self.error.swap(0, Ordering::AcqRel);
        if own != 0 {
            return Some(Errno::from_raw_os_error(own));
        }
        let core = core?;
        let errno = match core.stream(self.slot()) {
            Some(stream) => stream.take_error()?.errno(),
            None => core.stack.udp(self.slot())?.error.take()?,
        };
        Some(Errno::from_raw_os_error(errno))
    }

    /// An active open has begun that `connect` is to tell of.
    pub(crate) fn expect_news(&self) {
        self.has_news.store(true, Ordering::Release);
    }

    /// Is there an active open that no `connect` has told of? From now on one has.
    pub(crate) fn take_news(&self) -> bool {
        self.has_news.swap(false, Ordering::AcqRel)
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

    /// Bytes to pass over in a look; none if each begins at the start.
    pub(crate) fn peek_start(&self) -> Option<usize> {
        usize::try_from(self.peek_offset()).ok()
    }

    /// Bytes have been looked at (more than 0) or taken (less): the next look begins elsewhere.
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

    /// Both directions are open again.
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

    /// The descriptor that an epoll set knew the socket by is closed, and another keeps it open.
    pub(crate) fn rename_in_epoll(&self, epoll: &Arc<Epoll>, fd: RawFd, name: RawFd) {
        for (other, known) in &mut self.watchers().epolls {
            if Arc::ptr_eq(other, epoll) && *known == fd {
                *known = name;
            }
        }
    }

    pub(crate) fn join_epoll(&self, epoll: &Arc<Epoll>, fd: RawFd) {
        self.watchers().epolls.push((Arc::clone(epoll), fd));
    }

    pub(crate) fn leave_epoll(&self, epoll: &Arc<Epoll>, fd: RawFd) {
        self.watchers()
            .epolls
            .retain(|(e, f)| !(Arc::ptr_eq(e, epoll) && *f == fd));
    }

    /// The epoll sets that hold this socket, with the descriptor they know it by.
    pub(crate) fn epolls(&self) -> Vec<(Arc<Epoll>, RawFd)> {
        self.watchers().epolls.clone()
    }

    /// Something happened to the session: wakes threads and marks epoll sets.
    pub(crate) fn notify(&self, events: Events) {
        let watchers = self.watchers();
        for waiter in &watchers.threads {
            waiter.signal();
        }
        for (epoll, fd) in &watchers.epolls {
            epoll.mark(*fd, poll_bits(events));
        }
    }

    /// What poll and epoll say of the socket now.
    pub(crate) fn readiness(&self, core: &mut Core) -> u32 {
        let error = match self.protocol {
            _ if !self.has_error() => 0,
            Protocol::Tcp => IN | OUT | ERR,
            Protocol::Udp => ERR,
        };
        match self.phase() {
            SocketPhase::Cached => {
                let slot = self.slot();
                let stayed = match core.lending.is_active() && core.lending.has_some(slot) {
                    true => IN,
                    false => 0,
                };
                if let Some(stream) = core.stream_to_send(slot) {
                    let has_stamps = self.is_stamping() && self.stamps().has_some();
                    let stamps = if has_stamps { ERR } else { 0 };
                    return error | stream_readiness(stream) | stamps | stayed;
                }
                let has_room = core.stack.has_room(slot, &mut core.channel);
                error
                    | match core.stack.udp(slot) {
                        Some(session) => udp_readiness(session, has_room) | self.shut_readiness(),
                        None => HUP | ERR,
                    }
            }
            SocketPhase::Idle if self.is_deferred.load(Ordering::Acquire) => error | OUT,
            // As Linux: a TCP socket that is not connected is writable and hung up, and after an
            // open that failed has ended for the reader too.
            SocketPhase::Idle if self.protocol == Protocol::Tcp => {
                let ended = if self.has_news.load(Ordering::Acquire) {
                    IN | RDHUP
                } else {
                    0
                };
                // Unlike the error of a connection, that of an open which was given up is nothing to read.
                (error & ERR) | OUT | HUP | ended | self.shut_readiness()
            }
            SocketPhase::Idle => error | OUT | self.shut_readiness(),
            SocketPhase::Closed => HUP | ERR,
            SocketPhase::Connecting
            | SocketPhase::Listening
            | SocketPhase::Relayed
            | SocketPhase::HeldElsewhere => error,
        }
    }

    fn shut_readiness(&self) -> u32 {
        match (self.is_shut(RECEIVE), self.is_shut(SEND)) {
            (true, true) => IN | RDHUP | HUP,
            (true, false) => IN | RDHUP,
            (false, _) => 0,
        }
    }

    /// An address as the application sees it: an IPv6 socket sees IPv4 peers mapped (RFC 4291
    /// §2.5.5.2).
    pub(crate) fn shown(&self, address: SocketAddr) -> SocketAddr {
        match (self.family(), address.ip()) {
            (Family::V6, IpAddr::V4(v4)) => {
                SocketAddr::new(v4.to_ipv6_mapped().into(), address.port())
            }
            _ => address,
        }
    }

    /// What `getsockname` shows before there is a port.
    pub(crate) fn unspecified(&self) -> SocketAddr {
        match self.family() {
            Family::V4 => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            Family::V6 => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
        }
    }

    /// An address the application gave, checked against the socket's family.
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

    /// A link-local address is on the link that it names, or on the one the socket is bound to.
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

fn stream_readiness(connection: &mut dyn Stream) -> u32 {
    let mut bits = 0;
    let has_ended = connection.is_receive_shut();
    if connection.is_readable() {
        bits |= IN;
    }
    if has_ended {
        bits |= IN | RDHUP;
    }
    if connection.has_urgent() {
        bits |= PRI;
    }
    if connection.poll_writable() || connection.is_send_closed() {
        bits |= OUT;
    }
    if (has_ended && connection.is_send_closed()) || connection.is_closed() {
        bits |= HUP;
    }
    if connection.error().is_some() {
        bits |= ERR | IN | OUT;
    }
    bits
}

fn udp_readiness(session: &UdpSession, has_room: bool) -> u32 {
    let mut bits = if has_room { OUT } else { 0 };
    if !session.queue.is_empty() {
        bits |= IN;
    }
    if session.error.is_some() || !session.errors.is_empty() {
        bits |= ERR;
    }
    bits
}
