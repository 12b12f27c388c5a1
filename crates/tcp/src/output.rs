//! Selection of the next segment to send, and its header.

use arrayvec::ArrayVec;
use portolan_types::{Handle, Instant, SeqNum};
use portolan_wire::demux::DemuxOption;
use portolan_wire::tcp::{MAX_COOKIE, TcpFlags, TcpHeader, TcpOptions, Timestamps as Field};

use crate::config::Options;
use crate::connection::Connection;
use crate::demux::Demux;
use crate::ecn::{Codepoint, Ecn};
use crate::encoding;
use crate::event_counters::Event;
use crate::handshake::{Offer, SynSent};
use crate::receive::AckSchedule;
use crate::send::Chunk;
use crate::state::State;
use crate::timers::SendTimer;
use crate::timestamps::Timestamps;

/// Size of the option space in a TCP header.
const MAX_OPTIONS: u16 = 40;

/// A segment to send. The payload lies in two slices of the connection's buffer.
#[derive(Clone, Debug)]
pub struct Segment<'a> {
    pub header: TcpHeader,
    pub payload: [&'a [u8]; 2],
    /// Payload of each packet that the device cuts the segment into; 0 if it is a single packet.
    pub segment_size: u16,
    /// ECN codepoint of the IP header.
    pub codepoint: Codepoint,
    /// Demux handle for an IP option.
    pub handle: Option<Handle>,
}

impl Segment<'_> {
    pub fn payload_len(&self) -> usize {
        self.payload[0].len() + self.payload[1].len()
    }
}

/// A pending RST; without `ack` it answers a segment that carried an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reset {
    pub(crate) seq: SeqNum,
    pub(crate) ack: Option<SeqNum>,
}

encoding::fields!(Reset { seq, ack });

