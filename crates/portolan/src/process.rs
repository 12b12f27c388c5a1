//! This process as Portolan sees it: one connection to the server, one channel, its sessions.
//!
//! Made when the program opens its first socket. A forked child starts anew, when it needs to.

pub(crate) mod cancel;
pub(crate) mod control;
pub(crate) mod inside;
pub(crate) mod limit;
pub(crate) mod report;
pub(crate) mod settings;

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use portolan_proto::PROTOCOL;
use portolan_proto::control::{Delivery, MappingChoice, Parameters, ReplyBody, RequestBody};
use portolan_sys::doorbell::Doorbell;
use portolan_sys::pi::{PiGuard, PiMutex};
use portolan_sys::ring::Ring;
use portolan_sys::rx_path::RxPath;
use portolan_sys::shm::{MetastateReader, StatisticsWriter};
use portolan_sys::tap::TapIo;
use portolan_sys::unix::Connection;
use portolan_sys::wait::WakeReceiver;
use portolan_sys::{clock, namespace, owner, port_right, thread};
use portolan_tcp::CongestionKind;
use portolan_types::{Instant, SessionId, Slot};
use rustix::io::Errno;

use crate::channel::Channel;
use crate::channel::layers;
use crate::channel::rings::OwnRing;
use crate::posix;
use crate::process::control::{Control, Lost};
use crate::process::settings::{Mode, complain, complain_of, settings};
use crate::runtime::locals::Locals;
use crate::runtime::{Alarm, Core};
use crate::socket::table;
use crate::wait::helper;
use crate::wait::spin::Spinner;

/// After a failed attempt, how long sockets are the kernel's before the server is tried again.
const RETRY: Duration = Duration::from_secs(1);

pub(crate) struct Process {
    pub(crate) control: Control,
    pub(crate) statistics: StatisticsWriter,
    /// Becomes readable when the server wants sessions back.
    pub(crate) recall_event: WakeReceiver,
    /// Held while what it was set for is fetched and done.
    pub(crate) recall_lock: Mutex<()>,
    pub(crate) helper: helper::BackgroundThread,
    /// Who holds it runs with the priority of who waits (ADR 2).
    core: PiMutex<Core>,
    pub(crate) spinner: Spinner,
    congestion: CongestionKind,
    delivery: Delivery,
    mapping: MappingChoice,
    /// That the server has gone was said.
    has_warned: AtomicBool,
    /// Something here besides sockets needs this connection to the server.
    stays: AtomicBool,
}

/// Why there is no Portolan for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// Use the kernel's sockets.
    UseKernel,
    /// The user forbade that.
    Refuse,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// This process does without Portolan from now on.
static IS_RENOUNCED: AtomicBool = AtomicBool::new(false);
static IS_FORKED: AtomicBool = AtomicBool::new(false);
static STARTING: Mutex<Option<Instant>> = Mutex::new(None);

/// A server's control socket, and the network namespace of the thread that found it.
#[derive(Clone)]
struct Server {
    path: PathBuf,
    /// None without `/proc`.
    namespace: Option<u64>,
}

/// The server of the sockets that this process has: it registered there, or its parent did.
static SERVER: Mutex<Option<Server>> = Mutex::new(None);
/// The network namespace before a thread first changed its own: `PORTOLAN_SOCKET` is meant for that one.
static FIRST_NAMESPACE: OnceLock<u64> = OnceLock::new();
/// A thread of this process, or of a parent, has changed its network namespace.
static HAS_MOVED: AtomicBool = AtomicBool::new(false);
/// How often this process has left its server for that of another namespace.
static RESTARTS: AtomicU32 = AtomicU32::new(0);

/// What a process leaves behind in its memory each time is bounded so.
const RESTARTS_MAX: u32 = 16;

