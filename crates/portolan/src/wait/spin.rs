//! How long a thread spins before it sleeps. A sleep and its wake-up cost some 10 to 50 µs of latency, and of processor
//! time on both sides: a spin that finds something within that time has paid. So each thread has a *credit*. A spin
//! that pays earns the cost of the avoided sleep, less its own time; one that does not pay costs its whole time.
//! Without credit the thread sleeps at once; the [`BUDGET`] of its busy time lets it try again.
//!
//! Threads do not spin where that would harm others, or throughput: while other threads want the processor, and while
//! many sessions have events, which a sleep batches.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use portolan_sys::clock;
use portolan_types::{Instant, Slot};
use rustix::thread::sched_yield;

/// The share of a thread's busy time that futile spins may take: one in this many.
const BUDGET: u32 = 20;

/// Maximum credit, in futile spins: what was learned is soon forgotten.
const VAIN_SPINS: u32 = 8;

/// Kernel descriptors are checked at one in this many checks.
const KERNEL_EVERY: u32 = 8;

/// If a yielded processor comes back later than this, other threads ran.
const OTHERS_RAN: Duration = Duration::from_micros(15);

/// How long the thread does not spin then: initially and at most.
const PAUSE_FIRST: Duration = Duration::from_millis(5);
const PAUSE_LAST: Duration = Duration::from_secs(1);

thread_local! {
    static LEARNED: Cell<Spin> = const { Cell::new(Spin::new()) };
}

/// State of a process: one thread spins at a time, since all would read the same rings.
#[derive(Debug)]
pub(crate) struct Spinner {
    /// The cost of a sleep, which is the longest spin. Zero if threads must not spin.
    cost: Duration,
    is_taken: AtomicBool,
    /// Nanoseconds spent spinning.
    spun: AtomicU64,
}

impl Spinner {
    pub(crate) fn new(cost: Duration) -> Spinner {
        Spinner {
            cost,
            is_taken: AtomicBool::new(false),
            spun: AtomicU64::new(0),
        }
    }

    /// Returns the time that all threads have spun.
    pub(crate) fn spun(&self) -> Duration {
        Duration::from_nanos(self.spun.load(Ordering::Relaxed))
    }

    /// Called when the calling thread begins to wait.
    pub(crate) fn wait(&self) -> Turn<'_> {
        Turn {
            spinner: self,
            learned: LEARNED.get(),
            state: State::Schedule,
            pauses: 0,
            now: Instant::ZERO,
        }
    }
}

/// One wait of a thread.
pub(crate) struct Turn<'a> {
    spinner: &'a Spinner,
    learned: Spin,
    state: State,
    pauses: u32,
    /// The last time that was read.
    now: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has not checked yet, or found something.
    Schedule,
    /// It must offer its processor to others once.
    Begins {
        begun: Instant,
        until: Instant,
    },
    Spins {
        begun: Instant,
        until: Instant,
    },
    /// It does not spin again in this wait.
    Sleeps,
}

impl Turn<'_> {
    /// Called after a check found nothing: must the thread check again rather than sleep?
    pub(crate) fn goes_on(&mut self, now: Instant, spread: &Spread) -> bool {
        self.now = now;
        match self.state {
            State::Schedule => self.begin(now, spread),
            State::Begins { until, .. } | State::Spins { until, .. } if now < until => true,
            State::Begins { begun, .. } | State::Spins { begun, .. } => {
                self.learned.in_vain(now.since(begun));
                self.stop(now.since(begun));
                false
            }
            State::Sleeps => false,
        }
    }

    fn begin(&mut self, now: Instant, spread: &Spread) -> bool {
        self.state = State::Sleeps;
        if self.spinner.cost.is_zero() {
            return false;
        }
        let until = self.learned.begin(now, self.spinner.cost);
        if until <= now || spread.is_wide() || self.spinner.is_taken.swap(true, Ordering::Acquire) {
            return false;
        }
        self.state = State::Begins { begun: now, until };
        true
    }

    /// Pauses between two checks, without a lock held.
    pub(crate) fn pause(&mut self) {
        self.pauses += 1;
        let State::Begins { begun, until } = self.state else {
            std::hint::spin_loop();
            return;
        };
        let before = clock::now();
        sched_yield();
        let now = clock::now();
        let until = if self.learned.yielded(now, now.since(before)) {
            until
        } else {
            now
        };
        self.state = State::Spins { begun, until };
    }

    /// Is it time to check kernel descriptors? That costs more than a check of the library's state.
    pub(crate) fn is_to_ask_kernel(&self) -> bool {
        self.pauses.is_multiple_of(KERNEL_EVERY)
    }

    /// Called when the awaited event is there.
    pub(crate) fn found(&mut self, now: Instant) {
        self.now = now;
        if let State::Begins { begun, .. } | State::Spins { begun, .. } = self.state {
            let spun = now.since(begun);
            self.learned.found(spun, self.spinner.cost);
            self.stop(spun);
        }
    }

    pub(crate) fn woke(&mut self, now: Instant) {
        self.now = now;
    }

    fn stop(&mut self, spun: Duration) {
        self.state = State::Sleeps;
        let spun = u64::try_from(spun.as_nanos()).unwrap_or(u64::MAX);
        self.spinner.spun.fetch_add(spun, Ordering::Relaxed);
        self.spinner.is_taken.store(false, Ordering::Release);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        match self.state {
            State::Schedule => return,
            State::Begins { begun, .. } | State::Spins { begun, .. } => {
                self.stop(self.now.since(begun));
            }
            State::Sleeps => {}
        }
        self.learned.end(self.now);
        LEARNED.set(self.learned);
    }
}

