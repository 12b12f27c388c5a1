//! A queue reads the same wherever its octets lie.

use core::any::Any;

use super::*;

#[derive(Debug)]
struct Elsewhere(Vec<u8>);

impl Memory for Elsewhere {
    fn octets(&self) -> &[u8] {
        &self.0
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn elsewhere(octets: &[u8], start: usize, length: usize) -> Option<Prefix> {
    Prefix::new(Arc::new(Elsewhere(octets.to_vec())), start, length)
}

/// "cdef" elsewhere, "gh" in the ring.
fn queue() -> Queue {
    let mut queue = Queue::default();
    queue.push(b"gh");
    queue.lead_with(elsewhere(b"abcdefxx", 2, 4).unwrap());
    queue
}

fn all(queue: &Queue) -> Vec<u8> {
    let mut out = vec![0; queue.len()];
    assert_eq!(queue.copy_out(0, &mut out), queue.len());
    assert_eq!(queue.parts().concat(), out);
    out
}

#[test]
fn octets_are_read_from_the_prefix_and_then_from_the_ring() {
    let mut queue = queue();
    assert_eq!((queue.len(), queue.span()), (6, 6));
    assert_eq!(all(&queue), b"cdefgh");
    for offset in 0..6 {
        let mut out = [0; 3];
        let count = queue.copy_out(offset, &mut out);
        assert_eq!(out[..count], b"cdefgh"[offset..(offset + 3).min(6)]);
        assert_eq!(queue.octet(offset), Some(b"cdefgh"[offset]));
    }
    queue.consume(3);
    assert_eq!(all(&queue), b"fgh");
    queue.consume(2);
    assert_eq!(all(&queue), b"h");
    assert!(queue.prefix().is_none());
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
fn octets_of_the_prefix_that_are_put_back_are_not_copied() {
    let mut queue = queue();
    queue.consume(3);
    queue.unread(b"de");
    assert_eq!(all(&queue), b"defgh");
    assert_eq!(queue.prefix().map(Prefix::start), Some(3));
    // They lie before it, too, though nobody here has read them.
    queue.unread(b"abc");
    assert_eq!(all(&queue), b"abcdefgh");
}

#[test]
fn other_octets_that_are_put_back_come_first() {
    let mut queue = queue();
    queue.consume(1);
    queue.unread(b"zz");
    assert_eq!(all(&queue), b"zzdefgh");
    assert!(queue.prefix().is_none());
}

#[test]
fn all_that_is_readable_moves_elsewhere_and_the_rest_stays() {
    let mut queue = queue();
    queue.write_at(7, b"j");
    let octets = queue.parts().concat();
    queue.replace(elsewhere(&octets, 0, octets.len()).unwrap());
    assert_eq!((queue.len(), queue.span()), (6, 8));
    queue.write_at(6, b"i");
    queue.extend(2);
    assert_eq!(all(&queue), b"cdefghij");
}

#[test]
fn a_prefix_lies_within_its_memory() {
    for (start, length) in [
        (0, 0),
        (0, 4),
        (3, 1),
        (4, 0),
        (usize::MAX, 2),
        (2, usize::MAX),
    ] {
        assert!(
            elsewhere(b"abc", start, length).is_none(),
            "{start} {length}"
        );
    }
    assert!(elsewhere(b"abc", 2, 1).is_some());
}
