//! One direction of a link: a queue drained at a rate, then a delay, then random faults.

use core::time::Duration;
use std::collections::BTreeMap;

use portolan_tcp::Codepoint;
use portolan_types::{Handle, Instant};
use portolan_wire::tcp::TcpHeader;

use crate::random::Random;

/// Bytes of headers below TCP's payload that count for the rate.
const OVERHEAD: usize = 66;

#[derive(Clone, Debug)]
pub struct Packet {
    pub header: TcpHeader,
    pub payload: Vec<u8>,
    /// The ECN codepoint of the IP header.
    pub codepoint: Codepoint,
    /// The demux handle in the IP header's options.
    pub handle: Option<Handle>,
}

impl Packet {
    /// Makes a packet that routers may not mark.
    pub fn new(header: TcpHeader, payload: Vec<u8>) -> Packet {
        Packet {
            header,
            payload,
            codepoint: Codepoint::NotEct,
            handle: None,
        }
    }
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Link {
    pub delay: Duration,
    /// Bits per second; 0: unlimited.
    pub rate: u64,
    /// Bytes that can be queued.
    pub buffer: usize,
    /// Marks ECN-capable packets while more bytes than this are queued (RFC 3168).
    pub mark_above: usize,
    /// Larger payloads, options included, are dropped silently.
    pub largest: usize,
    /// Probability of loss per thousand packets.
    pub loss: u32,
    pub duplication: u32,
    /// Probability per thousand that a packet is delayed by `late`.
    pub reordering: u32,
    pub late: Duration,
    /// Drops packets with IP options.
    pub loses_handles: bool,
    random: Random,
    /// The time at which all queued packets have been sent.
    free_at: Instant,
    /// Packets in flight, by time of arrival, then by order of departure.
    flying: BTreeMap<(Instant, u64), Packet>,
    departures: u64,
    /// Packets dropped, by random loss or because the buffer was full.
    pub dropped: u64,
    pub carried: u64,
    pub marked: u64,
    /// Packets with a handle, dropped or not.
    pub with_handle: u64,
}

impl Link {
    pub fn new(seed: u64, delay: Duration) -> Link {
        Link {
            delay,
            rate: 0,
            buffer: usize::MAX,
            mark_above: usize::MAX,
            largest: usize::MAX,
            loss: 0,
            duplication: 0,
            reordering: 0,
            late: delay / 2,
            loses_handles: false,
            random: Random::new(seed),
            free_at: Instant::ZERO,
            flying: BTreeMap::new(),
            departures: 0,
            dropped: 0,
            carried: 0,
            marked: 0,
            with_handle: 0,
        }
    }

    /// Puts a packet on the link.
    pub fn send(&mut self, now: Instant, mut packet: Packet) {
        let size = packet.payload.len() + packet.header.options.len();
        self.with_handle += u64::from(packet.handle.is_some());
        if self.loses_handles && packet.handle.is_some() {
            self.dropped += 1;
            return;
        }
        let fits = size <= self.largest && self.waiting(now) + packet.payload.len() <= self.buffer;
        if !fits || self.random.chance(self.loss) {
            self.dropped += 1;
            return;
        }
        self.carried += 1;
        if self.waiting(now) > self.mark_above && packet.codepoint != Codepoint::NotEct {
            packet.codepoint = Codepoint::Ce;
            self.marked += 1;
        }
        self.free_at = self.free_at.max(now) + self.time_of(packet.payload.len() + OVERHEAD);
        let mut arrival = self.free_at + self.delay;
        if self.random.chance(self.reordering) {
            arrival += self.late;
        }
        if self.random.chance(self.duplication) {
            self.fly(arrival + self.late, packet.clone());
        }
        self.fly(arrival, packet);
    }

    /// Returns the time at which the next packet arrives.
    pub fn next_arrival(&self) -> Option<Instant> {
        self.flying.keys().next().map(|&(at, _)| at)
    }

    /// Removes and returns the next packet that has arrived.
    pub fn receive(&mut self, now: Instant) -> Option<Packet> {
        let entry = self.flying.first_entry().filter(|e| e.key().0 <= now)?;
        Some(entry.remove())
    }

    fn fly(&mut self, arrival: Instant, packet: Packet) {
        self.departures += 1;
        self.flying.insert((arrival, self.departures), packet);
    }

    fn time_of(&self, bytes: usize) -> Duration {
        match self.rate {
            0 => Duration::ZERO,
            rate => Duration::from_nanos(bytes as u64 * 8 * 1_000_000_000 / rate),
        }
    }

    /// Returns the queued bytes.
    fn waiting(&self, now: Instant) -> usize {
        let wait = self.free_at.since(now).as_nanos();
        usize::try_from(wait * u128::from(self.rate) / 8_000_000_000).unwrap_or(usize::MAX)
    }
}
