//! How this process comes to a server: it registers when the program first needs it, again in another network namespace,
//! and with the next server when the one that it had is gone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portolan_sys::{clock, descriptor, thread};
use portolan_types::Instant;

use crate::descriptors;
use crate::process::outage::{Outage, Unanswered};
use crate::process::vfork::shares_memory;
use crate::process::{Absent, NotRegistered, Process};
use crate::settings::{Mode, complain, complain_of, settings};
use crate::socket::table;
use crate::threads::{helper, successor};
use crate::wait::waiter::Waiter;

/// After a failed attempt, sockets are the kernel's for this time before the server is tried again.
const RETRY: Duration = Duration::from_secs(1);

static STARTING: Mutex<Option<Instant>> = Mutex::new(None);

/// A thread of this process, or of a parent, has changed its network namespace.
static HAS_MOVED: AtomicBool = AtomicBool::new(false);

/// How often this process has left its server for one of another namespace.
static RESTARTS: AtomicU32 = AtomicU32::new(0);

/// Limits the memory that a process leaks by such restarts.
const RESTARTS_MAX: u32 = 16;

/// Returns this process; registers it first if necessary. `None` without a server.
pub(crate) fn here() -> Option<&'static Process> {
    Process::running().or_else(|| start().ok())
}

/// Returns the process; registers it first if necessary.
pub(crate) fn start() -> Result<&'static Process, Absent> {
    start_by(RETRY, register_in_time)
}

/// As [`start`], without waiting, however short ago the last attempt has failed.
pub(crate) fn start_now() -> Result<&'static Process, Absent> {
    start_by(Duration::ZERO, || Process::register(helper::run))
}

/// Registers, if the last failed attempt was at least `pause` ago.
fn start_by(
    pause: Duration,
    register: impl FnOnce() -> Result<&'static Process, NotRegistered>,
) -> Result<&'static Process, Absent> {
    if let Some(process) = Process::running() {
        return if process.control.is_lost() {
            without_server(process)
        } else {
            Ok(process)
        };
    }
    complain();
    let mode = settings().mode;
    if mode == Mode::Off || Process::is_renounced() {
        return Err(Absent::UseKernel);
    }
    let mut tried = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(process) = Process::running() {
        return Ok(process);
    }
    let now = clock::now();
    if tried.is_some_and(|last| now.since(last) < pause) {
        return absent(mode);
    }
    let is_first = tried.replace(now).is_none();
    match register() {
        Ok(process) => Ok(process),
        Err(why) => {
            if is_first {
                warn(why.reason(), mode);
            }
            absent(mode)
        }
    }
}

/// Registers, perhaps with the next server, if there was one.
fn register_in_time() -> Result<&'static Process, NotRegistered> {
    let mut outage = Outage::begin();
    loop {
        match Process::register(helper::run) {
            Err(NotRegistered::Absent(_)) if outage.goes_on(Unanswered::NoServer) => {}
            outcome => return outcome,
        }
    }
}

/// As [`start`], but checks whether the server has hung up. Uses the server of the
/// calling thread's network namespace.
pub(crate) fn for_new_socket() -> Result<&'static Process, Absent> {
    if HAS_MOVED.load(Ordering::Relaxed) {
        follow_namespace()?;
    }
    if let Some(process) = Process::running()
        && process.control.has_hung_up_lately()
    {
        match process.renew() {
            Ok(()) => successor::watch(),
            Err(NotRegistered::Absent(_)) => {
                process.await_server();
            }
            Err(NotRegistered::Refused(_)) => {}
        }
    }
    start()
}

/// As [`start`], for objects that last as long as the connection to the server.
pub(crate) fn start_to_stay() -> Result<&'static Process, Absent> {
    let process = start()?;
    process.stays.store(true, Ordering::Relaxed);
    Ok(process)
}

/// Existing sessions continue; new sockets are the kernel's. Warns once.
fn without_server<T>(process: &Process) -> Result<T, Absent> {
    let mode = settings().mode;
    successor::watch();
    if !process.has_warned.swap(true, Ordering::Relaxed) {
        warn("the server has gone", mode);
    }
    absent(mode)
}

fn absent<T>(mode: Mode) -> Result<T, Absent> {
    Err(if mode == Mode::Require {
        Absent::Refuse
    } else {
        Absent::UseKernel
    })
}

fn warn(reason: &str, mode: Mode) {
    let outcome = match mode {
        Mode::Require => "sockets will fail (PORTOLAN=require)",
        Mode::Auto | Mode::Off => "using the kernel's sockets",
    };
    complain_of(&format!("{reason}; {outcome}"));
}

/// All sockets of a process belong to one server. In another namespace than that server's, a
/// process without sockets starts anew; one that has sockets gets kernel sockets.
fn follow_namespace() -> Result<(), Absent> {
    if Process::serves_namespace() || Process::is_renounced() {
        return Ok(());
    }
    let mode = settings().mode;
    if table::has_sockets() || shares_memory() {
        return absent(mode);
    }
    if let Some(process) = Process::running() {
        let is_free = !process.stays.load(Ordering::Relaxed) && has_one_thread();
        if !is_free || RESTARTS.fetch_add(1, Ordering::Relaxed) >= RESTARTS_MAX {
            return absent(mode);
        }
        process.stop_helper();
        part_with_server();
    }
    Process::clear_server();
    Ok(())
}

/// Does the program have a single thread? The library's own do not count.
pub fn has_one_thread() -> bool {
    let own = Process::running().map_or(0, |process| {
        usize::from(process.helper.is_started()) + usize::from(successor::is_watching())
    });
    thread::count() <= 1 + own
}

/// Called after that change: a failed attempt in another network namespace no longer counts.
pub(crate) fn after_move() {
    HAS_MOVED.store(true, Ordering::Relaxed);
    if Process::running().is_none() {
        forget_attempt();
    }
}

/// Closes the connection to the server, and everything that came with it. Only for a process with one thread and no
/// sockets.
fn part_with_server() {
    close_hidden();
    forget_server();
}

pub(crate) fn close_hidden() {
    for fd in descriptors::take_hidden() {
        descriptor::close(fd);
    }
}

pub(crate) fn forget_server() {
    for (_, set) in table::epolls() {
        set.inherit();
    }
    Process::forget();
    forget_attempt();
    successor::forget();
    Waiter::forget_mine();
}

/// A failed attempt, in another network namespace or by the parent of this process, no longer counts.
fn forget_attempt() {
    *STARTING.lock().unwrap_or_else(PoisonError::into_inner) = None;
}
