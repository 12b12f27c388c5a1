//! Ends of records (`MSG_EOR`): as on Linux, no segment holds bytes from both sides of one. TCP itself has no records.

use std::collections::VecDeque;

use portolan_types::SeqNum;

use super::{Chunk, Sender};
use crate::encoding;

/// Number of ends that are remembered; further ones are ignored.
const MAX_ENDS: usize = 1024;

/// The sequence numbers behind the last byte of each unacknowledged record, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Records {
    ends: VecDeque<SeqNum>,
}

encoding::fields!(Records { ends });

impl Records {
    fn first_after(&self, seq: SeqNum) -> Option<SeqNum> {
        let i = self.ends.partition_point(|end| end.at_or_before(seq));
        self.ends.get(i).copied()
    }

    pub(super) fn is_consistent(&self, una: SeqNum, end: SeqNum) -> bool {
        let mut last = una;
        self.ends.len() <= MAX_ENDS
            && self.ends.iter().all(|&at| {
                let is_next = at.after(last) && at.at_or_before(end);
                last = at;
                is_next
            })
    }
}

impl Sender {
    /// Marks the last queued byte as the end of a record.
    pub(crate) fn end_record(&mut self) {
        let end = self.data_end();
        let records = self.records.get_or_insert_default();
        let is_new = records.ends.back().is_none_or(|last| last.before(end));
        if end.after(self.una) && is_new && records.ends.len() < MAX_ENDS {
            records.ends.push_back(end);
        }
    }

    pub(crate) fn has_records(&self) -> bool {
        self.records.is_some()
    }

    /// Whether the record sent next is followed by another one, so that it need not wait for more data.
    pub(crate) fn is_record_complete(&self) -> bool {
        let records = self.records.as_ref();
        let end = records.and_then(|records| records.first_after(self.nxt));
        end.is_some_and(|end| end.before(self.data_end()))
    }

    /// The part of `chunk` that belongs to its first record.
    pub(crate) fn within_record(&self, chunk: Chunk) -> Chunk {
        let records = self.records.as_ref();
        match records.and_then(|records| records.first_after(chunk.seq)) {
            Some(end) if end.before(chunk.seq + chunk.len) => Chunk {
                len: end - chunk.seq,
                fin: false,
                ..chunk
            },
            _ => chunk,
        }
    }

    /// Discards ends of records that are acknowledged.
    pub(super) fn forget_records(&mut self) {
        let Some(records) = &mut self.records else {
            return;
        };
        let gone = records
            .ends
            .partition_point(|end| end.at_or_before(self.una));
        records.ends.drain(..gone);
        if records.ends.is_empty() {
            self.records = None;
        }
    }
}
