//! Looks for the successor of a lost server, on a thread of its own, which exists only until then.
//! No other thread could do so: those that wait for connections or datagrams sleep, and a child of
//! fork that has never registered has no other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use portolan_sys::{clock, thread};

use crate::migration::reopen::{self, Opened, open_again};
use crate::process::vfork::shares_memory;
use crate::process::{NotRegistered, Process, inside, outage};
use crate::settings::complain_of;
use crate::threads::start::start_now;

/// Intervals between attempts, by the time spent so far.
const INTERVALS: [(Duration, Duration); 2] = [
    (Duration::from_secs(2), Duration::from_millis(10)),
    (Duration::from_secs(30), Duration::from_millis(50)),
];
/// Interval after that.
const RARELY: Duration = Duration::from_millis(250);
/// Longest interval if there are sessions within the host.
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// Interval after a server has refused this process.
const REFUSED: Duration = Duration::from_secs(2);

/// How long to retry sockets that cannot be reopened: another process of this program may still have their port.
const TIMEOUT: Duration = Duration::from_secs(10);

static IS_WATCHING: AtomicBool = AtomicBool::new(false);
/// A session of an earlier server has come after the others were adopted.
static IS_ASKED: AtomicBool = AtomicBool::new(false);
/// The peers of listeners that wait for the next server have waited long enough.
static ARE_PEERS_REFUSED: AtomicBool = AtomicBool::new(false);
static IS_STOPPING: AtomicBool = AtomicBool::new(false);
static THREAD: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);

/// Starts to look for another server, under which the sockets of the previous one are reopened.
pub(crate) fn watch() {
    if shares_memory() || IS_WATCHING.swap(true, Ordering::AcqRel) {
        return;
    }
    let started = thread::spawn_masked("portolan-wait", || {
        let _inside = inside::enter();
        loop {
            IS_ASKED.store(false, Ordering::Release);
            look();
            ARE_PEERS_REFUSED.store(false, Ordering::Release);
            IS_WATCHING.store(false, Ordering::Release);
            // A thread that found the server lost again a moment ago, or has another session, has left that to this one.
            let is_lost = Process::running().is_some_and(|process| process.control.is_lost());
            let is_wanted = is_lost || IS_ASKED.load(Ordering::Acquire);
            let is_stopping = IS_STOPPING.load(Ordering::Acquire);
            if !is_wanted || is_stopping || IS_WATCHING.swap(true, Ordering::AcqRel) {
                break;
            }
        }
    });
    match started {
        Ok(started) => *thread_handle() = Some(started),
        // The next call that finds the server gone tries again.
        Err(_) => IS_WATCHING.store(false, Ordering::Release),
    }
}

/// Has the server adopt sessions that have come since the last look.
pub(crate) fn look_again() {
    IS_ASKED.store(true, Ordering::Release);
    watch();
}

/// May peers wait for the next server?
pub(crate) fn may_peers_wait() -> bool {
    !ARE_PEERS_REFUSED.load(Ordering::Acquire) && !Process::is_cut_off()
}

/// If there is no server for so long that peers wait in vain, refuses them; those of listeners that detect it later, too.
fn look_at_peers(looked_for: Duration) {
    let is_in_vain = looked_for > outage::longest() || Process::is_cut_off();
    if is_in_vain && !ARE_PEERS_REFUSED.swap(true, Ordering::AcqRel) {
        reopen::refuse_peers();
    }
}

pub(crate) fn is_watching() -> bool {
    IS_WATCHING.load(Ordering::Acquire)
}

/// Ends the thread. Returns when neither libc nor the kernel knows of it; true if it ran: then
/// [`watch`] must follow. Must be called without locks held.
pub(crate) fn stop() -> bool {
    let Some(thread) = thread_handle().take() else {
        return false;
    };
    let was_watching = is_watching();
    IS_STOPPING.store(true, Ordering::Release);
    thread.thread().unpark();
    // The thread may wait for a fork, which waits for threads that are inside.
    let outside = inside::leave();
    // A thread that has panicked has ended, too.
    let _ = thread.join();
    drop(outside);
    IS_STOPPING.store(false, Ordering::Release);
    IS_WATCHING.store(false, Ordering::Release);
    was_watching
}

/// Called in a child of fork, which does not have the thread. The next call that finds the server gone starts one.
pub(crate) fn forget() {
    std::mem::forget(thread_handle().take());
    IS_WATCHING.store(false, Ordering::Release);
}

fn thread_handle() -> MutexGuard<'static, Option<JoinHandle<()>>> {
    THREAD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn look() {
    let start = clock::now();
    let mut until = None;
    let mut refusal = None;
    while !IS_STOPPING.load(Ordering::Acquire) {
        let looked_for = clock::now().since(start);
        let mut next = interval(looked_for);
        if look_at_locals() {
            next = next.min(BETWEEN_LOOKS);
        }
        look_at_peers(looked_for);
        match try_once() {
            Look::Done => return,
            Look::Absent => {}
            Look::Refused(reason) => {
                next = REFUSED;
                if refusal.as_ref() != Some(&reason) {
                    complain_of(&format!("no way back to Portolan yet: {reason}"));
                }
                refusal = Some(reason);
            }
            Look::Partly => {
                let until = *until.get_or_insert_with(|| clock::now() + TIMEOUT);
                if clock::now() >= until {
                    return;
                }
            }
        }
        let outside = inside::leave();
        std::thread::park_timeout(next);
        drop(outside);
    }
}

/// Peers within the host that have not woken this process yet cannot do so without a server. Returns whether there are
/// sessions with such.
fn look_at_locals() -> bool {
    let Some(process) = Process::running() else {
        return false;
    };
    let mut core = process.lock();
    if core.locals.is_empty() {
        return false;
    }
    core.locals.expect_missed();
    core.look_at_locals(clock::now());
    true
}

fn interval(looked_for: Duration) -> Duration {
    let of = INTERVALS.iter().find(|(until, _)| looked_for < *until);
    of.map_or(RARELY, |(_, interval)| *interval)
}

enum Look {
    Done,
    Absent,
    Refused(String),
    /// Some sockets could not be opened again.
    Partly,
}

fn try_once() -> Look {
    let process = match Process::running() {
        Some(process) => process,
        // A child of fork.
        None => match start_now() {
            Ok(process) => process,
            Err(_) => return Look::Absent,
        },
    };
    match process.renew() {
        Ok(()) => {}
        Err(NotRegistered::Absent(_)) => return Look::Absent,
        Err(NotRegistered::Refused(reason)) => {
            // Its filter has replaced the one that delivered packets here.
            process.lock().end_for_good(clock::now());
            return Look::Refused(reason);
        }
    }
    match open_again(process) {
        Opened::All => Look::Done,
        Opened::Some => Look::Partly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_come_is_looked_for_ever_more_rarely() {
        assert_eq!(interval(Duration::ZERO), Duration::from_millis(10));
        assert_eq!(interval(Duration::from_secs(3)), Duration::from_millis(50));
        assert_eq!(interval(Duration::from_secs(3600)), RARELY);
    }
}
