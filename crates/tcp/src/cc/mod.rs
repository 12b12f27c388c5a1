//! Congestion control: one window, and the algorithm that sets it, which may change during the session.
//! Algorithms know bytes, time and losses. When data counts as lost, and how the flight shrinks to a
//! smaller window, is decided in `send::recovery` and `send::prr`.

mod bbr;
mod cubic;
mod filter;
mod hystart;
mod rate;
mod reno;

use core::time::Duration;

use portolan_types::{Instant, SeqNum};

use crate::config::CongestionKind;
use crate::encoding;
use bbr::Bbr;
use cubic::Cubic;
use reno::Reno;

pub(crate) use rate::{Newest, Rate, RateSample, Stamp, bytes_per_second};

/// RFC 6928: ten segments.
const INITIAL_SEGMENTS: u32 = 10;
/// Far above any path's bandwidth-delay product, far below overflow.
pub(crate) const MAX_WINDOW: u32 = 1 << 30;

/// Bytes that may be in flight, and where slow start ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) cwnd: u32,
    pub(crate) ssthresh: u32,
}

encoding::fields!(Window { cwnd, ssthresh });

impl Window {
    fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// RFC 5681 §3.1: grows by `bytes` up to the threshold; returns the bytes left over. Like Linux
    /// without the limit of RFC 3465 §2.2: receivers merge packets and acknowledge many segments at
    /// once, which says nothing about their spacing.
    fn slow_start(&mut self, bytes: u32) -> u32 {
        let used = bytes.min(self.ssthresh.saturating_sub(self.cwnd));
        self.cwnd += used;
        bytes - used
    }

    fn is_consistent(&self) -> bool {
        (1..=MAX_WINDOW).contains(&self.cwnd) && (1..=MAX_WINDOW).contains(&self.ssthresh)
    }
}

/// What an algorithm may use of an arriving acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acknowledged {
    pub(crate) now: Instant,
    /// Bytes newly known to have arrived.
    pub(crate) bytes: u32,
    /// Bytes newly counted as lost.
    pub(crate) lost: u32,
    /// Bytes in flight after this acknowledgement.
    pub(crate) flight: u32,
    pub(crate) mss: u32,
    /// Smoothed round-trip time, and the sample of this acknowledgement.
    pub(crate) rtt: Duration,
    pub(crate) latest: Option<Duration>,
    /// The stream is acknowledged up to `una` and sent up to `nxt`.
    pub(crate) una: SeqNum,
    pub(crate) nxt: SeqNum,
    /// A loss is being repaired.
    pub(crate) recovering: bool,
    pub(crate) sample: RateSample,
}

/// How the network signalled congestion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Signal {
    Loss,
    /// A congestion mark (RFC 3168).
    Mark,
    Timeout,
}

trait Controller {
    /// New data was acknowledged outside recovery while the window was fully used.
    fn grow(&mut self, window: &mut Window, ack: &Acknowledged);
    /// Returns the threshold after `signal`; `base` is the number of bytes that the path failed to carry.
    fn reduce(&mut self, window: &Window, base: u32, signal: Signal) -> u32;
    /// The last reduction was spurious.
    fn undo(&mut self) {}
    /// Nothing was in flight for `idle`.
    fn resume(&mut self, _now: Instant, _idle: Duration) {}
    /// Sets the window from a model of the path, on each acknowledgement, also during recovery.
    fn steer(&mut self, _window: &mut Window, _ack: &Acknowledged) {}
    /// The pacing rate, bytes per second.
    fn pacing_rate(&self) -> Option<u64> {
        None
    }
    /// What Linux reports about the algorithm.
    fn info(&self) -> Option<BbrInfo> {
        None
    }
    fn is_consistent(&self) -> bool;
}

/// `struct tcp_bbr_info`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BbrInfo {
    /// The bottleneck's bandwidth, bytes per second.
    pub bandwidth: u64,
    pub min_rtt: Option<Duration>,
    /// 256ths.
    pub pacing_gain: u32,
    pub cwnd_gain: u32,
}

#[derive(Clone, Debug)]
enum Algorithm {
    Cubic(Cubic),
    Reno(Reno),
    Bbr(Box<Bbr>),
}

encoding::variants!(Algorithm {
    0 => Cubic(inner),
    1 => Reno(inner),
    2 => Bbr(inner),
});

impl Algorithm {
    fn new(kind: CongestionKind) -> Algorithm {
        match kind {
            CongestionKind::Cubic => Algorithm::Cubic(Cubic::default()),
            CongestionKind::Reno => Algorithm::Reno(Reno::default()),
            CongestionKind::Bbr => Algorithm::Bbr(Box::default()),
        }
    }

    fn controller(&mut self) -> &mut dyn Controller {
        match self {
            Algorithm::Cubic(cubic) => cubic,
            Algorithm::Reno(reno) => reno,
            Algorithm::Bbr(bbr) => bbr.as_mut(),
        }
    }

