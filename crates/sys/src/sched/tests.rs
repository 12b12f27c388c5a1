//! Against the running kernel: threads of other processes, as the server schedules them.

use std::process::{Child, Command};
use std::thread;

use super::*;
use crate::testing::start;

struct Program(Child);

impl Program {
    fn start(script: &str) -> Program {
        Program(start(Command::new("/bin/sh").args(["-c", script])))
    }

    fn tid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const TENTH: Deadline = Deadline {
    runtime: Duration::from_millis(1),
    period: Duration::from_millis(10),
    reclaims: false,
};

#[test]
fn what_a_thread_had_before_comes_back() {
    let program = Program::start("sleep 60");
    let tid = program.tid();
    Attributes::of(tid)
        .unwrap()
        .with_nice(7)
        .apply(tid)
        .unwrap();
    let before = Attributes::of(tid).unwrap();
    TENTH.apply(tid).unwrap();
    let during = Attributes::of(tid).unwrap();
    assert!(during.is_deadline());
    assert_eq!((during.runtime, during.period), (1_000_000, 10_000_000));
    Deadline::revoke(tid, &before).unwrap();
    assert_eq!(Attributes::of(tid).unwrap(), before);
}

#[test]
fn sleeping_threads_that_leave_take_no_bandwidth_along() {
    let program = Program::start("sleep 60");
    let tid = program.tid();
    let before = Attributes::of(tid).unwrap();
    let third = Deadline {
        runtime: TENTH.runtime * 3,
        ..TENTH
    };
    // Often enough to use up a machine with that many CPUs, if some bandwidth leaked each time.
    for _ in 0..4 * cpus() {
        third.apply(tid).unwrap();
        Deadline::revoke(tid, &before).unwrap();
    }
}

#[test]
fn who_has_chosen_another_policy_since_keeps_it() {
    let program = Program::start("sleep 60");
    let tid = program.tid();
    let before = Attributes::of(tid).unwrap();
    TENTH.apply(tid).unwrap();
    LEAST.apply(tid).unwrap();
    before.with_nice(5).apply(tid).unwrap();
    Deadline::revoke(tid, &before).unwrap();
    assert_eq!(Attributes::of(tid).unwrap(), before.with_nice(5));
}

#[test]
fn a_thread_has_no_more_than_its_runtime_of_each_period() {
    let program = Program::start("while :; do :; done");
    let tid = program.tid();
    let before = Attributes::of(tid).unwrap();
    TENTH.apply(tid).unwrap();
    let (start, at) = (Usage::of(tid).unwrap(), std::time::Instant::now());
    thread::sleep(Duration::from_millis(500));
    let (end, passed) = (Usage::of(tid).unwrap(), at.elapsed());
    Deadline::revoke(tid, &before).unwrap();
    let ran = end.running - start.running;
    assert!(ran <= passed.mul_f64(0.15), "{ran:?} of {passed:?}");
    assert!(end.waiting - start.waiting >= passed.mul_f64(0.5));
}

#[test]
fn the_kernel_refuses_who_is_bound_to_some_cpus() {
    if cpus() == 1 {
        return;
    }
    let program = Program::start("taskset -pc 0 $$ >/dev/null; sleep 60");
    // Not earlier: under a reservation its shell could not start `taskset`.
    let has_bound_itself = (0..2000).any(|_| {
        thread::sleep(Duration::from_millis(5));
        is_bound(program.tid())
    });
    assert!(has_bound_itself);
    assert_eq!(TENTH.apply(program.tid()), Err(Errno::PERM));
    assert!(!is_bound(Program::start("sleep 60").tid()));
}

#[test]
fn a_process_has_threads_while_it_is_there() {
    let program = Program::start("exec sleep 60");
    let tid = program.tid();
    assert_eq!(threads_of(tid, 10), [tid]);
    drop(program);
    assert_eq!(threads_of(tid, 10), Vec::<u32>::new());
}

#[test]
fn cpus_are_counted_of_the_kernels_list() {
    assert_eq!(count_of("0"), Some(1));
    assert_eq!(count_of("0-3,8,10-11"), Some(7));
    assert_eq!(count_of("3-1"), None);
    assert_eq!(count_of(""), None);
    assert!(cpus() >= 1);
    assert!((1..=1_000_000).contains(&limit_ppm()));
}
