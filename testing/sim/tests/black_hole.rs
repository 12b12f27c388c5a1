//! Paths that drop large packets silently (RFC 8899, RFC 4821).

use core::time::Duration;

use portolan_sim::{Pair, Side};
use portolan_tcp::Config;

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);

fn pair() -> Pair {
    let mut pair = Pair::new(5, 5 * MS, &Config::default());
    pair.establish();
    pair
}

#[test]
fn a_stream_gets_through_a_black_hole_and_segments_grow_to_what_fits() {
    let mut pair = pair();
    pair.a_to_b.largest = 1300;
    pair.transfer(Side::A, &vec![7; 4_000_000], 5 * MINUTE);
    let mss = pair.a.tcp().tcp_info().mss + 12;
    assert!((1290..=1300).contains(&mss), "{mss}");
}

#[test]
fn a_very_small_path_is_found_too() {
    let mut pair = pair();
    pair.a_to_b.largest = 300;
    pair.transfer(Side::A, &vec![7; 200_000], 10 * MINUTE);
    let mss = pair.a.tcp().tcp_info().mss + 12;
    assert!((200..=300).contains(&mss), "{mss}");
}

#[test]
fn a_path_that_heals_is_used_in_full_again() {
    let mut pair = pair();
    pair.a_to_b.largest = 1300;
    pair.transfer(Side::A, &vec![7; 1_000_000], 5 * MINUTE);
    pair.a_to_b.largest = usize::MAX;
    pair.run_for(11 * MINUTE);
    pair.transfer(Side::A, &vec![7; 4_000_000], 5 * MINUTE);
    assert!(pair.a.tcp().tcp_info().mss > 1430);
}

#[test]
fn a_peer_that_is_gone_is_given_up_as_soon_as_ever() {
    let mut pair = pair();
    pair.a_to_b.loss = 1000;
    let now = pair.now;
    pair.a.tcp().send(now, &[7; 5000]);
    pair.run_for(20 * MINUTE);
    assert!(pair.a.tcp().is_closed());
    assert_eq!(pair.a.tcp().error(), Some(portolan_tcp::Error::TimedOut));
}
