//! What a capture knows of processes and sessions, and the packets that it makes of their records. A record of a frame is a
//! packet as it is. Which process has
//! which end is the server's word; the records are the processes'.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::mem;
use std::os::fd::OwnedFd;
use std::time::{SystemTime, UNIX_EPOCH};

use portolan_proto::capture::{CaptureNews, CapturedEnd, RecordHeader, direction, flags};
use portolan_proto::local::Side;
use portolan_sys::clock;
use portolan_sys::shm::CaptureReader;
use portolan_types::{ChannelId, SessionId};

use super::pcapng::{Packet, PcapNg, Way};
use super::segments::Conversation;
use crate::table::printable;

/// A process that records.
struct Recorder {
    interface: u32,
    /// None once its ring is found to be malformed.
    reader: Option<CaptureReader>,
    received: u64,
    dropped: u64,
}

/// A session with an end in a process that records.
struct Session {
    conversation: Conversation,
    /// Where its ends were.
    ends: Vec<(ChannelId, SessionId)>,
    interface: u32,
    closed: u8,
    /// The close of an end that nobody records: the records of what it sent before come from the other end, until that is
    /// closed, too.
    unshown: Option<Close>,
}

/// How an end was closed.
#[derive(Clone, Copy)]
struct Close {
    side: Side,
    is_reset: bool,
}

/// What happened, in the order in which it is shown.
enum Event {
    Opened(u64),
    Recorded(ChannelId, RecordHeader, Vec<u8>),
}

/// What is shown after the records that precede it.
#[derive(Clone, Copy)]
enum Ending {
    Closed(u64, Close),
    Gone(ChannelId),
}

pub(super) struct View<W> {
    file: PcapNg<W>,
    recorders: BTreeMap<ChannelId, Recorder>,
    ends: HashMap<(ChannelId, SessionId), (u64, Side)>,
    sessions: HashMap<u64, Session>,
    events: Vec<(u64, Event)>,
    endings: Vec<Ending>,
    /// How many of them precede what was collected last.
    due: usize,
    packets: u64,
    most: u64,
    /// Of processes that are gone.
    dropped: u64,
    start: u64,
    /// Nanoseconds from the monotonic clock's zero to that of the wall clock.
    epoch: u64,
}

impl<W: Write> View<W> {
    pub(super) fn new(file: PcapNg<W>, most: u64) -> View<W> {
        let start = clock::now().as_nanos();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        let wall = wall.map_or(0, |wall| wall.as_nanos() as u64);
        View {
            file,
            recorders: BTreeMap::new(),
            ends: HashMap::new(),
            sessions: HashMap::new(),
            events: Vec::new(),
            endings: Vec::new(),
            due: 0,
            packets: 0,
            most,
            dropped: 0,
            start,
            epoch: wall.saturating_sub(start),
        }
    }

    pub(super) fn processes(&self) -> usize {
        self.recorders.len()
    }

    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    pub(super) fn dropped(&self) -> u64 {
        let lost = self.recorders.values().map(Recorder::lost);
        lost.fold(self.dropped, u64::saturating_add)
    }

    pub(super) fn is_full(&self) -> bool {
        self.packets >= self.most
    }

    /// Takes what the processes have recorded.
    pub(super) fn collect(&mut self) {
        self.due = self.endings.len();
        for (channel, recorder) in &mut self.recorders {
            if let Some(reader) = &mut recorder.reader {
                reader.look();
            }
            while let Some(reader) = &mut recorder.reader {
                match reader.take() {
                    Ok(None) => break,
                    Ok(Some((header, bytes))) => {
                        let event = Event::Recorded(*channel, header, bytes);
                        self.events.push((header.at, event));
                    }
                    Err(malformed) => {
                        eprintln!("portolan: process at channel {}: {malformed}", channel.0);
                        recorder.dropped = recorder.lost().saturating_add(1);
                        recorder.reader = None;
                    }
                }
            }
        }
    }

    pub(super) fn hear(&mut self, news: CaptureNews, mut fds: Vec<OwnedFd>) -> io::Result<()> {
        match news {
            CaptureNews::Process {
                channel,
                pid,
                program,
            } => {
                let name = format!("{}[{pid}]", printable(&program));
                let recorder = Recorder {
                    interface: self.file.interface(&name)?,
                    reader: fds.pop().and_then(|fd| CaptureReader::map(fd).ok()),
                    received: 0,
                    dropped: 0,
                };
                self.recorders.insert(channel, recorder);
            }
            CaptureNews::Ends(ends) => ends.iter().for_each(|end| self.enter(end)),
            CaptureNews::Closed {
                pair,
                side,
                is_reset,
            } => {
                let close = Close { side, is_reset };
                self.endings.push(Ending::Closed(pair, close));
            }
            CaptureNews::ProcessGone(channel) => self.endings.push(Ending::Gone(channel)),
            CaptureNews::Ready => {}
        }
        Ok(())
    }

    fn enter(&mut self, end: &CapturedEnd) {
        let Some(recorder) = self.recorders.get(&end.channel) else {
            return;
        };
        let place = (end.channel, end.session);
        self.ends.insert(place, (end.pair, end.side));
        let session = self.sessions.entry(end.pair).or_insert_with(|| {
            self.events.push((end.at, Event::Opened(end.pair)));
            Session {
                conversation: Conversation::new(end),
                ends: Vec::new(),
                interface: recorder.interface,
                closed: 0,
                unshown: None,
            }
        });
        session.ends.push(place);
    }

