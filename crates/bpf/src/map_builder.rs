//! Creation and removal of the maps of channels. After each write to a map of maps the kernel waits tens of
//! milliseconds until no program uses the former entry: threads do that, and a channel is ready as soon as its maps are
//! visible.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use portolan_types::ChannelId;

use crate::channel::{ChannelMaps, Maps};
use crate::error::{AttachError, ChannelError, LoadError};
use crate::filter::Limits;
use crate::hook::{self, Hook};
use crate::objects::Objects;
use crate::removals::Removals;
use crate::table::Table;
use crate::workers::Workers;

/// Maximum number of concurrent writes to the tables.
const WRITERS: usize = 64;

/// The time that a write takes on an idle machine, and so the polling interval.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

pub struct MapBuilder {
    rings: Arc<Table<u32, i32>>,
    doorbells: Arc<Table<u32, i32>>,
    transmit_filter: OwnedFd,
    channels: u32,
    removals: Arc<Removals>,
    writers: Arc<Workers>,
}

impl MapBuilder {
    pub(crate) fn of(objects: &Objects, limits: &Limits) -> Result<MapBuilder, LoadError> {
        let rings: Arc<Table<u32, i32>> = Arc::new(Table::of(objects, "rings")?);
        let doorbells: Arc<Table<u32, i32>> = Arc::new(Table::of(objects, "doorbells")?);
        let tables = [&rings, &doorbells].map(Arc::clone);
        let removals = Removals::by(move |channel| {
            // A missing entry needs no removal; nothing else can fail with a valid index.
            for table in &tables {
                let _ = table.remove(&channel.0);
            }
        });
        Ok(MapBuilder {
            rings,
            doorbells,
            transmit_filter: objects.program("transmit_filter")?,
            channels: limits.channels,
            removals,
            writers: Workers::up_to(WRITERS),
        })
    }

    /// Gives each channel a ring of at least `ring_size` bytes and a doorbell.
    pub fn create_channels(
        &self,
        channels: &[ChannelId],
        ring_size: u32,
    ) -> Result<Vec<ChannelMaps>, ChannelError> {
        let create = |_| Maps::create(ring_size);
        let maps: Vec<Maps> = channels.iter().map(create).collect::<Result<_, _>>()?;
        let installed: Vec<_> = channels.iter().copied().zip(&maps).collect();
        self.install(&installed)?;
        maps.iter().map(Maps::share).collect()
    }

    /// Prepares a new tap, which is down, for the transmit filter.
    pub fn prepare_tap(&self, tap_ifindex: u32) -> Result<(), AttachError> {
        hook::prepare(self.transmit_filter.as_fd(), tap_ifindex)
    }

    /// Attaches the transmit filter at the ingress of a prepared tap, which must be registered before use. The program is
    /// removed with the tap.
    ///
    /// The kernel waits for those who read the qdisc, while nobody else can change the network's configuration; it need
    /// not if the tap was prepared long enough before.
    pub fn attach_tap(&self, tap_ifindex: u32) -> Result<(), AttachError> {
        Hook::attach_to_prepared(self.transmit_filter.as_fd(), tap_ifindex)?;
        Ok(())
    }

    /// Returns the number by which the kernel knows the channel's ring, if it has one.
    pub(crate) fn ring_id(&self, channel: ChannelId) -> Option<u32> {
        self.rings.read(&channel.0).map(i32::cast_unsigned)
    }

    /// Returns how many channels there can be, and rings of sessions.
    pub(crate) fn channels(&self) -> u32 {
        self.channels
    }

    /// Whether the channel's number is still being freed, so that its reuse must wait.
    pub fn is_leaving(&self, channel: ChannelId) -> bool {
        self.removals.has(channel)
    }

    pub(crate) fn install(&self, channels: &[(ChannelId, &Maps)]) -> Result<(), ChannelError> {
        for &(channel, _) in channels {
            if channel.0 >= self.channels {
                return Err(ChannelError::OutOfRange(channel));
            }
            self.await_removal(channel);
        }
        let (done, results) = mpsc::channel();
        let mut unseen = Vec::new();
        for &(channel, maps) in channels {
            for (table, map) in [(&self.rings, &maps.ring), (&self.doorbells, &maps.doorbell)] {
                let before = table.read(&channel.0);
                unseen.push((table, channel, before));
                let (table, done) = (Arc::clone(table), done.clone());
                let map = map.as_fd().try_clone_to_owned()?;
                self.writers.begin(move || {
                    // The receiver is gone if the entry was already seen in the table.
                    let _ = done.send(table.set_map(channel.0, &map));
                });
            }
        }
        // The kernel waits after a write for users of the former entry; here there is none.
        self.writers.work_off();
        let mut waiting = unseen.len();
        while waiting > 0 && !unseen.is_empty() {
            if let Ok(written) = results.recv_timeout(LOOK_AGAIN) {
                written?;
                waiting -= 1;
            }
            unseen.retain(|(table, channel, before)| table.read(&channel.0) == *before);
        }
        Ok(())
    }

    /// Removes a channel's maps from the tables, in a thread.
    pub(crate) fn remove(&self, channel: ChannelId) {
        self.removals.begin(channel);
    }

    /// Waits until nothing of a removed channel is left in the tables.
    pub(crate) fn await_removal(&self, channel: ChannelId) {
        self.removals.wait(channel);
    }
}
