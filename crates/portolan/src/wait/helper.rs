//! The background thread (helper): attends to the channel only while no application thread does.
//!
//! It is in one of three states. *Ticking*: every [`TICK`] it checks whether application threads still attend
//! to the channel, and helps out if frames or timers wait; frames that a computing program leaves unread for
//! a while wake it earlier (`bpf/attention.h`). *On duty*: no thread has attended since the last tick, so it
//! sleeps on the channel like any leader. *Resting*: an application thread sleeps as leader and does all the
//! work, until that thread returns to the program.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use portolan_local::WakeBy;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_stack::SPUN_US;
use portolan_sys::sched::Attributes;
use portolan_sys::wait::EventNotifier;
use portolan_sys::{clock, descriptor, thread, wait};
use portolan_types::Instant;
use rustix::io::Errno;

use crate::descriptors::{self, InternalFd};
use crate::posix;
use crate::process::control::Control;
use crate::process::inside;
use crate::process::report;
use crate::process::successor;
use crate::process::{CoreGuard, Process};
use crate::runtime::Core;
use crate::socket::Socket;
use crate::wait::turns::Turns;
use crate::wait::unseen::Looks;
use crate::wait::watch::{HelperStep, Since};
use crate::wait::{Waiter, WatchSet, earliest, pollfd};

/// Maximum delay until an unattended channel is noticed.
const TICK: Duration = Duration::from_millis(10);

/// Resolution of sessions' timers while the program computes.
const RESOLUTION: Duration = Duration::from_micros(200);

/// Scheduler slice: the thread works for a moment each time it wakes, and must run at once where it
/// shares a processor with a computing program (see [`Turns`], too).
const SLICE: Duration = Duration::from_micros(100);

/// Number of ticks between publications of the statistics that `portolan ss` shows.
const PUBLISH_EVERY: u32 = 10;

/// Interval at which a resting helper wakes all the same, to publish statistics.
const REST: Duration = Duration::from_secs(1);

/// State shared by application threads and the helper.
pub(crate) struct BackgroundThread {
    /// No other thread may start it. Also set while it is stopped for a call.
    is_started: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    is_resting: AtomicBool,
    is_stopping: AtomicBool,
    /// Ends its sleep.
    notifier: EventNotifier,
    turns: Turns,
    /// The descriptors that it needs, until it starts: by then the program may be short of them.
    equipment: Mutex<Option<(Waiter, Unattended)>>,
}

impl BackgroundThread {
    pub(crate) fn new() -> Result<BackgroundThread, Errno> {
        Ok(BackgroundThread {
            is_started: AtomicBool::new(false),
            thread: Mutex::new(None),
            is_resting: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            notifier: EventNotifier::from_fd(descriptors::hide(EventNotifier::new()?.into())),
            turns: Turns::default(),
            equipment: Mutex::new(Some((Waiter::new(), Unattended::new()))),
        })
    }

    pub(crate) fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Acquire)
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does the connection to the server, which is among the polled descriptors, show a hang-up?
fn has_hung_up(polled: &[libc::pollfd], control: &Control) -> bool {
    let control = control.as_fd().as_raw_fd();
    polled
        .iter()
        .any(|polled| polled.fd == control && polled.revents & libc::POLLHUP != 0)
}

impl Process {
    /// Starts the helper with the first session.
    pub(crate) fn ensure_helper(&'static self) {
        if self.helper.is_started.swap(true, Ordering::AcqRel) {
            return;
        }
        self.start_helper();
    }

    pub(crate) fn start_helper(&'static self) {
        let equipment = self.helper.equipment.lock();
        let equipment = equipment.unwrap_or_else(PoisonError::into_inner).take();
        let (waiter, unattended) = equipment.unwrap_or_else(|| (Waiter::new(), Unattended::new()));
        let help = move || {
            waiter.adopt();
            self.help(unattended);
        };
        let thread = thread::spawn_masked("portolan", help).ok();
        if thread.is_none() {
            // Retried with the next session; until then only application threads attend to the channel.
            self.helper.is_started.store(false, Ordering::Release);
        }
        *self.helper.thread() = thread;
    }

