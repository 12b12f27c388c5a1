//! This process as a client of Portolan: one connection to the server, one channel, its sessions.
//!
//! Created when the program opens its first socket. A forked child registers anew when it needs to.

pub(crate) mod background;
pub(crate) mod cancel;
pub(crate) mod claims;
pub(crate) mod control;
pub(crate) mod inside;
pub(crate) mod installed;
pub(crate) mod outage;
mod recalls;
mod report;
pub(crate) mod vfork;

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use portolan_proto::control::{
    Delivery, HandshakeOptions, MappingChoice, Parameters, ReplyBody, RequestBody, Reuse,
};
use portolan_proto::{OLDEST_PROTOCOL, Speaks};
use portolan_sys::doorbell::Doorbell;
use portolan_sys::pi::{PiGuard, PiMutex};
use portolan_sys::port_right::{self, BoundPort};
use portolan_sys::ring::Ring;
use portolan_sys::rx_path::RxPath;
use portolan_sys::shm::{JournalWriter, MetastateReader, StatisticsWriter};
use portolan_sys::tap::TapIo;
use portolan_sys::unix::{self, ConnectError};
use portolan_sys::wait::WakeReceiver;
use portolan_sys::{clock, descriptor, namespace, owner};
use portolan_tcp::CongestionKind;
use portolan_types::{SessionId, Slot};
use rustix::io::Errno;

use crate::channel::Channel;
use crate::channel::layers;
use crate::channel::ring_events::RingEvents;
use crate::channel::rings::OwnRing;
use crate::descriptors;
use crate::process::background::BackgroundThread;
use crate::process::control::{Control, Lost};
use crate::process::outage::{Outage, Unanswered};
use crate::runtime::locals::Locals;
use crate::runtime::{Core, OwnerSignal, SharedMemory};
use crate::settings::{Mode, settings};
use crate::socket::Socket;
use crate::socket::pair::PairPool;
use crate::socket::table;
use crate::wait::spin::Spinner;

pub(crate) struct Process {
    pub(crate) control: Control,
    /// Incarnation of the server that the process is registered with.
    incarnation: AtomicU64,
    /// Held while the process registers with the successor of a lost server.
    renewal: Mutex<()>,
    /// Readable when the server recalls sessions.
    pub(crate) recall_event: WakeReceiver,
    /// Held while pending recalls are fetched and handled.
    pub(crate) recall_lock: Mutex<()>,
    /// Held while the handshakes of a listener are requested or given back: a thread of the program and the background
    /// thread may be about to do either.
    pub(crate) delegation_lock: Mutex<()>,
    /// Held while what closed sockets have left here is handed to a server.
    finishing: Mutex<()>,
    pub(crate) helper: BackgroundThread,
    /// Its holder runs with the priority of its waiters (ADR 2).
    core: PiMutex<Core>,
    pairs: Mutex<PairPool>,
    pub(crate) spinner: Spinner,
    defaults: Mutex<Defaults>,
    /// The loss of the server has been reported.
    pub(crate) has_warned: AtomicBool,
    /// Something other than sockets needs this connection to the server.
    pub(crate) stays: AtomicBool,
}

/// The reason why this process is not registered.
#[derive(Debug)]
pub(crate) enum NotRegistered {
    /// No server listens, or it went away during the attempt.
    Absent(String),
    /// The server refused this process.
    Refused(String),
}

impl NotRegistered {
    pub(crate) fn reason(&self) -> &str {
        let (NotRegistered::Absent(reason) | NotRegistered::Refused(reason)) = self;
        reason
    }
}

/// Defaults for sessions that do not choose themselves.
#[derive(Clone, Copy, Debug)]
struct Defaults {
    congestion: CongestionKind,
    delivery: Delivery,
    mapping: MappingChoice,
}

impl Defaults {
    fn of(parameters: &Parameters) -> Defaults {
        Defaults {
            // Only a server of another version could name an unknown algorithm.
            congestion: CongestionKind::from_name(&parameters.congestion).unwrap_or_default(),
            delivery: settings().delivery.unwrap_or(parameters.delivery),
            mapping: settings().mapping.unwrap_or(parameters.mapping),
        }
    }
}

