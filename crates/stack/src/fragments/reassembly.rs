//! Reassembles datagrams within limits of time and memory. Overlapping fragments invalidate their
//! datagram, as RFC 5722 demands for IPv6 and as Linux does for IPv4.

use core::time::Duration;
use std::collections::{BTreeMap, HashMap};

use portolan_proto::filter::RecordHeader;
use portolan_types::Instant;
use portolan_wire::ethernet;
use portolan_wire::{ipv4, ipv6};

use super::{Header, Piece};
use crate::packet::Drop;

/// RFC 791 §3.2 leaves it open; Linux's `ipfrag_time`.
const LIFETIME_V4: Duration = Duration::from_secs(30);
/// RFC 8200 §4.5.
const LIFETIME_V6: Duration = Duration::from_secs(60);

/// Limit of the bytes of all incomplete datagrams, including overhead (Linux: `ipfrag_high_thresh`).
const MEMORY: usize = 4 << 20;
/// The same limit for one session, so that garbage sent to one leaves room for the others.
const MEMORY_OF_SESSION: usize = 1 << 20;
/// Limit of the incomplete datagrams of one session.
const DATAGRAMS_OF_SESSION: usize = 128;

/// Memory overhead of a fragment and of a datagram.
const PIECE_OVERHEAD: usize = 64;
const DATAGRAM_OVERHEAD: usize = 256;

/// Longest IP payload that the length field of either version can express.
const LONGEST_V4: usize = 0xffff - ipv4::HEADER_LEN;
const LONGEST_V6: usize = 0xffff;

/// One session's copy of a datagram: a datagram for a group may have several.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    slot: u32,
    datagram: super::Key,
}

/// The result for a fragment.
#[derive(Debug)]
pub enum Reassembled {
    /// It completed its datagram.
    Whole(Box<Whole>),
    Waiting,
    Dropped(Drop),
}

/// A datagram as if it had arrived in one frame.
#[derive(Debug)]
pub struct Whole {
    /// The record header of the first fragment.
    pub record: RecordHeader,
    pub frame: Vec<u8>,
}

/// The fate of fragmented datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentCounters {
    pub reassembled: u64,
    pub timed_out: u64,
    pub overlapping: u64,
    /// Discarded because too many others were incomplete.
    pub crowded_out: u64,
    /// Impossible lengths.
    pub malformed: u64,
}

/// The incomplete datagrams of one holder.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    datagrams: HashMap<Key, Unfinished>,
    /// Oldest first; the number distinguishes datagrams with equal times.
    deadlines: BTreeMap<(Instant, u64), Key>,
    sessions: HashMap<u32, Usage>,
    bytes: usize,
    next: u64,
    pub(crate) counters: FragmentCounters,
}

/// Resources taken by one session's incomplete datagrams.
#[derive(Debug, Default)]
struct Usage {
    datagrams: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Unfinished {
    deadline: (Instant, u64),
    /// By offset, without overlaps.
    pieces: BTreeMap<usize, Vec<u8>>,
    received: usize,
    total: Option<usize>,
    first: Option<First>,
    congestion: Congestion,
    /// Its fragments contradicted each other: later ones are dropped, too (RFC 5722 §3).
    is_spoilt: bool,
}

#[derive(Debug)]
struct First {
    record: RecordHeader,
    header: Header,
    ethernet: [u8; ethernet::HEADER_LEN],
}

/// The ECN codepoints of the fragments (RFC 3168 §5.3).
#[derive(Clone, Copy, Debug, Default)]
struct Congestion {
    not_capable: bool,
    experienced: bool,
}

/// Why a fragment does not fit the others.
enum Misfit {
    Duplicate,
    Overlap,
    Malformed,
}

impl Reassembly {
    pub(crate) fn add(&mut self, now: Instant, record: &RecordHeader, frame: &[u8]) -> Reassembled {
        self.expire(now);
        let Some(piece) = Piece::of(frame) else {
            self.counters.malformed += 1;
            return Reassembled::Dropped(Drop::Malformed);
        };
        let key = Key {
            slot: record.slot,
            datagram: piece.key,
        };
        if !self.datagrams.contains_key(&key) {
            self.begin(now, &piece, key);
        }
        let Some(datagram) = self.datagrams.get_mut(&key) else {
            return Reassembled::Dropped(Drop::FragmentsCrowdedOut);
        };
        if datagram.is_spoilt {
            return Reassembled::Dropped(Drop::FragmentsOverlap);
        }
        match datagram.check(&piece) {
            Ok(()) => {}
            Err(Misfit::Duplicate) => return Reassembled::Waiting,
            Err(Misfit::Overlap) => {
                self.counters.overlapping += 1;
                self.spoil(key);
                return Reassembled::Dropped(Drop::FragmentsOverlap);
            }
            Err(Misfit::Malformed) => {
                self.counters.malformed += 1;
                self.spoil(key);
                return Reassembled::Dropped(Drop::Malformed);
            }
        }
        datagram.add(&piece, record, frame);
        let (slot, is_complete) = (key.slot, datagram.is_complete());
        self.charge(slot, piece.body.len() + PIECE_OVERHEAD);
        if is_complete {
            return self.finish(key);
        }
        self.make_room(slot);
        Reassembled::Waiting
    }

