//! What a receiver from another process must satisfy.

use super::*;

fn finished() -> Receiver {
    let now = Instant::from_millis(1_000);
    let mut receiver = Receiver::new(&Config::default());
    receiver.synchronize(SeqNum(99), None, now);
    let arrival = receiver.arrive(
        now,
        SeqNum(100),
        b"last words",
        true,
        &RttEstimator::default(),
    );
    assert!(arrival.finished && receiver.fin_consumed());
    receiver
}

#[test]
fn a_fin_is_the_last_byte_there_was() {
    let mut receiver = finished();
    assert!(receiver.is_consistent());
    receiver.fin = Some(SeqNum(105));
    assert!(!receiver.is_consistent());
}

#[test]
fn nothing_that_arrived_lies_behind_a_fin() {
    let now = Instant::from_millis(1_000);
    let mut receiver = Receiver::new(&Config::default());
    receiver.synchronize(SeqNum(99), None, now);
    receiver.arrive(
        now,
        SeqNum(120),
        b"after the end",
        false,
        &RttEstimator::default(),
    );
    receiver.arrive(now, SeqNum(105), b"words", true, &RttEstimator::default());
    assert!(receiver.is_consistent());
    let arrival = receiver.arrive(now, SeqNum(100), b"last ", false, &RttEstimator::default());
    assert!(arrival.finished);
    assert_eq!(receiver.nxt, SeqNum(111));
    assert!(receiver.is_consistent());
}

#[test]
fn bytes_that_are_put_back_were_not_taken() {
    let start = Instant::from_millis(1_000);
    let rtt = Duration::from_millis(10);
    let mut receiver = Receiver::new(&Config::default());
    receiver.synchronize(SeqNum(99), None, start);
    receiver.start_tuning();
    let before = (receiver.limit(), receiver.space());
    let text = [b'.'; 30_000];
    receiver.arrive(start, SeqNum(100), &text, false, &RttEstimator::default());
    for _ in 0..4 {
        let mut out = [0; 30_000];
        assert_eq!(
            receiver.read(start, &mut out, Some(rtt), UrgentMark::Aside),
            30_000
        );
        receiver.unread(&out);
    }
    let later = start + rtt;
    receiver.read(later, &mut [0; 1], Some(rtt), UrgentMark::Aside);
    assert_eq!((receiver.limit(), receiver.space()), before);
}
