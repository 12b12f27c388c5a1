//! What the sender learns from acknowledgements and their absence: round trips, losses, the pacing rate.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::SackBlock;

use super::Sender;
use super::prr::{Progress, Prr};
use super::tail::TailProbe;
use super::undo::ForwardRto;
use crate::cc::{Acknowledged, Signal};
use crate::encoding;
use crate::event_counters::{Event, EventCounters};
use crate::sack::Delivery;

/// RFC 5681 §3.2.
const DUPLICATE_THRESHOLD: u32 = 3;

/// Congestion state, as Linux's `tcp_ca_state`; an episode ends when `until`, `nxt` at its start, is acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CaState {
    Open,
    /// The network signalled congestion without a loss (RFC 3168 §6.1.2).
    Reduced {
        until: SeqNum,
    },
    /// Fast recovery (RFC 6675 §5).
    Recovery {
        until: SeqNum,
    },
    /// After a retransmission time-out.
    Loss {
        until: SeqNum,
    },
}

encoding::variants!(CaState {
    0 => Open,
    1 => Reduced { until },
    2 => Recovery { until },
    3 => Loss { until },
});

/// The parts of a segment that concern the sending half.
pub(crate) struct AckInput<'a> {
    pub(crate) now: Instant,
    pub(crate) seq: SeqNum,
    pub(crate) ack: SeqNum,
    /// Scaled.
    pub(crate) window: u32,
    pub(crate) sack: &'a [SackBlock],
    /// How long ago the segment was sent whose timestamp is echoed; milliseconds.
    pub(crate) echo: Option<Duration>,
    /// The segment occupies sequence space, so that it cannot be a duplicate ACK.
    pub(crate) occupies: bool,
    pub(crate) sack_permitted: bool,
    /// The peer echoes a congestion mark.
    pub(crate) marked: bool,
}

/// The state before an acknowledgement.
#[derive(Clone, Copy)]
struct Before {
    una: SeqNum,
    /// Bytes counted as lost.
    lost: u32,
}

/// What an acceptable acknowledgement changed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckOutcome {
    pub(crate) advanced: bool,
    pub(crate) fin_acknowledged: bool,
    /// When to check for reordered segments again.
    pub(crate) reorder_at: Option<Instant>,
    /// The tail loss probe is no longer needed.
    pub(crate) no_tail_probe: bool,
    /// Bytes newly known to have arrived.
    pub(crate) delivered: u32,
}

impl Sender {
    /// RFC 9293 §3.10.7.4, fifth; `ack` is at most `nxt`, and not older than `una` less the largest
    /// window.
    pub(crate) fn on_ack(
        &mut self,
        input: &AckInput<'_>,
        event_counters: &mut EventCounters,
    ) -> AckOutcome {
        let mut outcome = AckOutcome::default();
        let mut delivery = self.board.expect(self.rtt.minimum_nanos());
        let lost = self.board.lost();
        let reported = self.note_duplicate_report(input, event_counters);
        let mut news = false;
        for block in input.sack {
            news |= self.board.sack(*block, input.now, &mut delivery);
        }
        // RFC 7323 §4.3: only an acknowledgement of in-order data echoes its own segment.
        delivery.echo = input.echo;
        self.probes = 0;
        let moved = self.update_window(input);
        let before = self.una;
        if input.ack.after(self.una) {
            self.advance(input, &mut delivery, &mut outcome);
        }
        if self.board.note_reordering(&delivery, self.una, self.mss) {
            event_counters.count(Event::Reordering);
        }
        let latest = self.sample(input, &delivery);
        let delivered = self.count_duplicate(input, moved, outcome.advanced, delivery.bytes);
        if self.judge_tail_probe(input, outcome.advanced, reported, news) {
            event_counters.count(Event::TailRepair);
        }
        outcome.delivered = delivery.bytes;
        outcome.reorder_at = self.recover(input, before, news, &delivery, event_counters);
        outcome.no_tail_probe = self.ca_state != CaState::Open || self.board.sacked() > 0;
        if outcome.advanced {
            self.measure_usage(input.now);
        }
        let before = Before { una: before, lost };
        self.update_congestion(input, before, delivered, latest, &delivery);
        outcome
    }