    /// Ends the helper. Returns when neither libc nor the kernel knows of it; true if it ran: then
    /// [`Process::start_helper`] must follow. Must be called without locks held.
    pub(crate) fn stop_helper(&self) -> bool {
        let Some(thread) = self.helper.thread().take() else {
            return false;
        };
        self.helper.is_stopping.store(true, Ordering::Release);
        self.helper.notifier.notify();
        // The thread may wait for a fork, which waits for threads that are inside.
        let outside = inside::leave();
        // A thread that has panicked has ended, too.
        let _ = thread.join();
        drop(outside);
        self.helper.notifier.drain();
        self.helper.is_stopping.store(false, Ordering::Release);
        true
    }

    /// Called by a leader that returns to its application.
    pub(crate) fn wake_helper(&self) {
        self.helper.turns.leave_to_program();
        if self.helper.is_resting.load(Ordering::Relaxed)
            && self.helper.is_resting.swap(false, Ordering::AcqRel)
        {
            self.helper.notifier.notify();
        }
    }

    fn help(&'static self, mut unattended: Unattended) {
        let _inside = inside::enter();
        take_short_slices();
        thread::sleep_exactly();
        let mut looks = Looks::default();
        let mut seen = 0;
        let mut ticks = 0_u32;
        while !self.helper.is_stopping() {
            seen = self.tick(&mut unattended, seen);
            ticks = ticks.wrapping_add(1);
            if ticks.is_multiple_of(PUBLISH_EVERY) {
                self.look_for_server();
                self.publish(&mut self.lock());
            }
            self.take_outcomes();
            self.look_for_unseen_waits(&mut looks);
            let mut core = self.lock();
            let since = Since::of(seen, core.attended);
            match core.watch.after_tick(since) {
                HelperStep::Rest => self.rest(core),
                HelperStep::StandIn => {
                    self.publish(&mut core);
                    seen = self.stand_in(core, &mut looks);
                }
                HelperStep::Tick => {
                    if !core.is_attended() {
                        core.poll_idle(clock::now());
                    }
                    seen = core.attended;
                }
            }
        }
    }

    /// Waits for the next tick, or until the filter reports unread frames, which it processes.
    /// Returns the value that `attended` would have without the helper, if it was `seen` before;
    /// the current value if there were such frames, so that the helper stands in from then on.
    fn tick(&self, unattended: &mut Unattended, mut seen: u64) -> u64 {
        let end = clock::now() + TICK;
        let mut until = end;
        unattended.watch(&self.lock());
        loop {
            let fds = unattended.pollfd().into_iter().collect();
            self.pause(fds, Some(until));
            let has_frames = unattended.take();
            let now = clock::now();
            if now >= end || self.helper.is_stopping() {
                return seen;
            }
            let mut core = self.lock_in_turn();
            if core.is_attended() {
                until = end;
                continue;
            }
            if has_frames {
                core.poll_idle(now);
                return core.attended;
            }
            let before = core.attended;
            let is_alone = before == seen;
            if is_alone {
                core.poll_idle(now);
                seen += core.attended - before;
            }
            // A program that still attends to the channel runs its timers itself.
            let timer = core.deadline().filter(|_| is_alone);
            until = timer.map_or(end, |timer| timer.max(now + RESOLUTION).min(end));
        }
    }

