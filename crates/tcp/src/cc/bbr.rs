//! BBR, version 1 (draft-cardwell-iccrg-bbr-congestion-control-00): a model of the path, made of the
//! bottleneck's rate and the round trip without queues, sets the pacing rate and bounds the flight.
//! Losses do not change the model; a time-out restarts it.

use core::time::Duration;

use portolan_types::Instant;

use super::filter::MaxFilter;
use super::{Acknowledged, BbrInfo, Controller, INITIAL_SEGMENTS, MAX_WINDOW, Signal, Window};
use crate::encoding;

/// Gains are in 256ths.
const UNIT: u64 = 256;
/// 2 / ln 2: doubles the rate each round trip.
const HIGH_GAIN: u64 = 739;
/// Its inverse: drains in one round trip what startup has queued.
const DRAIN_GAIN: u64 = 88;
const CWND_GAIN: u64 = 2 * UNIT;
/// One round trip of probing, one of draining, six of cruising.
const CYCLE: [u64; 8] = [
    UNIT * 5 / 4,
    UNIT * 3 / 4,
    UNIT,
    UNIT,
    UNIT,
    UNIT,
    UNIT,
    UNIT,
];
/// Round trips for which a sample of the bottleneck's rate is remembered.
const BANDWIDTH_ROUNDS: u64 = 10;
const MIN_RTT_WINDOW: Duration = Duration::from_secs(10);
const PROBE_RTT_TIME: Duration = Duration::from_millis(200);
/// The pipe counts as full when three rounds have not raised the rate by a quarter.
const FULL_ROUNDS: u8 = 3;
const MIN_SEGMENTS: u32 = 4;
/// Pacing stays one percent below the model's rate, so that queues drain.
const MARGIN_PERCENT: u64 = 99;
/// Upper bounds, against hostile capsules; 8 Tb/s.
const MAX_RATE: u64 = 1 << 40;
const MAX_RTT: Duration = Duration::from_secs(1 << 16);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Mode {
    #[default]
    Startup,
    Drain,
    ProbeBandwidth,
    ProbeRtt,
}

encoding::variants!(Mode {
    0 => Startup,
    1 => Drain,
    2 => ProbeBandwidth,
    3 => ProbeRtt,
});

#[derive(Clone, Debug, Default)]
pub(super) struct Bbr {
    mode: Mode,
    /// Bytes per second, by round.
    bandwidth: MaxFilter,
    /// The round trip without queues, and when it was measured.
    min_rtt: Option<(Duration, Instant)>,
    round: u64,
    /// The round ends when this many bytes have been delivered.
    round_end: u64,
    /// The highest rate of startup, and the rounds since.
    full: u64,
    full_rounds: u8,
    filled: bool,
    /// Index into `CYCLE`, and the time it was entered.
    phase: u8,
    phase_at: Instant,
    /// When the flight may grow again after PROBE_RTT, and whether a round has passed.
    probe_end: Option<Instant>,
    probe_round_over: bool,
    /// The window saved before recovery or PROBE_RTT.
    saved: u32,
    recovering: bool,
    /// In the first round of recovery, packet conservation: only as much is sent as was delivered.
    conserving: bool,
    rate: Option<u64>,
    resumed: bool,
}

encoding::fields!(Bbr {
    mode,
    bandwidth,
    min_rtt,
    round,
    round_end,
    full,
    full_rounds,
    filled,
    phase,
    phase_at,
    probe_end,
    probe_round_over,
    saved,
    recovering,
    conserving,
    rate,
    resumed
});

impl Bbr {
    fn update_round(&mut self, ack: &Acknowledged) -> bool {
        let began = ack.sample.interval.is_some() && ack.sample.prior_delivered >= self.round_end;
        if began {
            self.round_end = ack.sample.delivered;
            self.round += 1;
            self.conserving = false;
        }
        began
    }

    /// §4.1.1.3: the highest recent rate; application-limited samples count only if they are higher.
    fn update_bandwidth(&mut self, ack: &Acknowledged) {
        if let Some(rate) = ack.sample.rate()
            && (!ack.sample.limited || rate >= self.bandwidth.max())
        {
            let rate = rate.min(MAX_RATE);
            self.bandwidth.update(self.round, BANDWIDTH_ROUNDS, rate);
        }
    }

    /// §4.3.2.2.
    fn check_full_pipe(&mut self, began: bool, ack: &Acknowledged) {
        if self.filled || !began || ack.sample.limited {
            return;
        }
        if self.bandwidth.max() >= self.full / 4 * 5 {
            self.full = self.bandwidth.max();
            self.full_rounds = 0;
            return;
        }
        self.full_rounds += 1;
        self.filled = self.full_rounds >= FULL_ROUNDS;
    }

