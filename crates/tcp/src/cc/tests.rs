//! Changes of the congestion window.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};

use super::*;

const MSS: u32 = 1000;

fn ack(now_ms: u64, bytes: u32) -> Acknowledged {
    Acknowledged {
        now: Instant::from_millis(now_ms),
        bytes,
        lost: 0,
        flight: 0,
        mss: MSS,
        rtt: Duration::from_millis(100),
        latest: None,
        una: SeqNum(0),
        nxt: SeqNum(0),
        recovering: false,
        sample: RateSample::default(),
    }
}

fn new(kind: CongestionKind) -> Congestion {
    Congestion::new(kind, MSS)
}

/// The effect of a completed fast recovery.
fn lose(cc: &mut Congestion, signal: Signal) {
    cc.reduce(cc.cwnd(), MSS, signal);
    cc.set_window(cc.ssthresh());
}

fn double(cc: &mut Congestion, rounds: u64) {
    for round in 0..rounds {
        let window = cc.cwnd();
        cc.grow(&ack(round * 10, window));
    }
}

/// Acknowledges one window every 100 ms.
fn run(cc: &mut Congestion, from: u64, to: u64) {
    for now in (from..to).step_by(100) {
        let window = cc.cwnd();
        cc.grow(&ack(now, window));
    }
}

#[test]
fn slow_start_doubles_each_round_trip() {
    for kind in [CongestionKind::Cubic, CongestionKind::Reno] {
        let mut cc = new(kind);
        cc.grow(&ack(0, 10 * MSS));
        assert_eq!(cc.cwnd(), 20 * MSS);
        cc.grow(&ack(10, 20 * MSS));
        assert_eq!(cc.cwnd(), 40 * MSS);
    }
}

#[test]
fn reno_halves_and_then_grows_by_one_segment_each_round_trip() {
    let mut cc = new(CongestionKind::Reno);
    lose(&mut cc, Signal::Loss);
    assert_eq!((cc.cwnd(), cc.ssthresh()), (5 * MSS, 5 * MSS));
    cc.grow(&ack(0, 5 * MSS));
    assert_eq!(cc.cwnd(), 6 * MSS);
}

#[test]
fn cubic_returns_to_the_window_before_the_loss_and_then_probes_beyond() {
    let mut cc = new(CongestionKind::Cubic);
    double(&mut cc, 4);
    let before = cc.cwnd();
    lose(&mut cc, Signal::Loss);
    assert_eq!(cc.cwnd(), before / 10 * 7);
    // K = cbrt(48 segments / 0.4) = 4.93 s.
    run(&mut cc, 40, 5_000);
    assert!(
        cc.cwnd().abs_diff(before) <= 2 * MSS,
        "{} against {before}",
        cc.cwnd()
    );
    run(&mut cc, 5_000, 12_000);
    assert!(cc.cwnd() > before + 50 * MSS, "{}", cc.cwnd());
}

#[test]
fn cubic_aims_lower_when_losses_follow_each_other() {
    let mut cc = new(CongestionKind::Cubic);
    double(&mut cc, 4);
    lose(&mut cc, Signal::Loss);
    let second = cc.cwnd();
    lose(&mut cc, Signal::Loss);
    run(&mut cc, 0, 4_000);
    // Fast convergence: the plateau is at 0.85 of the window at the second loss.
    assert!(cc.cwnd() < second * 9 / 10, "{} of {second}", cc.cwnd());
}

#[test]
fn after_a_time_out_cubic_starts_at_its_inflection_point() {
    let mut cc = new(CongestionKind::Cubic);
    double(&mut cc, 4);
    lose(&mut cc, Signal::Timeout);
    let start = cc.cwnd();
    run(&mut cc, 0, 3_000);
    assert!(cc.cwnd() > start + 5 * MSS, "{} from {start}", cc.cwnd());
}

#[test]
fn marks_cost_less_than_losses() {
    for (kind, percent) in [(CongestionKind::Cubic, 85), (CongestionKind::Reno, 80)] {
        let mut cc = new(kind);
        double(&mut cc, 4);
        let before = cc.cwnd();
        lose(&mut cc, Signal::Mark);
        assert_eq!(cc.cwnd(), before / 100 * percent);
    }
}

#[test]
fn a_mistaken_reduction_is_taken_back() {
    for kind in [CongestionKind::Cubic, CongestionKind::Reno] {
        let mut cc = new(kind);
        double(&mut cc, 3);
        lose(&mut cc, Signal::Loss);
        run(&mut cc, 0, 1_000);
        let before = cc.clone();
        lose(&mut cc, Signal::Loss);
        cc.undo();
        assert_eq!(cc.window, before.window);
        let (mut undone, mut never) = (cc, before);
        run(&mut undone, 1_000, 2_000);
        run(&mut never, 1_000, 2_000);
        assert!(undone.cwnd().abs_diff(never.cwnd()) <= MSS);
    }
}

