//! The background thread (helper): attends to the channel only while no application thread does.
//!
//! It is in one of three states. *Ticking*: after each [`TICK`] it checks whether application threads still attend
//! to the channel, and helps out if frames or timers wait; frames that a computing program leaves unread for
//! a while wake it earlier (`bpf/attention.h`). *On duty*: no thread has attended since the last tick, so it
//! sleeps on the channel like any leader. *Resting*: an application thread sleeps as leader and does all the
//! work, until that thread returns to the program. It does not rest while the leader sleeps in an event loop of the
//! program (`embedded`), which may compute instead.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use portolan_local::WakeBy;
use portolan_sys::sched::Attributes;
use portolan_sys::wait::pollfd;
use portolan_sys::{clock, thread, wait};
use portolan_types::Instant;

use crate::channel::ring_events::RingEvents;
use crate::migration::{part, registration, yield_session};
use crate::process::control::Control;
use crate::process::inside;
use crate::process::{CoreGuard, Process};
use crate::runtime::Core;
use crate::socket::Socket;
use crate::threads::sleep::{WatchSet, earliest};
use crate::threads::successor;
use crate::threads::unseen::Schedule;
use crate::wait::waiter::Waiter;
use crate::wait::watch::{HelperStep, Since};

/// Until an unattended channel is noticed, at least.
const TICK: Duration = Duration::from_millis(8);

/// Ticks come at multiples of this time, as the scheduler's do (250 or 1,000 a second): one interrupt serves both. Each other
/// timer interrupts a program, in a virtual machine at the price of several exits from it.
const GRID: Duration = Duration::from_millis(4);

/// Resolution of sessions' timers while the program computes.
const RESOLUTION: Duration = Duration::from_micros(200);

/// Scheduler slice: the thread works for a moment each time it wakes, and must run at once where it
/// shares a processor with a computing program (see `wait/turns.rs`, too).
const SLICE: Duration = Duration::from_micros(100);

/// Number of ticks between publications of the statistics that `portolan ss` shows.
const PUBLISH_EVERY: u32 = 10;

/// Interval at which a resting helper wakes all the same, to publish statistics.
const REST: Duration = Duration::from_secs(1);