    /// §4.3.2.1, §4.3.3: startup, then drain, then probing.
    fn step_mode(&mut self, ack: &Acknowledged) {
        if self.mode == Mode::Startup && self.filled {
            self.mode = Mode::Drain;
        }
        if self.mode == Mode::Drain && ack.flight <= self.inflight(UNIT, ack.mss) {
            self.enter_probe_bandwidth(ack.now);
        }
    }

    fn enter_probe_bandwidth(&mut self, now: Instant) {
        self.mode = Mode::ProbeBandwidth;
        // Any phase except draining. The choice varies so that flows started together do not probe together.
        let lot = (now.as_micros() % (CYCLE.len() as u64 - 1)) as u8;
        self.phase = if lot == 1 { CYCLE.len() as u8 - 1 } else { lot };
        self.phase_at = now;
    }

    /// §4.3.4.3.
    fn step_cycle(&mut self, ack: &Acknowledged) {
        if self.mode != Mode::ProbeBandwidth {
            return;
        }
        let gain = self.pacing_gain();
        let long = ack.now.since(self.phase_at) > self.least_rtt();
        let over = match gain {
            UNIT => long,
            gain if gain > UNIT => {
                long && (ack.lost > 0 || ack.flight >= self.inflight(gain, ack.mss))
            }
            _ => long || ack.flight <= self.inflight(UNIT, ack.mss),
        };
        if over {
            self.phase = (self.phase + 1) % CYCLE.len() as u8;
            self.phase_at = ack.now;
        }
    }

    /// §4.1.2, §4.3.5: the shortest round trip, and the probe for it once it has expired.
    fn update_min_rtt(&mut self, window: &mut Window, began: bool, ack: &Acknowledged) {
        let expired = self
            .min_rtt
            .is_some_and(|(_, at)| ack.now.since(at) > MIN_RTT_WINDOW);
        if let Some(rtt) = ack.latest
            && self
                .min_rtt
                .is_none_or(|(least, _)| rtt <= least || expired)
        {
            self.min_rtt = Some((rtt, ack.now));
        }
        if expired && !self.resumed && self.mode != Mode::ProbeRtt {
            self.mode = Mode::ProbeRtt;
            self.save(window.cwnd);
            self.probe_end = None;
        }
        if self.mode == Mode::ProbeRtt {
            self.probe_rtt(window, began, ack);
        }
        self.resumed = false;
    }

    fn probe_rtt(&mut self, window: &mut Window, began: bool, ack: &Acknowledged) {
        match self.probe_end {
            None if ack.flight <= MIN_SEGMENTS * ack.mss => {
                self.probe_end = Some(ack.now + PROBE_RTT_TIME);
                self.probe_round_over = false;
                self.round_end = ack.sample.delivered;
            }
            None => {}
            Some(end) => {
                self.probe_round_over |= began;
                if self.probe_round_over && ack.now >= end {
                    self.min_rtt = self.min_rtt.map(|(rtt, _)| (rtt, ack.now));
                    window.cwnd = window.cwnd.max(self.saved);
                    self.leave_probe_rtt(ack.now);
                }
            }
        }
    }

    fn leave_probe_rtt(&mut self, now: Instant) {
        if self.filled {
            self.enter_probe_bandwidth(now);
        } else {
            self.mode = Mode::Startup;
        }
    }

    fn pacing_gain(&self) -> u64 {
        match self.mode {
            Mode::Startup => HIGH_GAIN,
            Mode::Drain => DRAIN_GAIN,
            Mode::ProbeBandwidth => CYCLE[usize::from(self.phase) % CYCLE.len()],
            Mode::ProbeRtt => UNIT,
        }
    }

    fn cwnd_gain(&self) -> u64 {
        match self.mode {
            Mode::Startup | Mode::Drain => HIGH_GAIN,
            Mode::ProbeBandwidth => CWND_GAIN,
            Mode::ProbeRtt => UNIT,
        }
    }

    /// §4.2.1; without a model yet, the rate follows from the window and the first round trip.
    fn set_rate(&mut self, window: &Window, ack: &Acknowledged) {
        let bandwidth = match (self.bandwidth.max(), self.rate) {
            (0, None) if !ack.rtt.is_zero() => {
                let nanos = u64::try_from(ack.rtt.as_nanos()).unwrap_or(u64::MAX);
                u64::from(window.cwnd) * 1_000_000_000 / nanos.max(1)
            }
            (0, _) => return,
            (bandwidth, _) => bandwidth,
        };
        let rate = bandwidth.min(MAX_RATE) * self.pacing_gain() / UNIT * MARGIN_PERCENT / 100;
        if self.filled || self.rate.is_none_or(|old| rate > old) {
            self.rate = Some(rate.max(1));
        }
    }

    fn least_rtt(&self) -> Duration {
        self.min_rtt.map_or(Duration::ZERO, |(rtt, _)| rtt)
    }

