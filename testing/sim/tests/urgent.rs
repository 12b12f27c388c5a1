//! Urgent data between two engines (RFC 9293 §3.8.5, RFC 6093).

use core::time::Duration;

use portolan_sim::Pair;
use portolan_tcp::{Config, Events, OutOfBand};

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);

fn pair(change: fn(&mut Pair)) -> Pair {
    let mut pair = Pair::new(11, 5 * MS, &Config::default());
    change(&mut pair);
    pair.establish();
    pair
}

/// A sends `before`, an urgent byte, and `after`.
fn send(pair: &mut Pair, before: &[u8], after: &[u8]) {
    let now = pair.now;
    let tcp = pair.a.tcp();
    assert_eq!(tcp.send(now, before), before.len());
    assert_eq!(tcp.send(now, b"!"), 1);
    tcp.mark_urgent();
    assert_eq!(tcp.send(now, after), after.len());
}

fn read(pair: &mut Pair) -> Vec<u8> {
    let now = pair.now;
    let mut bytes = vec![0; 1 << 17];
    let count = pair.b.tcp().recv(now, &mut bytes);
    bytes.truncate(count);
    bytes
}

/// [MUST-30, MUST-31]
#[test]
fn the_urgent_byte_is_found_behind_any_length_over_a_wire_that_loses_and_reorders() {
    for length in [0, 1, 1448, 10_000, 60_000] {
        let mut pair = pair(|pair| {
            pair.links(|link| {
                link.loss = 50;
                link.reordering = 100;
            });
        });
        send(&mut pair, &vec![1; length], &[2; 5000]);
        pair.run_for(MINUTE);
        assert!(pair.b.tcp().has_urgent(), "{length}");
        assert_eq!(pair.b.tcp().take_urgent(), OutOfBand::Byte(b'!'));
        assert_eq!(pair.b.tcp().take_urgent(), OutOfBand::Nothing);
        if length > 0 {
            assert_eq!(read(&mut pair), vec![1; length]);
        }
        assert!(pair.b.tcp().is_at_mark());
        assert_eq!(read(&mut pair), [2; 5000]);
        assert!(!pair.b.tcp().is_at_mark());
    }
}

/// [MUST-32]
#[test]
fn the_user_hears_of_urgent_data_before_it_is_here() {
    let mut pair = pair(|_| {});
    send(&mut pair, &vec![1; 60_000], b"");
    let mut announced = false;
    for _ in 0..1000 {
        pair.step();
        if pair.b.events.contains(Events::URGENT) && !pair.b.tcp().has_urgent() {
            announced = true;
            assert_eq!(pair.b.tcp().peek_urgent(), OutOfBand::Announced);
        }
        if pair.b.tcp().has_urgent() {
            break;
        }
    }
    assert!(announced && pair.b.events.contains(Events::PRIORITY));
}

/// [MUST-33]
#[test]
fn the_user_can_ask_how_far_the_mark_is() {
    let mut pair = pair(|_| {});
    send(&mut pair, &[1; 100], &[2; 50]);
    pair.run_for(MINUTE);
    assert_eq!(pair.b.tcp().inquiry(), 100);
    pair.b.tcp().options().urgent_inline = true;
    assert_eq!(pair.b.tcp().inquiry(), 151);
    assert_eq!(read(&mut pair), [1; 100]);
    assert_eq!(read(&mut pair), [b"!".as_slice(), &[2; 50]].concat());
}

#[test]
fn urgent_data_is_not_held_back() {
    let mut pair = pair(|_| {});
    pair.a.tcp().options().cork = true;
    send(&mut pair, b"now", b"");
    pair.run_for(7 * MS);
    assert_eq!(pair.b.tcp().peek_urgent(), OutOfBand::Byte(b'!'));
}