    fn begin(&mut self, now: Instant, piece: &Piece<'_>, key: Key) {
        let slot = key.slot;
        let lifetime = match piece.header {
            Header::V4(_) => LIFETIME_V4,
            Header::V6(_) => LIFETIME_V6,
        };
        let deadline = (now + lifetime, self.next);
        self.next += 1;
        self.deadlines.insert(deadline, key);
        self.datagrams.insert(
            key,
            Unfinished {
                deadline,
                pieces: BTreeMap::new(),
                received: 0,
                total: None,
                first: None,
                congestion: Congestion::default(),
                is_spoilt: false,
            },
        );
        self.sessions.entry(slot).or_default().datagrams += 1;
        self.charge(slot, DATAGRAM_OVERHEAD);
        self.make_room(slot);
    }

    fn charge(&mut self, slot: u32, bytes: usize) {
        self.bytes += bytes;
        self.sessions.entry(slot).or_default().bytes += bytes;
    }

    /// Discards the oldest datagrams: first the session's own, then any.
    fn make_room(&mut self, slot: u32) {
        while self.sessions.get(&slot).is_some_and(|usage| {
            usage.bytes > MEMORY_OF_SESSION || usage.datagrams > DATAGRAMS_OF_SESSION
        }) {
            let oldest = self
                .deadlines
                .values()
                .find(|key| key.slot == slot)
                .copied();
            let Some(oldest) = oldest else { break };
            self.counters.crowded_out += 1;
            self.remove(oldest);
        }
        while self.bytes > MEMORY {
            let Some(oldest) = self.deadlines.values().next().copied() else {
                break;
            };
            self.counters.crowded_out += 1;
            self.remove(oldest);
        }
    }

    fn remove(&mut self, key: Key) -> Option<Unfinished> {
        let datagram = self.datagrams.remove(&key)?;
        self.deadlines.remove(&datagram.deadline);
        let bytes = datagram.bytes();
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(usage) = self.sessions.get_mut(&key.slot) {
            usage.bytes = usage.bytes.saturating_sub(bytes);
            usage.datagrams = usage.datagrams.saturating_sub(1);
            if usage.datagrams == 0 {
                self.sessions.remove(&key.slot);
            }
        }
        Some(datagram)
    }

    /// Discards the fragments of a datagram, and remembers that it is invalid.
    fn spoil(&mut self, key: Key) {
        let Some(datagram) = self.datagrams.get_mut(&key) else {
            return;
        };
        let freed = datagram.bytes() - DATAGRAM_OVERHEAD;
        datagram.is_spoilt = true;
        datagram.pieces.clear();
        datagram.first = None;
        let slot = key.slot;
        self.bytes = self.bytes.saturating_sub(freed);
        if let Some(usage) = self.sessions.get_mut(&slot) {
            usage.bytes = usage.bytes.saturating_sub(freed);
        }
    }

    fn finish(&mut self, key: Key) -> Reassembled {
        match self.remove(key).and_then(Unfinished::into_whole) {
            Some(whole) => {
                self.counters.reassembled += 1;
                Reassembled::Whole(Box::new(whole))
            }
            None => {
                self.counters.malformed += 1;
                Reassembled::Dropped(Drop::Malformed)
            }
        }
    }

    /// Discards datagrams that have timed out.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some((&(deadline, _), &key)) = self.deadlines.first_key_value() {
            if deadline > now {
                return;
            }
            if self.remove(key).is_some_and(|datagram| !datagram.is_spoilt) {
                self.counters.timed_out += 1;
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.datagrams.is_empty() && self.sessions.is_empty() && self.bytes == 0
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        Some(self.deadlines.first_key_value()?.0.0)
    }
}

impl Unfinished {
    fn bytes(&self) -> usize {
        let pieces: usize = self.pieces.values().map(Vec::len).sum();
        DATAGRAM_OVERHEAD + self.pieces.len() * PIECE_OVERHEAD + pieces
    }

