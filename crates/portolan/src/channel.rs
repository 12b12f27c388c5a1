//! The channel of this process. Frames arrive by the receive ring, by the tap while the process
//! sleeps on it, or by the ring of a directly mapped session. They leave by the tap, or by the tap
//! of a session's own transmit queue. No frame passed to [`Channel::transmit`] is lost: frames that
//! a tap does not accept at once wait in its backlog, and the transmit queue counts as full until
//! the backlog is empty.

pub(crate) mod accounts;
pub(crate) mod captures;
pub mod layers;
pub(crate) mod ring_events;
pub(crate) mod rings;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use portolan_proto::filter::RecordHeader;
use portolan_stack::{Frame, TxQueueId, Wire};
use portolan_sys::doorbell::Doorbell;
use portolan_sys::probes;
use portolan_sys::ring::Loan;
use portolan_sys::rx_path::RxPath;
use portolan_sys::tap::{TapIo, WriteError};
use portolan_sys::wait::pollfd;
use portolan_types::{Instant, Slot};
use rustix::io::Errno;

use crate::channel::accounts::Accounts;
use crate::channel::captures::Captures;
use crate::channel::layers::Layer;
use crate::channel::ring_events::RingEvents;
use crate::channel::rings::{OwnRing, Rings};
use crate::descriptors::{self, InternalFd};

pub(crate) struct Channel {
    main: TapQueue<OwnedFd>,
    others: BTreeMap<TxQueueId, TapQueue<InternalFd>>,
    /// Announced by the server but not open yet; they count as full.
    awaited: BTreeSet<TxQueueId>,
    chosen: TxQueueId,
    rx_path: RxPath,
    ring_fd: OwnedFd,
    rings: Rings,
    /// What a thread polls instead of the rings while frames are lent; made when first needed.
    ring_events: Option<RingEvents>,
    /// The thread that falls asleep must poll those.
    is_withheld: bool,
    /// Number of times the channel was renewed for another server.
    renewals: u32,
    pub(crate) accounts: Accounts,
    pub(crate) captures: Captures,
    /// The tap segments a large UDP payload into datagrams (USO).
    pub(crate) cuts_datagrams: bool,
}

/// Processes received frames of which some may stay in their ring.
pub(crate) trait Lend {
    /// Processes a received frame. Returns the range of the frame to leave in the ring; always `None` unless
    /// `may_lend`.
    fn deliver(
        &mut self,
        record: &RecordHeader,
        frame: &[u8],
        may_lend: bool,
    ) -> Option<Range<usize>>;

    /// Takes over that range of the frame that was delivered last.
    fn keep(&mut self, loan: Loan);
}

/// A tap and the frames that it has not accepted yet.
struct TapQueue<F> {
    tap: TapIo<F>,
    backlog: VecDeque<Vec<u8>>,
}

