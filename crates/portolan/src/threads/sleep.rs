//! Sleeping until an event: of a session, of a kernel descriptor, or of the clock. All blocking
//! calls of the library come here.

use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use portolan_local::{WakeBy, WakeRequest};
use portolan_sys::wait::pollfd;
use portolan_sys::word;
use portolan_sys::{clock, probes, wait};
use portolan_types::{Instant, SessionId};
use rustix::io::Errno;

use crate::channel::layers::{self, Layer};
use crate::process::Process;
use crate::process::cancel;
use crate::process::inside;
use crate::runtime::Core;
use crate::socket::{Socket, SocketPhase};
use crate::wait::waiter::Waiter;
use crate::wait::watch::Role;

/// The result of a wait.
#[derive(Debug)]
pub(crate) enum Woken<T> {
    Ready(T),
    /// A kernel descriptor is ready (see `revents`).
    Kernel,
    TimedOut,
}

/// What a thread waits for besides sessions.
pub(crate) struct Sleep<'a> {
    pub(crate) kernel: &'a mut [libc::pollfd],
    pub(crate) deadline: Option<Instant>,
    pub(crate) mask: Option<&'a libc::sigset_t>,
    /// Returns whether a signal would only restart the call after its handler, if that has
    /// `SA_RESTART`. Then the kernel may do so.
    pub(crate) begins_again: Option<&'a dyn Fn() -> bool>,
    /// The listener that the thread accepts from: `ready` looks at its connections.
    pub(crate) accepts: Option<SessionId>,
}

/// What a thread sleeps on.
enum WaitSet {
    /// Its own descriptors: its waiter's, and those that its role requires.
    Descriptors(WatchSet),
    /// Its waiter's word and those of the local ends, if there are no other sessions.
    Words(Vec<WakeRequest>),
}

/// The descriptors that a thread polls for the library.
pub(crate) struct WatchSet {
    fds: Vec<libc::pollfd>,
    /// Range of those by which local peers wake this process.
    local: Range<usize>,
    /// Index of the first one of `openings`.
    outcomes: usize,
    openings: Vec<(Arc<Socket>, RawFd)>,
}

/// The reasons why a sleep ended.
#[derive(Default)]
struct Slept {
    /// A kernel descriptor of the caller is ready.
    by_kernel: bool,
    /// A peer of a local session has woken the thread, by this means.
    woken: Option<WakeBy>,
    /// Active opens, and the results of polling their descriptors.
    outcomes: Vec<libc::pollfd>,
    openings: Vec<(Arc<Socket>, RawFd)>,
}

impl Slept {
    fn has_outcomes(&self) -> bool {
        self.outcomes.iter().any(|polled| polled.revents != 0)
    }
}

impl Sleep<'static> {
    pub(crate) fn until(deadline: Option<Instant>) -> Sleep<'static> {
        Sleep {
            kernel: &mut [],
            deadline,
            mask: None,
            begins_again: None,
            accepts: None,
        }
    }
}

impl Process {
    /// Polls the channel until `ready` returns a value. Code that makes `ready` return one must
    /// signal this thread's [`Waiter`], which the caller has registered there.
    pub(crate) fn wait<T>(
        &'static self,
        sleep: Sleep<'_>,
        ready: impl FnMut(&mut Core, Instant) -> Option<T>,
    ) -> Result<Woken<T>, Errno> {
        let woken = self.wait_attending(sleep, ready);
        self.wake_helper();
        woken
    }

