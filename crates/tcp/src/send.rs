//! The sending half: the queue of octets, what of it is in flight, the peer's window, loss
//! recovery. It decides which octets go next; `output` makes segments of them.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::SackBlock;
use serde::{Deserialize, Serialize};

use crate::buffer::{ByteRing, LARGEST};
use crate::cc::{Acknowledged, Congestion};
use crate::config::{Config, Options};
use crate::rtt::RttEstimator;
use crate::sack::{Delivery, Scoreboard};

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

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sender {
    /// Oldest unacknowledged octet; the head of `buffer`.
    pub(crate) una: SeqNum,
    /// Next octet to send for the first time.
    pub(crate) nxt: SeqNum,
    pub(crate) buffer: ByteRing,
    /// A FIN follows the last octet of `buffer`, and is not acknowledged yet.
    pub(crate) fin: bool,
    /// The peer's window and the largest it ever offered, octets.
    pub(crate) window: u32,
    pub(crate) max_window: u32,
    wl1: SeqNum,
    wl2: SeqNum,
    /// Shift of the windows that the peer sends.
    pub(crate) scale: u8,
    /// Payload of a full segment, options deducted.
    pub(crate) mss: u32,
    pub(crate) board: Scoreboard,
    pub(crate) rtt: RttEstimator,
    pub(crate) congestion: Congestion,
    pub(crate) episode: Episode,
    duplicates: u32,
    /// Segments that a peer without SACK must have received, by its duplicates (octets).
    departed: u32,
    /// The next segment goes out whatever the congestion window or Nagle say.
    pub(crate) forced: bool,
    /// End of the last segment that was not full (Minshall's refinement of Nagle).
    short_end: SeqNum,
    /// The congestion window, not the application, held back the last transmission.
    pub(crate) congestion_limited: bool,
    pub(crate) last_sent: Instant,
    /// Since when nothing was acknowledged although something was outstanding.
    pub(crate) stalled_since: Instant,
    /// Time-outs, or unanswered window probes, in a row.
    pub(crate) retries: u32,
    pub(crate) probes: u32,
    /// The tail was probed since the last progress.
    tail_probed: bool,
    limit: usize,
    limit_max: usize,
    autotune: bool,
    /// `send` took less than it was given.
    blocked: bool,
    gso_max: u32,
}

