//! Which octets beyond the next expected one have arrived: sorted, disjoint ranges of sequence
//! space, and the order in which they last changed (RFC 2018 §4 wants the newest first).

use arrayvec::ArrayVec;
use portolan_types::SeqNum;
use portolan_wire::tcp::SackBlock;
use serde::{Deserialize, Serialize};

/// Holes a peer may leave in the stream; segments that would open more are not kept.
const MAX_RANGES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Range {
    start: SeqNum,
    end: SeqNum,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Assembler {
    ranges: Vec<Range>,
    /// A sequence number inside each of the ranges that changed last, newest first.
    recent: ArrayVec<SeqNum, 4>,
}

impl Assembler {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Records `start..end`; false if there is no room for another range.
    pub(crate) fn insert(&mut self, start: SeqNum, end: SeqNum) -> bool {
        let first = self.ranges.partition_point(|r| r.end.before(start));
        let last = self.ranges.partition_point(|r| r.start.at_or_before(end));
        if first == last {
            if self.ranges.len() >= MAX_RANGES {
                return false;
            }
            self.ranges.insert(first, Range { start, end });
        } else {
            let merged = Range {
                start: start.min(self.ranges[first].start),
                end: end.max(self.ranges[last - 1].end),
            };
            self.ranges[first] = merged;
            self.ranges.drain(first + 1..last);
        }
        self.note(start);
        true
    }

    /// Removes all ranges that `next` reaches and returns how far the stream now goes.
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

    /// Whether all of `start..end` is here already.
    pub(crate) fn covers(&self, start: SeqNum, end: SeqNum) -> bool {
        self.find(start).is_some_and(|r| end.at_or_before(r.end))
    }

    /// Appends the blocks that a SACK option should report, newest first, up to `limit` in all.
    pub(crate) fn report(&self, blocks: &mut ArrayVec<SackBlock, 4>, limit: usize) {
        let newest = self.recent.iter().filter_map(|&s| self.find(s));
        for range in newest.chain(self.ranges.iter().copied()) {
            if blocks.len() >= limit {
                return;
            }
            let block = SackBlock {
                start: range.start,
                end: range.end,
            };
            if !blocks.contains(&block) {
                blocks.push(block);
            }
        }
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

    fn note(&mut self, seq: SeqNum) {
        let Some(range) = self.find(seq) else { return };
        self.recent
            .retain(|s| s.before(range.start) || s.at_or_after(range.end));
        if self.recent.is_full() {
            self.recent.pop();
        }
        self.recent.insert(0, seq);
    }
}
