//! The timing wheel (MS Figs. 14 and 15): setting and clearing a deadline, and expiring one, by the number of pending
//! deadlines. Deadlines are the paper's: up to 500 s, and up to 250 s for those that expire.

use std::time::{self, Duration};

use portolan_timers::Wheel;
use portolan_types::Instant;

use super::{Clock, Curves};

const PENDING: [u32; 8] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536];

const LONGEST: Duration = Duration::from_secs(500);

/// Deadlines that are set and cleared between two clock reads.
const BATCH: u32 = 64;

pub(crate) fn measure(clock: Clock) -> Curves {
    let mut curves = Curves::new();
    for pending in PENDING {
        let [set, clear] = set_and_clear(clock, pending);
        let expire = expire(clock, pending);
        for (name, nanoseconds) in [("set", set), ("clear", clear), ("expire", expire)] {
            let curve: &mut Vec<_> = curves.entry(name).or_default();
            curve.push([f64::from(pending), nanoseconds]);
        }
    }
    curves
}

/// Returns the nanoseconds of setting and of clearing, with `pending` other deadlines: the minimum of all batches.
fn set_and_clear(clock: Clock, pending: u32) -> [f64; 2] {
    let mut deadlines = Deadlines::new(LONGEST);
    let mut wheel = Wheel::new(Instant::from_nanos(0));
    (0..pending).for_each(|slot| wheel.set(slot, deadlines.next()));
    let mut best = [f64::INFINITY; 2];
    let begin = time::Instant::now();
    while begin.elapsed() < clock.time {
        let more: Vec<_> = (pending..pending + BATCH)
            .map(|slot| (slot, deadlines.next()))
            .collect();
        let start = time::Instant::now();
        more.iter().for_each(|&(slot, at)| wheel.set(slot, at));
        let set = start.elapsed();
        more.iter().for_each(|&(slot, _)| wheel.clear(slot));
        let both = start.elapsed();
        for (best, took) in best.iter_mut().zip([set, both - set]) {
            *best = best.min(took.as_nanos() as f64 / f64::from(BATCH));
        }
    }
    best
}

/// Returns the nanoseconds per deadline until all have expired: the minimum of all wheels.
fn expire(clock: Clock, pending: u32) -> f64 {
    let mut deadlines = Deadlines::new(LONGEST / 2);
    let mut best = f64::INFINITY;
    let begin = time::Instant::now();
    while begin.elapsed() < clock.time {
        let mut wheel = Wheel::new(Instant::from_nanos(0));
        (0..pending).for_each(|slot| wheel.set(slot, deadlines.next()));
        let mut fired = 0;
        let start = time::Instant::now();
        while let Some(next) = wheel.next() {
            wheel.expire(next, |_| fired += 1);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(fired));
    }
    best
}

/// Random deadlines, the same in every run (xorshift).
struct Deadlines {
    state: u64,
    longest: u64,
}

impl Deadlines {
    fn new(longest: Duration) -> Deadlines {
        Deadlines {
            state: 1,
            longest: longest.as_nanos() as u64,
        }
    }

    fn next(&mut self) -> Instant {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        Instant::from_nanos(self.state % self.longest)
    }
}
