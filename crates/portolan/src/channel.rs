//! The channel of this process: frames in by the receive ring (or the tap, while asleep on it), or by the rings of sessions
//! that have one of their own,
//! frames out by the tap, and by the taps of sessions that have transmit queues of their own. Nothing that was
//! handed to [`Channel::transmit`] is lost: what a tap does not take at once waits in its backlog, and
//! the transmit queue is full until it is gone.

pub(crate) mod accounts;
pub mod layers;
pub(crate) mod rings;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_proto::filter::RecordHeader;
use portolan_stack::{Frame, TxQueueId, Wire};
use portolan_sys::doorbell::Doorbell;
use portolan_sys::ring::Loan;
use portolan_sys::rx_path::RxPath;
use portolan_sys::tap::{TapIo, WriteError};
use portolan_types::{Instant, Slot};
use rustix::io::Errno;

use crate::channel::accounts::Accounts;
use crate::channel::layers::Layer;
use crate::channel::rings::{OwnRing, Rings};
use crate::descriptors::{self, InternalFd};

pub(crate) struct Channel {
    main: TapQueue<OwnedFd>,
    others: BTreeMap<TxQueueId, TapQueue<InternalFd>>,
    /// Those to come: full until then.
    awaited: BTreeSet<TxQueueId>,
    chosen: TxQueueId,
    rx_path: RxPath,
    ring_fd: OwnedFd,
    rings: Rings,
    /// Counts the servers whose rings these were.
    renewals: u32,
    pub(crate) accounts: Accounts,
    /// The tap takes a UDP payload whole that is to become several datagrams.
    pub(crate) cuts_datagrams: bool,
}

/// What becomes of frames where some of them stay in their ring.
pub(crate) trait Lend {
    /// Takes a frame in. Returns which part of it is to stay where it lies; none unless it may.
    fn deliver(
        &mut self,
        record: &RecordHeader,
        frame: &[u8],
        may_lend: bool,
    ) -> Option<Range<usize>>;

    /// That part, of the frame that was delivered last.
    fn keep(&mut self, loan: Loan);
}

/// A tap and what it did not take.
struct TapQueue<F> {
    tap: TapIo<F>,
    backlog: VecDeque<Vec<u8>>,
}

/// TxQueues that are full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Full(u64);

impl Full {
    #[cfg(test)]
    pub(crate) const NONE: Full = Full(0);

    #[cfg(test)]
    pub(crate) const fn only(tx_queue: TxQueueId) -> Full {
        Full(1 << tx_queue.0)
    }

    pub(crate) fn is_any(self) -> bool {
        self.0 != 0
    }

    /// Is one full that is not in `other`?
    pub(crate) fn exceeds(self, other: Full) -> bool {
        self.0 & !other.0 != 0
    }
}

impl Channel {
    pub(crate) fn new(tap: TapIo<OwnedFd>, rx_path: RxPath, ring_fd: OwnedFd) -> Channel {
        Channel {
            main: TapQueue::new(tap),
            others: BTreeMap::new(),
            awaited: BTreeSet::new(),
            chosen: TxQueueId::MAIN,
            rx_path,
            ring_fd,
            rings: Rings::default(),
            renewals: 0,
            accounts: Accounts::new(),
            cuts_datagrams: false,
        }
    }

    /// Goes on by what another server has given: `tap` and `ring_fd` take the numbers of those before, and what these were
    /// to transmit is lost.
    pub(crate) fn renew(
        &mut self,
        (tap, ring_fd): (BorrowedFd<'_>, BorrowedFd<'_>),
        rx_path: RxPath,
    ) -> Result<(), Errno> {
        descriptors::renumber(tap, self.main.tap.as_fd())?;
        descriptors::renumber(ring_fd, self.ring_fd.as_fd())?;
        self.main.backlog.clear();
        self.rx_path = rx_path;
        self.others.clear();
        self.awaited.clear();
        self.chosen = TxQueueId::MAIN;
        self.rings = Rings::default();
        self.renewals += 1;
        Ok(())
    }

    pub(crate) fn renewals(&self) -> u32 {
        self.renewals
    }

    /// Has one more transmit queue from now on.
    pub(crate) fn open_tx_queue(&mut self, tx_queue: TxQueueId, tap: OwnedFd) {
        let tap = TapIo::new(InternalFd::new(tap));
        self.others.insert(tx_queue, TapQueue::new(tap));
        self.awaited.remove(&tx_queue);
    }