#[test]
fn slow_start_ends_gently_when_round_trips_grow() {
    let mut cc = new(CongestionKind::Cubic);
    let mut una = 0;
    let mut last = 0;
    for round in 0..12u32 {
        // The queue builds up from the third round on.
        let rtt = 20 + u64::from(round.saturating_sub(2)) * 10;
        let nxt = una + cc.cwnd();
        last = cc.cwnd();
        for _ in 0..cc.cwnd() / MSS {
            una += MSS;
            cc.grow(&Acknowledged {
                latest: Some(Duration::from_millis(rtt)),
                una: SeqNum(una),
                nxt: SeqNum(nxt.max(una)),
                ..ack(u64::from(round) * 20, MSS)
            });
        }
        if cc.ssthresh() < MAX_WINDOW {
            break;
        }
    }
    assert!(cc.ssthresh() < MAX_WINDOW);
    // Five rounds of growth by a quarter, not of doubling.
    assert!(last < 10 * MSS * 8 * 4, "{last}");
}

#[test]
fn an_idle_time_shrinks_the_window_towards_the_initial_one() {
    let mut cc = new(CongestionKind::Cubic);
    double(&mut cc, 4);
    cc.on_idle(Duration::from_secs(100), Duration::from_millis(200), MSS);
    assert_eq!(cc.cwnd(), 10 * MSS);
}

/// A path that carries `rate` bytes per second with a round trip of 20 ms and one acknowledgement per
/// two segments; the excess is queued.
fn bbr_on_a_path(rate: u64, seconds: u64) -> Congestion {
    let mut cc = new(CongestionKind::Bbr);
    let mut book = Rate::default();
    let rtt = Duration::from_millis(20);
    let mut now = Instant::from_millis(1000);
    let end = now + Duration::from_secs(seconds);
    let mut flying = std::collections::VecDeque::new();
    let (mut flight, mut free_at, mut next_send) = (0, now, now);
    while now < end {
        while flight + 2 * MSS <= cc.cwnd() && next_send <= now {
            let stamp = book.stamp(now, flight == 0);
            free_at =
                free_at.max(now) + Duration::from_nanos(u64::from(2 * MSS) * 1_000_000_000 / rate);
            flying.push_back((free_at + rtt, stamp, now));
            flight += 2 * MSS;
            if let Some(pace) = cc.pacing_rate() {
                next_send = next_send.max(now)
                    + Duration::from_nanos(u64::from(2 * MSS) * 1_000_000_000 / pace);
            }
        }
        let arrival = flying.front().map_or(next_send, |&(at, ..)| at);
        let blocked = flight + 2 * MSS > cc.cwnd();
        if !blocked && next_send < arrival {
            now = next_send;
            continue;
        }
        let Some((at, stamp, sent)) = flying.pop_front() else {
            continue;
        };
        now = at;
        flight -= 2 * MSS;
        let newest = rate::Newest::choose(None, stamp, sent);
        let sample = book.deliver(now, 2 * MSS, newest, rtt.as_nanos() as u64);
        cc.steer(&Acknowledged {
            now,
            flight,
            latest: Some(now - sent),
            rtt,
            sample,
            ..ack(0, 2 * MSS)
        });
    }
    cc
}

#[test]
fn bbr_finds_the_rate_of_the_path_and_keeps_its_queue_short() {
    for rate in [125_000, 1_250_000, 12_500_000] {
        let cc = bbr_on_a_path(rate, 5);
        let pace = cc.pacing_rate().expect("it paces");
        let (low, high) = (rate * 7 / 10, rate * 13 / 10);
        assert!((low..high).contains(&pace), "{pace} of {rate}");
        let product = rate / 50 + u64::from(2 * MSS);
        assert!(
            u64::from(cc.cwnd()) <= 2 * product + u64::from(3 * 2 * MSS) + rate / 100,
            "{} for {product}",
            cc.cwnd()
        );
        assert!(cc.is_consistent());
        let told = cc.info().expect("it is BBR");
        assert!((low..high).contains(&told.bandwidth), "{told:?} of {rate}");
        assert!(told.min_rtt >= Some(Duration::from_millis(20)), "{told:?}");
        assert!([192, 256, 320].contains(&told.pacing_gain), "{told:?}");
        assert_eq!(told.cwnd_gain, 512);
    }
    let at_first = new(CongestionKind::Bbr).info();
    assert_eq!(at_first, Some(BbrInfo::default()));
}

#[test]
fn algorithms_can_be_exchanged_and_keep_the_window() {
    let mut cc = new(CongestionKind::Cubic);
    double(&mut cc, 3);
    let window = cc.cwnd();
    for kind in [
        CongestionKind::Bbr,
        CongestionKind::Reno,
        CongestionKind::Cubic,
    ] {
        cc.set_kind(kind);
        assert_eq!((cc.kind(), cc.cwnd()), (kind, window));
    }
}
