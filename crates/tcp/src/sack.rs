//! The scoreboard: the fate of each byte in flight (RFC 6675 §3), and which bytes count as lost by
//! the time they were sent (RFC 8985). It makes no decisions about windows.
//!
//! Records cover `una..nxt` without holes. A record stands for one transmission, or for the part of
//! it with the same fate; adjacent SACKed records are merged.

use core::time::Duration;
use std::collections::VecDeque;

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::SackBlock;

use crate::cc::{Newest, Stamp};
use crate::encoding;

/// At this number of records neighbours are merged, and SACK blocks no longer split them.
const MAX_RECORDS: usize = 8192;
/// RFC 6675 §2: a hole is lost once this many segments beyond it are SACKed.
const DUP_THRESH: u32 = 3;
/// RFC 8985 §6.2: duplicates are remembered for this many recoveries.
const PERSIST: u32 = 16;
/// Linux's `tcp_max_reordering`.
const MAX_REORDERING: u32 = 300;
/// Linux's bound; the smoothed round trip is a tighter one.
const MAX_QUARTERS: u32 = 255;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Outstanding,
    Sacked,
    /// Waits for retransmission, which makes it outstanding.
    Lost,
}

encoding::variants!(Fate {
    0 => Outstanding,
    1 => Sacked,
    2 => Lost,
});

#[derive(Clone, Copy, Debug)]
struct Record {
    start: SeqNum,
    end: SeqNum,
    sent: Instant,
    fate: Fate,
    retransmitted: bool,
    stamp: Stamp,
}

encoding::fields!(Record {
    start,
    end,
    sent,
    fate,
    retransmitted,
    stamp
});

impl Record {
    fn len(&self) -> u32 {
        self.end - self.start
    }
}

/// The result of one acknowledgement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Delivery {
    /// Bytes newly known to have arrived.
    pub(crate) bytes: u32,
    /// When the newest of them was sent; none if all had been retransmitted (Karn).
    pub(crate) sent: Option<Instant>,
    /// End of the first of them that were sent only once.
    pub(crate) original: Option<SeqNum>,
    /// Some of them had been retransmitted.
    pub(crate) again: bool,
    /// End of the highest SACKed byte before the acknowledgement.
    highest: Option<SeqNum>,
    /// Start of the first of them that were overtaken by later ones.
    overtaken: Option<SeqNum>,
    /// Their newest transmission.
    pub(crate) newest: Option<Newest>,
    /// How long ago the segment was sent whose timestamp the acknowledgement echoes.
    pub(crate) echo: Option<Duration>,
    /// Nanoseconds.
    pub(crate) min_rtt: u64,
}

impl Delivery {
    /// Whether the acknowledgement echoes a segment sent before `moment`. The timestamp clock counts
    /// milliseconds.
    pub(crate) fn echoes_before(&self, moment: Instant, now: Instant) -> bool {
        self.echo
            .is_some_and(|echo| now.before_by(echo).as_millis() < moment.as_millis())
    }
}

/// The newest transmission known to have arrived (RFC 8985 §5.2).
#[derive(Clone, Debug)]
struct Rack {
    sent: Instant,
    end: SeqNum,
    rtt: Duration,
}

encoding::fields!(Rack { sent, end, rtt });

#[derive(Clone, Debug, Default)]
pub(crate) struct Scoreboard {
    records: VecDeque<Record>,
    sacked: u32,
    lost: u32,
    rack: Option<Rack>,
    /// End of the highest SACKed byte, while there is one.
    highest: Option<SeqNum>,
    /// Largest delay of a late segment, in segments, if above the default; and the number of late segments.
    reordering: u32,
    reorderings: u32,
    reorder_window: ReorderWindow,
}

encoding::fields!(Scoreboard {
    records,
    sacked,
    lost,
    rack,
    highest,
    reordering,
    reorderings,
    reorder_window
});

