//! The server: what it owns, how it starts, its event loop, how it stops. Each concern has its own file with an `impl
//! Server`.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use portolan_bpf::{AttachError, ChannelError, Filter, HolderCount, LoadError, TableError};
use portolan_control::qos::transmit::ClassId;
use portolan_control::{
    Budget, ClientId, Control, Holder, Input, Life, PortTable, SessionEntry, SessionPhase, Shares,
    Slices, Timer,
};
use portolan_stack::passive::{CookieClock, path_config};
use portolan_stack::{COUNTERS, EarlyFragments, NextHop, Path, ResetLimit, Routes, Stack, Wire};
use portolan_sys::device::{self, DeviceError};
use portolan_sys::doorbell::Doorbell;
use portolan_sys::ring::Ring;
use portolan_sys::rx_path::RxPath;
use portolan_sys::sched::LongSlice;
use portolan_sys::shm::MetastateWriter;
use portolan_sys::signals::Signals;
use portolan_sys::sysctl::{ReserveError, ReservedPorts};
use portolan_sys::tap::{self, Tap};
use portolan_sys::unix::{BindError, Listener as ControlSocket};
use portolan_sys::{accounts, clock, descriptor};
use portolan_tcp::isn::Secret;
use portolan_tcp::{Config as TcpConfig, CongestionKind};
use portolan_types::{ChannelId, FlowKey, Instant, SessionId};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use tracing::{info, warn};

use crate::adoption::left_ends::LeftEnd;
use crate::adoption::{self, Inheritance, Loaded};
use crate::calls::Calls;
use crate::captures::Captures;
use crate::channels::channel::{Channel, Ending};
use crate::channels::device_turns::DeviceTurns;
use crate::channels::pool::ChannelPool;
use crate::channels::rings::{self, Directs};
use crate::config::{Config, ConfigSource, FLOWS};
use crate::confine::RefusedCalls;
use crate::control_socket::client::{Client, Listings};
use crate::control_socket::sink::Sink;
use crate::extensions::Extensions;
use crate::handles::{HandleTable, Shortage};
use crate::instance::Instance;
use crate::leaving::LeavingTaps;
use crate::listeners::rx_throttle::RxThrottle;
use crate::listeners::unregistered::LostConnections;
use crate::local_ends::Locals;
use crate::poll::{Poller, Ready, Token};
use crate::qos::{PolicyError, Qos};
use crate::random::{random_bytes, random_u64};
use crate::raw::RawFlows;
use crate::report::listings::LISTS;
use crate::requests::PendingClose;
use crate::supervisor::{Kept, Supervisor};
use crate::udp::sharing::{GROUPS, Sharing};
use crate::user_threads::UserThreads;
use crate::wake_directory::WakeDirectory;
use crate::watch::hooks::HookWatch;
use crate::watch::metastate::{RESOLVING, Resolving};
use crate::watch::network::{Network, NetworkError};
use crate::watch::policy::PolicyWatch;
use crate::watch::sysctls::Sysctls;
use crate::wire::TapWire;

/// Rows of bindings for raw flows, besides those of listeners and UDP sockets.
const RAW_BINDINGS: u32 = 8192;

/// Wanted limit of descriptors: a few per session.
const DESCRIPTORS: u64 = 1 << 20;

/// Size of the descriptor table at the start, half a megabyte of kernel memory.
const DESCRIPTOR_TABLE: u64 = 1 << 16;

/// How long a stopping server waits for sessions that move. It takes a process microseconds to return one.
const MOVED_WITHIN: Duration = Duration::from_millis(500);

/// How long it waits for peers that have not answered a SYN. Programs ask the next server to try again.
const OPENED_WITHIN: Duration = Duration::from_millis(50);

/// How long a stopping server waits for its last segments to leave.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(100);

