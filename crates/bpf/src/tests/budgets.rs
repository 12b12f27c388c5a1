//! Receive budgets: who loses which packet, and who does not.

use std::thread::sleep;
use std::time::Duration;

use portolan_proto::filter::{Budget, Doorbell, FlowRow, Losses};
use portolan_types::{ChannelId, FlowKey, Protocol};

use super::bed::{Bed, CHANNEL, Context, OTHER_CHANNEL, Outcome, REDIRECT, SHOT};
use super::bed::{flows, outcome, row};
use super::frames::Frame;

const BUDGET: u16 = 5;

fn with_budget(channel: ChannelId) -> FlowRow {
    FlowRow {
        budget: BUDGET,
        ..row(channel)
    }
}

/// A flow with that budget, and another one of the same channel without a budget.
fn bed_with(terms: &Budget) -> (Bed, [FlowKey; 2]) {
    let bed = Bed::new();
    let flows = flows(Protocol::Udp);
    bed.filter.set_budget(BUDGET, terms).unwrap();
    bed.filter.steer(&flows[0], with_budget(CHANNEL)).unwrap();
    bed.filter.steer(&flows[1], row(CHANNEL)).unwrap();
    (bed, flows)
}

fn receive(bed: &Bed, flow: &FlowKey) -> Outcome {
    bed.run("packet_filter", &Frame::received(flow).build())
}

fn delivered() -> Outcome {
    outcome(SHOT, &["delivered"])
}

fn over() -> Outcome {
    outcome(SHOT, &["drop_over_budget"])
}

/// One packet per second, and a burst of that many seconds.
fn slow(burst: u64) -> Budget {
    Budget {
        packet_price: Budget::SECOND,
        burst: burst * Budget::SECOND,
        priority: Budget::LAST.into(),
        ..Budget::default()
    }
}

#[test]
fn what_exceeds_a_budget_is_dropped_and_counted_for_its_owner() {
    let (bed, [flow, other]) = bed_with(&slow(3));
    for _ in 0..4 {
        assert_eq!(receive(&bed, &flow), delivered());
    }
    assert_eq!(receive(&bed, &flow), over());
    assert_eq!(receive(&bed, &other), delivered());
    let budget = bed.filter.budget(BUDGET);
    assert_eq!((budget.passed, budget.dropped, budget.early), (4, 1, 0));
    let lost = Losses {
        over_budget: 1,
        ..Losses::default()
    };
    assert_eq!(bed.filter.losses(CHANNEL), lost);
    assert_eq!(bed.filter.losses(OTHER_CHANNEL), Losses::default());
    assert_eq!(bed.records().len(), 5);
}

#[test]
fn a_budget_comes_back_with_time() {
    let (bed, [flow, _]) = bed_with(&slow(0));
    assert_eq!(receive(&bed, &flow), delivered());
    assert_eq!(receive(&bed, &flow), over());
    sleep(Duration::from_millis(1001));
    assert_eq!(receive(&bed, &flow), delivered());
}

#[test]
fn bytes_have_a_budget_of_their_own() {
    let bytes = Frame::received(&flows(Protocol::Udp)[0]).build().len() as u64;
    let terms = Budget {
        // Two frames per second.
        byte_price: Budget::BYTE_SECOND / (2 * 8 * bytes),
        burst: Budget::SECOND,
        priority: Budget::LAST.into(),
        ..Budget::default()
    };
    let (bed, [flow, _]) = bed_with(&terms);
    for _ in 0..3 {
        assert_eq!(receive(&bed, &flow), delivered());
    }
    assert_eq!(receive(&bed, &flow), over());
}

#[test]
fn a_coalesced_frame_counts_as_its_segments() {
    let (bed, [flow, _]) = bed_with(&slow(3));
    let frame = Frame {
        payload: 3000,
        ..Frame::received(&flow)
    }
    .build();
    let run = || bed.run_with("packet_filter", &frame, &mut Context::with_gso_size(1000));
    assert_eq!(run(), delivered());
    assert_eq!(run(), over());
    let budget = bed.filter.budget(BUDGET);
    assert_eq!((budget.passed, budget.dropped), (4, 4));
}

#[test]
fn a_sleeping_owner_is_not_woken_for_what_exceeds_its_budget() {
    let (bed, [flow, _]) = bed_with(&slow(0));
    bed.set_doorbell(Doorbell::ASLEEP_ON_TAP);
    let by_tap = outcome(REDIRECT, &["delivered_on_tap"]);
    assert_eq!(receive(&bed, &flow), by_tap);
    assert_eq!(receive(&bed, &flow), over());
    assert_eq!(bed.doorbell().delivered, 1);
}

#[test]
fn packets_of_low_priority_go_first_while_the_ring_fills() {
    for (priority, kept) in [(0, 32), (3, 128), (6, 224)] {
        let terms = Budget {
            priority,
            ..Budget::default()
        };
        let (bed, [flow, other]) = bed_with(&terms);
        // A record of 4 KiB, of which the ring holds almost 256.
        let large = |flow: &FlowKey| Frame {
            payload: 3000,
            ..Frame::received(flow)
        };
        let frame = large(&flow).build();
        let delivered_before = (0..300)
            .take_while(|_| bed.run("packet_filter", &frame) == delivered())
            .count() as u32;
        // Each record has an additional header of eight bytes.
        assert!(
            delivered_before.abs_diff(kept) <= 1,
            "{delivered_before} of priority {priority}"
        );
        let early = outcome(SHOT, &["drop_early"]);
        assert_eq!(bed.run("packet_filter", &frame), early);
        let other = large(&other).build();
        assert_eq!(bed.run("packet_filter", &other), delivered());
        assert_eq!(bed.filter.budget(BUDGET).early, 2);
        assert_eq!(bed.filter.losses(CHANNEL).early, 2);
        bed.records();
        assert_eq!(bed.run("packet_filter", &frame), delivered());
    }
}

#[test]
fn new_terms_keep_what_was_counted() {
    let (bed, [flow, _]) = bed_with(&slow(0));
    assert_eq!(receive(&bed, &flow), delivered());
    assert_eq!(receive(&bed, &flow), over());
    bed.filter.set_budget(BUDGET, &slow(10)).unwrap();
    assert_eq!(receive(&bed, &flow), delivered());
    let budget = bed.filter.budget(BUDGET);
    assert_eq!((budget.passed, budget.dropped), (2, 1));
}
