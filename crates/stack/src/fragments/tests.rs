//! Fragmented datagrams: reassembled in any order, and discarded if their fragments contradict each other.

use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use portolan_proto::filter::RecordHeader;
use portolan_types::Instant;
use portolan_wire::ipv4;

use super::*;
use crate::packet::Drop;

const SLOT: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Family {
    V4,
    V6,
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A fragment of UDP with the given traffic class.
fn piece(family: Family, id: u16, offset: u16, more: bool, class: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 12];
    match family {
        Family::V4 => {
            frame.extend([0x08, 0x00]);
            let mut header = [0; ipv4::HEADER_LEN];
            Ipv4Header {
                traffic_class: class,
                identification: id,
                dont_fragment: false,
                more_fragments: more,
                fragment_offset: offset,
                ttl: 64,
                protocol: 17,
                source: Ipv4Addr::new(10, 0, 0, 2),
                destination: Ipv4Addr::new(10, 0, 0, 1),
                payload_len: body.len() as u16,
            }
            .emit(&mut header);
            frame.extend(header);
        }
        Family::V6 => {
            frame.extend([0x86, 0xdd]);
            let mut header = [0; 40];
            Ipv6Header {
                traffic_class: class,
                flow_label: 0,
                hop_limit: 64,
                protocol: 44,
                source: Ipv6Addr::LOCALHOST,
                destination: Ipv6Addr::LOCALHOST,
                payload_len: body.len() as u16 + 8,
                fragment: None,
            }
            .emit(&mut header);
            frame.extend(header);
            frame.extend([17, 0]);
            frame.extend((offset | u16::from(more)).to_be_bytes());
            frame.extend(u32::from(id).to_be_bytes());
        }
    }
    frame.extend(body);
    frame
}

fn record(slot: u32) -> RecordHeader {
    RecordHeader {
        slot,
        generation: 9,
        flags: RecordHeader::FRAGMENT | RecordHeader::BINDING,
        ..RecordHeader::default()
    }
}

fn now() -> Instant {
    Instant::from_millis(1_000)
}

/// A datagram of 100 bytes in fragments of 32.
fn pieces(family: Family, id: u16) -> Vec<Vec<u8>> {
    let bytes: Vec<u8> = (0..100).collect();
    let chunks = bytes.chunks(32).zip((0..).step_by(32));
    chunks
        .map(|(chunk, at)| piece(family, id, at, at + 32 < 100, 0, chunk))
        .collect()
}

fn feed(reassembly: &mut Reassembly, frame: &[u8]) -> Reassembled {
    reassembly.add(now(), &record(SLOT), frame)
}

fn is_waiting(reassembled: &Reassembled) -> bool {
    matches!(reassembled, Reassembled::Waiting)
}

#[test]
fn pieces_in_any_order_make_the_datagram() {
    // Every order of four fragments, by the factorial number system.
    for family in FAMILIES {
        for order in 0..24 {
            let mut left = pieces(family, 7);
            let mut reassembly = Reassembly::default();
            let mut rest = order;
            for size in (2..=4).rev() {
                let frame = left.remove(rest % size);
                rest /= size;
                assert!(is_waiting(&feed(&mut reassembly, &frame)));
                // A repeated fragment changes nothing.
                assert!(is_waiting(&feed(&mut reassembly, &frame)));
            }
            let Reassembled::Whole(whole) = feed(&mut reassembly, &left[0]) else {
                panic!("{family:?} {order}");
            };
            let expected: Vec<u8> = (0..100).collect();
            assert!(whole.frame.ends_with(&expected));
            assert_eq!((whole.record.slot, whole.record.generation), (SLOT, 9));
            assert_eq!(whole.record.flags, RecordHeader::BINDING);
            assert_eq!(whole.record.length as usize, whole.frame.len());
            assert!(Piece::of(&whole.frame).is_none(), "still a fragment");
            assert_eq!(reassembly.counters.reassembled, 1);
            assert_eq!(reassembly.deadline(), None);
        }
    }
}

#[test]
fn pieces_of_different_datagrams_do_not_mix() {
    for family in FAMILIES {
        let mut reassembly = Reassembly::default();
        let (one, two) = (pieces(family, 1), pieces(family, 2));
        for frame in [&one[0], &two[1], &one[2], &two[3]] {
            assert!(is_waiting(&feed(&mut reassembly, frame)));
        }
        assert_eq!(reassembly.counters.reassembled, 0);
    }
}

