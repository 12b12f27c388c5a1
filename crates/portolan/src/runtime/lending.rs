//! Payloads that stay in the ring, for programs that receive by shared buffers ([`crate::net::buf`]). Once a program
//! has received from a session in this way, payload that arrives in order is retained here instead of being copied into
//! the receive queue. Any other call finds all data in the queue: [`Core::stream`] first copies retained payload there.
//!
//! The stream's order is: a part of the receive queue, the retained payload, the rest of the receive queue.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use portolan_proto::filter::RecordHeader;
use portolan_stack::{Input, Stack};
use portolan_sys::ring::Loan;
use portolan_types::{Generation, Slot};

use super::Core;
use super::arrivals::{Claimants, probe_input};
use crate::channel::layers::{self, Layer};
use crate::channel::{Channel, Lend};

/// Shorter frames are copied: that costs less than retaining them.
const LEAST_FRAME: usize = 1024;

/// Frames processed before the thread gets the retained payload: a quarter of a ring of the usual
/// size. The others stay in the ring until its next call.
const BATCH: usize = 16;

/// Sessions whose payload is retained, by slot.
#[derive(Debug, Default)]
pub(crate) struct Lending {
    borrowers: Vec<Option<Box<Borrower>>>,
    count: usize,
}

#[derive(Debug)]
struct Borrower {
    generation: Generation,
    retained: Retained,
    returned: Arc<Returned>,
}

/// Bytes that a program has returned, and that its session does not know of yet: this takes the
/// process's lock, which the next call has anyhow.
#[derive(Debug, Default)]
pub(crate) struct Returned(AtomicUsize);

impl Returned {
    /// Adds `bytes`. Returns the new sum.
    pub(crate) fn add(&self, bytes: usize) -> usize {
        self.0.fetch_add(bytes, Relaxed) + bytes
    }

    pub(crate) fn take(&self) -> usize {
        self.0.swap(0, Relaxed)
    }
}

/// Retained payload of one session.
#[derive(Debug, Default)]
pub(crate) struct Retained {
    /// Bytes of the receive queue that precede it.
    pub(crate) behind: usize,
    pub(crate) loans: Vec<Loan>,
}

impl Retained {
    pub(crate) fn is_empty(&self) -> bool {
        self.loans.is_empty()
    }

    /// Splits off all but the first `count` loans, which precede the returned ones.
    pub(crate) fn split_off(&mut self, count: usize) -> Retained {
        let count = count.min(self.loans.len());
        Retained {
            behind: self.behind,
            loans: self.loans.split_off(count),
        }
    }

    pub(crate) fn length(&self) -> usize {
        self.loans.iter().map(|loan| loan.len()).sum()
    }
}

impl Lending {
    pub(crate) fn is_active(&self) -> bool {
        self.count > 0
    }

    /// Starts to retain payload of the session.
    pub(crate) fn begin(&mut self, slot: Slot, generation: Generation) {
        let index = slot.0 as usize;
        if self.borrowers.len() <= index {
            self.borrowers.resize_with(index + 1, || None);
        }
        let is_known = self.borrowers[index]
            .as_ref()
            .is_some_and(|borrower| borrower.generation == generation);
        if !is_known {
            let borrower = Borrower {
                generation,
                retained: Retained::default(),
                returned: Arc::default(),
            };
            let before = self.borrowers[index].replace(Box::new(borrower));
            self.count += usize::from(before.is_none());
        }
    }

    /// Returns the counter of the bytes that the session's program returns.
    pub(crate) fn returned(&self, slot: Slot) -> Option<&Arc<Returned>> {
        let borrower = self.borrowers.get(slot.0 as usize)?.as_ref()?;
        Some(&borrower.returned)
    }

    /// Stops retaining payload of the session.
    fn end(&mut self, slot: Slot) {
        let place = self.borrowers.get_mut(slot.0 as usize);
        if place.and_then(Option::take).is_some() {
            self.count -= 1;
        }
    }

