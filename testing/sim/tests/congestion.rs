//! The sender's reactions to congestion and to false signs of it, over simulated links.

use core::time::Duration;

use portolan_sim::{Pair, Random, Side};
use portolan_tcp::{Config, CongestionKind, Connection, EVENTS, EcnMode};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

fn bytes(count: usize) -> Vec<u8> {
    let mut random = Random::new(7);
    (0..count).map(|_| random.draw() as u8).collect()
}

fn count(connection: &Connection, name: &str) -> u32 {
    let index = EVENTS.iter().position(|(known, _)| *known == name);
    connection.counts()[index.unwrap_or_else(|| panic!("nothing is called {name}"))]
}

/// An established pair, over a link with 20 ms round-trip time, at 10 Mb/s, with a buffer for 200 packets.
fn pair(config: &Config) -> Pair {
    let mut pair = Pair::new(3, 10 * MS, config);
    pair.links(|link| {
        link.rate = 10_000_000;
        link.buffer = 300_000;
    });
    pair.establish();
    pair
}

fn with_ecn(asking: EcnMode, asked: EcnMode) -> Pair {
    let mut pair = Pair::new(3, 10 * MS, &Config::default());
    pair.a.config.ecn = asking;
    pair.b.config.ecn = asked;
    pair.links(|link| link.rate = 10_000_000);
    pair
}

// ---- explicit congestion notification ----

#[test]
fn congestion_notification_is_used_when_one_side_asks_and_the_other_accepts() {
    use EcnMode::{Accept, Off, Request};
    for (asking, asked, agreed) in [
        (Off, Request, false),
        (Accept, Accept, false),
        (Accept, Request, false),
        (Request, Off, false),
        (Request, Accept, true),
        (Request, Request, true),
    ] {
        let mut pair = with_ecn(asking, asked);
        pair.establish();
        let used = (pair.a.tcp().tcp_info().ecn, pair.b.tcp().tcp_info().ecn);
        assert_eq!(used, (agreed, agreed), "{asking:?} {asked:?}");
    }
}

#[test]
fn a_lost_syn_that_asked_goes_again_without_the_question() {
    let mut pair = with_ecn(EcnMode::Request, EcnMode::Accept);
    pair.a_to_b.loss = 1000;
    pair.b.listens = true;
    pair.connect(Side::A);
    pair.run_for(500 * MS);
    pair.a_to_b.loss = 0;
    pair.run_for(1000 * MS);
    assert!(!pair.a.tcp().tcp_info().ecn && !pair.b.tcp().tcp_info().ecn);
    pair.transfer(Side::A, &bytes(10_000), LONG);
}

#[test]
fn marks_keep_the_queue_short_without_a_loss() {
    for congestion in [CongestionKind::Cubic, CongestionKind::Reno] {
        let mut pair = with_ecn(EcnMode::Request, EcnMode::Accept);
        pair.a.config.congestion = congestion;
        pair.links(|link| link.mark_above = 40_000);
        pair.establish();
        let took = pair.transfer(Side::A, &bytes(4_000_000), LONG).time;
        let figures = pair.a.tcp().tcp_info();
        assert_eq!((figures.retransmits, pair.a_to_b.dropped), (0, 0));
        assert!(pair.a_to_b.marked > 0);
        // Pure acknowledgements must not be marked (RFC 3168 §6.1.4).
        assert_eq!(pair.b_to_a.marked, 0);
        assert!(
            figures.delivered_marked >= pair.a_to_b.marked,
            "{figures:?}"
        );
        assert!(took < Duration::from_secs(4), "{took:?}");
        // The bandwidth-delay product is 25 kB.
        assert!(figures.cwnd < 120_000, "{congestion:?}: {}", figures.cwnd);
    }
}

#[test]
fn without_an_agreement_nothing_may_be_marked() {
    let mut pair = with_ecn(EcnMode::Accept, EcnMode::Accept);
    pair.links(|link| link.mark_above = 0);
    pair.establish();
    pair.transfer(Side::A, &bytes(1_000_000), LONG);
    assert_eq!((pair.a_to_b.marked, pair.b_to_a.marked), (0, 0));
}

