//! Which datagrams take the fast path, and how they are processed there.

use super::*;

/// A frame from `A` to `B`.
fn frame() -> Vec<u8> {
    let mut a = Stack::new(now());
    let from = udp(&mut a, at(A));
    let (routes, mut wire) = (routes(2, at(A), at(B), true), KeptFrames::with_room(9));
    received(&send(&mut a, from, &routes, &mut wire)).to_vec()
}

fn connected(stack: &mut Stack, peer: &str, room: usize) -> Slot {
    let session = UdpSession::new(SessionId(1), at(B), Some(at(peer)), Generation(7), room);
    stack.insert(now(), Session::Udp(Box::new(session)))
}

/// The counts of datagrams on the fast and on the slow path.
fn counted(stack: &Stack) -> [u64; 2] {
    let of = |name| {
        let mut names = crate::counter_names();
        let at = names.position(|(_, known, _)| known == name).unwrap();
        stack.counters()[at]
    };
    [of("datagrams_expected"), of("datagrams_taken_apart")]
}

#[test]
fn a_peers_datagrams_are_expected_after_the_first() {
    let (frame, mut b) = (frame(), Stack::new(now()));
    let to = connected(&mut b, A, 10_000);
    for _ in 0..3 {
        assert!(matches!(
            b.input(now(), &record(to, 7), &frame),
            Input::Delivered(_)
        ));
        assert_eq!(b.changed().collect::<Vec<_>>(), [(to, Events::READABLE)]);
        let datagram = b.udp(to).unwrap().receive().unwrap();
        assert_eq!((datagram.from, datagram.to), (at(A), at(B)));
        assert_eq!(
            (datagram.data.as_slice(), datagram.ip.ttl),
            (&b"hello"[..], 64)
        );
    }
    assert_eq!(counted(&b), [2, 1]);
}

#[test]
fn who_has_no_peer_expects_nobody() {
    let (frame, mut b) = (frame(), Stack::new(now()));
    let to = udp(&mut b, at(B));
    for _ in 0..3 {
        b.input(now(), &record(to, 7), &frame);
    }
    assert_eq!(b.udp(to).unwrap().queue.len(), 3);
    assert_eq!(counted(&b), [0, 0]);
}

#[test]
fn a_full_buffer_and_a_later_generation_are_noticed_on_the_fast_path() {
    let (frame, mut b) = (frame(), Stack::new(now()));
    let to = connected(&mut b, A, 600);
    let fates: Vec<bool> = (0..4)
        .map(|_| matches!(b.input(now(), &record(to, 7), &frame), Input::Delivered(_)))
        .collect();
    assert_eq!(fates, [true, true, false, false]);
    assert_eq!(b.udp(to).unwrap().overflow, 2);
    let earlier = b.input(now(), &record(to, 6), &frame);
    assert!(matches!(earlier, Input::Unclaimed(_)), "{earlier:?}");
}

#[test]
fn a_new_peer_is_not_taken_for_the_old_one() {
    let (frame, mut b) = (frame(), Stack::new(now()));
    let to = connected(&mut b, A, 10_000);
    b.input(now(), &record(to, 7), &frame);
    b.udp(to).unwrap().remote = Some(at("10.0.0.9:9"));
    let foreign = b.input(now(), &record(to, 7), &frame);
    assert!(
        matches!(foreign, Input::Dropped(Drop::ForeignPeer)),
        "{foreign:?}"
    );
    assert_eq!(counted(&b), [0, 1]);
}

#[test]
fn what_was_coalesced_is_divided_on_both_paths() {
    let (frame, mut b) = (frame(), Stack::new(now()));
    let to = connected(&mut b, A, 10_000);
    for _ in 0..2 {
        let coalesced = RecordHeader {
            gso_size: 2,
            ..record(to, 7)
        };
        b.input(now(), &coalesced, &frame);
        let pieces: Vec<_> = core::iter::from_fn(|| b.udp(to).unwrap().receive())
            .map(|datagram| datagram.data)
            .collect();
        assert_eq!(pieces, [&b"he"[..], b"ll", b"o"]);
    }
    assert_eq!(counted(&b), [1, 1]);
}

#[test]
fn every_frame_is_taken_apart_where_that_was_asked_for() {
    let (frame, mut b) = (frame(), Stack::new(now()));
    b.take_all_apart();
    let to = connected(&mut b, A, 10_000);
    for _ in 0..3 {
        b.input(now(), &record(to, 7), &frame);
    }
    assert_eq!(counted(&b), [0, 3]);
}
