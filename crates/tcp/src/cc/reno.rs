//! Reno (RFC 5681), with appropriate byte counting (RFC 3465) and the milder response to marks of
//! RFC 8511.

use super::{Acknowledged, Controller, MAX_WINDOW, Signal, Window};
use crate::encoding;

#[derive(Clone, Debug, Default)]
pub(super) struct Reno {
    /// Bytes acknowledged since the window last grew.
    counted: u32,
}

encoding::fields!(Reno { counted });

impl Controller for Reno {
    fn grow(&mut self, window: &mut Window, ack: &Acknowledged) {
        let left = window.slow_start(ack.bytes);
        self.counted = self.counted.saturating_add(left);
        while self.counted >= window.cwnd {
            self.counted -= window.cwnd;
            window.cwnd = (window.cwnd + ack.mss).min(MAX_WINDOW);
        }
    }

    fn reduce(&mut self, _window: &Window, base: u32, signal: Signal) -> u32 {
        self.counted = 0;
        match signal {
            // RFC 8511 §3.1: beta_ecn is 0.8 for Reno.
            Signal::Mark => base / 5 * 4,
            Signal::Loss | Signal::Timeout => base / 2,
        }
    }

    fn is_consistent(&self) -> bool {
        self.counted <= MAX_WINDOW
    }
}