    fn is_complete(&self) -> bool {
        self.first.is_some() && self.total == Some(self.received)
    }

    fn check(&self, piece: &Piece<'_>) -> Result<(), Misfit> {
        let longest = match piece.header {
            Header::V4(_) => LONGEST_V4,
            Header::V6(_) => LONGEST_V6,
        };
        // RFC 8200 §4.5: all fragments but the last have a length that is a multiple of eight.
        let is_cut = piece.more && !piece.body.len().is_multiple_of(8);
        if piece.body.is_empty() || is_cut || piece.end() > longest {
            return Err(Misfit::Malformed);
        }
        let furthest = self
            .pieces
            .last_key_value()
            .map_or(0, |(start, bytes)| start + bytes.len());
        let contradicts = match (self.total, piece.more) {
            (Some(total), true) => piece.end() >= total && !self.holds(piece),
            (Some(total), false) => piece.end() != total,
            (None, true) => false,
            (None, false) => furthest > piece.end(),
        };
        if contradicts {
            return Err(Misfit::Overlap);
        }
        if self.holds(piece) {
            return Err(Misfit::Duplicate);
        }
        if self.overlaps(piece) {
            return Err(Misfit::Overlap);
        }
        Ok(())
    }

    /// RFC 8200 §4.5 permits exact duplicates.
    fn holds(&self, piece: &Piece<'_>) -> bool {
        self.pieces
            .get(&piece.offset)
            .is_some_and(|bytes| bytes == piece.body)
    }

    fn overlaps(&self, piece: &Piece<'_>) -> bool {
        self.pieces
            .range(..piece.end())
            .next_back()
            .is_some_and(|(start, bytes)| start + bytes.len() > piece.offset)
    }

    fn add(&mut self, piece: &Piece<'_>, record: &RecordHeader, frame: &[u8]) {
        self.pieces.insert(piece.offset, piece.body.to_vec());
        self.received += piece.body.len();
        self.congestion.note(&piece.header);
        if !piece.more {
            self.total = Some(piece.end());
        }
        if piece.offset == 0
            && let Some(ethernet) = frame.first_chunk()
        {
            self.first = Some(First {
                record: *record,
                header: piece.header,
                ethernet: *ethernet,
            });
        }
    }

    /// Returns `None` if the fragments' codepoints are contradictory, or the first fragment is missing.
    fn into_whole(self) -> Option<Whole> {
        let first = self.first?;
        let ecn = self.congestion.of_whole()?;
        let length = u16::try_from(self.received).ok()?;
        let mut frame = Vec::with_capacity(ethernet::HEADER_LEN + ipv6::HEADER_LEN + self.received);
        frame.extend(first.ethernet);
        match first.header {
            Header::V4(header) => {
                let mut bytes = [0; ipv4::HEADER_LEN];
                ipv4::Ipv4Header {
                    traffic_class: header.traffic_class | ecn,
                    more_fragments: false,
                    fragment_offset: 0,
                    payload_len: length,
                    ..header
                }
                .emit(&mut bytes);
                frame.extend(bytes);
            }
            Header::V6(header) => {
                let mut bytes = [0; ipv6::HEADER_LEN];
                ipv6::Ipv6Header {
                    traffic_class: header.traffic_class | ecn,
                    payload_len: length,
                    fragment: None,
                    ..header
                }
                .emit(&mut bytes);
                frame.extend(bytes);
            }
        }
        for bytes in self.pieces.values() {
            frame.extend_from_slice(bytes);
        }
        let record = RecordHeader {
            // Bounded by the longest IP packet.
            length: frame.len() as u32,
            flags: first.record.flags & !RecordHeader::FRAGMENT,
            ..first.record
        };
        Some(Whole { record, frame })
    }
}

impl Congestion {
    const EXPERIENCED: u8 = 0b11;

    fn note(&mut self, header: &Header) {
        let class = match header {
            Header::V4(header) => header.traffic_class,
            Header::V6(header) => header.traffic_class,
        };
        match class & Congestion::EXPERIENCED {
            0 => self.not_capable = true,
            Congestion::EXPERIENCED => self.experienced = true,
            _ => {}
        }
    }

    /// The codepoint to add to that of the first fragment; `None` if congestion would be hidden from a
    /// sender that cannot have negotiated ECN (RFC 3168 §5.3).
    fn of_whole(self) -> Option<u8> {
        match (self.experienced, self.not_capable) {
            (true, true) => None,
            (true, false) => Some(Congestion::EXPERIENCED),
            (false, _) => Some(0),
        }
    }
}