/// What one thread has learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    /// Time that futile spins may still take.
    credit: Duration,
    /// When the last wait ended.
    busy_since: Option<Instant>,
    paused_until: Instant,
    pause: Duration,
}

impl Spin {
    pub(crate) const fn new() -> Spin {
        Spin {
            credit: Duration::ZERO,
            busy_since: None,
            paused_until: Instant::ZERO,
            pause: PAUSE_FIRST,
        }
    }

    /// Begins a wait, where a sleep has this cost. Returns until when to spin.
    pub(crate) fn begin(&mut self, now: Instant, cost: Duration) -> Instant {
        let most = cost * VAIN_SPINS;
        match self.busy_since.take() {
            Some(since) => self.earn(now.since(since) / BUDGET, most),
            // The first wait is a trial.
            None => self.earn(cost, most),
        }
        if self.credit >= cost && now >= self.paused_until {
            now + cost
        } else {
            now
        }
    }

    /// Called when the awaited event came after a spin of this length.
    pub(crate) fn found(&mut self, spun: Duration, cost: Duration) {
        self.earn(cost.saturating_sub(spun), cost * VAIN_SPINS);
    }

    /// Called when the thread has spun this long, and sleeps now.
    pub(crate) fn in_vain(&mut self, spun: Duration) {
        self.credit = self.credit.saturating_sub(spun);
    }

    /// Called when the thread has offered its processor to others, and got it back after `took`. Returns false if it
    /// must not spin any longer.
    pub(crate) fn yielded(&mut self, now: Instant, took: Duration) -> bool {
        if took < OTHERS_RAN {
            self.pause = PAUSE_FIRST.max(self.pause / 2);
            return true;
        }
        self.paused_until = now + self.pause;
        self.pause = PAUSE_LAST.min(self.pause * 2);
        false
    }

    pub(crate) fn end(&mut self, now: Instant) {
        self.busy_since = Some(now);
    }

    fn earn(&mut self, time: Duration, most: Duration) {
        self.credit = most.min(self.credit + time);
    }
}

/// Recent number of sessions with events.
#[derive(Debug, Default)]
pub(crate) struct Spread {
    /// One bit per session (modulo 64) that had one of the counted events.
    sessions: u64,
    events: u32,
    is_wide: bool,
}

impl Spread {
    /// Number of events after which their sessions are counted.
    const SAMPLE: u32 = 64;
    /// If more sessions have events, a sleep batches those of several.
    const FEW: u32 = 8;

    pub(crate) fn note(&mut self, slot: Slot) {
        self.sessions |= 1 << (slot.0 % u64::BITS);
        self.events += 1;
        if self.events == Spread::SAMPLE {
            self.is_wide = self.sessions.count_ones() > Spread::FEW;
            *self = Spread {
                is_wide: self.is_wide,
                ..Spread::default()
            };
        }
    }

    pub(crate) fn is_wide(&self) -> bool {
        self.is_wide
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Duration = Duration::from_micros(40);

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1_000)
    }

    #[test]
    fn spins_that_pay_go_on() {
        let mut spin = Spin::new();
        for turn in 0..1_000 {
            let now = at(turn * 30);
            assert_eq!(spin.begin(now, COST), now + COST, "turn {turn}");
            spin.found(Duration::from_micros(20), COST);
            spin.end(now + Duration::from_micros(21));
        }
    }

    #[test]
    fn vain_spins_take_a_twentieth_of_the_busy_time() {
        const BUSY: Duration = Duration::from_micros(100);
        let mut spin = Spin::new();
        let (mut now, mut spun) = (at(0), Duration::ZERO);
        for _ in 0..10_000 {
            let until = spin.begin(now, COST);
            spin.in_vain(until.since(now));
            spun += until.since(now);
            now += Duration::from_millis(1);
            spin.end(now);
            now += BUSY;
        }
        let busy = BUSY * 10_000;
        assert!(spun <= busy / 20 + COST && spun > busy / 40, "{spun:?}");
    }

    #[test]
    fn who_is_idle_does_not_spin() {
        let mut spin = Spin::new();
        let mut spun = Duration::ZERO;
        for second in 0..1_000 {
            let now = at(second * 1_000_000);
            let until = spin.begin(now, COST);
            spin.in_vain(until.since(now));
            spun += until.since(now);
            // It has slept, and works for 50 µs.
            spin.end(now + Duration::from_micros(999_950));
        }
        assert!(
            spun <= Duration::from_micros(50) * 1_000 / 20 + COST,
            "{spun:?}"
        );
    }

    #[test]
    fn other_threads_on_the_processor_end_it_for_ever_longer() {
        let mut spin = Spin::new();
        let mut now = at(0);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            now = now.max(spin.paused_until);
            spin.found(Duration::ZERO, COST);
            spin.end(now);
            assert!(spin.begin(now, COST) > now);
            assert!(!spin.yielded(now, Duration::from_millis(3)));
            assert_eq!(spin.begin(now, COST), now);
            pauses.push(spin.paused_until.since(now));
        }
        assert!(pauses.is_sorted() && pauses[0] == PAUSE_FIRST && pauses[9] == PAUSE_LAST);
        assert!(spin.yielded(now, Duration::from_micros(1)));
    }

    #[test]
    fn many_sessions_with_events_are_told_from_few() {
        let mut spread = Spread::default();
        let mut note = |count: u32| {
            for event in 0..Spread::SAMPLE {
                spread.note(Slot(event % count));
            }
            spread.is_wide()
        };
        assert!([1, 4, 8].into_iter().all(|few| !note(few)));
        assert!([9, 50, 64, 1000].into_iter().all(&mut note));
        assert!(!note(2));
    }
}
