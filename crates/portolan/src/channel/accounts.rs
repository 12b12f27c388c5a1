//! CPU time that the protocol spends on each session: input, and output with its system calls. Copies to and from the
//! program's buffers are not included.
//!
//! One piece of work in [`EVERY`] is measured, by the thread's CPU clock, so that neither preemption nor sleep counts,
//! and stands for all of them. After n pieces the relative error of the sum is about the coefficient of variation of
//! their costs times sqrt(EVERY / n): if the standard deviation equals the mean, 2.5 % after 100,000 frames. The
//! clock's own cost is subtracted, except for some 0.2 us that it takes longer when it has not been used for a while.

use std::time::Duration;

use portolan_sys::clock::of_thread;
use portolan_types::Slot;

/// Odd, and a prime: work often alternates between input and output.
const EVERY: u32 = 61;

/// Number of trials to find the clock's cost: the minimum is the undisturbed one.
const TRIALS: usize = 8;

#[derive(Debug)]
pub(crate) struct Accounts {
    /// CPU time of the calling thread.
    clock: fn() -> Duration,
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
        Accounts::by(of_thread)
    }

    fn by(clock: fn() -> Duration) -> Accounts {
        Accounts {
            clock,
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
            self.open = Some((slot, (self.clock)()));
        }
    }

    /// Ends the current piece of work.
    pub(crate) fn end(&mut self) {
        if let Some((slot, begun)) = self.open.take() {
            let took = (self.clock)().saturating_sub(begun);
            let clock_cost = *self.clock_cost.get_or_insert_with(|| cost_of(self.clock));
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

fn cost_of(clock: fn() -> Duration) -> Duration {
    let trial = |_| {
        let before = clock();
        clock().saturating_sub(before)
    };
    (0..TRIALS).map(trial).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const READING: Duration = Duration::from_nanos(100);

    thread_local! {
        static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    fn work(time: Duration) {
        NOW.set(NOW.get() + time);
    }

    /// A clock that takes time to read, and advances by nothing but work.
    fn slow_clock() -> Duration {
        work(READING);
        NOW.get()
    }

    #[test]
    fn sessions_are_charged_for_what_is_done_for_them() {
        const PIECES: u32 = EVERY * 100;
        let costs = [3, 1].map(Duration::from_micros);
        let mut accounts = Accounts::by(slow_clock);
        for _ in 0..PIECES {
            accounts.begin(Slot(1));
            work(costs[0]);
            accounts.begin(Slot(2));
            work(costs[1]);
            accounts.end();
            work(costs[0]);
        }
        let spent = [1, 2].map(|slot| accounts.spent(Slot(slot)));
        assert_eq!(spent, costs.map(|cost| cost * PIECES));
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
