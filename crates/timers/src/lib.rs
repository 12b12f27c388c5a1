//! A hashed, hierarchical timing wheel (Varghese and Lauck): one deadline per slot, and a [`Queue`] of
//! named ones on top of it. It owns deadlines and nothing else, and never reads a clock.
//!
//! Six levels of 64 buckets; a bucket of level `n` spans `64^n` ticks. A timer is in the lowest level
//! whose span covers it, and moves down as its time approaches.
#![forbid(unsafe_code)]

mod queue;

use portolan_types::Instant;

pub use queue::Queue;

/// Nanoseconds of a tick, as a power of two.
const TICK_BITS: u32 = 16;
/// Buckets of a level, as a power of two.
const LEVEL_BITS: u32 = 6;
const BUCKETS: usize = 1 << LEVEL_BITS;
const LEVELS: usize = 6;
/// The farthest that a timer is placed ahead, about 51 days: all buckets of the last level except the
/// current one. A later timer waits there and is placed again.
const REACH: u64 = (BUCKETS as u64 - 1) << (LEVEL_BITS * (LEVELS as u32 - 1));
/// End of a list, and the bucket of a slot that has no deadline.
const NONE: u32 = u32::MAX;

/// A doubly linked list node; all slots of one bucket are one list.
#[derive(Clone, Copy, Debug)]
struct Node {
    tick: u64,
    bucket: u32,
    previous: u32,
    next: u32,
}

const IDLE: Node = Node {
    tick: 0,
    bucket: NONE,
    previous: NONE,
    next: NONE,
};

/// One deadline per slot.
#[derive(Debug)]
pub struct Wheel {
    /// Everything up to and including this tick has been expired.
    tick: u64,
    /// No timer is due before this tick.
    earliest: u64,
    nodes: Vec<Node>,
    heads: [u32; BUCKETS * LEVELS],
    /// Bit mask, per level, of the buckets that hold timers.
    occupied: [u64; LEVELS],
}

impl Wheel {
    pub fn new(now: Instant) -> Wheel {
        Wheel {
            tick: now.as_nanos() >> TICK_BITS,
            earliest: u64::MAX,
            nodes: Vec::new(),
            heads: [NONE; BUCKETS * LEVELS],
            occupied: [0; LEVELS],
        }
    }

    /// Sets the deadline of `slot`, replacing an earlier one.
    pub fn set(&mut self, slot: u32, deadline: Instant) {
        let index = slot as usize;
        if index >= self.nodes.len() {
            self.nodes.resize(index + 1, IDLE);
        }
        // Rounded up, so that no timer fires early; a timer already due fires next.
        let ticks = deadline
            .as_nanos()
            .div_ceil(1 << TICK_BITS)
            .max(self.tick + 1);
        if self.nodes[index].bucket != NONE {
            if self.nodes[index].tick == ticks {
                return;
            }
            self.unlink(slot);
        }
        self.nodes[index].tick = ticks;
        let placed = self.link(slot);
        self.earliest = self.earliest.min(placed);
    }

    /// Removes the deadline of `slot`.
    pub fn clear(&mut self, slot: u32) {
        if self
            .nodes
            .get(slot as usize)
            .is_some_and(|node| node.bucket != NONE)
        {
            self.unlink(slot);
        }
    }

    /// When `expire` should be called next: no later than the earliest deadline, rounded up to its tick,
    /// but possibly earlier.
    pub fn next(&self) -> Option<Instant> {
        let empty = self.occupied.iter().all(|&bits| bits == 0);
        (!empty).then(|| Instant::from_nanos(self.earliest.saturating_mul(1 << TICK_BITS)))
    }

    /// Reports and removes each deadline that has expired.
    pub fn expire(&mut self, now: Instant, mut fire: impl FnMut(u32)) {
        let target = now.as_nanos() >> TICK_BITS;
        while self.earliest <= target {
            // Jump to the next bucket with timers; those in between are empty.
            self.tick = self.earliest.max(self.tick);
            self.cascade();
            self.fire_tick(&mut fire);
            self.earliest = self.search();
        }
        self.tick = self.tick.max(target);
    }

