//! Undoing spurious reductions of the window, when segments thought lost were only late. Detected by
//! the timestamp that the original's acknowledgement echoes (Eifel, RFC 3522), by reports that every
//! retransmission was a duplicate (RFC 3708), or by what arrives after a time-out (F-RTO, RFC 5682).
//! The response is that of RFC 4015.

use portolan_types::{Instant, SeqNum};

use super::Sender;
use super::recovery::{AckInput, CaState};
use crate::cc::Signal;
use crate::encoding;
use crate::event_counters::{Event, EventCounters};
use crate::sack::Delivery;

/// State needed to undo the current reduction.
#[derive(Clone, Debug)]
pub(crate) struct Undo {
    /// The oldest unacknowledged byte when the window was reduced.
    marker: SeqNum,
    /// The reduction was caused by a time-out.
    after_time_out: bool,
    /// When the first retransmission was sent.
    retransmitted_at: Option<Instant>,
    /// Retransmitted ranges not reported as duplicates; none if there are too many to remember, and
    /// then this criterion is not used.
    unreported: Option<Vec<(SeqNum, SeqNum)>>,
}

encoding::fields!(Undo {
    marker,
    after_time_out,
    retransmitted_at,
    unreported
});

/// Limit of the ranges remembered per episode.
const MAX_RANGES: usize = 64;

/// State of F-RTO after a time-out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ForwardRto {
    Off,
    /// RFC 5682 §2.1 step 2: the first acknowledgement decides.
    Waiting,
    /// Step 2b: new data is sent instead of retransmissions; the next acknowledgement decides.
    Probing,
}

encoding::variants!(ForwardRto {
    0 => Off,
    1 => Waiting,
    2 => Probing,
});

impl Undo {
    fn new(marker: SeqNum) -> Undo {
        Undo {
            marker,
            after_time_out: false,
            retransmitted_at: None,
            unreported: Some(Vec::new()),
        }
    }

    fn retransmitted(&mut self, start: SeqNum, end: SeqNum) {
        let Some(ranges) = &mut self.unreported else {
            return;
        };
        if let Some(range) = ranges.iter_mut().find(|range| range.1 == start) {
            range.1 = end;
        } else if ranges.len() < MAX_RANGES {
            ranges.push((start, end));
        } else {
            self.unreported = None;
        }
    }

    /// RFC 3708 §3.2: only retransmitted ranges count, since the network duplicates packets, too.
    fn reported(&mut self, start: SeqNum, end: SeqNum) {
        let Some(ranges) = &mut self.unreported else {
            return;
        };
        let mut left = Vec::with_capacity(ranges.len());
        for &(from, to) in ranges.iter() {
            left.push((from, to.min(start.max(from))));
            left.push((from.max(end.min(to)), to));
        }
        left.retain(|(from, to)| from.before(*to));
        left.dedup();
        self.unreported = (left.len() <= MAX_RANGES).then_some(left);
    }

    fn all_reported(&self) -> bool {
        self.unreported.as_ref().is_some_and(Vec::is_empty)
    }

    fn is_consistent(&self, una: SeqNum) -> bool {
        self.marker.at_or_before(una)
            && self
                .unreported
                .as_ref()
                .is_none_or(|ranges| ranges.len() <= MAX_RANGES)
    }
}

impl Sender {
    /// The window is about to be reduced.
    pub(super) fn prepare_undo(&mut self, signal: Signal) {
        self.undo = Some(Undo {
            after_time_out: signal == Signal::Timeout,
            ..Undo::new(self.una)
        });
    }

    /// `start..end` is retransmitted.
    pub(super) fn note_retransmission(&mut self, start: SeqNum, end: SeqNum, now: Instant) {
        if let Some(undo) = &mut self.undo {
            undo.retransmitted_at.get_or_insert(now);
            undo.retransmitted(start, end);
        }
    }

    /// The peer reports that it received `start..end` twice (RFC 2883).
    pub(super) fn note_reported(&mut self, start: SeqNum, end: SeqNum) {
        if let Some(undo) = &mut self.undo
            && end.after(undo.marker)
        {
            undo.reported(start, end);
        }
    }

