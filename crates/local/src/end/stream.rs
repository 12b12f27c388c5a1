//! An end as a stream: the operations of programs, as on a TCP connection.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use portolan_proto::local::{Side, flags};
use portolan_tcp::{
    Chronometer, CongestionKind, EVENTS_MAX, Error, Options, OrphanWait, OutOfBand, RunningTimer,
    SendSpace, StateName, TcpInfo,
};
use portolan_types::{Instant, SeqNum};

use super::{CYCLE, Local, SEGMENT};
use crate::stream::Stream;

/// Linux's `TCP_ATO_MIN`.
const ACK_DELAY: Duration = Duration::from_millis(40);

/// Segments of a handshake that each side sees.
const HANDSHAKE: u64 = 2;

/// Approximate round-trip time that Linux shows over loopback.
const ROUND_TRIP: Duration = Duration::from_micros(20);

impl Stream for Local {
    fn send(&mut self, now: Instant, data: &[u8]) -> usize {
        if !self.may_send() {
            return 0;
        }
        if self.peer.flags & flags::CLOSED != 0 {
            // The data would be sent, and answered by a reset.
            self.events = self.events | self.fail(self.reset_error());
            return data.len();
        }
        if self.unread() == 0 {
            self.base = self.own.sent;
            self.cycle = CYCLE.min(self.rings.size() as u64);
        }
        let count = data.len().min(Local::to_length(self.room()));
        if count < data.len() {
            self.is_blocked = true;
        }
        if count == 0 {
            return 0;
        }
        if self.unread() + count as u64 > self.cycle {
            self.cycle = self.rings.size() as u64;
        }
        let offset = self.own.sent.wrapping_sub(self.base);
        let cycle = Local::to_length(self.cycle);
        self.rings.put(self.side, cycle, offset, &data[..count]);
        if self.own.shown == self.own.sent {
            self.held_since = now;
        }
        self.is_pushed = false;
        self.own.sent += count as u64;
        if self.last_in > self.last_out {
            self.is_answering = now.since(self.last_in) < ACK_DELAY;
        }
        self.last_out = now;
        self.writes += 1;
        count
    }

    fn mark_urgent(&mut self) {
        if self.may_send() && self.own.sent > 0 {
            self.urgent_out = self.own.sent;
            self.push();
        }
    }

    fn send_space(&self) -> usize {
        if self.may_send() {
            Local::to_length(self.room())
        } else {
            0
        }
    }

    fn recv(&mut self, _now: Instant, out: &mut [u8]) -> usize {
        if out.is_empty() {
            return 0;
        }
        let (skip, length) = self.span();
        let count = out.len().min(Local::to_length(length));
        self.copy_out(self.own.taken + skip, &mut out[..count]);
        self.own.taken += skip + count as u64;
        if self.mark.is_some_and(|mark| self.own.taken > mark.at) {
            self.mark = None;
        }
        count
    }

    fn peek(&self, offset: usize, out: &mut [u8]) -> usize {
        let (skip, length) = self.span();
        let left = Local::to_length(length).saturating_sub(offset);
        let count = out.len().min(left);
        self.copy_out(self.own.taken + skip + offset as u64, &mut out[..count]);
        count
    }

    fn readable(&self) -> usize {
        Local::to_length(self.span().1)
    }

    fn is_readable(&self) -> bool {
        let sender = u64::from(self.theirs().kept.0.send_limit.load(Relaxed));
        let most = self.limit_of(sender, self.mine()) / 2;
        let least = self.options.receive_low_water.min(Local::to_length(most));
        self.readable() >= least.max(1)
    }

    fn inquiry(&self) -> usize {
        let queued = self.queued();
        let before = match self.mark {
            Some(mark) if !self.options.urgent_inline => mark.at.saturating_sub(self.own.taken),
            _ => queued,
        };
        Local::to_length(before.min(queued))
    }

    fn poll_writable(&mut self) -> bool {
        let is_writable = self.may_send() && self.has_room();
        self.is_blocked |= self.may_send() && !is_writable;
        is_writable
    }

