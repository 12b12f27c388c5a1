//! Streams of octets between two connections over a wire that behaves.

use core::time::Duration;

use portolan_sim::{Pair, Random, Side};
use portolan_tcp::{Config, Events, StateName};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

fn octets(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.next() as u8).collect()
}

fn established() -> Pair {
    let mut pair = Pair::new(1, MS, &Config::default());
    pair.establish();
    pair
}

#[test]
fn a_handshake_takes_one_round_trip_and_agrees_on_all_options() {
    let mut pair = established();
    assert_eq!(pair.a.tcp().state(), StateName::Established);
    assert!(pair.a.events.contains(Events::CONNECTED));
    let figures = pair.a.tcp().figures();
    assert!(figures.timestamps && figures.sack && figures.window_scaling);
    assert_eq!(figures.mss, 1448);
    assert_eq!(figures.srtt, Some(2 * MS));
}

#[test]
fn a_stream_arrives_unchanged_in_both_directions() {
    let mut pair = established();
    pair.transfer(Side::A, &octets(1, 3_000_000), LONG);
    pair.transfer(Side::B, &octets(2, 3_000_000), LONG);
}

#[test]
fn both_sides_close_one_after_the_other() {
    let mut pair = established();
    let now = pair.now;
    pair.a.tcp().close(now);
    pair.run_for(10 * MS);
    assert_eq!(pair.a.tcp().state(), StateName::FinWait2);
    assert_eq!(pair.b.tcp().state(), StateName::CloseWait);
    assert!(pair.b.events.contains(Events::PEER_CLOSED));
    let now = pair.now;
    pair.b.tcp().close(now);
    pair.run_for(10 * MS);
    assert_eq!(pair.a.tcp().state(), StateName::TimeWait);
    assert_eq!(pair.b.tcp().state(), StateName::Closed);
    pair.run_for(Duration::from_secs(61));
    assert_eq!(pair.a.tcp().state(), StateName::Closed);
    assert_eq!(pair.a.tcp().error(), None);
}
