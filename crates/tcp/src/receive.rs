//! The receiving half: bytes in order and out of order, the window offered to the peer, and when
//! an acknowledgement is due.

use core::time::Duration;
use std::sync::Arc;

use arrayvec::ArrayVec;
use portolan_types::{Instant, Memory, SeqNum};
use portolan_wire::tcp::SackBlock;

use crate::assembler::Assembler;
use crate::buffer::LARGEST;
use crate::config::Config;
use crate::encoding;
use crate::event_counters::{Event, EventCounters};
use crate::queue::{OooRange, Queue};
use crate::rtt::RttEstimator;
use crate::urgent::{Span, Urgent, UrgentMark};

/// Linux's `TCP_DELACK_MIN` and `TCP_ATO_MIN`.
const ACK_DELAY: Duration = Duration::from_millis(40);
/// Linux's `TCP_DELACK_MAX`; RFC 9293 §3.8.6.3 allows half a second [MUST-40].
const ACK_DELAY_MAX: Duration = Duration::from_millis(200);
/// Linux's `TCP_MAX_QUICKACKS`: acknowledgements sent at once before the pattern is known.
const QUICK_ACKS: u8 = 16;
/// Payload of the peer's full segments until one was seen (RFC 9293 §3.7.1; Linux's
/// `tcp_initialize_rcv_mss`).
const ASSUMED_SEGMENT: u32 = 536;
/// Linux's `TCP_INIT_CWND`, segments.
const INITIAL_WINDOW: usize = 10;
/// A value of `stay_behind` that no buffer length reaches.
const NOTHING_STAYS: usize = usize::MAX;
/// RFC 7323 §2.3.
pub(crate) const MAX_SCALE: u8 = 14;

/// How urgent the next acknowledgement is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum AckSchedule {
    None,
    Delayed,
    Now,
}

encoding::variants!(AckSchedule {
    0 => None,
    1 => Delayed,
    2 => Now,
});

#[derive(Clone, Debug)]
pub(crate) struct Receiver {
    /// Sequence number of the next expected byte.
    pub(crate) nxt: SeqNum,
    /// Right edge of the window offered so far; it never moves left (RFC 9293 §3.8.6 [SHLD-14]).
    edge: SeqNum,
    /// The acknowledgement number sent last.
    pub(crate) acknowledged: SeqNum,
    pub(crate) buffer: Queue,
    assembler: Assembler,
    /// Sequence number of the peer's FIN, once known.
    fin: Option<SeqNum>,
    /// Window scale shift of the windows sent by this side.
    pub(crate) scale: u8,
    /// Payload of the peer's full segments.
    pub(crate) mss: u32,
    limit: usize,
    limit_max: usize,
    autotune: bool,
    need: AckSchedule,
    /// The largest payload received in one segment.
    pub(crate) segment: u32,
    /// Acknowledgements to send immediately before they may be delayed.
    quickack: u8,
    /// Interactive session: acknowledgements are carried by the user's answers.
    pub(crate) pingpong: bool,
    /// How long an acknowledgement is delayed, adapted to the rate of arrivals (Linux's `ato`); zero
    /// before the first.
    ato: Duration,
    pub(crate) urgent: Option<Urgent>,
    /// Sequence space that arrived in order, and the number of segments that arrived out of order.
    pub(crate) received: u64,
    pub(crate) out_of_order: u64,
    /// A range that was received twice (RFC 2883).
    duplicate: Option<(SeqNum, SeqNum)>,
    tuning: Tuning,
    pub(crate) last_data: Instant,
    /// Bytes of shared buffers that the program has not returned yet. They count against the window and are not
    /// encoded.
    lent: usize,
    /// The payload of the next segment may stay in its frame if the buffer then holds this many bytes.
    stay_behind: usize,
    /// Bytes of the last payload that stay in their frame.
    staying: usize,
}

encoding::fields!(Receiver {
    nxt,
    edge,
    acknowledged,
    buffer,
    assembler,
    fin,
    scale,
    mss,
    limit,
    limit_max,
    autotune,
    need,
    segment,
    quickack,
    pingpong,
    ato,
    urgent,
    received,
    out_of_order,
    duplicate,
    tuning,
    last_data
} default {
    lent: 0,
    stay_behind: NOTHING_STAYS,
    staying: 0
});

