//! Received frames of raw flows that were not read yet.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use portolan_proto::filter::RecordHeader;
use portolan_proto::raw::Guard;
use portolan_proto::report::{RAW_ROWS, RawFigures, RawRow};
use portolan_types::Slot;

use crate::wait::waiter::Waiter;

/// Bytes that may wait for one flow; further frames are dropped.
const ROOM: u64 = 1 << 20;

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Index of the device that received it.
    pub interface: u32,
    /// From the Ethernet header on.
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(crate) struct Inboxes {
    by_slot: BTreeMap<u32, Inbox>,
    next: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    frames: VecDeque<Received>,
    figures: RawFigures,
    /// Row of the statistics memfd; `None` if all are taken.
    row: Option<usize>,
    readers: Vec<Arc<Waiter>>,
    /// The protocol, and the incarnation of the server that has granted it.
    claim: Option<(Guard, u64)>,
    /// No more frames can arrive.
    is_cut_off: bool,
}

impl Inboxes {
    /// Opens an inbox. Slots are not reused: late frames of a closed flow must not reach another.
    pub(crate) fn open(&mut self) -> Slot {
        let slot = self.next;
        self.next += 1;
        let is_free = |row: &usize| self.by_slot.values().all(|inbox| inbox.row != Some(*row));
        let inbox = Inbox {
            row: (0..RAW_ROWS).find(is_free),
            ..Inbox::default()
        };
        self.by_slot.insert(slot, inbox);
        Slot(slot)
    }

    /// Returns the statistics of the flows, each with its row of the statistics memfd.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, RawRow)> + '_ {
        let inboxes = self.by_slot.iter();
        inboxes.filter_map(|(slot, inbox)| inbox.row(Slot(*slot)))
    }

    pub(crate) fn close(&mut self, slot: Slot) {
        self.by_slot.remove(&slot.0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_slot.is_empty()
    }

    pub(crate) fn get(&mut self, slot: Slot) -> Option<&mut Inbox> {
        self.by_slot.get_mut(&slot.0)
    }

    pub(crate) fn deliver(&mut self, record: &RecordHeader, frame: &[u8]) {
        if let Some(inbox) = self.by_slot.get_mut(&record.slot) {
            inbox.poll_rx(record.ifindex, frame);
        }
    }

    pub(crate) fn cut_off(&mut self) {
        self.by_slot.values_mut().for_each(Inbox::cut_off);
    }

    /// Returns the protocols that were claimed of another server than this one.
    pub(crate) fn claims_of_before(&self, incarnation: u64) -> Vec<(Slot, Guard)> {
        let inboxes = self.by_slot.iter();
        let claims = inboxes.filter_map(|(slot, inbox)| Some((Slot(*slot), inbox.claim?)));
        let of_before = claims.filter(|(_, (_, server))| *server != incarnation);
        of_before.map(|(slot, (guard, _))| (slot, guard)).collect()
    }
}

impl Inbox {
    pub(crate) fn note_claim(&mut self, guard: Guard, incarnation: u64) {
        self.claim = Some((guard, incarnation));
        self.is_cut_off = false;
    }

    pub(crate) fn cut_off(&mut self) {
        self.is_cut_off = true;
        self.wake();
    }

    fn poll_rx(&mut self, interface: u32, frame: &[u8]) {
        let length = frame.len() as u64;
        if self.figures.receive_queue + length > ROOM {
            self.figures.dropped += 1;
            return;
        }
        self.figures.receive_queue += length;
        self.figures.frames_in += 1;
        self.figures.bytes_in += length;
        self.frames.push_back(Received {
            interface,
            bytes: frame.to_vec(),
        });
        self.wake();
    }

    fn wake(&self) {
        self.readers.iter().for_each(|reader| reader.signal());
    }

    pub(crate) fn next(&mut self) -> Option<Received> {
        let received = self.frames.pop_front()?;
        self.figures.receive_queue -= received.bytes.len() as u64;
        Some(received)
    }

    /// Returns the statistics of the flow at `slot`, whose inbox this is.
    pub(crate) fn row(&self, slot: Slot) -> Option<(usize, RawRow)> {
        let row = RawRow {
            flow: u64::from(slot.0) + 1,
            figures: self.figures,
        };
        Some((self.row?, row))
    }

    pub(crate) fn note_sent(&mut self, bytes: usize) {
        self.figures.frames_out += 1;
        self.figures.bytes_out += bytes as u64;
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.figures.dropped
    }

    pub(crate) fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }

    pub(crate) fn add_reader(&mut self, reader: &Arc<Waiter>) {
        self.readers.push(Arc::clone(reader));
    }

    pub(crate) fn remove_reader(&mut self, reader: &Arc<Waiter>) {
        self.readers.retain(|other| !Arc::ptr_eq(other, reader));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(slot: Slot) -> RecordHeader {
        RecordHeader {
            slot: slot.0,
            ifindex: 3,
            flags: RecordHeader::RAW,
            ..RecordHeader::default()
        }
    }

    #[test]
    fn what_nobody_reads_is_dropped_and_counted() {
        let mut inboxes = Inboxes::default();
        let slot = inboxes.open();
        let frame = vec![7; 64 << 10];
        for _ in 0..20 {
            inboxes.deliver(&record(slot), &frame);
        }
        let inbox = inboxes.get(slot).unwrap();
        assert_eq!(inbox.dropped(), 4);
        let read = std::iter::from_fn(|| inbox.next());
        assert_eq!(read.filter(|r| r.bytes == frame).count(), 16);
        inboxes.deliver(&record(slot), &frame);
        assert!(inboxes.get(slot).unwrap().next().is_some());
    }

    #[test]
    fn each_flow_has_a_row_of_its_own_while_there_are_some() {
        let mut inboxes = Inboxes::default();
        let slots: Vec<Slot> = (0..=RAW_ROWS).map(|_| inboxes.open()).collect();
        assert_eq!(inboxes.rows().count(), RAW_ROWS);
        inboxes.close(slots[3]);
        let late = inboxes.open();
        inboxes.deliver(&record(late), &[0; 60]);
        inboxes.get(late).unwrap().note_sent(70);
        let (_, row) = inboxes.rows().find(|(row, _)| *row == 3).unwrap();
        assert_eq!(row.flow, u64::from(late.0) + 1);
        let figures = row.figures;
        assert_eq!((figures.frames_in, figures.bytes_in), (1, 60));
        assert_eq!((figures.frames_out, figures.bytes_out), (1, 70));
        assert_eq!(figures.receive_queue, 60);
        inboxes.get(late).unwrap().next().unwrap();
        let (_, row) = inboxes.rows().find(|(row, _)| *row == 3).unwrap();
        assert_eq!(row.figures.receive_queue, 0);
    }

    #[test]
    fn what_comes_late_is_nobodys() {
        let mut inboxes = Inboxes::default();
        let first = inboxes.open();
        inboxes.close(first);
        let second = inboxes.open();
        inboxes.deliver(&record(first), b"late");
        assert_eq!(inboxes.get(second).unwrap().next(), None);
    }
}
