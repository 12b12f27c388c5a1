//! The duration of transfers over impaired links. Runs are deterministic, so the table is a snapshot:
//! a change of the engine that costs goodput shows as a difference.

use core::time::Duration;
use std::fmt::Write;

use portolan_sim::{Pair, Random, Side};
use portolan_tcp::{Config, CongestionKind};

const BYTES: usize = 2_000_000;
const LIMIT: Duration = Duration::from_secs(3600);

struct Wire {
    delay: Duration,
    rate: u64,
    buffer: usize,
    loss: u32,
    reordering: u32,
    duplication: u32,
}

fn run(config: &Config, wire: &Wire) -> String {
    let mut random = Random::new(9);
    let data: Vec<u8> = (0..BYTES).map(|_| random.draw() as u8).collect();
    let mut pair = Pair::new(42, wire.delay, config);
    pair.links(|link| {
        link.rate = wire.rate;
        link.buffer = wire.buffer;
        link.loss = wire.loss;
        link.reordering = wire.reordering;
        link.duplication = wire.duplication;
    });
    pair.establish();
    let took = pair.transfer(Side::A, &data, LIMIT).time;
    let goodput = BYTES as f64 * 8.0 / took.as_secs_f64() / 1e6;
    let figures = pair.a.tcp().tcp_info();
    format!(
        "{:>9.3} s {goodput:>8.2} Mb/s  retransmits {:>5}  packets lost {:>5}",
        took.as_secs_f64(),
        figures.retransmits,
        pair.a_to_b.dropped,
    )
}

/// Measures the paths of the comparison with Linux: each loss, round-trip time, rate and buffer.
fn matrix(congestion: CongestionKind) -> String {
    let config = Config {
        congestion,
        ..Config::default()
    };
    let mut table = String::new();
    for rate in [10, 100] {
        for rtt_ms in [1, 20, 100] {
            for loss in [0, 1, 10, 30] {
                for (name, share) in [("shallow", 4), ("deep", 1)] {
                    // A quarter of the bandwidth-delay product, but at least a few packets; or
                    // 250 ms at the rate.
                    let product = rate * rtt_ms * 125;
                    let buffer = match share {
                        1 => rate * 250 * 125,
                        share => (product / share).max(15_000),
                    };
                    let wire = Wire {
                        delay: Duration::from_micros(rtt_ms * 500),
                        rate: rate * 1_000_000,
                        buffer: buffer as usize,
                        loss,
                        reordering: 0,
                        duplication: 0,
                    };
                    let line = run(&config, &wire);
                    writeln!(
                        table,
                        "{rate:>3} Mb/s  {rtt_ms:>3} ms  {loss:>2}‰  {name:<7}  {line}"
                    )
                    .expect("strings grow");
                }
            }
        }
    }
    table
}

#[test]
fn goodput_of_cubic_over_loss_delay_and_buffer() {
    insta::assert_snapshot!(matrix(CongestionKind::Cubic));
}

#[test]
fn goodput_of_reno_over_loss_delay_and_buffer() {
    insta::assert_snapshot!(matrix(CongestionKind::Reno));
}

#[test]
fn goodput_of_bbr_over_loss_delay_and_buffer() {
    insta::assert_snapshot!(matrix(CongestionKind::Bbr));
}

#[test]
fn goodput_without_sack_with_reno_and_with_disorder() {
    let mut table = String::new();
    let plain = Config::default();
    let cases = [
        ("cubic, sack", plain.clone()),
        (
            "cubic, no sack",
            Config {
                sack: false,
                ..plain.clone()
            },
        ),
        (
            "reno, sack",
            Config {
                congestion: CongestionKind::Reno,
                ..plain.clone()
            },
        ),
        (
            "bbr, sack",
            Config {
                congestion: CongestionKind::Bbr,
                ..plain.clone()
            },
        ),
        (
            "no timestamps",
            Config {
                timestamps: false,
                ..plain.clone()
            },
        ),
        (
            "no scaling",
            Config {
                window_scaling: false,
                ..plain.clone()
            },
        ),
        (
            "no options",
            Config {
                sack: false,
                timestamps: false,
                window_scaling: false,
                ..plain
            },
        ),
    ];
    for (name, config) in cases {
        for (accident, loss, reordering, duplication) in [
            ("loss", 10, 0, 0),
            ("reordering", 0, 20, 0),
            ("all", 10, 20, 20),
        ] {
            let wire = Wire {
                delay: Duration::from_millis(10),
                rate: 100_000_000,
                buffer: 300_000,
                loss,
                reordering,
                duplication,
            };
            let line = run(&config, &wire);
            writeln!(table, "{name:<16} {accident:<12} {line}").expect("strings grow");
        }
    }
    insta::assert_snapshot!(table);
}