    /// Drops acknowledged data.
    fn advance(&mut self, input: &AckInput<'_>, delivery: &mut Delivery, outcome: &mut AckOutcome) {
        let bytes = (input.ack - self.una) as usize;
        self.board.acknowledge(input.ack, input.now, delivery);
        outcome.fin_acknowledged = self.fin && bytes > self.buffer.len();
        self.fin &= !outcome.fin_acknowledged;
        self.buffer.consume(bytes);
        self.una = input.ack;
        self.short_end = self.short_end.max(self.una);
        self.push_end = self.push_end.max(self.una);
        self.forget_records();
        self.retries = 0;
        self.rtt.reset_backoff();
        self.stalled_since = input.now;
        outcome.advanced = true;
    }

    /// RFC 9293 §3.10.7.4: a window from an older segment does not replace a newer one. As on Linux, a
    /// smaller window is ignored, too, if the segment brings nothing else new: a receiver should not
    /// shrink its window [SHLD-14], but acknowledgements may be reordered. A zero window is always
    /// accepted.
    fn update_window(&mut self, input: &AckInput<'_>) -> bool {
        // A higher acknowledgement is newer whatever its sequence number: the peer may have retransmitted.
        let moved = self.window != input.window;
        let older = input.seq.before(self.wl1) && input.ack == self.una;
        if older || input.ack.before(self.una) {
            return false;
        }
        let newer = input.ack.after(self.una) || self.wl1.before(input.seq);
        if !newer && input.window < self.window && input.window > 0 {
            return moved;
        }
        if moved && self.board.is_empty() {
            // The window probes have succeeded.
            self.rtt.reset_backoff();
        }
        self.window = input.window;
        self.max_window = self.max_window.max(input.window);
        self.wl1 = input.seq;
        moved
    }

    /// RFC 2883 §4: the first block reports a duplicate if it lies below the acknowledgement or
    /// within the second block. Returns true if the duplicate was the tail loss probe.
    fn note_duplicate_report(
        &mut self,
        input: &AckInput<'_>,
        event_counters: &mut EventCounters,
    ) -> bool {
        let Some(first) = input.sack.first() else {
            return false;
        };
        let within = |outer: &SackBlock| {
            first.start.at_or_after(outer.start) && first.end.at_or_before(outer.end)
        };
        let below = first.end.at_or_before(input.ack);
        let sane = first.start.before(first.end)
            && first.end.at_or_before(self.nxt)
            && first.start.at_or_after(self.una - self.max_window);
        if !sane || !(below || input.sack.get(1).is_some_and(within)) {
            return false;
        }
        event_counters.count(Event::DsackIn);
        let segments = (first.end - first.start).div_ceil(self.mss);
        self.duplicates_reported = self.duplicates_reported.saturating_add(segments);
        self.note_reported(first.start, first.end);
        let probe = self.is_tail_probe(first.end);
        if !probe {
            self.board.note_duplicate(self.una, self.nxt);
        }
        probe
    }

    /// Karn's rule: samples bytes sent once, else the echoed timestamp. Returns the round trip of
    /// bytes sent once.
    fn sample(&mut self, input: &AckInput<'_>, delivery: &Delivery) -> Option<Duration> {
        if delivery.bytes == 0 {
            return None;
        }
        match (delivery.sent, input.echo) {
            (Some(sent), _) => {
                let rtt = input.now.since(sent);
                self.rtt.sample(rtt);
                Some(rtt)
            }
            (None, Some(echo)) => {
                self.rtt.sample(echo.max(Duration::from_millis(1)));
                None
            }
            (None, None) => None,
        }
    }

    /// RFC 5681 §2: counts duplicate acknowledgements. Returns the bytes that have left the network;
    /// a peer without SACK reports them by duplicates.
    fn count_duplicate(
        &mut self,
        input: &AckInput<'_>,
        window_moved: bool,
        advanced: bool,
        bytes: u32,
    ) -> u32 {
        if advanced {
            self.duplicates = 0;
            // All but the first segment were already reported by duplicates.
            let told = self.reno_sacked_out.min(bytes.saturating_sub(self.mss));
            self.reno_sacked_out -= told;
            if self.ca_state == CaState::Open {
                self.reno_sacked_out = 0;
            }
            return bytes - told;
        }
        if !input.occupies
            && !window_moved
            && input.ack == self.una
            && !self.board.is_empty()
            && !input.sack_permitted
        {
            self.duplicates = self.duplicates.saturating_add(1);
            self.reno_sacked_out = self.reno_sacked_out.saturating_add(self.mss).min(1 << 30);
            return bytes + self.mss;
        }
        bytes
    }

