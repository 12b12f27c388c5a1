//! The receiving half: octets in order and out of order, the window offered to the peer, and when
//! an acknowledgement is due.

use core::time::Duration;

use arrayvec::ArrayVec;
use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::SackBlock;
use serde::{Deserialize, Serialize};

use crate::assembler::Assembler;
use crate::buffer::{ByteRing, LARGEST};
use crate::config::Config;

/// Linux's `TCP_DELACK_MIN`.
const ACK_DELAY: Duration = Duration::from_millis(40);
/// Linux's `TCP_MAX_QUICKACKS`: acknowledgements sent at once before the pattern is known.
const QUICK_ACKS: u8 = 16;
/// RFC 7323 §2.3.
pub(crate) const MAX_SCALE: u8 = 14;

/// How urgent the next acknowledgement is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub(crate) enum AckNeed {
    None,
    Delayed,
    Now,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Receiver {
    /// Next octet expected.
    pub(crate) nxt: SeqNum,
    /// Right edge of the window offered so far; it never moves left (RFC 9293 §3.8.6 [SHLD-14]).
    edge: SeqNum,
    /// What the last segment sent acknowledged.
    pub(crate) acknowledged: SeqNum,
    pub(crate) buffer: ByteRing,
    assembler: Assembler,
    /// Sequence number of the peer's FIN, once known.
    fin: Option<SeqNum>,
    /// Shift of the windows that this side sends.
    pub(crate) scale: u8,
    /// Payload of the peer's full segments.
    pub(crate) mss: u32,
    limit: usize,
    limit_max: usize,
    autotune: bool,
    need: AckNeed,
    quick: u8,
    /// A range that arrived twice (RFC 2883).
    duplicate: Option<(SeqNum, SeqNum)>,
    tuning: Tuning,
    pub(crate) last_data: Instant,
}

/// Dynamic right-sizing: the buffer follows what the application takes in a round trip.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Tuning {
    since: Instant,
    copied: usize,
    /// The most taken in one round trip.
    space: usize,
    /// Round trip by the time a window's worth takes to arrive; zero before the first.
    rtt: Duration,
    window_end: SeqNum,
    window_since: Instant,
}

/// What a segment's text did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// Octets became readable.
    pub(crate) readable: bool,
    /// The FIN was reached.
    pub(crate) finished: bool,
}

impl Receiver {
    pub(crate) fn new(config: &Config) -> Receiver {
        Receiver {
            nxt: SeqNum(0),
            edge: SeqNum(0),
            acknowledged: SeqNum(0),
            buffer: ByteRing::default(),
            assembler: Assembler::default(),
            fin: None,
            scale: 0,
            mss: u32::from(config.mss).max(1),
            limit: config.receive_buffer,
            limit_max: config.receive_buffer_max.max(config.receive_buffer),
            autotune: true,
            need: AckNeed::None,
            quick: QUICK_ACKS,
            duplicate: None,
            tuning: Tuning::default(),
            last_data: Instant::ZERO,
        }
    }

    /// The smallest shift that lets the largest buffer be offered (RFC 7323 §2.3).
    pub(crate) fn wanted_scale(&self) -> u8 {
        (0..MAX_SCALE)
            .find(|&s| self.limit_max >> s <= 0xffff)
            .unwrap_or(MAX_SCALE)
    }

    /// The peer's SYN carried `irs`; SYN segments offer an unscaled window.
    pub(crate) fn synchronize(&mut self, irs: SeqNum, now: Instant) {
        let offered = self.offer_unscaled();
        self.nxt = irs + 1;
        self.acknowledged = self.nxt;
        self.edge = self.nxt + u32::from(offered);
        self.tuning.since = now;
        self.tuning.window_end = self.edge;
        self.tuning.window_since = now;
    }

    // ---- the window ----

    /// The window of a SYN; what an earlier SYN offered stays offered (RFC 9293 §3.8.6).
    pub(crate) fn offer_unscaled(&mut self) -> u16 {
        let window = self.offered().max(self.limit.min(0xffff) as u32);
        self.edge = self.nxt + window;
        u16::try_from(window).unwrap_or(u16::MAX)
    }

