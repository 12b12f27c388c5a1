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

/// A frame that the filter sent to the tap when the owner had just woken appears there no later
/// than this.
const STRAGGLE: Duration = Duration::from_micros(100);

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
    /// When to look at the tap once more after a sleep: not all that was sent there had come.
    stragglers_by: Option<Instant>,
}

impl Inlet {
    pub fn new(ring: Ring, doorbell: Doorbell) -> Inlet {
        Inlet {
            ring,
            doorbell,
            buffer: vec![0; LARGEST_FRAME].into_boxed_slice(),
            taken_from_tap: 0,
            stragglers_by: None,
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
        self.stragglers_by = Some(now + STRAGGLE);
    }

    /// Does the ring hold a frame?
    pub fn has_received(&self) -> bool {
        !self.ring.is_empty()
    }

    /// Frames that the filter sent to the tap and that were not read, or were lost on the way.
    fn tap_holds_more(&self) -> bool {
        self.doorbell.by_tap() != self.taken_from_tap
    }

    /// Is there a look at the tap to be taken before `then`?
    pub fn expects(&self, then: Instant) -> bool {
        self.stragglers_by.is_some_and(|by| by <= then)
    }

    /// The next frame that came by `tap`; a frame that makes no sense is passed over.
    pub fn next_from_tap<F: AsFd>(&mut self, tap: &TapIo<F>, now: Instant) -> Option<Record<'_>> {
        let (header, length) = loop {
            if !self.tap_holds_more() {
                self.stragglers_by = None;
                return None;
            }
            let Some(length) = tap.read(&mut self.buffer) else {
                self.stragglers_by = self.stragglers_by.filter(|&by| by > now);
                return None;
            };
            self.taken_from_tap = self.taken_from_tap.wrapping_add(1);
            if let Some(header) = header_of(&self.buffer[..length], now) {
                break (header, length);
            }
        };
        let frame = &self.buffer[VNET_HEADER..length];
        Some(Record { header, frame })
    }

    /// The next frame of the ring; what earlier calls gave may be overwritten.
    pub fn next_from_ring(&mut self) -> Option<Record<'_>> {
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