/// The set of transmit queues that are full.
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

    /// Is a queue full that is not full in `other`?
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
            ring_events: None,
            is_withheld: false,
            renewals: 0,
            accounts: Accounts::new(),
            captures: Captures::default(),
            cuts_datagrams: false,
        }
    }

    /// Switches to the channel of another server: `tap` and `ring_fd` take the descriptor numbers
    /// of their predecessors. Frames in the backlogs are lost.
    pub(crate) fn renew(
        &mut self,
        (tap, ring_fd): (BorrowedFd<'_>, BorrowedFd<'_>),
        rx_path: RxPath,
    ) -> Result<(), Errno> {
        descriptors::renumber(tap, self.main.tap.as_fd())?;
        descriptors::renumber(ring_fd, self.ring_fd.as_fd())?;
        self.main.backlog.clear();
        self.rx_path = rx_path;
        self.begin_anew();
        Ok(())
    }

    /// Switches to another server that knows this channel: only the tap is another. Frames that the old one has not
    /// accepted go by the new one.
    pub(crate) fn carry_on(&mut self, tap: BorrowedFd<'_>) -> Result<(), Errno> {
        descriptors::renumber(tap, self.main.tap.as_fd())?;
        self.begin_anew();
        Ok(())
    }

    /// Transmit queues and rings of sessions were the previous server's to give.
    fn begin_anew(&mut self) {
        self.others.clear();
        self.awaited.clear();
        self.chosen = TxQueueId::MAIN;
        self.rings = Rings::default();
        self.renewals += 1;
    }

    /// Adds an open transmit queue.
    pub(crate) fn open_tx_queue(&mut self, tx_queue: TxQueueId, tap: OwnedFd) {
        let tap = TapIo::new(InternalFd::new(tap));
        self.others.insert(tx_queue, TapQueue::new(tap));
        self.awaited.remove(&tx_queue);
    }

    /// Announces a transmit queue that will be opened later.
    pub(crate) fn await_tx_queue(&mut self, tx_queue: TxQueueId) {
        self.awaited.insert(tx_queue);
    }

    /// Withdraws the announcement of a transmit queue: its sessions use the main one. Returns false if it is open
    /// already.
    pub(crate) fn stop_awaiting(&mut self, tx_queue: TxQueueId) -> bool {
        self.awaited.remove(&tx_queue)
    }

    /// Closes a transmit queue. Returns false, and leaves it open, while its backlog is not empty.
    pub(crate) fn close_tx_queue(&mut self, tx_queue: TxQueueId) -> bool {
        let is_idle = |tx_queue: &TapQueue<InternalFd>| tx_queue.backlog.is_empty();
        let may_go = self.others.get(&tx_queue).is_none_or(is_idle);
        if may_go {
            self.others.remove(&tx_queue);
        }
        may_go
    }

    /// Adds the ring of a directly mapped session.
    pub(crate) fn add_ring(&mut self, ring: OwnRing) {
        self.rings.add(ring);
    }

    /// Passes received frames to `deliver`: at most `most` from each session's own ring, then at most `most`
    /// from the channel. Own rings come first, so that they never wait behind other sessions' frames.
    pub(crate) fn receive(
        &mut self,
        now: Instant,
        most: usize,
        mut deliver: impl FnMut(&RecordHeader, &[u8]),
    ) {
        let _ring = layers::enter(Layer::Ring);
        let (accounts, captures) = (&mut self.accounts, &mut self.captures);
        self.rings.receive(most, |header, frame| {
            accounts.begin(Slot(header.slot));
            captures.note_received(header, frame);
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
            self.captures.note_received(&record.header, record.frame);
            deliver(&record.header, record.frame);
        }
        self.accounts.end();
        self.rx_path.release();
    }

    /// As [`Channel::receive`], but some frames may stay in their ring.
    pub(crate) fn receive_lending(&mut self, now: Instant, most: usize, lend: &mut impl Lend) {
        let _ring = layers::enter(Layer::Ring);
        self.rings
            .receive_lending(most, (&mut self.accounts, &mut self.captures), lend);
        for _ in 0..most {
            let Some((record, may_lend)) = self.rx_path.next_lendable(&self.main.tap, now) else {
                break;
            };
            if record.header.is_raw() {
                self.accounts.end()
            } else {
                self.accounts.begin(Slot(record.header.slot))
            }
            self.captures.note_received(&record.header, record.frame);
            if let Some(range) = lend.deliver(&record.header, record.frame, may_lend) {
                lend.keep(self.rx_path.lend(&self.ring_fd, range));
            }
        }
        self.accounts.end();
        self.rx_path.release();
    }

    /// Replaces lent memory by copies: a child of `fork` can read them, too, and the rings are free of loans.
    pub(crate) fn detach_loans(&mut self) {
        self.rx_path.detach_loans();
        self.rings.detach_loans();
    }

    /// Are received frames pending?
    pub(crate) fn has_received(&self) -> bool {
        self.rx_path.has_received() || self.rings.has_received()
    }

    /// Are received frames pending, or may some be on their way by the tap?
    pub(crate) fn may_have_received(&self) -> bool {
        self.rx_path.is_settling() || self.has_received()
    }

    /// Prepares for sleep: from now on frames come by the tap, or notify by their ring. Returns
    /// false if frames are pending; then call [`Channel::wake_up`].
    pub(crate) fn fall_asleep(&mut self) -> bool {
        self.is_withheld = self.rx_path.is_withheld() || self.rings.is_any_withheld();
        if self.is_withheld {
            self.forget_ring_events();
        }
        self.rx_path.fall_asleep() && self.rings.fall_asleep()
    }

    /// From now on only new frames make the ring events readable.
    #[cold]
    fn forget_ring_events(&mut self) {
        let mut events = self.ring_events.take().unwrap_or_else(RingEvents::new);
        events.add(self.renewals, self.ring_fds());
        events.take();
        self.ring_events = Some(events);
    }

    /// Adds new rings to those that the background thread watches, and has the filter notify by them if frames stay
    /// unread for a while.
    pub(crate) fn watch_for_unattended(&self, events: &mut RingEvents) {
        if events.add(self.renewals, self.ring_fds()) > 0 {
            self.want_attention(true);
        }
    }

    /// Has frames come by the ring again.
    pub(crate) fn wake_up(&mut self, now: Instant) {
        self.rx_path.wake_up(now);
        self.rings.wake_up(now);
    }

    /// Sets whether the filter wakes the thread that waits for the rings when frames stay unread for a while.
    pub(crate) fn want_attention(&self, is_wanted: bool) {
        self.doorbells()
            .for_each(|doorbell| doorbell.want_attention(is_wanted));
    }

    /// Records that the rings are being read.
    pub(crate) fn note_look(&self, now: Instant) {
        self.doorbells()
            .for_each(|doorbell| doorbell.note_look(now));
    }

    /// Records that the rings are being read continuously, without a clock.
    pub(crate) fn note_looks(&self) {
        self.doorbells().for_each(Doorbell::note_looks);
    }

    /// Records whether the windows held back data that was ready to be sent.
    pub(crate) fn note_awaited_window(&self, is_awaited: bool) {
        self.doorbells()
            .for_each(|doorbell| doorbell.note_awaited_window(is_awaited));
    }

    fn doorbells(&self) -> impl Iterator<Item = &Doorbell> {
        std::iter::once(self.rx_path.doorbell()).chain(self.rings.doorbells())
    }

    pub(crate) fn ring_fd(&self) -> BorrowedFd<'_> {
        self.ring_fd.as_fd()
    }

    /// The ring of the channel, and those of sessions.
    fn ring_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.ring_fd()).chain(self.rings.fds())
    }

    /// Adds what is readable when an ICMP error, a frame that just missed the tap, or one of a session with a ring of its
    /// own has arrived during sleep.
    pub(crate) fn add_ring_pollfds(&self, fds: &mut Vec<libc::pollfd>) {
        let events = self.ring_events.as_ref().filter(|_| self.is_withheld);
        match events.and_then(RingEvents::pollfd) {
            Some(events) => fds.push(events),
            None => fds.extend(
                self.ring_fds()
                    .map(|ring| pollfd(ring.as_raw_fd(), libc::POLLIN)),
            ),
        }
    }

    /// Readable when frames have arrived during sleep, writable when the tap accepts frames again.
    pub(crate) fn tap_fd(&self) -> BorrowedFd<'_> {
        self.main.tap.as_fd()
    }

    pub(crate) fn is_main_full(&self) -> bool {
        self.main.is_full()
    }

    /// The other taps that are full: writable when they accept frames again.
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

    /// Do frames wait for a tap to accept them?
    pub(crate) fn has_backlog(&self) -> bool {
        self.main.is_full() || self.others.values().any(TapQueue::is_full)
    }

    /// Sends a frame that belongs to no session.
    pub(crate) fn transmit_raw(&mut self, frame: &Frame<'_>) {
        self.captures.note_sent(frame);
        self.main.transmit(frame);
    }

    /// Retries the frames that the taps have not accepted.
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
            // A frame refused for another reason would be refused again.
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
            probes::device(frame.head.as_ptr() as u64);
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
        self.captures.note_sent(frame);
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