/// How many quarters of the minimum round trip a segment may be late (RFC 8985 §6.2 step 4).
#[derive(Clone, Debug)]
struct ReorderWindow {
    quarters: u32,
    /// Recoveries after which duplicates reported by the peer are forgotten.
    persist: u32,
    /// Duplicates reported before this is acknowledged belong to one round trip.
    round_end: Option<SeqNum>,
}

encoding::fields!(ReorderWindow {
    quarters,
    persist,
    round_end
});

impl Default for ReorderWindow {
    fn default() -> ReorderWindow {
        ReorderWindow {
            quarters: 1,
            persist: 0,
            round_end: None,
        }
    }
}

impl Scoreboard {
    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(crate) fn shrink(&mut self) {
        self.records.shrink_to_fit();
    }

    /// When the oldest bytes in flight were last sent.
    pub(crate) fn oldest_sent(&self) -> Option<Instant> {
        self.records.front().map(|record| record.sent)
    }

    /// Bytes sent and not cumulatively acknowledged.
    pub(crate) fn outstanding(&self) -> u32 {
        match (self.records.front(), self.records.back()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0,
        }
    }

    /// Bytes believed to be in the network (`pipe` of RFC 6675).
    pub(crate) fn in_flight(&self) -> u32 {
        self.outstanding() - self.sacked - self.lost
    }

    pub(crate) fn sacked(&self) -> u32 {
        self.sacked
    }

    pub(crate) fn lost(&self) -> u32 {
        self.lost
    }

    /// `start..end` was sent for the first time; `start` is the end of the last record.
    pub(crate) fn push(&mut self, start: SeqNum, end: SeqNum, now: Instant, stamp: Stamp) {
        if self.records.len() >= MAX_RECORDS
            && let Some(last) = self.records.back_mut()
            && last.fate == Fate::Outstanding
        {
            last.end = end;
            last.sent = now;
            last.stamp = stamp;
            return;
        }
        self.records.push_back(Record {
            start,
            end,
            sent: now,
            fate: Fate::Outstanding,
            retransmitted: false,
            stamp,
        });
    }

    /// The delivery record of an acknowledgement about to be processed.
    pub(crate) fn expect(&self, min_rtt: u64) -> Delivery {
        Delivery {
            highest: self.highest,
            min_rtt,
            ..Delivery::default()
        }
    }

    /// Everything before `una` is acknowledged.
    pub(crate) fn acknowledge(&mut self, una: SeqNum, now: Instant, delivery: &mut Delivery) {
        while let Some(first) = self.records.front().copied() {
            if first.start.at_or_after(una) {
                break;
            }
            let acked = Record {
                end: first.end.min(una),
                ..first
            };
            self.uncount(acked);
            if acked.fate != Fate::Sacked {
                self.deliver(acked, now, delivery);
            }
            if first.end.after(una) {
                self.records[0].start = una;
                break;
            }
            self.records.pop_front();
        }
        self.highest = self.highest.filter(|h| h.after(una));
    }

    /// The peer has received the bytes of `block`; returns whether this is new.
    pub(crate) fn sack(&mut self, block: SackBlock, now: Instant, delivery: &mut Delivery) -> bool {
        let (Some(first), Some(last)) = (self.records.front(), self.records.back()) else {
            return false;
        };
        let (start, end) = (block.start, block.end);
        if !start.before(end) || start.before(first.start) || end.after(last.end) {
            return false;
        }
        self.split(start);
        self.split(end);
        let from = self.records.partition_point(|r| r.start.before(start));
        let to = self.records.partition_point(|r| r.end.at_or_before(end));
        let mut news = false;
        for i in from..to {
            let record = self.records[i];
            if record.fate != Fate::Sacked {
                news = true;
                self.uncount(record);
                self.sacked += record.len();
                self.records[i].fate = Fate::Sacked;
                self.deliver(record, now, delivery);
            }
        }
        if news {
            self.highest = Some(self.highest.map_or(end, |h| h.max(end)));
            self.merge_sacked(from, to);
        }
        news
    }