    /// Will have one more transmit queue.
    pub(crate) fn await_tx_queue(&mut self, tx_queue: TxQueueId) {
        self.awaited.insert(tx_queue);
    }

    /// That one does not come: who waits for it goes by the main one. False if it is there.
    pub(crate) fn stop_awaiting(&mut self, tx_queue: TxQueueId) -> bool {
        self.awaited.remove(&tx_queue)
    }

    /// Nothing goes through that transmit queue any more; false if something still waits there.
    pub(crate) fn close_tx_queue(&mut self, tx_queue: TxQueueId) -> bool {
        let is_idle = |tx_queue: &TapQueue<InternalFd>| tx_queue.backlog.is_empty();
        let may_go = self.others.get(&tx_queue).is_none_or(is_idle);
        if may_go {
            self.others.remove(&tx_queue);
        }
        may_go
    }

    /// Has one more ring from now on.
    pub(crate) fn add_ring(&mut self, ring: OwnRing) {
        self.rings.add(ring);
    }

    /// Hands the next received frames, at most `most` of them and of each ring that is a session's own, to `deliver`. Those
    /// come first: they wait for nobody else's.
    pub(crate) fn receive(
        &mut self,
        now: Instant,
        most: usize,
        mut deliver: impl FnMut(&RecordHeader, &[u8]),
    ) {
        let _ring = layers::enter(Layer::Ring);
        let accounts = &mut self.accounts;
        self.rings.receive(most, |header, frame| {
            accounts.begin(Slot(header.slot));
            deliver(header, frame);
        });
        for _ in 0..most {
            let Some(record) = self.rx_path.next(&self.main.tap, now) else {
                break;
            };
            if record.header.is_raw() {
                self.accounts.end()
            } else {
                self.accounts.begin(Slot(record.header.slot))
            }
            deliver(&record.header, record.frame);
        }
        self.accounts.end();
        self.rx_path.release();
    }

    /// As [`Channel::receive`], where some frames may stay in their ring.
    pub(crate) fn receive_lending(&mut self, now: Instant, most: usize, lend: &mut impl Lend) {
        let _ring = layers::enter(Layer::Ring);
        self.rings.receive_lending(most, &mut self.accounts, lend);
        for _ in 0..most {
            let Some((record, may_lend)) = self.rx_path.next_lendable(&self.main.tap, now) else {
                break;
            };
            if record.header.is_raw() {
                self.accounts.end()
            } else {
                self.accounts.begin(Slot(record.header.slot))
            }
            if let Some(range) = lend.deliver(&record.header, record.frame, may_lend) {
                lend.keep(self.rx_path.lend(&self.ring_fd, range));
            }
        }
        self.accounts.end();
        self.rx_path.release();
    }

    /// What is lent is copied: a child of `fork` has it, too, and the rings are free of it.
    pub(crate) fn detach_loans(&mut self) {
        self.rx_path.detach_loans();
        self.rings.detach_loans();
    }

    /// Are there frames to take?
    pub(crate) fn has_received(&self) -> bool {
        self.rx_path.has_received() || self.rings.has_received()
    }

    /// Are there frames to take, or may some be on their way by the tap?
    pub(crate) fn may_have_received(&self) -> bool {
        self.rx_path.is_settling() || self.has_received()
    }

