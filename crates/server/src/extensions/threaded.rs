//! Handlers that run in threads of their owners: only their endpoint is admitted, and the filter calls nothing. They
//! are recorded for listing.

mod serve;

use std::collections::BTreeMap;

use portolan_proto::extension::layout::{EXTENSIONS, GuardKey};
use portolan_proto::extension::{Cost, Event, ExtensionReport, ExtensionState, Guard, Placement};
use portolan_proto::report::{THREADED_ROWS, ThreadedRow};
use portolan_types::ChannelId;

/// Limit per process.
const PER_PROCESS: usize = THREADED_ROWS;

/// One threaded handler.
pub(super) struct Threaded {
    owner: ChannelId,
    pub(super) uid: u32,
    pid: u32,
    name: String,
    event: Event,
    guard: Guard,
    key: GuardKey,
    priority: u8,
    /// The row in which its owner publishes its statistics.
    row: u8,
}

/// All threaded handlers, by numbers that no handler in the filter has.
#[derive(Default)]
pub(super) struct ThreadedHandlers(BTreeMap<u16, Threaded>);

impl ThreadedHandlers {
    pub(super) fn end_of(&mut self, owner: ChannelId) {
        self.0.retain(|_, one| one.owner != owner);
    }

    pub(super) fn end_at(&mut self, guard: Guard) {
        self.0.retain(|_, one| one.guard != guard);
    }

    /// Returns true if it belonged to the owner.
    pub(super) fn remove(&mut self, owner: ChannelId, number: u16) -> bool {
        let is_own = self.0.get(&number).is_some_and(|one| one.owner == owner);
        if is_own {
            self.0.remove(&number);
        }
        is_own
    }

    /// Returns a row unused by the owner's handlers; none at the owner's limit.
    fn free_row(&self, owner: ChannelId) -> Option<u8> {
        let is_free = |row: &u8| {
            let mut its = self.0.values().filter(|one| one.owner == owner);
            its.all(|one| one.row != *row)
        };
        (0..PER_PROCESS as u8).find(is_free)
    }

    fn enter(&mut self, one: Threaded) -> Option<u16> {
        let number = (EXTENSIONS..=u16::MAX).find(|number| !self.0.contains_key(number))?;
        self.0.insert(number, one);
        Some(number)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (u16, &Threaded)> {
        self.0.iter().map(|(number, one)| (*number, one))
    }
}

impl Threaded {
    /// `said` is the row that its owner has published.
    fn report(&self, number: u16, said: Option<ThreadedRow>) -> ExtensionReport {
        // A row written before this handler belongs to another one.
        let said = said.filter(|row| row.number == u64::from(number));
        ExtensionReport {
            number,
            name: self.name.clone(),
            pid: self.pid,
            uid: self.uid,
            event: self.event,
            ports: vec![self.key.number()],
            priority: self.priority,
            placement: Placement::Thread,
            standing: ExtensionState::Running,
            cost: Cost::default(),
            limit: 0,
            statistics: said.map_or_else(Default::default, |row| row.statistics),
        }
    }
}
