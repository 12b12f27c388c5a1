//! The statistics memfd: a library writes a row per session, which the server reads on request. Rows are
//! read word by word without a lock: they are claims, not facts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use portolan_proto::report::{
    COUNTER_SLOTS, COUNTERS_AT, RAW_AT, RAW_ROWS, RawFigures, RawRow, STATISTICS_SIZE,
    STATISTICS_SLOTS, StatisticsRow, THREADED_AT, THREADED_ROWS, ThreadedRow,
};
use portolan_types::Slot;
use rustix::fs::SealFlags;

use super::words::{WORD, read, write};
use super::{CreateError, MapError, check_size, create, seal};
use crate::mapping::Mapping;

const ROW: usize = size_of::<StatisticsRow>();
const _: () = assert!(ROW.is_multiple_of(WORD));
const _: () = assert!(size_of::<RawRow>().is_multiple_of(WORD));
const _: () = assert!(size_of::<ThreadedRow>().is_multiple_of(WORD));

/// Offset of the row of `slot`, if the memory has one.
fn row_offset(slot: Slot) -> Option<usize> {
    let index = slot.0 as usize;
    (index < STATISTICS_SLOTS).then_some(index * ROW)
}

fn counter_offset(index: usize) -> usize {
    COUNTERS_AT + index * WORD
}

fn raw_offset(row: usize) -> Option<usize> {
    (row < RAW_ROWS).then_some(RAW_AT + row * size_of::<RawRow>())
}

fn threaded_offset(row: u8) -> Option<usize> {
    let row = usize::from(row);
    (row < THREADED_ROWS).then_some(THREADED_AT + row * size_of::<ThreadedRow>())
}

/// The server's side, which creates the memory.
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

    /// The library's row for the session at `slot`; all zero if none was written.
    pub fn row(&self, slot: Slot) -> Option<StatisticsRow> {
        row_offset(slot).map(|offset| read(&self.memory, offset))
    }

    /// The library's figures for the raw flow at `slot`; all zero if there are none.
    pub fn raw(&self, slot: Slot) -> RawFigures {
        let flow = u64::from(slot.0) + 1;
        let offsets = (0..RAW_ROWS).filter_map(raw_offset);
        let mut rows = offsets.map(|offset| read::<RawRow>(&self.memory, offset));
        rows.find(|row| row.flow == flow)
            .map_or_else(RawFigures::default, |row| row.figures)
    }

    /// The library's row for a handler in a thread.
    pub fn threaded(&self, row: u8) -> Option<ThreadedRow> {
        threaded_offset(row).map(|offset| read(&self.memory, offset))
    }

    /// The library's counters.
    pub fn counters(&self) -> [u64; COUNTER_SLOTS] {
        std::array::from_fn(|index| self.memory.u64_at(counter_offset(index)).load(Relaxed))
    }
}

/// To be passed to the library.
impl AsFd for StatisticsReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The library's side.
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

    /// Writes `row` for `slot`; ignored for slots beyond the memory.
    pub fn publish(&self, slot: Slot, row: &StatisticsRow) {
        if let Some(offset) = row_offset(slot) {
            write(&self.memory, offset, row);
        }
    }

    /// Writes the row of a raw flow.
    pub fn publish_raw(&self, index: usize, row: &RawRow) {
        if let Some(offset) = raw_offset(index) {
            write(&self.memory, offset, row);
        }
    }

    /// Writes the row of a handler in a thread, which has no other writer.
    pub fn publish_threaded(&self, index: u8, row: &ThreadedRow) {
        if let Some(offset) = threaded_offset(index) {
            write(&self.memory, offset, row);
        }
    }

    /// Writes `counters`; those beyond the memory are ignored.
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
        row.figures.bytes_in = 1 << 40;
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
    fn raw_flows_are_found_by_their_slots_and_touch_no_handlers_row() {
        let reader = StatisticsReader::create().unwrap();
        let writer = StatisticsWriter::map(&reader).unwrap();
        let figures = RawFigures {
            dropped: 7,
            ..RawFigures::default()
        };
        let last = RAW_ROWS - 1;
        let row = RawRow { flow: 1, figures };
        writer.publish_raw(last, &row);
        writer.publish_raw(RAW_ROWS, &RawRow { flow: 9, ..row });
        assert_eq!(reader.raw(Slot(0)), figures);
        assert_eq!(reader.raw(Slot(8)), RawFigures::default());
        assert_eq!(reader.threaded(0).unwrap().number, 0);
        assert_eq!(reader.counters()[COUNTER_SLOTS - 1], 0);
    }

    #[test]
    fn a_handlers_row_crosses() {
        let reader = StatisticsReader::create().unwrap();
        let writer = StatisticsWriter::map(&reader).unwrap();
        let mut row = ThreadedRow {
            number: 256,
            ..ThreadedRow::default()
        };
        row.statistics.runs = 3;
        let last = THREADED_ROWS as u8 - 1;
        writer.publish_threaded(last, &row);
        writer.publish_threaded(last + 1, &row);
        let read = reader.threaded(last).unwrap();
        assert_eq!((read.number, read.statistics.runs), (256, 3));
        assert_eq!(reader.threaded(0).unwrap().number, 0);
        assert!(reader.threaded(last + 1).is_none());
        assert_eq!(reader.raw(Slot(0)), RawFigures::default());
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
