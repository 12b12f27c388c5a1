//! Validation of a connection that another process has encoded.

use core::time::Duration;

use crate::buffer::LARGEST;
use crate::connection::{Connection, Counters};
use crate::encoding::Invalid;
use crate::receive::MAX_SCALE;
use crate::send::Sender;
use crate::state::State;

/// Minimum idle time and interval of keep-alive probes: no socket can request less (`TCP_KEEPIDLE`, `TCP_KEEPINTVL`).
const LEAST_PAUSE: Duration = Duration::from_secs(1);

impl Connection {
    /// Checks every invariant that the code relies on, and the bounds of all sizes.
    pub fn validate(&self) -> Result<(), Invalid> {
        if !self.send.is_consistent() {
            return Err(Invalid::Send);
        }
        if !self.receive.is_consistent() {
            return Err(Invalid::Receive);
        }
        if !self.state_fits() {
            return Err(Invalid::State);
        }
        if !self.path.is_consistent() {
            return Err(Invalid::Send);
        }
        if !self.counters.are_bounded() {
            return Err(Invalid::Counters);
        }
        if self.demux.as_ref().is_some_and(|demux| !demux.is_sound()) {
            return Err(Invalid::Options);
        }
        let options = &self.options;
        let keepalive = &options.keepalive;
        // Probes without a pause between them would never end.
        let is_hurried = keepalive.idle < LEAST_PAUSE || keepalive.interval < LEAST_PAUSE;
        if options.receive_low_water > LARGEST
            || options.max_segment.is_some_and(|m| m == 0)
            || is_hurried
            || keepalive.count == 0
        {
            return Err(Invalid::Options);
        }
        Ok(())
    }

    fn state_fits(&self) -> bool {
        let unsynchronized = self.send.una == self.send.nxt && self.send.board.is_empty();
        let flushed = unsynchronized && !self.send.fin && self.send.buffer.len() == 0;
        let peer_closed = self.receive.fin_consumed();
        match &self.state {
            State::SynSent(s) => {
                let early = s.fast.as_ref().map_or(0, |fast| fast.sent as usize);
                unsynchronized
                    && s.iss + 1 == self.send.una
                    && !self.send.fin
                    && early <= self.send.buffer.len()
            }
            State::SynReceived(s) if s.fast => {
                !peer_closed
                    && s.iss + 1 == self.send.una
                    && self.receive.nxt.at_or_after(s.irs + 1)
            }
            State::SynReceived(s) => {
                unsynchronized && s.iss + 1 == self.send.una && s.irs + 1 == self.receive.nxt
            }
            State::Established(_) => !self.send.fin && !peer_closed,
            State::CloseWait(_) => !self.send.fin && peer_closed,
            State::FinWait1(_) => self.send.fin && !peer_closed,
            State::Closing(_) | State::LastAck(_) => self.send.fin && peer_closed,
            State::FinWait2(_) => flushed && !peer_closed,
            State::TimeWait(s) => flushed && peer_closed && s.is_consistent(),
            State::Closed(_) => flushed,
        }
    }
}

impl Counters {
    fn are_bounded(&self) -> bool {
        [
            self.segments_in,
            self.segments_out,
            self.data_in,
            self.data_out,
            self.bytes_out,
            self.retransmits,
            self.bytes_retransmitted,
            self.bytes_acknowledged,
            self.delivered_marked,
        ]
        .iter()
        .all(|&count| count < 1 << 62)
    }
}

impl Sender {
    fn is_consistent(&self) -> bool {
        let queued = self.buffer.len();
        let sent = self.nxt - self.una;
        self.buffer.span() == queued
            && queued <= LARGEST
            && sent as usize <= queued + usize::from(self.fin)
            && self.scale <= MAX_SCALE
            && self.window <= 0xffff << MAX_SCALE
            && (1..=0xffff << MAX_SCALE).contains(&self.max_window.max(1))
            && self.board.is_consistent(self.una, self.nxt)
            && self.rtt.is_consistent()
            && self.congestion.is_consistent()
            && self.bounds_hold()
    }
}