    /// The window to offer now, octets; moves the edge.
    pub(crate) fn offer(&mut self, clamp: Option<u32>) -> u32 {
        let offered = self.offered();
        let wanted = self.wanted(clamp);
        // RFC 9293 §3.8.6.2.2 [MUST-39]: no small steps of the edge.
        let step = (self.limit / 2).min(self.mss as usize) as u32;
        let granule = (1u32 << self.scale) - 1;
        if wanted > offered && wanted - offered >= step {
            let window = wanted.min(0xffff << self.scale) & !granule;
            if window > offered {
                self.edge = self.nxt + window;
                return window;
            }
        }
        // Rounding up by less than a granule would promise more than before.
        offered & !granule
    }

    /// What is left of the window offered last.
    pub(crate) fn offered(&self) -> u32 {
        if self.nxt.before(self.edge) {
            self.edge - self.nxt
        } else {
            0
        }
    }

    fn wanted(&self, clamp: Option<u32>) -> u32 {
        let free = self.limit.saturating_sub(self.buffer.len());
        u32::try_from(free)
            .unwrap_or(u32::MAX)
            .min(clamp.unwrap_or(u32::MAX))
            .min(1 << 30)
    }

    /// RFC 9293 §3.10.7.4, first, read as Linux does: some part between what was acknowledged and
    /// the edge, a segment that just touches it included.
    pub(crate) fn acceptable(&self, seq: SeqNum, end: SeqNum) -> bool {
        end.at_or_after(self.acknowledged) && seq.at_or_before(self.edge)
    }

    /// Whether `seq` is a number the peer may still use (RFC 5961 §3.2).
    pub(crate) fn in_window(&self, seq: SeqNum) -> bool {
        seq.at_or_after(self.nxt) && (seq.before(self.edge) || seq == self.nxt)
    }

    // ---- arrival ----

    /// Whether `len` octets at `seq` are exactly what comes next, with room for them.
    pub(crate) fn is_next(&self, seq: SeqNum, len: usize) -> bool {
        seq == self.nxt
            && len <= self.offered() as usize
            && self.assembler.is_empty()
            && self.fin.is_none()
    }

    /// The next octets arrived, in order and with room: the fast path.
    pub(crate) fn append(&mut self, now: Instant, payload: &[u8]) {
        self.buffer.push(payload);
        self.nxt += payload.len() as u32;
        self.last_data = now;
        self.measure(now);
        self.want_ack(if self.quick > 0 {
            AckNeed::Now
        } else {
            AckNeed::Delayed
        });
    }

    /// RFC 9293 §3.10.7.4, seventh and eighth: text and FIN of an acceptable segment.
    pub(crate) fn arrive(
        &mut self,
        now: Instant,
        seq: SeqNum,
        payload: &[u8],
        fin: bool,
    ) -> Arrival {
        let before = self.nxt;
        let end = seq + payload.len() as u32;
        if fin && self.fin.is_none() && end.at_or_after(self.nxt) && end.at_or_before(self.edge) {
            self.fin = Some(end);
            // As Linux: what seemed to follow the FIN never was.
            self.assembler.truncate(end);
        }
        if !payload.is_empty() || fin {
            self.last_data = now;
            self.store(seq, payload);
        }
        let readable = self.nxt != before;
        let finished = self.fin == Some(self.nxt);
        if finished {
            self.nxt += 1;
            self.edge = self.edge.max(self.nxt);
            self.want_ack(AckNeed::Now);
        }
        if readable {
            self.measure(now);
        }
        Arrival { readable, finished }
    }

