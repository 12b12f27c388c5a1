//! Tail loss probes (RFC 8985 §7): if the end of a flight is not acknowledged, one more segment elicits
//! the acknowledgement that shows what was lost.

use portolan_types::SeqNum;

use super::Sender;
use super::recovery::{AckInput, CaState};
use crate::cc::Signal;
use crate::encoding;

/// Nanoseconds that Linux adds to two round trips before it probes the tail of a flight.
const DELAYED_ACK: u64 = 200_000_000;
const TAIL_PATIENCE: u64 = 2_000_000;
/// RFC 8985 §7.2: the delay without a measured round trip.
const UNMEASURED: u64 = 1_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TailProbe {
    None,
    /// The next segment is the probe.
    Due,
    /// The probe ends at `end`, and is not acknowledged yet.
    Sent {
        end: SeqNum,
        retransmission: bool,
    },
}

encoding::variants!(TailProbe {
    0 => None,
    1 => Due,
    2 => Sent { end, retransmission },
});

impl Sender {
    /// RFC 8985 §7.2: how long the tail of the flight may stay unacknowledged before it is probed; nanoseconds.
    pub(crate) fn tail_probe_delay(&self) -> Option<u64> {
        let quiet = matches!(self.ca_state, CaState::Open | CaState::Reduced { .. });
        if self.tail != TailProbe::None || !quiet || self.board.sacked() > 0 {
            return None;
        }
        let Some(srtt) = self.rtt.smoothed_nanos() else {
            return Some(UNMEASURED);
        };
        // A single segment may be subject to a delayed acknowledgement.
        let single = self.board.outstanding() <= self.mss;
        let patience = if single { DELAYED_ACK } else { TAIL_PATIENCE };
        Some(2 * srtt + patience)
    }

    /// RFC 8985 §7.3: one segment may be sent although the window is full; without new bytes that
    /// the peer has room for, the last ones are retransmitted.
    pub(crate) fn probe_tail(&mut self) {
        if self.tail_probe_delay().is_none() {
            return;
        }
        self.tail = TailProbe::Due;
        let fits = self.nxt.before(self.una + self.window) || self.unsent() == 0;
        if !(self.has_unsent() && fits) {
            self.board.lose_last(self.mss);
        }
        self.forced = true;
    }

    /// Bytes in flight that were retransmitted because of a loss, which excludes a probe.
    pub(crate) fn lost_and_sent_again(&self) -> u32 {
        let probe = match self.tail {
            TailProbe::Sent {
                retransmission: true,
                ..
            } => self.mss,
            _ => 0,
        };
        self.board.retransmitted().saturating_sub(probe)
    }

    /// A segment that ends at `end` is sent.
    pub(super) fn note_tail(&mut self, end: SeqNum, retransmission: bool) {
        if self.tail == TailProbe::Due {
            self.tail = TailProbe::Sent {
                end,
                retransmission,
            };
        }
    }

    /// Whether a reported duplicate that ends at `at` is the probe.
    pub(super) fn is_tail_probe(&self, at: SeqNum) -> bool {
        matches!(self.tail, TailProbe::Sent { end, .. } if end == at)
    }

    /// RFC 8985 §7.4.2: whether the probe repaired a loss.
    pub(super) fn judge_tail_probe(
        &mut self,
        input: &AckInput<'_>,
        advanced: bool,
        reported: bool,
        news: bool,
    ) -> bool {
        let TailProbe::Sent {
            end,
            retransmission,
        } = self.tail
        else {
            return false;
        };
        if self.una.before(end) {
            return false;
        }
        if !retransmission || reported {
            self.tail = TailProbe::None;
        } else if self.una.after(end) {
            // The original was lost, and only the probe revealed it.
            self.tail = TailProbe::None;
            if self.ca_state == CaState::Open {
                self.reduce(Signal::Loss);
                self.undo = None;
                self.congestion.set_window(self.congestion.ssthresh());
            }
            return true;
        } else if !advanced && !news && !input.occupies {
            // A plain duplicate acknowledgement: original and probe both arrived.
            self.tail = TailProbe::None;
        }
        false
    }
}
