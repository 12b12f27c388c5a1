//! Which extensions are installed, who owns them, and in which order an endpoint's extensions are called.

use std::collections::{BTreeMap, HashMap};

use portolan_proto::extension::layout::{CHAIN_MAX, Chain, EXTENSIONS, GuardKey};
use portolan_types::ChannelId;

/// One installed extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableEntry {
    pub owner: ChannelId,
    pub uid: u32,
    /// Without duplicates.
    pub keys: Vec<GuardKey>,
    pub priority: u8,
}

/// Why another extension is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error("{CHAIN_MAX} handlers are on this event of the endpoint, the most there can be")]
    Chain,
    #[error("the process has {0} extensions, the most it may have")]
    Process(usize),
    #[error("the user has {0} extensions, the most it may have")]
    User(usize),
    #[error("all {} extensions are taken", EXTENSIONS - 1)]
    All,
}

/// All installed extensions by number.
#[derive(Debug, Default)]
pub struct Table {
    entries: BTreeMap<u16, TableEntry>,
    /// The extensions of each chain, in the order of their calls.
    chains: HashMap<GuardKey, Vec<u16>>,
    last: u16,
}

impl Table {
    pub const PER_PROCESS: usize = 16;
    pub const PER_USER: usize = 64;

    /// Checks whether `owner` may have one more.
    pub fn has_room(&self, owner: ChannelId, uid: u32) -> Result<(), Full> {
        let of = |wanted: &dyn Fn(&TableEntry) -> bool| {
            self.entries.values().filter(|entry| wanted(entry)).count()
        };
        if of(&|entry| entry.owner == owner) >= Table::PER_PROCESS {
            return Err(Full::Process(Table::PER_PROCESS));
        }
        if uid != 0 && of(&|entry| entry.uid == uid) >= Table::PER_USER {
            return Err(Full::User(Table::PER_USER));
        }
        Ok(())
    }

    /// Enters an extension. A number is reused as late as possible: a packet may still be on its
    /// way to the previous extension with it.
    pub fn enter(&mut self, entry: TableEntry) -> Result<u16, Full> {
        self.has_room(entry.owner, entry.uid)?;
        let is_full = |key| {
            self.chains
                .get(key)
                .is_some_and(|chain| chain.len() >= CHAIN_MAX)
        };
        if entry.keys.iter().any(is_full) {
            return Err(Full::Chain);
        }
        let after_last = (1..EXTENSIONS).map(|step| 1 + (self.last - 1 + step) % (EXTENSIONS - 1));
        let number = match self.last {
            0 => Some(1),
            _ => after_last
                .into_iter()
                .find(|number| !self.entries.contains_key(number)),
        };
        let number = number.ok_or(Full::All)?;
        self.last = number;
        for key in &entry.keys {
            self.join(*key, number, entry.priority);
        }
        self.entries.insert(number, entry);
        Ok(number)
    }

    fn join(&mut self, key: GuardKey, number: u16, priority: u8) {
        let priority_of = |number: &u16| self.entries.get(number).map(|entry| entry.priority);
        let chain = self.chains.entry(key).or_default();
        let place = chain
            .iter()
            .position(|other| priority_of(other) > Some(priority))
            .unwrap_or(chain.len());
        chain.insert(place, number);
    }

    pub fn remove(&mut self, number: u16) -> Option<TableEntry> {
        self.suspend(number)?;
        self.entries.remove(&number)
    }

    /// Moves an extension that is being called to other chains. Returns its previous ones.
    pub fn relocate(&mut self, number: u16, keys: Vec<GuardKey>) -> Option<Vec<GuardKey>> {
        let is_called = |key| self.chains.get(key).is_some_and(|c| c.contains(&number));
        if !self.entries.get(&number)?.keys.iter().any(is_called) {
            return None;
        }
        let before = self.suspend(number)?;
        let priority = self.entries.get(&number)?.priority;
        for key in &keys {
            self.join(*key, number, priority);
        }
        self.entries.get_mut(&number)?.keys = keys;
        Some(before)
    }

    /// Stops calls of an extension, which keeps its number. Returns its previous chains.
    pub fn suspend(&mut self, number: u16) -> Option<Vec<GuardKey>> {
        let keys = self.entries.get(&number)?.keys.clone();
        for key in &keys {
            if let Some(chain) = self.chains.get_mut(key) {
                chain.retain(|other| *other != number);
                if chain.is_empty() {
                    self.chains.remove(key);
                }
            }
        }
        Some(keys)
    }

    /// Returns the handlers of a chain; none if it is empty.
    pub fn chain(&self, key: &GuardKey) -> Option<Chain> {
        let numbers = self.chains.get(key)?;
        let mut chain = Chain {
            // At most CHAIN_MAX.
            count: numbers.len() as u32,
            ..Chain::default()
        };
        chain.numbers[..numbers.len()].copy_from_slice(numbers);
        Some(chain)
    }

    pub fn entry(&self, number: u16) -> Option<&TableEntry> {
        self.entries.get(&number)
    }

    pub fn entries(&self) -> impl Iterator<Item = (u16, &TableEntry)> {
        self.entries.iter().map(|(&number, entry)| (number, entry))
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