/// Octets that go out next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) seq: SeqNum,
    pub(crate) len: u32,
    pub(crate) fin: bool,
    pub(crate) retransmission: bool,
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
    /// `first` is the sequence number of the first octet of the stream.
    pub(crate) fn new(config: &Config, first: SeqNum, now: Instant) -> Sender {
        let mss = u32::from(config.mss).max(1);
        Sender {
            una: first,
            nxt: first,
            buffer: ByteRing::default(),
            fin: false,
            window: 0,
            max_window: 0,
            wl1: SeqNum(0),
            wl2: first,
            scale: 0,
            mss,
            board: Scoreboard::default(),
            rtt: RttEstimator::default(),
            congestion: Congestion::new(config.congestion, mss),
            episode: Episode::Open,
            duplicates: 0,
            departed: 0,
            forced: false,
            short_end: first,
            congestion_limited: false,
            last_sent: now,
            stalled_since: now,
            retries: 0,
            probes: 0,
            tail_probed: false,
            limit: config.send_buffer,
            limit_max: config.send_buffer_max.max(config.send_buffer),
            autotune: true,
            blocked: false,
            gso_max: u32::try_from(config.gso_max)
                .unwrap_or(u32::MAX)
                .clamp(1, 65_535),
        }
    }

    /// The handshake ended with this segment of the peer; `window` is scaled.
    pub(crate) fn establish(&mut self, seq: SeqNum, window: u32, mss: u32) {
        self.wl1 = seq;
        self.wl2 = self.una;
        self.window = window;
        self.max_window = window.max(1);
        self.mss = mss.max(1);
        self.congestion.set_initial(self.mss);
        self.retries = 0;
        self.rtt.reset_backoff();
    }

    // ---- the queue ----

    /// Takes as much of `data` as there is space for.
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

    /// The user's own size: auto-tuning ends.
    pub(crate) fn set_limit(&mut self, octets: usize) {
        self.limit = octets;
        self.autotune = false;
    }

    /// Whether a writer that found no space should try again: a third is free, as on Linux.
    pub(crate) fn take_writable(&mut self) -> bool {
        let writable = self.blocked && self.space() >= self.buffer.len() / 2;
        self.blocked &= !writable;
        writable
    }

    /// Octets of `buffer` not sent yet.
    pub(crate) fn unsent(&self) -> u32 {
        let end = self.data_end();
        if self.nxt.after(end) {
            0
        } else {
            end - self.nxt
        }
    }

    /// Whether anything, a FIN included, was never sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent() > 0 || self.fin_unsent()
    }

    fn fin_unsent(&self) -> bool {
        self.fin && self.nxt.at_or_before(self.data_end())
    }

    fn data_end(&self) -> SeqNum {
        self.una + self.buffer.len() as u32
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.board.is_empty()
    }

    // ---- what goes next ----

    /// Octets in the network.
    pub(crate) fn in_flight(&self) -> u32 {
        self.board.in_flight().saturating_sub(self.departed)
    }

    pub(crate) fn next_chunk(&mut self, options: &Options) -> Option<Chunk> {
        self.next_retransmission()
            .or_else(|| self.next_new(options))
    }

    fn next_retransmission(&mut self) -> Option<Chunk> {
        if self.board.lost() == 0 {
            return None;
        }
        let (flight, cwnd) = (self.in_flight(), self.congestion.cwnd());
        if flight >= cwnd && !self.forced {
            return None;
        }
        let room = cwnd.saturating_sub(flight).min(self.gso_max);
        let limit = (room - room % self.mss).max(self.mss);
        let (seq, octets) = self.board.first_lost(limit)?;
        Some(self.chunk(seq, octets, true))
    }

    /// RFC 9293 §3.7.4, §3.8.6.2.1: window, congestion window, Nagle and silly windows.
    fn next_new(&mut self, options: &Options) -> Option<Chunk> {
        let queued = self.unsent();
        if queued == 0 {
            // A lone FIN needs no window.
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
            self.congestion_limited = true;
            return None;
        }
        let congestion = cwnd.saturating_sub(flight).max(self.mss);
        let room = window.min(congestion);
        if self.forced {
            let octets = queued.min(window).min(self.mss);
            return (octets > 0).then(|| self.fresh(octets, queued));
        }
        if room >= queued {
            return self.next_tail(queued, options);
        }
        self.congestion_limited = congestion < window;
        let full = (room - room % self.mss).min(self.gso_burst());
        // A burst soon to come is worth more than a piece now (as Linux's TSO deferral).
        let worthwhile = self.gso_burst().min(queued).min(cwnd.min(self.window) / 4);
        if full == 0 || (full < worthwhile && flight > 0) {
            // RFC 9293 §3.8.6.2.1 (3): half the largest window is enough.
            let half = room >= self.max_window / 2 && room > 0 && room == window;
            return (full == 0 && half).then(|| self.fresh(room, queued));
        }
        Some(self.fresh(full, queued))
    }

    /// All of the queue fits the windows; only a piece short of a segment may have to wait.
    fn next_tail(&self, queued: u32, options: &Options) -> Option<Chunk> {
        let burst = self.gso_burst();
        if queued > burst {
            return Some(self.fresh(burst, queued));
        }
        let short = queued % self.mss;
        let wait = short > 0
            && !self.fin
            && (options.cork || (!options.nodelay && self.short_end.after(self.una)));
        let octets = if wait { queued - short } else { queued };
        (octets > 0).then(|| self.fresh(octets, queued))
    }

    fn gso_burst(&self) -> u32 {
        (self.gso_max - self.gso_max % self.mss).max(self.mss)
    }

    /// New octets; the FIN rides on the last of them.
    fn fresh(&self, octets: u32, queued: u32) -> Chunk {
        let fin = self.fin && octets == queued;
        self.chunk(self.nxt, octets + u32::from(fin), false)
    }

    /// A chunk of `space` in sequence space; a FIN lies behind the end of the data.
    fn chunk(&self, seq: SeqNum, space: u32, retransmission: bool) -> Chunk {
        let fin = (seq + space).after(self.data_end());
        Chunk {
            seq,
            len: space - u32::from(fin),
            fin,
            retransmission,
        }
    }

    /// `chunk` goes out now.
    pub(crate) fn sent(&mut self, chunk: Chunk, now: Instant) {
        let space = chunk.len + u32::from(chunk.fin);
        if chunk.retransmission {
            self.board.retransmit(chunk.seq, space, now);
        } else {
            if self.board.is_empty() {
                self.stalled_since = now;
            }
            self.board.push(chunk.seq, chunk.seq + space, now);
            self.nxt = chunk.seq + space;
            if !chunk.len.is_multiple_of(self.mss) {
                self.short_end = self.nxt;
            }
        }
        self.forced = false;
        self.last_sent = now;
    }

    /// Before the first octets after a pause: RFC 5681 §4.1.
    pub(crate) fn resume(&mut self, now: Instant) {
        let (idle, rto) = (now.since(self.last_sent), self.rtt.rto());
        if self.board.is_empty() && idle > rto {
            self.congestion.on_idle(idle, rto, self.mss);
        }
    }

    /// The octets of `chunk`.
    pub(crate) fn payload(&self, chunk: Chunk) -> [&[u8]; 2] {
        self.buffer
            .slices((chunk.seq - self.una) as usize, chunk.len as usize)
    }

    // ---- acknowledgements ----

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
        let newer = self.wl1.before(input.seq)
            || (self.wl1 == input.seq && self.wl2.at_or_before(input.ack));
        if !newer {
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

    /// Bounds of fields that no other file sees.
    pub(crate) fn bounds_hold(&self) -> bool {
        (1..=0xffff).contains(&self.mss)
            && (1..=0xffff).contains(&self.gso_max)
            && self.limit <= LARGEST
            && self.limit_max <= LARGEST
            && self.retries.max(self.probes) <= 1 << 24
            && self.short_end.at_or_after(self.una)
            && self.short_end.at_or_before(self.nxt)
    }

    /// Nothing will be sent any more.
    pub(crate) fn discard(&mut self) {
        self.fin = false;
        self.nxt = self.data_end().max(self.nxt);
        self.board = Scoreboard::default();
        self.una = self.nxt;
        self.short_end = self.nxt;
        self.buffer.release();
    }
}
