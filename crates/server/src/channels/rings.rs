//! The rings of directly mapped sessions (ADR 20): which process owns each, and which session uses it.

use std::collections::BTreeMap;

use portolan_control::ClientId;
use portolan_types::{ChannelId, SessionId};

/// Of all processes together, besides the rings of their channels.
pub(crate) const RINGS: u32 = 256;

#[derive(Debug)]
pub(crate) struct Directs {
    /// By number; the numbers follow those of the processes' channels.
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
    /// Its process has exited in the meantime.
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
    /// The channels of `processes` processes have the lower numbers.
    pub(crate) fn new(processes: u32) -> Directs {
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

    /// Frees a ring whose session has moved: another session of its process may get it.
    pub(crate) fn free(&mut self, ring: ChannelId) {
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

    /// Returns how many sessions have a ring.
    pub(crate) fn taken(&self) -> usize {
        let rings = self.rings.values();
        rings
            .filter(|entry| matches!(entry.stage, Stage::Taken))
            .count()
    }
}
