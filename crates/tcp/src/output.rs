//! Which segment leaves next, and its header.

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader, TcpOptions, Timestamps as Field};
use serde::{Deserialize, Serialize};

use crate::connection::Connection;
use crate::ecn::{Codepoint, Ecn};
use crate::handshake::Offer;
use crate::send::Chunk;
use crate::state::State;
use crate::tally::Event;
use crate::timers::SendTimer;
use crate::timestamps::Timestamps;

/// A segment to send. The payload lies in two pieces of the connection's buffer.
#[derive(Clone, Debug)]
pub struct Segment<'a> {
    pub header: TcpHeader,
    pub payload: [&'a [u8]; 2],
    /// Payload of each packet that the segment is to be cut into; 0 if it is a single one.
    pub segment_size: u16,
    /// For the IP header.
    pub codepoint: Codepoint,
}

impl Segment<'_> {
    pub fn payload_len(&self) -> usize {
        self.payload[0].len() + self.payload[1].len()
    }
}

/// A RST that is due; without `ack` it answers a segment that carried an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Reset {
    pub(crate) seq: SeqNum,
    pub(crate) ack: Option<SeqNum>,
}

impl Connection {
    /// The next segment that is due; nothing once all are out.
    pub fn transmit(&mut self, now: Instant) -> Option<Segment<'_>> {
        if let Some(reset) = self.reset.take() {
            return Some(self.emit_reset(reset));
        }
        match &mut self.state {
            State::Closed(_) => None,
            State::SynSent(state) => {
                let (due, iss, offer) = (core::mem::take(&mut state.due), state.iss, state.offer);
                due.then(|| self.emit_syn(now, iss, offer, false))
            }
            State::SynReceived(state) => {
                let (due, iss, offer) = (core::mem::take(&mut state.due), state.iss, state.offer);
                due.then(|| self.emit_syn(now, iss, offer, true))
            }
            _ => self.transmit_synchronized(now),
        }
    }

    fn transmit_synchronized(&mut self, now: Instant) -> Option<Segment<'_>> {
        if self.send.has_unsent() {
            self.send.resume(now);
        }
        if self.sack && self.receive.has_report() {
            // Full segments have no room for SACK blocks.
            let header = self.header(now, self.send.nxt, TcpFlags::ACK, false);
            return Some(bare(header));
        }
        if let Some(chunk) = self.next_chunk(now) {
            return Some(self.emit_chunk(now, chunk));
        }
        if self.probe {
            self.probe = false;
            // RFC 9293 §3.8.4 [SHLD-12]: a number the peer has acknowledged makes it answer.
            let header = self.header(now, self.send.una - 1, TcpFlags::ACK, false);
            return Some(bare(header));
        }
        if self.receive.ack_due(self.options.quickack) {
            let header = self.header(now, self.send.nxt, TcpFlags::ACK, false);
            return Some(bare(header));
        }
        self.arm_waiting(now);
        None
    }

    /// The next octets, once their moment has come.
    fn next_chunk(&mut self, now: Instant) -> Option<Chunk> {
        if !self.send.forced
            && self.send.has_pending()
            && let Some(at) = self.send.held_until(now, self.options.max_pacing)
        {
            self.timers.pace = at;
            return None;
        }
        self.timers.pace = Instant::FAR_FUTURE;
        let mut chunk = self.send.next_chunk(&self.options)?;
        if self.announces_reduction(chunk) && chunk.len > self.send.mss {
            // RFC 3168 §6.1.2: CWR goes with one packet only.
            chunk.len = self.send.mss;
            chunk.fin = false;
        }
        Some(chunk)
    }

    fn announces_reduction(&self, chunk: Chunk) -> bool {
        self.ecn.is_some() && self.send.announce_reduction && !chunk.retransmission && chunk.len > 0
    }

    // ---- timers ----

    /// Nothing is due now; what is being waited for gets its timer.
    fn arm_waiting(&mut self, now: Instant) {
        self.send.note_drained();
        if self.timers.acknowledge == Instant::FAR_FUTURE
            && let Some(at) = self.receive.ack_deadline(now)
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

    /// A time-out for what is in flight (RFC 6298 §5.1), or a probe of its tail before that.
    pub(crate) fn arm_retransmission(&mut self, now: Instant) {
        let mut at = now + self.send.rtt.rto();
        let probe = self
            .send
            .tail_probe_delay()
            .filter(|_| self.sack)
            .map(|delay| now + delay);
        if let Some(probe) = probe.filter(|&probe| probe < at) {
            return self.timers.set_send(SendTimer::TailProbe, probe);
        }
        if let Some(timeout) = self.options.user_timeout {
            // RFC 5482: do not sleep past the user's own limit.
            at = at.min((self.send.stalled_since + timeout).max(now));
        }
        self.timers.set_send(SendTimer::Retransmit, at);
    }

    /// RFC 8985 §7.2: each new transmission moves the probe, which may come before the time-out.
    fn arm_tail_probe(&mut self, now: Instant) {
        let probe = self.send.tail_probe_delay().filter(|_| self.sack);
        if let Some(probe) = probe
            .map(|delay| now + delay)
            .filter(|&at| at < self.timers.send)
        {
            self.timers.set_send(SendTimer::TailProbe, probe);
        }
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
            self.send.announce_reduction = false;
            flags = flags.with(TcpFlags::CWR);
        }
        // RFC 3168 §6.1.5: what goes again is not to be marked.
        let codepoint = match self.ecn {
            Some(_) if !chunk.retransmission && chunk.len > 0 => Codepoint::Ect0,
            _ => Codepoint::NotEct,
        };
        let header = self.header(now, chunk.seq, flags, chunk.len > 0);
        self.send.sent(chunk, now, &self.options);
        match self.timers.runs(SendTimer::Retransmit) {
            true if !chunk.retransmission => self.arm_tail_probe(now),
            false if !self.timers.runs(SendTimer::Reorder) => self.arm_retransmission(now),
            _ => {}
        }
        if chunk.retransmission {
            self.counters.retransmits += u64::from(chunk.len.div_ceil(self.send.mss).max(1));
        } else {
            self.counters.octets_out += u64::from(chunk.len);
        }
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
        }
    }

    /// A header that acknowledges all that arrived and offers the present window.
    fn header(&mut self, now: Instant, seq: SeqNum, flags: TcpFlags, text: bool) -> TcpHeader {
        let window = self.receive.offer(self.options.window_clamp) >> self.receive.scale;
        if window == 0 {
            self.tally.count(Event::ZeroWindowOut);
        }
        let timestamps = self.timestamps.as_ref().map(|t| t.field(now));
        // RFC 2018 §3: the option space holds four blocks, or three beside timestamps.
        let blocks = if timestamps.is_some() { 3 } else { 4 };
        let sack = match self.sack && !text {
            true => self.receive.sack_blocks(blocks),
            false => Default::default(),
        };
        let flags = match &self.ecn {
            Some(ecn) if ecn.echo => flags.with(TcpFlags::ECE),
            _ => flags,
        };
        self.receive.acknowledge(now, text);
        self.timers.acknowledge = Instant::FAR_FUTURE;
        self.counters.segments_out += 1;
        TcpHeader {
            source_port: self.local_port,
            destination_port: self.remote_port,
            seq,
            ack: self.receive.nxt,
            flags,
            window: window.min(0xffff) as u16,
            urgent: 0,
            options: TcpOptions {
                timestamps,
                sack,
                ..TcpOptions::default()
            },
        }
    }

    fn emit_syn(&mut self, now: Instant, iss: SeqNum, offer: Offer, answer: bool) -> Segment<'_> {
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
            (TcpFlags::SYN.with(TcpFlags::ACK), self.receive.nxt)
        } else {
            (TcpFlags::SYN, SeqNum(0))
        };
        // RFC 3168 §6.1.1.1: who does not answer may stumble over the request.
        if offer.ecn && (answer || self.send.retries == 0) {
            flags = flags.with(Ecn::syn_flags(answer));
        }
        bare(TcpHeader {
            source_port: self.local_port,
            destination_port: self.remote_port,
            seq: iss,
            ack,
            flags,
            window: self.receive.offer_unscaled(),
            urgent: 0,
            options: TcpOptions {
                mss: Some(offer.mss.min(clamp)),
                window_scale: offer.scale,
                sack_permitted: offer.sack,
                timestamps: stamp.or(first),
                ..TcpOptions::default()
            },
        })
    }

    fn emit_reset(&mut self, reset: Reset) -> Segment<'_> {
        self.tally.count(Event::ResetOut);
        self.counters.segments_out += 1;
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
            ..TcpHeader::default()
        })
    }
}

/// A segment without text.
fn bare(header: TcpHeader) -> Segment<'static> {
    Segment {
        header,
        payload: [&[], &[]],
        segment_size: 0,
        codepoint: Codepoint::NotEct,
    }
}
