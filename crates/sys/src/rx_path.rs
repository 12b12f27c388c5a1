//! Reception of frames by the owner of a channel: by the receive ring while it is awake, and by its tap
//! while it sleeps there, which is the cheapest way for the kernel to wake it (ADR 3). [`RxPath::next`]
//! returns frames in order of arrival: those on the ring when the owner woke up, then those that came by
//! the tap while it slept, then those put on the ring since. Sessions with tap delivery get their frames
//! by the tap while the owner is awake, too.

use std::ops::Range;
use std::os::fd::AsFd;
use std::time::Duration;

use portolan_proto::filter::{RecordHeader, TapStamp};
use portolan_types::Instant;
use portolan_wire::vnet::VnetHeader;
use zerocopy::FromBytes;

use crate::doorbell::{Doorbell, State};
use crate::ring::{FrameBuffer, LARGEST_FRAME, Loan, Record, Ring};
use crate::tap::{TapIo, VNET_HEADER};

/// A frame that the filter sent to the tap when the owner had just woken up appears there within a
/// microsecond, unless its CPU is preempted. After this time it counts as lost.
const STRAGGLE: Duration = Duration::from_millis(1);

/// A frame from the tap gets a buffer of its own if it is at least a quarter of the buffer: a frame that is kept
/// keeps the whole buffer.
const LEAST_LENT: usize = LARGEST_FRAME / 4;

/// The receiving half of a channel. The tap belongs to the owner, who also sends by it.
#[derive(Debug)]
pub struct RxPath {
    ring: Ring,
    doorbell: Doorbell,
    /// Holds a frame from the tap while it is processed.
    buffer: FrameBuffer,
    /// The last frame is in the buffer.
    is_in_buffer: bool,
    /// Frames read from the tap; the filter counts those it sent there.
    taken_from_tap: u32,
    /// Some were given up. If one arrives later, the count does not show it, so the tap is also read
    /// after each sleep.
    has_given_up: bool,
    /// The tap has not been read since the last sleep.
    must_ask: bool,
    is_asleep: bool,
    /// The ring's position when the owner woke up: frames up to it are older than those of the tap.
    ring_at_wake: u64,
    /// When the owner woke up, until the tap is known to be drained: the filter may have seen it asleep
    /// and not have counted the frame yet.
    woken: Option<Instant>,
    /// A frame sent to the tap has not arrived; those on the ring are newer.
    ring_waits: bool,
}

/// Where the next frame is.
enum Location {
    Ring,
    /// In the buffer, with its length including the virtio-net header.
    Buffer(RecordHeader, usize),
}

impl RxPath {
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    pub fn new(ring: Ring, doorbell: Doorbell) -> RxPath {
        RxPath {
            ring,
            doorbell,
            buffer: FrameBuffer::new(),
            is_in_buffer: false,
            taken_from_tap: 0,
            has_given_up: false,
            must_ask: false,
            is_asleep: false,
            ring_at_wake: 0,
            woken: None,
            ring_waits: false,
        }
    }

    /// Called before the owner sleeps: from now on the filter sends frames to the tap. Returns false if frames
    /// have arrived without a wake-up: the owner must wake up and process them.
    #[must_use]
    pub fn fall_asleep(&mut self) -> bool {
        if self.has_received() {
            return false;
        }
        self.is_asleep = true;
        self.woken = None;
        self.doorbell.set(State::AsleepOnTap);
        self.ring.is_empty()
    }

    /// Switches delivery back to the ring. Does nothing if the owner is awake.
    pub fn wake_up(&mut self, now: Instant) {
        if !self.is_asleep {
            return;
        }
        self.is_asleep = false;
        // Before the state is set: what enters the ring afterwards is newer than the tap's frames.
        self.ring_at_wake = self.ring.produced();
        self.doorbell.note_look(now);
        self.doorbell.set(State::Awake);
        self.woken = Some(now);
        self.must_ask = self.has_given_up;
    }

    /// Whether there are frames to process.
    pub fn has_received(&self) -> bool {
        !self.ring.is_empty() || self.tap_holds_more()
    }

    /// Whether the filter sent frames to the tap that were not read.
    fn tap_holds_more(&self) -> bool {
        self.doorbell.by_tap() != self.taken_from_tap
    }

    /// Whether frames may arrive by the tap although the owner is awake.
    pub fn is_settling(&self) -> bool {
        self.woken.is_some()
    }