    /// Enters, continues and leaves recovery. Returns when to check for losses again.
    fn recover(
        &mut self,
        input: &AckInput<'_>,
        before: SeqNum,
        news: bool,
        delivery: &Delivery,
        event_counters: &mut EventCounters,
    ) -> Option<Instant> {
        let advanced = self.una != before;
        if self.undo.is_some() {
            self.try_undo(input, advanced, delivery, event_counters);
        }
        self.leave_ca_state(input.sack_permitted);
        if input.marked && self.ca_state == CaState::Open {
            self.reduce(Signal::Mark);
            self.ca_state = CaState::Reduced { until: self.nxt };
            self.undo = None;
        }
        if input.sack_permitted {
            let suspicious = self.board.sacked() > 0 || self.is_recovering();
            if (news || advanced) && suspicious {
                return self.detect_loss(input.now);
            }
            return None;
        }
        match self.ca_state {
            CaState::Open | CaState::Reduced { .. } if self.duplicates == DUPLICATE_THRESHOLD => {
                self.board.lose_first(self.mss);
                self.enter_recovery();
            }
            // RFC 6582 §3.2 step 3: a partial acknowledgement reveals the next hole.
            CaState::Recovery { .. } if advanced => self.board.lose_first(self.mss),
            _ => {}
        }
        None
    }

    pub(crate) fn is_recovering(&self) -> bool {
        matches!(
            self.ca_state,
            CaState::Recovery { .. } | CaState::Loss { .. }
        )
    }

    fn leave_ca_state(&mut self, sack_permitted: bool) {
        let (CaState::Reduced { until } | CaState::Recovery { until } | CaState::Loss { until }) =
            self.ca_state
        else {
            return;
        };
        // RFC 6582 §4: without SACK, duplicates caused by retransmissions look like a new loss.
        let ambiguous = !sack_permitted && self.una == until && !self.board.is_empty();
        if self.una.before(until) || (ambiguous && self.is_recovering()) {
            return;
        }
        if !matches!(self.ca_state, CaState::Loss { .. }) && !self.congestion.steers() {
            self.congestion.set_window(self.congestion.ssthresh());
        }
        if self.is_recovering() {
            self.board.note_recovery();
        }
        self.forward_rto = ForwardRto::Off;
        self.ca_state = CaState::Open;
        self.duplicates = 0;
        self.reno_sacked_out = 0;
    }

    /// RFC 8985 §6.3: the reordering window has expired. No acknowledgement arrives with a loss detected this way, and
    /// the window starts to shrink at once: one segment is retransmitted, as in Linux's `tcp_rack_reo_timeout`.
    pub(crate) fn on_reordering_timeout(&mut self, now: Instant) -> Option<Instant> {
        let before = self.ca_state;
        let again = self.detect_loss(now);
        if self.ca_state != before && !self.congestion.steers() {
            let progress = Progress {
                delivered: 0,
                pipe: self.in_flight(),
                safe: false,
                mss: self.mss,
            };
            let window = self.prr.window(self.congestion.ssthresh(), progress);
            self.congestion.set_window(window);
        }
        again
    }

    /// RFC 8985 §6.2.
    fn detect_loss(&mut self, now: Instant) -> Option<Instant> {
        let (Some(min), Some(srtt)) = (self.rtt.minimum(), self.rtt.smoothed()) else {
            return None;
        };
        let window = self
            .board
            .reordering_window(self.is_recovering(), self.mss, min, srtt);
        let (lost, again) = self.board.detect_loss(now, window);
        if lost > 0 && !self.is_recovering() {
            self.enter_recovery();
        }
        again
    }

    fn enter_recovery(&mut self) {
        // A reduction for a mark in the same flight suffices.
        if self.ca_state == CaState::Open {
            self.reduce(Signal::Loss);
        }
        self.prepare_undo(Signal::Loss);
        self.ca_state = CaState::Recovery { until: self.nxt };
        // RFC 6675 §5 step 4.3: the first retransmission does not wait for the pipe to drain.
        self.forced = true;
    }

    /// Reduces the window for `signal`; the peer will be told (RFC 3168 §6.1.2).
    pub(super) fn reduce(&mut self, signal: Signal) {
        let base = self.reduction_base();
        self.prr = Prr::new(self.board.outstanding() - self.board.sacked());
        self.congestion.reduce(base, self.mss, signal);
        self.tail = TailProbe::None;
        self.cwr_pending = true;
    }

