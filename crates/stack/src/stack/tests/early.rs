//! Frames that arrive before their session wait for it.

use super::*;
use crate::counters::counter_names;
use crate::stack::early::{AT_A_SLOT, IN_ALL};

/// A datagram to B with that payload, as the filter of B's host delivers it.
fn datagram(text: &[u8]) -> Vec<u8> {
    let mut a = Stack::new(now());
    let slot = udp(&mut a, at(A));
    let mut wire = KeptFrames::with_room(9);
    let known = routes(2, at(A), at(B), true);
    let sending = Sending::default();
    a.send_datagram(slot, Some(at(B)), [text, b""], &sending, &known, &mut wire)
        .unwrap();
    received(&wire.frames[0]).to_vec()
}

fn session_at_b(generation: u32) -> Session {
    let generation = Generation(generation);
    let udp = UdpSession::new(SessionId(1), at(B), None, generation, 4 << 20);
    Session::Udp(Box::new(udp))
}

fn texts(stack: &mut Stack, slot: Slot) -> Vec<Vec<u8>> {
    let session = stack.udp(slot).unwrap();
    std::iter::from_fn(|| session.receive())
        .map(|datagram| datagram.data)
        .collect()
}

fn count(stack: &Stack, counter: &str) -> u64 {
    let mut named = counter_names().zip(stack.counters());
    let found = named.find(|((group, name, _), _)| (*group, *name) == ("stack", counter));
    found.unwrap().1
}

#[test]
fn what_comes_before_the_session_is_given_to_it_in_order() {
    let mut b = Stack::new(now());
    let slot = b.reserve();
    for text in [b"one", b"two"] {
        let frame = datagram(text);
        let input = b.input(now(), &record(slot, 7), &frame);
        assert!(
            matches!(input, Input::Held(held) if held == slot),
            "{input:?}"
        );
    }
    b.insert_at(now(), slot, session_at_b(7));
    b.input(now(), &record(slot, 7), &datagram(b"three"));
    assert_eq!(texts(&mut b, slot), [&b"one"[..], b"two", b"three"]);
    let events: Vec<_> = b.changed().collect();
    assert_eq!(events, [(slot, Events::READABLE); 3]);
    assert_eq!((count(&b, "held"), count(&b, "delivered")), (2, 3));
    assert_eq!(b.released().count(), 0);
}

#[test]
fn what_waits_for_another_session_or_in_vain_is_released_in_order() {
    let mut b = Stack::new(now());
    let slot = b.reserve();
    let (one, two) = (datagram(b"one"), datagram(b"two"));
    for (generation, frame) in [(5, &one), (7, &two), (6, &two)] {
        b.input(now(), &record(slot, generation), frame);
    }
    b.insert_at(now(), slot, session_at_b(7));
    assert_eq!(texts(&mut b, slot), [b"two"]);
    assert_eq!(b.released().collect::<Vec<_>>(), [one.clone(), two.clone()]);

    b.remove(slot);
    assert_eq!(b.reserve(), slot);
    b.input(now(), &record(slot, 8), &one);
    b.input(now(), &record(slot, 8), &two);
    b.remove(slot);
    assert_eq!(b.released().collect::<Vec<_>>(), [one, two]);
}

#[test]
fn what_was_for_the_session_before_does_not_wait_for_the_next() {
    let mut b = Stack::new(now());
    let slot = b.reserve();
    b.insert_at(now(), slot, session_at_b(7));
    let frame = datagram(b"late");
    for leave in [Stack::take, Stack::remove] {
        leave(&mut b, slot);
        let input = b.input(now(), &record(slot, 7), &frame);
        assert!(matches!(input, Input::Unclaimed(_)), "{input:?}");
    }
    assert_eq!(b.reserve(), slot);
    let input = b.input(now(), &record(slot, 7), &frame);
    assert!(matches!(input, Input::Unclaimed(_)), "{input:?}");
    assert_eq!(count(&b, "held"), 0);
}

#[test]
fn so_many_frames_wait_at_a_slot_and_so_many_bytes_in_all() {
    let mut b = Stack::new(now());
    let slot = b.reserve();
    let small = datagram(b"x");
    for _ in 0..AT_A_SLOT + 2 {
        b.input(now(), &record(slot, 7), &small);
    }
    assert_eq!(count(&b, "held"), AT_A_SLOT as u64);
    assert_eq!(count(&b, "drop_early"), 2);
    b.remove(slot);
    b.released().for_each(drop);

    let large = datagram(&[0; 1400]);
    let fit = IN_ALL / large.len();
    let slots: Vec<Slot> = (0..fit / AT_A_SLOT + 1).map(|_| b.reserve()).collect();
    let before = count(&b, "held");
    for at in 0..fit + 3 {
        b.input(now(), &record(slots[at / AT_A_SLOT], 7), &large);
    }
    assert_eq!(count(&b, "held") - before, fit as u64);
    assert_eq!(count(&b, "drop_early"), 2 + 3);
    for slot in slots {
        b.remove(slot);
    }
    assert_eq!(b.released().count(), fit);
    let slot = b.reserve();
    let input = b.input(now(), &record(slot, 7), &large);
    assert!(matches!(input, Input::Held(_)), "there is room again");
}