    /// Undoes the last reduction if it proves spurious.
    pub(super) fn try_undo(
        &mut self,
        input: &AckInput<'_>,
        advanced: bool,
        delivery: &Delivery,
        event_counters: &mut EventCounters,
    ) {
        let forward = self.step_forward_rto(input, advanced, delivery);
        let Some(undo) = &self.undo else {
            return;
        };
        let Some(first) = undo.retransmitted_at else {
            return;
        };
        // RFC 3522 §3.2 step 5.
        let late = delivery.echoes_before(first, input.now);
        let eifel = advanced && late && self.ca_state != CaState::Open;
        let event = if eifel {
            Event::UndoneByTimestamp
        } else if forward {
            Event::UndoneByProbing
        } else if undo.all_reported() {
            Event::UndoneByReport
        } else {
            return;
        };
        event_counters.count(event);
        if undo.after_time_out {
            event_counters.count(Event::SpuriousTimeout);
        } else {
            event_counters.count(Event::Reordering);
            self.board.note_late(undo.marker, delivery, self.mss);
        }
        self.undo_reduction();
    }

    fn undo_reduction(&mut self) {
        self.undo = None;
        self.forward_rto = ForwardRto::Off;
        self.congestion.undo();
        self.undone += 1;
        if self.ca_state != CaState::Open {
            self.board.find_all();
            self.ca_state = CaState::Open;
            self.duplicates = 0;
        }
    }

    /// RFC 5682 §3.1, for peers with and without SACK: returns true if the time-out was spurious.
    fn step_forward_rto(
        &mut self,
        input: &AckInput<'_>,
        advanced: bool,
        delivery: &Delivery,
    ) -> bool {
        let CaState::Loss { until } = self.ca_state else {
            return false;
        };
        if self.forward_rto == ForwardRto::Off {
            return false;
        }
        // Bytes sent once, before the time-out, have arrived. Without SACK they may have arrived long
        // ago, and the retransmission has filled the hole before them.
        let told = input.sack_permitted || !delivery.again;
        if told && delivery.original.is_some_and(|end| end.at_or_before(until)) {
            return true;
        }
        let duplicate = !advanced && !input.occupies;
        match self.forward_rto {
            ForwardRto::Waiting if advanced && self.una.before(until) && self.may_send_new() => {
                self.forward_rto = ForwardRto::Probing;
                self.ca_state = CaState::Loss { until: self.nxt };
            }
            ForwardRto::Waiting if !advanced && !duplicate => {}
            ForwardRto::Probing if !duplicate && delivery.bytes == 0 => {}
            _ => self.forward_rto = ForwardRto::Off,
        }
        false
    }

    /// Whether new bytes were sent after the first acknowledgement.
    pub(super) fn has_sent_beyond_ca_state(&self) -> bool {
        matches!(self.ca_state, CaState::Loss { until } if self.nxt.after(until))
    }

    fn may_send_new(&self) -> bool {
        self.unsent() > 0 && self.nxt.before(self.una + self.window)
    }

    pub(super) fn undo_is_consistent(&self) -> bool {
        self.undo
            .as_ref()
            .is_none_or(|undo| undo.is_consistent(self.una))
            && self.undone < 1 << 62
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn undo() -> Undo {
        let mut undo = Undo::new(SeqNum(0));
        undo.retransmitted(SeqNum(1000), SeqNum(2000));
        undo.retransmitted(SeqNum(2000), SeqNum(3000));
        undo.retransmitted(SeqNum(5000), SeqNum(6000));
        undo
    }

    #[test]
    fn all_is_reported_once_each_byte_is() {
        let mut undo = undo();
        for (start, end) in [(1000, 2500), (0, 1000), (5000, 6000)] {
            undo.reported(SeqNum(start), SeqNum(end));
            assert!(!undo.all_reported());
        }
        undo.reported(SeqNum(2400), SeqNum(3000));
        assert!(undo.all_reported());
    }

    #[test]
    fn duplicates_that_the_network_made_do_not_count() {
        let mut undo = undo();
        for i in 6..20 {
            undo.reported(SeqNum(i * 1000), SeqNum((i + 1) * 1000));
        }
        assert!(!undo.all_reported());
    }

    #[test]
    fn too_much_to_remember_is_no_evidence() {
        let mut undo = undo();
        for i in 0..100 {
            undo.retransmitted(SeqNum(i * 10), SeqNum(i * 10 + 5));
        }
        assert!(!undo.all_reported());
    }
}