    fn wait_attending<T>(
        &'static self,
        mut sleep: Sleep<'_>,
        mut ready: impl FnMut(&mut Core, Instant) -> Option<T>,
    ) -> Result<Woken<T>, Errno> {
        let waiter = Waiter::mine();
        let mut turn = self.spinner.wait();
        loop {
            // An outcome that has arrived counts from the first check on.
            self.take_outcomes();
            let mut core = self.lock();
            let now = clock::now();
            core.accepts_next = sleep.accepts;
            core.poll(now);
            core.accepts_next = None;
            let news = (core.locals.news(), core.notify_seq);
            if let Some(value) = ready(&mut core, now) {
                turn.found(now);
                core.leave_wait(now);
                return Ok(Woken::Ready(value));
            }
            if cancel::is_wanted() {
                core.leave_wait(now);
                return Err(Errno::CANCELED);
            }
            if (core.locals.news(), core.notify_seq) != news {
                // It arrived while `ready` ran, perhaps after it had checked.
                continue;
            }
            if core.stack.owes_acknowledgements() {
                core.stack.settle_acknowledgements();
                core.poll_tx(now);
            }
            if sleep.deadline.is_some_and(|deadline| deadline <= now) {
                core.leave_wait(now);
                return Ok(Woken::TimedOut);
            }
            if turn.goes_on(now, &core.spread) {
                core.begin_spin();
                drop(core);
                turn.pause();
                let kernel = if turn.is_to_ask_kernel() {
                    sleep.kernel_has_events()
                } else {
                    Ok(false)
                };
                if !matches!(kernel, Ok(false)) {
                    let mut core = self.lock();
                    let now = clock::now();
                    core.poll(now);
                    turn.found(now);
                    core.leave_wait(now);
                    return kernel.map(|_| Woken::Kernel);
                }
                continue;
            }
            if core.end_spin(now) {
                continue;
            }
            let by = core.wake_by(now, &sleep);
            let Some(role) = core.fall_asleep(now, &waiter, by) else {
                continue;
            };
            let timer = if role == Role::Lead {
                core.deadline()
            } else {
                None
            };
            let wait_set = core.build_wait_set(&waiter, role, by);
            drop(core);

            let slept = sleep.sleep(&waiter, wait_set, earliest(sleep.deadline, timer));

            let mut core = self.lock();
            waiter.wake();
            let now = clock::now();
            turn.woke(now);
            core.wake(now, &waiter, role);
            match slept {
                Ok(Slept {
                    woken: Some(by), ..
                }) => core.locals.hear(clock::now(), by),
                // The kernel or a sandbox does not support it.
                Err(Errno::NOSYS | Errno::PERM) if by == WakeBy::Word => {
                    core.watch.forgo_words();
                    continue;
                }
                _ => {}
            }
            if let Ok(slept) = &slept
                && slept.has_outcomes()
            {
                // Another thread leads until this one is back.
                core.hand_over();
                drop(core);
                self.take_outcomes_of(&slept.openings, &slept.outcomes);
                core = self.lock();
            }
            match slept {
                Ok(Slept {
                    by_kernel: true, ..
                }) => {
                    core.poll(clock::now());
                    core.hand_over();
                    return Ok(Woken::Kernel);
                }
                Ok(_) => {}
                Err(errno) => {
                    core.hand_over();
                    return Err(errno);
                }
            }
        }
    }
}

impl Core {
    /// Returns how local sessions must wake a thread that is about to sleep. Sleeping on words
    /// costs less than polling, but then nothing else can wake it: no time, frame or descriptor.
    fn wake_by(&mut self, now: Instant, sleep: &Sleep<'_>) -> WakeBy {
        let suffices = sleep.needs_no_poll()
            && self.watch.may_use_words()
            && self.locals.fit_on_words()
            && !Socket::any(SocketPhase::Connecting)
            && self.deadline().is_none()
            && !self.expects_frames(now);
        if suffices {
            WakeBy::Word
        } else {
            WakeBy::Notifier
        }
    }

    fn build_wait_set(&mut self, waiter: &Waiter, role: Role, by: WakeBy) -> WaitSet {
        if by == WakeBy::Word {
            waiter.fall_asleep_on_word();
            return WaitSet::Words(self.locals.wake_requests());
        }
        waiter.fall_asleep();
        WaitSet::Descriptors(match role {
            Role::Lead => {
                let mut set = WatchSet::new(waiter);
                self.watch_as_leader(&mut set, self.watches_wire(), !self.locals.is_empty());
                set
            }
            Role::Follow => WatchSet::new(waiter),
        })
    }

    /// Adds the descriptors that a leader watches.
    pub(crate) fn watch_as_leader(&mut self, set: &mut WatchSet, wire: bool, local: bool) {
        if wire {
            self.channel_fds(&mut set.fds);
        }
        if local {
            let first = set.fds.len();
            set.fds.extend(self.locals.pollfds());
            set.local = first..set.fds.len();
        }
        set.openings = self.openings.poll_list();
        set.outcomes = set.fds.len();
        let outcomes = set.openings.iter();
        set.fds
            .extend(outcomes.map(|(_, fd)| pollfd(*fd, libc::POLLIN)));
    }

