//! The sending half: the queue of bytes, the part of it in flight, and the peer's window. It selects
//! the bytes to send next; `output` makes segments of them, `recovery` processes acknowledgements.

mod pace;
mod prr;
mod records;
mod recovery;
mod tail;
mod undo;
mod usage;

use core::time::Duration;

use portolan_types::{Instant, SeqNum};

use crate::buffer::LARGEST;
use crate::cc::{Congestion, Rate, bytes_per_second};
use crate::chrono::Activity;
use crate::config::{Config, Options};
use crate::encoding;
use crate::rtt::{MIN_RTO, RttEstimator};
use crate::sack::Scoreboard;
use crate::send_queue::SendQueue;
use pace::Pacer;
use prr::Prr;
use records::Records;
use tail::TailProbe;
use undo::{ForwardRto, Undo};
use usage::CwndValidation;

pub(crate) use recovery::{AckInput, CaState};

/// Payload of the largest IPv4 packet, without headers and timestamps.
pub(crate) const LARGEST_SEGMENT: u32 = 0xffff - 52;

/// This fraction of the window is sent at once, whatever the size of a burst (Linux's `tcp_tso_win_divisor`).
const DEFERRAL_DIVISOR: u32 = 3;
/// Sending may be deferred if the next acknowledgement is due within this time, and within half a round trip.
const DEFERRAL_LIMIT: Duration = Duration::from_millis(1);

/// Segments required behind a path MTU probe, and the minimum congestion window for one (Linux's
/// `tcp_mtu_probe`).
const PROBE_FOLLOWERS: u32 = 4;
const PROBE_WINDOW: u32 = 11;

#[derive(Clone, Debug)]
pub(crate) struct Sender {
    /// Oldest unacknowledged byte; the head of `buffer`.
    pub(crate) una: SeqNum,
    /// Next byte to send for the first time.
    pub(crate) nxt: SeqNum,
    pub(crate) buffer: SendQueue,
    /// A FIN follows the last byte of `buffer`, and is not acknowledged yet.
    pub(crate) fin: bool,
    /// The peer's window and the largest it ever offered, bytes.
    pub(crate) window: u32,
    pub(crate) max_window: u32,
    /// Sequence number of the segment that last updated the window.
    wl1: SeqNum,
    /// Window scale shift of the peer's windows.
    pub(crate) scale: u8,
    /// Payload of a full segment, options deducted.
    pub(crate) mss: u32,
    /// Upper bound of `mss`, as agreed in the handshake.
    pub(crate) mss_limit: u32,
    pub(crate) board: Scoreboard,
    pub(crate) rtt: RttEstimator,
    pub(crate) congestion: Congestion,
    pub(crate) ca_state: CaState,
    prr: Prr,
    undo: Option<Undo>,
    forward_rto: ForwardRto,
    /// Reductions that were undone.
    pub(crate) undone: u64,
    /// Segments that the peer reported as received twice.
    pub(crate) duplicates_reported: u32,
    /// The window was reduced, and the peer has not been told yet (RFC 3168 §6.1.2).
    pub(crate) cwr_pending: bool,
    rate: Rate,
    /// The last sample that was not application-limited: bytes, and the interval in nanoseconds.
    delivery_sample: Option<(u64, u64)>,
    usage: CwndValidation,
    pacer: Pacer,
    tail: TailProbe,
    duplicates: u32,
    /// Bytes that a peer without SACK must have received, judging by its duplicate acknowledgements.
    reno_sacked_out: u32,
    /// The next segment is sent regardless of the congestion window and Nagle's algorithm.
    pub(crate) forced: bool,
    /// End of the last segment that was not full (Minshall's refinement of Nagle).
    short_end: SeqNum,
    /// Bytes up to here are sent without delay, even if corked.
    push_end: SeqNum,
    /// Where segments must end, if any record ends were set.
    records: Option<Box<Records>>,
    pub(crate) last_sent: Instant,
    /// Since when data is outstanding without any acknowledgement.
    pub(crate) stalled_since: Instant,
    /// Time-outs, or unanswered window probes, in a row.
    pub(crate) retries: u32,
    pub(crate) probes: u32,
    limit: usize,
    limit_max: usize,
    autotune: bool,
    /// `send` accepted less than it was given.
    blocked: bool,
    gso_max: u32,
    /// Upper bound of a burst, for a slow link; not encoded.
    burst_limit: Option<u32>,
}

