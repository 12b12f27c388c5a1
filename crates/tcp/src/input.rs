//! Processing of arriving segments (RFC 9293 §3.10.7).

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

use crate::config::EcnMode;
use crate::connection::Connection;
use crate::demux::Demux;
use crate::ecn::Ecn;
use crate::error::Error;
use crate::event_counters::Event;
use crate::events::Events;
use crate::handshake::{SynReceived, SynSent, SynSentAnswer};
use crate::output::Reset;
use crate::receive::AckSchedule;
use crate::send::{AckInput, CaState};
use crate::state::{Illegal, State};
use crate::time_wait::{TIME_WAIT_LEN, TimeWait};
use crate::timers::SendTimer;

impl Connection {
    /// Processes a segment for this connection; `payload` may be that of several merged segments.
    pub fn on_segment(&mut self, now: Instant, header: &TcpHeader, payload: &[u8]) {
        self.counters.segments_in += 1;
        if self.is_predicted(now, header, payload) {
            return self.on_predicted(now, header, payload);
        }
        match &mut self.state {
            State::Closed(_) => self.refuse(header, payload.len()),
            State::TimeWait(state) => {
                state.on_segment(now, header, payload.len(), &mut self.event_counters);
                if state.is_over(now) {
                    self.end();
                }
            }
            State::SynSent(state) => match state.judge(header) {
                SynSentAnswer::Ignore => {}
                SynSentAnswer::Reset(seq) => self.reset = Some(Reset { seq, ack: None }),
                SynSentAnswer::Refused => self.fail(Error::Refused),
                SynSentAnswer::Established => {
                    let state = state.clone();
                    self.on_syn_ack(now, header, payload, &state);
                }
                SynSentAnswer::SynReceived => {
                    let state = state.clone();
                    self.on_crossing_syn(now, header, &state);
                }
            },
            _ => self.on_synchronized(now, header, payload),
        }
    }

    // ---- header prediction ----

    /// Sequence number of the next payload, while only that and acknowledgements are expected.
    pub fn next_expected(&self) -> Option<SeqNum> {
        matches!(self.state, State::Established(_)).then_some(self.receive.nxt)
    }

    /// Whether the segment is what an undisturbed connection expects: the next payload or an
    /// acknowledgement, and nothing else.
    fn is_predicted(&self, now: Instant, header: &TcpHeader, payload: &[u8]) -> bool {
        matches!(self.state, State::Established(_))
            && TcpFlags(header.flags.0 & !TcpFlags::PSH.0) == TcpFlags::ACK
            && self.receive.is_next(header.seq, payload.len())
            && header.ack.at_or_after(self.send.una)
            && header.ack.at_or_before(self.send.nxt)
            && header.options.sack.is_empty()
            && header.options.demux.is_none()
            && match (&self.timestamps, header.options.timestamps) {
                (Some(state), Some(field)) => !state.is_old(field, now),
                (None, None) => true,
                _ => false,
            }
    }

    fn on_predicted(&mut self, now: Instant, header: &TcpHeader, payload: &[u8]) {
        self.note_heard(now, header);
        self.on_acknowledgement(now, header, payload.len() as u32);
        if !payload.is_empty() {
            self.counters.data_in += 1;
            self.receive.append(now, payload, &self.send.rtt);
            self.events.insert(Events::READABLE);
            self.note_urgent_arrival();
        }
    }

    // ---- CLOSED ----

    /// RFC 9293 §3.10.7.1: the user may still hold the connection; the peer no longer has it.
    fn refuse(&mut self, header: &TcpHeader, length: usize) {
        if header.flags.contains(TcpFlags::RST) || self.reset.is_some() {
            return;
        }
        let is_ack = header.flags.contains(TcpFlags::ACK);
        let [syn, fin] = [TcpFlags::SYN, TcpFlags::FIN].map(|flag| header.flags.contains(flag));
        let end = header.seq + length as u32 + u32::from(syn) + u32::from(fin);
        self.reset = Some(Reset {
            seq: if is_ack { header.ack } else { SeqNum(0) },
            ack: (!is_ack).then_some(end),
        });
    }

    // ---- SYN-SENT ----

