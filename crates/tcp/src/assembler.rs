//! The bytes that have arrived beyond the next expected one, as sorted, disjoint ranges of sequence
//! space, and the order in which the ranges last changed (RFC 2018 §4 reports the newest first).

use arrayvec::ArrayVec;
use portolan_types::SeqNum;
use portolan_wire::tcp::SackBlock;

use crate::encoding;

/// Most ranges kept at a time; a segment that would start another one is discarded.
const MAX_RANGES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: SeqNum,
    end: SeqNum,
    /// The whole range has been reported to the peer.
    is_told: bool,
}

encoding::fields!(Range {
    start,
    end,
    is_told
});

#[derive(Clone, Debug, Default)]
pub(crate) struct Assembler {
    ranges: Vec<Range>,
    /// A sequence number inside each of the most recently changed ranges, newest first.
    recent: ArrayVec<SeqNum, 4>,
}

encoding::fields!(Assembler { ranges, recent });

impl Assembler {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Records `start..end`; returns false if there is no room for another range.
    pub(crate) fn insert(&mut self, start: SeqNum, end: SeqNum) -> bool {
        let first = self.ranges.partition_point(|r| r.end.before(start));
        let last = self.ranges.partition_point(|r| r.start.at_or_before(end));
        if first == last {
            if self.ranges.len() >= MAX_RANGES {
                return false;
            }
            let range = Range {
                start,
                end,
                is_told: false,
            };
            self.ranges.insert(first, range);
        } else {
            let merged = Range {
                start: start.min(self.ranges[first].start),
                end: end.max(self.ranges[last - 1].end),
                is_told: false,
            };
            self.ranges[first] = merged;
            self.ranges.drain(first + 1..last);
        }
        self.note(start);
        true
    }

    /// Removes all ranges that `next` reaches and returns the end of the contiguous stream.
    pub(crate) fn advance(&mut self, next: SeqNum) -> SeqNum {
        let reached = self.ranges.partition_point(|r| r.start.at_or_before(next));
        if reached == 0 {
            return next;
        }
        let end = next.max(self.ranges[reached - 1].end);
        self.ranges.drain(..reached);
        self.recent.retain(|s| s.at_or_after(end));
        end
    }

    /// Discards everything beyond `end`.
    pub(crate) fn truncate(&mut self, end: SeqNum) {
        self.ranges.retain(|r| r.start.before(end));
        if let Some(last) = self.ranges.last_mut() {
            last.end = last.end.min(end);
        }
    }

    /// Whether all of `start..end` has already arrived.
    pub(crate) fn covers(&self, start: SeqNum, end: SeqNum) -> bool {
        self.find(start).is_some_and(|r| end.at_or_before(r.end))
    }

    /// The first part of `start..end` that has already arrived.
    pub(crate) fn first_overlap(&self, start: SeqNum, end: SeqNum) -> Option<(SeqNum, SeqNum)> {
        let i = self.ranges.partition_point(|r| r.end.at_or_before(start));
        let range = self.ranges.get(i).filter(|r| r.start.before(end))?;
        Some((range.start.max(start), range.end.min(end)))
    }

    /// Appends the blocks that a SACK option should report, up to `limit` in total: the newest range first unless
    /// the peer already knows it, then the ranges not reported yet. More ranges may have changed since the last
    /// report than fit in one segment.
    pub(crate) fn report(&mut self, blocks: &mut ArrayVec<SackBlock, 4>, limit: usize) {
        let is_second = !blocks.is_empty();
        let recent = || self.recent.iter().filter_map(|&seq| self.find(seq));
        let all = || self.ranges.iter().copied();
        // The block after a D-SACK names the range that contains the duplicate (RFC 2883 §4).
        let leads = |range: &Range| is_second || !range.is_told;
        let is_news = |range: &Range| !range.is_told;
        let wanted = recent().take(1).filter(leads);
        let wanted = wanted.chain(recent().filter(is_news));
        let wanted = wanted.chain(all().filter(is_news));
        for range in wanted.chain(recent()).chain(all()) {
            if blocks.len() >= limit {
                break;
            }
            let block = SackBlock {
                start: range.start,
                end: range.end,
            };
            if !blocks.contains(&block) {
                blocks.push(block);
            }
        }
        for range in &mut self.ranges {
            let is_in = |block: &SackBlock| (block.start, block.end) == (range.start, range.end);
            range.is_told |= blocks.iter().any(is_in);
        }
    }

    /// Whether any range has not been reported to the peer in full.
    pub(crate) fn has_news(&self) -> bool {
        self.ranges.iter().any(|range| !range.is_told)
    }

    /// Whether the ranges are sorted, disjoint and inside `next..edge`.
    pub(crate) fn is_consistent(&self, next: SeqNum, edge: SeqNum) -> bool {
        let mut at = next;
        self.ranges.len() <= MAX_RANGES
            && self.ranges.iter().all(|r| {
                let ok = r.start.after(at) && r.end.after(r.start) && r.end.at_or_before(edge);
                at = r.end;
                ok
            })
    }