    fn has_output(&self) -> bool {
        self.own != self.published || self.has_grown
    }

    fn last_text_at(&self) -> Instant {
        self.last_in
    }

    fn is_at_mark(&self) -> bool {
        self.mark.is_some_and(|mark| mark.at == self.own.taken)
    }

    fn has_urgent(&self) -> bool {
        self.mark
            .is_some_and(|mark| !mark.taken && (self.own.taken..self.peer.sent).contains(&mark.at))
    }

    fn peek_urgent(&self) -> OutOfBand {
        match self.mark {
            Some(mark) if !mark.taken && !self.options.urgent_inline => {
                if !self.has_urgent() {
                    return OutOfBand::Announced;
                }
                let mut byte = [0];
                self.copy_out(mark.at, &mut byte);
                OutOfBand::Byte(byte[0])
            }
            _ => OutOfBand::Nothing,
        }
    }

    fn take_urgent(&mut self) -> OutOfBand {
        let found = self.peek_urgent();
        if let (OutOfBand::Byte(_), Some(mark)) = (found, &mut self.mark) {
            mark.taken = true;
            let behind = mark.at + 1;
            self.mine().kept.0.urgent_taken.store(behind, Relaxed);
        }
        found
    }

    fn shutdown_send(&mut self, _now: Instant) {
        if !self.has_failed {
            self.send_fin();
        }
    }

    fn shutdown_receive(&mut self) {
        self.receive_shut = true;
        self.mine().kept.0.receive_shut.store(1, Relaxed);
    }