    /// Writes what was collected. Endings of which the news has come since then wait for the next time: what precedes
    /// them is collected by then. Returns the number of packets.
    pub(super) fn write(&mut self) -> io::Result<u64> {
        let before = self.packets;
        let mut events = mem::take(&mut self.events);
        // Openings precede records of the same time.
        events.sort_by_key(|(at, event)| (*at, matches!(event, Event::Recorded(..))));
        for (at, event) in events {
            match event {
                Event::Opened(pair) => self.open(at, pair)?,
                Event::Recorded(channel, header, bytes) => self.show(channel, &header, &bytes)?,
            }
        }
        for ending in self.endings.drain(..self.due).collect::<Vec<_>>() {
            self.end(ending)?;
        }
        self.due = 0;
        self.file.flush()?;
        Ok(self.packets - before)
    }

    /// Writes what is left, and the figures of all processes.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        self.collect();
        self.write()?;
        for channel in self.recorders.keys().copied().collect::<Vec<_>>() {
            self.end(Ending::Gone(channel))?;
        }
        self.file.flush()
    }

    fn open(&mut self, at: u64, pair: u64) -> io::Result<()> {
        let Some(session) = self.sessions.get(&pair) else {
            return Ok(());
        };
        let (interface, segments) = (session.interface, session.conversation.handshake());
        let opener = match session.ends.first().and_then(|place| self.ends.get(place)) {
            Some((_, Side::Accepter)) => Way::In,
            _ => Way::Out,
        };
        for segment in segments {
            let way = match segment.from {
                Side::Opener => opener,
                Side::Accepter => opposite(opener),
            };
            self.packet(at, (interface, way), segment.into_data())?;
        }
        Ok(())
    }

    fn show(&mut self, channel: ChannelId, header: &RecordHeader, bytes: &[u8]) -> io::Result<()> {
        let Some(recorder) = self.recorders.get_mut(&channel) else {
            return Ok(());
        };
        recorder.received += 1;
        let interface = recorder.interface;
        if header.flags & flags::FRAME != 0 {
            let way = match header.direction {
                direction::OUT => Way::Out,
                _ => Way::In,
            };
            let data = (header.length, bytes.to_vec());
            return self.packet(header.at, (interface, way), data);
        }
        // A process may record its own sessions only.
        let Some((pair, side)) = self.ends.get(&(channel, SessionId(header.session))) else {
            return Ok(());
        };
        let Some(session) = self.sessions.get_mut(pair) else {
            return Ok(());
        };
        let (from, way) = match header.direction {
            direction::OUT => (*side, Way::Out),
            _ => (side.other(), Way::In),
        };
        for segment in session.conversation.record(from, header, bytes) {
            self.packet(header.at, (interface, way), segment.into_data())?;
        }
        Ok(())
    }

    fn end(&mut self, ending: Ending) -> io::Result<()> {
        let now = clock::now().as_nanos();
        match ending {
            Ending::Closed(pair, close) => self.close(now, pair, close),
            Ending::Gone(channel) => {
                let Some(recorder) = self.recorders.remove(&channel) else {
                    return Ok(());
                };
                let lost = recorder.lost();
                self.dropped = self.dropped.saturating_add(lost);
                let figures = (recorder.received, lost);
                self.file
                    .statistics(recorder.interface, self.epoch + now, figures)
            }
        }
    }

    fn close(&mut self, now: u64, pair: u64, close: Close) -> io::Result<()> {
        let Some(session) = self.sessions.get_mut(&pair) else {
            return Ok(());
        };
        session.closed += 1;
        let is_last = session.closed == 2;
        let sides = session.ends.iter().filter_map(|place| self.ends.get(place));
        let recorded: Vec<Side> = sides.map(|(_, side)| *side).collect();
        if !is_last && !recorded.contains(&close.side) {
            session.unshown = Some(close);
            return Ok(());
        }
        let interface = session.interface;
        let mut shown = Vec::new();
        for Close { side, is_reset } in session.unshown.take().into_iter().chain([close]) {
            let way = if recorded.contains(&side) {
                Way::Out
            } else {
                Way::In
            };
            let segment = session.conversation.close(side, is_reset);
            shown.extend(segment.map(|segment| (way, segment)));
        }
        if is_last && let Some(session) = self.sessions.remove(&pair) {
            session.ends.iter().for_each(|place| {
                self.ends.remove(place);
            });
        }
        for (way, segment) in shown {
            self.packet(now, (interface, way), segment.into_data())?;
        }
        Ok(())
    }

    fn packet(
        &mut self,
        at: u64,
        (interface, way): (u32, Way),
        (length, bytes): (u32, Vec<u8>),
    ) -> io::Result<()> {
        if self.is_full() {
            return Ok(());
        }
        self.packets += 1;
        // A process may claim any time.
        let at = at.clamp(self.start, clock::now().as_nanos());
        let packet = Packet {
            at: self.epoch + at,
            way,
            length,
            bytes,
        };
        self.file.packet(interface, &packet)
    }
}

impl Recorder {
    fn lost(&self) -> u64 {
        let now = self.reader.as_ref().map_or(0, CaptureReader::lost);
        self.dropped.saturating_add(now)
    }
}

fn opposite(way: Way) -> Way {
    match way {
        Way::In => Way::Out,
        Way::Out => Way::In,
    }
}

#[cfg(test)]
mod tests;