    fn on_syn_ack(&mut self, now: Instant, header: &TcpHeader, payload: &[u8], state: &SynSent) {
        self.receive
            .synchronize(header.seq, self.options.window_clamp, now);
        self.settle(state.offer.agree(&header.options), header, now);
        self.ecn = (state.offer.ecn && Ecn::agreed(header)).then(Ecn::default);
        self.sample_handshake(now);
        self.last_rx = now;
        self.note_early(header.ack - (state.iss + 1));
        // The SYN counts, too, as on Linux.
        self.counters.bytes_acknowledged += 1;
        let used = state.fast.as_ref().and_then(|fast| fast.cookie.as_ref());
        self.granted = header
            .options
            .fast_open
            .as_ref()
            .filter(|cookie| !cookie.is_empty())
            .or(used.filter(|cookie| !cookie.is_empty()))
            .map(|cookie| {
                let mss = header.options.mss.unwrap_or(state.offer.assumed_mss);
                (cookie.clone(), mss)
            });
        self.establish(header.seq, u32::from(header.window));
        let text_follows = state.fast.as_ref().is_some_and(|fast| fast.text_follows);
        self.receive.want_ack(if text_follows {
            AckSchedule::Delayed
        } else {
            AckSchedule::Now
        });
        let fin = header.flags.contains(TcpFlags::FIN);
        self.on_urgent(header, header.seq + 1);
        if !payload.is_empty() || fin {
            self.on_payload(now, header.seq + 1, payload, fin);
        }
    }

    /// `taken` bytes of the data sent with the SYN have arrived; the rest is sent as if for the first
    /// time (RFC 7413 §4.1.3).
    fn note_early(&mut self, taken: u32) {
        if taken > 0 {
            self.send.take_early(taken);
            self.counters.bytes_acknowledged += u64::from(taken);
            self.early_data = true;
        }
    }

    /// Samples the round trip of a SYN that was sent only once (RFC 6298 §3).
    fn sample_handshake(&mut self, now: Instant) {
        if self.send.retries == 0 {
            self.send.rtt.sample(now.since(self.send.last_sent));
        }
    }

    /// RFC 9293 §3.5 [MUST-10], figure 8.
    fn on_crossing_syn(&mut self, now: Instant, header: &TcpHeader, state: &SynSent) {
        self.receive
            .synchronize(header.seq, self.options.window_clamp, now);
        let mut offer = state.offer.answering(&header.options);
        offer.ecn &= Ecn::accepts(EcnMode::Accept, header);
        self.ecn = offer.ecn.then(Ecn::default);
        self.settle(offer.agree(&header.options), header, now);
        self.send.window = u32::from(header.window);
        self.state = State::SynReceived(SynReceived {
            iss: state.iss,
            irs: header.seq,
            offer,
            due: true,
            active: true,
            fast: false,
            grant: None,
            is_held: false,
        });
    }

    // ---- the states after SYN-SENT ----

    fn on_synchronized(&mut self, now: Instant, header: &TcpHeader, payload: &[u8]) {
        let flags = header.flags;
        let fin = flags.contains(TcpFlags::FIN);
        let syn = flags.contains(TcpFlags::SYN);
        let end = header.seq + payload.len() as u32 + u32::from(fin) + u32::from(syn);
        // First: sequence number, with PAWS before it (RFC 7323 §5.3).
        let wrapped = self.fails_paws(now, header);
        if wrapped || !self.receive.acceptable(header.seq, end) {
            self.event_counters.count(if wrapped {
                Event::DropWrapped
            } else {
                Event::DropWindow
            });
            return self.on_unacceptable(now, header, payload);
        }
        // Second: RST (RFC 5961 §3.2).
        if flags.contains(TcpFlags::RST) {
            return self.on_reset(now, header.seq);
        }
        // Fourth: SYN (RFC 5961 §4.2), except the one repeated by a simultaneous open.
        if syn {
            return self.on_unexpected_syn(now, header);
        }
        // Fifth: ACK.
        if !flags.contains(TcpFlags::ACK) {
            self.event_counters.count(Event::DropNoAck);
            return;
        }
        if !self.complete_handshake(now, header) || !self.check_acknowledgement(now, header.ack) {
            return;
        }
        self.note_heard(now, header);
        self.on_demux_option(header);
        self.on_acknowledgement(now, header, end - header.seq);
        // Sixth: URG.
        self.on_urgent(header, header.seq);
        // Seventh and eighth: payload and FIN.
        if !payload.is_empty() || fin {
            self.on_payload(now, header.seq, payload, fin);
        }
    }

    fn fails_paws(&self, now: Instant, header: &TcpHeader) -> bool {
        match (&self.timestamps, header.options.timestamps) {
            (Some(state), Some(field)) => {
                !header.flags.contains(TcpFlags::RST) && state.is_old(field, now)
            }
            _ => false,
        }
    }