#[test]
fn retransmissions_may_not_be_marked() {
    let mut pair = with_ecn(EcnMode::Request, EcnMode::Accept);
    // Every ECN-capable packet is marked.
    pair.links(|link| link.mark_above = 0);
    pair.establish();
    let now = pair.now;
    pair.a_to_b.loss = 1000;
    pair.a.tcp().send(now, &[1; 5000]);
    pair.flush(Side::A);
    pair.a_to_b.loss = 0;
    let (marked, carried) = (pair.a_to_b.marked, pair.a_to_b.carried);
    pair.run_for(Duration::from_secs(5));
    assert_eq!(pair.b.tcp().readable(), 5000);
    assert!(pair.a_to_b.carried > carried);
    assert_eq!(pair.a_to_b.marked, marked);
}

// ---- time-outs ----

#[test]
fn a_time_out_leaves_one_segment_and_lowers_the_threshold_once() {
    let mut pair = pair(&Config::default());
    pair.transfer(Side::A, &bytes(1_000_000), LONG);
    let now = pair.now;
    pair.a_to_b.loss = 1000;
    pair.a.tcp().send(now, &bytes(100_000));
    let mut thresholds = Vec::new();
    while thresholds.len() < 3 {
        pair.step();
        let figures = pair.a.tcp().tcp_info();
        if figures.backoff as usize > thresholds.len() {
            assert_eq!(figures.cwnd, figures.mss);
            thresholds.push(figures.ssthresh);
        }
    }
    assert!(thresholds[0] < 1 << 20);
    assert_eq!(thresholds, [thresholds[0]; 3]);
}

// ---- false alarms ----

/// Runs a transfer whose link pauses in the middle, for longer than a time-out, while more bytes are
/// queued than the window admits; `acknowledge` configures how B acknowledges.
fn with_a_pause(config: &Config, acknowledge: fn(&mut Connection)) -> Pair {
    let mut pair = pair(config);
    let data = bytes(400_000);
    pair.transfer(Side::A, &data, LONG);
    // Packets sent from here on arrive almost a second late; none is lost.
    pair.a_to_b.delay += 900 * MS;
    let now = pair.now;
    acknowledge(pair.b.tcp());
    assert!(pair.a.tcp().send(now, &data) > 150_000);
    pair.run_for(1000 * MS);
    pair.a_to_b.delay -= 900 * MS;
    let mut room = vec![0; 1 << 20];
    pair.run_while(now + 5000 * MS, |pair| {
        let now = pair.now;
        pair.b.tcp().recv(now, &mut room);
        true
    });
    pair
}

#[test]
fn a_spurious_time_out_is_taken_back() {
    let plain = Config::default();
    let without_sack = Config {
        sack: false,
        timestamps: false,
        ..plain.clone()
    };
    let lazily: fn(&mut Connection) = Connection::ack_lazily;
    for (name, config, acknowledge, sign) in [
        ("all options", plain.clone(), lazily, "undone_by_timestamp"),
        (
            "no timestamps",
            Config {
                timestamps: false,
                ..plain.clone()
            },
            lazily,
            "undone_by_f_rto",
        ),
        ("no sack", without_sack.clone(), lazily, "undone_by_f_rto"),
        (
            "no sack, each segment acknowledged",
            without_sack,
            Connection::ack_quickly,
            "undone_by_f_rto",
        ),
        (
            "bbr",
            Config {
                congestion: CongestionKind::Bbr,
                ..plain
            },
            lazily,
            "undone_by_timestamp",
        ),
    ] {
        let mut pair = with_a_pause(&config, acknowledge);
        let figures = pair.a.tcp().tcp_info();
        assert_eq!(pair.a_to_b.dropped, 0, "{name}");
        assert!(figures.undone >= 1, "{name}: {figures:?}");
        assert!(count(pair.a.tcp(), sign) >= 1, "{name}");
        assert!(count(pair.a.tcp(), "spurious_timeouts") >= 1, "{name}");
        // Some seventy packets were late; not all of them were retransmitted.
        assert!(figures.retransmits < 50, "{name}: {figures:?}");
        assert!(figures.cwnd >= 10 * figures.mss, "{name}: {}", figures.cwnd);
        assert_eq!(figures.unacknowledged, 0, "{name}");
    }
}