impl Process {
    /// The process if it has been started.
    pub(crate) fn running() -> Option<&'static Process> {
        portolan_sys::leak::load(&CURRENT)
    }

    /// The process, started now if it has to be.
    pub(crate) fn start() -> Result<&'static Process, Absent> {
        if let Some(process) = Process::running() {
            return if process.control.is_lost() {
                process.without_server()
            } else {
                Ok(process)
            };
        }
        complain();
        let mode = settings().mode;
        if mode == Mode::Off || IS_RENOUNCED.load(Ordering::Relaxed) {
            return Err(Absent::UseKernel);
        }
        let mut tried = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(process) = Process::running() {
            return Ok(process);
        }
        let now = clock::now();
        if tried.is_some_and(|last| now.since(last) < RETRY) {
            return absent(mode);
        }
        let is_first = tried.replace(now).is_none();
        match Process::register() {
            Ok(process) => Ok(portolan_sys::leak::store(&CURRENT, process)),
            Err(reason) => {
                if is_first {
                    warn(&reason, mode);
                }
                absent(mode)
            }
        }
    }

    /// As [`Process::start`], but notices that the server has gone, however quietly.
    /// It is the server of the network namespace that the calling thread is in.
    pub(crate) fn for_new_socket() -> Result<&'static Process, Absent> {
        if HAS_MOVED.load(Ordering::Relaxed) {
            Process::follow_namespace()?;
        }
        let process = Process::start()?;
        if process.control.has_hung_up() {
            return process.without_server();
        }
        Ok(process)
    }

    /// As [`Process::start`], for what lasts as long as the process's connection to the server does.
    pub(crate) fn start_to_stay() -> Result<&'static Process, Absent> {
        let process = Process::start()?;
        process.stays.store(true, Ordering::Relaxed);
        Ok(process)
    }

    /// Has this process registered, or a parent of it before the fork?
    pub(crate) fn knows_server() -> bool {
        let known = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        known.is_some()
    }

    /// The calling thread, or a child that it forks, is about to change its network namespace.
    pub(crate) fn before_move() {
        if let Ok(inode) = namespace::inode() {
            FIRST_NAMESPACE.get_or_init(|| inode);
        }
    }

    /// What was found in one network namespace says nothing of the next.
    pub(crate) fn after_move() {
        HAS_MOVED.store(true, Ordering::Relaxed);
        if Process::running().is_none() {
            *STARTING.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The sockets of one process have one server. In another namespace than that server's, a process without sockets
    /// starts anew; one that has sockets gets the kernel's.
    fn follow_namespace() -> Result<(), Absent> {
        let known = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        // Without `/proc` it cannot be told, and who has moved is not to get out of where it is.
        let is_here = known.as_ref().is_none_or(|server| {
            namespace::inode().is_ok_and(|here| server.namespace == Some(here))
        });
        drop(known);
        if is_here || IS_RENOUNCED.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mode = settings().mode;
        if table::has_sockets() || posix::shares_memory() {
            return absent(mode);
        }
        if let Some(process) = Process::running() {
            let is_free = !process.stays.load(Ordering::Relaxed) && process.has_one_thread();
            if !is_free || RESTARTS.fetch_add(1, Ordering::Relaxed) >= RESTARTS_MAX {
                return absent(mode);
            }
            process.stop_helper();
            posix::part_with_server();
        }
        *SERVER.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }

    /// The sessions that are here go on; new sockets are the kernel's. Says so once.
    fn without_server<T>(&self) -> Result<T, Absent> {
        let mode = settings().mode;
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            warn("the server has gone", mode);
        }
        absent(mode)
    }

    /// One request for which nobody has to be registered.
    pub(crate) fn ask(
        request: RequestBody,
        descriptor: BorrowedFd<'_>,
    ) -> Option<(ReplyBody, Vec<OwnedFd>)> {
        match Process::running() {
            Some(process) => process.control.call(request, &[descriptor]).ok(),
            None => Process::ask_briefly(request, descriptor),
        }
    }

    /// The same on a connection of its own.
    pub(crate) fn ask_briefly(
        request: RequestBody,
        descriptor: BorrowedFd<'_>,
    ) -> Option<(ReplyBody, Vec<OwnedFd>)> {
        if settings().mode == Mode::Off {
            return None;
        }
        let control = Control::connect_briefly(&server().ok()?.path).ok()?;
        control.call(request, &[descriptor]).ok()
    }

    /// Does no filter send packets here any more? A server that stops takes its filter along and
    /// removes its socket; one that starts replaces both. A server that died has left them, and
    /// the sessions go on.
    pub(crate) fn is_cut_off(&self) -> bool {
        server()
            .is_ok_and(|Server { path, .. }| !path.exists() || Connection::connect(&path).is_ok())
    }

    /// What the process has here is left to itself, and nothing more is opened.
    pub(crate) fn renounce() {
        IS_RENOUNCED.store(true, Ordering::Relaxed);
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// In a child of fork, before it has asked for a channel of its own.
    pub(crate) fn is_new_child() -> bool {
        IS_FORKED.load(Ordering::Relaxed) && Process::running().is_none()
    }

    pub(crate) fn note_fork() {
        IS_FORKED.store(true, Ordering::Relaxed);
    }

    /// In a forked child: the parent's channel is not ours.
    pub(crate) fn forget() {
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
        *STARTING.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn register() -> Result<Process, String> {
        let server = server()?;
        let path = server.path.clone();
        let control =
            Control::connect(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let hello = RequestBody::Hello {
            version: PROTOCOL,
            program: program(),
        };
        let (reply, fds) = control
            .call(hello, &[])
            .map_err(|Lost| "the server hung up".to_string())?;
        match reply {
            ReplyBody::Welcome {
                ring_size,
                cuts_datagrams,
                parameters,
                notifier,
                ..
            } => {
                let mut process =
                    Process::with_channel(control, (ring_size, notifier), parameters, fds)?;
                process.core_mut().channel.cuts_datagrams = cuts_datagrams;
                *SERVER.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
                Ok(process)
            }
            ReplyBody::Error {
                errno: libc::EPROTO,
            } => Err(format!(
                "{}: the server is of another version than this program's library",
                path.display()
            )),
            ReplyBody::Error { errno } => {
                let error = std::io::Error::from_raw_os_error(errno);
                Err(format!("the server refused: {error}"))
            }
            _ => Err("the server gave no sensible answer".to_string()),
        }
    }

    /// While nobody else has it.
    fn core_mut(&mut self) -> &mut Core {
        self.core.get_mut()
    }

    fn with_channel(
        control: Control,
        (ring_size, number): (u32, u64),
        parameters: Parameters,
        fds: Vec<OwnedFd>,
    ) -> Result<Process, String> {
        let Ok(
            [
                tap,
                ring_fd,
                doorbell,
                metastate,
                statistics,
                recall_event,
                notifier,
            ],
        ) = <[OwnedFd; 7]>::try_from(fds)
        else {
            return Err("the server sent no channel".to_string());
        };
        let (tap, ring_fd) = (table::hide(tap), table::hide(ring_fd));
        let ring = Ring::map(&ring_fd, ring_size as usize).map_err(|e| e.to_string())?;
        let doorbell = Doorbell::map(&doorbell).map_err(|e| e.to_string())?;
        let metastate = MetastateReader::map(&metastate).map_err(|e| e.to_string())?;
        let statistics = StatisticsWriter::map(&statistics).map_err(|e| e.to_string())?;
        let channel = Channel::new(TapIo::new(tap), RxPath::new(ring, doorbell), ring_fd);
        let locals = Locals::new(notifier, number);
        let mut core = Core::new(clock::now(), channel, locals, metastate);
        if layers::start() {
            core.stack.observe(layers::on_step);
        }
        let spin_us = settings().spin_us.unwrap_or(parameters.spin_us);
        Ok(Process {
            control,
            spinner: Spinner::new(Duration::from_micros(spin_us.into())),
            // A name that this library does not know is not its own server's.
            congestion: CongestionKind::from_name(&parameters.congestion).unwrap_or_default(),
            delivery: settings().delivery.unwrap_or(parameters.delivery),
            mapping: settings().mapping.unwrap_or(parameters.mapping),
            statistics,
            recall_event: WakeReceiver::from_fd(table::hide(recall_event)),
            recall_lock: Mutex::new(()),
            helper: helper::BackgroundThread::new().map_err(|e| e.to_string())?,
            has_warned: AtomicBool::new(false),
            stays: AtomicBool::new(false),
            core: PiMutex::new(core),
        })
    }

    /// Has the program a single thread?
    pub(crate) fn has_one_thread(&self) -> bool {
        thread::count() <= 1 + usize::from(self.helper.is_started())
    }

    /// Shows the server that this program may bind `local`'s port. The socket that shows it is closed here before the
    /// next request, so that the port is free once the server has closed it, too.
    pub(crate) fn show_right_to(&self, local: SocketAddr) -> Result<(), Errno> {
        let right = table::InternalFd::new(port_right::show(local)?);
        // If the server has gone, the next request says so.
        let _ = self.control.tell(RequestBody::ShowRight, &[right.as_fd()]);
        Ok(())
    }

    /// What sockets start with that choose nothing.
    pub(crate) fn congestion(&self) -> CongestionKind {
        self.congestion
    }

    /// How packets reach sessions that choose nothing.
    pub(crate) fn delivery(&self) -> Delivery {
        self.delivery
    }

    /// By which ring the frames of sessions come that choose nothing.
    pub(crate) fn mapping(&self) -> MappingChoice {
        self.mapping
    }

    /// Has the frames of a session that is here come by a ring of its own. If there is none they go on coming by the
    /// channel's, and the server shows why.
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

    /// Whether listeners that do not say perform their handshakes here (`portolan run --delegate`).
    pub(crate) fn wants_delegation(&self) -> Option<bool> {
        settings().delegates
    }

    pub(crate) fn lock(&self) -> CoreGuard<'_> {
        CoreGuard {
            guard: Some(self.core.lock()),
            process: self,
        }
    }

    /// Has a thread the lock at the moment?
    pub(crate) fn is_locked(&self) -> bool {
        self.core.is_held()
    }

    /// Notifies the peer of a local session whose notifier is not known here yet.
    fn notify_stranger(&self, session: SessionId, slot: Slot) {
        // Without a server the peer sleeps on until something else wakes it.
        if let Ok((ReplyBody::PeerNotifier { number }, fds)) = self
            .control
            .call(RequestBody::PeerNotifier { session }, &[])
            && let Some(wake_sender) = fds.into_iter().next()
        {
            self.lock().locals.learn(slot, number, wake_sender);
        }
    }
}

/// The lock on `Core`. What the sessions have to tell the server goes out when it is released.
pub(crate) struct CoreGuard<'a> {
    /// Always there until dropped.
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
        self.tell_of_locals();
        self.settle_watch();
        if !self.has_messages() {
            self.guard = None;
            return;
        }
        let outbox = self.take_outbox();
        let pending_signals = self.take_alarms();
        let strangers = self.locals.take_strangers();
        self.guard = None;
        for (socket, alarm) in pending_signals {
            match (table::numbers_of(&socket).first(), alarm) {
                (Some(fd), Alarm::Urgent) => owner::raise_sigurg(*fd),
                (Some(fd), Alarm::Io(event)) => owner::raise_sigio(*fd, event),
                (None, _) => {}
            }
        }
        for message in outbox {
            // Without a server there is nobody to tell; the sessions go on.
            let _ = self.process.control.tell(message, &[]);
        }
        for (session, slot) in strangers {
            self.process.notify_stranger(session, slot);
        }
    }
}

fn absent<T>(mode: Mode) -> Result<T, Absent> {
    Err(if mode == Mode::Require {
        Absent::Refuse
    } else {
        Absent::UseKernel
    })
}

/// The server of the sockets that are here, or else that of the calling thread's network namespace.
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

/// As ps(1) and ss(8) name it. A command line may have been rewritten; it has the end of a name that was cut.
fn program() -> String {
    /// Bytes of a task's name.
    const LONGEST: usize = 15;
    let called = called();
    let Ok(name) = std::fs::read_to_string("/proc/self/comm") else {
        return called;
    };
    let name = name.trim_end();
    match called.starts_with(name) && name.len() == LONGEST {
        true => called,
        false => name.to_owned(),
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

fn warn(reason: &str, mode: Mode) {
    let outcome = match mode {
        Mode::Require => "sockets will fail (PORTOLAN=require)",
        Mode::Auto | Mode::Off => "using the kernel's sockets",
    };
    complain_of(&format!("{reason}; {outcome}"));
}