    fn on_unacceptable(&mut self, now: Instant, header: &TcpHeader, payload: &[u8]) {
        if header.flags.contains(TcpFlags::RST) {
            return;
        }
        if let State::SynReceived(state) = &mut self.state {
            // The peer's SYN again: this side's answer was lost.
            let again = header.flags.contains(TcpFlags::SYN) && header.seq == state.irs;
            if self.challenges.allow(now, &mut self.event_counters) {
                state.due |= again;
                if !again {
                    self.receive.want_ack(AckSchedule::Now);
                }
            }
            return;
        }
        // As Linux: segments with payload or FIN are not part of an acknowledgement loop; everything else is answered
        // at a limited rate.
        if !payload.is_empty() {
            // Received before: its acknowledgement was lost.
            self.disable_handles();
        }
        let fin = header.flags.contains(TcpFlags::FIN);
        let loops = header.flags.contains(TcpFlags::SYN) || (payload.is_empty() && !fin);
        if !loops || self.challenges.allow(now, &mut self.event_counters) {
            self.receive.reject(header.seq, payload.len() as u32);
        }
    }

    fn on_reset(&mut self, now: Instant, seq: SeqNum) {
        if seq != self.receive.nxt {
            self.event_counters.count(Event::DropReset);
            if self.receive.in_window(seq) && self.challenges.allow(now, &mut self.event_counters) {
                self.receive.want_ack(AckSchedule::Now);
            }
            return;
        }
        self.event_counters.count(Event::ResetIn);
        match &self.state {
            State::SynReceived(SynReceived { active: true, .. }) => self.fail(Error::Refused),
            // As Linux reports it: the peer had already sent its FIN.
            State::CloseWait(_) => self.fail(Error::BrokenPipe),
            _ => self.fail(Error::Reset),
        }
    }

    fn on_unexpected_syn(&mut self, now: Instant, header: &TcpHeader) {
        let both_open = matches!(&self.state, State::SynReceived(s)
            if s.active && header.seq == s.irs && header.flags.contains(TcpFlags::ACK)
                && header.ack == s.iss + 1);
        if !both_open {
            self.event_counters.count(Event::DropSyn);
        }
        if both_open {
            self.complete_handshake(now, header);
            self.receive.want_ack(AckSchedule::Now);
        } else if let State::SynReceived(state) = &mut self.state
            && header.seq == state.irs
        {
            // The peer's SYN again: this side's answer was lost.
            state.due |= self.challenges.allow(now, &mut self.event_counters);
        } else if matches!(&self.state, State::SynReceived(s) if !s.active) {
            // RFC 9293 §3.10.7.4, fourth: a passive open returns to LISTEN.
            self.end();
        } else if self.challenges.allow(now, &mut self.event_counters) {
            self.receive.want_ack(AckSchedule::Now);
        }
    }

    /// In SYN-RECEIVED, returns whether `header` acknowledges this side's SYN; true in all later states.
    fn complete_handshake(&mut self, now: Instant, header: &TcpHeader) -> bool {
        let State::SynReceived(state) = &self.state else {
            return true;
        };
        let (fast, is_held) = (state.fast, state.is_held);
        if !self.acknowledges_syn(state, header) {
            self.reset = Some(Reset {
                seq: header.ack,
                ack: None,
            });
            return false;
        }
        if is_held {
            self.events.insert(Events::HELD);
            return false;
        }
        if fast {
            self.finish_fast_open(now);
            return true;
        }
        self.sample_handshake(now);
        let syn = header.flags.contains(TcpFlags::SYN);
        let scale = if syn { 0 } else { self.send.scale };
        self.establish(header.seq, u32::from(header.window) << scale);
        true
    }

    fn acknowledges_syn(&self, state: &SynReceived, header: &TcpHeader) -> bool {
        header.ack.after(state.iss) && !header.ack.after(self.send.nxt)
    }

    /// Whether an undone passive open would answer that acknowledgement with a reset.
    pub fn refuses_handshake(&self, header: &TcpHeader) -> bool {
        let is_acknowledgement = header.flags.contains(TcpFlags::ACK)
            && !header.flags.contains(TcpFlags::SYN)
            && !header.flags.contains(TcpFlags::RST);
        matches!(&self.state, State::SynReceived(state)
            if !state.active && is_acknowledgement && !self.acknowledges_syn(state, header))
    }

    /// The SYN+ACK of a Fast Open is acknowledged; the user may have sent data before.
    fn finish_fast_open(&mut self, now: Instant) {
        self.state = self.established();
        self.events.insert(Events::CONNECTED | Events::WRITABLE);
        self.send.retries = 0;
        self.send.rtt.reset_backoff();
        self.rearm(now, None);
    }