/// Without SACK, filling a hole acknowledges at once all data that arrived behind it before: RFC 5682 §2.1
/// requires a second acknowledgement.
#[test]
fn without_sack_a_true_time_out_stays() {
    let mut pair = pair(&Config {
        sack: false,
        timestamps: false,
        ..Config::default()
    });
    pair.transfer(Side::A, &bytes(400_000), LONG);
    pair.run_for(Duration::from_secs(1));
    let now = pair.now;
    pair.a_to_b.loss = 1000;
    pair.a.tcp().send(now, &bytes(1460));
    pair.flush(Side::A);
    pair.a_to_b.loss = 0;
    // Two duplicate acknowledgements do not trigger a fast retransmission.
    pair.a.tcp().send(now, &bytes(2 * 1460));
    pair.run_for(Duration::from_secs(2));
    let figures = pair.a.tcp().tcp_info();
    assert_eq!(figures.unacknowledged, 0);
    assert_eq!(count(pair.a.tcp(), "timeouts"), 1);
    assert_eq!((figures.retransmits, figures.undone), (1, 0), "{figures:?}");
}

#[test]
fn reordering_costs_little_and_its_recoveries_are_taken_back() {
    let mut pair = pair(&Config::default());
    pair.a_to_b.reordering = 20;
    pair.a_to_b.late = 15 * MS;
    let took = pair.transfer(Side::A, &bytes(4_000_000), LONG).time;
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.undone >= 1);
    assert!(took < Duration::from_millis(4500), "{took:?}");
    // 12 segments are sent in 15 ms at 10 Mb/s.
    assert!((5..30).contains(&figures.reordering), "{figures:?}");
    assert!(figures.reorderings > 10, "{figures:?}");
    assert_eq!(count(pair.a.tcp(), "reorderings"), figures.reorderings);
    let reported = count(pair.a.tcp(), "dsacks_received");
    assert!(reported > 0 && figures.duplicates_reported >= reported);
    assert!(count(pair.b.tcp(), "dsacks_sent") >= reported);
}

/// RFC 8985 §6.3: segments that the reordering timer declares lost are retransmitted as acknowledgements arrive.
#[test]
fn a_loss_that_a_timer_shows_does_not_leave_at_once() {
    let mut pair = pair(&Config::default());
    pair.links(|link| link.rate = 0);
    let mss = pair.a.tcp().tcp_info().mss;
    let send = |pair: &mut Pair, segments: u32, loss| {
        pair.a_to_b.loss = loss;
        let now = pair.now;
        pair.a.tcp().send(now, &bytes((segments * mss) as usize));
        pair.flush(Side::A);
    };
    let before = pair.a.tcp().tcp_info().cwnd;
    send(&mut pair, 8, 1000);
    send(&mut pair, 2, 0);
    // Both are reported after 20 ms; the reordering window is a quarter of that.
    pair.run_for(35 * MS);
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.fast_recovery, "{figures:?}");
    assert_eq!(figures.bytes_retransmitted, u64::from(mss), "{figures:?}");
    assert!(
        figures.ssthresh < before && figures.cwnd < before,
        "{figures:?}"
    );
    pair.run_for(Duration::from_secs(2));
    assert_eq!(pair.a.tcp().tcp_info().unacknowledged, 0);
    assert_eq!(count(pair.a.tcp(), "timeouts"), 0);
}

#[test]
fn true_losses_are_not_taken_back_because_the_network_duplicates() {
    let mut pair = pair(&Config::default());
    pair.a_to_b.loss = 10;
    pair.links(|link| link.duplication = 100);
    pair.transfer(Side::A, &bytes(2_000_000), LONG);
    // A retransmission that the network duplicates looks like a spurious one.
    let (undone, lost) = (pair.a.tcp().tcp_info().undone, pair.a_to_b.dropped);
    assert!(undone * 4 < lost, "{undone} of {lost}");
}

