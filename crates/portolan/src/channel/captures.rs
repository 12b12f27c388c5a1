//! Records what local sessions carry and which frames are sent and received, while `portolan capture` asks for it (ADR 36). Nothing waits for the command: what
//! finds no room in its ring is counted there.

use std::os::fd::OwnedFd;

use portolan_local::{Direction, Local};
use portolan_proto::capture::{CaptureRing, PIECE_MAX, RecordHeader, Subject, direction, flags};
use portolan_proto::filter::{self, TapStamp};
use portolan_proto::local::flags as stream;
use portolan_stack::Frame;
use portolan_sys::clock;
use portolan_sys::shm::CaptureWriter;
use portolan_types::SessionId;
use portolan_wire::vnet;
use zerocopy::FromBytes;

/// How far the streams of an end are recorded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recorded {
    out: Stretch,
    incoming: Stretch,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    position: u64,
    flags: u32,
}

impl Recorded {
    /// What the readers have taken is past; what they have not is recorded next.
    pub(crate) fn until_now(end: &Local) -> Recorded {
        let stretch = |direction| Stretch {
            position: end.taken(direction),
            flags: 0,
        };
        Recorded {
            out: stretch(Direction::Out),
            incoming: stretch(Direction::In),
        }
    }

    fn stretch(&mut self, direction: Direction) -> &mut Stretch {
        match direction {
            Direction::Out => &mut self.out,
            Direction::In => &mut self.incoming,
        }
    }
}

#[derive(Debug)]
struct Target {
    ring: CaptureRing,
    writer: CaptureWriter,
}

/// The rings of this process.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    targets: Vec<Target>,
    has_local: bool,
    has_packets: bool,
    piece: Vec<u8>,
}

impl Captures {
    /// Are local sessions recorded?
    #[inline]
    pub(crate) fn has_local(&self) -> bool {
        self.has_local
    }

    /// Keeps the rings that are listed, and adds those that are new. Those that cannot be mapped are left out.
    pub(crate) fn set(&mut self, rings: &[CaptureRing], memory: Vec<OwnedFd>) {
        let is_listed = |number| rings.iter().any(|ring| ring.number == number);
        self.targets.retain(|target| is_listed(target.ring.number));
        let new = rings.iter().filter(|ring| ring.is_new);
        for (ring, fd) in new.zip(memory) {
            if let Ok(writer) = CaptureWriter::map(fd) {
                self.targets.push(Target {
                    ring: *ring,
                    writer,
                });
            }
        }
        let has = |has: fn(Subject) -> bool| self.targets.iter().any(|it| has(it.ring.subject));
        (self.has_local, self.has_packets) = (has(Subject::has_local), has(Subject::has_packets));
        if self.targets.is_empty() {
            self.piece = Vec::new();
        }
    }

    /// Called when an end may have shown or seen more.
    #[inline]
    pub(crate) fn note(&mut self, id: SessionId, end: &Local, recorded: &mut Recorded) {
        if self.has_local {
            self.record(id, end, recorded);
        }
    }

    /// Called with each frame to send.
    #[inline]
    pub(super) fn note_sent(&mut self, frame: &Frame<'_>) {
        if self.has_packets {
            self.record_sent(frame);
        }
    }

    /// Called with each received frame.
    #[inline]
    pub(super) fn note_received(&mut self, record: &filter::RecordHeader, frame: &[u8]) {
        if self.has_packets {
            self.record_received(record, frame);
        }
    }

    #[cold]
    fn record_sent(&mut self, frame: &Frame<'_>) {
        self.piece.clear();
        let head = frame.head.get(vnet::HEADER_LEN..).unwrap_or_default();
        for part in [head, frame.payload[0], frame.payload[1]] {
            self.piece.extend_from_slice(part);
        }
        self.record_frame(direction::OUT);
    }

    #[cold]
    fn record_received(&mut self, record: &filter::RecordHeader, frame: &[u8]) {
        self.piece.clear();
        self.piece.extend_from_slice(frame);
        // The filter has replaced the Ethernet addresses of what came by the tap.
        if let Ok((stamp, _)) = TapStamp::read_from_prefix(frame)
            && (stamp.slot, stamp.generation) == (record.slot, record.generation)
        {
            self.piece[..size_of::<TapStamp>()].fill(0);
        }
        self.record_frame(direction::IN);
    }

    fn record_frame(&mut self, direction: u32) {
        let header = RecordHeader {
            at: clock::now().as_nanos(),
            length: self.piece.len() as u32,
            direction,
            flags: flags::FRAME,
            ..RecordHeader::default()
        };
        self.write(&header, Subject::has_packets);
    }

    /// Writes a record of the piece into the rings that have such records.
    fn write(&mut self, header: &RecordHeader, has: fn(Subject) -> bool) {
        for target in &mut self.targets {
            if has(target.ring.subject) {
                let captured = header.length.min(target.ring.snap);
                let header = RecordHeader {
                    captured,
                    ..*header
                };
                target.writer.write(&header, &self.piece);
            }
        }
    }

    /// Records what an end has shown and seen since it was recorded last.
    #[cold]
    fn record(&mut self, id: SessionId, end: &Local, recorded: &mut Recorded) {
        for direction in [Direction::Out, Direction::In] {
            self.record_stream(id, (end, direction), recorded.stretch(direction));
        }
    }

    fn record_stream(
        &mut self,
        id: SessionId,
        (end, direction): (&Local, Direction),
        recorded: &mut Stretch,
    ) {
        let (shown, raised) = end.shown(direction);
        if (shown, raised) == (recorded.position, recorded.flags) {
            return;
        }
        let at = clock::now().as_nanos();
        loop {
            let length = shown
                .saturating_sub(recorded.position)
                .min(PIECE_MAX.into()) as usize;
            self.piece.resize(length, 0);
            end.copy_shown(direction, recorded.position, &mut self.piece);
            let behind = recorded.position + length as u64;
            let is_last = behind >= shown;
            let header = RecordHeader {
                session: id.0,
                position: recorded.position,
                at,
                length: length as u32,
                captured: 0,
                direction: number(direction),
                flags: if is_last { shown_flags(raised) } else { 0 },
            };
            self.write(&header, Subject::has_local);
            recorded.position = behind;
            if is_last {
                break;
            }
        }
        recorded.flags = raised;
    }
}

fn number(direction: Direction) -> u32 {
    match direction {
        Direction::Out => direction::OUT,
        Direction::In => direction::IN,
    }
}

fn shown_flags(raised: u32) -> u32 {
    let mut shown = 0;
    if raised & stream::FIN != 0 {
        shown |= flags::FIN;
    }
    if raised & stream::RESET != 0 {
        shown |= flags::RESET;
    }
    shown
}
