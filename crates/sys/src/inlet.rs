//! How frames reach the owner of a channel: by the receive ring while it is awake, by its tap while
//! it sleeps there, whose reader the kernel wakes with the least ado (ADR 3). Frames on the tap
//! are older than those on the ring and must be taken first; no frame is taken twice.

use std::os::fd::AsFd;
use std::time::Duration;

use portolan_proto::filter::{RecordHeader, TapStamp};
use portolan_types::Instant;
use portolan_wire::vnet::VnetHeader;
use zerocopy::FromBytes;

use crate::doorbell::{Doorbell, State};
use crate::ring::{Record, Ring};
use crate::tap::{TapIo, VNET_HEADER};

/// A frame that the filter sent to the tap when the owner had just woken appears there within a
/// microsecond, but for a processor that is taken away from it. After this time it was lost.
const STRAGGLE: Duration = Duration::from_millis(1);

/// Octets of the largest frame that comes by the tap, its virtio-net header included.
const LARGEST_FRAME: usize = 66 * 1024;

/// The receiving half of a channel. The tap is the owner's, who also sends by it.
#[derive(Debug)]
pub struct Inlet {
    ring: Ring,
    doorbell: Doorbell,
    /// Where a frame from the tap lies while it is looked at.
    buffer: Box<[u8]>,
    /// Frames read from the tap; the filter counts those it sent there.
    taken_from_tap: u32,
    /// Some were given up. If one comes after all the count does not tell, so that after each sleep
    /// the tap is asked as well.
    has_given_up: bool,
    /// The tap has not been asked since the last sleep.
    must_ask: bool,
    /// When the owner woke, until it has seen that nothing more comes by the tap: the filter may have
    /// met it asleep and not have counted the frame yet.
    woken: Option<Instant>,
    /// A frame that was sent to the tap has not come; what lies on the ring is younger.
    ring_waits: bool,
}

impl Inlet {
    pub fn new(ring: Ring, doorbell: Doorbell) -> Inlet {
        Inlet {
            ring,
            doorbell,
            buffer: vec![0; LARGEST_FRAME].into_boxed_slice(),
            taken_from_tap: 0,
            has_given_up: false,
            must_ask: false,
            woken: None,
            ring_waits: false,
        }
    }

    /// From now on the filter sends frames to the tap. Look at [`Inlet::has_received`] afterwards:
    /// what came before rings no bell.
    pub fn fall_asleep(&self) {
        self.doorbell.set(State::AsleepOnTap);
    }

    /// Frames come by the ring again. Take those on the tap first.
    pub fn wake_up(&mut self, now: Instant) {
        self.doorbell.set(State::Awake);
        if !self.ring_waits {
            self.woken = Some(now);
        }
        self.must_ask = self.has_given_up;
    }

    /// Does the ring hold a frame?
    pub fn has_received(&self) -> bool {
        !self.ring.is_empty()
    }

    /// Did the filter send frames to the tap that were not read?
    fn tap_holds_more(&self) -> bool {
        self.doorbell.by_tap() != self.taken_from_tap
    }

    /// Is there a look at the tap to be taken before the ring is read?
    pub fn is_settling(&self) -> bool {
        self.woken.is_some()
    }

    /// The next frame that came by `tap`; a frame that makes no sense is passed over.
    pub fn next_from_tap<F: AsFd>(&mut self, tap: &TapIo<F>, now: Instant) -> Option<Record<'_>> {
        let (header, length) = loop {
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
                break (header, length);
            }
        };
        let frame = &self.buffer[VNET_HEADER..length];
        Some(Record { header, frame })
    }

    /// All that was counted has come. Once that has been seen twice there is nothing else.
    fn settle(&mut self, now: Instant) {
        self.ring_waits = false;
        self.woken = self.woken.filter(|&woken| woken >= now);
    }

    /// A counted frame has not come: the ring waits for it, but not for ever.
    fn miss(&mut self, now: Instant) {
        let since = *self.woken.get_or_insert(now);
        self.ring_waits = now.since(since) < STRAGGLE;
        if !self.ring_waits {
            self.woken = None;
            self.has_given_up = true;
            self.taken_from_tap = self.doorbell.by_tap();
        }
    }

    /// The next frame of the ring, if none on the tap goes before it; what earlier calls gave may be
    /// overwritten.
    pub fn next_from_ring(&mut self) -> Option<Record<'_>> {
        if self.ring_waits {
            return None;
        }
        self.ring.next()
    }

    /// Gives the space of all frames taken from the ring back to the filter.
    pub fn release(&mut self) {
        self.ring.release();
    }
}

/// The header that the filter would have put before the frame on the ring. What it sends to the tap
/// begins with a virtio-net header, then a stamp in place of the Ethernet addresses.
fn header_of(octets: &[u8], now: Instant) -> Option<RecordHeader> {
    let (vnet, frame) = VnetHeader::parse(octets).ok()?;
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
