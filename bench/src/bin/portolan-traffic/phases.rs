//! Alternating calm and busy half-seconds, the same for all programs of this machine: they separate the effects of load
//! in the busy ones from disturbances that are always present.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

const PHASE: Duration = Duration::from_millis(500);

/// Times within one window are evaluated together. Windows are short, so that pauses of a machine that shares its
/// processors with others affect some of them, but not all.
const WINDOW: Duration = Duration::from_millis(25);

const WINDOWS: u64 = (PHASE.as_nanos() / WINDOW.as_nanos()) as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Calm,
    Busy,
}

impl Phase {
    pub(crate) fn now() -> Phase {
        Phase::of(window())
    }

    fn of(window: u64) -> Phase {
        match window / WINDOWS % 2 {
            0 => Phase::Calm,
            _ => Phase::Busy,
        }
    }
}

/// Times, by the window in which they were recorded.
#[derive(Default)]
pub(crate) struct Phases(BTreeMap<u64, Vec<u64>>);

/// The times of all phases of one kind.
#[derive(Serialize)]
pub(crate) struct Spread {
    #[serde(skip)]
    pub count: usize,
    /// The first quartile over the windows: pauses of the machine increase the values of some, and decrease none.
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Phases {
    pub(crate) fn note(&mut self, nanoseconds: u64) {
        self.0.entry(window()).or_default().push(nanoseconds);
    }

    pub(crate) fn count(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    pub(crate) fn spread(&self, kind: Phase) -> Spread {
        let of_kind = self.0.iter().filter(|(at, _)| Phase::of(**at) == kind);
        let windows: Vec<Vec<u64>> = of_kind.map(|(_, times)| sorted(times.clone())).collect();
        let at = |fraction: f64| {
            let each = windows.iter().map(|times| quantile(times, fraction));
            quantile(&sorted(each.collect()), 0.25) as f64 / 1e3
        };
        Spread {
            count: windows.iter().map(Vec::len).sum(),
            p50_us: at(0.5),
            p99_us: at(0.99),
        }
    }
}

fn sorted(mut times: Vec<u64>) -> Vec<u64> {
    times.sort_unstable();
    times
}

/// Returns 0 for an empty slice.
fn quantile(sorted: &[u64], fraction: f64) -> u64 {
    let index = (sorted.len() as f64 * fraction) as usize;
    sorted.get(index).copied().unwrap_or_default()
}

/// Returns the number of the current window.
fn window() -> u64 {
    nanoseconds() / WINDOW.as_nanos() as u64
}

/// Returns the monotonic time, which is the same for all programs of this machine.
pub(crate) fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
