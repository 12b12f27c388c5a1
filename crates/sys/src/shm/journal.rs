//! The journal memfd: a library writes a record for each connection that the server does not know. Its records are
//! claims, which the server checks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use portolan_proto::journal::{JOURNAL_RECORDS, JOURNAL_RECORDS_AT, JOURNAL_SIZE, JournalRecord};
use rustix::fs::SealFlags;
use zerocopy::IntoBytes;

use super::words::{WORD, read};
use super::{CreateError, MapError, check_size, create, seal};
use crate::mapping::Mapping;

const RECORD: usize = size_of::<JournalRecord>();
const _: () = assert!(RECORD.is_multiple_of(WORD));

/// Offset of the number of records that were ever used.
const USED: usize = 0;

fn offset(index: usize) -> usize {
    JOURNAL_RECORDS_AT + index * RECORD
}

/// The server's side, which creates the memory.
#[derive(Debug)]
pub struct JournalReader {
    fd: OwnedFd,
    memory: Mapping,
}

impl JournalReader {
    pub fn create() -> Result<JournalReader, CreateError> {
        let fd = create("portolan-journal", JOURNAL_SIZE)?;
        seal(&fd, SealFlags::empty())?;
        let memory = Mapping::read_only(fd.as_fd(), 0, JOURNAL_SIZE)?;
        Ok(JournalReader { fd, memory })
    }

    /// The records that are in use; at most [`JOURNAL_RECORDS`].
    pub fn records(&self) -> impl Iterator<Item = JournalRecord> + '_ {
        let used = self.memory.u64_at(USED).load(Relaxed);
        let used = usize::try_from(used).map_or(JOURNAL_RECORDS, |used| used.min(JOURNAL_RECORDS));
        (0..used).map(offset).filter_map(|at| {
            if self.memory.u64_at(at).load(Acquire) == 0 {
                return None;
            }
            let record: JournalRecord = read(&self.memory, at);
            record.port().is_some().then_some(record)
        })
    }
}

/// To be passed to the library.
impl AsFd for JournalReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Index of a record in use.
#[derive(Debug, PartialEq, Eq)]
pub struct RecordIndex(u32);

/// The library's side.
#[derive(Debug)]
pub struct JournalWriter {
    memory: Mapping,
    /// Number of records that were ever used.
    used: u32,
    free: Vec<u32>,
}

impl JournalWriter {
    pub fn map(fd: impl AsFd) -> Result<JournalWriter, MapError> {
        check_size(&fd, JOURNAL_SIZE)?;
        let memory = Mapping::read_write(fd.as_fd(), 0, JOURNAL_SIZE)?;
        Ok(JournalWriter {
            memory,
            used: 0,
            free: Vec::new(),
        })
    }

    /// Returns `None` if all records are in use.
    pub fn enter(&mut self, record: &JournalRecord) -> Option<RecordIndex> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if (self.used as usize) < JOURNAL_RECORDS => {
                self.used += 1;
                let used = u64::from(self.used);
                self.memory.u64_at(USED).store(used, Relaxed);
                self.used - 1
            }
            None => return None,
        };
        let at = offset(index as usize);
        // The first word last: a record is complete, or free.
        for (number, chunk) in record.as_bytes().chunks(WORD).enumerate().rev() {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            let place = self.memory.u64_at(at + number * WORD);
            place.store(u64::from_ne_bytes(word), Release);
        }
        Some(RecordIndex(index))
    }

    /// Continues in another journal, with the same records.
    pub fn continue_in(&mut self, other: JournalWriter) {
        let before = std::mem::replace(&mut self.memory, other.memory);
        for at in (0..self.used as usize).map(offset) {
            for place in (at..at + RECORD).step_by(WORD).rev() {
                let word = before.u64_at(place).load(Relaxed);
                self.memory.u64_at(place).store(word, Release);
            }
        }
        self.memory
            .u64_at(USED)
            .store(u64::from(self.used), Relaxed);
    }

    pub fn erase(&mut self, RecordIndex(index): RecordIndex) {
        self.memory.u64_at(offset(index as usize)).store(0, Release);
        self.free.push(index);
    }
}

#[cfg(test)]
mod tests {
    use portolan_types::{FlowKey, Protocol, SessionId};

    use super::*;

    fn record(port: u16) -> JournalRecord {
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 2], port).into(),
        };
        JournalRecord::new(SessionId(7), &flow)
    }

    fn ports(reader: &JournalReader) -> Vec<u16> {
        let mut ports: Vec<u16> = reader
            .records()
            .map(|record| record.flow().remote.port())
            .collect();
        ports.sort_unstable();
        ports
    }

    #[test]
    fn the_server_reads_what_is_entered_and_not_erased() {
        let reader = JournalReader::create().unwrap();
        let mut writer = JournalWriter::map(&reader).unwrap();
        assert!(ports(&reader).is_empty());
        let first = writer.enter(&record(1)).unwrap();
        writer.enter(&record(2)).unwrap();
        assert_eq!(ports(&reader), [1, 2]);
        writer.erase(first);
        assert_eq!(ports(&reader), [2]);
        writer.enter(&record(3)).unwrap();
        assert_eq!(ports(&reader), [2, 3]);
    }

    #[test]
    fn a_full_journal_takes_no_more() {
        let reader = JournalReader::create().unwrap();
        let mut writer = JournalWriter::map(&reader).unwrap();
        let entered = (0..JOURNAL_RECORDS).map(|port| writer.enter(&record(port as u16)));
        let last = entered.last().unwrap().unwrap();
        assert_eq!(writer.enter(&record(9)), None);
        writer.erase(last);
        assert!(writer.enter(&record(9)).is_some());
        assert_eq!(reader.records().count(), JOURNAL_RECORDS);
    }

    #[test]
    fn records_go_on_in_another_journal() {
        let reader = JournalReader::create().unwrap();
        let mut writer = JournalWriter::map(&reader).unwrap();
        let first = writer.enter(&record(1)).unwrap();
        let second = writer.enter(&record(2)).unwrap();
        writer.erase(first);
        let next = JournalReader::create().unwrap();
        writer.continue_in(JournalWriter::map(&next).unwrap());
        assert_eq!(ports(&next), [2]);
        writer.enter(&record(3)).unwrap();
        writer.enter(&record(4)).unwrap();
        assert_eq!(ports(&next), [2, 3, 4]);
        writer.erase(second);
        assert_eq!((ports(&next), ports(&reader)), (vec![3, 4], vec![2]));
    }

    #[test]
    fn a_hostile_count_leads_no_further_than_the_memory() {
        let reader = JournalReader::create().unwrap();
        let writer = JournalWriter::map(&reader).unwrap();
        writer.memory.u64_at(USED).store(u64::MAX, Relaxed);
        assert_eq!(reader.records().count(), 0);
    }
}
