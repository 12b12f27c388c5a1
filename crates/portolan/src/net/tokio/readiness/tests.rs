//! What events of a socket mean to tasks that wait.

use super::*;

const INTERESTS: [Interest; 4] = [
    Interest::READABLE,
    Interest::WRITABLE,
    Interest::PRIORITY,
    Interest::ERROR,
];

/// They are reported to all that wait, who would otherwise wait again, and be woken again at once.
#[test]
fn an_end_and_an_error_satisfy_every_interest() {
    for interest in INTERESTS {
        for reported in [END, ERROR, END | ERROR] {
            let ready = readiness(reported) & meaning(interest);
            assert!(!ready.is_empty(), "{interest:?} {reported:#x}");
        }
    }
}

#[test]
fn every_event_that_an_interest_waits_for_satisfies_it() {
    for interest in INTERESTS {
        for bit in (0..32).map(|bit| 1 << bit) {
            let ready = readiness(events(interest) & bit) & meaning(interest);
            assert_eq!(
                ready.is_empty(),
                events(interest) & bit == 0,
                "{interest:?} {bit:#x}"
            );
        }
    }
}

#[test]
fn interests_are_told_apart() {
    assert!((readiness(READ) & meaning(Interest::WRITABLE)).is_empty());
    assert!((readiness(WRITE) & meaning(Interest::READABLE)).is_empty());
    assert!(!readiness(READ).is_read_closed());
    assert!(readiness(READ | READ_END).is_read_closed());
    assert!(!readiness(WRITE).is_write_closed());
    assert!(readiness(WRITE | ERROR).is_write_closed());
}