/// What the thread does until it is stopped.
pub(crate) fn run(process: &'static Process, mut unattended: RingEvents) {
    let _inside = inside::enter();
    take_short_slices();
    thread::sleep_exactly();
    let mut schedule = Schedule::default();
    let mut seen = 0;
    let mut ticks = 0_u32;
    while !process.helper.is_stopping() {
        seen = process.tick(&mut unattended, seen);
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(PUBLISH_EVERY) {
            process.look_for_server();
            process.publish(&mut process.lock());
        }
        process.take_outcomes();
        registration::attend(process);
        part::attend(process);
        process.check_for_unseen_waits(&mut schedule);
        let mut core = process.lock();
        let since = Since::of(seen, core.attended);
        match core.watch.after_tick(since) {
            HelperStep::Rest if core.is_leader_late() => {
                core.stop_leading(clock::now());
                seen = process.stand_in(core, &mut schedule);
            }
            // That leader has to be watched.
            HelperStep::Rest if core.leader_computes => {}
            // Connections wait to be accepted.
            HelperStep::Rest if core.delegations.deadline().is_some() => {}
            HelperStep::Rest => process.rest(core),
            HelperStep::StandIn => {
                process.publish(&mut core);
                seen = process.stand_in(core, &mut schedule);
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

fn next_tick(now: Instant) -> Instant {
    let grid = GRID.as_nanos() as u64;
    Instant::from_nanos((now + TICK).as_nanos().next_multiple_of(grid))
}

/// Does the connection to the server, which is among the polled descriptors, show a hang-up?
fn has_hung_up(polled: &[libc::pollfd], control: &Control) -> bool {
    let control = control.as_fd().as_raw_fd();
    polled
        .iter()
        .any(|polled| polled.fd == control && polled.revents & libc::POLLHUP != 0)
}

impl Process {
    /// Waits for the next tick, or until the filter reports unread frames, which it processes.
    /// Returns the value that `attended` would have without the helper, if it was `seen` before;
    /// the current value if there were such frames, so that the helper stands in from then on.
    fn tick(&'static self, unattended: &mut RingEvents, mut seen: u64) -> u64 {
        let end = next_tick(clock::now());
        let mut until = end;
        self.lock().channel.watch_for_unattended(unattended);
        let mut has_frames = false;
        loop {
            let fds = unattended.pollfd().into_iter().collect();
            if until < end {
                self.end_turn();
            }
            self.pause(fds, Some(until));
            has_frames |= unattended.take();
            let now = clock::now();
            if now >= end || self.helper.is_stopping() {
                return seen;
            }
            let Some(mut core) = self.try_lock() else {
                // A thread of the program is at work in the library. What it leaves is found then.
                until = (now + RESOLUTION).min(end);
                continue;
            };
            has_frames &= core.channel.may_have_received();
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
    fn stand_in(&'static self, mut core: CoreGuard<'static>, schedule: &mut Schedule) -> u64 {
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
            let deadline = earliest(core.deadline(), schedule.deadline());
            let deadline = earliest(deadline, core.next_registration());
            let deadline = earliest(deadline, core.delegations.deadline());
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
            registration::attend(self);
            part::attend(self);
            self.check_for_unseen_waits(schedule);
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
    fn sleep(&'static self, set: &WatchSet, mut deadline: Option<Instant>) -> Vec<libc::pollfd> {
        let mut fds = set.fds().to_vec();
        if self.control.is_lost() {
            let next_look = clock::now() + REST;
            deadline = Some(deadline.map_or(next_look, |deadline| deadline.min(next_look)));
        } else {
            // `poll` reports hang-ups unasked.
            fds.push(pollfd(self.control.as_fd().as_raw_fd(), 0));
        }
        self.end_turn();
        let fds = self.pause(fds, deadline);
        if self.control.is_lost() || has_hung_up(&fds, &self.control) {
            self.look_for_server();
        }
        set.outcomes(&fds)
    }

    /// Called after work, before a sleep that a frame may end at once.
    fn end_turn(&self) {
        let outside = inside::leave();
        self.helper.turns.end();
        drop(outside);
    }

    /// Waits for one of `fds`, the notifier or the deadline, and handles recalls by the server.
    fn pause(
        &'static self,
        mut fds: Vec<libc::pollfd>,
        deadline: Option<Instant>,
    ) -> Vec<libc::pollfd> {
        fds.push(pollfd(
            self.helper.notifier.as_fd().as_raw_fd(),
            libc::POLLIN,
        ));
        fds.push(pollfd(self.recall_event.as_fd().as_raw_fd(), libc::POLLIN));
        // The next check shows what ended it.
        let outside = inside::leave();
        let _ = wait::ppoll(&mut fds, deadline, None);
        drop(outside);
        if fds
            .pop()
            .is_some_and(|recall_event| recall_event.revents != 0)
        {
            for session in self.fetch_recalls() {
                yield_session(self, session);
            }
        }
        if self.helper.takes_unadopted() {
            successor::look_again();
        }
        let is_notified = fds.pop().is_some_and(|notifier| notifier.revents != 0);
        // While the helper is being stopped, the notifier stays set until nothing sleeps here any more.
        if is_notified && !self.helper.is_stopping() {
            self.helper.notifier.drain();
        }
        fds
    }

    /// Ends all sessions once no packet can reach them any more.
    fn look_for_server(&self) {
        if !self.control.has_hung_up() {
            return;
        }
        successor::watch();
        self.lock().stop_awaiting_tx_queues(clock::now());
        if Process::is_cut_off() {
            self.lock().end_for_good(clock::now());
        }
    }

    fn rest(&'static self, mut core: CoreGuard<'_>) {
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
}

impl Core {
    /// Has a leader that may compute left something to do? It had the time since the last tick.
    fn is_leader_late(&self) -> bool {
        if !self.leader_computes {
            return false;
        }
        let mut fds: Vec<_> = self.locals.pollfds().collect();
        self.channel_fds(&mut fds);
        let is_due = |timer: Instant| timer <= clock::now();
        self.deadline().is_some_and(is_due)
            || wait::ppoll(&mut fds, Some(Instant::ZERO), None).is_ok_and(|ready| ready > 0)
    }
}

/// On a kernel without slices per thread nothing changes.
fn take_short_slices() {
    // Debian's unit of redis has a filter that kills for this call.
    if thread::is_filtered() {
        return;
    }
    let _ = Attributes::take_slice(SLICE);
}
