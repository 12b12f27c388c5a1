//! How the congestion window moves.

use core::time::Duration;

use portolan_types::Instant;

use super::{Acknowledged, Congestion};
use crate::config::CongestionKind;

const MSS: u32 = 1000;

fn ack(now_ms: u64, octets: u32) -> Acknowledged {
    Acknowledged {
        now: Instant::from_millis(now_ms),
        octets,
        mss: MSS,
        rtt: Duration::from_millis(100),
    }
}

#[test]
fn slow_start_doubles_each_round_trip() {
    let mut cc = Congestion::new(CongestionKind::Cubic, MSS);
    cc.on_ack(ack(0, 10 * MSS));
    assert_eq!(cc.cwnd(), 20 * MSS);
    cc.on_ack(ack(10, 20 * MSS));
    assert_eq!(cc.cwnd(), 40 * MSS);
}

#[test]
fn reno_halves_and_then_grows_by_one_segment_each_round_trip() {
    let mut cc = Congestion::new(CongestionKind::Reno, MSS);
    cc.on_loss(MSS);
    assert_eq!((cc.cwnd(), cc.ssthresh()), (5 * MSS, 5 * MSS));
    cc.on_ack(ack(0, 5 * MSS));
    assert_eq!(cc.cwnd(), 6 * MSS);
}

#[test]
fn cubic_returns_to_the_window_before_the_loss_and_then_probes_beyond() {
    let mut cc = Congestion::new(CongestionKind::Cubic, MSS);
    for round in 0..4 {
        let window = cc.cwnd();
        cc.on_ack(ack(round * 10, window));
    }
    let before = cc.cwnd();
    cc.on_loss(MSS);
    assert_eq!(cc.cwnd(), before / 10 * 7);
    // K = cbrt(48 segments / 0.4) = 4.93 s.
    let mut now = 40;
    while now < 5_000 {
        let window = cc.cwnd();
        cc.on_ack(ack(now, window));
        now += 100;
    }
    assert!(
        cc.cwnd().abs_diff(before) <= 2 * MSS,
        "{} against {before}",
        cc.cwnd()
    );
    while now < 12_000 {
        let window = cc.cwnd();
        cc.on_ack(ack(now, window));
        now += 100;
    }
    assert!(cc.cwnd() > before + 50 * MSS, "{}", cc.cwnd());
}

#[test]
fn a_time_out_leaves_one_segment_and_lowers_the_threshold_once() {
    let mut cc = Congestion::new(CongestionKind::Cubic, MSS);
    cc.on_timeout(MSS, true);
    let threshold = cc.ssthresh();
    cc.on_timeout(MSS, false);
    assert_eq!((cc.cwnd(), cc.ssthresh()), (MSS, threshold));
}

#[test]
fn an_idle_time_shrinks_the_window_towards_the_initial_one() {
    let mut cc = Congestion::new(CongestionKind::Cubic, MSS);
    for round in 0..4 {
        let window = cc.cwnd();
        cc.on_ack(ack(round * 10, window));
    }
    cc.on_idle(Duration::from_secs(100), Duration::from_millis(200), MSS);
    assert_eq!(cc.cwnd(), 10 * MSS);
}