#[test]
fn an_overlap_ends_the_datagram_and_what_still_comes_of_it() {
    for family in FAMILIES {
        let good = pieces(family, 7);
        let liars = [
            // Inside, across the end, from before, other bytes at the same place.
            piece(family, 7, 8, true, 0, &[1; 8]),
            piece(family, 7, 24, true, 0, &[1; 16]),
            piece(family, 7, 0, true, 0, &[1; 40]),
            piece(family, 7, 0, true, 0, &[1; 32]),
            // A second end.
            piece(family, 7, 16, false, 0, &[1; 8]),
        ];
        for liar in liars {
            let mut reassembly = Reassembly::default();
            assert!(is_waiting(&feed(&mut reassembly, &good[0])));
            assert!(is_waiting(&feed(&mut reassembly, &good[1])));
            for frame in [&liar, &good[2], &good[3]] {
                let dropped = feed(&mut reassembly, frame);
                assert!(
                    matches!(dropped, Reassembled::Dropped(Drop::FragmentsOverlap)),
                    "{dropped:?}"
                );
            }
            assert_eq!(reassembly.counters.overlapping, 1);
        }
    }
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    for family in FAMILIES {
        let impossible = [
            piece(family, 7, 0, true, 0, &[1; 7]),
            piece(family, 7, 8, false, 0, &[]),
            piece(family, 7, 0xfff8, false, 0, &[1; 8]),
            piece(family, 7, 0xfff0, false, 0, &[1; 64]),
        ];
        for frame in impossible {
            let mut reassembly = Reassembly::default();
            let dropped = feed(&mut reassembly, &frame);
            assert!(matches!(dropped, Reassembled::Dropped(Drop::Malformed)));
        }
    }
}

#[test]
fn unfinished_datagrams_are_given_up_after_their_time() {
    for (family, seconds) in [(Family::V4, 30), (Family::V6, 60)] {
        let mut reassembly = Reassembly::default();
        feed(&mut reassembly, &pieces(family, 7)[0]);
        let end = now() + Duration::from_secs(seconds);
        assert_eq!(reassembly.deadline(), Some(end));
        reassembly.expire(end);
        assert_eq!(reassembly.deadline(), None);
        assert_eq!(reassembly.counters.timed_out, 1);
    }
}

#[test]
fn a_flood_on_one_session_takes_no_more_than_its_share() {
    let mut reassembly = Reassembly::default();
    let other = pieces(Family::V4, 60_000);
    for frame in &other[1..] {
        assert!(is_waiting(&reassembly.add(now(), &record(1), frame)));
    }
    for id in 0..5_000 {
        let frame = piece(Family::V4, id, 1024, true, 0, &[0; 1400]);
        feed(&mut reassembly, &frame);
    }
    assert!(reassembly.counters.crowded_out > 4_000);
    let whole = reassembly.add(now(), &record(1), &other[0]);
    assert!(matches!(whole, Reassembled::Whole(_)));
}

#[test]
fn congestion_that_one_piece_met_is_the_datagrams() {
    let of = |classes: [u8; 2]| {
        let mut reassembly = Reassembly::default();
        feed(
            &mut reassembly,
            &piece(Family::V4, 7, 0, true, classes[0], &[0; 8]),
        );
        let last = piece(Family::V4, 7, 8, false, classes[1], &[0; 8]);
        match feed(&mut reassembly, &last) {
            Reassembled::Whole(whole) => Some(whole.frame[15]),
            _ => None,
        }
    };
    assert_eq!(of([0b10, 0b10]), Some(0b10));
    assert_eq!(of([0b10, 0b11]), Some(0b11));
    assert_eq!(of([0b00, 0b11]), None);
}

#[test]
fn no_frames_make_it_panic_or_grow_without_bound() {
    bolero::check!()
        .with_type::<Vec<(u8, bool, u8, u8)>>()
        .for_each(|input| {
            let mut reassembly = Reassembly::default();
            for &(offset, more, length, id) in input {
                let body = vec![id; usize::from(length) & !7];
                let family = FAMILIES[usize::from(id & 1)];
                let at = u16::from(offset) << 3;
                let frame = piece(family, u16::from(id >> 6), at, more, 0, &body);
                feed(&mut reassembly, &frame);
            }
            reassembly.expire(Instant::FAR_FUTURE);
            assert!(reassembly.is_empty());
        });
}

#[test]
fn early_pieces_come_back_when_the_first_is_known() {
    let mut early = EarlyFragments::default();
    let [first, second, third, last]: [Vec<u8>; 4] = pieces(Family::V4, 7).try_into().unwrap();
    assert!(early.add(now(), &second).is_empty());
    assert!(early.add(now(), &last).is_empty());
    assert_eq!(early.add(now(), &first), [second, last]);
    // The filter's copy was in transit when it learnt the owner.
    assert_eq!(early.add(now(), &third), core::slice::from_ref(&third));
    assert!(early.add(now(), &first).is_empty());
}

#[test]
fn early_pieces_that_nobody_claims_are_forgotten() {
    let mut early = EarlyFragments::default();
    let [first, second, ..]: [Vec<u8>; 4] = pieces(Family::V4, 7).try_into().unwrap();
    early.add(now(), &second);
    let later = now() + Duration::from_secs(15);
    assert!(early.add(later, &first).is_empty());
    assert_eq!(early.unclaimed, 1);
    for id in 0..2_000 {
        early.add(later, &piece(Family::V6, id, 8, true, 0, &[0; 1000]));
    }
    assert!(early.unclaimed > 500);
}

#[test]
fn two_members_of_a_group_get_a_datagram_each() {
    for family in FAMILIES {
        let mut reassembly = Reassembly::default();
        let pieces = pieces(family, 7);
        let mut whole = 0;
        for frame in &pieces {
            for slot in [SLOT, SLOT + 1] {
                let taken = reassembly.add(now(), &record(slot), frame);
                whole += u32::from(matches!(taken, Reassembled::Whole(_)));
            }
        }
        assert_eq!(whole, 2);
        assert!(reassembly.is_empty());
    }
}