encoding::fields!(Sender {
    una, nxt, buffer, fin, window, max_window, wl1, scale, mss, mss_limit, board, rtt, congestion, ca_state, prr,
    undo, forward_rto, undone, duplicates_reported, cwr_pending, rate, delivery_sample, usage, pacer, tail,
    duplicates, reno_sacked_out, forced, short_end, push_end, records, last_sent, stalled_since, retries, probes,
    limit, limit_max, autotune, blocked, gso_max
} default { burst_limit: None });

/// Bytes to send next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) seq: SeqNum,
    pub(crate) len: u32,
    pub(crate) fin: bool,
    pub(crate) retransmission: bool,
}

impl Sender {
    /// `first` is the sequence number of the first byte of the stream.
    pub(crate) fn new(config: &Config, first: SeqNum, now: Instant) -> Sender {
        let mss = u32::from(config.mss).clamp(1, LARGEST_SEGMENT);
        Sender {
            una: first,
            nxt: first,
            buffer: SendQueue::default(),
            fin: false,
            window: 0,
            max_window: 0,
            wl1: SeqNum(0),
            scale: 0,
            mss,
            mss_limit: mss,
            board: Scoreboard::default(),
            rtt: RttEstimator::default(),
            congestion: Congestion::new(config.congestion, mss),
            ca_state: CaState::Open,
            prr: Prr::default(),
            undo: None,
            forward_rto: ForwardRto::Off,
            undone: 0,
            duplicates_reported: 0,
            cwr_pending: false,
            rate: Rate::default(),
            delivery_sample: None,
            usage: CwndValidation::new(first),
            pacer: Pacer::default(),
            tail: TailProbe::None,
            duplicates: 0,
            reno_sacked_out: 0,
            forced: false,
            short_end: first,
            push_end: first,
            records: None,
            last_sent: now,
            stalled_since: now,
            retries: 0,
            probes: 0,
            limit: config.send_buffer,
            limit_max: config.send_buffer_max.max(config.send_buffer),
            autotune: true,
            blocked: false,
            gso_max: u32::try_from(config.gso_max)
                .unwrap_or(u32::MAX)
                .clamp(1, 65_535),
            burst_limit: None,
        }
    }

    /// The handshake ended with the peer's segment at `seq`; `window` is scaled.
    pub(crate) fn establish(&mut self, seq: SeqNum, window: u32, mss: u32) {
        self.wl1 = seq;
        self.window = window;
        self.max_window = window.max(1);
        self.mss = mss;
        self.congestion.set_initial(self.mss, self.retries);
        self.retries = 0;
        self.rtt.complete_handshake();
    }

    /// The peer has received the first `count` bytes, which were sent with the SYN.
    pub(crate) fn take_early(&mut self, count: u32) {
        self.buffer.consume(count as usize);
        self.una += count;
        self.nxt = self.una;
        self.short_end = self.una;
        self.push_end = self.una;
        self.forget_records();
    }

    // ---- the queue ----

    /// Queues as much of `data` as there is space for.
    pub(crate) fn enqueue(&mut self, data: &[u8]) -> usize {
        let count = data.len().min(self.space());
        self.blocked = count < data.len();
        self.buffer.push(&data[..count]);
        count
    }

    pub(crate) fn space(&self) -> usize {
        self.limit.saturating_sub(self.buffer.len())
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Sets the size chosen by the user: auto-tuning ends.
    pub(crate) fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
        self.autotune = false;
    }

    pub(crate) fn limit_bursts(&mut self, bytes: Option<u32>) {
        self.burst_limit = bytes;
    }

    /// Bytes that may be added to the unsent ones (`TCP_NOTSENT_LOWAT`): at least a burst, until the mark
    /// is reached.
    pub(crate) fn unsent_room(&self, low_water: Option<u32>) -> usize {
        let unsent = self.unsent();
        match low_water {
            Some(mark) if unsent >= mark => 0,
            Some(mark) => (mark - unsent).max(self.gso_max) as usize,
            None => usize::MAX,
        }
    }

