//! Sleeping until something of interest happens: to a session, to a kernel descriptor, or by the
//! clock. All blocking calls of the library come here.

pub(crate) mod epoll;
pub(crate) mod helper;
pub(crate) mod openings;
pub(crate) mod spin;
mod turns;
pub(crate) mod unseen;
pub(crate) mod watch;

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use portolan_local::{WakeBy, WakeRequest};
use portolan_sys::word::{self, Scope, Word};
use portolan_sys::{clock, probes, wait};
use portolan_types::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::channel::layers::{self, Layer};
use crate::descriptors::InternalFd;
use crate::process::Process;
use crate::process::cancel;
use crate::process::inside;
use crate::runtime::Core;
use crate::socket::{Socket, SocketPhase};
use crate::wait::watch::Role;

/// What others signal to wake one sleeping thread.
#[derive(Debug)]
pub(crate) struct Waiter {
    /// None while there are no descriptors to be had: it polls by short whiles then.
    eventfd: OnceLock<InternalFd>,
    /// Nanoseconds of [`Instant`]: when to try again to have one.
    next_try: AtomicU64,
    /// One of those below.
    state: AtomicU8,
    /// 1 from a signal on until it wakes; a word to sleep on.
    signalled: AtomicU32,
}

const AWAKE: u8 = 0;
/// It polls the eventfd.
const POLLING: u8 = 1;
const ON_WORD: u8 = 2;

/// How long a thread polls at a time that has no descriptor to be signalled by.
const WITHOUT_DESCRIPTOR: Duration = Duration::from_millis(1);

const BETWEEN_TRIES: Duration = Duration::from_secs(1);

thread_local! {
    static MINE: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
}

impl Waiter {
    /// The calling thread's own.
    pub(crate) fn mine() -> Arc<Waiter> {
        MINE.with(|mine| {
            let mut mine = mine.borrow_mut();
            let waiter = mine.get_or_insert_with(|| {
                let waiter = Arc::new(Waiter::new());
                cancel::note(&waiter);
                waiter
            });
            Arc::clone(waiter)
        })
    }

    pub(crate) fn new() -> Waiter {
        let waiter = Waiter {
            eventfd: OnceLock::new(),
            next_try: AtomicU64::new(0),
            state: AtomicU8::new(AWAKE),
            signalled: AtomicU32::new(0),
        };
        waiter.equip();
        waiter
    }

    /// The calling thread, which has not slept yet, sleeps by this one.
    pub(crate) fn adopt(self) {
        let waiter = Arc::new(self);
        cancel::note(&waiter);
        MINE.with(|mine| mine.replace(Some(waiter)));
    }

    /// For the thread itself: makes sure of the descriptor, if one is to be had. What the program has just made free is
    /// the program's to use: it is not tried each time.
    fn equip(&self) {
        if self.eventfd.get().is_some() {
            return;
        }
        let now = clock::now();
        if now.as_nanos() < self.next_try.load(Relaxed) {
            return;
        }
        let next_try = now + BETWEEN_TRIES;
        self.next_try.store(next_try.as_nanos(), Relaxed);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        if let Ok(fd) = eventfd(0, flags) {
            self.eventfd.get_or_init(|| InternalFd::new(fd));
        }
    }

    /// After fork the child shares the parent's eventfd and must not use it.
    pub(crate) fn forget_mine() {
        MINE.with(|mine| mine.borrow_mut().take());
    }

