//! Reception of frames by the owner of a channel: by the receive ring while it is awake, and by its tap
//! while it sleeps there, which is the cheapest way for the kernel to wake it (ADR 3). [`RxPath::next`]
//! returns frames in order of arrival: those on the ring when the owner woke up, then those that came by
//! the tap while it slept, then those put on the ring since. Sessions with tap delivery get their frames
//! by the tap while the owner is awake, too.

use std::ops::Range;
use std::os::fd::AsFd;

use portolan_proto::filter::{RecordHeader, TapStamp};
use portolan_types::Instant;
use portolan_wire::vnet::VnetHeader;
use zerocopy::FromBytes;

use crate::doorbell::{Doorbell, State};
use crate::ring::{FrameBuffer, LARGEST_FRAME, Loan, Record, Ring};
use crate::rx_path::order::{Look, Order};
use crate::tap::{TapIo, VNET_HEADER};

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
    order: Order,
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
            order: Order::default(),
        }
    }

    /// Called before the owner sleeps: from now on the filter sends frames to the tap. Returns false if frames
    /// have arrived without a wake-up: the owner must wake up and process them.
    #[must_use]
    pub fn fall_asleep(&mut self) -> bool {
        if self.has_received() {
            return false;
        }
        self.order.fall_asleep();
        self.doorbell.set(State::AsleepOnTap);
        self.ring.is_empty()
    }

    /// Switches delivery back to the ring. Does nothing if the owner is awake.
    pub fn wake_up(&mut self, now: Instant) {
        if !self.order.is_asleep() {
            return;
        }
        // Before the state is set: what enters the ring afterwards is newer than the tap's frames.
        self.order.wake_up(self.ring.produced(), now);
        self.doorbell.note_look(now);
        self.doorbell.set(State::Awake);
    }

    /// Whether there are frames to process.
    pub fn has_received(&self) -> bool {
        !self.ring.is_empty() || self.tap_holds_more()
    }

    /// Whether the filter sent frames to the tap that were not read.
    fn tap_holds_more(&self) -> bool {
        self.order.tap_holds_more(self.doorbell.by_tap())
    }

    /// Whether frames may arrive by the tap although the owner is awake.
    pub fn is_settling(&self) -> bool {
        self.order.is_settling()
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

    /// Reads a frame from the tap into the buffer, if that is where the next one is; skips malformed ones.
    fn place_of_next<F: AsFd>(&mut self, tap: &TapIo<F>, now: Instant) -> Option<Location> {
        let position = self.ring.position();
        loop {
            let counted = match self.order.next(position, || self.doorbell.by_tap(), now) {
                Look::Ring => return Some(Location::Ring),
                Look::Nowhere => return None,
                Look::Tap(counted) => counted,
            };
            let Some(length) = tap.read(&mut self.buffer) else {
                let by_tap = self.doorbell.by_tap();
                self.order.found_tap_empty(counted, by_tap, now);
                return self.order.may_read_ring().then_some(Location::Ring);
            };
            self.order.took_from_tap(counted);
            if let Some(header) = header_of(&self.buffer[..length], now) {
                return Some(Location::Buffer(header, length));
            }
        }
    }

    /// Whether frames that were read are lent, so that the ring's descriptor is readable.
    pub fn is_withheld(&self) -> bool {
        self.ring.is_withheld()
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

mod order;
#[cfg(test)]
mod tests;
