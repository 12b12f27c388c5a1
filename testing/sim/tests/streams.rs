//! Byte streams between two connections over a link without faults.

use core::time::Duration;

use portolan_sim::{Pair, Random, Side};
use portolan_tcp::{Config, Connection, Events, StateName};
use portolan_types::Instant;

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.draw() as u8).collect()
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
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.timestamps && figures.sack && figures.window_scaling);
    assert_eq!(figures.mss, 1448);
    assert_eq!(figures.srtt, Some(2 * MS));
}

#[test]
fn a_stream_arrives_unchanged_in_both_directions() {
    let mut pair = established();
    pair.transfer(Side::A, &bytes(1, 3_000_000), LONG);
    pair.transfer(Side::B, &bytes(2, 3_000_000), LONG);
}

#[test]
fn a_stream_arrives_unchanged_over_a_hostile_wire_in_both_directions_at_once() {
    for seed in 0..8 {
        let mut pair = Pair::new(seed, 5 * MS, &Config::default());
        pair.links(|link| {
            link.loss = 30;
            link.duplication = 20;
            link.reordering = 50;
        });
        pair.establish();
        exchange(
            &mut pair,
            &bytes(seed, 400_000),
            &bytes(seed + 100, 300_000),
        );
    }
}

#[test]
fn a_stream_stays_exact_while_both_connections_migrate_all_the_time() {
    for seed in 0..4 {
        let mut pair = Pair::new(seed, 5 * MS, &Config::default());
        pair.links(|link| {
            link.rate = 100_000_000;
            link.loss = 20;
            link.reordering = 20;
        });
        pair.migration = 200;
        pair.establish();
        exchange(
            &mut pair,
            &bytes(seed, 400_000),
            &bytes(seed + 100, 300_000),
        );
        assert!(pair.migrations > 100);
    }
}

/// Sends a stream in each direction at once, closes both and checks the received data.
fn exchange(pair: &mut Pair, from_a: &[u8], from_b: &[u8]) {
    let until = pair.now + LONG;
    let (mut sent_a, mut sent_b) = (0, 0);
    let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
    let mut chunk = vec![0; 50_000];
    loop {
        let now = pair.now;
        sent_a += pump(pair.a.tcp(), now, &from_a[sent_a..]);
        sent_b += pump(pair.b.tcp(), now, &from_b[sent_b..]);
        let count = pair.a.tcp().recv(now, &mut chunk);
        at_a.extend_from_slice(&chunk[..count]);
        let count = pair.b.tcp().recv(now, &mut chunk);
        at_b.extend_from_slice(&chunk[..count]);
        if pair.a.tcp().is_receive_finished() && pair.b.tcp().is_receive_finished() {
            break;
        }
        assert!(
            pair.step() && pair.now < until,
            "stuck: {} and {}",
            at_a.len(),
            at_b.len()
        );
    }
    assert!(at_b == from_a && at_a == from_b, "a stream was damaged");
    pair.run_for(Duration::from_secs(200));
    assert!(pair.a.tcp().is_closed() && pair.b.tcp().is_closed());
    assert_eq!((pair.a.tcp().error(), pair.b.tcp().error()), (None, None));
}

/// Sends what fits, and a FIN after the last byte.
fn pump(connection: &mut Connection, now: Instant, rest: &[u8]) -> usize {
    let count = connection.send(now, rest);
    if count == rest.len() {
        connection.shutdown_send(now);
    }
    count
}

#[test]
fn a_reader_that_stops_fills_the_window_and_the_stream_goes_on_when_it_reads_again() {
    let mut pair = established();
    let data = bytes(3, 1_000_000);
    let now = pair.now;
    pair.b.tcp().set_receive_buffer(50_000);
    let mut sent = pair.a.tcp().send(now, &data);
    pair.run_for(Duration::from_secs(20));
    assert_eq!(pair.a.tcp().tcp_info().send_window, 0);
    assert!(
        pair.a.tcp().tcp_info().probes <= 1,
        "each probe was answered"
    );
    let mut received = Vec::new();
    let mut chunk = vec![0; 10_000];
    let until = pair.now + LONG;
    while received.len() < data.len() {
        let now = pair.now;
        let count = pair.b.tcp().recv(now, &mut chunk);
        received.extend_from_slice(&chunk[..count]);
        sent += pair.a.tcp().send(now, &data[sent..]);
        assert!(
            pair.step() && pair.now < until,
            "stuck at {}",
            received.len()
        );
    }
    assert!(received == data);
}

