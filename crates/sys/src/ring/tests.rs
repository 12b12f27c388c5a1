//! A ring over plain shared memory, filled as the kernel would: records are read completely and in
//! order, and space is released only when permitted.

use zerocopy::IntoBytes;

use super::testing::{SIZE, ring};
use super::*;
use crate::testing::{BpfMap, bpf_map, memory};

/// A record of a size class: header, frame, slack.
fn record(frame: &[u8], slack: usize) -> Vec<u8> {
    let header = RecordHeader {
        length: frame.len() as u32,
        slot: 3,
        ..RecordHeader::default()
    };
    let mut data = header.as_bytes().to_vec();
    data.extend_from_slice(frame);
    data.resize(data.len() + slack, 0xee);
    data
}

#[test]
fn frames_come_out_whole_and_in_order_across_many_wraps() {
    let (mut producer, mut ring) = ring();
    for round in 0..500_u32 {
        let frame = vec![round as u8; 60 + (round as usize * 37) % 1400];
        producer.put(0, &record(&frame, 11));
        let got = ring.next().expect("one record is there");
        assert_eq!(got.frame, frame);
        assert_eq!(got.header.slot, 3);
        assert!(ring.next().is_none());
        ring.release();
        assert_eq!(producer.consumed(), producer.position);
    }
}

#[test]
fn a_busy_record_hides_what_follows_but_is_not_empty() {
    let (mut producer, mut ring) = ring();
    assert!(ring.is_empty());
    producer.put(BUSY, &record(b"first", 0));
    producer.put(0, &record(b"second", 0));
    assert!(ring.next().is_none());
    assert!(!ring.is_empty());

    let end = producer.position;
    producer.position = 0;
    producer.mark(0, record(b"first", 0).len());
    producer.position = end;
    assert_eq!(ring.next().unwrap().frame, b"first");
    assert_eq!(ring.next().unwrap().frame, b"second");
    assert!(ring.is_empty());
}

#[test]
fn a_discarded_record_is_skipped() {
    let (mut producer, mut ring) = ring();
    producer.put(DISCARD, &record(b"gone", 0));
    producer.put(0, &record(b"kept", 0));
    assert_eq!(ring.next().unwrap().frame, b"kept");
    assert_eq!(ring.malformed(), 0);
}

#[test]
fn a_header_that_claims_too_much_is_counted_and_dropped() {
    let (mut producer, mut ring) = ring();
    let mut lying = record(b"short", 0);
    lying[0..4].copy_from_slice(&u32::MAX.to_ne_bytes());
    producer.put(0, &lying);
    producer.put(0, b"no header");
    producer.put(0, &record(b"fine", 0));
    assert_eq!(ring.next().unwrap().frame, b"fine");
    assert_eq!(ring.malformed(), 2);
}

#[test]
fn space_is_published_on_release_or_when_half_is_read() {
    let (mut producer, mut ring) = ring();
    let data = record(&[0; 1000], 0);
    for _ in 0..6 {
        producer.put(0, &data);
    }
    for _ in 0..4 {
        assert!(ring.next().is_some());
    }
    assert_eq!(producer.consumed(), 0);
    assert!(ring.next().is_some(), "4 records are half the ring");
    assert_eq!(producer.consumed(), 4 * (data.len() as u64 + 8));
    ring.release();
    assert_eq!(producer.consumed(), 5 * (data.len() as u64 + 8));
}

#[test]
fn a_size_that_is_no_ring_is_refused() {
    let fd = memory(SIZE);
    for size in [0, 100, SIZE + 1, 1 << 62] {
        assert!(matches!(Ring::map(&fd, size), Err(MapError::BadSize(_))));
    }
}

#[test]
fn a_real_ring_maps_and_its_data_are_only_the_kernels_to_write() {
    let fd = bpf_map(BpfMap::Ring, SIZE);
    let mut ring = Ring::map(&fd, SIZE).unwrap();
    assert!(ring.is_empty() && ring.next().is_none());
    for length in [page_size(), page_size() + 2 * SIZE] {
        let data = Mapping::read_write(fd.as_fd(), page_size(), length);
        assert_eq!(data.unwrap_err(), Errno::PERM);
    }
    assert!(matches!(Ring::map(&fd, 2 * SIZE), Err(MapError::Data(_))));
}

/// Actions of the kernel's side: records of any content, submitted or discarded.
#[derive(Debug, bolero::TypeGenerator)]
struct Put {
    discard: bool,
    claimed: u32,
    honest: bool,
    bytes: Vec<u8>,
}

#[test]
fn records_that_claim_anything_are_counted_or_read_within_their_bounds() {
    portolan_fuzz::check!(500)
        .with_type::<Vec<Put>>()
        .for_each(|puts| {
            let (mut producer, mut ring) = ring();
            let mut bad = 0;
            for put in puts {
                let frame = &put.bytes[..put.bytes.len().min(1000)];
                let mut data = record(frame, 0);
                if !put.honest {
                    data[..4].copy_from_slice(&put.claimed.to_ne_bytes());
                }
                let lies = data[..4] != (frame.len() as u32).to_ne_bytes();
                let too_long = lies && put.claimed as usize > frame.len();
                producer.put(if put.discard { DISCARD } else { 0 }, &data);
                match ring.next() {
                    _ if put.discard => {}
                    Some(record) if lies => assert!(record.frame.len() <= frame.len()),
                    Some(record) => assert_eq!(record.frame, frame),
                    None => {
                        assert!(too_long, "a sound record was lost");
                        bad += 1;
                    }
                }
                assert!(ring.next().is_none());
                ring.release();
                assert_eq!(producer.consumed(), producer.position);
            }
            assert_eq!(ring.malformed(), bad);
        });
}