    /// RFC 5961 §5.2 [MAY-12]: an acknowledgement must lie between the oldest plausible one and `nxt`.
    fn check_acknowledgement(&mut self, now: Instant, ack: SeqNum) -> bool {
        let ok = ack.at_or_before(self.send.nxt)
            && ack.at_or_after(self.send.una - self.send.max_window);
        if !ok {
            self.event_counters.count(Event::DropBadAck);
        }
        if !ok && self.challenges.allow(now, &mut self.event_counters) {
            self.receive.want_ack(AckSchedule::Now);
        }
        ok
    }

    fn note_heard(&mut self, now: Instant, header: &TcpHeader) {
        self.last_rx = now;
        self.keepalives = 0;
        if let (Some(state), Some(field)) = (&mut self.timestamps, header.options.timestamps)
            && header.seq.at_or_before(self.receive.acknowledged)
        {
            state.update(field, now);
        }
    }

    fn on_demux_option(&mut self, header: &TcpHeader) {
        if let Some(demux) = &mut self.demux
            && let Some(option) = header.options.demux
        {
            demux.hear(option);
        }
    }

    /// Stops enclosing handles after a loss, which they may have caused.
    pub(crate) fn disable_handles(&mut self) {
        if self.demux.as_mut().is_some_and(Demux::doubt) {
            self.event_counters.count(Event::HandleDoubted);
        }
    }

    /// `space` is the sequence space that the segment occupies.
    fn on_acknowledgement(&mut self, now: Instant, header: &TcpHeader, space: u32) {
        let echo = match (&self.timestamps, header.options.timestamps) {
            (Some(state), Some(field)) => state.round_trip(field, now),
            _ => None,
        };
        let before = self.send.una;
        let recovering = self.send.is_recovering();
        let input = AckInput {
            now,
            seq: header.seq,
            ack: header.ack,
            window: u32::from(header.window) << self.send.scale,
            sack: if self.sack { &header.options.sack } else { &[] },
            echo,
            occupies: space > 0,
            sack_permitted: self.sack,
            marked: self.ecn.is_some() && header.flags.contains(TcpFlags::ECE),
        };
        let outcome = self.send.on_ack(&input, &mut self.event_counters);
        if let Some(demux) = &mut self.demux {
            demux.progress(self.send.una, header.seq + space);
        }
        if input.marked {
            let segments = outcome.delivered.div_ceil(self.send.mss);
            self.counters.delivered_marked += u64::from(segments);
        }
        if self.send.is_recovering() && !recovering {
            self.event_counters.count(Event::FastRecovery);
        }
        if header.window == 0 {
            self.event_counters.count(Event::ZeroWindowIn);
        }
        if self.path.is_searching() {
            self.note_path(outcome.advanced);
        }
        if outcome.advanced {
            self.counters.bytes_acknowledged += u64::from(self.send.una - before);
            self.urgent_end = self.urgent_end.filter(|end| end.after(self.send.una));
        }
        let no_probe = outcome.no_tail_probe && self.timers.runs(SendTimer::TailProbe);
        if outcome.advanced || outcome.reorder_at.is_some() || no_probe {
            self.rearm(now, outcome.reorder_at);
        }
        self.note_writable();
        if outcome.fin_acknowledged {
            self.on_fin_acknowledged(now);
        }
    }

    /// Updates the path MTU search after an acknowledgement.
    fn note_path(&mut self, advanced: bool) {
        if self.send.ca_state != CaState::Open {
            self.path.on_loss();
        } else if advanced && let Some(size) = self.path.on_ack(self.send.una) {
            self.send.mss = size;
        }
    }

    pub(crate) fn note_writable(&mut self) {
        if self.send.take_writable(self.options.unsent_low_water) {
            self.events.insert(Events::WRITABLE);
        }
    }

    /// Something was acknowledged: restarts the timer of the sending side (RFC 6298 §5.3).
    pub(crate) fn rearm(&mut self, now: Instant, reorder_at: Option<Instant>) {
        match reorder_at {
            Some(at) => self.timers.set_send(SendTimer::Reorder, at),
            None if self.send.is_idle() => self.timers.clear_send(),
            None => self.arm_retransmission(now),
        }
    }