    /// Moves timers of higher levels whose bucket has begun to lower ones.
    fn cascade(&mut self) {
        for level in (1..LEVELS).rev() {
            let bucket = level * BUCKETS + self.position(level, self.tick);
            let mut slot = self.take(bucket);
            while slot != NONE {
                let next = self.nodes[slot as usize].next;
                self.link(slot);
                slot = next;
            }
        }
    }

    fn fire_tick(&mut self, fire: &mut impl FnMut(u32)) {
        let mut slot = self.take(self.position(0, self.tick));
        while slot != NONE {
            let node = &mut self.nodes[slot as usize];
            let next = node.next;
            *node = IDLE;
            fire(slot);
            slot = next;
        }
    }

    /// The first tick at which a bucket with timers begins, on any level. This includes buckets that have
    /// begun but were not moved down.
    fn search(&self) -> u64 {
        (0..LEVELS)
            .filter_map(|level| self.search_level(level))
            .min()
            .unwrap_or(u64::MAX)
    }

    fn search_level(&self, level: usize) -> Option<u64> {
        let bits = self.occupied[level];
        if bits == 0 {
            return None;
        }
        let shift = LEVEL_BITS * level as u32;
        let here = self.tick >> shift;
        let from = here as u32 % BUCKETS as u32;
        let ahead = u64::from(bits.rotate_right(from).trailing_zeros());
        Some((here + ahead) << shift)
    }

    fn position(&self, level: usize, tick: u64) -> usize {
        (tick >> (LEVEL_BITS * level as u32)) as usize % BUCKETS
    }

    /// Returns the tick at which the timer must be checked: its own, if the wheel covers it.
    fn link(&mut self, slot: u32) -> u64 {
        let tick = self.nodes[slot as usize].tick;
        let ahead = tick.saturating_sub(self.tick).min(REACH);
        let level = self.level(ahead);
        let position = self.position(level, self.tick + ahead);
        let bucket = level * BUCKETS + position;
        let head = self.heads[bucket];
        if head != NONE {
            self.nodes[head as usize].previous = slot;
        }
        self.nodes[slot as usize] = Node {
            tick,
            bucket: bucket as u32,
            previous: NONE,
            next: head,
        };
        self.heads[bucket] = slot;
        self.occupied[level] |= 1 << position;
        self.tick + ahead
    }

    /// The lowest level whose buckets, excluding the current one, cover `ahead` ticks.
    fn level(&self, ahead: u64) -> usize {
        (0..LEVELS - 1)
            .find(|&level| {
                let shift = LEVEL_BITS * level as u32;
                ((self.tick + ahead) >> shift) - (self.tick >> shift) < BUCKETS as u64
            })
            .unwrap_or(LEVELS - 1)
    }

    fn unlink(&mut self, slot: u32) {
        let node = core::mem::replace(&mut self.nodes[slot as usize], IDLE);
        if node.next != NONE {
            self.nodes[node.next as usize].previous = node.previous;
        }
        if node.previous != NONE {
            self.nodes[node.previous as usize].next = node.next;
            return;
        }
        let bucket = node.bucket as usize;
        self.heads[bucket] = node.next;
        if node.next == NONE {
            self.occupied[bucket / BUCKETS] &= !(1 << (bucket % BUCKETS));
            // It may have been the earliest one: nobody is to wake for it.
            self.earliest = self.search();
        }
    }

    /// Empties `bucket` and returns the head of its list.
    fn take(&mut self, bucket: usize) -> u32 {
        self.occupied[bucket / BUCKETS] &= !(1 << (bucket % BUCKETS));
        core::mem::replace(&mut self.heads[bucket], NONE)
    }
}

#[cfg(test)]
mod tests;
