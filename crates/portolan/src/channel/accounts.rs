//! CPU time that the protocol spends on each session: input, and output with its system calls. Copies to and from the
//! program's buffers are not included.
//!
//! One piece of work in [`EVERY`] is measured, by the thread's CPU clock, so that neither preemption nor sleep counts,
//! and stands for all of them. After n pieces the relative error of the sum is about the coefficient of variation of
//! their costs times sqrt(EVERY / n): if the standard deviation equals the mean, 2.5 % after 100,000 frames. The
//! clock's own cost is subtracted, except for some 0.2 us that it takes longer when it has not been used for a while.

use std::time::Duration;

use portolan_sys::clock;
use portolan_types::Slot;

/// Odd, and a prime: work often alternates between input and output.
const EVERY: u32 = 61;

/// Number of trials to find the clock's cost: the minimum is the undisturbed one.
const TRIALS: usize = 8;

#[derive(Debug)]
pub(crate) struct Accounts {
    pieces: u32,
    /// The session being measured, and the start of the measurement.
    open: Option<(Slot, Duration)>,
    /// None before the first measurement.
    clock_cost: Option<Duration>,
    /// By slot.
    spent: Vec<Duration>,
}

impl Accounts {
    pub(crate) fn new() -> Accounts {
        Accounts {
            pieces: 0,
            open: None,
            clock_cost: None,
            spent: Vec::new(),
        }
    }

    /// Starts a piece of work for the session at `slot`, and ends the current one.
    pub(crate) fn begin(&mut self, slot: Slot) {
        self.end();
        self.pieces = self.pieces.wrapping_add(1);
        if self.pieces.is_multiple_of(EVERY) {
            self.open = Some((slot, clock::of_thread()));
        }
    }

    /// Ends the current piece of work.
    pub(crate) fn end(&mut self) {
        if let Some((slot, begun)) = self.open.take() {
            let took = clock::of_thread().saturating_sub(begun);
            let clock_cost = *self.clock_cost.get_or_insert_with(cost_of_clock);
            self.charge(slot, took.saturating_sub(clock_cost) * EVERY);
        }
    }

    pub(crate) fn spent(&self, slot: Slot) -> Duration {
        let spent = self.spent.get(slot.0 as usize);
        spent.copied().unwrap_or_default()
    }

    /// Resets the account of a slot for another session.
    pub(crate) fn clear(&mut self, slot: Slot) {
        if let Some(spent) = self.spent.get_mut(slot.0 as usize) {
            *spent = Duration::ZERO;
        }
    }

    /// Adds to the account of a slot. Frames may name slots beyond the table; these have no account.
    fn charge(&mut self, slot: Slot, time: Duration) {
        const SLOTS: usize = portolan_proto::report::STATISTICS_SLOTS;
        let slot = slot.0 as usize;
        if slot >= SLOTS {
            return;
        }
        if self.spent.len() <= slot {
            self.spent.resize(slot + 1, Duration::ZERO);
        }
        self.spent[slot] += time;
    }
}

fn cost_of_clock() -> Duration {
    let trial = |_| {
        let before = clock::of_thread();
        clock::of_thread().saturating_sub(before)
    };
    (0..TRIALS).map(trial).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::*;

    fn work(turns: u32) {
        for turn in 0..turns {
            black_box(turn);
        }
    }

    #[test]
    fn sessions_are_charged_for_what_is_done_for_them() {
        let mut accounts = Accounts::new();
        let begun = clock::of_thread();
        for _ in 0..5_000 {
            accounts.begin(Slot(1));
            work(60_000);
            accounts.begin(Slot(2));
            work(20_000);
            accounts.end();
        }
        let all = (clock::of_thread() - begun).as_secs_f64();
        let [much, little] = [1, 2].map(|slot| accounts.spent(Slot(slot)).as_secs_f64());
        // Other load on the machine can make single pieces longer.
        assert!((2.0..4.5).contains(&(much / little)), "{much} {little}");
        assert!(
            (0.7..1.3).contains(&((much + little) / all)),
            "{much} {little} {all}"
        );
    }

    #[test]
    fn a_new_session_begins_with_nothing() {
        let mut accounts = Accounts::new();
        accounts.charge(Slot(1), Duration::from_secs(1));
        accounts.clear(Slot(1));
        assert_eq!(accounts.spent(Slot(1)), Duration::ZERO);
        accounts.charge(Slot(u32::MAX), Duration::from_secs(1));
        assert_eq!(accounts.spent(Slot(u32::MAX)), Duration::ZERO);
    }
}
