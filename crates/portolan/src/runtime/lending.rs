//! Payloads that stay in the ring, for programs that receive by shared buffers ([`crate::net::buf`]). Once a program has
//! received so from a session, what comes for it in order is put aside here instead of being copied into the receive queue.
//! Whoever wants to see the queue by another call finds all of it there: [`Core::stream`] copies what has stayed first.
//!
//! In a stream's order come: a part of the receive queue, what has stayed, the rest of the receive queue.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use portolan_proto::filter::RecordHeader;
use portolan_stack::{Input, Stack};
use portolan_sys::ring::Loan;
use portolan_types::{Generation, Slot};

use super::Core;
use super::arrivals::Claimants;
use crate::channel::layers::{self, Layer};
use crate::channel::{Channel, Lend};

/// Frames shorter than this are copied: that costs less than to keep them.
const LEAST_FRAME: usize = 1024;

/// Frames taken from the ring before the thread has what has stayed: a quarter of a ring of the usual size. The others
/// stay in the ring until it comes again.
const BATCH: usize = 16;

/// Sessions whose payloads stay, by their slots.
#[derive(Debug, Default)]
pub(crate) struct Lending {
    borrowers: Vec<Option<Box<Borrower>>>,
    count: usize,
}

#[derive(Debug)]
struct Borrower {
    generation: Generation,
    stayed: Stayed,
    returned: Arc<Returned>,
}

/// Bytes that a program has given back and that its session does not know of yet: to tell it takes the process's lock, and
/// the next call has that anyhow.
#[derive(Debug, Default)]
pub(crate) struct Returned(AtomicUsize);

impl Returned {
    /// Returns how many there are now.
    pub(crate) fn add(&self, bytes: usize) -> usize {
        self.0.fetch_add(bytes, Relaxed) + bytes
    }

    pub(crate) fn take(&self) -> usize {
        self.0.swap(0, Relaxed)
    }
}

/// What has stayed of one session.
#[derive(Debug, Default)]
pub(crate) struct Stayed {
    /// Bytes of the receive queue that come first.
    pub(crate) behind: usize,
    pub(crate) loans: Vec<Loan>,
}

impl Stayed {
    pub(crate) fn is_empty(&self) -> bool {
        self.loans.is_empty()
    }

    /// Takes away all but the first `count` loans, which come before what is returned.
    pub(crate) fn split_off(&mut self, count: usize) -> Stayed {
        let count = count.min(self.loans.len());
        Stayed {
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

    /// From now on payloads of the session stay.
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
                stayed: Stayed::default(),
                returned: Arc::default(),
            };
            let before = self.borrowers[index].replace(Box::new(borrower));
            self.count += usize::from(before.is_none());
        }
    }

    /// Where its program counts what it gives back.
    pub(crate) fn returned(&self, slot: Slot) -> Option<&Arc<Returned>> {
        let borrower = self.borrowers.get(slot.0 as usize)?.as_ref()?;
        Some(&borrower.returned)
    }

    /// No more.
    fn end(&mut self, slot: Slot) {
        let place = self.borrowers.get_mut(slot.0 as usize);
        if place.and_then(Option::take).is_some() {
            self.count -= 1;
        }
    }

    /// What has stayed of the session at a slot; it has not any more.
    pub(crate) fn take(&mut self, slot: Slot) -> Stayed {
        let borrower = self.borrowers.get_mut(slot.0 as usize);
        borrower
            .and_then(Option::as_mut)
            .map(|borrower| std::mem::take(&mut borrower.stayed))
            .unwrap_or_default()
    }

    /// Nobody wanted it yet.
    pub(crate) fn put_back(&mut self, slot: Slot, stayed: Stayed) {
        let borrower = self.borrowers.get_mut(slot.0 as usize);
        if let Some(borrower) = borrower.and_then(Option::as_mut) {
            borrower.stayed = stayed;
        }
    }

    /// Has anything stayed of it?
    pub(crate) fn has_some(&self, slot: Slot) -> bool {
        let borrower = self.borrowers.get(slot.0 as usize);
        borrower
            .and_then(Option::as_ref)
            .is_some_and(|borrower| !borrower.stayed.is_empty())
    }

    fn of(&mut self, record: &RecordHeader) -> Option<&mut Borrower> {
        let place = self.borrowers.get_mut(record.slot as usize)?;
        let borrower = place.as_deref_mut()?;
        (borrower.generation == Generation(record.generation)).then_some(borrower)
    }

    /// Offers what has arrived to whoever may claim it; payloads stay.
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
    /// How many bytes must be unread for the next payload to stay.
    fn behind(&mut self, stack: &mut Stack, slot: Slot) -> usize {
        if self.stayed.is_empty() {
            let session = stack.tcp(slot);
            self.stayed.behind = session.map_or(0, |session| session.connection.readable());
        }
        self.stayed.behind
    }
}

impl Core {
    /// Somebody is about to see the receive queue of the session at `slot`, or to take it away: what has stayed goes there.
    pub(crate) fn settle_lending(&mut self, slot: Slot) {
        if self.lending.is_active() && self.lending.has_some(slot) {
            self.copy_stayed(slot);
        }
    }

    #[cold]
    fn copy_stayed(&mut self, slot: Slot) {
        let Stayed { behind, loans } = self.lending.take(slot);
        if let Some(session) = self.stack.tcp(slot) {
            let pieces = loans.iter().map(|loan| &**loan);
            session.connection.take_back(behind, pieces);
        }
    }

    /// The session at `slot` leaves.
    pub(super) fn end_lending(&mut self, slot: Slot) {
        if self.lending.is_active() {
            self.settle_lending(slot);
            self.lending.end(slot);
        }
    }
}

struct Frames<'a, 'b> {
    lending: &'a mut Lending,
    /// The frame that came last, if it may stay.
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
            let _input = layers::enter(Layer::InputHeaders);
            let Claimants { now, stack, .. } = self.claimants;
            let behind = borrower.behind(stack, Slot(record.slot));
            let (outcome, staying) = stack.input_lending(*now, record, frame, behind);
            // The session may have left: then the server is told.
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
            borrower.stayed.loans.push(loan);
        }
    }
}