    /// RFC 8985 §6.2 step 5: marks as lost what was sent long enough before the newest delivered
    /// transmission. Returns the bytes newly lost and when to check again.
    pub(crate) fn detect_loss(&mut self, now: Instant, window: Duration) -> (u32, Option<Instant>) {
        let Some(rack) = self.rack.clone() else {
            return (0, None);
        };
        let before = self.lost;
        let mut again: Option<Instant> = None;
        for record in &mut self.records {
            let earlier = record.sent < rack.sent
                || (record.sent == rack.sent && record.end.before(rack.end));
            if record.fate != Fate::Outstanding || !earlier {
                continue;
            }
            let due = record.sent + rack.rtt + window;
            if due <= now {
                record.fate = Fate::Lost;
                self.lost += record.len();
            } else {
                again = Some(again.map_or(due, |a| a.max(due)));
            }
        }
        (self.lost - before, again)
    }

    /// RFC 8985 §6.2 step 4: how late a segment may be before it counts as lost.
    pub(crate) fn reordering_window(
        &self,
        recovering: bool,
        mss: u32,
        min_rtt: Duration,
        srtt: Duration,
    ) -> Duration {
        if self.reorderings == 0 && (recovering || self.sacked >= DUP_THRESH * mss) {
            Duration::ZERO
        } else {
            (min_rtt / 4)
                .saturating_mul(self.reorder_window.quarters)
                .min(srtt)
        }
    }

    /// Measures the delay of a segment that was overtaken (Linux's `tcp_check_sack_reordering`).
    /// Returns true if one was.
    pub(crate) fn note_reordering(&mut self, delivery: &Delivery, una: SeqNum, mss: u32) -> bool {
        let Some(first) = delivery.overtaken else {
            return false;
        };
        self.measure_reordering(first, self.highest.unwrap_or(una), mss);
        true
    }

    /// The segment at `start` was considered lost although it was only late.
    pub(crate) fn note_late(&mut self, start: SeqNum, delivery: &Delivery, mss: u32) {
        self.measure_reordering(start, delivery.highest.unwrap_or(start), mss);
    }

    fn measure_reordering(&mut self, start: SeqNum, highest: SeqNum, mss: u32) {
        let distance = u32::try_from(highest.distance(start)).unwrap_or(0);
        self.reordering = self
            .reordering
            .max(distance.div_ceil(mss))
            .min(MAX_REORDERING);
        self.reorderings = self.reorderings.saturating_add(1);
    }

    /// Number of segments that one may be late without counting as lost.
    pub(crate) fn reordering(&self) -> u32 {
        self.reordering.max(DUP_THRESH)
    }

    /// How often a segment was overtaken by later ones.
    pub(crate) fn reorderings(&self) -> u32 {
        self.reorderings
    }

    /// Retransmitted bytes in flight.
    pub(crate) fn retransmitted(&self) -> u32 {
        let again = |r: &&Record| r.retransmitted && r.fate == Fate::Outstanding;
        self.records.iter().filter(again).map(Record::len).sum()
    }

    /// Number of segments in the records.
    pub(crate) fn segments(&self, mss: u32) -> u32 {
        self.records.iter().map(|r| r.len().div_ceil(mss)).sum()
    }

    /// Number of segments in the records that the peer has not SACKed.
    pub(crate) fn segments_missing(&self, mss: u32) -> u32 {
        let is_missing = |r: &&Record| r.fate != Fate::Sacked;
        let missing = self.records.iter().filter(is_missing);
        missing.map(|r| r.len().div_ceil(mss)).sum()
    }

    /// RFC 8985 §6.2 step 4: the peer received a segment twice, so the reordering window was too short.
    pub(crate) fn note_duplicate(&mut self, una: SeqNum, nxt: SeqNum) {
        if self
            .reorder_window
            .round_end
            .is_none_or(|end| una.at_or_after(end))
        {
            self.reorder_window = ReorderWindow {
                quarters: self
                    .reorder_window
                    .quarters
                    .saturating_add(1)
                    .min(MAX_QUARTERS),
                persist: PERSIST,
                round_end: Some(nxt),
            };
        }
    }

