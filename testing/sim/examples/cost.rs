//! The cost of the engine alone: nanoseconds per one-byte round trip, and per byte of a bulk stream.
//! Two connections in one thread, without a network between them.

use std::time::Instant as Clock;

use portolan_tcp::{Config, Connection};
use portolan_types::{Instant, SeqNum};

const ROUNDS: u32 = 1_000_000;
const BULK: usize = 2 << 30;

/// Carries all segments that `from` has due to `to`; `copy` represents the ring that the packet is in.
fn carry(now: Instant, from: &mut Connection, to: &mut Connection, copy: &mut Vec<u8>) -> usize {
    let mut segments = 0;
    while let Some(segment) = from.transmit(now) {
        copy.clear();
        copy.extend_from_slice(segment.payload[0]);
        copy.extend_from_slice(segment.payload[1]);
        to.on_segment(now, &segment.header, copy);
        segments += 1;
    }
    segments
}

fn pair(now: Instant) -> (Connection, Connection) {
    let config = Config {
        gso_max: 65_160,
        ..Config::default()
    };
    let mut a = Connection::connect(&config, 1, 2, SeqNum(1), now);
    let syn = a.transmit(now).expect("a SYN is due").header;
    let mut b = Connection::accept(&config, &syn, SeqNum(7), now);
    let mut copy = Vec::new();
    while carry(now, &mut b, &mut a, &mut copy) + carry(now, &mut a, &mut b, &mut copy) > 0 {}
    (a, b)
}

fn main() {
    let mut nanos = 1_000_000_000;
    let mut tick = || {
        nanos += 5_000;
        Instant::from_nanos(nanos)
    };
    let (mut a, mut b) = pair(tick());
    let (mut copy, mut out) = (Vec::new(), vec![0; 1 << 18]);
    let start = Clock::now();
    let mut segments = 0;
    for _ in 0..ROUNDS {
        let now = tick();
        a.send(now, b"x");
        segments += carry(now, &mut a, &mut b, &mut copy);
        b.recv(now, &mut out);
        b.send(now, b"y");
        segments += carry(now, &mut b, &mut a, &mut copy);
        a.recv(now, &mut out);
    }
    let each = start.elapsed().as_nanos() / u128::from(2 * ROUNDS);
    println!("one byte: {each} ns for send, transmit, on_segment and recv; {segments} segments");

    let data = vec![1; 1 << 18];
    let (mut moved, mut segments, mut acks) = (0, 0, 0);
    let start = Clock::now();
    while moved < BULK {
        let now = tick();
        a.send(now, &data);
        segments += carry(now, &mut a, &mut b, &mut copy);
        loop {
            let count = b.recv(now, &mut out);
            moved += count;
            if count == 0 {
                break;
            }
        }
        acks += carry(now, &mut b, &mut a, &mut copy);
        for end in [&mut a, &mut b] {
            if end.deadline().is_some_and(|at| at <= now) {
                end.on_timer(now);
            }
        }
    }
    let took = start.elapsed().as_secs_f64();
    println!(
        "bulk: {:.1} Gb/s, {segments} segments, {acks} acknowledgements",
        moved as f64 * 8e-9 / took
    );
}
