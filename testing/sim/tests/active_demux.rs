//! Handles of active demultiplexing between two connections (MS §VI-A, Fig. 9): announced, enclosed and withdrawn,
//! despite loss, reordering, migration and peers that do not support them.

use core::time::Duration;

use portolan_sim::{Pair, Side};
use portolan_tcp::Config;
use portolan_types::Handle;

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);

const HANDLE: Handle = Handle {
    index: 3,
    nonce: 99,
    marker: 0x0c,
};

fn able() -> Config {
    Config {
        handle_room: 12,
        ..Config::default()
    }
}

fn pair(seed: u64) -> Pair {
    let mut pair = Pair::new(seed, 5 * MS, &able());
    pair.establish();
    pair
}

/// Returns true if the side's packets enclose a handle.
fn encloses(pair: &mut Pair, side: Side) -> bool {
    let count = |pair: &Pair| match side {
        Side::A => pair.a_to_b.with_handle,
        Side::B => pair.b_to_a.with_handle,
    };
    let before = count(pair);
    pair.transfer(side, &[7; 1000], MINUTE);
    count(pair) > before
}

#[test]
fn both_ends_learn_each_others_handles_and_enclose_them() {
    let mut pair = pair(1);
    pair.b.tcp().advertise(HANDLE);
    pair.a.tcp().advertise(Handle { index: 4, ..HANDLE });
    pair.transfer(Side::A, &vec![7; 100_000], MINUTE);
    pair.transfer(Side::B, &vec![7; 100_000], MINUTE);
    for (side, expected) in [(Side::A, 3), (Side::B, 4)] {
        // No acknowledgement is pending.
        pair.run_for(Duration::from_secs(1));
        let now = pair.now;
        pair.end(side).tcp().send(now, b"!");
        let segment = pair.end(side).tcp().transmit(now).unwrap();
        assert_eq!(segment.handle.map(|handle| handle.index), Some(expected));
    }
}

#[test]
fn a_revoked_handle_is_not_enclosed_any_more_and_a_later_one_is() {
    let mut pair = pair(2);
    pair.b.tcp().advertise(HANDLE);
    pair.transfer(Side::A, &[7; 1000], MINUTE);
    pair.b.tcp().revoke();
    pair.transfer(Side::A, &[7; 1000], MINUTE);
    pair.b.tcp().advertise(Handle { index: 5, ..HANDLE });
    pair.b.tcp().revoke();
    pair.transfer(Side::B, &[7; 1000], MINUTE);
    assert!(!encloses(&mut pair, Side::A));
}

#[test]
fn peers_without_it_see_no_option_and_get_no_handle() {
    for (a, b) in [(able(), Config::default()), (Config::default(), able())] {
        let mut pair = Pair::new(3, 5 * MS, &a);
        pair.b.config = b;
        pair.establish();
        assert!(!pair.a.tcp().takes_handles() && !pair.b.tcp().takes_handles());
        pair.a.tcp().advertise(HANDLE);
        pair.b.tcp().advertise(HANDLE);
        pair.transfer(Side::A, &[7; 50_000], MINUTE);
        pair.transfer(Side::B, &[7; 50_000], MINUTE);
        assert!(!encloses(&mut pair, Side::A));
        assert!(!encloses(&mut pair, Side::B));
    }
}

#[test]
fn every_packet_fits_the_path_with_its_options() {
    let mut pair = pair(4);
    // The space in an Ethernet frame for TCP's header and payload, less the IP header's option.
    let largest = 1500 - 20 - 12;
    let check = |pair: &mut Pair| {
        let now = pair.now;
        pair.a.tcp().send(now, &[7; 60_000]);
        while let Some(segment) = pair.a.tcp().transmit(now) {
            let text = match segment.segment_size {
                0 => segment.payload_len(),
                size => size.into(),
            };
            let bytes = segment.header.header_len() + text;
            assert!(bytes <= largest, "{bytes}");
        }
    };
    pair.a.tcp().advertise(HANDLE);
    check(&mut pair);
    pair.a.tcp().revoke();
    check(&mut pair);
}

#[test]
fn streams_stay_exact_while_handles_come_and_go_under_loss_and_migration() {
    for seed in 0..20 {
        let mut pair = pair(100 + seed);
        pair.links(|link| {
            link.loss = 20;
            link.duplication = 10;
            link.reordering = 30;
        });
        pair.migration = 20;
        for round in 0..10 {
            let handle = Handle {
                index: round,
                ..HANDLE
            };
            for side in [Side::A, Side::B] {
                match round % 3 {
                    2 => pair.end(side).tcp().revoke(),
                    _ => pair.end(side).tcp().advertise(handle),
                }
                let text: Vec<u8> = (0..30_000)
                    .map(|i| (i * 7 + round as usize) as u8)
                    .collect();
                pair.transfer(side, &text, 10 * MINUTE);
            }
        }
    }
}

#[test]
fn a_path_that_loses_packets_with_options_does_not_stop_the_stream() {
    let mut pair = pair(5);
    pair.b.tcp().advertise(HANDLE);
    pair.transfer(Side::A, &[7; 1000], MINUTE);
    assert!(encloses(&mut pair, Side::A));
    pair.a_to_b.loses_handles = true;
    pair.transfer(Side::A, &vec![7; 100_000], 5 * MINUTE);
    assert!(!encloses(&mut pair, Side::A));
}

#[test]
fn acknowledgements_that_get_lost_with_their_options_come_without_them() {
    let mut pair = pair(6);
    pair.a.tcp().advertise(HANDLE);
    pair.transfer(Side::A, &[7; 1000], MINUTE);
    pair.b_to_a.loses_handles = true;
    pair.transfer(Side::A, &vec![7; 100_000], 5 * MINUTE);
    assert!(!encloses(&mut pair, Side::B));
}