/// The server's reply to a registering process.
struct Registration {
    incarnation: u64,
    tap: OwnedFd,
    /// None if the process continues with its own.
    ring: Option<(OwnedFd, RxPath)>,
    shared: SharedMemory,
    recall_event: OwnedFd,
    notifier: (OwnedFd, u64),
    cuts_datagrams: bool,
    parameters: Parameters,
}

/// How to proceed without Portolan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// Use the kernel's sockets.
    UseKernel,
    /// Fail: the user forbade kernel sockets.
    Refuse,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// This process no longer uses Portolan.
static IS_RENOUNCED: AtomicBool = AtomicBool::new(false);
static IS_FORKED: AtomicBool = AtomicBool::new(false);
/// A server's control socket, and the network namespace of the thread that found it.
#[derive(Clone)]
struct Server {
    path: PathBuf,
    /// `None` without `/proc`.
    namespace: Option<u64>,
}

/// The server of this process's sockets: the one where it, or its parent, registered.
static SERVER: Mutex<Option<Server>> = Mutex::new(None);
/// The network namespace before a thread first changed its own; `PORTOLAN_SOCKET` applies to this one.
static FIRST_NAMESPACE: OnceLock<u64> = OnceLock::new();
impl Process {
    /// Returns the process if it is registered.
    pub(crate) fn running() -> Option<&'static Process> {
        portolan_sys::leak::load(&CURRENT)
    }

    /// Has this process registered, or a parent of it before the fork?
    pub(crate) fn knows_server() -> bool {
        let known = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        known.is_some()
    }

    /// Is the calling thread in the network namespace of the server, if that is known?
    pub(crate) fn serves_namespace() -> bool {
        let known = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        // Without `/proc` the namespace is unknown, and a thread that has moved must not reach out of its new one.
        known.as_ref().is_none_or(|server| {
            namespace::inode().is_ok_and(|here| server.namespace == Some(here))
        })
    }

    /// The next server is that of the registering thread's network namespace.
    pub(crate) fn clear_server() {
        *SERVER.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Called before the calling thread, or a child that it forks, changes its network namespace.
    pub(crate) fn before_move() {
        if let Ok(inode) = namespace::inode() {
            FIRST_NAMESPACE.get_or_init(|| inode);
        }
    }

    /// Makes a request that does not need registration. While the server is being restarted it waits for the next one,
    /// as long as that may know the session behind the descriptor.
    pub(crate) fn ask(
        request: impl Fn() -> RequestBody,
        descriptor: BorrowedFd<'_>,
    ) -> Option<(ReplyBody, Vec<OwnedFd>)> {
        let mut outage = Outage::begin();
        loop {
            let asked = match Process::running() {
                Some(process) => process
                    .control
                    .call(request(), &[descriptor])
                    .map_err(|Lost| Unanswered::NoServer),
                None => Process::ask_briefly(request(), descriptor),
            };
            match asked {
                Ok(answer) => {
                    outage::note_end();
                    return Some(answer);
                }
                // What a service manager keeps for the next server has not hung up.
                Err(why) if unix::has_hung_up(descriptor) || !outage.goes_on(why) => return None,
                Err(_) => {}
            }
        }
    }

    /// As [`Process::ask`], on a connection of its own, and without waiting.
    pub(crate) fn ask_briefly(
        request: RequestBody,
        descriptor: BorrowedFd<'_>,
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Unanswered> {
        if settings().mode == Mode::Off {
            return Err(Unanswered::Refused);
        }
        let server = server().map_err(|_| Unanswered::Refused)?;
        let control = Control::connect_briefly(&server.path).map_err(|error| match error {
            ConnectError::NoServer => Unanswered::NoServer,
            ConnectError::Failed(_) => Unanswered::Refused,
        })?;
        let answer = control.call(request, &[descriptor]);
        answer.map_err(|Lost| Unanswered::HungUp)
    }

    /// Does no filter deliver packets to this process any more? A server that ends for good removes its filter, its
    /// socket and its lock file. Otherwise sessions continue until the next server answers: one that died has left all
    /// three, and one that starts replaces the socket, which is missing for a moment, under the lock.
    pub(crate) fn is_cut_off() -> bool {
        server().is_ok_and(|Server { path, .. }| {
            !path.exists() && !namespace::lock_path(&path).exists()
        })
    }

    /// Gives up Portolan: existing sockets are left alone, and no more are opened.
    pub(crate) fn renounce() {
        IS_RENOUNCED.store(true, Ordering::Relaxed);
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
    }

    pub(crate) fn is_renounced() -> bool {
        IS_RENOUNCED.load(Ordering::Relaxed)
    }

    /// Is this a child of fork that has not requested a channel of its own yet?
    pub(crate) fn is_new_child() -> bool {
        IS_FORKED.load(Ordering::Relaxed) && Process::running().is_none()
    }

    pub(crate) fn note_fork() {
        IS_FORKED.store(true, Ordering::Relaxed);
    }

    /// Called in a forked child, which must not use the parent's channel.
    pub(crate) fn forget() {
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Registers with a server. `work` is what the background thread does. Kept out of its callers, whose stack it would
    /// make large: children of fork have none of its pages.
    #[inline(never)]
    pub(crate) fn register(
        work: fn(&'static Process, RingEvents),
    ) -> Result<&'static Process, NotRegistered> {
        let server = server().map_err(NotRegistered::Refused)?;
        let path = server.path.clone();
        let control = Control::connect(&path).map_err(|error| {
            let reason = format!("{}: {error}", path.display());
            match error {
                ConnectError::NoServer => NotRegistered::Absent(reason),
                ConnectError::Failed(_) => NotRegistered::Refused(reason),
            }
        })?;
        let registration = Registration::with(&control, &path, None)?;
        let process =
            Process::with_channel(control, registration, work).map_err(NotRegistered::Refused)?;
        // A capture has the first byte, too. There is no session yet.
        let recalled = process.fetch_recalls();
        debug_assert!(recalled.is_empty());
        *SERVER.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
        Ok(portolan_sys::leak::store(&CURRENT, process))
    }

    /// Returns when no other thread hands in what closed sockets have left.
    pub(crate) fn finishing(&self) -> MutexGuard<'_, ()> {
        self.finishing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers with the server that listens in place of the lost one. This ends connections, unless the server gives
    /// this process its channel back; the caller has the sockets reopened (`migration::reopen`).
    pub(crate) fn renew(&'static self) -> Result<(), NotRegistered> {
        let _renewal = self.renewal.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.control.is_lost() {
            return Ok(());
        }
        let path = server().map_err(NotRegistered::Absent)?.path;
        let control = Control::connect_briefly(&path)
            .map_err(|error| NotRegistered::Absent(error.to_string()))?;
        let ring = self.lock().channel.ring_fd().as_raw_fd();
        let ring = descriptor::borrow(ring).ok();
        let registration = Registration::with(&control, &path, ring)?;
        self.take_registration(&control, registration)
            .map_err(|errno| NotRegistered::Refused(errno.to_string()))?;
        let mut core = self.lock();
        core.locals.retry_unwoken();
        core.look_at_locals(clock::now());
        drop(core);
        self.has_warned.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn take_registration(&self, control: &Control, new: Registration) -> Result<(), Errno> {
        let mut core = self.lock();
        // Its device goes with the last descriptor, which takes the kernel milliseconds.
        let old_tap = descriptors::hidden_copy(core.channel.tap_fd(), u64::MAX);
        let now = clock::now();
        match new.ring {
            Some((ring_fd, rx_path)) => {
                core.renew(now, (new.tap.as_fd(), ring_fd.as_fd()), rx_path, new.shared)?;
            }
            None => core.carry_on(now, new.tap.as_fd(), new.shared)?,
        }
        core.channel.cuts_datagrams = new.cuts_datagrams;
        core.locals.renew(new.notifier.0, new.notifier.1);
        descriptors::renumber(new.recall_event.as_fd(), self.recall_event.as_fd())?;
        *self.defaults() = Defaults::of(&new.parameters);
        self.incarnation.store(new.incarnation, Ordering::Release);
        drop(core);
        drop(old_tap);
        // From here on calls go to the new server.
        self.control.renew(control)
    }

    /// Returns the incarnation of the server that this process is registered with.
    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation.load(Ordering::Acquire)
    }

    fn defaults(&self) -> MutexGuard<'_, Defaults> {
        self.defaults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_channel(
        control: Control,
        registration: Registration,
        work: fn(&'static Process, RingEvents),
    ) -> Result<Process, String> {
        let Registration {
            incarnation,
            tap,
            ring,
            shared,
            recall_event,
            notifier: (notifier, number),
            cuts_datagrams,
            parameters,
        } = registration;
        let (ring_fd, rx_path) = ring.ok_or("the server sent no ring")?;
        let (tap, ring_fd) = (descriptors::hide(tap), descriptors::hide(ring_fd));
        let channel = Channel::new(TapIo::new(tap), rx_path, ring_fd);
        let locals = Locals::new(notifier, number);
        let mut core = Core::new(clock::now(), channel, locals, shared);
        core.channel.cuts_datagrams = cuts_datagrams;
        if layers::start() {
            core.stack.observe(layers::on_step);
        }
        let spin_us = settings().spin_us.unwrap_or(parameters.spin_us);
        Ok(Process {
            control,
            incarnation: AtomicU64::new(incarnation),
            renewal: Mutex::new(()),
            spinner: Spinner::new(Duration::from_micros(spin_us.into())),
            defaults: Mutex::new(Defaults::of(&parameters)),
            recall_event: WakeReceiver::from_fd(descriptors::hide(recall_event)),
            recall_lock: Mutex::new(()),
            delegation_lock: Mutex::new(()),
            finishing: Mutex::new(()),
            helper: BackgroundThread::new(work).map_err(|e| e.to_string())?,
            has_warned: AtomicBool::new(false),
            stays: AtomicBool::new(false),
            core: PiMutex::new(core),
            pairs: Mutex::default(),
        })
    }

    /// Shows the server that this program may bind `wanted`. The socket that proves it is closed on both sides when this
    /// returns, so that the port is free.
    pub(crate) fn show_right_to(&self, wanted: BoundPort, reuse: Reuse) -> Result<(), Errno> {
        let right = descriptors::InternalFd::new(port_right::show(wanted, reuse)?);
        self.show_right_by(right.as_fd());
        Ok(())
    }

    /// As [`Process::show_right_to`], by a socket that proves it.
    pub(crate) fn show_right_by(&self, socket: BorrowedFd<'_>) {
        // If the server is gone, the next request fails.
        let _ = self.control.call(RequestBody::ShowRight, &[socket]);
    }

    /// Returns the default congestion control.
    pub(crate) fn congestion(&self) -> CongestionKind {
        self.defaults().congestion
    }

    /// Returns the default delivery form.
    pub(crate) fn delivery(&self) -> Delivery {
        self.defaults().delivery
    }

    /// Returns what the server is to know of a socket that connects or listens.
    pub(crate) fn handshake_options(&self, socket: &Socket) -> HandshakeOptions {
        let options = socket.options().handshake();
        HandshakeOptions {
            delivery: options.delivery.or(Some(self.delivery())),
            ..options
        }
    }

    /// Returns the default receive ring.
    pub(crate) fn mapping(&self) -> MappingChoice {
        self.defaults().mapping
    }

    /// Requests a receive ring of its own for a session that is held here. If it gets none, its
    /// frames keep coming by the channel's ring, and the server shows the reason.
    pub(crate) fn map_directly(&self, session: SessionId) {
        let Ok((
            ReplyBody::Direct {
                ring_size: Some(size),
            },
            fds,
        )) = self.control.call(RequestBody::Direct { session }, &[])
        else {
            return;
        };
        let ring = <[OwnedFd; 2]>::try_from(fds)
            .ok()
            .and_then(|[ring, doorbell]| OwnRing::map(ring, &doorbell, size));
        match ring {
            Some(ring) => self.lock().add_ring(clock::now(), ring),
            None => {
                // Without a server nothing changes any more.
                let _ = self.control.tell(RequestBody::RefuseRing { session }, &[]);
            }
        }
    }

    /// Has the server send the session's frames with this priority. Without a server this has no effect.
    pub(crate) fn prioritize(&self, session: SessionId, priority: u8) {
        let request = RequestBody::Prioritize { session, priority };
        let _ = self.control.call(request, &[]);
    }

    /// Whether listeners that do not choose perform their handshakes here (`portolan run --delegate`).
    pub(crate) fn wants_delegation(&self) -> Option<bool> {
        settings().delegates
    }

    pub(crate) fn lock(&self) -> CoreGuard<'_> {
        CoreGuard {
            guard: Some(self.core.lock()),
            process: self,
        }
    }

    /// Returns `None` if a thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<CoreGuard<'_>> {
        Some(CoreGuard {
            guard: Some(self.core.try_lock()?),
            process: self,
        })
    }

    /// Socket pairs for connections that the server does not know.
    pub(crate) fn pairs(&self) -> MutexGuard<'_, PairPool> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a thread hold the lock at the moment?
    pub(crate) fn is_locked(&self) -> bool {
        self.core.is_held()
    }

    /// Sends messages of the sessions. Without a server they are dropped, and the sessions continue; returns the frames that
    /// were to be passed on.
    fn tell_all(&self, messages: Vec<RequestBody>) -> Vec<Vec<u8>> {
        let mut refused = Vec::new();
        for message in messages {
            if let Err(message) = self.control.tell_or_return(message, &[])
                && let RequestBody::MisdeliveredFrame { frame } = *message
            {
                refused.push(frame);
            }
        }
        refused
    }

    /// Notifies the peer of a local session whose notifier is not known here yet.
    fn notify_unknown_peer(&self, session: SessionId, slot: Slot) {
        let Some(number) = self.lock().locals.peer_notifier(slot) else {
            return;
        };
        let request = RequestBody::PeerNotifier { session, number };
        let answer = self.control.call(request, &[]);
        let mut core = self.lock();
        match answer {
            Ok((ReplyBody::PeerNotifier { number }, fds)) => {
                if let Some(wake_sender) = fds.into_iter().next() {
                    core.locals.learn(slot, number, wake_sender);
                }
            }
            // Until there is a server the peer looks for itself now and then.
            _ => core.locals.note_unwoken(session, slot),
        }
    }
}

/// The lock on `Core`. Messages of the sessions to the server are sent when it is released.
pub(crate) struct CoreGuard<'a> {
    /// `Some` until dropped.
    guard: Option<PiGuard<'a, Core>>,
    process: &'a Process,
}