    /// Attends to the channel until an application thread does. Returns the value of `attended`
    /// before that.
    fn stand_in(&'static self, mut core: CoreGuard<'static>, looks: &mut Looks) -> u64 {
        let waiter = Waiter::mine();
        loop {
            let now = clock::now();
            core.poll_idle(now);
            let seen = core.attended;
            if core.watch.while_standing_in(Since::Left) == HelperStep::Tick {
                return seen;
            }
            // Programs that wait for local sessions in the library are notified there.
            let listens = Socket::has_owner() && !core.locals.is_empty();
            if (listens && !core.arm_locals(WakeBy::Notifier)) || !core.helper_leads(now, &waiter) {
                continue;
            }
            waiter.fall_asleep();
            let mut set = WatchSet::new(&waiter);
            core.watch_as_leader(&mut set, true, listens);
            let deadline = earliest(core.deadline(), looks.deadline());
            drop(core);
            let outcomes = self.sleep(&set, deadline);
            core = self.lock_in_turn();
            waiter.wake();
            core.helper_wakes(clock::now());
            if outcomes.iter().any(|polled| polled.revents != 0) {
                drop(core);
                self.take_outcomes_of(set.openings(), &outcomes);
                core = self.lock();
            }
            if listens {
                core.locals.hear(clock::now(), WakeBy::Notifier);
            }
            drop(core);
            self.look_for_unseen_waits(looks);
            core = self.lock();
            let since = Since::of(seen, core.attended);
            let step = core.watch.while_standing_in(since);
            if step == HelperStep::Tick || self.helper.is_stopping() {
                // What came until now was taken, and not answered yet.
                core.poll_idle(clock::now());
                return seen;
            }
        }
    }

    /// Locks the core. If the program holds the lock, perhaps interrupted by a frame, lets the program run first.
    fn lock_in_turn(&self) -> CoreGuard<'_> {
        if self.is_locked() {
            let outside = inside::leave();
            self.helper.turns.end();
            drop(outside);
        }
        self.lock()
    }

    /// Sleeps until the channel or a timer requests attention, or the server hangs up. Without a
    /// server, looks for its successor.
    fn sleep(&self, set: &WatchSet, mut deadline: Option<Instant>) -> Vec<libc::pollfd> {
        let mut fds = set.fds().to_vec();
        if self.control.is_lost() {
            let next_look = clock::now() + REST;
            deadline = Some(deadline.map_or(next_look, |deadline| deadline.min(next_look)));
        } else {
            // `poll` reports hang-ups unasked.
            fds.push(pollfd(self.control.as_fd().as_raw_fd(), 0));
        }
        let fds = self.pause(fds, deadline);
        if self.control.is_lost() || has_hung_up(&fds, &self.control) {
            self.look_for_server();
        }
        set.outcomes(&fds)
    }

    /// Waits for one of `fds`, the notifier or the deadline, and handles recalls by the server.
    fn pause(&self, mut fds: Vec<libc::pollfd>, deadline: Option<Instant>) -> Vec<libc::pollfd> {
        fds.push(pollfd(
            self.helper.notifier.as_fd().as_raw_fd(),
            libc::POLLIN,
        ));
        fds.push(pollfd(self.recall_event.as_fd().as_raw_fd(), libc::POLLIN));
        // The next check shows what ended it.
        let outside = inside::leave();
        self.helper.turns.end();
        let _ = wait::ppoll(&mut fds, deadline, None);
        drop(outside);
        if fds
            .pop()
            .is_some_and(|recall_event| recall_event.revents != 0)
        {
            self.hear_server();
        }
        let is_rung = fds.pop().is_some_and(|notifier| notifier.revents != 0);
        // While the helper is being stopped, the notifier stays set until nothing sleeps here any more.
        if is_rung && !self.helper.is_stopping() {
            self.helper.notifier.drain();
        }
        fds
    }

    fn hear_server(&self) {
        let recall_lock = self
            .recall_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !self.recall_event.drain() {
            return;
        }
        let Ok((
            ReplyBody::Recalled {
                sessions,
                has_tx_queues,
            },
            _,
        )) = self.control.call(RequestBody::FetchRecalls, &[])
        else {
            return;
        };
        if has_tx_queues {
            self.fetch_tx_queues();
        }
        drop(recall_lock);
        for session in sessions {
            posix::yield_session(self, session);
        }
    }

    /// The server notifies before it hands over a session that must wait for its transmit queue; the receiver of the
    /// session checks here before it sends anything. If the helper has cleared the notifier and fetches the list, this
    /// waits for it.
    pub(crate) fn hear_of_tx_queues(&self) {
        let _hearing = self
            .recall_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.recall_event.is_notified() {
            self.fetch_tx_queues();
        }
    }

    fn fetch_tx_queues(&self) {
        if let Ok((ReplyBody::TxQueues(tx_queues), taps)) =
            self.control.call(RequestBody::TxQueues, &[])
        {
            self.lock().set_tx_queues(clock::now(), tx_queues, taps);
        }
    }

    /// Ends all sessions once no packet can reach them any more.
    fn look_for_server(&self) {
        if !self.control.has_hung_up() {
            return;
        }
        successor::watch();
        self.lock().stop_awaiting_tx_queues(clock::now());
        if self.is_cut_off() {
            self.lock().end_all(clock::now());
        }
    }

    fn rest(&self, mut core: CoreGuard<'_>) {
        self.publish(&mut core);
        self.helper.is_resting.store(true, Ordering::Release);
        drop(core);
        // `poll` reports hang-ups unasked.
        let control = pollfd(self.control.as_fd().as_raw_fd(), 0);
        let watched = (!self.control.is_lost()).then_some(control);
        self.pause(watched.into_iter().collect(), Some(clock::now() + REST));
        self.look_for_server();
        self.helper.is_resting.store(false, Ordering::Release);
    }

    /// Publishes the statistics of all sessions to the server.
    pub(crate) fn publish(&self, core: &mut Core) {
        core.stack.observe_round_trips();
        for (slot, session) in core.stack.iter() {
            let spent = core.channel.accounts.spent(slot);
            core.statistics.publish(slot, &report::row(session, spent));
        }
        for (slot, id, end) in core.locals.iter() {
            core.statistics.publish(slot, &report::stream_row(id, end));
        }
        for (slot, row) in core.delegations.rows() {
            core.statistics.publish(slot, &row);
        }
        for (row, figures) in core.inboxes.rows() {
            core.statistics.publish_raw(row, &figures);
        }
        let mut counters = core.stack.counters();
        counters[SPUN_US] = u64::try_from(self.spinner.spun().as_micros()).unwrap_or(u64::MAX);
        core.statistics.publish_counters(&counters);
    }
}

