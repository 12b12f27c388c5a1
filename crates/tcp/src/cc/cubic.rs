//! CUBIC (RFC 9438) in integers: bytes and milliseconds. The first slow start uses HyStart++.

use core::time::Duration;

use portolan_types::Instant;

use super::hystart::{CSS_GROWTH_DIVISOR, Growth, HyStart};
use super::{Acknowledged, Controller, MAX_WINDOW, Signal, Window};
use crate::encoding;

/// Largest distance from the inflection point at which the cubic is evaluated, in milliseconds.
const MAX_MILLIS: u64 = 1_000_000;

#[derive(Clone, Debug, Default)]
pub(super) struct Cubic {
    curve: Curve,
    /// The curve before the last reduction (RFC 9438 §4.9).
    prior: Curve,
    hystart: HyStart,
}

encoding::fields!(Cubic {
    curve,
    prior,
    hystart
});

#[derive(Clone, Debug, Default)]
struct Curve {
    /// `W_max` of the next stage, bytes; zero before a loss and after a time-out.
    w_max: u32,
    /// `cwnd_prior`: the window before the last reduction.
    cwnd_prior: u32,
    /// Start of the current congestion avoidance stage; none before its first acknowledgement.
    epoch: Option<Instant>,
    /// The inflection point of the stage in bytes, and `K`, the milliseconds from its start to that point.
    origin: u32,
    k: u64,
    /// `W_est`: the window Reno would have, bytes.
    estimate: u32,
    /// Acknowledged bytes not yet credited to `estimate` and to the window.
    estimate_credit: u64,
    credit: u64,
}

encoding::fields!(Curve {
    w_max,
    cwnd_prior,
    epoch,
    origin,
    k,
    estimate,
    estimate_credit,
    credit
});

impl Curve {
    fn begin(&mut self, window: &Window, ack: &Acknowledged) {
        self.epoch = Some(ack.now);
        self.estimate = window.cwnd;
        self.estimate_credit = 0;
        self.origin = self.w_max.max(window.cwnd);
        // RFC 9438 §4.2: K = cbrt((W_max - cwnd_epoch) / C), segments and seconds, C = 0.4.
        let missing = u64::from(self.origin - window.cwnd);
        self.k = cube_root(missing * 2_500_000_000 / u64::from(ack.mss));
    }

    /// `W_cubic(t)`, bytes.
    fn cubic(&self, millis: u64, mss: u32) -> u32 {
        let distance = millis.abs_diff(self.k).min(MAX_MILLIS);
        // C·t³ in segments is t³·0.4e-9 with t in milliseconds.
        let delta = distance.pow(3) / 10_000_000 * u64::from(mss) * 4 / 1_000;
        let delta = u32::try_from(delta).unwrap_or(MAX_WINDOW).min(MAX_WINDOW);
        if millis < self.k {
            self.origin.saturating_sub(delta)
        } else {
            self.origin + delta
        }
    }

    /// RFC 9438 §4.3: Reno's window with a decrease factor of 0.7 grows by 9/17 of a segment
    /// per round trip, and by a whole segment beyond `cwnd_prior`.
    fn grow_estimate(&mut self, bytes: u32, mss: u32) {
        let (num, den) = if self.estimate < self.cwnd_prior {
            (9, 17)
        } else {
            (1, 1)
        };
        self.estimate_credit += u64::from(bytes) * u64::from(mss) * num / den;
        let estimate = u64::from(self.estimate);
        self.estimate = clamp(estimate + self.estimate_credit / estimate);
        self.estimate_credit %= estimate;
    }