impl Deref for CoreGuard<'_> {
    type Target = Core;
    fn deref(&self) -> &Core {
        self.guard.as_ref().expect("there until dropped")
    }
}

impl DerefMut for CoreGuard<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.guard.as_mut().expect("there until dropped")
    }
}

impl Drop for CoreGuard<'_> {
    fn drop(&mut self) {
        self.report_local_events();
        self.settle_watch();
        if !self.has_messages() {
            self.guard = None;
            return;
        }
        let outbox = self.take_outbox();
        let pending_signals = self.take_pending_signals();
        let unknown_peers = self.locals.take_unknown_peers();
        self.guard = None;
        for (socket, signal) in pending_signals {
            match (table::numbers_of(&socket).first(), signal) {
                (Some(fd), OwnerSignal::Urgent) => owner::raise_sigurg(*fd),
                (Some(fd), OwnerSignal::Io(event)) => owner::raise_sigio(*fd, event),
                (None, _) => {}
            }
        }
        let refused = self.process.tell_all(outbox);
        if !refused.is_empty() {
            self.process.lock().take_back_frames(clock::now(), &refused);
        }
        for (session, slot) in unknown_peers {
            self.process.notify_unknown_peer(session, slot);
        }
    }
}

impl Registration {
    /// Registers over a connection to the server that listens at `path`. `ring` is that of the channel under the previous
    /// server.
    fn with(
        control: &Control,
        path: &Path,
        ring: Option<BorrowedFd<'_>>,
    ) -> Result<Registration, NotRegistered> {
        let (reply, fds) = greet(control, ring)
            .map_err(|Lost| NotRegistered::Absent("the server hung up".to_string()))?;
        let refused = |reason: String| Err(NotRegistered::Refused(reason));
        match reply {
            ReplyBody::Welcome {
                incarnation,
                continues,
                ring_size,
                cuts_datagrams,
                parameters,
                notifier,
                ..
            } => {
                let mut fds = VecDeque::from(fds);
                let tap = fds.pop_front();
                let brought = if continues && ring.is_some() { 0 } else { 2 };
                let maps: Vec<OwnedFd> = fds.drain(..fds.len().min(brought)).collect();
                let (Some(tap), Ok([metastate, statistics, journal, recall_event, receiver])) =
                    (tap, <[OwnedFd; 5]>::try_from(Vec::from(fds)))
                else {
                    return refused("the server sent no channel".to_string());
                };
                let mapped = || -> Result<_, String> {
                    let ring = map_ring(maps, ring_size)?;
                    let metastate = MetastateReader::map(&metastate).map_err(|e| e.to_string())?;
                    let statistics =
                        StatisticsWriter::map(&statistics).map_err(|e| e.to_string())?;
                    let journal = JournalWriter::map(&journal).map_err(|e| e.to_string())?;
                    let shared = SharedMemory {
                        metastate,
                        statistics,
                        journal,
                    };
                    Ok((ring, shared))
                };
                let (ring, shared) = mapped().map_err(NotRegistered::Refused)?;
                Ok(Registration {
                    incarnation,
                    tap,
                    ring,
                    shared,
                    recall_event,
                    notifier: (receiver, notifier),
                    cuts_datagrams,
                    parameters,
                })
            }
            ReplyBody::Error {
                errno: libc::EPROTO,
            } => refused(format!(
                "{}: the server is of another version than this program's library",
                path.display()
            )),
            ReplyBody::Error { errno } => {
                let error = std::io::Error::from_raw_os_error(errno);
                refused(format!("the server refused: {error}"))
            }
            _ => refused("the server gave no sensible answer".to_string()),
        }
    }
}