    /// A recovery has ended.
    pub(crate) fn note_recovery(&mut self) {
        self.reorder_window.persist = self.reorder_window.persist.saturating_sub(1);
        if self.reorder_window.persist == 0 {
            self.reorder_window = ReorderWindow::default();
        }
    }

    /// Marks the first `bytes` in flight as lost (three duplicate or one partial acknowledgement from
    /// a peer without SACK).
    pub(crate) fn lose_first(&mut self, bytes: u32) {
        let Some(first) = self.records.front() else {
            return;
        };
        let end = first.start + bytes.min(first.len());
        self.split(end);
        let first = &mut self.records[0];
        if first.fate == Fate::Outstanding {
            first.fate = Fate::Lost;
            self.lost += first.len();
        }
    }

    /// Marks records longer than `mss` and not SACKed as lost: the path cannot carry them. Returns whether there are
    /// any.
    pub(crate) fn lose_larger(&mut self, mss: u32) -> bool {
        let before = self.lost;
        for record in &mut self.records {
            if record.fate == Fate::Outstanding && record.len() > mss {
                record.fate = Fate::Lost;
                self.lost += record.len();
            }
        }
        self.lost > before
    }

    /// A retransmission time-out: marks the first bytes as lost, and those sent before `limit` (RFC 8985
    /// §6.3). If the first record is SACKed, the peer has reneged, and its SACK information is discarded
    /// (RFC 2018 §8).
    pub(crate) fn lose_sent_before(&mut self, limit: Instant) {
        let reneged = self.records.front().is_some_and(|r| r.fate == Fate::Sacked);
        self.lost = 0;
        for (i, record) in self.records.iter_mut().enumerate() {
            let late = i == 0 || record.sent < limit || record.fate == Fate::Lost;
            if reneged || (late && record.fate != Fate::Sacked) {
                record.fate = Fate::Lost;
                self.lost += record.len();
            }
        }
        if reneged {
            self.sacked = 0;
            self.highest = None;
        }
    }

    /// Clears all loss marks: nothing was lost.
    pub(crate) fn find_all(&mut self) {
        for record in &mut self.records {
            if record.fate == Fate::Lost {
                record.fate = Fate::Outstanding;
            }
        }
        self.lost = 0;
    }

    /// The first lost bytes, at most `limit`.
    pub(crate) fn first_lost(&self, limit: u32) -> Option<(SeqNum, u32)> {
        if self.lost == 0 {
            return None;
        }
        let i = self.records.iter().position(|r| r.fate == Fate::Lost)?;
        let start = self.records[i].start;
        let mut end = start;
        for record in self.records.range(i..) {
            if record.fate != Fate::Lost || end - start >= limit {
                break;
            }
            end = record.end;
        }
        Some((start, (end - start).min(limit)))
    }

    /// Marks the last `bytes` in flight for retransmission as a probe, unless they are SACKed or lost.
    pub(crate) fn lose_last(&mut self, bytes: u32) {
        let Some(last) = self.records.back().filter(|r| r.fate == Fate::Outstanding) else {
            return;
        };
        self.split(last.end - bytes.min(last.len()));
        if let Some(last) = self.records.back_mut() {
            last.fate = Fate::Lost;
            self.lost += last.len();
        }
    }

    /// `start..start + len` is retransmitted.
    pub(crate) fn retransmit(&mut self, start: SeqNum, len: u32, now: Instant, stamp: Stamp) {
        let end = start + len;
        self.split(start);
        self.split(end);
        let from = self.records.partition_point(|r| r.start.before(start));
        for i in from..self.records.len() {
            if self.records[i].end.after(end) {
                break;
            }
            self.uncount(self.records[i]);
            let record = &mut self.records[i];
            record.fate = Fate::Outstanding;
            record.retransmitted = true;
            record.sent = now;
            record.stamp = stamp;
        }
    }