    /// Returns the next frame from the ring or `tap`, if any. It may overwrite frames returned by
    /// earlier calls.
    pub fn next<F: AsFd>(&mut self, tap: &TapIo<F>, now: Instant) -> Option<Record<'_>> {
        match self.place_of_next(tap, now)? {
            Location::Ring => self.ring.next(),
            Location::Buffer(header, length) => Some(Record {
                header,
                frame: &self.buffer[VNET_HEADER..length],
            }),
        }
    }

    /// Like [`RxPath::next`]; also returns whether [`RxPath::lend`] may lend the frame.
    pub fn next_lendable<F: AsFd>(
        &mut self,
        tap: &TapIo<F>,
        now: Instant,
    ) -> Option<(Record<'_>, bool)> {
        match self.place_of_next(tap, now)? {
            Location::Ring => {
                self.is_in_buffer = false;
                let may_lend = self.ring.may_lend();
                Some((self.ring.next()?, may_lend))
            }
            Location::Buffer(header, length) => {
                self.is_in_buffer = true;
                let frame = &self.buffer[VNET_HEADER..length];
                Some((Record { header, frame }, length >= LEAST_LENT))
            }
        }
    }

    /// Lends `range` of the frame that [`RxPath::next_lendable`] returned last; `fd` is the ring.
    pub fn lend(&mut self, fd: impl AsFd, range: Range<usize>) -> Loan {
        if !std::mem::take(&mut self.is_in_buffer) {
            return self.ring.lend(fd, range);
        }
        let buffer = std::mem::replace(&mut self.buffer, FrameBuffer::new());
        Loan::of_buffer(buffer, VNET_HEADER + range.start..VNET_HEADER + range.end)
    }

    /// Copies what is lent.
    pub fn detach_loans(&mut self) {
        self.ring.detach_loans();
    }

    fn place_of_next<F: AsFd>(&mut self, tap: &TapIo<F>, now: Instant) -> Option<Location> {
        if self.ring.position() < self.ring_at_wake {
            return Some(Location::Ring);
        }
        if !self.is_settling() && self.tap_holds_more() {
            // From a session with tap delivery; the frame may still be in transit.
            self.woken = Some(now);
        }
        if self.is_settling()
            && let Some((header, length)) = self.read_tap(tap, now)
        {
            return Some(Location::Buffer(header, length));
        }
        (!self.ring_waits).then_some(Location::Ring)
    }

    /// Reads a frame into the buffer; skips malformed ones.
    fn read_tap<F: AsFd>(&mut self, tap: &TapIo<F>, now: Instant) -> Option<(RecordHeader, usize)> {
        loop {
            let is_counted = self.tap_holds_more();
            if !is_counted && !self.must_ask {
                self.settle(now);
                return None;
            }
            let Some(length) = tap.read(&mut self.buffer) else {
                self.must_ask = false;
                if is_counted {
                    self.miss(now);
                } else {
                    self.settle(now);
                }
                return None;
            };
            self.taken_from_tap = self.taken_from_tap.wrapping_add(u32::from(is_counted));
            if let Some(header) = header_of(&self.buffer[..length], now) {
                return Some((header, length));
            }
        }
    }

    /// All counted frames have arrived. If this was seen twice, no further one is pending.
    fn settle(&mut self, now: Instant) {
        self.ring_waits = false;
        self.woken = self.woken.filter(|&woken| woken >= now);
    }

    /// A counted frame has not arrived: delays frames from the ring, for a limited time.
    fn miss(&mut self, now: Instant) {
        self.ring_waits = self.woken.is_some_and(|woken| now.since(woken) < STRAGGLE);
        if !self.ring_waits {
            self.woken = None;
            self.has_given_up = true;
            self.taken_from_tap = self.doorbell.by_tap();
        }
    }

    /// Releases the space of all frames read from the ring to the filter.
    pub fn release(&mut self) {
        self.ring.release();
    }
}

/// The header that the filter would have put before the frame on the ring. Frames sent to the tap
/// begin with a virtio-net header, then metadata in place of the Ethernet addresses.
fn header_of(bytes: &[u8], now: Instant) -> Option<RecordHeader> {
    let (vnet, frame) = VnetHeader::parse(bytes).ok()?;
    let (stamp, _) = TapStamp::read_from_prefix(frame).ok()?;
    Some(RecordHeader {
        length: u32::try_from(frame.len()).ok()?,
        gso_size: vnet.gso().map_or(0, |(_, size)| size),
        flags: stamp.flags,
        slot: stamp.slot,
        generation: stamp.generation,
        timestamp: now.as_nanos(),
        ifindex: stamp.ifindex.into(),
        ..RecordHeader::default()
    })
}

#[cfg(test)]
mod tests;
