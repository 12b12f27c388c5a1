//! Reno (RFC 5681), with appropriate byte counting (RFC 3465).

use core::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Acknowledged, Controller, Window};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Reno {
    /// Octets acknowledged since the window last grew.
    counted: u32,
}

impl Controller for Reno {
    fn avoid(&mut self, window: &mut Window, ack: Acknowledged) {
        self.counted = self.counted.saturating_add(ack.octets);
        while self.counted >= window.cwnd {
            self.counted -= window.cwnd;
            window.cwnd += ack.mss;
        }
    }

    fn reduce(&mut self, cwnd: u32, _mss: u32) -> u32 {
        self.counted = 0;
        cwnd / 2
    }

    fn resume(&mut self, _idle: Duration) {}
}