/// Dynamic right-sizing: the buffer follows what the application reads in a round trip.
#[derive(Clone, Debug, Default)]
struct Tuning {
    since: Instant,
    copied: usize,
    /// The most read in one round trip.
    space: usize,
    /// Round trip estimated from the time a whole window takes to arrive; zero before the first.
    rtt: Duration,
    window_end: SeqNum,
    window_since: Instant,
}

encoding::fields!(Tuning {
    since,
    copied,
    space,
    rtt,
    window_end,
    window_since
});

/// The effect of a segment's payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AcceptedPayload {
    /// Bytes became readable.
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
            buffer: Queue::default(),
            assembler: Assembler::default(),
            fin: None,
            scale: 0,
            mss: u32::from(config.mss).max(1),
            limit: config.receive_buffer,
            limit_max: config.receive_buffer_max.max(config.receive_buffer),
            autotune: true,
            need: AckSchedule::None,
            segment: ASSUMED_SEGMENT.min(u32::from(config.mss).max(1)),
            quickack: 0,
            pingpong: false,
            ato: Duration::ZERO,
            urgent: None,
            received: 0,
            out_of_order: 0,
            duplicate: None,
            tuning: Tuning::default(),
            last_data: Instant::ZERO,
            lent: 0,
            stay_behind: NOTHING_STAYS,
            staying: 0,
        }
    }

    /// The smallest shift with which the largest buffer can be offered (RFC 7323 §2.3).
    pub(crate) fn wanted_scale(&self, clamp: Option<u32>) -> u8 {
        let largest = self.limit_max.min(most(clamp));
        (0..MAX_SCALE)
            .find(|&s| largest >> s <= 0xffff)
            .unwrap_or(MAX_SCALE)
    }

    /// The peer's SYN carried `irs`; windows in SYN segments are unscaled.
    pub(crate) fn synchronize(&mut self, irs: SeqNum, clamp: Option<u32>, now: Instant) {
        let offered = self.offer_unscaled(clamp);
        self.nxt = irs + 1;
        self.acknowledged = self.nxt;
        self.edge = self.nxt + u32::from(offered);
        // The SYN counts as data here; Linux counts from the handshake, too.
        self.last_data = now;
        self.tuning.since = now;
        self.tuning.window_end = self.edge;
        self.tuning.window_since = now;
    }

    /// The buffer grows from the first window (Linux's `tcp_init_buffer_space`).
    pub(crate) fn start_tuning(&mut self) {
        self.tuning.space = self.limit.min(INITIAL_WINDOW * self.mss as usize);
    }

    // ---- the window ----

    /// The window of a SYN; at least the window that an earlier SYN offered (RFC 9293 §3.8.6).
    pub(crate) fn offer_unscaled(&mut self, clamp: Option<u32>) -> u16 {
        let first = self.limit.min(most(clamp)).min(0xffff) as u32;
        let window = self.offered().max(first);
        self.edge = self.nxt + window;
        u16::try_from(window).unwrap_or(u16::MAX)
    }

    /// The window to offer now, bytes; moves the edge.
    pub(crate) fn offer(&mut self, clamp: Option<u32>) -> u32 {
        if let Some(window) = self.larger_window(clamp) {
            self.edge = self.nxt + window;
            return window;
        }
        // Rounding up, even by less than a granule, would offer more than before.
        self.offered() & !self.granule()
    }

    /// RFC 9293 §3.8.6.2.2 [MUST-39]: the edge does not move in small steps. What scaling leaves of a step counts.
    fn larger_window(&self, clamp: Option<u32>) -> Option<u32> {
        let offered = self.offered();
        let step = (self.limit / 2).min(self.mss as usize) as u32;
        let wanted = self.wanted(clamp) & !self.granule();
        let window = wanted.min(0xffff << self.scale);
        (window > offered && wanted - offered >= step).then_some(window)
    }

    /// Bits of a window that scaling removes.
    fn granule(&self) -> u32 {
        (1 << self.scale) - 1
    }

    /// The unused part of the window offered last.
    pub(crate) fn offered(&self) -> u32 {
        if self.nxt.before(self.edge) {
            self.edge - self.nxt
        } else {
            0
        }
    }

    fn wanted(&self, clamp: Option<u32>) -> u32 {
        let free = self.limit.saturating_sub(self.buffer.len() + self.lent);
        u32::try_from(free)
            .unwrap_or(u32::MAX)
            .min(clamp.unwrap_or(u32::MAX))
            .min(1 << 30)
    }

    /// RFC 9293 §3.10.7.4, first, read as Linux does: some part of the segment lies between the
    /// acknowledged number and the edge; a segment that just touches this range is acceptable, too.
    pub(crate) fn acceptable(&self, seq: SeqNum, end: SeqNum) -> bool {
        end.at_or_after(self.acknowledged) && seq.at_or_before(self.edge)
    }

    /// Whether `seq` is a sequence number that the peer may still use (RFC 5961 §3.2).
    pub(crate) fn in_window(&self, seq: SeqNum) -> bool {
        seq.at_or_after(self.nxt) && (seq.before(self.edge) || seq == self.nxt)
    }

    // ---- arrival ----

    /// Whether `len` bytes at `seq` are exactly the next expected bytes and fit the window.
    pub(crate) fn is_next(&self, seq: SeqNum, len: usize) -> bool {
        seq == self.nxt
            && len <= self.offered() as usize
            && self.assembler.is_empty()
            && self.fin.is_none()
    }

    /// Appends the next bytes, which are in order and fit the window: the fast path.
    pub(crate) fn append(&mut self, now: Instant, payload: &[u8], rtt: &RttEstimator) {
        self.note_text(now, payload.len(), rtt);
        let may_stay = self.stay_behind != NOTHING_STAYS;
        if may_stay && self.buffer.len() == self.stay_behind && self.urgent.is_none() {
            self.leave(payload.len());
        } else {
            self.buffer.push(payload);
        }
        self.nxt += payload.len() as u32;
        self.received += payload.len() as u64;
        self.measure(now);
        self.want_ack(self.prompt_or_delayed());
    }

    fn prompt_or_delayed(&self) -> AckSchedule {
        if self.quickack > 0 && !self.pingpong {
            AckSchedule::Now
        } else {
            AckSchedule::Delayed
        }
    }

    /// Learns the peer's segment size and rate from arriving data (Linux's `tcp_measure_rcv_mss` and
    /// `tcp_event_data_recv`).
    fn note_text(&mut self, now: Instant, len: usize, rtt: &RttEstimator) {
        self.segment = self
            .segment
            .max(u32::try_from(len).unwrap_or(u32::MAX).min(self.mss));
        let gap = now.since(self.last_data);
        self.last_data = now;
        if self.ato.is_zero() {
            self.ato = ACK_DELAY;
            self.be_quick();
        } else if gap <= ACK_DELAY / 2 {
            self.ato = self.ato / 2 + ACK_DELAY / 2;
        } else if gap < self.ato {
            self.ato = (self.ato / 2 + gap).min(rtt.rto());
        } else if gap > rtt.rto() {
            // The peer restarts from idle: its window grows faster with every acknowledgement.
            self.be_quick();
        }
    }

    fn be_quick(&mut self) {
        let count = (self.offered() / (2 * self.segment.max(1))).clamp(2, u32::from(QUICK_ACKS));
        self.quickack = self.quickack.max(count as u8);
    }

    /// The segment brought nothing new: the peer needs frequent acknowledgements (Linux's
    /// `tcp_enter_quickack_mode`).
    fn enter_quickack(&mut self) {
        self.be_quick();
        self.pingpong = false;
        self.ato = ACK_DELAY;
    }

    /// `TCP_QUICKACK`: a pending acknowledgement is sent now, and later ones do not wait for answers
    /// until the session is interactive again.
    pub(crate) fn ack_quickly(&mut self) {
        self.pingpong = false;
        if self.need == AckSchedule::Delayed {
            self.need = AckSchedule::Now;
        }
    }

    /// Clears `TCP_QUICKACK`.
    pub(crate) fn ack_lazily(&mut self) {
        self.pingpong = true;
    }

    /// The delay has expired and no segment carried the acknowledgement (Linux's
    /// `tcp_delack_timer_handler`).
    pub(crate) fn on_delay_expired(&mut self, rtt: &RttEstimator) {
        if self.pingpong {
            self.pingpong = false;
            self.ato = ACK_DELAY;
        } else {
            self.ato = (2 * self.ato).min(rtt.rto());
        }
        self.want_ack(AckSchedule::Now);
    }

    /// RFC 9293 §3.10.7.4, seventh and eighth: payload and FIN of an acceptable segment.
    pub(crate) fn arrive(
        &mut self,
        now: Instant,
        seq: SeqNum,
        payload: &[u8],
        fin: bool,
        rtt: &RttEstimator,
    ) -> AcceptedPayload {
        let before = self.nxt;
        let end = seq + payload.len() as u32;
        if fin && self.fin.is_none() && end.at_or_after(self.nxt) && end.at_or_before(self.edge) {
            self.fin = Some(end);
            // As Linux: data beyond the FIN is discarded.
            self.assembler.truncate(end);
        }
        if !payload.is_empty() || fin {
            self.note_text(now, payload.len(), rtt);
            self.store(seq, payload);
        }
        let readable = self.nxt != before;
        let finished = self.fin == Some(self.nxt);
        if finished {
            self.nxt += 1;
            self.edge = self.edge.max(self.nxt);
            self.want_ack(AckSchedule::Now);
        }
        self.received += u64::from(self.nxt - before);
        if readable {
            self.measure(now);
        }
        AcceptedPayload { readable, finished }
    }

    /// Stores the part of `payload` that is new and inside the window.
    fn store(&mut self, seq: SeqNum, payload: &[u8]) {
        let end = seq + payload.len() as u32;
        let start = seq.max(self.nxt);
        let stop = end.min(self.fin.map_or(self.edge, |fin| fin.min(self.edge)));
        if !start.before(stop) {
            // All of it was received before, or lies beyond the window.
            if seq.before(self.nxt) && seq != end {
                self.duplicate = Some((seq, end.min(self.nxt)));
                self.enter_quickack();
            }
            self.want_ack(AckSchedule::Now);
            return;
        }
        if self.assembler.covers(start, stop) {
            // RFC 2883 §4: the range that contains the duplicate is reported after it.
            self.assembler.note(start);
            self.duplicate = Some((start, stop));
            self.want_ack(AckSchedule::Now);
            return;
        }
        if seq.before(self.nxt) {
            self.duplicate = Some((seq, self.nxt));
            self.want_ack(AckSchedule::Now);
        } else if let Some(kept) = self.assembler.first_overlap(start, stop) {
            // Like Linux, reports only the first such range.
            self.duplicate = Some(kept);
        }
        let text = &payload[(start - seq) as usize..(stop - seq) as usize];
        let offset = self.buffer.len() + (start - self.nxt) as usize;
        if start == self.nxt {
            self.take_in_order(offset, text, stop);
        } else {
            if self.assembler.insert(start, stop) {
                self.buffer.write_at(offset, text);
            }
            self.out_of_order += 1;
            self.want_ack(AckSchedule::Now);
        }
    }

    fn take_in_order(&mut self, offset: usize, text: &[u8], stop: SeqNum) {
        let fills_gap = !self.assembler.is_empty();
        self.buffer.write_at(offset, text);
        let reached = self.assembler.advance(stop);
        self.buffer.extend((reached - self.nxt) as usize);
        self.nxt = reached;
        // RFC 5681 §4.2: acknowledge at once when a gap is filled.
        self.want_ack(if fills_gap {
            AckSchedule::Now
        } else {
            self.prompt_or_delayed()
        });
    }

    /// `len` bytes at `seq` lie outside the window: the peer must be told where it is.
    pub(crate) fn reject(&mut self, seq: SeqNum, len: u32) {
        if len > 0 && (seq + len).at_or_before(self.nxt) {
            self.duplicate = Some((seq, seq + len));
            self.enter_quickack();
        }
        self.want_ack(AckSchedule::Now);
    }

    // ---- acknowledgements ----

    pub(crate) fn want_ack(&mut self, need: AckSchedule) {
        self.need = self.need.max(need);
    }

    pub(crate) fn owes_ack(&self) -> bool {
        self.need != AckSchedule::None
    }

    /// Whether an acknowledgement without data is due: RFC 9293 §3.8.6.3 requires one for at least
    /// every second full segment [SHLD-19]. As on Linux, full means the largest size seen.
    pub(crate) fn ack_due(&self) -> bool {
        match self.need {
            AckSchedule::None => false,
            AckSchedule::Now => true,
            AckSchedule::Delayed => self.nxt - self.acknowledged > self.segment,
        }
    }

    /// Whether the acknowledgement is due only because more than one full segment, but not two, has arrived. RFC 9293
    /// requires one for every second segment; Linux sends it slightly earlier.
    pub(crate) fn ack_may_wait(&self) -> bool {
        self.need == AckSchedule::Delayed && self.nxt - self.acknowledged < 2 * self.segment
    }

    /// When a delayed acknowledgement must be sent (Linux's `tcp_send_delayed_ack`).
    pub(crate) fn ack_deadline(&self, now: Instant, rtt: &RttEstimator) -> Option<Instant> {
        (self.need == AckSchedule::Delayed).then(|| now + self.ack_delay(rtt))
    }

    fn ack_delay(&self, rtt: &RttEstimator) -> Duration {
        let longest = rtt
            .smoothed()
            .map_or(ACK_DELAY_MAX, |srtt| srtt.clamp(ACK_DELAY, ACK_DELAY_MAX));
        self.ato.clamp(ACK_DELAY, longest)
    }

    /// The round trip estimated from the time a whole window takes to arrive; zero before the first.
    pub(crate) fn measured_rtt(&self) -> Duration {
        self.tuning.rtt
    }

    /// The most read in one round trip.
    pub(crate) fn space(&self) -> u32 {
        u32::try_from(self.tuning.space).unwrap_or(u32::MAX)
    }

    /// The value of `tcpi_ato`.
    pub(crate) fn ato(&self) -> Duration {
        self.ato
    }

    /// A segment that acknowledges `nxt` is sent; `data` if it carries payload.
    pub(crate) fn acknowledge(&mut self, now: Instant, data: bool) {
        if data && now.since(self.last_data) < self.ato {
            self.pingpong = true;
        }
        if self.need != AckSchedule::None && self.quickack > 0 {
            self.quickack -= 1;
            if self.quickack == 0 {
                self.ato = ACK_DELAY;
            }
        }
        self.need = AckSchedule::None;
        self.acknowledged = self.nxt;
    }

    /// Whether the next acknowledgement is due at once and reports out-of-order data.
    pub(crate) fn has_report(&self) -> bool {
        self.need == AckSchedule::Now && (!self.assembler.is_empty() || self.duplicate.is_some())
    }

    /// Whether any out-of-order data has not been reported to the peer.
    pub(crate) fn has_news(&self) -> bool {
        self.assembler.has_news()
    }

    /// The SACK option of the next acknowledgement, at most `limit` blocks.
    pub(crate) fn sack_blocks(
        &mut self,
        limit: usize,
        event_counters: &mut EventCounters,
    ) -> ArrayVec<SackBlock, 4> {
        let mut blocks = ArrayVec::new();
        if let Some((start, end)) = self.duplicate.take() {
            event_counters.count(Event::ReportOut);
            blocks.push(SackBlock { start, end });
        }
        if !self.assembler.is_empty() {
            self.assembler.report(&mut blocks, limit);
        }
        blocks
    }

    // ---- shared buffers ----

    /// Leaves the next payload in its frame, if it arrives in order while the buffer holds `behind` bytes. Ends with
    /// [`Receiver::stay`], which returns how much of it was left.
    pub(crate) fn let_stay(&mut self, behind: usize) {
        self.stay_behind = behind;
    }

    #[cold]
    fn leave(&mut self, count: usize) {
        self.staying = count;
        self.lent += count;
        if self.autotune {
            // Bytes held by the reader must not reduce the window of a round trip.
            let room = self
                .tuning
                .space
                .saturating_add(self.lent)
                .saturating_mul(2);
            self.limit = self.limit.max(room.min(self.limit_max));
        }
    }

    pub(crate) fn stay(&mut self) -> usize {
        self.stay_behind = NOTHING_STAYS;
        std::mem::take(&mut self.staying)
    }

    /// Stores bytes left in their frames behind the first `behind` bytes of the buffer.
    pub(crate) fn take_back<'a>(
        &mut self,
        behind: usize,
        pieces: impl DoubleEndedIterator<Item = &'a [u8]>,
    ) {
        let mut first = vec![0; behind.min(self.buffer.len())];
        let count = self.buffer.copy_out(0, &mut first);
        self.buffer.consume(count);
        for piece in pieces.rev() {
            self.buffer.unread(piece);
            self.give_back(piece.len());
        }
        self.buffer.unread(&first);
    }

    /// The program has received `count` bytes that were left in their frames.
    pub(crate) fn note_taken(&mut self, now: Instant, count: usize, srtt: Option<Duration>) {
        self.tuning.copied += count;
        self.tune(now, srtt);
    }

    /// The program has returned `count` bytes.
    pub(crate) fn give_back(&mut self, count: usize) {
        self.lent = self.lent.saturating_sub(count);
    }

    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    // ---- reading ----

    /// Moves readable bytes to `out`.
    pub(crate) fn read(
        &mut self,
        now: Instant,
        out: &mut [u8],
        srtt: Option<Duration>,
        place: UrgentMark,
    ) -> usize {
        let count = if self.urgent.is_none() {
            let count = self.buffer.copy_out(0, out);
            self.buffer.consume(count);
            count
        } else {
            self.read_to_mark(out, place)
        };
        self.tuning.copied += count;
        self.tune(now, srtt);
        count
    }

    /// Puts back the bytes read last, which the application has not consumed.
    pub(crate) fn unread(&mut self, bytes: &[u8]) {
        self.buffer.unread(bytes);
        self.tuning.copied = self.tuning.copied.saturating_sub(bytes.len());
    }

    fn read_to_mark(&mut self, out: &mut [u8], place: UrgentMark) -> usize {
        if out.is_empty() {
            return 0;
        }
        let Span { skip, len } = self.span(place);
        let room = out.len().min(len);
        let count = self.buffer.copy_out(skip, &mut out[..room]);
        self.buffer.consume(skip + count);
        if self
            .urgent
            .is_some_and(|urgent| self.head().after(urgent.seq))
        {
            self.urgent = None;
        }
        count
    }

    /// Copies readable bytes, starting at `offset`.
    pub(crate) fn peek(&self, offset: usize, out: &mut [u8], place: UrgentMark) -> usize {
        let Span { skip, len } = self.span(place);
        let room = out.len().min(len.saturating_sub(offset));
        self.buffer.copy_out(skip + offset, &mut out[..room])
    }

    /// Bytes that a read returns at once.
    pub(crate) fn readable(&self, place: UrgentMark) -> usize {
        self.span(place).len
    }

    fn span(&self, place: UrgentMark) -> Span {
        let queued = self.buffer.len();
        match self.urgent {
            Some(urgent) => urgent.span(self.head(), queued, place),
            None => Span {
                skip: 0,
                len: queued,
            },
        }
    }

    /// Sequence number of the next byte to be read.
    fn head(&self) -> SeqNum {
        self.nxt - u32::from(self.fin_consumed()) - self.buffer.len() as u32
    }

    // ---- urgent data ----

    /// The peer's urgent pointer names the byte `seq` (Linux's `tcp_check_urg`). Returns true if the
    /// mark is new.
    pub(crate) fn mark_urgent(&mut self, seq: SeqNum, place: UrgentMark) -> bool {
        let known = self.urgent.is_some_and(|u| seq.at_or_before(u.seq));
        if seq.before(self.nxt) || known || self.fin.is_some() {
            return false;
        }
        if self.is_at_mark() && place == UrgentMark::Aside && self.buffer.len() > 0 {
            // The byte of the earlier mark is lost if it was not read.
            self.buffer.consume(1);
        }
        self.urgent = Some(Urgent { seq, taken: false });
        true
    }

    /// Whether the reader is at the urgent mark (`SIOCATMARK`).
    pub(crate) fn is_at_mark(&self) -> bool {
        self.urgent.is_some_and(|urgent| urgent.seq == self.head())
    }

    /// Whether an urgent byte has arrived that was not read out of band.
    pub(crate) fn has_urgent(&self) -> bool {
        self.urgent
            .is_some_and(|urgent| !urgent.taken && self.urgent_offset(urgent).is_some())
    }

    fn urgent_offset(&self, urgent: Urgent) -> Option<usize> {
        let here = urgent.seq.before(self.nxt) || self.assembler.covers(urgent.seq, urgent.seq + 1);
        let offset = usize::try_from(urgent.seq.distance(self.head())).ok()?;
        (here && offset < self.buffer.span()).then_some(offset)
    }

    /// The urgent byte, if it has arrived.
    pub(crate) fn urgent_byte(&self) -> Option<u8> {
        let offset = self.urgent_offset(self.urgent?)?;
        self.buffer.byte(offset)
    }

    /// `FIONREAD` (Linux's `tcp_inq`): bytes before the mark, if there is one ahead.
    pub(crate) fn inquiry(&self, place: UrgentMark) -> usize {
        let queued = self.buffer.len();
        match self.urgent {
            Some(urgent) if place == UrgentMark::Aside => {
                let before = usize::try_from(urgent.seq.distance(self.head())).unwrap_or(queued);
                before.min(queued)
            }
            _ => queued,
        }
    }

    /// Whether the reader has freed enough to send a window update: the window at least doubles, as
    /// on Linux, and would not last for two more round trips anyway.
    pub(crate) fn window_update_due(&self, clamp: Option<u32>) -> bool {
        let offered = self.offered();
        let plenty = self.tuning.space.saturating_mul(2);
        (offered as usize) < plenty.max(1)
            && self.wanted(clamp) >= offered.saturating_mul(2)
            && self.larger_window(clamp).is_some()
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Sets the size chosen by the user: auto-tuning ends.
    pub(crate) fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
        self.autotune = false;
    }

    pub(crate) fn fin_consumed(&self) -> bool {
        self.fin.is_some_and(|fin| self.nxt.after(fin))
    }

    /// Reads everything that has arrived from `memory`, which holds a copy, from now on. Returns false if its length
    /// differs.
    pub(crate) fn set_aside(&mut self, memory: Arc<dyn Memory>) -> bool {
        let fits = memory.bytes().len() == self.buffer.span();
        if fits {
            let (behind, next) = (self.buffer.len() as u32, self.nxt);
            let ranges = self.assembler.ranges();
            let ooo_ranges = ranges.map(|(start, end)| OooRange {
                start: behind + (start - next),
                end: behind + (end - next),
            });
            self.buffer.replace(memory, ooo_ranges);
        }
        fits
    }

    /// Releases the memory if everything was read.
    pub(crate) fn release_buffers(&mut self) {
        if self.buffer.len() == 0 {
            self.buffer.release();
        }
        self.assembler.clear();
    }

    /// Nothing more will arrive: out-of-order data is of no use.
    pub(crate) fn stop(&mut self) {
        self.assembler.clear();
        self.need = AckSchedule::None;
    }

    /// The time in which a whole window arrives is an upper bound of the round trip.
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

    /// Linux's `tcp_rcv_space_adjust`: room for twice what was read in the last round trip, and more
    /// while that grows.
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

    /// Whether the fields are consistent with each other and within bounds.
    pub(crate) fn is_consistent(&self) -> bool {
        let beyond = self.assembler.end().map_or(0, |end| end - self.nxt) as usize;
        // The peer's FIN is either the last byte received, or still expected behind everything received.
        let fin = self.fin.is_none_or(|fin| {
            let awaited = fin.at_or_after(self.nxt)
                && fin.at_or_before(self.edge)
                && self.assembler.end().is_none_or(|end| end.at_or_before(fin));
            awaited || (fin + 1 == self.nxt && self.assembler.is_empty())
        });
        let urgent = self
            .urgent
            .is_none_or(|urgent| urgent.seq.at_or_after(self.head()));
        self.scale <= MAX_SCALE
            && urgent
            && (1..=0xffff).contains(&self.mss)
            && (1..=0xffff).contains(&self.segment)
            && self.ato <= Duration::from_secs(1 << 20)
            && self.received.max(self.out_of_order) < 1 << 62
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
            && self.buffer.is_consistent()
            && self.buffer.len() + beyond <= self.buffer.span()
            && fin
    }
}

/// The largest size that a clamp permits.
fn most(clamp: Option<u32>) -> usize {
    clamp.map_or(usize::MAX, |clamp| clamp as usize)
}

#[cfg(test)]
mod tests;
