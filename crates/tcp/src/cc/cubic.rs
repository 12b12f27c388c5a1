//! CUBIC (RFC 9438) in integers: octets and milliseconds.

use core::time::Duration;

use portolan_types::Instant;
use serde::{Deserialize, Serialize};

use super::{Acknowledged, Controller, MAX_WINDOW, Window};

/// Longest time from the inflection point that the cubic is evaluated at.
const MAX_MILLIS: u64 = 1_000_000;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Cubic {
    /// `W_max`, octets.
    w_max: u32,
    /// Start of the present congestion avoidance stage; none before its first acknowledgement.
    epoch: Option<Instant>,
    /// `K`: milliseconds from the start of the stage to `w_max`.
    k: u64,
    /// What Reno would have, `W_est`, octets.
    estimate: u32,
    /// Octets acknowledged that have not yet moved `estimate`, and the window.
    estimate_credit: u64,
    credit: u64,
}

impl Cubic {
    fn begin(&mut self, window: &Window, ack: Acknowledged) {
        self.epoch = Some(ack.now);
        self.estimate = window.cwnd;
        self.estimate_credit = 0;
        self.w_max = self.w_max.max(window.cwnd);
        // RFC 9438 §4.2: K = cbrt((W_max - cwnd_epoch) / C), segments and seconds, C = 0.4.
        let missing = u64::from(self.w_max - window.cwnd);
        self.k = cube_root(missing * 2_500_000_000 / u64::from(ack.mss));
    }

    /// `W_cubic(t)`, octets.
    fn cubic(&self, millis: u64, mss: u32) -> u32 {
        let distance = millis.abs_diff(self.k).min(MAX_MILLIS);
        // C·t³ in segments is t³·0.4e-9 with t in milliseconds.
        let delta = distance.pow(3) / 10_000_000 * u64::from(mss) * 4 / 1_000;
        let delta = u32::try_from(delta).unwrap_or(MAX_WINDOW).min(MAX_WINDOW);
        if millis < self.k {
            self.w_max.saturating_sub(delta)
        } else {
            self.w_max + delta
        }
    }

    /// RFC 9438 §4.3: Reno's window with a decrease factor of 0.7 grows by 9/17 of a segment
    /// each round trip, and by a whole one once it has passed `W_max`.
    fn grow_estimate(&mut self, ack: Acknowledged) {
        let (num, den) = if self.estimate < self.w_max {
            (9, 17)
        } else {
            (1, 1)
        };
        self.estimate_credit += u64::from(ack.octets) * u64::from(ack.mss) * num / den;
        let grown = self.estimate_credit / u64::from(self.estimate);
        self.estimate_credit %= u64::from(self.estimate);
        self.estimate = clamp(u64::from(self.estimate) + grown);
    }
}

impl Controller for Cubic {
    fn avoid(&mut self, window: &mut Window, ack: Acknowledged) {
        if self.epoch.is_none_or(|epoch| epoch > ack.now) {
            self.begin(window, ack);
        }
        let elapsed = ack.now.since(self.epoch.unwrap_or(ack.now)) + ack.rtt;
        let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        self.grow_estimate(ack);
        let cwnd = window.cwnd;
        // RFC 9438 §4.4, §4.5: at most half as much again in one round trip.
        let target = self.cubic(millis, ack.mss).clamp(cwnd, cwnd + cwnd / 2);
        self.credit += u64::from(target - cwnd) * u64::from(ack.octets);
        let grown = self.credit / u64::from(cwnd);
        self.credit %= u64::from(cwnd);
        window.cwnd = clamp(u64::from(cwnd) + grown).max(self.estimate);
    }

    fn reduce(&mut self, cwnd: u32, _mss: u32) -> u32 {
        self.epoch = None;
        self.credit = 0;
        // RFC 9438 §4.7, fast convergence.
        self.w_max = if cwnd < self.w_max {
            cwnd / 20 * 17
        } else {
            cwnd
        };
        clamp(u64::from(cwnd) * 7 / 10)
    }

    fn resume(&mut self, idle: Duration) {
        // Linux: the time without data does not count as time since the loss.
        self.epoch = self.epoch.map(|epoch| epoch + idle);
    }
}

fn clamp(octets: u64) -> u32 {
    u32::try_from(octets)
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
