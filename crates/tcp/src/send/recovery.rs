//! What acknowledgements and their absence tell the sender: round trips, losses, the pace.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::SackBlock;
use serde::{Deserialize, Serialize};

use super::Sender;
use crate::cc::Acknowledged;
use crate::sack::Delivery;

/// Linux adds these to two round trips before it probes the tail of a flight.
const DELAYED_ACK: Duration = Duration::from_millis(200);
const TAIL_PATIENCE: Duration = Duration::from_millis(2);
/// RFC 5681 §3.2.
const DUPLICATE_THRESHOLD: u32 = 3;

/// Where the sender stands in a loss episode; `until` is what was sent when it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Episode {
    Open,
    /// Fast recovery (RFC 6675 §5).
    Recovery {
        until: SeqNum,
    },
    /// After a retransmission time-out.
    Loss {
        until: SeqNum,
    },
}

/// The parts of a segment that concern the sending half.
pub(crate) struct AckInput<'a> {
    pub(crate) now: Instant,
    pub(crate) seq: SeqNum,
    pub(crate) ack: SeqNum,
    /// Scaled.
    pub(crate) window: u32,
    pub(crate) sack: &'a [SackBlock],
    /// Round-trip time by the echoed timestamp.
    pub(crate) echo: Option<Duration>,
    /// The segment occupies sequence space, so that it cannot be a duplicate ACK.
    pub(crate) occupies: bool,
    pub(crate) sack_permitted: bool,
}

/// What an acceptable acknowledgement changed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckOutcome {
    pub(crate) advanced: bool,
    pub(crate) fin_acknowledged: bool,
    /// When to look for reordered segments again.
    pub(crate) reorder_at: Option<Instant>,
}

impl Sender {
    /// RFC 9293 §3.10.7.4, fifth; `ack` is at most `nxt`, and not older than `una` less the
    /// largest window.
    pub(crate) fn on_ack(&mut self, input: &AckInput<'_>) -> AckOutcome {
        let mut outcome = AckOutcome::default();
        let mut delivery = Delivery::default();
        let flight = self.in_flight();
        let mut news = false;
        for block in input.sack {
            news |= self.board.sack(*block, input.now, &mut delivery);
        }
        self.probes = 0;
        let moved = self.update_window(input);
        let before = self.una;
        if input.ack.after(self.una) {
            self.advance(input, &mut delivery, &mut outcome);
        }
        self.sample(input, &delivery);
        self.count_duplicate(input, moved, outcome.advanced);
        outcome.reorder_at = self.recover(input, before, news || outcome.advanced);
        self.grow(input.now, flight, &delivery);
        outcome
    }

    /// Drops what is acknowledged.
    fn advance(&mut self, input: &AckInput<'_>, delivery: &mut Delivery, outcome: &mut AckOutcome) {
        let octets = (input.ack - self.una) as usize;
        self.board.acknowledge(input.ack, input.now, delivery);
        outcome.fin_acknowledged = self.fin && octets > self.buffer.len();
        self.fin &= !outcome.fin_acknowledged;
        self.buffer.consume(octets);
        self.una = input.ack;
        self.short_end = self.short_end.max(self.una);
        self.retries = 0;
        self.tail_probed = false;
        self.rtt.reset_backoff();
        self.stalled_since = input.now;
        outcome.advanced = true;
    }

    /// RFC 9293 §3.10.7.4: a window from an older segment does not replace a newer one.
    fn update_window(&mut self, input: &AckInput<'_>) -> bool {
        // What acknowledges more is newer whatever its number: the peer may have sent it again.
        let newer = input.ack.after(self.una)
            || self.wl1.before(input.seq)
            || (self.wl1 == input.seq && self.wl2.at_or_before(input.ack));
        if !newer || input.ack.before(self.una) {
            return false;
        }
        let moved = self.window != input.window;
        if moved && self.board.is_empty() {
            // Window probes did their work.
            self.rtt.reset_backoff();
        }
        self.window = input.window;
        self.max_window = self.max_window.max(input.window);
        self.wl1 = input.seq;
        self.wl2 = input.ack;
        moved
    }

    /// Karn's rule: the clock of an octet sent once, else the echoed timestamp.
    fn sample(&mut self, input: &AckInput<'_>, delivery: &Delivery) {
        if delivery.octets == 0 {
            return;
        }
        match (delivery.sent, input.echo) {
            (Some(sent), _) => self.rtt.sample(input.now.since(sent)),
            (None, Some(echo)) => self.rtt.sample(echo),
            (None, None) => {}
        }
    }

    /// RFC 5681 §2: what is a duplicate acknowledgement.
    fn count_duplicate(&mut self, input: &AckInput<'_>, window_moved: bool, advanced: bool) {
        if advanced {
            self.duplicates = 0;
            self.departed = 0;
        } else if !input.occupies
            && !window_moved
            && input.ack == self.una
            && !self.board.is_empty()
            && !input.sack_permitted
        {
            self.duplicates = self.duplicates.saturating_add(1);
            self.departed = self.departed.saturating_add(self.mss);
        }
    }