    /// Growth in congestion avoidance, for `bytes` acknowledged.
    fn avoid(&mut self, window: &mut Window, ack: &Acknowledged, bytes: u32) {
        if self.epoch.is_none_or(|epoch| epoch > ack.now) {
            self.begin(window, ack);
        }
        let elapsed = ack.now.since(self.epoch.unwrap_or(ack.now)) + ack.rtt;
        let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        self.grow_estimate(bytes, ack.mss);
        let cwnd = window.cwnd;
        // RFC 9438 §4.4, §4.5: at most half as much again in one round trip. Before the first loss
        // at least a twentieth (as Linux): the capacity is not known yet.
        let least = if self.w_max == 0 { cwnd / 20 } else { 0 };
        let target = self
            .cubic(millis, ack.mss)
            .clamp(cwnd + least, cwnd + cwnd / 2);
        self.credit += u64::from(target - cwnd) * u64::from(bytes);
        let grown = self.credit / u64::from(cwnd);
        self.credit %= u64::from(cwnd);
        window.cwnd = clamp(u64::from(cwnd) + grown).max(self.estimate);
    }

    fn reduce(&mut self, window: &Window, base: u32, signal: Signal) -> u32 {
        self.epoch = None;
        self.credit = 0;
        self.cwnd_prior = window.cwnd;
        self.w_max = match signal {
            // RFC 9438 §4.8: the next stage starts at its own inflection point.
            Signal::Timeout => 0,
            // RFC 9438 §4.7, fast convergence.
            _ if base < self.w_max => base / 20 * 17,
            _ => base,
        };
        let percent = match signal {
            // RFC 8511 §3.1: beta_ecn is 0.85 for CUBIC.
            Signal::Mark => 85,
            Signal::Loss | Signal::Timeout => 70,
        };
        clamp(u64::from(base) * percent / 100)
    }

    fn is_consistent(&self) -> bool {
        const MAX_CREDIT: u64 = 1 << 62;
        self.w_max.max(self.cwnd_prior).max(self.origin) <= MAX_WINDOW
            && self.estimate <= MAX_WINDOW
            && (self.estimate > 0 || self.epoch.is_none())
            && self.estimate_credit.max(self.credit) < MAX_CREDIT
    }
}

impl Controller for Cubic {
    fn grow(&mut self, window: &mut Window, ack: &Acknowledged) {
        let mut bytes = ack.bytes;
        if window.in_slow_start() {
            // RFC 9406 §4.3: only in the first slow start.
            let first = window.ssthresh == MAX_WINDOW;
            match first.then(|| self.hystart.on_ack(ack)) {
                None | Some(Growth::SlowStart) => bytes = window.slow_start(bytes),
                Some(Growth::Conservative) => {
                    bytes = window.slow_start(bytes / CSS_GROWTH_DIVISOR);
                }
                Some(Growth::End) => window.ssthresh = window.cwnd,
            }
        }
        if bytes > 0 {
            self.curve.avoid(window, ack, bytes);
        }
    }

    fn reduce(&mut self, window: &Window, base: u32, signal: Signal) -> u32 {
        self.prior = self.curve.clone();
        self.curve.reduce(window, base, signal)
    }

    fn undo(&mut self) {
        self.curve = self.prior.clone();
    }

    fn resume(&mut self, now: Instant, idle: Duration) {
        // RFC 9438 §5.8: idle time does not count as time since the loss.
        self.curve.epoch = self.curve.epoch.map(|epoch| (epoch + idle).min(now));
    }

    fn is_consistent(&self) -> bool {
        self.curve.is_consistent() && self.prior.is_consistent() && self.hystart.is_consistent()
    }
}

fn clamp(bytes: u64) -> u32 {
    u32::try_from(bytes)
        .unwrap_or(MAX_WINDOW)
        .clamp(1, MAX_WINDOW)
}

/// The integer cube root, rounded down, of numbers below 2^63.
fn cube_root(n: u64) -> u64 {
    let mut root: u64 = 0;
    for bit in (0..21).rev() {
        let candidate = root | 1 << bit;
        if candidate.pow(3) <= n {
            root = candidate;
        }
    }
    root
}

#[cfg(test)]
mod tests {
    use super::cube_root;

    #[test]
    fn cube_roots_are_rounded_down() {
        for (n, root) in [
            (0, 0),
            (1, 1),
            (7, 1),
            (8, 2),
            (26, 2),
            (27, 3),
            (1 << 60, 1 << 20),
        ] {
            assert_eq!(cube_root(n), root, "{n}");
        }
    }
}