    /// Start and end of each range.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (SeqNum, SeqNum)> {
        self.ranges.iter().map(|range| (range.start, range.end))
    }

    /// End of the last range.
    pub(crate) fn end(&self) -> Option<SeqNum> {
        self.ranges.last().map(|r| r.end)
    }

    pub(crate) fn clear(&mut self) {
        *self = Assembler::default();
    }

    fn find(&self, seq: SeqNum) -> Option<Range> {
        let i = self.ranges.partition_point(|r| r.end.at_or_before(seq));
        self.ranges
            .get(i)
            .copied()
            .filter(|r| r.start.at_or_before(seq))
    }

    /// Moves the range around `seq` to the front of the ranges to report.
    pub(crate) fn note(&mut self, seq: SeqNum) {
        let Some(range) = self.find(seq) else { return };
        self.recent
            .retain(|s| s.before(range.start) || s.at_or_after(range.end));
        if self.recent.is_full() {
            self.recent.pop();
        }
        self.recent.insert(0, seq);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assembler(ranges: &[(u32, u32)]) -> Assembler {
        let mut assembler = Assembler::default();
        for &(start, end) in ranges {
            assert!(assembler.insert(SeqNum(start), SeqNum(end)));
        }
        assembler
    }

    fn blocks(assembler: &Assembler) -> Vec<(u32, u32)> {
        told(&mut assembler.clone(), 4)
    }

    fn told(assembler: &mut Assembler, limit: usize) -> Vec<(u32, u32)> {
        let mut blocks = ArrayVec::new();
        assembler.report(&mut blocks, limit);
        blocks.iter().map(|b| (b.start.0, b.end.0)).collect()
    }

    #[test]
    fn ranges_that_touch_or_overlap_become_one() {
        assert_eq!(
            blocks(&assembler(&[(10, 20), (30, 40), (20, 30)])),
            [(10, 40)]
        );
        assert_eq!(
            blocks(&assembler(&[(10, 20), (30, 40), (5, 50)])),
            [(5, 50)]
        );
    }

    #[test]
    fn the_newest_range_is_reported_first() {
        let mut a = assembler(&[(10, 20), (30, 40), (50, 60)]);
        assert_eq!(blocks(&a), [(50, 60), (30, 40), (10, 20)]);
        a.insert(SeqNum(20), SeqNum(22));
        assert_eq!(blocks(&a), [(10, 22), (50, 60), (30, 40)]);
    }

    #[test]
    fn all_that_changed_is_told_once_whatever_fits_in_one_report() {
        let mut a = assembler(&[(10, 20), (30, 40), (50, 60), (70, 80), (90, 95)]);
        assert!(a.has_news());
        assert_eq!(told(&mut a, 2), [(90, 95), (70, 80)]);
        assert_eq!(told(&mut a, 2), [(50, 60), (30, 40)]);
        assert!(a.has_news());
        assert_eq!(told(&mut a, 2), [(10, 20), (90, 95)]);
        assert!(!a.has_news());
        assert_eq!(told(&mut a, 2), [(90, 95), (70, 80)], "as before them");
        a.insert(SeqNum(40), SeqNum(45));
        assert_eq!(told(&mut a, 1), [(30, 45)]);
    }

    #[test]
    fn the_range_around_a_duplicate_follows_it() {
        let mut a = assembler(&[(10, 20), (30, 40), (50, 60)]);
        told(&mut a, 3);
        a.insert(SeqNum(70), SeqNum(80));
        a.note(SeqNum(30));
        let mut blocks = ArrayVec::new();
        let duplicate = SackBlock {
            start: SeqNum(32),
            end: SeqNum(34),
        };
        blocks.push(duplicate);
        a.report(&mut blocks, 3);
        let starts: Vec<u32> = blocks.iter().map(|block| block.start.0).collect();
        assert_eq!(starts, [32, 30, 70]);
    }

    #[test]
    fn the_stream_advances_over_all_it_reaches() {
        let mut a = assembler(&[(10, 20), (20, 25), (30, 40)]);
        assert_eq!(a.advance(SeqNum(5)), SeqNum(5));
        assert_eq!(a.advance(SeqNum(12)), SeqNum(25));
        assert_eq!(blocks(&a), [(30, 40)]);
        assert_eq!(a.advance(SeqNum(30)), SeqNum(40));
        assert!(a.is_empty());
    }

    #[test]
    fn ranges_may_span_the_wrap() {
        let mut a = assembler(&[(u32::MAX - 5, 10), (20, 30)]);
        assert!(a.covers(SeqNum(u32::MAX), SeqNum(5)));
        assert!(a.is_consistent(SeqNum(u32::MAX - 10), SeqNum(100)));
        assert_eq!(a.advance(SeqNum(u32::MAX - 5)), SeqNum(10));
    }

    #[test]
    fn the_number_of_holes_is_bounded() {
        let mut a = Assembler::default();
        for i in 0..MAX_RANGES as u32 {
            assert!(a.insert(SeqNum(i * 10), SeqNum(i * 10 + 5)));
        }
        assert!(!a.insert(SeqNum(1_000_000), SeqNum(1_000_001)));
        assert!(
            a.insert(SeqNum(5), SeqNum(10)),
            "one that closes a hole is taken"
        );
    }
}
