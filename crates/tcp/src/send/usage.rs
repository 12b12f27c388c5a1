//! How much of the window is used (RFC 7661). A window that was not filled says nothing about the path, so the
//! response to a loss starts from what was in use, and an unused window shrinks in time.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};

use super::Sender;
use crate::encoding;

/// RFC 7661 §4.2: `pipeACK` is the maximum over a period of three round trips, at least a second.
const LEAST_PERIOD: Duration = Duration::from_secs(1);
const PERIOD_ROUNDS: u32 = 3;
/// RFC 7661 §4.4.3: the non-validated period.
const NON_VALIDATED: Duration = Duration::from_secs(300);

#[derive(Clone, Debug)]
pub(crate) struct CwndValidation {
    /// The current round trip: where it ends, and the bytes delivered when it began.
    round_end: Option<SeqNum>,
    round_delivered: u64,
    /// The most acknowledged in one round trip, in the current period and the one before.
    present: u32,
    previous: u32,
    period_began: Instant,
    /// Since when less than half of the window was in use.
    unused_since: Option<Instant>,
    fill: Fill,
}

encoding::fields!(CwndValidation {
    round_end,
    round_delivered,
    present,
    previous,
    period_began,
    unused_since,
    fill
});

/// How far the window was filled; valid until `until` is acknowledged (Linux's `tcp_cwnd_validate`).
#[derive(Clone, Debug)]
struct Fill {
    until: SeqNum,
    /// The congestion window limited sending.
    is_limited: bool,
    /// The most bytes in flight.
    most: u32,
}

encoding::fields!(Fill {
    until,
    is_limited,
    most
});

impl CwndValidation {
    /// `first` is the sequence number of the first byte.
    pub(super) fn new(first: SeqNum) -> CwndValidation {
        let fill = Fill {
            until: first,
            is_limited: false,
            most: 0,
        };
        CwndValidation {
            round_end: None,
            round_delivered: 0,
            present: 0,
            previous: 0,
            period_began: Instant::ZERO,
            unused_since: None,
            fill,
        }
    }
}

impl Sender {
    /// New bytes were sent.
    pub(super) fn note_use(&mut self) {
        let most = self.nxt - self.una;
        let gone = self.board.sacked() + self.board.lost() + self.reno_sacked_out;
        let is_limited = most >= self.congestion.cwnd().saturating_add(gone);
        let fill = &mut self.usage.fill;
        let is_more = !fill.is_limited && most > fill.most;
        if is_limited || is_more || self.una.at_or_after(fill.until) {
            *fill = Fill {
                until: self.nxt,
                is_limited,
                most,
            };
        }
    }

    /// The congestion window limits sending.
    pub(super) fn note_congestion_limited(&mut self) {
        self.usage.fill = Fill {
            until: self.nxt,
            is_limited: true,
            most: self.nxt - self.una,
        };
    }

    /// Whether the congestion window limits sending, so that it may grow; in slow start up to twice what was in flight.
    pub(super) fn is_congestion_limited(&self) -> bool {
        let Fill {
            is_limited, most, ..
        } = self.usage.fill;
        let doubles = || most.saturating_mul(2) > self.congestion.cwnd();
        is_limited || (self.congestion.in_slow_start() && doubles())
    }

    /// New bytes were acknowledged.
    pub(super) fn measure_usage(&mut self, now: Instant) {
        let CwndValidation { round_end, .. } = self.usage;
        if round_end.is_some_and(|end| self.una.before(end)) {
            return;
        }
        let delivered = self.rate.delivered();
        let acknowledged = delivered.saturating_sub(self.usage.round_delivered);
        let acknowledged = u32::try_from(acknowledged).unwrap_or(u32::MAX);
        self.usage.round_end = Some(self.nxt);
        self.usage.round_delivered = delivered;
        if round_end.is_none() {
            self.usage.period_began = now;
            return;
        }
        let age = now.since(self.usage.period_began);
        let rounds = || PERIOD_ROUNDS * self.rtt.smoothed().unwrap_or_default();
        if age > LEAST_PERIOD && age > rounds() {
            self.usage.previous = core::mem::take(&mut self.usage.present);
            self.usage.period_began = now;
        }
        self.usage.present = self.usage.present.max(acknowledged);
        self.judge_usage(now);
    }

    fn judge_usage(&mut self, now: Instant) {
        if self.is_validated() || self.congestion.steers() {
            self.usage.unused_since = None;
            return;
        }
        let since = *self.usage.unused_since.get_or_insert(now);
        if now.since(since) > NON_VALIDATED {
            self.congestion.shrink_unused(self.mss);
            self.usage.unused_since = Some(now);
        }
    }

    /// `pipeACK`; none before the first measurement.
    fn pipe_ack(&self) -> Option<u32> {
        let pipe = self.usage.present.max(self.usage.previous);
        (pipe > 0).then_some(pipe)
    }

    /// RFC 7661 §4.3: at least half of the window was used recently.
    fn is_validated(&self) -> bool {
        self.pipe_ack()
            .is_none_or(|pipe| pipe >= self.congestion.cwnd() / 2)
    }

    /// RFC 7661 §4.4.2: the number of bytes that a reduction starts from.
    pub(super) fn reduction_base(&self) -> u32 {
        let cwnd = self.congestion.cwnd();
        match self.pipe_ack() {
            Some(pipe) if !self.is_validated() => pipe.max(self.board.outstanding()).clamp(1, cwnd),
            _ => cwnd,
        }
    }
}
