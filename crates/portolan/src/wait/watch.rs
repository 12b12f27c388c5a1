//! Which thread watches the channel while threads sleep (`docs/design/waiting.md`).
//!
//! The leader/followers pattern: of all threads that sleep in the library one is the *leader*. It
//! alone waits for frames, timers, local peers and the outcomes of active opens; the others, the
//! *followers*, wait to be signalled. The background thread leads while no application thread does.
//!
//! This module decides and never sleeps: each step returns the thread to signal, so that the model
//! in `watch/model.rs` runs the same code. Its invariants, whenever the process's lock is free:
//!
//! 1. While an application thread sleeps in the library, one of them leads, or one that will lead has
//!    been signalled.
//! 2. A sleeping leader watches everything that is needed ([`Needs`]), or it has been signalled.
//! 3. A thread that no longer leads, but does not know it yet, has been signalled.

use portolan_types::Instant;

use crate::channel::Full;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leader {
    /// The background thread, because no application thread sleeps; any of them may take over.
    Helper,
    Application,
}

/// The task of a thread that is about to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Lead,
    Follow,
}

/// What the background thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum HelperStep {
    /// Sleeps until the next tick: the program comes by.
    Tick,
    /// Sleeps until the leader, which does all there is to do, goes back to the program.
    Rest,
    /// Leads until an application thread comes.
    StandIn,
}

/// Has an application thread attended to the channel since the background thread looked last?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Since {
    Attended,
    Left,
}

impl Since {
    /// By the count of those that attend.
    pub(crate) fn of(seen: u64, attended: u64) -> Since {
        match attended == seen {
            true => Since::Left,
            false => Since::Attended,
        }
    }
}

/// How a leader sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SleepsOn {
    Descriptors,
    /// Words of shared memory (`futex_waitv`): those of the local sessions that existed when it fell asleep.
    Words,
}

/// What a leader has to watch at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Needs {
    /// When the next timer of a session is due.
    pub(crate) timer: Option<Instant>,
    /// Transmit queues that frames wait for.
    pub(crate) full: Full,
    /// There are sessions that frames may arrive for.
    pub(crate) wire: bool,
    /// There are local sessions, whose peers wake this process by one descriptor for all.
    pub(crate) local: bool,
    /// Counts additions to the other descriptors that a leader polls.
    pub(crate) additions: u64,
}

impl Needs {
    /// Is something needed that a leader which fell asleep with `watched` does not watch?
    fn exceed(&self, watched: &Needs) -> bool {
        let is_sooner = |next| watched.timer.is_none_or(|until| next < until);
        self.full.exceeds(watched.full)
            || self.wire && !watched.wire
            || self.local && !watched.local
            || self.additions != watched.additions
            || self.timer.is_some_and(is_sooner)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sleeper<W> {
    leader: Leader,
    waiter: W,
    watched: Needs,
    sleeps_on: SleepsOn,
}

/// `W` names a thread and wakes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Watch<W> {
    asleep: Option<Sleeper<W>>,
    followers: Vec<W>,
    polls_only: bool,
}

impl<W> Default for Watch<W> {
    fn default() -> Watch<W> {
        Watch {
            asleep: None,
            followers: Vec::new(),
            polls_only: false,
        }
    }
}

impl<W: Clone + PartialEq> Watch<W> {
    pub(crate) fn is_led_by(&self, leader: Leader) -> bool {
        self.asleep
            .as_ref()
            .is_some_and(|sleeper| sleeper.leader == leader)
    }

    /// Does the leader wait for frames?
    pub(crate) fn has_wire(&self) -> bool {
        self.asleep
            .as_ref()
            .is_some_and(|sleeper| sleeper.watched.wire)
    }

    pub(crate) fn sleeps_on_words(&self) -> bool {
        self.asleep
            .as_ref()
            .is_some_and(|sleeper| sleeper.sleeps_on == SleepsOn::Words)
    }

    /// Makes a thread the leader, which sleeps. A previous leader must be signalled: a woken poll
    /// continues to sleep if another thread has consumed its event.
    #[must_use = "the thread is to be signalled"]
    pub(crate) fn lead(
        &mut self,
        leader: Leader,
        waiter: &W,
        (watched, sleeps_on): (Needs, SleepsOn),
    ) -> Option<W> {
        let before = self.stop();
        self.asleep = Some(Sleeper {
            leader,
            waiter: waiter.clone(),
            watched,
            sleeps_on,
        });
        before
    }

    /// Ends the leader's role. It must be signalled, unless it has woken already.
    #[must_use = "the thread is to be signalled"]
    pub(crate) fn stop(&mut self) -> Option<W> {
        self.asleep.take().map(|sleeper| sleeper.waiter)
    }

    /// May a leader sleep on words? It would not notice events that other sleeping threads wait for.
    pub(crate) fn may_use_words(&self) -> bool {
        !self.polls_only && !self.is_led_by(Leader::Application)
    }

    pub(crate) fn forgo_words(&mut self) {
        self.polls_only = true;
    }

    /// Adds a follower. With several sleeping threads the leader must poll; one that does not yet must start again.
    #[must_use = "the thread is to be signalled"]
    pub(crate) fn follow(&mut self, waiter: &W) -> Option<W> {
        self.followers.push(waiter.clone());
        self.polls_only = true;
        match &self.asleep {
            Some(leader) if leader.sleeps_on == SleepsOn::Words => Some(leader.waiter.clone()),
            _ => None,
        }
    }

    pub(crate) fn unfollow(&mut self, waiter: &W) {
        if let Some(at) = self.followers.iter().position(|other| other == waiter) {
            self.followers.remove(at);
        }
    }

    /// Called by a thread that returns to its application: another sleeping one has to lead.
    #[must_use = "the thread is to be signalled"]
    pub(crate) fn hand_over(&self) -> Option<W> {
        if self.is_led_by(Leader::Application) {
            None
        } else {
            self.followers.first().cloned()
        }
    }

    /// If the background thread leads, it has to determine again what to watch.
    #[must_use = "the thread is to be signalled"]
    pub(crate) fn call_helper(&self) -> Option<W> {
        let leader = self.asleep.as_ref()?;
        (leader.leader == Leader::Helper).then(|| leader.waiter.clone())
    }

    /// The background thread has ticked.
    pub(crate) fn after_tick(&self, since: Since) -> HelperStep {
        match (self.is_led_by(Leader::Application), since) {
            (true, Since::Left) => HelperStep::Rest,
            (_, Since::Attended) => HelperStep::Tick,
            (false, Since::Left) => HelperStep::StandIn,
        }
    }

    /// The background thread stands in, and has woken or is about to lead.
    pub(crate) fn while_standing_in(&self, since: Since) -> HelperStep {
        match (self.is_led_by(Leader::Application), since) {
            (false, Since::Left) => HelperStep::StandIn,
            _ => HelperStep::Tick,
        }
    }

    /// Something may have changed that the leader does not watch: to be called each time the lock is released.
    #[must_use = "the thread is to be signalled"]
    pub(crate) fn settle(&self, needs: impl FnOnce() -> Needs) -> Option<W> {
        let leader = self.asleep.as_ref()?;
        needs()
            .exceed(&leader.watched)
            .then(|| leader.waiter.clone())
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