    /// Takes the retained payload of the session at a slot.
    pub(crate) fn take(&mut self, slot: Slot) -> Retained {
        let borrower = self.borrowers.get_mut(slot.0 as usize);
        borrower
            .and_then(Option::as_mut)
            .map(|borrower| std::mem::take(&mut borrower.retained))
            .unwrap_or_default()
    }

    /// Puts back retained payload that was not used.
    pub(crate) fn put_back(&mut self, slot: Slot, retained: Retained) {
        let borrower = self.borrowers.get_mut(slot.0 as usize);
        if let Some(borrower) = borrower.and_then(Option::as_mut) {
            borrower.retained = retained;
        }
    }

    /// Does the session have retained payload?
    pub(crate) fn has_some(&self, slot: Slot) -> bool {
        let borrower = self.borrowers.get(slot.0 as usize);
        borrower
            .and_then(Option::as_ref)
            .is_some_and(|borrower| !borrower.retained.is_empty())
    }

    fn of(&mut self, record: &RecordHeader) -> Option<&mut Borrower> {
        let place = self.borrowers.get_mut(record.slot as usize)?;
        let borrower = place.as_deref_mut()?;
        (borrower.generation == Generation(record.generation)).then_some(borrower)
    }

    /// Passes received frames to their receivers; payload may be retained.
    pub(super) fn receive(&mut self, channel: &mut Channel, claimants: &mut Claimants<'_>) {
        let now = claimants.now;
        let mut frames = Frames {
            lending: self,
            record: None,
            claimants,
        };
        channel.receive_lending(now, BATCH, &mut frames);
    }
}

impl Borrower {
    /// Returns how many bytes must be unread for the next payload to be retained.
    fn behind(&mut self, stack: &mut Stack, slot: Slot) -> usize {
        if self.retained.is_empty() {
            let session = stack.tcp(slot);
            self.retained.behind = session.map_or(0, |session| session.connection.readable());
        }
        self.retained.behind
    }
}

impl Core {
    /// Copies retained payload into the receive queue of the session at `slot`, before the queue is read or moved.
    pub(crate) fn settle_lending(&mut self, slot: Slot) {
        if self.lending.is_active() && self.lending.has_some(slot) {
            self.copy_retained(slot);
        }
    }

    #[cold]
    fn copy_retained(&mut self, slot: Slot) {
        let Retained { behind, loans } = self.lending.take(slot);
        if let Some(session) = self.stack.tcp(slot) {
            let pieces = loans.iter().map(|loan| &**loan);
            session.connection.take_back(behind, pieces);
        }
    }

    /// Called when the session at `slot` leaves.
    pub(super) fn end_lending(&mut self, slot: Slot) {
        if self.lending.is_active() {
            self.settle_lending(slot);
            self.lending.end(slot);
        }
    }
}

struct Frames<'a, 'b> {
    lending: &'a mut Lending,
    /// The last frame, if its payload may be retained.
    record: Option<RecordHeader>,
    claimants: &'a mut Claimants<'b>,
}

impl Lend for Frames<'_, '_> {
    fn deliver(
        &mut self,
        record: &RecordHeader,
        frame: &[u8],
        may_lend: bool,
    ) -> Option<Range<usize>> {
        let is_whole = !record.is_raw() && !record.is_fragment();
        let may_stay = may_lend && is_whole && frame.len() >= LEAST_FRAME;
        let borrower = may_stay.then(|| self.lending.of(record)).flatten();
        self.record = borrower.is_some().then_some(*record);
        if let Some(borrower) = borrower {
            probe_input(record, frame);
            let _input = layers::enter(Layer::InputHeaders);
            let Claimants { now, stack, .. } = self.claimants;
            let behind = borrower.behind(stack, Slot(record.slot));
            let (outcome, staying) = stack.input_lending(*now, record, frame, behind);
            // The session may have left: then the server gets the frame.
            if !matches!(outcome, Input::Unclaimed(_)) {
                return staying;
            }
        }
        self.claimants.offer(record, frame);
        None
    }

    fn keep(&mut self, loan: Loan) {
        if let Some(record) = &self.record
            && let Some(borrower) = self.lending.of(record)
        {
            borrower.retained.loans.push(loan);
        }
    }
}
