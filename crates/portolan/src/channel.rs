//! The channel of this process: frames in by the receive ring (or the tap, while asleep on it),
//! frames out by the tap. Nothing that was handed to [`Channel::transmit`] is lost: what the tap
//! does not take at once waits in the backlog, and the channel is full until it is gone.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use portolan_proto::filter::{RecordHeader, TapStamp};
use portolan_stack::{Frame, Wire};
use portolan_sys::doorbell::{Doorbell, State};
use portolan_sys::ring::Ring;
use portolan_sys::tap::{TapIo, WriteError};
use portolan_types::Instant;
use portolan_wire::vnet::VnetHeader;
use zerocopy::FromBytes;

/// A frame that the filter sent to the tap when the owner had just woken appears there no later
/// than this.
const STRAGGLE: Duration = Duration::from_micros(100);

/// Octets of the largest frame that comes by the tap, its virtio-net header included.
const LARGEST_FRAME: usize = 66 * 1024;

pub(crate) struct Channel {
    tap: TapIo<OwnedFd>,
    ring: Ring,
    ring_fd: OwnedFd,
    doorbell: Doorbell,
    backlog: VecDeque<Vec<u8>>,
    /// Where frames from the tap lie while they are looked at.
    buffer: Box<[u8]>,
    /// Frames read from the tap; the filter counts those it sent there.
    taken_from_tap: u32,
    /// When to look at the tap once more after a sleep: not all that was sent there had come.
    stragglers_by: Option<Instant>,
    /// Frames the tap refused for another reason than being full.
    pub(crate) refused: u64,
}

impl Channel {
    pub(crate) fn new(
        tap: TapIo<OwnedFd>,
        ring: Ring,
        ring_fd: OwnedFd,
        doorbell: Doorbell,
    ) -> Channel {
        Channel {
            tap,
            ring,
            ring_fd,
            doorbell,
            backlog: VecDeque::new(),
            buffer: vec![0; LARGEST_FRAME].into_boxed_slice(),
            taken_from_tap: 0,
            stragglers_by: None,
            refused: 0,
        }
    }

    /// Hands the next received frames, at most `most` of them from the ring, to `deliver`.
    pub(crate) fn receive(
        &mut self,
        now: Instant,
        most: usize,
        mut deliver: impl FnMut(&RecordHeader, &[u8]),
    ) {
        if self.stragglers_by.is_some_and(|by| by <= now) {
            self.stragglers_by = None;
            self.drain_tap(now, &mut deliver);
        }
        for _ in 0..most {
            let Some(record) = self.ring.next() else {
                break;
            };
            deliver(&record.header, record.frame);
        }
        self.ring.release();
    }

    /// Is there a look at the tap to be taken before `then`?
    pub(crate) fn expects(&self, then: Instant) -> bool {
        self.stragglers_by.is_some_and(|by| by <= then)
    }

    pub(crate) fn has_received(&self) -> bool {
        !self.ring.is_empty()
    }

    /// From now on the filter sends frames to the tap, whose reader the kernel wakes without the
    /// detour that a ring's wake-up takes. Look at [`Channel::has_received`] afterwards: what came
    /// before rings no bell.
    pub(crate) fn fall_asleep(&self) {
        self.doorbell.set(State::AsleepOnTap);
    }

    /// Frames come by the ring again; those on the tap are older and go first.
    pub(crate) fn wake_up(&mut self, now: Instant, mut deliver: impl FnMut(&RecordHeader, &[u8])) {
        self.doorbell.set(State::Awake);
        self.drain_tap(now, &mut deliver);
        self.stragglers_by = self.tap_holds_more().then_some(now + STRAGGLE);
    }

    /// Frames that the filter sent there and that were not read, or were lost on the way.
    fn tap_holds_more(&self) -> bool {
        self.doorbell.by_tap() != self.taken_from_tap
    }

    /// Reads the tap for as long as there may be frames.
    fn drain_tap(&mut self, now: Instant, deliver: &mut impl FnMut(&RecordHeader, &[u8])) {
        while self.tap_holds_more() {
            let Some(length) = self.tap.read(&mut self.buffer) else {
                return;
            };
            self.taken_from_tap = self.taken_from_tap.wrapping_add(1);
            let Some(octets) = self.buffer.get(..length) else {
                return;
            };
            if let Some((header, frame)) = open_stamped(octets, now) {
                deliver(&header, frame);
            }
        }
    }

    /// Readable when an ICMP error, or a frame that just missed the tap, has come while asleep.
    pub(crate) fn ring_fd(&self) -> BorrowedFd<'_> {
        self.ring_fd.as_fd()
    }

    /// Readable when frames have come while asleep, writable when the tap takes frames again.
    pub(crate) fn tap_fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }

    /// Tries the frames that the tap did not take.
    pub(crate) fn flush(&mut self) {
        while let Some(frame) = self.backlog.front() {
            match self.tap.write(&[IoSlice::new(frame)]) {
                Ok(()) => {}
                Err(WriteError::Blocked) => return,
                Err(WriteError::Refused(_)) => self.refused += 1,
            }
            self.backlog.pop_front();
        }
    }
}

/// A frame as the filter sends it to the tap: virtio-net header, then the stamp in place of the
/// Ethernet addresses.
fn open_stamped(octets: &[u8], now: Instant) -> Option<(RecordHeader, &[u8])> {
    let (vnet, frame) = VnetHeader::parse(octets).ok()?;
    let (stamp, _) = TapStamp::read_from_prefix(frame).ok()?;
    let header = RecordHeader {
        length: u32::try_from(frame.len()).ok()?,
        gso_size: vnet.gso().map_or(0, |(_, size)| size),
        flags: stamp.flags,
        slot: stamp.slot,
        generation: stamp.generation,
        timestamp: now.as_nanos(),
        ..RecordHeader::default()
    };
    Some((header, frame))
}

impl Wire for Channel {
    fn transmit(&mut self, frame: &Frame<'_>) {
        if self.backlog.is_empty() {
            let [first, second] = frame.payload;
            let pieces = [
                IoSlice::new(frame.head),
                IoSlice::new(first),
                IoSlice::new(second),
            ];
            match self.tap.write(&pieces) {
                Ok(()) => return,
                Err(WriteError::Blocked) => {}
                Err(WriteError::Refused(_)) => {
                    self.refused += 1;
                    return;
                }
            }
        }
        self.backlog
            .push_back([frame.head, frame.payload[0], frame.payload[1]].concat());
    }

    fn is_full(&self) -> bool {
        !self.backlog.is_empty()
    }
}
