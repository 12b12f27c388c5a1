//! Invariants of a receiver from another process.

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
fn a_window_that_scaling_makes_smaller_than_a_segment_stays_closed() {
    let mut receiver = Receiver::new(&Config::default());
    receiver.synchronize(SeqNum(99), None, Instant::from_millis(1_000));
    receiver.scale = 8;
    receiver.nxt = receiver.edge;
    let (limit, segment) = (receiver.limit, receiver.mss as usize);
    assert!(segment % 256 != 0);
    receiver.lent = limit - segment;
    assert!(!receiver.window_update_due(None));
    assert_eq!(receiver.offer(None), 0);
    receiver.lent = limit - segment.next_multiple_of(256);
    assert!(receiver.window_update_due(None));
    assert_eq!(receiver.offer(None) as usize, segment.next_multiple_of(256));
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

/// A receiver whose next expected byte has number 100.
fn receiving() -> Receiver {
    let mut receiver = Receiver::new(&Config::default());
    receiver.synchronize(SeqNum(99), None, Instant::from_millis(1_000));
    receiver
}

fn append(receiver: &mut Receiver, text: &[u8]) {
    receiver.append(Instant::from_millis(1_000), text, &RttEstimator::default());
}

fn read(receiver: &mut Receiver) -> Vec<u8> {
    let mut out = vec![0; receiver.readable(UrgentMark::Aside)];
    let now = Instant::from_millis(1_000);
    receiver.read(now, &mut out, None, UrgentMark::Aside);
    out
}

#[test]
fn a_payload_that_stays_is_received_and_takes_room_until_it_is_given_back() {
    let mut receiver = receiving();
    let room = receiver.wanted(None);
    receiver.let_stay(0);
    append(&mut receiver, &[b'a'; 1000]);
    assert_eq!(receiver.stay(), 1000);
    assert_eq!((receiver.nxt, receiver.buffer.len()), (SeqNum(1100), 0));
    assert_eq!(receiver.wanted(None), room - 1000);
    // The next one is stored as usual.
    append(&mut receiver, b"bb");
    assert_eq!((receiver.stay(), read(&mut receiver)), (0, b"bb".to_vec()));
    receiver.give_back(1000);
    assert_eq!(receiver.wanted(None), room);
    assert!(receiver.is_consistent());
}

#[test]
fn nothing_stays_while_other_bytes_are_unread_than_should_be() {
    let mut receiver = receiving();
    append(&mut receiver, b"a");
    receiver.let_stay(0);
    append(&mut receiver, b"b");
    assert_eq!(receiver.stay(), 0);
    receiver.let_stay(2);
    append(&mut receiver, b"c");
    assert_eq!(receiver.stay(), 1);
    assert_eq!(read(&mut receiver), b"ab");
}

#[test]
fn what_stayed_and_nobody_took_comes_to_its_place() {
    let mut receiver = receiving();
    let room = receiver.wanted(None);
    append(&mut receiver, b"ab");
    for payload in [b"cd", b"ef"] {
        receiver.let_stay(2);
        append(&mut receiver, payload);
        assert_eq!(receiver.stay(), 2);
    }
    append(&mut receiver, b"gh");
    receiver.take_back(2, [&b"cd"[..], b"ef"].into_iter());
    assert_eq!(receiver.wanted(None), room - 8);
    assert_eq!(read(&mut receiver), b"abcdefgh");
    assert!(receiver.is_consistent());
}
