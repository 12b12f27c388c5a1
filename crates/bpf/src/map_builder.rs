//! Making and removing the maps of channels. Each write to a table of maps has the kernel wait until
//! no program uses what was there before, tens of milliseconds: so several are made at a time, and by
//! whatever thread has the time.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use portolan_types::ChannelId;

use crate::channel::{ChannelMaps, Maps};
use crate::error::{AttachError, ChannelError, LoadError, TableError};
use crate::filter::Limits;
use crate::hook::Hook;
use crate::objects::Objects;
use crate::table::Table;

pub struct MapBuilder {
    rings: Arc<Table<u32, i32>>,
    doorbells: Arc<Table<u32, i32>>,
    transmit_filter: OwnedFd,
    channels: u32,
    /// Channels whose maps are on their way out of the tables.
    leaving: Mutex<HashMap<ChannelId, JoinHandle<()>>>,
}

impl MapBuilder {
    pub(crate) fn of(objects: &Objects, limits: &Limits) -> Result<MapBuilder, LoadError> {
        Ok(MapBuilder {
            rings: Arc::new(Table::of(objects, "rings")?),
            doorbells: Arc::new(Table::of(objects, "doorbells")?),
            transmit_filter: objects.program("transmit_filter")?,
            channels: limits.channels,
            leaving: Mutex::default(),
        })
    }

    /// Gives each of several channels a ring of at least `ring_size` bytes and a doorbell.
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

    /// Puts the transmit filter at the ingress of a tap, which is to be registered before it is
    /// used. The program leaves with the tap.
    pub fn attach_tap(&self, tap_ifindex: u32) -> Result<(), AttachError> {
        Hook::attach(self.transmit_filter.as_fd(), tap_ifindex)?;
        Ok(())
    }

    /// Is the channel's number used again only after a wait?
    pub fn is_leaving(&self, channel: ChannelId) -> bool {
        let leaving = self.leaving();
        leaving
            .get(&channel)
            .is_some_and(|thread| !thread.is_finished())
    }

    pub(crate) fn install(&self, channels: &[(ChannelId, &Maps)]) -> Result<(), ChannelError> {
        for &(channel, _) in channels {
            if channel.0 >= self.channels {
                return Err(ChannelError::OutOfRange(channel));
            }
            self.await_removal(channel);
        }
        // They wait together.
        let writes = thread::scope(|scope| -> Vec<Result<(), TableError>> {
            let mut threads = Vec::new();
            for &(channel, maps) in channels {
                let write = move || self.rings.set_map(channel.0, &maps.ring);
                threads.push(scope.spawn(write));
                threads
                    .push(scope.spawn(move || self.doorbells.set_map(channel.0, &maps.doorbell)));
            }
            let ends = threads.into_iter().map(|thread| thread.join());
            ends.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
                .collect()
        });
        Ok(writes.into_iter().collect::<Result<(), TableError>>()?)
    }

    /// Takes a channel's maps out of the tables, in a thread of its own.
    pub(crate) fn remove(&self, channel: ChannelId) {
        let (rings, doorbells) = (Arc::clone(&self.rings), Arc::clone(&self.doorbells));
        let leave = move || {
            // What is not there needs no removal; nothing else can go wrong with a valid index.
            let _ = rings.remove(&channel.0);
            let _ = doorbells.remove(&channel.0);
        };
        let mut leaving = self.leaving();
        leaving.retain(|_, thread| !thread.is_finished());
        leaving.insert(channel, thread::spawn(leave));
    }

    /// Returns when nothing of a removed channel is left in the tables.
    pub(crate) fn await_removal(&self, channel: ChannelId) {
        let thread = self.leaving().remove(&channel);
        if let Some(thread) = thread {
            // The thread has nothing in it that panics.
            let _ = thread.join();
        }
    }

    fn leaving(&self) -> MutexGuard<'_, HashMap<ChannelId, JoinHandle<()>>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
