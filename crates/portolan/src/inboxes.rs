//! What has come for raw flows and was not read yet.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use portolan_proto::filter::RecordHeader;
use portolan_types::Slot;

use crate::wait::Waiter;

/// Octets that wait for one flow; what comes beyond is dropped.
const ROOM: usize = 1 << 20;

/// A frame as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Index of the device it came by.
    pub interface: u32,
    /// From the Ethernet header on.
    pub octets: Vec<u8>,
}

#[derive(Debug, Default)]
pub(crate) struct Inboxes {
    by_slot: BTreeMap<u32, Inbox>,
    next: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    frames: VecDeque<Received>,
    octets: usize,
    dropped: u64,
    readers: Vec<Arc<Waiter>>,
    /// No frame can reach it any more.
    is_cut_off: bool,
}

impl Inboxes {
    /// Slots are not used again: what comes late for a flow that has ended is nobody's.
    pub(crate) fn open(&mut self) -> Slot {
        let slot = self.next;
        self.next += 1;
        self.by_slot.insert(slot, Inbox::default());
        Slot(slot)
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
            inbox.take_in(record.ifindex, frame);
        }
    }

    pub(crate) fn cut_off(&mut self) {
        for inbox in self.by_slot.values_mut() {
            inbox.is_cut_off = true;
            inbox.wake();
        }
    }
}

impl Inbox {
    fn take_in(&mut self, interface: u32, frame: &[u8]) {
        if self.octets + frame.len() > ROOM {
            self.dropped += 1;
            return;
        }
        self.octets += frame.len();
        self.frames.push_back(Received {
            interface,
            octets: frame.to_vec(),
        });
        self.wake();
    }

    fn wake(&self) {
        self.readers.iter().for_each(|reader| reader.signal());
    }

    pub(crate) fn next(&mut self) -> Option<Received> {
        let received = self.frames.pop_front()?;
        self.octets -= received.octets.len();
        Some(received)
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
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
        assert_eq!(read.filter(|r| r.octets == frame).count(), 16);
        inboxes.deliver(&record(slot), &frame);
        assert!(inboxes.get(slot).unwrap().next().is_some());
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
