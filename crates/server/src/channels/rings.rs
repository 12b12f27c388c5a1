//! The rings of sessions that have one of their own (ADR 20): whose they are, and who has them.

use std::collections::BTreeMap;

use portolan_control::ClientId;
use portolan_types::{ChannelId, SessionId};

/// Of all processes together, beside the rings of their channels.
pub const RINGS: u32 = 256;

#[derive(Debug)]
pub struct Directs {
    /// By their numbers, which follow those of the processes' channels.
    pub(super) rings: BTreeMap<ChannelId, RingEntry>,
    pub(super) first: ChannelId,
}

#[derive(Debug)]
pub(super) struct RingEntry {
    pub owner: ChannelId,
    pub stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    Ordered(RingRequest),
    /// Its process has gone meanwhile.
    Unwanted,
    Free,
    Taken,
}

/// A session that waits for a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingRequest {
    pub session: SessionId,
    pub client: ClientId,
    pub request: u32,
}

impl Directs {
    /// `processes` channels have the numbers before.
    pub fn new(processes: u32) -> Directs {
        Directs {
            rings: BTreeMap::new(),
            first: ChannelId(processes + 1),
        }
    }

    pub(super) fn free_of(&self, owner: ChannelId) -> Option<ChannelId> {
        let mut rings = self.rings.iter();
        let is_free = |entry: &RingEntry| matches!(entry.stage, Stage::Free);
        rings.find_map(|(ring, entry)| (entry.owner == owner && is_free(entry)).then_some(*ring))
    }

    /// Its session has gone elsewhere: another of its process may have it.
    pub fn free(&mut self, ring: ChannelId) {
        self.set(ring, Stage::Free);
    }

    pub(super) fn count_of(&self, owner: ChannelId) -> usize {
        let rings = self.rings.values();
        rings.filter(|entry| entry.owner == owner).count()
    }

    pub(super) fn set(&mut self, ring: ChannelId, stage: Stage) {
        if let Some(entry) = self.rings.get_mut(&ring) {
            entry.stage = stage;
        }
    }

    /// How many sessions have one.
    pub fn taken(&self) -> usize {
        let rings = self.rings.values();
        rings
            .filter(|entry| matches!(entry.stage, Stage::Taken))
            .count()
    }
}