// ---- the end of a flight ----

/// Sends `count` bytes that are all lost, and returns the time until they have arrived.
fn after_a_lost_tail(pair: &mut Pair, count: usize) -> Duration {
    // Without a queue, so that round trips take only the links' delay.
    pair.links(|link| link.rate = 0);
    pair.transfer(Side::A, &bytes(1_000_000), LONG);
    pair.run_for(Duration::from_secs(1));
    let (now, data) = (pair.now, bytes(count));
    pair.a_to_b.loss = 1000;
    pair.a.tcp().send(now, &data);
    pair.flush(Side::A);
    pair.a_to_b.loss = 0;
    pair.run_while(now + LONG, |pair| pair.b.tcp().readable() < count);
    pair.now - now
}

#[test]
fn a_lost_tail_is_probed_after_two_round_trips() {
    let took = after_a_lost_tail(&mut pair(&Config::default()), 5_000);
    // 2 x 20 ms and 2 ms until the probe, half a round trip for it, and one and a half for the recovery.
    assert!((60 * MS..110 * MS).contains(&took), "{took:?}");
}

#[test]
fn a_lone_segment_waits_for_its_delayed_acknowledgement_first() {
    let took = after_a_lost_tail(&mut pair(&Config::default()), 1_000);
    // Or until the time-out, if that is earlier: 20 ms and 200 ms.
    assert!((220 * MS..290 * MS).contains(&took), "{took:?}");
}

#[test]
fn a_probe_that_repairs_a_loss_costs_a_reduction() {
    let mut pair = pair(&Config::default());
    pair.links(|link| link.rate = 0);
    pair.transfer(Side::A, &bytes(1_000_000), LONG);
    pair.run_for(Duration::from_secs(1));
    // One exchange in turns makes B delay its acknowledgements.
    for side in [Side::A, Side::B] {
        let now = pair.now;
        pair.end(side).tcp().send(now, b"x");
        pair.run_for(15 * MS);
    }
    pair.run_for(100 * MS);
    // Two segments: the first waits for its delayed acknowledgement; the second is lost.
    for loss in [0, 1000] {
        let now = pair.now;
        pair.a_to_b.loss = loss;
        pair.a.tcp().send(now, &bytes(1448));
        pair.flush(Side::A);
    }
    pair.a_to_b.loss = 0;
    pair.run_for(150 * MS);
    let before = pair.a.tcp().tcp_info();
    assert_eq!((before.retransmits, before.unacknowledged), (1, 0));
    // The next data is acknowledged without a report of a duplicate.
    let now = pair.now;
    pair.a.tcp().send(now, &bytes(20_000));
    pair.run_for(Duration::from_secs(1));
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.ssthresh < before.cwnd, "{figures:?}");
    assert_eq!(figures.retransmits, 1);
    assert_eq!(count(pair.a.tcp(), "tail_probe_recoveries"), 1);
}

#[test]
fn without_sack_a_lost_tail_takes_a_time_out() {
    let config = Config {
        sack: false,
        ..Config::default()
    };
    let took = after_a_lost_tail(&mut pair(&config), 5_000);
    assert!((200 * MS..400 * MS).contains(&took), "{took:?}");
}

// ---- pace ----

#[test]
fn a_bounded_rate_is_kept_without_bursts() {
    for congestion in CongestionKind::ALL {
        let config = Config {
            congestion,
            ..Config::default()
        };
        let mut pair = pair(&config);
        pair.a.tcp().options().max_pacing = Some(250_000);
        pair.trace = Some(Vec::new());
        let took = pair.transfer(Side::A, &bytes(1_000_000), LONG).time;
        // Neither headers nor the first window of 14 kB are paced.
        let seconds = took.as_secs_f64();
        assert!((3.5..4.6).contains(&seconds), "{congestion:?}: {seconds}");
        let trace = pair.trace.take().expect("it was wanted");
        assert!(largest_burst(&trace) <= 10, "{}", largest_burst(&trace));
    }
}

