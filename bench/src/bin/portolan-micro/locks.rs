//! Locks and thread switches (MS Table II). All locks but the priority-inheriting one are a word that threads sleep on.

use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;
use std::time::Instant;

use portolan_sys::pi::PiMutex;
use portolan_sys::word::{Scope, Word, sleep_on, wake};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{Clock, Curves};

/// Turns of two threads that wait for each other.
const TURNS: u32 = 20_000;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and a thread may sleep on it.
const AWAITED: u32 = 2;

/// A mutex of three states.
struct Lock {
    word: AtomicU32,
    scope: Scope,
}

impl Lock {
    fn new(scope: Scope) -> Lock {
        let word = AtomicU32::new(FREE);
        Lock { word, scope }
    }

    fn hold<T>(&self, work: impl FnOnce() -> T) -> T {
        if self
            .word
            .compare_exchange(FREE, HELD, Acquire, Relaxed)
            .is_err()
        {
            while self.word.swap(AWAITED, Acquire) != FREE {
                let word = Word::new(&self.word, AWAITED, self.scope);
                // The word has changed, or a signal interrupted the sleep: try again.
                let _ = sleep_on(std::iter::once(word));
            }
        }
        let done = work();
        if self.word.swap(FREE, Release) == AWAITED {
            wake(&self.word, self.scope);
        }
        done
    }
}

pub(crate) fn measure(clock: Clock) -> io::Result<Curves> {
    let (private, shared) = (Lock::new(Scope::Private), Lock::new(Scope::Shared));
    let inheriting = PiMutex::new(());
    let nobody = AtomicU32::new(0);
    let mut curves = Curves::from(
        [
            ("private", clock.measure(|| private.hold(|| ()))),
            ("shared", clock.measure(|| shared.hold(|| ()))),
            ("inheriting", clock.measure(|| drop(inheriting.lock()))),
            (
                "signal-private",
                clock.measure(|| wake(&nobody, Scope::Private)),
            ),
            (
                "signal-shared",
                clock.measure(|| wake(&nobody, Scope::Shared)),
            ),
            (
                "private-contended",
                contended(clock, |work| private.hold(work))?,
            ),
            (
                "shared-contended",
                contended(clock, |work| shared.hold(work))?,
            ),
            (
                "inheriting-contended",
                contended(clock, |work| {
                    let _held = inheriting.lock();
                    work();
                })?,
            ),
        ]
        .map(|(name, nanoseconds)| (name, vec![[0.0, nanoseconds]])),
    );
    let cpus = cpus()?;
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    for (name, scope, other) in [
        ("switch-private", Scope::Private, first),
        ("switch-shared", Scope::Shared, first),
        ("wake-private", Scope::Private, last),
        ("wake-shared", Scope::Shared, last),
    ] {
        curves.insert(name, vec![[0.0, turns(scope, first, other)?]]);
    }
    Ok(curves)
}

/// Returns the nanoseconds of acquiring and releasing a lock that a thread on another core acquires and releases, too.
/// Each thread increments a counter while it holds the lock.
fn contended(clock: Clock, hold: impl Fn(&mut dyn FnMut()) + Sync) -> io::Result<f64> {
    let cpus = cpus()?;
    let is_over = AtomicU32::new(0);
    let count = AtomicU32::new(0);
    let step = || hold(&mut || count.store(count.load(Relaxed).wrapping_add(1), Relaxed));
    let measured = thread::scope(|scope| {
        let rival = scope.spawn(|| {
            bind(cpus[cpus.len() - 1])?;
            while is_over.load(Relaxed) == 0 {
                step();
            }
            io::Result::Ok(())
        });
        let own = scope.spawn(|| {
            bind(cpus[0])?;
            io::Result::Ok(clock.mean(step))
        });
        let measured = own.join();
        is_over.store(1, Relaxed);
        (measured, rival.join())
    });
    match measured {
        (Ok(measured), Ok(rival)) => rival.and(measured),
        _ => Err(io::Error::other("a thread panicked")),
    }
}

/// Returns the nanoseconds from one sleeping thread to another, pinned to these cores: half of two turns.
fn turns(scope: Scope, one: usize, other: usize) -> io::Result<f64> {
    let turn = AtomicU32::new(0);
    let take_turns = |own: u32, cpu: usize| -> io::Result<()> {
        bind(cpu)?;
        for number in (own..2 * TURNS).step_by(2) {
            loop {
                let now = turn.load(Acquire);
                if now >= number {
                    break;
                }
                let _ = sleep_on(std::iter::once(Word::new(&turn, now, scope)));
            }
            turn.store(number + 1, Release);
            wake(&turn, scope);
        }
        Ok(())
    };
    thread::scope(|threads| {
        let start = Instant::now();
        let second = threads.spawn(|| take_turns(1, other));
        let first = threads.spawn(|| take_turns(0, one));
        for thread in [first, second] {
            match thread.join() {
                Ok(ended) => ended?,
                Err(_) => return Err(io::Error::other("a thread panicked")),
            }
        }
        Ok(start.elapsed().as_nanos() as f64 / f64::from(2 * TURNS))
    })
}

/// Returns the cores that this process may use.
fn cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

fn bind(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
