//! The fate of each byte on the scoreboard, and when it counts as lost.

use super::*;

const MSS: u32 = 1000;
const MS: Duration = Duration::from_millis(1);

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

/// Ten segments, starting at 0, sent at 100, 101 … ms.
fn board() -> Scoreboard {
    let mut board = Scoreboard::default();
    for i in 0..10 {
        board.push(
            SeqNum(i * MSS),
            SeqNum((i + 1) * MSS),
            at(100 + u64::from(i)),
            Stamp::default(),
        );
    }
    board
}

fn sack(board: &mut Scoreboard, start: u32, end: u32, now: Instant) -> Delivery {
    let mut delivery = board.expect(0);
    let block = SackBlock {
        start: SeqNum(start),
        end: SeqNum(end),
    };
    board.sack(block, now, &mut delivery);
    assert!(board.is_consistent(board.records[0].start, SeqNum(10 * MSS)));
    delivery
}

/// An acknowledgement that reports `start..end`.
fn late(board: &mut Scoreboard, start: u32, end: u32) {
    let delivery = sack(board, start, end, at(120));
    board.note_reordering(&delivery, SeqNum(0), MSS);
}

#[test]
fn a_block_counts_once_and_leaves_the_network() {
    let mut board = board();
    assert_eq!(sack(&mut board, 2500, 4000, at(120)).bytes, 1500);
    assert_eq!(sack(&mut board, 2500, 4500, at(120)).bytes, 500);
    assert_eq!((board.sacked(), board.in_flight()), (2000, 8000));
    assert_eq!(board.records.len(), 10);
}

#[test]
fn blocks_outside_what_was_sent_are_ignored() {
    let mut board = board();
    assert_eq!(sack(&mut board, 9000, 10_001, at(120)).bytes, 0);
    assert_eq!(sack(&mut board, 4000, 3000, at(120)).bytes, 0);
    assert_eq!(sack(&mut board, u32::MAX - 5, 3000, at(120)).bytes, 0);
}

#[test]
fn three_segments_beyond_a_hole_make_it_a_loss() {
    let mut board = board();
    sack(&mut board, 1000, 3000, at(120));
    let patience = board.reordering_window(false, MSS, 20 * MS, 20 * MS);
    assert_eq!(patience, 5 * MS);
    sack(&mut board, 3000, 4000, at(120));
    let patience = board.reordering_window(false, MSS, 20 * MS, 20 * MS);
    assert_eq!(
        (patience, board.detect_loss(at(120), patience)),
        (Duration::ZERO, (1000, None))
    );
    assert_eq!(board.first_lost(5000), Some((SeqNum(0), 1000)));
}

#[test]
fn a_hole_is_given_the_time_that_reordering_may_take() {
    let mut board = board();
    sack(&mut board, 1000, 2000, at(120));
    // Sent at 100, a round trip of 19 ms, a reordering window of 5 ms.
    assert_eq!(board.detect_loss(at(120), 5 * MS), (0, Some(at(124))));
    assert_eq!(board.detect_loss(at(124), 5 * MS), (1000, None));
}

#[test]
fn a_retransmission_is_lost_again_when_later_bytes_arrive() {
    let mut board = board();
    sack(&mut board, 1000, 4000, at(120));
    board.detect_loss(at(120), Duration::ZERO);
    board.retransmit(SeqNum(0), 1000, at(121), Stamp::default());
    assert_eq!((board.lost(), board.in_flight()), (0, 7000));
    board.push(SeqNum(10_000), SeqNum(11_000), at(122), Stamp::default());
    let mut delivery = Delivery::default();
    let block = SackBlock {
        start: SeqNum(10_000),
        end: SeqNum(11_000),
    };
    assert!(board.sack(block, at(141), &mut delivery));
    board.detect_loss(at(141), Duration::ZERO);
    assert_eq!(board.first_lost(1000), Some((SeqNum(0), 1000)));
}

#[test]
fn an_acknowledgement_of_retransmitted_bytes_tells_no_round_trip() {
    let mut board = board();
    board.lose_first(1000);
    board.retransmit(SeqNum(0), 1000, at(300), Stamp::default());
    let mut delivery = Delivery::default();
    board.acknowledge(SeqNum(1000), at(310), &mut delivery);
    assert_eq!((delivery.bytes, delivery.sent), (1000, None));
}