    fn on_fin_acknowledged(&mut self, now: Instant) {
        // A close with `SO_LINGER` waits for this.
        self.events.insert(Events::WRITABLE);
        let wait = self.begin_time_wait(now);
        match (self.state.fin_acknowledged(wait), &self.state) {
            // There was no FIN to acknowledge.
            (Err(Illegal), _) => self.event_counters.count(Event::DropBadAck),
            (Ok(()), State::TimeWait(_)) => self.enter_time_wait(),
            (Ok(()), State::FinWait2(_)) if self.orphan => self.linger_orphaned(now),
            (Ok(()), State::Closed(_)) => self.end(),
            (Ok(()), _) => {}
        }
    }

    /// The state to keep if TIME-WAIT is next.
    fn begin_time_wait(&self, now: Instant) -> TimeWait {
        let window = self.receive.offered() >> self.receive.scale;
        TimeWait {
            until: now + TIME_WAIT_LEN,
            challenges: self.challenges.clone(),
            timestamps: self.timestamps.clone(),
            seq: self.send.nxt,
            ack: self.receive.nxt,
            max_window: self.send.max_window,
            window: window.min(0xffff) as u16,
            scale: self.receive.scale,
            due: self.receive.owes_ack(),
        }
    }

    /// Releases all memory except what the user has not read.
    fn enter_time_wait(&mut self) {
        self.timers.stop();
        self.probe = false;
        self.send.release_buffers();
        self.receive.release_buffers();
        self.receive.stop();
    }

    /// Whether nobody will read what arrives. The peer gets a RST if this side sends no more either
    /// (Linux: `RCV_SHUTDOWN` in FIN-WAIT).
    fn discards_input(&self) -> bool {
        let closing = matches!(self.state, State::FinWait1(_) | State::FinWait2(_));
        self.orphan || (self.receive_shut && closing)
    }

    /// RFC 9293 §3.10.7.4, sixth, and §3.8.5 [MUST-30, MUST-31, MUST-32]; `start` is the sequence
    /// number of the payload.
    fn on_urgent(&mut self, header: &TcpHeader, start: SeqNum) {
        if !header.flags.contains(TcpFlags::URG)
            || header.urgent == 0
            || !self.state.may_receive()
            || self.orphan
        {
            return;
        }
        let byte = start + u32::from(header.urgent) - 1;
        if self.receive.mark_urgent(byte, self.urgent_place()) {
            self.events.insert(Events::URGENT);
        }
    }

    /// Reports once that the urgent byte has arrived.
    fn note_urgent_arrival(&mut self) {
        if self.receive.urgent.is_some() && self.receive.has_urgent() {
            self.events.insert(Events::PRIORITY);
        }
    }

    fn on_payload(&mut self, now: Instant, seq: SeqNum, payload: &[u8], fin: bool) {
        if !self.state.may_receive() {
            self.event_counters.count(Event::DropClosed);
            // RFC 9293 §3.10.7.4, seventh: data after the peer's FIN is ignored. Eighth: a FIN is
            // acknowledged.
            match &mut self.state {
                State::TimeWait(state) if fin => state.answer(now, fin),
                _ if fin => self.receive.want_ack(AckSchedule::Now),
                _ => {}
            }
            return;
        }
        // RFC 9293 §3.6.1 [SHLD-3] and RFC 2525 §2.17: nobody will ever read this data.
        let unread = (seq + payload.len() as u32).after(self.receive.nxt);
        if unread && self.discards_input() {
            let orphan = self.orphan;
            self.abort(now);
            // RFC 9293 §3.10.7.1: the answer to a segment with an acknowledgement.
            self.reset = Some(Reset {
                seq: self.send.una,
                ack: None,
            });
            if !orphan {
                self.fail(Error::Reset);
            }
            return;
        }
        if !payload.is_empty() {
            self.counters.data_in += 1;
        }
        let out_of_order = self.receive.out_of_order;
        let arrival = self.receive.arrive(now, seq, payload, fin, &self.send.rtt);
        if self.receive.out_of_order != out_of_order {
            self.event_counters.count(Event::OutOfOrder);
        } else if !arrival.readable && !payload.is_empty() {
            self.event_counters.count(Event::Duplicate);
            self.disable_handles();
        }
        if arrival.readable {
            self.events.insert(Events::READABLE);
        }
        self.note_urgent_arrival();
        if arrival.finished {
            self.events.insert(Events::PEER_CLOSED | Events::READABLE);
            let wait = self.begin_time_wait(now);
            match (self.state.fin(wait), &self.state) {
                (Err(Illegal), _) => self.event_counters.count(Event::DropClosed),
                (Ok(()), State::TimeWait(_)) => self.enter_time_wait(),
                (Ok(()), _) => {}
            }
        }
    }
}