    /// §4.2.3.2: the bandwidth-delay product times `gain`, with allowance for batching by the hosts.
    fn inflight(&self, gain: u64, mss: u32) -> u32 {
        let Some((rtt, _)) = self.min_rtt else {
            return INITIAL_SEGMENTS * mss;
        };
        let product = u128::from(self.bandwidth.max()) * rtt.as_nanos() / 1_000_000_000
            * u128::from(gain)
            / u128::from(UNIT);
        let product = u32::try_from(product).unwrap_or(MAX_WINDOW).min(MAX_WINDOW);
        (product + 3 * self.quantum(mss)).min(MAX_WINDOW)
    }

    /// §4.2.2: the size of a burst in bytes, about a millisecond's worth.
    fn quantum(&self, mss: u32) -> u32 {
        let burst = u32::try_from(self.rate.unwrap_or(0) / 1000).unwrap_or(u32::MAX);
        burst.clamp(2 * mss, (2 * mss).max(64 << 10))
    }

    fn save(&mut self, cwnd: u32) {
        self.saved = if self.recovering || self.mode == Mode::ProbeRtt {
            self.saved.max(cwnd)
        } else {
            cwnd
        };
    }

    /// §4.2.3.4: conserves packets in the first round of recovery, and restores the window afterwards.
    fn modulate(&mut self, window: &mut Window, ack: &Acknowledged) -> bool {
        if ack.lost > 0 {
            window.cwnd = window.cwnd.saturating_sub(ack.lost).max(ack.mss);
        }
        if ack.recovering && !self.recovering {
            self.conserving = true;
            self.round_end = ack.sample.delivered;
            window.cwnd = ack.flight + ack.bytes.max(ack.mss);
        } else if !ack.recovering && self.recovering {
            self.conserving = false;
            window.cwnd = window.cwnd.max(self.saved);
        }
        self.recovering = ack.recovering;
        if self.conserving {
            window.cwnd = window.cwnd.max(ack.flight + ack.bytes);
        }
        self.conserving
    }

    fn set_window(&mut self, window: &mut Window, ack: &Acknowledged) {
        if !self.modulate(window, ack) {
            let target = self.inflight(self.cwnd_gain(), ack.mss);
            let grown = window.cwnd.saturating_add(ack.bytes);
            if self.filled {
                window.cwnd = grown.min(target);
            } else if window.cwnd < target
                || ack.sample.delivered < u64::from(INITIAL_SEGMENTS * ack.mss)
            {
                window.cwnd = grown;
            }
            window.cwnd = window.cwnd.max(MIN_SEGMENTS * ack.mss);
        }
        if self.mode == Mode::ProbeRtt {
            window.cwnd = window.cwnd.min(MIN_SEGMENTS * ack.mss);
        }
    }
}

impl Controller for Bbr {
    fn grow(&mut self, _window: &mut Window, _ack: &Acknowledged) {}

    fn steer(&mut self, window: &mut Window, ack: &Acknowledged) {
        let began = self.update_round(ack);
        self.update_bandwidth(ack);
        self.step_cycle(ack);
        self.check_full_pipe(began, ack);
        self.step_mode(ack);
        self.update_min_rtt(window, began, ack);
        self.set_rate(window, ack);
        self.set_window(window, ack);
    }

    fn reduce(&mut self, window: &Window, _base: u32, signal: Signal) -> u32 {
        self.save(window.cwnd);
        if signal == Signal::Timeout {
            // The path may have changed: check again whether the pipe is full.
            self.full = 0;
            self.full_rounds = 0;
            self.recovering = true;
        }
        window.ssthresh
    }

    fn undo(&mut self) {
        self.full = 0;
        self.full_rounds = 0;
        self.conserving = false;
    }

    fn resume(&mut self, now: Instant, _idle: Duration) {
        self.resumed = true;
        if self.mode == Mode::ProbeBandwidth {
            // Cruise: there is no queue to drain.
            self.phase = 2;
            self.phase_at = now;
        }
    }

    fn pacing_rate(&self) -> Option<u64> {
        self.rate
    }

    fn info(&self) -> Option<BbrInfo> {
        // Linux sets the gains with the first acknowledgement.
        let is_running = self.rate.is_some();
        let gain = |gain: u64| if is_running { gain as u32 } else { 0 };
        Some(BbrInfo {
            bandwidth: self.bandwidth.max(),
            min_rtt: self.min_rtt.map(|(rtt, _)| rtt),
            pacing_gain: gain(self.pacing_gain()),
            cwnd_gain: gain(self.cwnd_gain()),
        })
    }

    fn is_consistent(&self) -> bool {
        self.bandwidth.max() <= MAX_RATE
            && self.full <= MAX_RATE
            && self
                .rate
                .is_none_or(|rate| (1..=MAX_RATE * 3).contains(&rate))
            && self.saved <= MAX_WINDOW
            && self.least_rtt() <= MAX_RTT
            && self.round < 1 << 62
            && self.full_rounds <= FULL_ROUNDS
            && usize::from(self.phase) < CYCLE.len()
    }
}