    /// A writer found no room, and must be notified when there is some.
    pub(crate) fn note_blocked(&mut self) {
        self.blocked = true;
    }

    /// Whether a segment of `size` may probe the path: enough data follows to detect its loss soon, and
    /// the windows have room for all of it (Linux's `tcp_mtu_probe`).
    pub(crate) fn may_probe_path(&self, size: u32) -> bool {
        let wanted = size + PROBE_FOLLOWERS * self.mss;
        let cwnd = self.congestion.cwnd();
        let window_end = self.una + self.window;
        self.ca_state == CaState::Open
            && self.unsent() >= wanted
            && cwnd >= PROBE_WINDOW * self.mss
            && cwnd.saturating_sub(self.in_flight()) >= size
            && (self.nxt + wanted).at_or_before(window_end)
    }

    /// The next bytes as one segment of `size`, which probes the path.
    pub(crate) fn path_probe(&self, size: u32) -> Chunk {
        self.chunk(self.nxt, size, false)
    }

    /// What the sender is doing, now that nothing is due.
    pub(crate) fn activity(&self) -> Activity {
        let unsent = self.unsent() > 0;
        let window_full = self.nxt.at_or_after(self.una + self.window);
        if self.buffer.len() == 0 && self.board.is_empty() {
            Activity::Idle
        } else if unsent && window_full {
            Activity::WindowLimited
        } else if !unsent && self.blocked {
            Activity::BufferLimited
        } else {
            Activity::Busy
        }
    }

    /// Whether a writer that found no space should try again: a third is free, as on Linux.
    pub(crate) fn take_writable(&mut self, low_water: Option<u32>) -> bool {
        let writable = self.blocked && self.is_writable(low_water);
        self.blocked &= !writable;
        writable
    }

    pub(crate) fn poll_writable(&mut self, low_water: Option<u32>) -> bool {
        let writable = self.is_writable(low_water);
        self.blocked |= !writable;
        writable
    }

    fn is_writable(&self, low_water: Option<u32>) -> bool {
        self.space() > self.buffer.len() / 2
            && low_water.is_none_or(|mark| self.unsent().saturating_mul(2) < mark)
    }

    /// Bytes of `buffer` not sent yet.
    pub(crate) fn unsent(&self) -> u32 {
        let end = self.data_end();
        if self.nxt.after(end) {
            0
        } else {
            end - self.nxt
        }
    }