/// On a kernel without slices per thread nothing changes.
fn take_short_slices() {
    const CALLER: u32 = 0;
    let _ = Attributes::of(CALLER).and_then(|now| now.with_slice(SLICE).apply(CALLER));
}

/// The rings, for which the filter wakes the helper if they are not read: edge-triggered, since
/// frames are often pending while their owner is about to read them.
struct Unattended {
    /// An epoll set; `None` if no descriptor was available: then only ticks are used.
    set: Option<InternalFd>,
    rings: usize,
    /// The renewal of the channel that the rings belong to.
    renewals: u32,
}

impl Unattended {
    fn new() -> Unattended {
        Unattended {
            set: descriptor::epoll_create(true).ok().map(InternalFd::new),
            rings: 0,
            renewals: 0,
        }
    }

    /// Watches new rings. None is removed from a channel before all are, with their server.
    fn watch(&mut self, core: &Core) {
        let channel = &core.channel;
        if channel.renewals() != self.renewals {
            *self = Unattended {
                renewals: channel.renewals(),
                ..Unattended::new()
            };
        }
        let Some(set) = &self.set else { return };
        let rings = std::iter::once(channel.ring_fd()).chain(channel.own_ring_fds());
        for ring in rings.skip(self.rings) {
            let event = libc::epoll_event {
                events: (libc::EPOLLIN | libc::EPOLLET) as u32,
                u64: 0,
            };
            let set = set.as_fd().as_raw_fd();
            // A ring that cannot be watched is checked at ticks.
            let _ =
                descriptor::epoll_control(set, libc::EPOLL_CTL_ADD, ring.as_raw_fd(), Some(event));
            self.rings += 1;
            channel.want_attention(true);
        }
    }

    fn pollfd(&self) -> Option<libc::pollfd> {
        let set = self.set.as_ref()?;
        Some(pollfd(set.as_fd().as_raw_fd(), libc::POLLIN))
    }

    /// Has the filter woken the helper since the last call?
    fn take(&self) -> bool {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let set = self.set.as_ref().map(|set| set.as_fd().as_raw_fd());
        set.is_some_and(|set| {
            descriptor::epoll_collect(set, &mut events).is_ok_and(|count| count > 0)
        })
    }
}