    /// Updates the window: by the algorithm if it sets the window itself; else by `prr` during an
    /// episode, and by the algorithm's growth while the window limits sending (RFC 7661).
    fn update_congestion(
        &mut self,
        input: &AckInput<'_>,
        before: Before,
        delivered: u32,
        latest: Option<Duration>,
        delivery: &Delivery,
    ) {
        let lost = self.board.lost().saturating_sub(before.lost);
        let min_rtt = delivery.min_rtt;
        let sample = self
            .rate
            .deliver(input.now, delivery.bytes, delivery.newest, min_rtt);
        if let Some(interval) = sample.interval.filter(|_| !sample.limited) {
            let bytes = sample.delivered.saturating_sub(sample.prior_delivered);
            self.delivery_sample = Some((bytes, interval));
        }
        let steers = self.congestion.steers();
        let growing = matches!(self.ca_state, CaState::Open | CaState::Loss { .. });
        let idle = delivered == 0 && lost == 0;
        if idle || (growing && !steers && !self.is_congestion_limited()) {
            return;
        }
        let ack = Acknowledged {
            now: input.now,
            bytes: delivery.bytes,
            lost,
            flight: self.in_flight(),
            mss: self.mss,
            rtt: self.rtt.smoothed().unwrap_or(Duration::ZERO),
            latest,
            una: self.una,
            nxt: self.nxt,
            recovering: self.is_recovering(),
            sample,
        };
        if steers {
            self.congestion.steer(&ack);
            self.grow_buffer();
            return;
        }
        match self.ca_state {
            CaState::Open | CaState::Loss { .. } if self.may_grow(before.una) => self.grow(&ack),
            CaState::Open | CaState::Loss { .. } => {}
            CaState::Reduced { .. } | CaState::Recovery { .. } => {
                let progress = Progress {
                    delivered,
                    pipe: ack.flight,
                    safe: self.una != before.una && lost == 0,
                    mss: self.mss,
                };
                let window = self.prr.window(self.congestion.ssthresh(), progress);
                self.congestion.set_window(window);
            }
        }
    }

    /// RFC 5681 §3.1: data acknowledged out of order does not open the window, unless reordering is
    /// normal on this path (Linux's `tcp_may_raise_cwnd`).
    fn may_grow(&self, before: SeqNum) -> bool {
        self.una != before || self.board.reordering() > DUPLICATE_THRESHOLD
    }

    /// RFC 5681 §3.1.
    fn grow(&mut self, ack: &Acknowledged) {
        if ack.bytes > 0 {
            self.congestion.grow(ack);
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

    /// RFC 6298 §5.4–5.6, RFC 8985 §6.3.
    pub(crate) fn on_retransmit_timeout(&mut self, now: Instant) {
        let fresh = !self.is_recovering();
        // Progress since the last time-out makes this a new event.
        let again = matches!(self.ca_state, CaState::Loss { .. }) && self.retries > 0;
        let moved = matches!(self.ca_state, CaState::Loss { .. }) && self.retries == 0;
        if fresh || moved {
            self.reduce(Signal::Timeout);
            self.prepare_undo(Signal::Timeout);
        }
        let patience = self.rtt.minimum().unwrap_or(Duration::ZERO) / 4;
        let recent = self.rtt.smoothed().unwrap_or(Duration::ZERO) + patience;
        self.board
            .lose_sent_before(if now.since(Instant::ZERO) > recent {
                Instant::from_nanos(now.as_nanos() - recent.as_nanos() as u64)
            } else {
                Instant::ZERO
            });
        self.duplicates = 0;
        self.reno_sacked_out = 0;
        self.tail = TailProbe::None;
        self.congestion.set_window(self.in_flight() + self.mss);
        self.forward_rto = if fresh || again || moved {
            ForwardRto::Waiting
        } else {
            ForwardRto::Off
        };
        self.ca_state = CaState::Loss { until: self.nxt };
        self.retries += 1;
        self.rtt.back_off();
        self.forced = true;
    }

    /// The path carries segments of at most `mss`: larger ones in flight are retransmitted at once,
    /// without a response to congestion (RFC 8201 §5.4, RFC 1191 §6.5; Linux's
    /// `tcp_simple_retransmit`).
    pub(crate) fn shrink_mss(&mut self, mss: u32) {
        if mss >= self.mss {
            return;
        }
        self.mss = mss;
        if self.board.lose_larger(mss) {
            self.undo = None;
            self.forward_rto = ForwardRto::Off;
            self.tail = TailProbe::None;
            self.forced = true;
        }
    }
}
