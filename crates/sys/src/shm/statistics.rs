//! The statistics memfd: a library keeps one row per session there, the server reads them when
//! somebody asks. Rows are read word by word without a lock: they are claims, not facts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use portolan_proto::report::{
    COUNTER_SLOTS, COUNTERS_AT, STATISTICS_SIZE, STATISTICS_SLOTS, StatisticsRow,
};
use portolan_types::Slot;
use rustix::fs::SealFlags;
use zerocopy::{FromBytes, IntoBytes};

use super::{CreateError, MapError, check_size, create, seal};
use crate::mapping::Mapping;

const WORD: usize = size_of::<u64>();
const ROW: usize = size_of::<StatisticsRow>();
const _: () = assert!(ROW.is_multiple_of(WORD));

/// Where the row of `slot` begins, if the memory has one for it.
fn row_offset(slot: Slot) -> Option<usize> {
    let index = slot.0 as usize;
    (index < STATISTICS_SLOTS).then_some(index * ROW)
}

fn counter_offset(index: usize) -> usize {
    COUNTERS_AT + index * WORD
}

/// The server's end, which creates the memory.
#[derive(Debug)]
pub struct StatisticsReader {
    fd: OwnedFd,
    memory: Mapping,
}

impl StatisticsReader {
    pub fn create() -> Result<StatisticsReader, CreateError> {
        let fd = create("portolan-statistics", STATISTICS_SIZE)?;
        seal(&fd, SealFlags::empty())?;
        let memory = Mapping::read_only(fd.as_fd(), 0, STATISTICS_SIZE)?;
        Ok(StatisticsReader { fd, memory })
    }

    /// What the library says of the session at `slot`; all zero if it never said anything.
    pub fn row(&self, slot: Slot) -> Option<StatisticsRow> {
        let offset = row_offset(slot)?;
        let mut octets = [0; ROW];
        for (index, chunk) in octets.chunks_mut(WORD).enumerate() {
            let word = self.memory.u64_at(offset + index * WORD).load(Relaxed);
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        StatisticsRow::read_from_bytes(&octets).ok()
    }

    /// What the library says that it counted.
    pub fn counters(&self) -> [u64; COUNTER_SLOTS] {
        std::array::from_fn(|index| self.memory.u64_at(counter_offset(index)).load(Relaxed))
    }
}

/// For handing over to the library.
impl AsFd for StatisticsReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The library's end.
#[derive(Debug)]
pub struct StatisticsWriter {
    memory: Mapping,
}

impl StatisticsWriter {
    pub fn map(fd: impl AsFd) -> Result<StatisticsWriter, MapError> {
        check_size(&fd, STATISTICS_SIZE)?;
        let memory = Mapping::read_write(fd.as_fd(), 0, STATISTICS_SIZE)?;
        Ok(StatisticsWriter { memory })
    }

    /// Shows `row` for `slot`; slots beyond the memory show nothing.
    pub fn publish(&self, slot: Slot, row: &StatisticsRow) {
        let Some(offset) = row_offset(slot) else {
            return;
        };
        for (index, chunk) in row.as_bytes().chunks(WORD).enumerate() {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            self.memory
                .u64_at(offset + index * WORD)
                .store(u64::from_ne_bytes(word), Relaxed);
        }
    }

    /// Shows `counters`; those beyond the memory show nothing.
    pub fn publish_counters(&self, counters: &[u64]) {
        for (index, value) in counters.iter().take(COUNTER_SLOTS).enumerate() {
            let place = self.memory.u64_at(counter_offset(index));
            place.store(*value, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_crosses_and_its_neighbours_stay_zero() {
        let reader = StatisticsReader::create().unwrap();
        let writer = StatisticsWriter::map(&reader).unwrap();
        let mut row = StatisticsRow {
            session: 11,
            state: 3,
            ..StatisticsRow::default()
        };
        row.figures.octets_in = 1 << 40;
        row.figures.send_window = 5;
        writer.publish(Slot(7), &row);
        let read = reader.row(Slot(7)).unwrap();
        assert_eq!((read.session, read.state), (11, 3));
        assert_eq!(read.figures, row.figures);
        assert_eq!(reader.row(Slot(6)).unwrap().session, 0);
        assert_eq!(reader.row(Slot(8)).unwrap().session, 0);
    }

    #[test]
    fn counters_cross_and_touch_no_row() {
        let reader = StatisticsReader::create().unwrap();
        let writer = StatisticsWriter::map(&reader).unwrap();
        let values: Vec<u64> = (1..100).collect();
        writer.publish_counters(&values);
        assert_eq!(reader.counters()[..], values[..COUNTER_SLOTS]);
        let last = Slot(STATISTICS_SLOTS as u32 - 1);
        assert_eq!(reader.row(last).unwrap().session, 0);
    }

    #[test]
    fn slots_beyond_the_memory_show_nothing() {
        let reader = StatisticsReader::create().unwrap();
        let writer = StatisticsWriter::map(&reader).unwrap();
        writer.publish(Slot(u32::MAX), &StatisticsRow::default());
        assert!(reader.row(Slot(STATISTICS_SLOTS as u32)).is_none());
        assert!(reader.row(Slot(STATISTICS_SLOTS as u32 - 1)).is_some());
    }
}