impl Connection {
    /// Returns the next segment due, or nothing once all are sent.
    pub fn transmit(&mut self, now: Instant) -> Option<Segment<'_>> {
        if let Some(reset) = self.reset.take() {
            return Some(self.emit_reset(now, reset));
        }
        match &mut self.state {
            State::Closed(_) => None,
            State::SynSent(state) => {
                let (due, iss, offer) = (core::mem::take(&mut state.due), state.iss, state.offer);
                due.then(|| self.emit_opening(now, iss, offer))
            }
            State::SynReceived(state) => {
                let (due, iss, offer) = (core::mem::take(&mut state.due), state.iss, state.offer);
                if due {
                    let grant = state.grant.clone();
                    return Some(bare(self.syn(now, iss, offer, grant, true)));
                }
                if state.fast && !self.send.fin {
                    return self.transmit_synchronized(now);
                }
                self.receive.ack_due().then(|| {
                    // RFC 9293 §3.10.7.4, first and second, in SYN-RECEIVED.
                    let header = self.header(now, iss + 1, TcpFlags::ACK, false);
                    bare(header)
                })
            }
            State::TimeWait(state) => {
                let header = state.transmit(now, (self.local_port, self.remote_port))?;
                self.counters.segments_out += 1;
                Some(bare(header))
            }
            _ => self.transmit_synchronized(now),
        }
    }

    fn transmit_synchronized(&mut self, now: Instant) -> Option<Segment<'_>> {
        let pending = self.send.has_pending();
        if pending {
            self.send.resume(now);
        }
        if self.sack && self.receive.has_report() {
            // Full segments have no room for SACK blocks.
            let header = self.header(now, self.send.nxt, TcpFlags::ACK, false);
            return Some(self.acknowledgement(header));
        }
        if self.path.is_searching()
            && let Some(chunk) = self.next_path_probe(now)
        {
            return Some(Segment {
                segment_size: 0,
                ..self.emit_chunk(now, chunk)
            });
        }
        self.timers.pace = Instant::FAR_FUTURE;
        if pending && let Some(chunk) = self.next_chunk(now) {
            return Some(self.emit_chunk(now, chunk));
        }
        if self.probe {
            self.probe = false;
            // RFC 9293 §3.8.4 [SHLD-12]: an already acknowledged sequence number makes the peer answer.
            let header = self.header(now, self.send.una - 1, TcpFlags::ACK, false);
            return Some(self.acknowledgement(header));
        }
        if self.receive.ack_due() {
            let header = self.header(now, self.send.nxt, TcpFlags::ACK, false);
            return Some(self.acknowledgement(header));
        }
        self.on_idle(now);
        None
    }

    /// Whether [`Connection::transmit`] might have something to send. For callers that must prepare
    /// before they call it.
    pub fn has_output(&self) -> bool {
        let is_apart = matches!(
            self.state,
            State::Closed(_) | State::SynSent(_) | State::SynReceived(_) | State::TimeWait(_)
        );
        let has_to_tell = self.reset.is_some()
            || self.probe
            || self.receive.ack_due()
            || (self.sack && self.receive.has_report());
        is_apart || has_to_tell || self.send.has_pending()
    }

    /// Whether the only pending output is an acknowledgement that may wait a moment for data to carry it.
    pub fn owes_acknowledgement(&self) -> bool {
        let is_synchronized = !matches!(
            self.state,
            State::Closed(_) | State::SynSent(_) | State::SynReceived(_)
        );
        let has_else = self.reset.is_some() || self.probe || self.send.has_pending();
        is_synchronized && !has_else && self.receive.ack_due() && self.receive.ack_may_wait()
    }

    /// Like [`Connection::has_output`], but includes path MTU probes, sent when nothing else is.
    pub fn may_transmit(&self) -> bool {
        self.has_output() || self.path.is_searching()
    }

    /// Does what [`Connection::transmit`] does when there is nothing to send.
    pub fn rest(&mut self, now: Instant) {
        self.timers.pace = Instant::FAR_FUTURE;
        self.on_idle(now);
    }

    fn on_idle(&mut self, now: Instant) {
        self.arm_waiting(now);
        self.note_writable();
        self.chronometer.turn_to(self.send.activity(), now);
    }

    fn next_path_probe(&mut self, now: Instant) -> Option<Chunk> {
        let is_full = self.urgent_end.is_some() || self.demux_bytes() > 0;
        if is_full || !self.send.may_probe_path(self.send.mss) {
            return None;
        }
        let size = self.path.wanted(now)?;
        if !self.send.may_probe_path(size) {
            return None;
        }
        let chunk = self.send.path_probe(size);
        self.path.sent(chunk.seq + chunk.len, size);
        Some(chunk)
    }

    /// The next bytes to send, unless pacing holds them back.
    fn next_chunk(&mut self, now: Instant) -> Option<Chunk> {
        if !self.send.forced
            && let Some(at) = self.send.held_until(now, self.options.max_pacing)
        {
            self.timers.pace = at;
            return None;
        }
        let mut chunk = self.next_by_options(now)?;
        self.leave_room(&mut chunk);
        if self.announces_reduction(chunk) && chunk.len > self.send.mss {
            // RFC 3168 §6.1.2: CWR is set on one packet only.
            chunk.len = self.send.mss;
            chunk.fin = false;
        }
        Some(chunk)
    }

    /// Shortens `chunk` by the option of active demultiplexing that each segment carries while there is one.
    fn leave_room(&self, chunk: &mut Chunk) {
        let room = self.send.mss.saturating_sub(self.demux_bytes()).max(1);
        if self.demux_bytes() > 0 && chunk.len > room {
            chunk.len = room;
            chunk.fin = false;
        }
    }

    fn demux_bytes(&self) -> u32 {
        let option = self.demux.as_ref().and_then(Demux::option);
        option.map_or(0, |option| option.padded_len() as u32)
    }

    fn next_by_options(&mut self, now: Instant) -> Option<Chunk> {
        if self.urgent_end.is_none() && !self.send.has_records() {
            return self.send.next_chunk(now, &self.options);
        }
        if self.urgent_end.is_none() {
            return self.next_of_record(now);
        }
        // RFC 9293 §3.8.5, as Linux: urgent data is not held back. If the device segmented the chunk, all packets
        // would carry the urgent pointer of the first.
        let options = self.unheld();
        let mss = self.send.mss;
        let chunk = self.send.next_chunk(now, &options)?;
        Some(self.send.within_record(Chunk {
            len: chunk.len.min(mss),
            fin: chunk.fin && chunk.len <= mss,
            ..chunk
        }))
    }

    fn next_of_record(&mut self, now: Instant) -> Option<Chunk> {
        let chunk = if self.send.is_record_complete() {
            // As what urges, it is not held back.
            self.send.next_chunk(now, &self.unheld())
        } else {
            self.send.next_chunk(now, &self.options)
        };
        Some(self.send.within_record(chunk?))
    }

    fn unheld(&self) -> Options {
        Options {
            nodelay: true,
            cork: false,
            more: false,
            ..self.options.clone()
        }
    }

    fn announces_reduction(&self, chunk: Chunk) -> bool {
        self.ecn.is_some() && self.send.cwr_pending && !chunk.retransmission && chunk.len > 0
    }

    /// The urgent pointer of a segment at `seq`, which points behind the urgent byte (BSD's reading,
    /// RFC 6093 §2). If the byte is too far ahead, the pointer has the largest value of the field.
    fn urgent_pointer(&self, seq: SeqNum) -> Option<u16> {
        let ahead = self.urgent_end?.distance(seq);
        (ahead > 0).then(|| u16::try_from(ahead).unwrap_or(u16::MAX))
    }

    // ---- timers ----

    /// Arms the timer of whatever the connection waits for.
    fn arm_waiting(&mut self, now: Instant) {
        self.send.note_drained();
        if self.timers.acknowledge == Instant::FAR_FUTURE
            && let Some(at) = self.receive.ack_deadline(now, &self.send.rtt)
        {
            self.timers.acknowledge = at;
        }
        let paced = self.timers.pace != Instant::FAR_FUTURE;
        let waits = self.send.is_idle() && self.send.has_unsent() && !paced;
        if waits && !self.timers.runs(SendTimer::Persist) {
            if self.send.probes == 0 {
                self.send.stalled_since = now;
            }
            self.timers
                .set_send(SendTimer::Persist, now + self.send.rtt.rto());
        }
    }

    /// Arms the retransmission time-out of the data in flight (RFC 6298 §5.1), or an earlier tail loss probe.
    pub(crate) fn arm_retransmission(&mut self, now: Instant) {
        self.arm_timeout(now, after(now, self.send.rtt.rto_nanos()));
    }

    /// RFC 8985 §7.2: a tail loss probe replaces the time-out due `at`, even if the probe would come later.
    fn arm_timeout(&mut self, now: Instant, mut at: Instant) {
        let probe = self.tail_probe_at(now).map(|probe| probe.min(at));
        if let Some(timeout) = self.options.user_timeout {
            // RFC 5482: do not sleep past the user timeout.
            at = at.min((self.send.stalled_since + timeout).max(now));
        }
        match probe {
            Some(probe) if probe <= at => self.timers.set_send(SendTimer::TailProbe, probe),
            _ => self.timers.set_send(SendTimer::Retransmit, at),
        }
    }

    fn tail_probe_at(&self, now: Instant) -> Option<Instant> {
        let delay = self.send.tail_probe_delay().filter(|_| self.sack)?;
        Some(after(now, delay))
    }

    /// RFC 8985 §7.2: each transmission postpones the probe, but not past the time-out of the oldest segment (Linux's
    /// `tcp_rto_delta_us`); otherwise a steady writer would never detect a loss.
    fn arm_for_transmission(&mut self, now: Instant) {
        let at = if self.timers.runs(SendTimer::Retransmit) {
            self.timers.send
        } else {
            after(self.send.oldest_sent(now), self.send.rtt.rto_nanos()).max(now)
        };
        self.arm_timeout(now, at);
    }

    // ---- segments ----

    fn emit_chunk(&mut self, now: Instant, chunk: Chunk) -> Segment<'_> {
        let last = chunk.seq + chunk.len == self.send.una + self.send.buffer.len() as u32;
        let mut flags = TcpFlags::ACK;
        if last && chunk.len > 0 {
            flags = flags.with(TcpFlags::PSH);
        }
        if chunk.fin {
            flags = flags.with(TcpFlags::FIN);
        }
        if self.announces_reduction(chunk) {
            self.send.cwr_pending = false;
            flags = flags.with(TcpFlags::CWR);
        }
        // RFC 3168 §6.1.5: retransmissions must not be ECN-capable.
        let codepoint = match self.ecn {
            Some(_) if !chunk.retransmission && chunk.len > 0 => Codepoint::Ect0,
            _ => Codepoint::NotEct,
        };
        let header = self.header(now, chunk.seq, flags, chunk.len > 0);
        // What was lost may have been so for its options.
        let handle = if chunk.retransmission {
            None
        } else {
            self.enclosed()
        };
        self.send.sent(chunk, now, &self.options);
        match self.timers.running() {
            Some(SendTimer::Reorder) => {}
            Some(SendTimer::Retransmit) if chunk.retransmission => {}
            _ => self.arm_for_transmission(now),
        }
        if chunk.retransmission {
            self.counters.retransmits += u64::from(chunk.len.div_ceil(self.send.mss).max(1));
            self.counters.bytes_retransmitted += u64::from(chunk.len);
        }
        self.counters.bytes_out += u64::from(chunk.len);
        self.count_packets(chunk.len);
        let segment_size = if chunk.len > self.send.mss {
            self.send.mss as u16
        } else {
            0
        };
        Segment {
            header,
            payload: self.send.payload(chunk),
            segment_size,
            codepoint,
            handle,
        }
    }

    fn enclosed(&self) -> Option<Handle> {
        self.demux.as_ref().and_then(Demux::enclosed)
    }

    /// A segment without payload.
    fn acknowledgement(&self, header: TcpHeader) -> Segment<'static> {
        Segment {
            handle: self.enclosed(),
            ..bare(header)
        }
    }

    /// Counts the packets of a large segment, of which the header has counted one; the device cuts it.
    fn count_packets(&mut self, len: u32) {
        let packets = match len {
            0 => 0,
            // Spares small segments the division.
            len if len <= self.send.mss => 1,
            len => u64::from(len.div_ceil(self.send.mss)),
        };
        self.counters.data_out += packets;
        self.counters.segments_out += packets.saturating_sub(1);
    }

    /// A header that acknowledges everything that arrived and offers the current window.
    fn header(&mut self, now: Instant, seq: SeqNum, flags: TcpFlags, text: bool) -> TcpHeader {
        let window = self.receive.offer(self.options.window_clamp) >> self.receive.scale;
        if window == 0 {
            self.event_counters.count(Event::ZeroWindowOut);
        }
        let timestamps = self.timestamps.as_ref().map(|t| t.field(now));
        let demux = self.demux.as_ref().and_then(Demux::option);
        // RFC 2018 §3: the option space holds four blocks, or three beside timestamps.
        let blocks = match (&timestamps, demux) {
            (_, Some(DemuxOption::Advertise { .. })) => 1,
            (_, Some(_)) => 2,
            (Some(_), None) => 3,
            (None, None) => 4,
        };
        let sack = if self.sack && !text {
            self.receive.sack_blocks(blocks, &mut self.event_counters)
        } else {
            Default::default()
        };
        let flags = match &self.ecn {
            Some(ecn) if ecn.echo => flags.with(TcpFlags::ECE),
            _ => flags,
        };
        self.receive.acknowledge(now, text);
        if !sack.is_empty() && self.receive.has_news() {
            // Many segments may have arrived at once, and not all changed ranges fit: the next segment reports the
            // rest.
            self.receive.want_ack(AckSchedule::Now);
        }
        self.timers.acknowledge = Instant::FAR_FUTURE;
        self.counters.segments_out += 1;
        let (flags, urgent) = match self.urgent_pointer(seq) {
            Some(pointer) => (flags.with(TcpFlags::URG), pointer),
            None => (flags, 0),
        };
        TcpHeader {
            source_port: self.local_port,
            destination_port: self.remote_port,
            seq,
            ack: self.receive.nxt,
            flags,
            window: window.min(0xffff) as u16,
            urgent,
            options: TcpOptions {
                timestamps,
                sack,
                demux,
                ..TcpOptions::default()
            },
        }
    }

    /// The SYN of an active open. The first one carries a cookie and data (RFC 7413 §4.1.3);
    /// retransmissions are plain SYNs.
    fn emit_opening(&mut self, now: Instant, iss: SeqNum, offer: Offer) -> Segment<'_> {
        let (mut cookie, mut len) = (None, 0);
        if self.send.retries == 0
            && let State::SynSent(SynSent {
                fast: Some(fast), ..
            }) = &mut self.state
        {
            if fast.takes_text() {
                let room = usize::from(fast.mss.saturating_sub(MAX_OPTIONS));
                len = self.send.buffer.len().min(room);
            }
            fast.sent = len as u32;
            cookie = fast.cookie.clone();
        }
        if len > 0 {
            self.counters.data_out += 1;
            self.counters.bytes_out += len as u64;
        }
        let header = self.syn(now, iss, offer, cookie, false);
        Segment {
            header,
            payload: self.send.buffer.slices(0, len),
            segment_size: 0,
            codepoint: Codepoint::NotEct,
            handle: None,
        }
    }

    fn syn(
        &mut self,
        now: Instant,
        iss: SeqNum,
        offer: Offer,
        cookie: Option<ArrayVec<u8, MAX_COOKIE>>,
        answer: bool,
    ) -> TcpHeader {
        self.send.last_sent = now;
        self.timers
            .set_send(SendTimer::Retransmit, now + self.send.rtt.rto());
        self.counters.segments_out += 1;
        let clamp = self.options.max_segment.unwrap_or(u16::MAX);
        let clock = Timestamps::clock(self.timestamp_offset, now);
        let stamp = self.timestamps.as_ref().map(|t| t.field(now));
        let first = offer.timestamps.then_some(Field {
            value: clock,
            echo: 0,
        });
        let (mut flags, ack) = if answer {
            self.receive.acknowledge(now, false);
            (TcpFlags::SYN.with(TcpFlags::ACK), self.receive.nxt)
        } else {
            (TcpFlags::SYN, SeqNum(0))
        };
        // RFC 3168 §6.1.1.1: a peer that does not answer may have failed on the request.
        if offer.ecn && (answer || self.send.retries == 0) {
            flags = flags.with(Ecn::syn_flags(answer));
        }
        // There is no room for both, and a peer that does not answer may have failed on this, too.
        let is_able = offer.handle_room > 0 && (answer || self.send.retries == 0);
        TcpHeader {
            source_port: self.local_port,
            destination_port: self.remote_port,
            seq: iss,
            ack,
            flags,
            window: self.receive.offer_unscaled(self.options.window_clamp),
            urgent: 0,
            options: TcpOptions {
                mss: Some(offer.mss.min(clamp)),
                window_scale: offer.scale,
                sack_permitted: offer.sack,
                timestamps: stamp.or(first),
                demux: (is_able && cookie.is_none()).then_some(DemuxOption::Able),
                fast_open: cookie,
                ..TcpOptions::default()
            },
        }
    }

    fn emit_reset(&mut self, now: Instant, reset: Reset) -> Segment<'_> {
        self.event_counters.count(Event::ResetOut);
        self.counters.segments_out += 1;
        // RFC 7323 §3.2: a RST should carry timestamps, too.
        let timestamps = self.timestamps.as_ref().map(|t| t.field(now));
        let (ack, flags) = match reset.ack {
            Some(ack) => (ack, TcpFlags::RST.with(TcpFlags::ACK)),
            None => (SeqNum(0), TcpFlags::RST),
        };
        bare(TcpHeader {
            source_port: self.local_port,
            destination_port: self.remote_port,
            seq: reset.seq,
            ack,
            flags,
            options: TcpOptions {
                timestamps,
                ..TcpOptions::default()
            },
            ..TcpHeader::default()
        })
    }
}

fn after(moment: Instant, nanos: u64) -> Instant {
    Instant::from_nanos(moment.as_nanos().saturating_add(nanos))
}

/// A segment without payload.
fn bare(header: TcpHeader) -> Segment<'static> {
    Segment {
        header,
        payload: [&[], &[]],
        segment_size: 0,
        codepoint: Codepoint::NotEct,
        handle: None,
    }
}