#[test]
fn a_time_out_loses_all_but_what_was_sacked() {
    let mut board = board();
    sack(&mut board, 2000, 3000, at(120));
    board.lose_sent_before(Instant::FAR_FUTURE);
    assert_eq!(
        (board.lost(), board.sacked(), board.in_flight()),
        (9000, 1000, 0)
    );
    assert_eq!(board.first_lost(60_000), Some((SeqNum(0), 2000)));
}

#[test]
fn a_peer_that_takes_its_word_back_is_not_believed() {
    let mut board = board();
    sack(&mut board, 1000, 3000, at(120));
    let mut delivery = Delivery::default();
    board.acknowledge(SeqNum(1000), at(121), &mut delivery);
    board.lose_sent_before(Instant::FAR_FUTURE);
    assert_eq!((board.lost(), board.sacked()), (9000, 0));
}

#[test]
fn late_bytes_show_how_much_the_path_reorders() {
    let mut board = board();
    late(&mut board, 5000, 6000);
    assert_eq!((board.reordering(), board.reorderings()), (3, 0));
    late(&mut board, 4000, 5000);
    assert_eq!((board.reordering(), board.reorderings()), (3, 1));
    late(&mut board, 1000, 2000);
    assert_eq!((board.reordering(), board.reorderings()), (5, 2));
}

#[test]
fn what_one_acknowledgement_reports_was_not_reordered() {
    let mut board = board();
    let mut delivery = board.expect(0);
    for start in [6000, 3000] {
        let block = SackBlock {
            start: SeqNum(start),
            end: SeqNum(start + 1000),
        };
        board.sack(block, at(120), &mut delivery);
    }
    assert!(!board.note_reordering(&delivery, SeqNum(0), MSS));
}

#[test]
fn only_what_the_path_cannot_carry_is_lost_when_segments_shrink() {
    let mut board = Scoreboard::default();
    for (start, end) in [(0, 1000), (1000, 1700), (1700, 2700), (2700, 3700)] {
        board.push(SeqNum(start), SeqNum(end), at(100), Stamp::default());
    }
    let mut delivery = board.expect(0);
    let block = SackBlock {
        start: SeqNum(1700),
        end: SeqNum(2700),
    };
    board.sack(block, at(120), &mut delivery);
    assert!(board.lose_larger(700));
    assert_eq!((board.lost(), board.in_flight()), (2000, 700));
    assert!(board.is_consistent(SeqNum(0), SeqNum(3700)));
    assert!(!board.lose_larger(700));
}

#[test]
fn what_was_sent_again_counts_until_it_is_told_of() {
    let mut board = board();
    board.lose_first(1000);
    assert_eq!(board.retransmitted(), 0);
    board.retransmit(SeqNum(0), 1000, at(300), Stamp::default());
    assert_eq!(board.retransmitted(), 1000);
    let mut delivery = board.expect(0);
    board.acknowledge(SeqNum(1000), at(310), &mut delivery);
    assert_eq!(board.retransmitted(), 0);
    assert!(delivery.again);
}

#[test]
fn reported_duplicates_lengthen_the_patience_once_each_round_trip_and_for_some_recoveries() {
    let mut board = board();
    late(&mut board, 3000, 4000);
    late(&mut board, 1000, 2000);
    let patience = |board: &Scoreboard| board.reordering_window(true, MSS, 20 * MS, 100 * MS);
    assert_eq!(patience(&board), 5 * MS);
    board.note_duplicate(SeqNum(0), SeqNum(10_000));
    board.note_duplicate(SeqNum(1000), SeqNum(10_000));
    assert_eq!(patience(&board), 10 * MS);
    board.note_duplicate(SeqNum(10_000), SeqNum(20_000));
    assert_eq!(patience(&board), 15 * MS);
    for _ in 0..16 {
        assert_eq!(patience(&board), 15 * MS);
        board.note_recovery();
    }
    assert_eq!(patience(&board), 5 * MS);
}

#[test]
fn an_acknowledgement_of_the_original_moves_no_loss_detection() {
    let mut board = board();
    board.lose_first(1000);
    board.retransmit(SeqNum(0), 1000, at(300), Stamp::default());
    let mut delivery = Delivery {
        min_rtt: 20_000_000,
        ..Delivery::default()
    };
    board.acknowledge(SeqNum(1000), at(310), &mut delivery);
    assert_eq!(board.detect_loss(at(400), Duration::ZERO), (0, None));
}

#[test]
fn a_time_out_spares_what_was_sent_just_now() {
    let mut board = board();
    board.lose_sent_before(at(105));
    assert_eq!(board.lost(), 5000);
}
