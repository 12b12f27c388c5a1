//! A connection counts its events, under names that operators see.

use core::time::Duration;

use portolan_sim::{Packet, Pair, Side, segment};
use portolan_tcp::{Config, Connection, EVENTS, capsule};
use portolan_types::SeqNum;
use portolan_wire::tcp::TcpFlags;

fn count(connection: &Connection, name: &str) -> u32 {
    let index = EVENTS.iter().position(|(known, _)| *known == name);
    connection.counts()[index.unwrap_or_else(|| panic!("nothing is called {name}"))]
}

fn established() -> Pair {
    let mut pair = Pair::new(1, Duration::from_millis(5), &Config::default());
    pair.establish();
    pair
}

#[test]
fn an_undisturbed_stream_counts_nothing() {
    let mut pair = established();
    pair.transfer(Side::A, &[7; 200_000], Duration::from_secs(10));
    assert_eq!(pair.a.tcp().counts().iter().sum::<u32>(), 0);
}

#[test]
fn a_peer_that_vanished_is_probed_then_timed_out_then_given_up() {
    let mut pair = established();
    pair.transfer(Side::A, &[7; 20_000], Duration::from_secs(10));
    pair.links(|link| link.loss = 1000);
    let now = pair.now;
    pair.a.tcp().send(now, &[7; 8_000]);
    pair.run_for(Duration::from_secs(2000));
    let a = pair.a.tcp();
    assert_eq!(count(a, "tail_probes"), 1);
    assert_eq!(count(a, "timeouts"), 15);
    assert_eq!(count(a, "given_up"), 1);
}

#[test]
fn a_reader_that_stops_shows_as_closed_windows_and_probes() {
    let mut pair = established();
    let now = pair.now;
    pair.b.tcp().set_receive_buffer(4096);
    pair.a.tcp().send(now, &[7; 80_000]);
    // Data fills the window that the handshake offered first.
    pair.run_for(Duration::from_secs(30));
    assert!(count(pair.b.tcp(), "zero_windows_sent") > 0);
    assert!(count(pair.a.tcp(), "window_probes") > 2);
}

#[test]
fn counts_travel_with_the_connection() {
    let mut pair = established();
    pair.links(|link| link.loss = 1000);
    let now = pair.now;
    pair.a.tcp().send(now, b"anybody?");
    pair.run_for(Duration::from_secs(10));
    let before = *pair.a.tcp().counts();
    assert!(before.iter().sum::<u32>() > 0);
    let capsule = capsule::to_bytes(pair.a.tcp());
    let moved: Connection = capsule::from_bytes(&capsule).expect("and decode");
    assert_eq!(*moved.counts(), before);
}

#[test]
fn what_a_stranger_sends_is_dropped_by_name() {
    let mut pair = established();
    let now = pair.now;
    pair.b.tcp().send(now, b"hello");
    pair.run_for(Duration::from_secs(1));
    let forge = |pair: &mut Pair, flags: TcpFlags, far: u32, ack: u32| {
        let mut header = segment(2000, 1000, SeqNum(0), flags);
        // Challenge ACKs are at least half a second apart.
        pair.run_for(Duration::from_secs(1));
        // Relative to the numbers in A's last segment.
        let now = pair.now;
        pair.a.tcp().send(now, b"x");
        pair.flush(Side::A);
        let last = pair.a_to_b.receive(now + Duration::from_secs(1));
        let last = last.expect("A sends").header;
        header.seq = last.ack + far;
        header.ack = last.seq + 1 + ack;
        header.options.timestamps = last.options.timestamps;
        let payload = Vec::new();
        pair.inject(Side::A, &Packet::new(header, payload));
    };
    forge(&mut pair, TcpFlags::ACK, 1 << 24, 0);
    forge(&mut pair, TcpFlags::RST, 1000, 0);
    forge(&mut pair, TcpFlags::SYN, 0, 0);
    forge(&mut pair, TcpFlags::ACK, 0, 1 << 20);
    forge(&mut pair, TcpFlags(0), 0, 0);
    let a = pair.a.tcp();
    for name in [
        "drop_out_of_window",
        "drop_reset",
        "drop_syn",
        "drop_bad_ack",
        "drop_without_ack",
    ] {
        assert_eq!(count(a, name), 1, "{name}");
    }
    assert_eq!(count(a, "challenge_acks"), 4);
    assert_eq!(count(a, "challenge_acks_withheld"), 0);
}