    /// Wakes the thread if it sleeps. The caller holds `Core`, as does the thread between its
    /// last look and [`Waiter::fall_asleep`]: no signal is lost.
    pub(crate) fn signal(&self) {
        let state = self.state.load(Relaxed);
        if state == AWAKE || self.signalled.swap(1, Relaxed) == 1 {
            return;
        }
        if state == ON_WORD {
            word::wake(&self.signalled, Scope::Private);
        } else if let Some(eventfd) = self.eventfd.get() {
            // Fails only if it is signalled already.
            let _ = write(eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// Ends the sleep of a thread that polls it. Of a negative number poll takes no notice.
    pub(crate) fn pollfd(&self) -> libc::pollfd {
        let fd = self.eventfd.get().map_or(-1, |fd| fd.as_fd().as_raw_fd());
        pollfd(fd, libc::POLLIN)
    }

    /// `ppoll`, which a signal of this waiter ends, too.
    pub(crate) fn poll(
        &self,
        fds: &mut [libc::pollfd],
        deadline: Option<Instant>,
        mask: Option<&libc::sigset_t>,
    ) -> Result<usize, Errno> {
        if self.eventfd.get().is_some() {
            return wait::ppoll(fds, deadline, mask);
        }
        loop {
            let now = clock::now();
            let while_over = now + WITHOUT_DESCRIPTOR;
            let until = deadline.map_or(while_over, |deadline| deadline.min(while_over));
            let ready = wait::ppoll(fds, Some(until), mask)?;
            let is_late = deadline.is_some_and(|deadline| deadline <= until);
            if ready > 0 || is_late || self.signalled.load(Relaxed) == 1 {
                return Ok(ready);
            }
        }
    }

    /// Ends the sleep of a thread that sleeps on words.
    fn word(&self) -> Word<'_> {
        Word::new(&self.signalled, 0, Scope::Private)
    }

    pub(crate) fn fall_asleep(&self) {
        self.equip();
        self.state.store(POLLING, Relaxed);
    }

    fn fall_asleep_on_word(&self) {
        self.state.store(ON_WORD, Relaxed);
    }

    pub(crate) fn wake(&self) {
        let state = self.state.swap(AWAKE, Relaxed);
        if self.signalled.swap(0, Relaxed) == 1
            && state == POLLING
            && let Some(eventfd) = self.eventfd.get()
        {
            // Fails only if there is nothing to read.
            let _ = read(eventfd, &mut [0; 8]);
        }
    }
}

/// Is it the same thread's?
impl PartialEq for Waiter {
    fn eq(&self, other: &Waiter) -> bool {
        std::ptr::eq(self, other)
    }
}

/// How a wait ended.
#[derive(Debug)]
pub(crate) enum Woken<T> {
    Ready(T),
    /// One of the kernel descriptors has something (see `revents`).
    Kernel,
    TimedOut,
}

/// What a thread waits for besides sessions.
pub(crate) struct Sleep<'a> {
    pub(crate) kernel: &'a mut [libc::pollfd],
    pub(crate) deadline: Option<Instant>,
    pub(crate) mask: Option<&'a libc::sigset_t>,
    /// Says whether a signal would change nothing but that the call begins again after its handler, if that was
    /// installed with `SA_RESTART`. The kernel may see to it then.
    pub(crate) begins_again: Option<&'a dyn Fn() -> bool>,
}

/// What a thread sleeps on.
enum WaitSet {
    /// Its own descriptors: that of its waiter and those that its role has it watch.
    Descriptors(WatchSet),
    /// Its waiter's word and those of the local ends, which are all the sessions there are.
    Words(Vec<WakeRequest>),
}

/// The descriptors that a thread polls for the library.
pub(crate) struct WatchSet {
    fds: Vec<libc::pollfd>,
    /// Where those are by which local peers wake this process.
    local: Range<usize>,
    /// Where those of `openings` begin.
    outcomes: usize,
    openings: Vec<(Arc<Socket>, RawFd)>,
}

/// What has ended a sleep.
#[derive(Default)]
struct Slept {
    /// A kernel descriptor of the caller has something.
    by_kernel: bool,
    /// A peer in a local session.
    woken: Option<WakeBy>,
    /// Active opens, and what their descriptors show.
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
        }
    }
}

impl Process {
    /// Attends to the channel until `ready` gives something. Whoever makes `ready` true must
    /// signal this thread's [`Waiter`], which the caller has registered where it matters.
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
            // An outcome that has come counts from the first look on.
            self.take_outcomes();
            let mut core = self.lock();
            let now = clock::now();
            core.poll(now);
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
                // It came under the eyes of `ready`, but perhaps behind its back.
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
                // A kernel or a sandbox without it.
                Err(Errno::NOSYS | Errno::PERM) if by == WakeBy::Word => {
                    core.watch.forgo_words();
                    continue;
                }
                _ => {}
            }
            if let Ok(slept) = &slept
                && slept.has_outcomes()
            {
                // Until it is back another thread leads.
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
    /// What local sessions are to wake a thread by that is about to sleep. To sleep on words costs less than to poll,
    /// but nothing else can wake it then: no time, frame or descriptor.
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

    /// Adds what ends the sleep of a leader.
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

    /// Descriptors by which the channel asks for attention.
    pub(crate) fn channel_fds(&self, fds: &mut Vec<libc::pollfd>) {
        let on_tap = if self.channel.is_main_full() {
            libc::POLLIN | libc::POLLOUT
        } else {
            libc::POLLIN
        };
        fds.push(pollfd(self.channel.tap_fd().as_raw_fd(), on_tap));
        fds.push(pollfd(self.channel.ring_fd().as_raw_fd(), libc::POLLIN));
        let own = self.channel.own_ring_fds();
        fds.extend(own.map(|ring| pollfd(ring.as_raw_fd(), libc::POLLIN)));
        let full = self.channel.full_fds();
        fds.extend(full.map(|tap| pollfd(tap.as_raw_fd(), libc::POLLOUT)));
    }
}

impl Sleep<'_> {
    /// Has the thread nothing to wait for but sessions, and may the kernel begin the call again?
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
        let is_rung = own[set.local.clone()].iter().any(|fd| fd.revents != 0);
        Ok(Slept {
            by_kernel: theirs.iter().any(|fd| fd.revents != 0),
            woken: is_rung.then_some(WakeBy::Notifier),
            outcomes: set.outcomes(own),
            openings: set.openings,
        })
    }
}

impl WatchSet {
    /// Only what signals the thread.
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

    /// Of the set as it was polled, perhaps with more behind it: what the descriptors of the openings show.
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
        // News from before it slept is news.
        Ok(()) | Err(Errno::AGAIN) => Ok(Slept {
            woken: Some(WakeBy::Word),
            ..Slept::default()
        }),
        Err(errno) => Err(errno),
    }
}

/// Does what sleeps: handlers of signals may run meanwhile, and the thread may be cancelled. Handlers that were put off
/// run before, and have interrupted the call.
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

pub(crate) fn pollfd(fd: i32, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