    /// Whether data or a FIN was never sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent() > 0 || self.fin_unsent()
    }

    /// Whether anything waits to be sent or retransmitted.
    pub(crate) fn has_pending(&self) -> bool {
        self.board.lost() > 0 || self.has_unsent()
    }

    fn fin_unsent(&self) -> bool {
        self.fin && self.nxt.at_or_before(self.data_end())
    }

    pub(crate) fn data_end(&self) -> SeqNum {
        self.una + self.buffer.len() as u32
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.board.is_empty()
    }

    // ---- what goes next ----

    /// When the oldest bytes in flight were last sent; `now` if there are none.
    pub(crate) fn oldest_sent(&self, now: Instant) -> Instant {
        self.board.oldest_sent().unwrap_or(now)
    }

    /// Bytes in flight.
    pub(crate) fn in_flight(&self) -> u32 {
        self.board.in_flight().saturating_sub(self.reno_sacked_out)
    }

    pub(crate) fn next_chunk(&mut self, now: Instant, options: &Options) -> Option<Chunk> {
        // RFC 5682 §3.1 step 2b: sending new data, and no retransmission, shows whether the time-out
        // was spurious.
        if self.forward_rto == ForwardRto::Probing {
            let chunk = self.next_new(now, options);
            if chunk.is_some() || self.has_sent_beyond_ca_state() {
                return chunk;
            }
            self.forward_rto = ForwardRto::Off;
        }
        self.next_retransmission(options)
            .or_else(|| self.next_new(now, options))
    }

    fn next_retransmission(&mut self, options: &Options) -> Option<Chunk> {
        if self.board.lost() == 0 {
            return None;
        }
        let (flight, cwnd) = (self.in_flight(), self.congestion.cwnd());
        if flight >= cwnd && !self.forced {
            self.note_congestion_limited();
            return None;
        }
        let burst = self.burst(options.max_pacing);
        let room = cwnd.saturating_sub(flight).min(burst);
        let limit = (room - room % self.mss).max(self.mss);
        let (seq, bytes) = self.board.first_lost(limit)?;
        Some(self.chunk(seq, bytes, true))
    }

    /// RFC 9293 §3.7.4 [SHLD-7], §3.8.6.2.1 [MUST-38]: window, congestion window, Nagle and silly windows.
    fn next_new(&mut self, now: Instant, options: &Options) -> Option<Chunk> {
        let queued = self.unsent();
        if queued == 0 {
            // A FIN without data needs no window.
            return self.fin_unsent().then(|| self.chunk(self.nxt, 1, false));
        }
        let edge = self.una + self.window;
        let window = if self.nxt.before(edge) {
            edge - self.nxt
        } else {
            0
        };
        let (flight, cwnd) = (self.in_flight(), self.congestion.cwnd());
        if flight >= cwnd && !self.forced {
            self.note_congestion_limited();
            return None;
        }
        let congestion = cwnd.saturating_sub(flight).max(self.mss);
        let room = window.min(congestion);
        if self.forced {
            let bytes = queued.min(window).min(self.mss);
            return (bytes > 0).then(|| self.fresh(bytes, queued));
        }
        if room >= queued && queued <= self.mss {
            return self.next_tail(queued, options);
        }
        let burst = self.burst(options.max_pacing);
        if room >= queued && queued > burst {
            return Some(self.fresh(burst, queued));
        }
        if room >= queued {
            return self.next_tail(queued, options);
        }
        if congestion < window {
            self.note_congestion_limited();
        }
        let full = (room - room % self.mss).min(burst);
        let is_worthwhile = room >= burst || room >= cwnd.min(self.window) / DEFERRAL_DIVISOR;
        if full == 0 || (!is_worthwhile && self.may_defer(now)) {
            // RFC 9293 §3.8.6.2.1 (3): half the largest window is enough.
            let half = room >= self.max_window / 2 && room > 0 && room == window;
            return (full == 0 && half).then(|| self.fresh(room, queued));
        }
        Some(self.fresh(full, queued))
    }

    /// A larger burst soon is better than a small segment now (Linux's `tcp_tso_should_defer`). Defers while the
    /// application writes and an acknowledgement is about to arrive, but not while data may be lost (RFC 3042).
    fn may_defer(&self, now: Instant) -> bool {
        let disorder = self.is_recovering() || self.board.sacked() > 0 || self.reno_sacked_out > 0;
        let (Some(oldest), Some(srtt)) = (self.board.oldest_sent(), self.rtt.smoothed()) else {
            return false;
        };
        !disorder
            && now.since(self.last_sent) <= DEFERRAL_LIMIT
            && (oldest + srtt).since(now) <= DEFERRAL_LIMIT.min(srtt / 2)
    }

    /// The whole queue fits the windows; only a segment that is not full may have to wait.
    fn next_tail(&self, queued: u32, options: &Options) -> Option<Chunk> {
        let short = queued % self.mss;
        let wait = short > 0
            && !self.fin
            && self.push_end.before(self.data_end())
            && (options.cork
                || options.more
                || (!options.nodelay && self.short_end.after(self.una)));
        let bytes = if wait { queued - short } else { queued };
        (bytes > 0).then(|| self.fresh(bytes, queued))
    }

    /// Sends what is queued even if its last segment is not full (Linux's `TCP_NAGLE_PUSH`).
    pub(crate) fn push(&mut self) {
        self.push_end = self.data_end();
    }

    /// A chunk of new bytes; the last one carries the FIN.
    fn fresh(&self, bytes: u32, queued: u32) -> Chunk {
        let fin = self.fin && bytes == queued;
        self.chunk(self.nxt, bytes + u32::from(fin), false)
    }

    /// A chunk that occupies `space` in sequence space; a FIN lies behind the end of the data.
    fn chunk(&self, seq: SeqNum, space: u32, retransmission: bool) -> Chunk {
        let fin = (seq + space).after(self.data_end());
        Chunk {
            seq,
            len: space - u32::from(fin),
            fin,
            retransmission,
        }
    }

    /// The delivery rate measured last, bytes per second.
    pub(crate) fn delivery_rate(&self) -> Option<u64> {
        let (bytes, interval) = self.delivery_sample?;
        bytes_per_second(bytes, interval)
    }

    /// Whether the latest rate sample was application-limited; true before the first sample.
    pub(crate) fn is_rate_limited_by_application(&self) -> bool {
        self.delivery_sample.is_none() || self.rate.is_limited()
    }

    /// `chunk` is sent now.
    pub(crate) fn sent(&mut self, chunk: Chunk, now: Instant, options: &Options) {
        let space = chunk.len + u32::from(chunk.fin);
        let stamp = self.rate.stamp(now, self.in_flight() == 0);
        self.pace(chunk.len, now, options.max_pacing);
        self.prr.sent(space);
        self.note_tail(chunk.seq + space, chunk.retransmission);
        if chunk.retransmission {
            self.note_retransmission(chunk.seq, chunk.seq + space, now);
            self.board.retransmit(chunk.seq, space, now, stamp);
        } else {
            if self.board.is_empty() {
                self.stalled_since = now;
            }
            self.board.push(chunk.seq, chunk.seq + space, now, stamp);
            self.nxt = chunk.seq + space;
            self.note_use();
            if chunk.len < self.mss || !chunk.len.is_multiple_of(self.mss) {
                self.short_end = self.nxt;
            }
        }
        self.forced = false;
        self.last_sent = now;
    }

    /// Called before the first bytes after a pause: RFC 5681 §4.1.
    pub(crate) fn resume(&mut self, now: Instant) {
        if self.board.is_empty() {
            let idle = now.since(self.last_sent);
            self.congestion.resume(now, idle);
            if idle > MIN_RTO {
                self.congestion.on_idle(idle, self.rtt.rto(), self.mss);
            }
        }
    }

    /// Everything queued is sent. Requests for the next segment end here.
    pub(crate) fn note_drained(&mut self) {
        self.forced = false;
        if self.tail == TailProbe::Due {
            self.tail = TailProbe::None;
        }
        let flight = self.in_flight();
        if !self.has_unsent() && self.board.lost() == 0 && flight < self.congestion.cwnd() {
            self.rate.limit(flight);
        }
    }

    /// The bytes of `chunk`.
    pub(crate) fn payload(&self, chunk: Chunk) -> [&[u8]; 2] {
        self.buffer
            .slices((chunk.seq - self.una) as usize, chunk.len as usize)
    }

    /// Checks the bounds of fields that are private to this file.
    pub(crate) fn bounds_hold(&self) -> bool {
        (1..=LARGEST_SEGMENT).contains(&self.mss)
            && (self.mss..=LARGEST_SEGMENT).contains(&self.mss_limit)
            && (1..=0xffff).contains(&self.gso_max)
            && self.limit <= LARGEST
            && self.limit_max <= LARGEST
            && self.reno_sacked_out <= 1 << 30
            && self.rate.is_consistent()
            && self.undo_is_consistent()
            && self.retries.max(self.probes) <= 1 << 24
            && self.short_end.at_or_after(self.una)
            && self.short_end.at_or_before(self.nxt)
            && self.push_end.at_or_after(self.una)
            && self.push_end.at_or_before(self.data_end())
            && self
                .records
                .as_ref()
                .is_none_or(|records| records.is_consistent(self.una, self.data_end()))
    }

    /// Releases memory that an idle sender does not need.
    pub(crate) fn release_buffers(&mut self) {
        if self.buffer.len() == 0 {
            self.buffer.release();
        }
        self.board.shrink();
    }

    /// Nothing more will be sent.
    pub(crate) fn discard(&mut self) {
        self.fin = false;
        self.nxt = self.data_end().max(self.nxt);
        self.board = Scoreboard::default();
        self.una = self.nxt;
        self.short_end = self.nxt;
        self.push_end = self.nxt;
        self.buffer.release();
    }
}