    /// Keeps the part of `payload` that is new and inside the window.
    fn store(&mut self, seq: SeqNum, payload: &[u8]) {
        let end = seq + payload.len() as u32;
        let start = seq.max(self.nxt);
        let stop = end.min(self.fin.map_or(self.edge, |fin| fin.min(self.edge)));
        if !start.before(stop) {
            // All of it is old, or beyond the window.
            if seq.before(self.nxt) {
                self.duplicate = Some((seq, end.min(self.nxt)));
            }
            self.want_ack(AckNeed::Now);
            return;
        }
        if self.assembler.covers(start, stop) {
            self.duplicate = Some((start, stop));
            self.want_ack(AckNeed::Now);
            return;
        }
        let text = &payload[(start - seq) as usize..(stop - seq) as usize];
        let offset = self.buffer.len() + (start - self.nxt) as usize;
        if start == self.nxt {
            self.take_in_order(offset, text, stop);
        } else {
            if self.assembler.insert(start, stop) {
                self.buffer.write_at(offset, text);
            }
            self.want_ack(AckNeed::Now);
        }
    }

    fn take_in_order(&mut self, offset: usize, text: &[u8], stop: SeqNum) {
        let fills_gap = !self.assembler.is_empty();
        self.buffer.write_at(offset, text);
        let reached = self.assembler.advance(stop);
        self.buffer.extend((reached - self.nxt) as usize);
        self.nxt = reached;
        // RFC 5681 §4.2: at once when a gap is filled.
        let quick = fills_gap || self.quick > 0;
        self.want_ack(if quick {
            AckNeed::Now
        } else {
            AckNeed::Delayed
        });
    }

    /// `len` octets at `seq` lie outside the window: the peer must hear where it is.
    pub(crate) fn reject(&mut self, seq: SeqNum, len: u32) {
        if len > 0 && (seq + len).at_or_before(self.nxt) {
            self.duplicate = Some((seq, seq + len));
        }
        self.want_ack(AckNeed::Now);
    }

    // ---- acknowledgements ----

    pub(crate) fn want_ack(&mut self, need: AckNeed) {
        self.need = self.need.max(need);
    }

    /// Whether an acknowledgement by itself is due: RFC 9293 §3.8.6.3 [SHLD-19] wants one for at least
    /// every second full segment.
    pub(crate) fn ack_due(&self, quickack: bool) -> bool {
        match self.need {
            AckNeed::None => false,
            AckNeed::Now => true,
            AckNeed::Delayed => quickack || self.nxt - self.acknowledged >= 2 * self.mss,
        }
    }

    /// When a delayed acknowledgement must leave.
    pub(crate) fn ack_deadline(&self, now: Instant) -> Option<Instant> {
        (self.need == AckNeed::Delayed).then(|| now + ACK_DELAY)
    }

    /// A segment that acknowledges `nxt` leaves; `data` if it carries text.
    pub(crate) fn acknowledge(&mut self, now: Instant, data: bool) {
        if data && now.since(self.last_data) < ACK_DELAY {
            // The peers take turns: acknowledgements will ride on answers.
            self.quick = 0;
        } else if self.need != AckNeed::None {
            self.quick = self.quick.saturating_sub(1);
        }
        self.need = AckNeed::None;
        self.acknowledged = self.nxt;
    }

    /// Whether the next acknowledgement is due at once and tells of octets out of order.
    pub(crate) fn has_report(&self) -> bool {
        self.need == AckNeed::Now && (!self.assembler.is_empty() || self.duplicate.is_some())
    }

    /// The SACK option of the next acknowledgement, at most `limit` blocks.
    pub(crate) fn sack_blocks(&mut self, limit: usize) -> ArrayVec<SackBlock, 4> {
        let mut blocks = ArrayVec::new();
        if let Some((start, end)) = self.duplicate.take() {
            blocks.push(SackBlock { start, end });
        }
        if !self.assembler.is_empty() {
            self.assembler.report(&mut blocks, limit);
        }
        blocks
    }

    // ---- reading ----

    /// Moves readable octets to `out`.
    pub(crate) fn read(&mut self, now: Instant, out: &mut [u8], srtt: Option<Duration>) -> usize {
        let count = self.buffer.copy_out(0, out);
        self.buffer.consume(count);
        self.tuning.copied += count;
        self.tune(now, srtt);
        count
    }