/// Sends `Hello`. Servers of before there was a range of protocols understand only their own.
fn greet(
    control: &Control,
    ring: Option<BorrowedFd<'_>>,
) -> Result<(ReplyBody, Vec<OwnedFd>), Lost> {
    let hello = |speaks: Speaks| RequestBody::Hello {
        version: speaks.word(),
        program: program(),
    };
    let (reply, fds) = control.call(hello(Speaks::OWN), ring.as_slice())?;
    match reply {
        ReplyBody::Error {
            errno: libc::EPROTO,
        } => control.call(hello(Speaks::only(OLDEST_PROTOCOL)), ring.as_slice()),
        reply => Ok((reply, fds)),
    }
}

/// Maps the ring and the doorbell of a new channel, if the server has sent one.
fn map_ring(maps: Vec<OwnedFd>, size: u32) -> Result<Option<(OwnedFd, RxPath)>, String> {
    let Ok([ring_fd, doorbell]) = <[OwnedFd; 2]>::try_from(maps) else {
        return Ok(None);
    };
    let ring = Ring::map(&ring_fd, size as usize).map_err(|e| e.to_string())?;
    let doorbell = Doorbell::map(&doorbell).map_err(|e| e.to_string())?;
    Ok(Some((ring_fd, RxPath::new(ring, doorbell))))
}