/// What the event loop waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Control,
    Signals,
    Network,
    Hooks,
    Policy,
    Ring,
    Wire,
    Inject,
    ChannelPool,
    LeavingTaps,
    Client(ClientId),
    Descriptor(SessionId),
    Reservation(SessionId),
    /// A process that shares a local session with the server.
    EventNotifier,
    /// The process that has the class.
    Holder(ClassId),
    /// The process that made a multiplex group.
    Maker(u32),
    /// The thread that has extensions verified.
    Loader,
    /// Calls that could wait have been made.
    Calls,
}

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("cannot load the packet filter: {0}")]
    Load(#[from] LoadError),
    #[error("cannot write to the packet filter's tables: {0}")]
    Table(#[from] TableError),
    #[error("cannot make the directory for wake-ups: {0}")]
    WakeDirectory(std::io::Error),
    #[error("cannot watch over the packet filter: {0}")]
    HookWatch(std::io::Error),
    #[error("cannot watch the host's policy: {0}")]
    PolicyWatch(std::io::Error),
    #[error("cannot attach the packet filter: {0}")]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("cannot create the server's tap: {0}")]
    Tap(#[from] tap::CreateError),
    #[error("cannot map the server's ring: {0}")]
    Ring(#[from] portolan_sys::ring::MapError),
    #[error(transparent)]
    Doorbell(#[from] portolan_sys::doorbell::MapError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Memory(#[from] portolan_sys::shm::CreateError),
    #[error("cannot reserve the ephemeral ports: {0}")]
    Ports(#[from] ReserveError),
    #[error(transparent)]
    Socket(#[from] BindError),
    #[error("cannot set {what} of {path}: {reason}")]
    Permissions {
        what: &'static str,
        path: String,
        reason: String,
    },
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error("cannot set up the event loop: {0}")]
    Poll(#[from] Errno),
}

/// How a server goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    ForGood,
    /// Connections of programs are left for the next server, or programs that may wait for it with new ones.
    ForSuccessor,
}

/// Everything the network server of one namespace owns.
pub(crate) struct Server {
    pub(crate) config: Config,
    pub(crate) source: ConfigSource,
    pub(crate) started: Instant,
    /// Distinguishes this run of the server from earlier ones.
    pub(crate) incarnation: u64,
    /// Read once each turn.
    pub(crate) now: Instant,
    stopping: Option<Departure>,
    /// Nothing more is received from clients, whose ends are shut down. They are not gone.
    pub(crate) are_requests_over: bool,
    pub(crate) supervisor: Supervisor,
    pub(crate) socket: PathBuf,

    pub(crate) control: Control,
    /// The server's descriptors and memory for sessions.
    pub(crate) handles: HandleTable,
    pub(crate) secret: Secret,
    hasher: RandomState,

    // Events.
    pub(crate) poll: Poller<Source>,
    pub(crate) listener: ControlSocket,
    signals: Signals,
    pub(crate) clients: HashMap<ClientId, Client>,
    pub(crate) connections: Budget,
    pub(crate) slices: Slices,
    pub(crate) shares: Shares,
    /// Connections that are not read until their user may take more time.
    pub(crate) throttled: Vec<ClientId>,
    pub(crate) listings: Listings,
    /// Bytes of lists that clients have not read.
    pub(crate) lists: Budget,
    pub(crate) next_client: u64,
    pub(crate) channels: HashMap<ChannelId, Channel>,
    pub(crate) leaving_taps: LeavingTaps,
    pub(crate) lost_connections: LostConnections,
    pub(crate) channel_pool: ChannelPool,
    /// Sums of the counters of exited processes.
    pub(crate) ended: [u64; COUNTERS],
    pub(crate) buffer: Vec<u8>,
    pub(crate) calls: Calls,
    /// Requests whose answer waits for that of another one, which was before it.
    pub(crate) nested_reads: u32,
    /// Whether there were events in this turn.
    pub(crate) was_asked: bool,
    /// Since when the allocator may have memory to give back.
    pub(crate) memory_free_since: Option<Instant>,
    /// Whether all clients were read since the pending hang-ups were found.
    pub(crate) are_all_clients_read: bool,
    pub(crate) sink: Sink,

    // Packets.
    pub(crate) filter: Filter,
    /// None where the kernel does not support it: then a relayed session stays relayed.
    pub(crate) holder_count: Option<HolderCount>,
    /// Of the previous server.
    pub(crate) inheritance: Inheritance,
    pub(crate) rx_path: RxPath,
    pub(crate) stack: Stack,
    pub(crate) wire: TapWire,
    pub(crate) inject: TapWire,
    pub(crate) frame: Vec<u8>,
    pub(crate) cookie_clock: CookieClock,
    /// Until when the filter need not be told that cookies go out.
    pub(crate) cookies_noted: Instant,
    pub(crate) rx_throttle: RxThrottle,
    pub(crate) reset_limit: ResetLimit,
    pub(crate) early: EarlyFragments,
    /// Fast Open cookies granted by peers.
    pub(crate) fast_cookies: HashMap<IpAddr, portolan_tcp::GrantedCookie>,

    pub(crate) qos: Qos,
    pub(crate) raw_flows: RawFlows,
    pub(crate) extensions: Extensions,

    // The network.
    pub(crate) sysctls: Sysctls,
    pub(crate) network: Network,
    pub(crate) metastate: MetastateWriter,
    pub(crate) routes: Routes,
    pub(crate) generation: u32,
    pub(crate) managed: BTreeSet<u32>,
    pub(crate) hooks: HookWatch,
    pub(crate) policy: PolicyWatch,
    /// Whether the host has a policy of its own that new flows must obey, as the filter and the libraries know.
    pub(crate) obeys_policy: bool,
    /// Neighbours being resolved, and since when.
    pub(crate) resolving: HashMap<NextHop, Resolving>,
    /// Neighbours that have not answered, until the sessions that wait for them are told.
    pub(crate) unanswered: Vec<NextHop>,
    pub(crate) programs_resolve: Budget,
    reserved: Option<ReservedPorts>,

    // What sessions have beside their entry in the registry.
    pub(crate) pending_closes: Vec<PendingClose>,
    /// Relays that wait until nobody else has their end of the descriptor, and until when.
    pub(crate) foreign_ends: Vec<(SessionId, Instant)>,
    /// Why a device has no filter in its driver that was to have one.
    pub(crate) driver_refusals: HashMap<u32, String>,
    /// Rings of directly mapped sessions.
    pub(crate) directs: Directs,
    pub(crate) sharing: Sharing,
    pub(crate) locals: Locals,
    pub(crate) captures: Captures,
    /// Where wake-up sockets have their names for a moment.
    pub(crate) wake_directory: WakeDirectory,
    /// Exited processes whose sessions are still being ended.
    pub(crate) ending: VecDeque<Ending>,
    /// Closed sessions, to be forgotten when their last segment is sent.
    pub(crate) done: Vec<SessionId>,
    pub(crate) control_token: Token,
    pub(crate) shortage: Shortage,
    pub(crate) refused_calls: RefusedCalls,
}

impl Server {
    /// Acquires everything the server needs; releases it if something is missing.
    pub(crate) fn start(
        config: Config,
        source: ConfigSource,
        instance: &Instance,
    ) -> Result<Server, StartError> {
        let now = clock::now();
        let signals = Signals::watch(&[Signal::TERM, Signal::INT, Signal::HUP])?;
        let managed = config
            .interfaces
            .iter()
            .map(|name| device::by_name(name).map(|device| device.index))
            .collect::<Result<BTreeSet<u32>, DeviceError>>()?;
        let [first, last] = config.ephemeral_ports;
        let time_wait = u32::try_from(config.limits.time_wait).unwrap_or(FLOWS);
        let limits = portolan_bpf::Limits {
            flows: FLOWS + time_wait.min(FLOWS),
            bindings: config.limits.bindings + RAW_BINDINGS,
            shared: config.limits.shared_ports,
            groups: GROUPS.total as u32,
            channels: config.limits.processes + 1 + rings::RINGS,
        };
        let Loaded {
            mut filter,
            inheritance,
            is_refused,
        } = adoption::load(&managed, (&limits, &config.filter_settings()), now)?;
        let ends = filter.create_channel(ChannelId::SERVER, config.ring_size)?;
        let wire = Tap::create("ptl-srv")?;
        filter.attach_tap(ChannelId::SERVER, wire.ifindex)?;
        wire.bring_up()?;
        let inject = Tap::create("ptl-inj")?;
        filter.attach_inject_tap(inject.ifindex)?;
        inject.bring_up()?;
        let ring = Ring::map(&ends.ring, config.ring_size as usize)?;
        let doorbell = Doorbell::map(&ends.doorbell)?;
        let network = Network::follow()?;
        let hooks = HookWatch::start().map_err(StartError::HookWatch)?;
        let policy = PolicyWatch::start().map_err(StartError::PolicyWatch)?;
        let reserved = Some(reserve_ports(first..=last, instance)?);
        let listener = ControlSocket::bind(instance.socket())?;
        set_permissions(&config, instance.socket())?;

        let mut poll = Poller::new()?;
        let control_token = poll.add(&listener, Source::Control, EventFlags::IN)?;
        poll.add(&signals, Source::Signals, EventFlags::IN)?;
        poll.add(&*network.news, Source::Network, EventFlags::IN)?;
        poll.add(&*hooks.news, Source::Hooks, EventFlags::IN)?;
        poll.add(&*policy.news, Source::Policy, EventFlags::IN)?;
        poll.add(&ends.ring, Source::Ring, EventFlags::IN)?;
        let turns = Arc::new(DeviceTurns::default());
        let map_builder = filter.map_builder();
        let channel_pool =
            ChannelPool::new(map_builder, Arc::clone(&turns), config.ring_size, now)?;
        poll.add(&*channel_pool.notifier, Source::ChannelPool, EventFlags::IN)?;
        let leaving_taps = LeavingTaps::new(turns)?;
        poll.add(&*leaving_taps.notifier, Source::LeavingTaps, EventFlags::IN)?;
        let (wire, inject) = (TapWire::new(wire), TapWire::new(inject));
        let edge = EventFlags::OUT | EventFlags::ET;
        poll.add(&wire, Source::Wire, EventFlags::IN | edge)?;
        poll.add(&inject, Source::Inject, edge)?;

        let extensions = Extensions::new(filter.extensions.linkage(), config.extension.clone())?;
        poll.add(&*extensions.loader.notifier, Source::Loader, EventFlags::IN)?;

        let threads = Arc::new(UserThreads::default());
        let calls = Calls::new(Arc::clone(&threads))?;
        poll.add(&*calls.notifier, Source::Calls, EventFlags::IN)?;
        let wake_directory = WakeDirectory::make(instance).map_err(StartError::WakeDirectory)?;
        let locals = Locals::new(wake_directory.path())?;
        poll.add(&locals.wake_receiver, Source::EventNotifier, EventFlags::IN)?;

        let mut server = Server {
            control: Control::new(
                &config.limits.of_control(),
                PortTable::new(first..=last),
                now,
            ),
            handles: HandleTable::default(),
            secret: Secret(filter.secret_or(random_bytes())?),
            hasher: RandomState::new(),
            started: now,
            incarnation: random_u64(),
            now,
            stopping: None,
            are_requests_over: false,
            poll,
            listener,
            signals,
            clients: HashMap::new(),
            connections: Budget::new(config.limits.connections()),
            slices: Slices::new(config.limits.slice()),
            shares: Shares::new(config.limits.time_share),
            throttled: Vec::new(),
            listings: Listings::default(),
            next_client: 1,
            channels: HashMap::new(),
            leaving_taps,
            lost_connections: LostConnections::default(),
            channel_pool,
            ended: [0; COUNTERS],
            buffer: Vec::new(),
            nested_reads: 0,
            was_asked: false,
            memory_free_since: None,
            calls,
            are_all_clients_read: false,
            sink: Sink::new(threads),
            filter,
            inheritance,
            holder_count: load_holder_count(),
            rx_path: RxPath::new(ring, doorbell),
            stack: Stack::new(now),
            wire,
            inject,
            frame: Vec::new(),
            cookie_clock: CookieClock::default(),
            cookies_noted: now,
            rx_throttle: RxThrottle::default(),
            reset_limit: ResetLimit::default(),
            early: EarlyFragments::default(),
            fast_cookies: HashMap::new(),
            qos: Qos::new(&config),
            raw_flows: RawFlows::default(),
            extensions,
            sysctls: Sysctls::open(now),
            network,
            metastate: MetastateWriter::create()?,
            routes: Routes::default(),
            generation: 0,
            managed,
            hooks,
            policy,
            obeys_policy: false,
            resolving: HashMap::new(),
            unanswered: Vec::new(),
            lists: Budget::new(LISTS),
            programs_resolve: Budget::new(RESOLVING),
            reserved,
            pending_closes: Vec::new(),
            foreign_ends: Vec::new(),
            driver_refusals: HashMap::new(),
            directs: Directs::new(config.limits.processes),
            sharing: Sharing::new(config.limits.shared_ports()),
            locals,
            captures: Captures::default(),
            wake_directory,
            ending: VecDeque::new(),
            done: Vec::new(),
            control_token,
            shortage: Shortage::default(),
            refused_calls: RefusedCalls::default(),
            supervisor: Supervisor::new(),
            socket: instance.socket().to_owned(),
            source,
            config,
        };
        server.control.counters.inheritances_refused = u64::from(is_refused);
        server.keep_inheritance();
        server.load_guarantees(instance.socket());
        server.await_first_spare();
        server.start_links(instance);
        server.start_cpu(instance);
        // The tables are complete before the first packet reaches the filter.
        server.publish();
        server.take_up_connections();
        for ifindex in server.managed.clone() {
            server.filter_device(ifindex)?;
        }
        if let Err(failure) = server.filter.forget_endpoints(server.inheritance.ports()) {
            warn!(%failure, "endpoints of the previous server stay");
        }
        if let Err(refused) = server.apply_policies() {
            server.stop();
            return Err(refused.into());
        }
        server.grant_again();
        info!(
            interfaces = server.config.interfaces.join(","),
            socket = %instance.socket().display(),
            "ready"
        );
        server.control.timers.defer(Timer::Watchdog);
        server
            .supervisor
            .tell_ready(&server.config.interfaces.join(", "));
        server.forget_kept_connections();
        let kept = server
            .supervisor
            .keep(Kept::Tables, server.filter.heritage());
        if let Err(error) = kept {
            warn!(%error, "the service manager does not keep the tables");
        }
        Ok(server)
    }

    /// Serves until a signal stops the server.
    pub(crate) fn run(&mut self) -> Result<(), Errno> {
        while self.stopping.is_none() {
            self.turn(None)?;
        }
        Ok(())
    }

    /// Waits for events, and handles all of them.
    fn turn(&mut self, latest: Option<Instant>) -> Result<(), Errno> {
        let deadline = [self.deadline(), latest].into_iter().flatten().min();
        let deadline = match self.rx_throttle.next_look(self.now) {
            // The ring sends no wake-ups while throttled.
            Some(next) => [deadline, Some(next)].into_iter().flatten().min(),
            None if self.rx_path.fall_asleep() => deadline,
            None => Some(self.now),
        };
        let mut ready = self.poll.wait(clock::now(), deadline)?;
        // Root's requests are served first.
        ready.sort_by_cached_key(|ready| !self.is_roots(ready.source));
        self.now = clock::now();
        self.rx_path.wake_up(self.now);
        self.slices.begin_turn();
        self.are_all_clients_read = false;
        self.was_asked = !ready.is_empty();
        // Packets and requests that came after a change of the network find it changed.
        let news = |ready: &mut Ready<Source>| ready.source == Source::Network;
        for Ready { source, flags } in ready.extract_if(.., news) {
            self.dispatch(source, flags);
        }
        self.drain();
        for Ready { source, flags } in ready {
            self.dispatch(source, flags);
        }
        self.tell_of_left();
        // The edge of a frame on the tap may have been consumed by `poll_hangups`.
        self.drain();
        self.on_timers();
        self.stack.expire(self.now);
        self.settle();
        self.sink.flush();
        self.control.counters.calls_refused = self.refused_calls.look();
        Ok(())
    }

    fn is_roots(&self, source: Source) -> bool {
        let Source::Client(id) = source else {
            return false;
        };
        self.clients
            .get(&id)
            .is_some_and(|client| client.credentials.uid == 0)
    }

    fn dispatch(&mut self, source: Source, flags: EventFlags) {
        match source {
            Source::Control => self.accept_clients(),
            Source::Signals => self.on_signal(),
            Source::Network => self.on_network_change(),
            Source::Hooks => self.on_lost_hooks(),
            Source::Policy => self.on_policy_news(),
            Source::Ring => self.drain(),
            Source::Wire => self.wire.flush(),
            Source::Inject => self.inject.flush(),
            Source::ChannelPool => self.on_channel_pool(),
            Source::LeavingTaps => self.on_left_taps(),
            Source::Client(id) => self.serve_client(id, flags),
            Source::Descriptor(id) => self.on_descriptor(id, flags),
            Source::Reservation(id) if self.is_udp(id) => self.on_datagrams(id),
            Source::Reservation(id) => self.on_kernel_connections(id),
            Source::EventNotifier => self.on_notifier(),
            Source::Holder(class) => self.on_holder_gone(class),
            Source::Maker(key) => self.on_maker_gone(key),
            Source::Loader => self.on_loaded(),
            Source::Calls => self.on_calls(),
        }
    }

    /// Handles closed descriptors before a request whose answer depends on them.
    pub(crate) fn poll_hangups(&mut self) {
        self.are_all_clients_read = false;
        let ready = match self.poll.wait(self.now, Some(self.now)) {
            Ok(ready) => ready,
            Err(errno) => {
                warn!(%errno, "cannot look for closed descriptors");
                return;
            }
        };
        for Ready { source, flags } in ready {
            match source {
                // The others are reported again; an edge of these would be lost.
                Source::Wire | Source::Inject | Source::Descriptor(_) | Source::Reservation(_) => {
                    self.dispatch(source, flags);
                }
                _ => {}
            }
        }
    }

    fn on_signal(&mut self) {
        while let Some(signal) = self.signals.next() {
            match signal {
                Signal::HUP => self.reload_file(),
                Signal::INT => self.stop_soon(signal, Departure::ForGood),
                signal => self.stop_soon(signal, Departure::ForSuccessor),
            }
        }
    }

    fn stop_soon(&mut self, signal: Signal, departure: Departure) {
        info!(?signal, "stopping");
        self.stopping = Some(departure);
    }

    /// Sends what is due and handles changes, until there are no more.
    pub(crate) fn settle(&mut self) {
        loop {
            self.stack.output(self.now, &self.routes, &mut self.wire);
            let unresolved: Vec<NextHop> = self.stack.unresolved().collect();
            for next_hop in unresolved {
                self.resolve(next_hop);
            }
            let changed: Vec<_> = self.stack.changed().collect();
            if changed.is_empty() {
                break;
            }
            for (slot, events) in changed {
                self.on_changed(slot, events);
            }
        }
        // Their remaining segments are sent first.
        if !self.wire.is_full() {
            for id in std::mem::take(&mut self.done) {
                self.forget(id);
            }
        }
    }

    /// Returns when something is due without an event.
    fn deadline(&self) -> Option<Instant> {
        let deadlines = [self.stack.deadline(), self.control.timers.next()];
        deadlines.into_iter().flatten().min()
    }

    /// Tells the service manager that the loop is running.
    pub(crate) fn feed_watchdog(&mut self) {
        if let Some(interval) = self.supervisor.feed() {
            let next = self.now + interval;
            self.control.timers.arm(Timer::Watchdog, next);
        }
    }

    /// Ends what is the server's own. If another server may continue with programs or connections, leaves these, the
    /// filter and the ports to it; otherwise restores the host's state: detaches filters, resets connections, releases
    /// ports.
    pub(crate) fn stop(mut self) -> Departure {
        let _long_slice = LongSlice::begin();
        let departure = self.stopping.unwrap_or(Departure::ForSuccessor);
        self.supervisor.tell_stopping();
        match departure {
            Departure::ForSuccessor => self.record_guarantees(),
            Departure::ForGood => self.forget_guarantees(),
        }
        self.end_all_cpu();
        let mut ends = Vec::new();
        if departure == Departure::ForSuccessor {
            self.await_moves();
            self.read_last_requests();
            self.end_time_waits();
            ends = self.take_ends();
        }
        let held: Vec<SessionId> = self
            .control
            .registry
            .sessions()
            .map(|session| session.id)
            .collect();
        // A process that accepts must find the server gone when its listener hangs up.
        let mut ends_of_programs = Vec::new();
        let mut left = 0;
        for id in held {
            if departure == Departure::ForSuccessor
                && (self.is_left_to_successor(id) || self.can_hand_over(id))
            {
                left += 1;
                continue;
            }
            if self.handles.local(id).is_some() {
                if matches!(self.holder(id), Some(Holder::Process(..))) {
                    // Its process goes on with it.
                    self.handles.of(id).local = None;
                }
                self.forget(id);
                continue;
            }
            match (self.phase(id), self.server_slot(id)) {
                (Some(SessionPhase::Listening), _) => {
                    if departure == Departure::ForSuccessor {
                        self.leave_queue(id);
                    }
                    ends_of_programs.extend(self.take_far(id));
                    self.input(Input::ListeningEnds(id));
                    self.forget(id);
                }
                (Some(SessionPhase::Connecting), _) if departure == Departure::ForSuccessor => {
                    // So must one that connects: it asks the next one.
                    ends_of_programs.extend(self.take_far(id));
                    self.input(Input::Abort(id));
                }
                (_, Some(_)) => self.input(Input::Abort(id)),
                (_, None) => self.input(Input::Orphaned(id)),
            }
        }
        let end = clock::now() + SHUTDOWN_GRACE;
        while clock::now() < end && self.control.registry.session_count() > left {
            if let Err(errno) = self.turn(Some(end)) {
                warn!(%errno, "cannot take leave of peers");
                break;
            }
        }
        self.stop_links();
        // Without the filter, programs that wait for the next server would have to begin anew; and to attach it to a device
        // again costs the host packets.
        let is_awaited = self.control.registry.process_count() > 0;
        let is_continued =
            is_awaited || left > 0 || !ends.is_empty() || self.inheritance.has_flows();
        if departure == Departure::ForSuccessor && is_continued {
            self.leave_connections(ends);
            drop(ends_of_programs);
            info!(
                connections = left,
                "stopped; the next server may continue with connections"
            );
            return departure;
        }
        for ifindex in std::mem::take(&mut self.managed) {
            if let Err(failure) = self.filter.detach_interface(ifindex) {
                warn!(%failure, "the packet filter stays attached");
            }
        }
        if let Some(Err(failure)) = self.reserved.take().map(ReservedPorts::release) {
            warn!(%failure, "ephemeral ports stay reserved");
        }
        self.clients.clear();
        drop(ends_of_programs);
        self.supervisor.keep_nothing();
        info!("stopped");
        Departure::ForGood
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    /// Sessions that their processes have begun to return arrive, as does what threads have taken out of descriptors, and
    /// peers answer.
    fn await_moves(&mut self) {
        let is_moving = |session: &SessionEntry| {
            let is_suspended = matches!(&session.life, Life::Relayed(relay) if relay.is_suspended);
            is_suspended || session.awaited.is_some()
        };
        self.await_none(is_moving, clock::now() + MOVED_WITHIN);
        let is_opening = |session: &SessionEntry| matches!(session.life, Life::Connecting { .. });
        self.await_none(is_opening, clock::now() + OPENED_WITHIN);
    }

    /// Goes on until no session is as described.
    fn await_none(&mut self, is_awaited: impl Fn(&SessionEntry) -> bool, end: Instant) {
        while self.control.registry.sessions().any(&is_awaited) && clock::now() < end {
            if let Err(errno) = self.turn(Some(end)) {
                warn!(%errno, "cannot wait for sessions");
                break;
            }
        }
    }

    /// Leaves everything to the next server except what it cannot continue with.
    fn leave_connections(&mut self, ends: Vec<(LeftEnd, OwnedFd)>) {
        let handed_over: HashSet<SessionId> = self.hand_over_all(ends).into_iter().collect();
        let sessions = self.control.registry.sessions().map(|session| session.id);
        let lost: Vec<SessionId> = sessions
            .filter(|id| !self.is_left_to_successor(*id) && !handed_over.contains(id))
            .collect();
        for id in lost {
            self.forget(id);
        }
        self.listener.leave_path();
        // The next server finds the ports reserved.
        std::mem::forget(self.reserved.take());
        self.clients.clear();
    }

    /// Returns the parameters of a connection over `path`.
    pub(crate) fn tcp_config(&self, path: &Path, flow: &FlowKey, secret: &Secret) -> TcpConfig {
        TcpConfig {
            handle_room: self.handle_room(flow),
            ..path_config(&self.base_config(), path, flow, secret)
        }
    }

    /// Returns the parameters of connections on any path.
    pub(crate) fn base_config(&self) -> TcpConfig {
        let parameters = self.config.parameters();
        let sysctls = self.sysctls.values();
        TcpConfig {
            send_buffer: parameters.send_buffer.initial as usize,
            send_buffer_max: parameters.send_buffer.maximum as usize,
            receive_buffer: parameters.receive_buffer.initial as usize,
            receive_buffer_max: parameters.receive_buffer.maximum as usize,
            gso_max: parameters.gso_max as usize,
            // Unknown names were refused at the start.
            congestion: CongestionKind::from_name(&self.config.congestion).unwrap_or_default(),
            ecn: self.config.ecn().unwrap_or(sysctls.ecn),
            timestamps: sysctls.timestamps,
            sack: sysctls.sack,
            window_scaling: sysctls.window_scaling,
            ..TcpConfig::default()
        }
    }

    /// Of the initial numbers of connections that a user opens, here or from ports under lease: they do not go back when a
    /// port is used again.
    pub(crate) fn secret_of_opens(&self, uid: u32) -> Secret {
        self.secret.derive("opens", uid.into())
    }

    /// Of the offsets of timestamps of all connections that are opened from this host, for the same reason.
    pub(crate) fn secret_of_timestamps(&self) -> Secret {
        self.secret.derive("timestamps", 0)
    }

    pub(crate) fn hash(&self, value: impl std::hash::Hash) -> u64 {
        self.hasher.hash_one(value)
    }
}

fn load_holder_count() -> Option<HolderCount> {
    HolderCount::load()
        .inspect_err(|error| warn!(%error, "relayed sessions stay relayed"))
        .ok()
}

/// Undoes a dead server's reservation, then makes this server's.
fn reserve_ports(
    range: RangeInclusive<u16>,
    instance: &Instance,
) -> Result<ReservedPorts, ReserveError> {
    if let Some(record) = instance.leftover_ports() {
        ReservedPorts::adopt(record).release()?;
    }
    let reserved = ReservedPorts::reserve(range)?;
    if let Err(error) = instance.journal().record_ports(&reserved.record()) {
        warn!(%error, "the ports would stay reserved if this server died");
    }
    Ok(reserved)
}

/// Enlarges the table of descriptors while there is only one thread.
pub(crate) fn widen_descriptor_table() {
    if let Err(errno) = descriptor::widen_table(DESCRIPTOR_TABLE) {
        warn!(%errno, "the table of descriptors grows while the server runs");
    }
}

/// Raises the limit of descriptors, of which each session takes one or two.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: Some(DESCRIPTORS),
        maximum: Some(limit.maximum.unwrap_or(DESCRIPTORS).max(DESCRIPTORS)),
    };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        // Without CAP_SYS_RESOURCE: up to the hard limit.
        let granted = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(errno) = setrlimit(Resource::Nofile, granted) {
            warn!(%errno, "cannot raise the limit of descriptors");
        }
    }
}

/// Sets who may connect to the control socket.
pub(crate) fn set_permissions(config: &Config, path: &FilePath) -> Result<(), StartError> {
    use std::os::unix::fs::{PermissionsExt, chown};
    let failed = |what, reason: String| StartError::Permissions {
        what,
        path: path.display().to_string(),
        reason,
    };
    if let Some(group) = &config.socket_group {
        let gid = accounts::gid_of(group)
            .ok_or_else(|| failed("the group", format!("no group is named {group:?}")))?;
        chown(path, None, Some(gid)).map_err(|error| failed("the group", error.to_string()))?;
    }
    let mode = std::fs::Permissions::from_mode(config.socket_mode);
    std::fs::set_permissions(path, mode).map_err(|error| failed("the mode", error.to_string()))
}