#[test]
fn a_lost_window_update_is_made_up_for_by_a_probe() {
    let mut pair = established();
    pair.b.tcp().set_receive_buffer(20_000);
    let data = bytes(4, 80_000);
    let now = pair.now;
    pair.a.tcp().send(now, &data);
    pair.run_for(Duration::from_secs(1));
    let mut out = vec![0; 80_000];
    let now = pair.now;
    let first = pair.b.tcp().recv(now, &mut out);
    pair.b_to_a.loss = 1000;
    pair.flush(Side::B);
    pair.b_to_a.loss = 0;
    pair.run_for(Duration::from_secs(5));
    assert!(
        first > 0 && pair.b.tcp().readable() > 0,
        "the stream went on after {first}"
    );
}

#[test]
fn small_writes_are_gathered_unless_nodelay_is_set() {
    let mut pair = established();
    for nodelay in [false, true] {
        pair.a.tcp().options().nodelay = nodelay;
        let before = pair.a.tcp().tcp_info().segments_out;
        for _ in 0..10 {
            let now = pair.now;
            pair.a.tcp().send(now, b"x");
            pair.flush(Side::A);
        }
        let sent = pair.a.tcp().tcp_info().segments_out - before;
        assert_eq!(sent, if nodelay { 10 } else { 1 });
        pair.run_for(Duration::from_secs(1));
    }
    assert_eq!(pair.b.tcp().readable(), 20);
}

#[test]
fn what_is_corked_goes_out_when_it_is_pushed_and_what_follows_waits() {
    let mut pair = established();
    pair.a.tcp().options().cork = true;
    let now = pair.now;
    pair.a.tcp().send(now, b"first");
    pair.run_for(10 * MS);
    assert_eq!(pair.b.tcp().readable(), 0);
    pair.a.tcp().push();
    pair.flush(Side::A);
    pair.run_for(10 * MS);
    assert_eq!(pair.b.tcp().readable(), 5);
    let now = pair.now;
    pair.a.tcp().send(now, b"second");
    pair.run_for(100 * MS);
    assert_eq!(pair.b.tcp().readable(), 5);
}

#[test]
fn a_corked_piece_waits_for_a_full_segment_or_200_ms() {
    let mut pair = established();
    pair.a.tcp().options().cork = true;
    let now = pair.now;
    pair.a.tcp().send(now, b"header");
    pair.run_for(100 * MS);
    assert_eq!(pair.b.tcp().readable(), 0);
    pair.run_for(200 * MS);
    assert_eq!(pair.b.tcp().readable(), 6);
    let now = pair.now;
    pair.a.tcp().send(now, b"body");
    pair.a.tcp().options().cork = false;
    pair.run_for(2 * MS);
    assert_eq!(pair.b.tcp().readable(), 10);
}

#[test]
fn an_answer_carries_the_acknowledgement() {
    let mut pair = established();
    let (mut out, rounds) = ([0; 8], 50);
    pair.run_for(Duration::from_secs(1));
    let before = pair.a.tcp().tcp_info().segments_out + pair.b.tcp().tcp_info().segments_out;
    for _ in 0..rounds {
        for side in [Side::A, Side::B] {
            let now = pair.now;
            pair.end(side).tcp().send(now, b"x");
            pair.flush(side);
            pair.run_for(MS);
            let now = pair.now;
            assert_eq!(pair.end(side.other()).tcp().recv(now, &mut out), 1);
        }
    }
    let after = pair.a.tcp().tcp_info().segments_out + pair.b.tcp().tcp_info().segments_out;
    assert!(
        after - before <= 2 * rounds + 2,
        "{} segments",
        after - before
    );
}

#[test]
fn the_receive_buffer_follows_the_path() {
    let mut pair = Pair::new(1, 50 * MS, &Config::default());
    pair.links(|link| link.rate = 1_000_000_000);
    pair.establish();
    let before = pair.b.tcp().tcp_info().receive_buffer;
    pair.transfer(Side::A, &bytes(5, 30_000_000), LONG);
    let after = pair.b.tcp().tcp_info().receive_buffer;
    assert!(after > 10 * before, "{before} to {after}");
}

#[test]
fn the_round_trip_is_measured_in_nanoseconds() {
    let mut pair = Pair::new(1, Duration::from_micros(15), &Config::default());
    pair.establish();
    pair.transfer(Side::A, &bytes(6, 100_000), LONG);
    let srtt = pair.a.tcp().tcp_info().srtt.expect("measured");
    assert!(srtt < Duration::from_micros(60), "{srtt:?}");
}

#[test]
fn a_peer_without_options_is_served() {
    let plain = Config {
        timestamps: false,
        sack: false,
        window_scaling: false,
        ..Config::default()
    };
    let mut pair = Pair::new(1, MS, &Config::default());
    pair.b.config = plain;
    pair.links(|link| link.loss = 20);
    pair.establish();
    let figures = pair.a.tcp().tcp_info();
    assert!(!figures.timestamps && !figures.sack && !figures.window_scaling);
    assert_eq!(figures.mss, 1460);
    pair.transfer(Side::A, &bytes(7, 500_000), LONG);
    pair.transfer(Side::B, &bytes(8, 500_000), LONG);
}