    /// Adds the descriptors by which the channel requests attention.
    pub(crate) fn channel_fds(&self, fds: &mut Vec<libc::pollfd>) {
        let on_tap = if self.channel.is_main_full() {
            libc::POLLIN | libc::POLLOUT
        } else {
            libc::POLLIN
        };
        fds.push(pollfd(self.channel.tap_fd().as_raw_fd(), on_tap));
        self.channel.add_ring_pollfds(fds);
        let full = self.channel.full_fds();
        fds.extend(full.map(|tap| pollfd(tap.as_raw_fd(), libc::POLLOUT)));
    }
}

impl Sleep<'_> {
    /// Does the thread wait for sessions only, and may the kernel restart the call?
    fn needs_no_poll(&self) -> bool {
        self.kernel.is_empty()
            && self.deadline.is_none()
            && self.mask.is_none()
            && self.begins_again.is_some_and(|begins_again| begins_again())
    }

    /// For a thread that spins.
    fn kernel_has_events(&mut self) -> Result<bool, Errno> {
        if self.kernel.is_empty() {
            return Ok(false);
        }
        Ok(wait::ppoll(self.kernel, Some(Instant::ZERO), None)? > 0)
    }

    fn sleep(
        &mut self,
        waiter: &Waiter,
        wait_set: WaitSet,
        deadline: Option<Instant>,
    ) -> Result<Slept, Errno> {
        match wait_set {
            WaitSet::Descriptors(set) => self.poll(waiter, set, deadline),
            WaitSet::Words(wake_requests) => sleep_on_words(waiter, &wake_requests),
        }
    }

    fn poll(
        &mut self,
        waiter: &Waiter,
        set: WatchSet,
        deadline: Option<Instant>,
    ) -> Result<Slept, Errno> {
        let own = set.fds.len();
        let mut all = [&set.fds, &*self.kernel].concat();
        outside(|| waiter.poll(&mut all, deadline, self.mask))?;
        let (own, theirs) = all.split_at(own);
        self.kernel.copy_from_slice(theirs);
        let is_notified = own[set.local.clone()].iter().any(|fd| fd.revents != 0);
        Ok(Slept {
            by_kernel: theirs.iter().any(|fd| fd.revents != 0),
            woken: is_notified.then_some(WakeBy::Notifier),
            outcomes: set.outcomes(own),
            openings: set.openings,
        })
    }
}

impl WatchSet {
    /// Contains only the descriptor that signals the thread.
    pub(crate) fn new(waiter: &Waiter) -> WatchSet {
        WatchSet {
            fds: vec![waiter.pollfd()],
            local: 0..0,
            outcomes: 1,
            openings: Vec::new(),
        }
    }

    pub(crate) fn fds(&self) -> &[libc::pollfd] {
        &self.fds
    }

    pub(crate) fn openings(&self) -> &[(Arc<Socket>, RawFd)] {
        &self.openings
    }

    /// Returns the polled descriptors of the openings; `polled` is the set after polling, possibly followed by others.
    pub(crate) fn outcomes(&self, polled: &[libc::pollfd]) -> Vec<libc::pollfd> {
        polled
            .get(self.outcomes..self.fds.len())
            .unwrap_or_default()
            .to_vec()
    }
}

fn sleep_on_words(waiter: &Waiter, wake_requests: &[WakeRequest]) -> Result<Slept, Errno> {
    let words = wake_requests.iter().map(WakeRequest::word);
    match outside(|| word::sleep_on(std::iter::once(waiter.word()).chain(words))) {
        // News that came before the sleep counts, too.
        Ok(()) | Err(Errno::AGAIN) => Ok(Slept {
            woken: Some(WakeBy::Word),
            ..Slept::default()
        }),
        Err(errno) => Err(errno),
    }
}

/// Runs code that sleeps: signal handlers may run in the meantime, and the thread may be cancelled.
/// Deferred handlers run before, and count as interrupting the call.
pub fn outside<T>(sleep: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let outside = inside::leave();
    let asleep = layers::enter(Layer::Sleep);
    let slept = if outside.is_interrupted {
        Err(Errno::INTR)
    } else {
        sleep()
    };
    drop(asleep);
    probes::wake_up();
    drop(outside);
    cancel::hold();
    slept
}

pub(super) fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Does Linux restart a call that a signal has interrupted? Not one with a time-out, nor if a
/// handler lacks `SA_RESTART` (signal(7), "Interruption of system calls").
pub(crate) fn restarts(deadline: Option<Instant>) -> bool {
    deadline.is_none() && inside::handlers_restart()
}

/// Returns the deadline of `SO_RCVTIMEO` and similar time-outs, from now on.
pub(crate) fn deadline_after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| clock::now() + timeout)
}