    fn close(&mut self, now: Instant) {
        if self.own.flags & flags::RESET != 0 {
            // A FIN beside the reset would change the error that the peer sees.
            self.own.flags |= flags::CLOSED;
            return;
        }
        // Data that was received but not seen yet counts as unread, too.
        self.events = self.look(now);
        if self.queued() > 0 || self.options.reset_on_close {
            return self.abort(now);
        }
        self.send_fin();
        self.own.flags |= flags::CLOSED;
        self.is_blocked = self.waiting() > 0;
        match self.options.orphan_wait {
            OrphanWait::Default => {}
            OrphanWait::For(wait) => {
                let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX);
                self.mine().kept.0.fin_wait.store(seconds, Relaxed);
            }
            // Linux resets a connection that would wait for the peer's FIN.
            OrphanWait::Never if self.peer.flags & flags::FIN == 0 => {
                self.own.flags |= flags::RESET;
            }
            OrphanWait::Never => {}
        }
    }

    fn abort(&mut self, _now: Instant) {
        self.own.flags |= flags::RESET | flags::CLOSED;
        self.has_failed = true;
    }

    fn state(&self) -> StateName {
        let (own, peer) = (self.own.flags & flags::FIN, self.peer.flags & flags::FIN);
        match (own, peer) {
            _ if self.is_closed() => StateName::Closed,
            (0, 0) => StateName::Established,
            (0, _) => StateName::CloseWait,
            (_, _) => StateName::FinWait2,
        }
    }

    fn is_send_closed(&self) -> bool {
        !self.may_send()
    }

    fn is_receive_shut(&self) -> bool {
        self.receive_shut || self.peer.flags & flags::FIN != 0 || self.is_closed()
    }

    fn has_read_end(&self) -> bool {
        self.queued() == 0 && self.peer.flags & flags::FIN != 0
    }

    fn is_receive_finished(&self) -> bool {
        self.queued() == 0 && self.is_receive_shut()
    }

    fn is_closed(&self) -> bool {
        self.has_failed || self.own.flags & self.peer.flags & flags::FIN != 0
    }

    fn is_flushed(&self) -> bool {
        self.waiting() == 0 || self.has_failed || self.peer.flags & flags::CLOSED != 0
    }

    fn error(&self) -> Option<Error> {
        self.error
    }

    /// There are no segments.
    fn end_record(&mut self) {}

    /// Holds nothing back until the next write.
    fn push(&mut self) {
        self.is_pushed = true;
    }

    fn ack_quickly(&mut self) {
        self.is_answering = false;
    }

    fn ack_lazily(&mut self) {
        self.is_answering = true;
    }

    fn take_error(&mut self) -> Option<Error> {
        let error = self.error.take();
        if error.is_some() {
            self.mine().kept.0.error_told.store(1, Relaxed);
        }
        error
    }

    fn options(&mut self) -> &mut Options {
        &mut self.options
    }

    fn set_send_buffer(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.send_limit = bytes.into();
        self.mine().kept.0.send_limit.store(bytes, Relaxed);
    }

    fn set_receive_buffer(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let before = self.mine().kept.0.receive_limit.swap(bytes, Relaxed);
        self.has_grown |= bytes > before;
    }

    /// Nothing is lost between the two ends.
    fn running_timer(&self) -> Option<(RunningTimer, Instant)> {
        None
    }

    /// The values of a connection over Linux's loopback device.
    fn tcp_info(&self) -> TcpInfo {
        let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let unsent = self
            .waiting()
            .max(self.own.sent.saturating_sub(self.own.shown));
        let room = self.rings.size() as u64 - self.queued().min(self.rings.size() as u64);
        TcpInfo {
            srtt: Some(ROUND_TRIP),
            rttvar: ROUND_TRIP / 2,
            min_rtt: Some(ROUND_TRIP),
            rto: Duration::from_millis(200),
            cwnd: 10 * SEGMENT,
            ssthresh: u32::MAX,
            mss: SEGMENT,
            receive_mss: SEGMENT,
            unacknowledged: 0,
            sacked: 0,
            lost: 0,
            segments_unacknowledged: 0,
            segments_delivered: self.writes + 1,
            backoff: 0,
            probes: 0,
            retransmits: 0,
            bytes_in: self.peer.sent,
            bytes_out: self.own.sent,
            // Including those of the handshake.
            segments_in: self.reads + HANDSHAKE,
            segments_out: self.writes + HANDSHAKE,
            receive_queue: Local::to_length(self.queued()),
            send_queue: Local::to_length(unsent),
            unsent: bytes(unsent),
            send_window: bytes(self.room()),
            receive_window: bytes(room),
            send_buffer: Local::to_length(self.limit()),
            receive_buffer: self.rings.size(),
            send_scale: 7,
            receive_scale: 7,
            timestamps: true,
            sack: true,
            window_scaling: true,
            congestion: CongestionKind::default(),
            pacing_rate: None,
            delivery_rate: None,
            rate_limited_by_application: true,
            ecn: false,
            undone: 0,
            fast_recovery: false,
            loss_recovery: false,
            last_data_sent: self.last_out,
            last_data_received: self.last_in,
            last_heard: self.last_in,
            full_segment_in: SEGMENT,
            ack_delay: ACK_DELAY,
            pingpong: self.is_answering,
            data_segments_in: self.reads,
            data_segments_out: self.writes,
            bytes_retransmitted: 0,
            // Including the SYN.
            bytes_acknowledged: self.own.sent + u64::from(self.side == Side::Opener),
            out_of_order: 0,
            receive_rtt: Duration::ZERO,
            receive_space: bytes(self.rings.size() as u64),
            keepalives: 0,
            chronometer: Chronometer::default(),
            early_data: self.rings.ends().opener.kept.0.early.load(Relaxed) != 0,
            duplicates_reported: 0,
            delivered_marked: 0,
            reordering: 3,
            reorderings: 0,
        }
    }

    /// Sent bytes have arrived.
    fn edges(&self) -> SendSpace {
        // Sequence numbers are the low bits of positions.
        let end = SeqNum(self.own.sent as u32);
        SendSpace {
            una: end,
            nxt: end,
            end,
        }
    }

    fn counts(&self) -> &[u32; EVENTS_MAX] {
        const NONE: [u32; EVENTS_MAX] = [0; EVENTS_MAX];
        &NONE
    }

    fn retransmissions_in_flight(&self) -> u32 {
        0
    }
}