/// Returns the server of the existing sockets, or else that of the calling thread's network namespace.
fn server() -> Result<Server, String> {
    let known = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    known.clone().map_or_else(server_here, Ok)
}

fn server_here() -> Result<Server, String> {
    let inode = namespace::inode();
    let is_first = FIRST_NAMESPACE
        .get()
        .is_none_or(|first| inode == Ok(*first));
    let path = match &settings().socket {
        Some(path) if is_first => path.clone(),
        _ => namespace::control_path().map_err(|e| format!("no network namespace: {e}"))?,
    };
    Ok(Server {
        path,
        namespace: inode.ok(),
    })
}

/// Returns the program's name as shown by ps(1) and ss(8). The command line may have been rewritten; it completes a
/// truncated name.
fn program() -> String {
    /// Maximum length of a task's name, in bytes.
    const LONGEST: usize = 15;
    let called = called();
    let Ok(name) = std::fs::read_to_string("/proc/self/comm") else {
        return called;
    };
    let name = name.trim_end();
    if called.starts_with(name) && name.len() == LONGEST {
        called
    } else {
        name.to_owned()
    }
}

fn called() -> String {
    std::env::args_os()
        .next()
        .and_then(|path| {
            Some(
                PathBuf::from(path)
                    .file_name()?
                    .to_string_lossy()
                    .into_owned(),
            )
        })
        .unwrap_or_else(|| "?".to_string())
}