    /// From now on frames come by the tap, or notify by their ring. False if there are frames to take first; then
    /// [`Channel::wake_up`] is due.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        self.rx_path.fall_asleep() && self.rings.fall_asleep()
    }

    /// Frames come by the ring again.
    pub(crate) fn wake_up(&mut self, now: Instant) {
        self.rx_path.wake_up(now);
        self.rings.wake_up(now);
    }

    /// Is the filter to wake whoever polls the rings for frames that nobody looks at for a while?
    pub(crate) fn want_attention(&self, is_wanted: bool) {
        self.doorbells()
            .for_each(|doorbell| doorbell.want_attention(is_wanted));
    }

    /// Somebody looks at the rings.
    pub(crate) fn note_look(&self, now: Instant) {
        self.doorbells()
            .for_each(|doorbell| doorbell.note_look(now));
    }

    /// Somebody looks at them again and again, and without a clock.
    pub(crate) fn note_looks(&self) {
        self.doorbells().for_each(Doorbell::note_looks);
    }

    /// Was there more to send than the windows let through?
    pub(crate) fn note_awaited_window(&self, is_awaited: bool) {
        self.doorbells()
            .for_each(|doorbell| doorbell.note_awaited_window(is_awaited));
    }

    fn doorbells(&self) -> impl Iterator<Item = &Doorbell> {
        std::iter::once(self.rx_path.doorbell()).chain(self.rings.doorbells())
    }

    /// Readable when an ICMP error, or a frame that just missed the tap, has come while asleep.
    pub(crate) fn ring_fd(&self) -> BorrowedFd<'_> {
        self.ring_fd.as_fd()
    }

    /// The same of rings that are sessions' own.
    pub(crate) fn own_ring_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.fds()
    }

    /// Readable when frames have come while asleep, writable when the tap takes frames again.
    pub(crate) fn tap_fd(&self) -> BorrowedFd<'_> {
        self.main.tap.as_fd()
    }

    pub(crate) fn is_main_full(&self) -> bool {
        self.main.is_full()
    }

    /// The other taps that are full: writable when they take frames again.
    pub(crate) fn full_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let full = self.others.values().filter(|tx_queue| tx_queue.is_full());
        full.map(|tx_queue| tx_queue.tap.as_fd())
    }

    pub(crate) fn full(&self) -> Full {
        let others = self
            .others
            .iter()
            .filter(|(_, tx_queue)| tx_queue.is_full());
        let main = Full(u64::from(self.is_main_full()));
        others.fold(main, |full, (tx_queue, _)| {
            Full(full.0 | 1u64.checked_shl(tx_queue.0.into()).unwrap_or(0))
        })
    }

    /// Does a tap owe frames to the device?
    pub(crate) fn has_backlog(&self) -> bool {
        self.main.is_full() || self.others.values().any(TapQueue::is_full)
    }

    /// Sends what is of no session.
    pub(crate) fn transmit_raw(&mut self, frame: &Frame<'_>) {
        self.main.transmit(frame);
    }

    /// Tries the frames that the taps did not take.
    pub(crate) fn flush(&mut self) {
        self.main.flush();
        self.others.values_mut().for_each(TapQueue::flush);
    }
}

impl<F: AsFd> TapQueue<F> {
    fn new(tap: TapIo<F>) -> TapQueue<F> {
        TapQueue {
            tap,
            backlog: VecDeque::new(),
        }
    }

    fn is_full(&self) -> bool {
        !self.backlog.is_empty()
    }

    fn flush(&mut self) {
        while let Some(frame) = self.backlog.front() {
            if let Err(WriteError::Blocked) = self.tap.write(&[IoSlice::new(frame)]) {
                return;
            }
            // What the tap refuses for another reason it would never take.
            self.backlog.pop_front();
        }
    }

    fn transmit(&mut self, frame: &Frame<'_>) {
        if self.backlog.is_empty() {
            let [first, second] = frame.payload;
            let pieces = [
                IoSlice::new(frame.head),
                IoSlice::new(first),
                IoSlice::new(second),
            ];
            let device = layers::enter(Layer::Device);
            let written = self.tap.write(&pieces);
            drop(device);
            match written {
                Ok(()) | Err(WriteError::Refused(_)) => return,
                Err(WriteError::Blocked) => {}
            }
        }
        self.backlog
            .push_back([frame.head, frame.payload[0], frame.payload[1]].concat());
    }
}

impl Wire for Channel {
    fn transmit(&mut self, frame: &Frame<'_>) {
        match self.others.get_mut(&self.chosen) {
            Some(tx_queue) => tx_queue.transmit(frame),
            None => self.main.transmit(frame),
        }
    }

    fn serve(&mut self, slot: Slot) {
        self.accounts.begin(slot);
    }

    fn is_full(&self) -> bool {
        match self.others.get(&self.chosen) {
            Some(tx_queue) => tx_queue.is_full(),
            None if self.awaited.contains(&self.chosen) => true,
            None => self.main.is_full(),
        }
    }

    fn choose(&mut self, tx_queue: TxQueueId) {
        self.chosen = tx_queue;
    }

    fn cuts_datagrams(&self) -> bool {
        self.cuts_datagrams
    }
}
