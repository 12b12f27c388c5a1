//! What the sender does about congestion and its false alarms, over simulated wires.

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

/// Established, over a wire of 20 ms there and back, at 10 Mb/s with room for 200 packets.
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
        // Acknowledgements alone may not be marked (RFC 3168 §6.1.4).
        assert_eq!(pair.b_to_a.marked, 0);
        assert!(
            figures.delivered_marked >= pair.a_to_b.marked,
            "{figures:?}"
        );
        assert!(took < Duration::from_secs(4), "{took:?}");
        // 25 kB fill the path.
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
    // Every packet that may be is marked.
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

/// Runs a transfer with a pause of the wire in its middle, longer than a time-out, and more bytes
/// queued than fit the window; `acknowledge` sets how B acknowledges.
fn with_a_pause(config: &Config, acknowledge: fn(&mut Connection)) -> Pair {
    let mut pair = pair(config);
    let data = bytes(400_000);
    pair.transfer(Side::A, &data, LONG);
    // What is sent from here on comes almost a second late, and nothing is lost.
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
        // Not all of some seventy that were late went twice.
        assert!(figures.retransmits < 50, "{name}: {figures:?}");
        assert!(figures.cwnd >= 10 * figures.mss, "{name}: {}", figures.cwnd);
        assert_eq!(figures.unacknowledged, 0, "{name}");
    }
}

/// Without SACK a hole that fills acknowledges at once what came behind it long ago: RFC 5682 §2.1
/// asks for a second acknowledgement.
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
    // Two duplicate acknowledgements are no fast retransmission.
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
    // 15 ms at 10 Mb/s are 12 segments.
    assert!((5..30).contains(&figures.reordering), "{figures:?}");
    assert!(figures.reorderings > 10, "{figures:?}");
    assert_eq!(count(pair.a.tcp(), "reorderings"), figures.reorderings);
    let reported = count(pair.a.tcp(), "dsacks_received");
    assert!(reported > 0 && figures.duplicates_reported >= reported);
    assert!(count(pair.b.tcp(), "dsacks_sent") >= reported);
}

/// RFC 8985 §6.3: what shows as lost when the time for reordering is over goes again as acknowledgements come.
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
    send(&mut pair, 8, 1000);
    send(&mut pair, 2, 0);
    // Both are reported after 20 ms; the time that reordering may take is a quarter more.
    pair.run_for(35 * MS);
    let figures = pair.a.tcp().tcp_info();
    assert!(figures.fast_recovery, "{figures:?}");
    assert_eq!(figures.bytes_retransmitted, u64::from(mss), "{figures:?}");
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
    // A retransmission that the network duplicates looks like one that was not needed.
    let (undone, lost) = (pair.a.tcp().tcp_info().undone, pair.a_to_b.dropped);
    assert!(undone * 4 < lost, "{undone} of {lost}");
}

// ---- the end of a flight ----

/// Sends `count` bytes that all get lost, and returns how long it takes until they are there.
fn after_a_lost_tail(pair: &mut Pair, count: usize) -> Duration {
    // Without a queue, so that round trips are those of the wire.
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
    // 2 x 20 ms, 2 ms, half a round trip for the probe, one and a half for what it shows.
    assert!((60 * MS..110 * MS).contains(&took), "{took:?}");
}

#[test]
fn a_lone_segment_waits_for_its_delayed_acknowledgement_first() {
    let took = after_a_lost_tail(&mut pair(&Config::default()), 1_000);
    // Or for the time-out, if that comes first: 20 ms and 200 ms.
    assert!((220 * MS..290 * MS).contains(&took), "{took:?}");
}

#[test]
fn a_probe_that_repairs_a_loss_costs_a_reduction() {
    let mut pair = pair(&Config::default());
    pair.links(|link| link.rate = 0);
    pair.transfer(Side::A, &bytes(1_000_000), LONG);
    pair.run_for(Duration::from_secs(1));
    // The two take turns once, which makes B delay its acknowledgements.
    for side in [Side::A, Side::B] {
        let now = pair.now;
        pair.end(side).tcp().send(now, b"x");
        pair.run_for(15 * MS);
    }
    pair.run_for(100 * MS);
    // Two segments, the first of which waits for its delayed acknowledgement; the second is lost.
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
    // What follows is acknowledged without a word of a duplicate.
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
        // Headers are not paced, and the first window of 14 kB is not either.
        let seconds = took.as_secs_f64();
        assert!((3.5..4.6).contains(&seconds), "{congestion:?}: {seconds}");
        let trace = pair.trace.take().expect("it was wanted");
        assert!(largest_burst(&trace) <= 10, "{}", largest_burst(&trace));
    }
}

/// The most packets with text that A sends in one instant, after the first window.
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
