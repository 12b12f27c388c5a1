//! A queue reads the same wherever its bytes are stored.

use super::*;
use crate::encoding::{Encoded, Reader, Writer};

fn elsewhere(bytes: &[u8], start: usize, length: usize) -> Option<HandoffBuffer> {
    HandoffBuffer::new(Arc::new(bytes.to_vec()), start, length)
}

/// "cdef" in handed-over memory, "gh" in the ring.
fn queue() -> Queue {
    let mut queue = Queue::default();
    queue.push(b"gh");
    queue.lead_with(elsewhere(b"abcdefxx", 2, 4).unwrap());
    queue
}

fn all(queue: &Queue) -> Vec<u8> {
    let mut out = vec![0; queue.len()];
    assert_eq!(queue.copy_out(0, &mut out), queue.len());
    assert_eq!(image(queue)[..queue.len()], out);
    out
}

/// The contents that the next holder would get.
fn image(queue: &Queue) -> Vec<u8> {
    let mut image = vec![b'.'; queue.span()];
    for (at, bytes) in queue.pieces() {
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }
    image
}

fn ooo_range(start: u32, end: u32) -> OooRange {
    OooRange { start, end }
}

/// "ab" readable, a hole of two, "ef", a hole of one, "hij".
fn out_of_order() -> Queue {
    let mut queue = Queue::default();
    queue.push(b"ab");
    queue.write_at(4, b"ef");
    queue.write_at(7, b"hij");
    let memory = Arc::new(image(&queue));
    queue.replace(memory, [ooo_range(4, 6), ooo_range(7, 10)].into_iter());
    queue
}

#[test]
fn bytes_are_read_from_the_handoff_and_then_from_the_ring() {
    let mut queue = queue();
    assert_eq!((queue.len(), queue.span()), (6, 6));
    assert_eq!(all(&queue), b"cdefgh");
    for offset in 0..6 {
        let mut out = [0; 3];
        let count = queue.copy_out(offset, &mut out);
        assert_eq!(out[..count], b"cdefgh"[offset..(offset + 3).min(6)]);
        assert_eq!(queue.byte(offset), Some(b"cdefgh"[offset]));
    }
    queue.consume(3);
    assert_eq!(all(&queue), b"fgh");
    queue.consume(2);
    assert_eq!(all(&queue), b"h");
    assert!(queue.handoff().is_none());
}

#[test]
fn what_arrives_comes_behind_both() {
    let mut queue = queue();
    queue.write_at(7, b"jk");
    assert_eq!((queue.len(), queue.span()), (6, 9));
    queue.consume(1);
    queue.write_at(5, b"i");
    queue.extend(3);
    assert_eq!(all(&queue), b"defghijk");
}

#[test]
fn bytes_of_the_handoff_that_are_put_back_are_not_copied() {
    let mut queue = queue();
    queue.consume(3);
    queue.unread(b"de");
    assert_eq!(all(&queue), b"defgh");
    assert_eq!(queue.handoff().map(HandoffBuffer::start), Some(3));
    // They precede it in the memory, too, though nobody here has read them.
    queue.unread(b"abc");
    assert_eq!(all(&queue), b"abcdefgh");
}

#[test]
fn other_bytes_that_are_put_back_come_first() {
    let mut queue = queue();
    queue.consume(1);
    queue.unread(b"zz");
    assert_eq!(all(&queue), b"zzdefgh");
    assert!(queue.handoff().is_none());
}

#[test]
fn bytes_out_of_order_stay_elsewhere_until_the_stream_reaches_them() {
    let mut queue = out_of_order();
    assert_eq!((queue.len(), queue.span(), queue.encoded()), (2, 10, 0));
    assert_eq!(queue.byte(5), Some(b'f'));
    assert_eq!(queue.byte(9), Some(b'j'));
    queue.write_at(2, b"cd");
    queue.extend(4);
    assert_eq!(all(&queue), b"abcdef");
    queue.consume(5);
    assert_eq!((queue.len(), queue.span()), (1, 5));
    assert_eq!(queue.byte(4), Some(b'j'));
    queue.unread(b"e");
    queue.write_at(2, b"g");
    assert_eq!(image(&queue), b"efghij");
    queue.extend(4);
    assert_eq!(all(&queue), b"efghij");
    assert!(queue.handoff().is_none(), "nothing is left in the memory");
}

#[test]
fn bytes_out_of_order_keep_their_places_when_others_are_put_back() {
    let mut queue = out_of_order();
    queue.consume(1);
    queue.unread(b"zzz");
    assert_eq!((queue.len(), queue.span()), (4, 12));
    assert!(queue.is_consistent());
    queue.write_at(4, b"cd");
    queue.extend(4);
    assert_eq!(all(&queue), b"zzzbcdef");
}

#[test]
fn what_comes_first_counts() {
    let mut queue = out_of_order();
    queue.write_at(2, b"CDEFGHIJK");
    assert_eq!(image(&queue), b"abCDefGhijK");
    queue.extend(9);
    assert_eq!(all(&queue), b"abCDefGhijK");
}

#[test]
fn a_stream_may_stop_in_the_midst_of_them() {
    let mut queue = out_of_order();
    queue.write_at(2, b"cd");
    queue.extend(3);
    assert_eq!(all(&queue), b"abcde");
    assert_eq!(queue.span(), 10);
    queue.extend(1);
    assert_eq!(all(&queue), b"abcdef");
}

#[test]
fn they_go_on_to_the_next_holder() {
    let mut queue = out_of_order();
    queue.consume(1);
    let mut out = Writer::new(0);
    queue.put(&mut out);
    let encoded = out.finish();
    let handoff = queue.handoff().unwrap().clone();
    let mut next: Queue = Queue::take(&mut Reader::new(&encoded).unwrap()).unwrap();
    assert!(!next.is_consistent(), "their memory is missing");
    next.lead_with(handoff);
    assert!(next.is_consistent());
    assert_eq!(image(&next), image(&queue));
    let memory: Vec<u8> = image(&next);
    next.replace(
        Arc::new(memory),
        [ooo_range(3, 5), ooo_range(6, 9)].into_iter(),
    );
    assert_eq!(image(&next), image(&queue));
    next.write_at(1, b"cd");
    next.extend(4);
    assert_eq!(all(&next), b"bcdef");
}

#[test]
fn those_that_lie_elsewhere_than_they_can_are_noticed() {
    let queue = |ooo_ranges: &[(u32, u32)]| {
        let mut queue = Queue::default();
        queue.push(b"ab");
        let memory = Arc::new(b"ab..efghij".to_vec());
        queue.replace(
            memory,
            ooo_ranges.iter().map(|&(start, end)| ooo_range(start, end)),
        );
        queue
    };
    assert!(queue(&[(4, 6), (7, 10)]).is_consistent());
    for ooo_ranges in [
        &[(2, 4)][..],
        &[(0, 4)],
        &[(4, 4)],
        &[(6, 4)],
        &[(4, 11)],
        &[(4, u32::MAX)],
        &[(7, 10), (4, 6)],
        &[(4, 6), (6, 8)],
    ] {
        assert!(!queue(ooo_ranges).is_consistent(), "{ooo_ranges:?}");
    }
}

#[test]
fn a_handoff_lies_within_its_memory() {
    for (start, length) in [(0, 4), (3, 1), (4, 0), (usize::MAX, 2), (2, usize::MAX)] {
        assert!(
            elsewhere(b"abc", start, length).is_none(),
            "{start} {length}"
        );
    }
    assert!(elsewhere(b"abc", 2, 1).is_some());
    assert!(elsewhere(b"abc", 3, 0).is_some());
}