    /// Whether the records cover `una..nxt` and the sums agree.
    pub(crate) fn is_consistent(&self, una: SeqNum, nxt: SeqNum) -> bool {
        let mut at = una;
        let (mut sacked, mut lost) = (0u64, 0u64);
        for record in &self.records {
            if record.start != at || !record.start.before(record.end) {
                return false;
            }
            at = record.end;
            match record.fate {
                Fate::Sacked => sacked += u64::from(record.len()),
                Fate::Lost => lost += u64::from(record.len()),
                Fate::Outstanding => {}
            }
        }
        (1..=MAX_QUARTERS).contains(&self.reorder_window.quarters)
            && self.reorder_window.persist <= PERSIST
            && self.reordering <= MAX_REORDERING
            // Splitting at both ends of a block may exceed the limit by a few.
            && self.records.len() <= MAX_RECORDS + 4
            && at == nxt
            && sacked == u64::from(self.sacked)
            && lost == u64::from(self.lost)
            && self
                .highest
                .is_none_or(|h| h.after(una) && h.at_or_before(nxt))
    }

    fn uncount(&mut self, record: Record) {
        match record.fate {
            Fate::Sacked => self.sacked -= record.len(),
            Fate::Lost => self.lost -= record.len(),
            Fate::Outstanding => {}
        }
    }

    fn deliver(&mut self, record: Record, now: Instant, delivery: &mut Delivery) {
        delivery.bytes += record.len();
        delivery.newest = Newest::choose(delivery.newest, record.stamp, record.sent);
        let rtt = now.since(record.sent);
        if !record.retransmitted {
            delivery.sent = Some(delivery.sent.map_or(record.sent, |s| s.max(record.sent)));
            let end = record.end;
            delivery.original = Some(delivery.original.map_or(end, |first| first.min(end)));
            // RFC 8985 §6.2 step 3: later bytes overtook it.
            if delivery.highest.is_some_and(|h| record.end.before(h)) {
                let start = record.start;
                delivery.overtaken =
                    Some(delivery.overtaken.map_or(start, |first| first.min(start)));
            }
        } else {
            delivery.again = true;
            // RFC 8985 §6.2 step 2: too early to be for the retransmission; the original arrived.
            let older = delivery.echoes_before(record.sent, now);
            if older || rtt.as_nanos() < u128::from(delivery.min_rtt) {
                return;
            }
        }
        let newer = self.rack.as_ref().is_none_or(|r| {
            record.sent > r.sent || (record.sent == r.sent && record.end.after(r.end))
        });
        if newer {
            self.rack = Some(Rack {
                sent: record.sent,
                end: record.end,
                rtt,
            });
        }
    }

    /// Makes `at` a boundary between two records.
    fn split(&mut self, at: SeqNum) {
        if self.records.len() >= MAX_RECORDS {
            return;
        }
        let i = self.records.partition_point(|r| r.end.at_or_before(at));
        let Some(record) = self.records.get(i).copied() else {
            return;
        };
        if record.start.before(at) {
            self.records[i].end = at;
            self.records.insert(
                i + 1,
                Record {
                    start: at,
                    ..record
                },
            );
        }
    }

    /// Joins the SACKed records `from..to` with each other and with SACKed neighbours.
    fn merge_sacked(&mut self, from: usize, to: usize) {
        let mut first = from;
        while first > 0 && self.records[first - 1].fate == Fate::Sacked {
            first -= 1;
        }
        let mut last = to - 1;
        while last + 1 < self.records.len() && self.records[last + 1].fate == Fate::Sacked {
            last += 1;
        }
        if first < last {
            self.records[first].end = self.records[last].end;
            self.records.drain(first + 1..=last);
        }
    }
}

#[cfg(test)]
mod tests;
