//! Congestion control: one window, and the algorithm that moves it. The algorithms know octets,
//! time and losses; when data counts as lost is not their business.

mod cubic;
mod reno;

use core::time::Duration;

use portolan_types::Instant;
use serde::{Deserialize, Serialize};

use crate::config::CongestionKind;
use cubic::Cubic;
use reno::Reno;

/// RFC 6928: ten segments.
const INITIAL_SEGMENTS: u32 = 10;
/// Far above any path's bandwidth-delay product, far below overflow.
pub(crate) const MAX_WINDOW: u32 = 1 << 30;

/// Octets that may be in flight, and where slow start ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Window {
    pub(crate) cwnd: u32,
    pub(crate) ssthresh: u32,
}

/// What an algorithm may look at when an acknowledgement arrives.
#[derive(Clone, Copy)]
pub(crate) struct Acknowledged {
    pub(crate) now: Instant,
    pub(crate) octets: u32,
    pub(crate) mss: u32,
    pub(crate) rtt: Duration,
}

trait Controller {
    /// Growth in congestion avoidance.
    fn avoid(&mut self, window: &mut Window, ack: Acknowledged);
    /// The window after a loss that `cwnd` octets suffered.
    fn reduce(&mut self, cwnd: u32, mss: u32) -> u32;
    /// Nothing was in flight for `idle`.
    fn resume(&mut self, idle: Duration);
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Algorithm {
    Cubic(Cubic),
    Reno(Reno),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Congestion {
    window: Window,
    algorithm: Algorithm,
}

impl Congestion {
    pub(crate) fn new(kind: CongestionKind, mss: u32) -> Congestion {
        Congestion {
            window: Window {
                cwnd: INITIAL_SEGMENTS * mss,
                ssthresh: MAX_WINDOW,
            },
            algorithm: match kind {
                CongestionKind::Cubic => Algorithm::Cubic(Cubic::default()),
                CongestionKind::Reno => Algorithm::Reno(Reno::default()),
            },
        }
    }

    pub(crate) fn cwnd(&self) -> u32 {
        self.window.cwnd
    }

    pub(crate) fn ssthresh(&self) -> u32 {
        self.window.ssthresh
    }

    pub(crate) fn in_slow_start(&self) -> bool {
        self.window.cwnd < self.window.ssthresh
    }

    pub(crate) fn kind(&self) -> CongestionKind {
        match self.algorithm {
            Algorithm::Cubic(_) => CongestionKind::Cubic,
            Algorithm::Reno(_) => CongestionKind::Reno,
        }
    }

    /// The segment size became known, or changed: the initial window follows it.
    pub(crate) fn set_initial(&mut self, mss: u32) {
        self.window.cwnd = INITIAL_SEGMENTS * mss;
    }

    /// RFC 5681 §3.1: new data was acknowledged while the window was in full use.
    pub(crate) fn on_ack(&mut self, mut ack: Acknowledged) {
        if self.in_slow_start() {
            let room = self.window.ssthresh - self.window.cwnd;
            let used = ack.octets.min(room);
            self.window.cwnd += used;
            ack.octets -= used;
        }
        if ack.octets > 0 {
            let Congestion { window, algorithm } = self;
            controller(algorithm).avoid(window, ack);
        }
        self.window.cwnd = self.window.cwnd.min(MAX_WINDOW);
    }

    /// Fast recovery starts: the window shrinks once (RFC 6675 §5 step 4.2).
    pub(crate) fn on_loss(&mut self, mss: u32) {
        self.window.ssthresh = self.reduced(mss);
        self.window.cwnd = self.window.ssthresh;
    }

    /// A retransmission time-out (RFC 5681 §3.1): back to one segment. `first` is false for
    /// further time-outs of the same flight, which do not lower the threshold again.
    pub(crate) fn on_timeout(&mut self, mss: u32, first: bool) {
        if first {
            self.window.ssthresh = self.reduced(mss);
        }
        self.window.cwnd = mss;
    }

    /// RFC 5681 §4.1, as Linux does it: halve for each time-out that passed idle, down to the
    /// initial window.
    pub(crate) fn on_idle(&mut self, idle: Duration, rto: Duration, mss: u32) {
        let initial = INITIAL_SEGMENTS * mss;
        let mut left = idle;
        while left > rto && self.window.cwnd > initial {
            self.window.ssthresh = self.window.ssthresh.max(self.window.cwnd / 4 * 3);
            self.window.cwnd = (self.window.cwnd / 2).max(initial);
            left -= rto;
        }
        controller(&mut self.algorithm).resume(idle);
    }

    pub(crate) fn is_consistent(&self) -> bool {
        (1..=MAX_WINDOW).contains(&self.window.cwnd)
            && (1..=MAX_WINDOW).contains(&self.window.ssthresh)
    }

    fn reduced(&mut self, mss: u32) -> u32 {
        let cwnd = self.window.cwnd;
        controller(&mut self.algorithm)
            .reduce(cwnd, mss)
            .max(2 * mss)
            .min(MAX_WINDOW)
    }
}

fn controller(algorithm: &mut Algorithm) -> &mut dyn Controller {
    match algorithm {
        Algorithm::Cubic(cubic) => cubic,
        Algorithm::Reno(reno) => reno,
    }
}

#[cfg(test)]
mod tests;