/// Returns the largest number of data packets that A sends at one time, after the first window.
fn largest_burst(trace: &[String]) -> usize {
    let mut counts = std::collections::BTreeMap::new();
    for line in trace
        .iter()
        .filter(|line| line.contains(" A ") && !line.contains("len 0"))
    {
        *counts.entry(line.split_whitespace().next()).or_insert(0) += 1;
    }
    counts.into_values().max().unwrap_or(0)
}

#[test]
fn bbr_fills_a_lossy_path_that_cubic_cannot() {
    let mut times = [CongestionKind::Cubic, CongestionKind::Bbr].map(|congestion| {
        let mut pair = pair(&Config {
            congestion,
            ..Config::default()
        });
        pair.a_to_b.loss = 30;
        pair.transfer(Side::A, &bytes(4_000_000), LONG).time
    });
    assert!(times[1] < times[0] / 2, "{times:?}");
    times.sort_unstable();
    assert!(times[0] < Duration::from_secs(4), "{times:?}");
}

#[test]
fn bbr_keeps_the_queue_of_a_deep_buffer_short() {
    let queue = |congestion| {
        let mut pair = pair(&Config {
            congestion,
            ..Config::default()
        });
        pair.transfer(Side::A, &bytes(6_000_000), LONG);
        pair.a.tcp().tcp_info().srtt.expect("there was data")
    };
    let (cubic, bbr) = (queue(CongestionKind::Cubic), queue(CongestionKind::Bbr));
    assert!(bbr < 45 * MS && cubic > 100 * MS, "{bbr:?} {cubic:?}");
}

// ---- change ----

#[test]
fn the_algorithm_changes_and_migrates_with_the_session() {
    let mut pair = pair(&Config::default());
    pair.migration = 50;
    pair.a_to_b.loss = 5;
    for round in 0..9 {
        let kind = CongestionKind::ALL[round % 3];
        pair.a.tcp().set_congestion(kind);
        pair.transfer(Side::A, &bytes(200_000), LONG);
        assert_eq!(pair.a.tcp().tcp_info().congestion, kind);
    }
    assert!(pair.migrations > 50);
}

#[test]
fn a_window_that_is_not_used_does_not_grow() {
    let mut pair = pair(&Config::default());
    for _ in 0..200 {
        let now = pair.now;
        pair.a.tcp().send(now, &[1; 2000]);
        pair.run_for(30 * MS);
        let mut out = [0; 4096];
        let now = pair.now;
        pair.b.tcp().recv(now, &mut out);
    }
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.cwnd <= 20 * figures.mss, "{}", figures.cwnd);
}

#[test]
fn a_loss_in_a_window_that_is_not_used_counts_from_what_is() {
    let mut pair = pair(&Config::default());
    pair.links(|link| link.rate = 0);
    pair.transfer(Side::A, &bytes(2_000_000), LONG);
    let large = pair.a.tcp().tcp_info().cwnd;
    let trickle = |pair: &mut Pair| {
        let now = pair.now;
        pair.a.tcp().send(now, &[1; 4000]);
        pair.run_for(25 * MS);
        let now = pair.now;
        pair.b.tcp().recv(now, &mut [0; 8192]);
    };
    for _ in 0..200 {
        trickle(&mut pair);
    }
    pair.a_to_b.loss = 500;
    while pair.a.tcp().tcp_info().ssthresh > large / 2 {
        trickle(&mut pair);
    }
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.ssthresh <= 10 * figures.mss, "{figures:?}");
}

#[test]
fn after_a_lost_syn_the_first_window_is_small_and_patience_long() {
    let mut pair = Pair::new(3, 10 * MS, &Config::default());
    pair.a_to_b.loss = 1000;
    pair.b.listens = true;
    pair.connect(Side::A);
    pair.run_for(Duration::from_secs(4));
    pair.a_to_b.loss = 0;
    pair.run_for(Duration::from_secs(5));
    let figures = pair.a.tcp().tcp_info();
    assert_eq!(figures.cwnd, figures.mss);
    assert_eq!(figures.rto, Duration::from_secs(3));
}
