//! Calls while the server is being restarted: those that cannot do without it wait for the next one, as do new sockets.
//!
//! Threads that wait stay inside: a fork does not copy the locks that they hold.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portolan_sys::clock;
use portolan_types::Instant;

use crate::process::Process;
use crate::settings::settings;

/// Unless `PORTOLAN_WAIT` says otherwise. A service manager restarts a server in much less; a fork waits for longer.
const LONGEST: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A wait has ended without a server: until there is one again, there are no others.
static WAS_IN_VAIN: AtomicBool = AtomicBool::new(false);

/// A server that ends hangs up, and then there is none; one that goes on hanging up refuses this user.
const HANG_UPS: u32 = 3;

/// How long what cannot do without a server waits for the next one.
pub(crate) fn longest() -> Duration {
    settings().wait.unwrap_or(LONGEST)
}

/// Why a request had no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    NoServer,
    HungUp,
    /// This process may not ask.
    Refused,
}

/// The wait of one call.
pub(crate) struct Outage {
    until: Instant,
    hang_ups: u32,
}

impl Outage {
    pub(crate) fn begin() -> Outage {
        Outage {
            until: clock::now() + longest(),
            hang_ups: 0,
        }
    }

    /// Sleeps for a moment; returns false if no server is to be expected any more.
    pub(crate) fn goes_on(&mut self, why: Unanswered) -> bool {
        self.hang_ups += u32::from(why == Unanswered::HungUp);
        let is_refused = why == Unanswered::Refused || self.hang_ups > HANG_UPS;
        if is_refused || Process::is_cut_off() {
            return false;
        }
        if clock::now() >= self.until {
            WAS_IN_VAIN.store(true, Ordering::Relaxed);
        }
        if WAS_IN_VAIN.load(Ordering::Relaxed) {
            return false;
        }
        if let Some(process) = Process::running() {
            // It looks for the next one.
            process.ensure_helper();
        }
        std::thread::sleep(LOOK_EVERY);
        true
    }
}

/// A server has answered.
pub(super) fn note_end() {
    WAS_IN_VAIN.store(false, Ordering::Relaxed);
}

impl Process {
    /// Returns when the server, or the next one, is there; false if none is to be expected.
    pub(crate) fn await_server(&'static self) -> bool {
        if !self.control.has_hung_up() {
            return true;
        }
        let mut outage = Outage::begin();
        while self.control.is_lost() && outage.goes_on(Unanswered::NoServer) {}
        let is_there = !self.control.is_lost();
        if is_there {
            note_end();
        }
        is_there
    }
}