    fn view(&self) -> &dyn Controller {
        match self {
            Algorithm::Cubic(cubic) => cubic,
            Algorithm::Reno(reno) => reno,
            Algorithm::Bbr(bbr) => bbr.as_ref(),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Congestion {
    window: Window,
    /// The window before the last reduction, in case that was spurious.
    prior: Window,
    algorithm: Algorithm,
}

encoding::fields!(Congestion {
    window,
    prior,
    algorithm
});

impl Congestion {
    pub(crate) fn new(kind: CongestionKind, mss: u32) -> Congestion {
        let window = Window {
            cwnd: INITIAL_SEGMENTS * mss,
            ssthresh: MAX_WINDOW,
        };
        Congestion {
            prior: window.clone(),
            window,
            algorithm: Algorithm::new(kind),
        }
    }

    pub(crate) fn cwnd(&self) -> u32 {
        self.window.cwnd
    }

    pub(crate) fn ssthresh(&self) -> u32 {
        self.window.ssthresh
    }

    pub(crate) fn in_slow_start(&self) -> bool {
        self.window.in_slow_start()
    }

    pub(crate) fn kind(&self) -> CongestionKind {
        match self.algorithm {
            Algorithm::Cubic(_) => CongestionKind::Cubic,
            Algorithm::Reno(_) => CongestionKind::Reno,
            Algorithm::Bbr(_) => CongestionKind::Bbr,
        }
    }

    /// Switches to another algorithm; the window stays as it is.
    pub(crate) fn set_kind(&mut self, kind: CongestionKind) {
        if kind != self.kind() {
            self.algorithm = Algorithm::new(kind);
        }
    }

    /// Whether the algorithm sets the window itself, also during loss recovery.
    pub(crate) fn steers(&self) -> bool {
        matches!(self.algorithm, Algorithm::Bbr(_))
    }

    pub(crate) fn info(&self) -> Option<BbrInfo> {
        self.algorithm.view().info()
    }

    pub(crate) fn pacing_rate(&self) -> Option<u64> {
        self.algorithm.view().pacing_rate()
    }

    /// The segment size is known now: sets the initial window accordingly, provided the handshake went
    /// well (RFC 6928 §2, as Linux reads it: one lost SYN is tolerated).
    pub(crate) fn set_initial(&mut self, mss: u32, handshake_retries: u32) {
        let segments = if handshake_retries > 1 {
            1
        } else {
            INITIAL_SEGMENTS
        };
        self.window.cwnd = segments * mss;
    }

    /// RFC 5681 §3.1: new data was acknowledged while the window was fully used.
    pub(crate) fn grow(&mut self, ack: &Acknowledged) {
        let Congestion {
            window, algorithm, ..
        } = self;
        algorithm.controller().grow(window, ack);
        window.cwnd = window.cwnd.min(MAX_WINDOW);
    }

    /// Any acknowledgement, for an algorithm that sets the window itself.
    pub(crate) fn steer(&mut self, ack: &Acknowledged) {
        let Congestion {
            window, algorithm, ..
        } = self;
        algorithm.controller().steer(window, ack);
        window.cwnd = window.cwnd.clamp(ack.mss, MAX_WINDOW);
    }

    /// Lowers the threshold once for `signal`; `base` is the number of bytes that the path failed to
    /// carry. The caller moves the window to the threshold.
    pub(crate) fn reduce(&mut self, base: u32, mss: u32, signal: Signal) {
        self.prior = self.window.clone();
        let reduced = self
            .algorithm
            .controller()
            .reduce(&self.window, base, signal);
        self.window.ssthresh = reduced.max(2 * mss).min(MAX_WINDOW);
    }

    /// Sets the window as `send::prr` or a time-out requires.
    pub(crate) fn set_window(&mut self, bytes: u32) {
        self.window.cwnd = bytes.clamp(1, MAX_WINDOW);
    }

    /// The last reduction was spurious (RFC 4015 §3.2, RFC 9438 §4.9).
    pub(crate) fn undo(&mut self) {
        self.window.cwnd = self.window.cwnd.max(self.prior.cwnd);
        self.window.ssthresh = self.window.ssthresh.max(self.prior.ssthresh);
        self.algorithm.controller().undo();
    }

    /// Sending resumes after a pause.
    pub(crate) fn resume(&mut self, now: Instant, idle: Duration) {
        self.algorithm.controller().resume(now, idle);
    }

    /// RFC 5681 §4.1, as Linux does it: halves the window for each time-out that passed idle, down to
    /// the initial window.
    pub(crate) fn on_idle(&mut self, idle: Duration, rto: Duration, mss: u32) {
        let initial = INITIAL_SEGMENTS * mss;
        let mut left = idle;
        while left > rto && self.window.cwnd > initial && !self.steers() {
            self.window.ssthresh = self.window.ssthresh.max(self.window.cwnd / 4 * 3);
            self.window.cwnd = (self.window.cwnd / 2).max(initial);
            left -= rto;
        }
    }

    /// RFC 7661 §4.4.3: the non-validated phase has lasted too long.
    pub(crate) fn shrink_unused(&mut self, mss: u32) {
        self.window.ssthresh = self.window.ssthresh.max(self.window.cwnd / 4 * 3);
        self.window.cwnd = (self.window.cwnd / 2).max(INITIAL_SEGMENTS * mss);
    }

    pub(crate) fn is_consistent(&self) -> bool {
        self.window.is_consistent()
            && self.prior.is_consistent()
            && self.algorithm.view().is_consistent()
    }
}

#[cfg(test)]
mod tests;
