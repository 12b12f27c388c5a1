//! Mutual exclusion, also after a fork; and the holder inherits the priority of waiters.

use std::process::Command;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{WaitOptions, waitpid};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::*;
use crate::sched::{Attributes, priority_of};
use crate::testing::{forking, start};

/// Far beyond what anything here takes.
const TIMEOUT: Duration = Duration::from_secs(10);

fn own() -> u32 {
    crate::thread::number().unsigned_abs()
}

/// Binds the calling thread to the first CPU.
fn stay_on_first_cpu() {
    let mut first = CpuSet::new();
    first.set(0);
    sched_setaffinity(None, &first).unwrap();
}

fn burn(time: Duration) {
    let mut left = time;
    while let Some(rest) = left.checked_sub(Duration::from_micros(100)) {
        let until = cpu_time() + Duration::from_micros(100);
        while cpu_time() < until {}
        left = rest;
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[test]
fn one_thread_at_a_time_has_the_value() {
    const TURNS: u64 = 20_000;
    // Two words that only agree if no thread saw them between updates.
    let value = Arc::new(PiMutex::new((0_u64, 0_u64)));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let value = Arc::clone(&value);
            thread::spawn(move || {
                for turn in 0..TURNS {
                    let mut both = value.lock();
                    assert_eq!(both.0, both.1);
                    both.0 += 1;
                    if turn % 1000 == 0 {
                        thread::yield_now();
                    }
                    both.1 += 1;
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*value.lock(), (4 * TURNS, 4 * TURNS));
}

#[test]
fn a_forked_child_has_a_lock_of_its_own() {
    let value = Arc::new(PiMutex::new(0));
    *value.lock() += 1;
    let _fork = forking();
    // SAFETY: the child makes no call that needs a lock held by another thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        forget_number();
        *value.lock() += 1;
        let holder = value.lock();
        let is_own = value.word.load(Relaxed) == own();
        drop(holder);
        let is_free = value.word.load(Relaxed) == 0;
        // SAFETY: ends the child without running its parent's handlers.
        unsafe { libc::_exit(if is_own && is_free { 0 } else { 1 }) };
    }
    let child = rustix::process::Pid::from_raw(child).unwrap();
    let (_, status) = waitpid(Some(child), WaitOptions::empty()).unwrap().unwrap();
    assert_eq!(status.exit_status(), Some(0));
    assert_eq!(*value.lock(), 1);
}

#[test]
fn who_waits_for_a_lock_held_in_the_name_of_another_gets_it() {
    let mutex = Arc::new(PiMutex::new(()));
    // A child of `vfork` holds it under its parent's ID; the parent exists, and holds nothing.
    let mut parent = start(Command::new("sleep").arg("60"));
    mutex.word.store(parent.id(), Relaxed);
    let waiter = thread::spawn({
        let mutex = Arc::clone(&mutex);
        move || drop(mutex.lock())
    });
    let start = Instant::now();
    while mutex.word.load(Relaxed) & FUTEX_WAITERS == 0 && start.elapsed() < TIMEOUT {
        thread::yield_now();
    }
    mutex.give_back(own());
    waiter.join().unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert_eq!(mutex.word.load(Relaxed), 0);
}

#[test]
fn the_holder_has_the_priority_of_who_waits_while_he_waits() {
    let mutex = Arc::new(PiMutex::new(()));
    let held = mutex.lock();
    let holder = own();
    let ordinary = priority_of(holder).unwrap();
    assert!(ordinary >= 0, "an ordinary thread: {ordinary}");
    let waiter = thread::spawn({
        let mutex = Arc::clone(&mutex);
        move || {
            Attributes::fifo(20)
                .apply(own())
                .expect("tests run as root");
            drop(mutex.lock());
        }
    });
    let start = Instant::now();
    while priority_of(holder) != Some(-21) && start.elapsed() < TIMEOUT {
        thread::yield_now();
    }
    assert_eq!(
        priority_of(holder),
        Some(-21),
        "as proc_pid_stat(5) shows FIFO 20"
    );
    drop(held);
    waiter.join().unwrap();
    assert_eq!(priority_of(holder), Some(ordinary));
}

/// A holder on a CPU with a thread that keeps it from running gets to run on behalf of the waiter.
#[test]
fn a_waiter_does_not_wait_for_who_keeps_the_holder_from_running() {
    let mutex = Arc::new(PiMutex::new(()));
    let waiting_for = Arc::new(AtomicU32::new(0));
    let is_over = Arc::new(AtomicBool::new(false));
    let waits_since = Arc::new(OnceLock::new());
    let holder = thread::spawn({
        let (mutex, waiting_for) = (Arc::clone(&mutex), Arc::clone(&waiting_for));
        move || {
            stay_on_first_cpu();
            let held = mutex.lock();
            waiting_for.store(own(), Release);
            burn(Duration::from_millis(20));
            drop(held);
        }
    });
    while waiting_for.load(Acquire) == 0 {
        thread::yield_now();
    }
    let hog = thread::spawn({
        let (is_over, waits_since) = (Arc::clone(&is_over), Arc::clone(&waits_since));
        move || {
            stay_on_first_cpu();
            Attributes::fifo(10)
                .apply(own())
                .expect("tests run as root");
            let waited_enough = |since: &Instant| since.elapsed() > Duration::from_millis(500);
            while !waits_since.get().is_some_and(waited_enough) && !is_over.load(Relaxed) {}
            is_over.swap(true, Relaxed)
        }
    });
    let waiter = thread::spawn(move || {
        Attributes::fifo(20)
            .apply(own())
            .expect("tests run as root");
        waits_since.set(Instant::now()).unwrap();
        drop(mutex.lock());
        is_over.store(true, Relaxed);
    });
    waiter.join().unwrap();
    holder.join().unwrap();
    assert!(
        hog.join().unwrap(),
        "the hog ran to its end before the waiter had the lock"
    );
}
