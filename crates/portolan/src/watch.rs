//! Who watches the channel while threads sleep.
//!
//! Of all threads that sleep in the library one is the *leader*: it alone waits for the channel
//! and runs the timers, the others wait to be signalled. A leader that returns to its application
//! signals another sleeper to lead. The helper leads while no application thread does. One that
//! takes over from it signals it: a poll that was woken sleeps on if another has read what came, and
//! nobody would wake it again once frames come by the ring.

use std::sync::Arc;

use portolan_types::Instant;

use crate::channel::Full;
use crate::wait::Waiter;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leader {
    /// The helper thread, because no application thread attends; any of them may take over.
    Helper,
    Application,
}

/// What a thread that is about to sleep has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Lead,
    Follow,
}

/// What a leader wakes for besides frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Duty {
    pub(crate) timer: Option<Instant>,
    /// It waits until those take frames again.
    pub(crate) full: Full,
    /// There are sessions that frames may come for.
    pub(crate) has_wire: bool,
}

#[derive(Debug)]
struct Sleeper {
    leader: Leader,
    waiter: Arc<Waiter>,
    duty: Duty,
}

#[derive(Debug, Default)]
pub(crate) struct Watch {
    asleep: Option<Sleeper>,
    followers: Vec<Arc<Waiter>>,
    polls_only: bool,
}

impl Watch {
    pub(crate) fn is_led_by(&self, leader: Leader) -> bool {
        self.asleep
            .as_ref()
            .is_some_and(|sleeper| sleeper.leader == leader)
    }

    /// Does the leader wait for frames?
    pub(crate) fn has_wire(&self) -> bool {
        self.asleep
            .as_ref()
            .is_some_and(|sleeper| sleeper.duty.has_wire)
    }

    pub(crate) fn lead(&mut self, leader: Leader, waiter: &Arc<Waiter>, duty: Duty) {
        self.stop();
        self.asleep = Some(Sleeper {
            leader,
            waiter: Arc::clone(waiter),
            duty,
        });
    }

    /// The leader leads no more, whether it knows or is told.
    pub(crate) fn stop(&mut self) {
        if let Some(sleeper) = self.asleep.take() {
            sleeper.waiter.signal();
        }
    }

    /// May a leader sleep on words? It would not notice sessions that other threads add.
    pub(crate) fn may_use_words(&self) -> bool {
        !self.polls_only && !self.is_led_by(Leader::Application)
    }

    pub(crate) fn forgo_words(&mut self) {
        self.polls_only = true;
    }

    /// Where several threads sleep the leader polls; one that does not yet begins again.
    pub(crate) fn follow(&mut self, waiter: &Arc<Waiter>) {
        self.followers.push(Arc::clone(waiter));
        if !std::mem::replace(&mut self.polls_only, true)
            && let Some(leader) = &self.asleep
        {
            leader.waiter.signal();
        }
    }

    pub(crate) fn unfollow(&mut self, waiter: &Arc<Waiter>) {
        self.followers
            .retain(|follower| !Arc::ptr_eq(follower, waiter));
    }

    /// Somebody else has to lead.
    pub(crate) fn hand_over(&self) {
        if !self.is_led_by(Leader::Application)
            && let Some(follower) = self.followers.first()
        {
            follower.signal();
        }
    }

    /// The helper, if it leads, has to look again at what it is to watch.
    pub(crate) fn call_helper(&self) {
        if let Some(sleeper) = &self.asleep
            && sleeper.leader == Leader::Helper
        {
            sleeper.waiter.signal();
        }
    }

    /// A thread that does not sleep may have made more work for the leader than it fell asleep with.
    pub(crate) fn hurry(&self, duty: Duty) {
        if let Some(sleeper) = &self.asleep
            && (duty.full.exceeds(sleeper.duty.full)
                || duty.has_wire && !sleeper.duty.has_wire
                || duty
                    .timer
                    .is_some_and(|next| sleeper.duty.timer.is_none_or(|until| next < until)))
        {
            sleeper.waiter.signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use portolan_stack::Door;
    use portolan_sys::wait::ppoll;

    use super::*;

    const CALM: Duty = Duty {
        timer: None,
        full: Full::NONE,
        has_wire: false,
    };

    fn sleeper() -> Arc<Waiter> {
        Waiter::forget_mine();
        let waiter = Waiter::mine().expect("an eventfd");
        waiter.fall_asleep();
        waiter
    }

    fn is_signalled(waiter: &Waiter) -> bool {
        let mut fds = [waiter.pollfd()];
        ppoll(&mut fds, Some(Instant::ZERO), None).expect("ppoll");
        fds[0].revents != 0
    }

    #[test]
    fn a_helper_that_is_relieved_is_told() {
        let (helper, application) = (sleeper(), sleeper());
        let mut watch = Watch::default();
        watch.lead(Leader::Helper, &helper, CALM);
        assert!(!is_signalled(&helper));
        watch.lead(Leader::Application, &application, CALM);
        assert!(is_signalled(&helper));
        assert!(watch.is_led_by(Leader::Application));
    }

    #[test]
    fn a_leader_that_has_woken_is_not_signalled_when_it_stops() {
        let leader = sleeper();
        let mut watch = Watch::default();
        watch.lead(Leader::Application, &leader, CALM);
        leader.wake();
        watch.stop();
        assert!(!is_signalled(&leader));
        assert!(!watch.is_led_by(Leader::Application));
    }

    #[test]
    fn more_work_wakes_the_leader() {
        let later = Instant::ZERO + Duration::from_secs(2);
        let sooner = Instant::ZERO + Duration::from_secs(1);
        let until = Duty {
            timer: Some(later),
            ..CALM
        };
        let full = |door| Duty {
            full: Full::only(Door(door)),
            ..CALM
        };
        let cases = [
            (CALM, CALM, false),
            (CALM, until, true),
            (until, CALM, false),
            (until, until, false),
            (
                until,
                Duty {
                    timer: Some(sooner),
                    ..CALM
                },
                true,
            ),
            (CALM, full(0), true),
            (full(0), full(0), false),
            (full(0), full(1), true),
            (full(1), CALM, false),
            (
                CALM,
                Duty {
                    has_wire: true,
                    ..CALM
                },
                true,
            ),
        ];
        for (asleep_with, now, is_woken) in cases {
            let leader = sleeper();
            let mut watch = Watch::default();
            watch.lead(Leader::Application, &leader, asleep_with);
            watch.hurry(now);
            assert_eq!(is_signalled(&leader), is_woken, "{asleep_with:?} {now:?}");
        }
    }

    #[test]
    fn a_follower_is_asked_to_lead_when_the_leader_has_gone() {
        let (leader, follower) = (sleeper(), sleeper());
        let mut watch = Watch::default();
        watch.follow(&follower);
        watch.lead(Leader::Application, &leader, CALM);
        watch.hand_over();
        assert!(!is_signalled(&follower));
        watch.stop();
        watch.hand_over();
        assert!(is_signalled(&follower));
        watch.unfollow(&follower);
    }
}