    /// Enters, pursues and leaves loss episodes. Returns when to look for losses again.
    fn recover(&mut self, input: &AckInput<'_>, before: SeqNum, news: bool) -> Option<Instant> {
        self.leave_episode();
        if input.sack_permitted {
            if news && (self.board.sacked() > 0 || self.episode != Episode::Open) {
                return self.detect_loss(input.now);
            }
            return None;
        }
        match self.episode {
            Episode::Open if self.duplicates == DUPLICATE_THRESHOLD => {
                self.board.lose_first(self.mss);
                self.enter_recovery();
            }
            // RFC 6582 §3.2 step 3: a partial acknowledgement shows the next hole.
            Episode::Recovery { .. } if self.una != before => {
                self.board.lose_first(self.mss);
                self.forced = true;
            }
            _ => {}
        }
        None
    }

    fn leave_episode(&mut self) {
        if let Episode::Recovery { until } | Episode::Loss { until } = self.episode
            && self.una.at_or_after(until)
        {
            self.episode = Episode::Open;
            self.duplicates = 0;
            self.departed = 0;
        }
    }

    /// RFC 8985 §6.2; also called when the reordering timer fires.
    pub(crate) fn detect_loss(&mut self, now: Instant) -> Option<Instant> {
        let (Some(min), Some(srtt)) = (self.rtt.minimum(), self.rtt.smoothed()) else {
            return None;
        };
        let recovering = self.episode != Episode::Open;
        let window = self
            .board
            .reordering_window(recovering, self.mss, min, srtt);
        let (lost, again) = self.board.detect_loss(now, window);
        if lost > 0 && self.episode == Episode::Open {
            self.enter_recovery();
        }
        again
    }

    fn enter_recovery(&mut self) {
        self.congestion.on_loss(self.mss);
        self.episode = Episode::Recovery { until: self.nxt };
        // RFC 6675 §5 step 4.3: the first retransmission does not wait for the pipe to drain.
        self.forced = true;
    }

    /// RFC 5681 §3.1, and only while the window is what limits (RFC 7661).
    fn grow(&mut self, now: Instant, flight: u32, delivery: &Delivery) {
        if delivery.octets == 0 || matches!(self.episode, Episode::Recovery { .. }) {
            return;
        }
        let cwnd = self.congestion.cwnd();
        let used = self.congestion_limited
            || (self.congestion.in_slow_start() && flight.saturating_mul(2) > cwnd);
        if used {
            self.congestion.on_ack(Acknowledged {
                now,
                octets: delivery.octets,
                mss: self.mss,
                rtt: self.rtt.smoothed().unwrap_or(Duration::ZERO),
            });
            self.congestion_limited = false;
            self.grow_buffer();
        }
    }

    /// Linux's `tcp_sndbuf_expand`: twice the congestion window.
    fn grow_buffer(&mut self) {
        let wanted = 2 * self.congestion.cwnd() as usize;
        if self.autotune && wanted > self.limit {
            self.limit = wanted.min(self.limit_max);
        }
    }

    // ---- time-outs ----

    /// RFC 6298 §5.4–5.6.
    pub(crate) fn on_retransmit_timeout(&mut self) {
        let first = !matches!(self.episode, Episode::Loss { .. }) || self.retries == 0;
        self.congestion.on_timeout(self.mss, first);
        self.episode = Episode::Loss { until: self.nxt };
        self.board.lose_all();
        self.duplicates = 0;
        self.departed = 0;
        self.retries += 1;
        self.rtt.back_off();
        self.forced = true;
    }

    /// RFC 8985 §7.2: how long the tail of the flight may stay silent before it is probed.
    pub(crate) fn tail_probe_delay(&self) -> Option<Duration> {
        if self.tail_probed || self.episode != Episode::Open || self.board.sacked() > 0 {
            return None;
        }
        // A single segment may wait for its delayed acknowledgement.
        let single = self.board.outstanding() <= self.mss;
        let patience = if single { DELAYED_ACK } else { TAIL_PATIENCE };
        self.rtt.smoothed().map(|srtt| 2 * srtt + patience)
    }

    /// RFC 8985 §7.3: one segment may leave although the window is full; without new octets the
    /// last ones go again.
    pub(crate) fn probe_tail(&mut self) {
        self.tail_probed = true;
        if !self.has_unsent() {
            self.board.lose_last(self.mss);
        }
        self.forced = true;
    }

    /// The path takes segments of `mss` at most: what is in flight was too large.
    pub(crate) fn shrink_mss(&mut self, mss: u32) {
        if mss < self.mss {
            self.mss = mss;
            self.board.lose_all();
            self.forced = true;
        }
    }
}