    /// Whether the reader freed so much that the peer should hear of it: the window at least
    /// doubles, as on Linux.
    pub(crate) fn window_update_due(&self, clamp: Option<u32>) -> bool {
        let (offered, wanted) = (self.offered(), self.wanted(clamp));
        wanted >= offered.saturating_mul(2)
            && wanted - offered >= self.mss.min((self.limit / 2) as u32).max(1)
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// The user's own size: auto-tuning ends.
    pub(crate) fn set_limit(&mut self, octets: usize) {
        self.limit = octets;
        self.autotune = false;
    }

    pub(crate) fn fin_consumed(&self) -> bool {
        self.fin.is_some_and(|fin| self.nxt.after(fin))
    }

    /// Gives memory back when all was read.
    pub(crate) fn slim(&mut self) {
        if self.buffer.span() == 0 {
            self.buffer.release();
        }
        self.assembler.clear();
    }

    /// Nothing will arrive any more: what came out of order is of no use.
    pub(crate) fn stop(&mut self) {
        self.assembler.clear();
        self.need = AckNeed::None;
    }

    /// Time in which a whole window arrived bounds the round trip from above.
    fn measure(&mut self, now: Instant) {
        if self.nxt.before(self.tuning.window_end) {
            return;
        }
        let took = now.since(self.tuning.window_since);
        if self.tuning.rtt.is_zero() || took < self.tuning.rtt {
            self.tuning.rtt = took.max(Duration::from_nanos(1));
        }
        self.tuning.window_end = self.edge;
        self.tuning.window_since = now;
    }

    /// Linux's `tcp_rcv_space_adjust`: room for twice what was taken in the last round trip, and
    /// more while that grows.
    fn tune(&mut self, now: Instant, srtt: Option<Duration>) {
        let rtt = match (self.tuning.rtt, srtt) {
            (Duration::ZERO, None) => return,
            (Duration::ZERO, Some(srtt)) => srtt,
            (window, Some(srtt)) => window.min(srtt),
            (window, None) => window,
        };
        if now.since(self.tuning.since) < rtt {
            return;
        }
        let copied = self.tuning.copied;
        if copied > self.tuning.space {
            if self.autotune {
                let growth = copied
                    .saturating_mul(copied - self.tuning.space)
                    .checked_div(self.tuning.space)
                    .unwrap_or(copied);
                let wanted = copied
                    .saturating_mul(2)
                    .saturating_add(16 * self.mss as usize)
                    .saturating_add(growth.min(copied).saturating_mul(2));
                self.limit = self.limit.max(wanted.min(self.limit_max));
            }
            self.tuning.space = copied;
        }
        self.tuning.copied = 0;
        self.tuning.since = now;
    }

    /// Whether the fields agree with each other and stay within bounds.
    pub(crate) fn is_consistent(&self) -> bool {
        let beyond = self.assembler.end().map_or(0, |end| end - self.nxt) as usize;
        // The peer's FIN is the last octet there was, or still to come behind all that came.
        let fin = self.fin.is_none_or(|fin| {
            let awaited = fin.at_or_after(self.nxt)
                && fin.at_or_before(self.edge)
                && self.assembler.end().is_none_or(|end| end.at_or_before(fin));
            awaited || (fin + 1 == self.nxt && self.assembler.is_empty())
        });
        self.scale <= MAX_SCALE
            && (1..=0xffff).contains(&self.mss)
            && self.limit <= LARGEST
            && self.limit_max <= LARGEST
            && self.edge.distance(self.nxt) >= 0
            && self
                .buffer
                .span()
                .max(self.buffer.len() + self.offered() as usize)
                <= LARGEST
            && self.tuning.copied.max(self.tuning.space) <= 1 << 40
            && self.nxt.at_or_after(self.acknowledged)
            && self.assembler.is_consistent(self.nxt, self.edge)
            && self.buffer.len() + beyond <= self.buffer.span()
            && fin
    }
}

#[cfg(test)]
mod tests;
