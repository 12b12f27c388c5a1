//! The tables by which the packet filter answers floods of SYNs.

use std::collections::HashMap;

use portolan_proto::filter::{
    BindingKey, FilterKey, Flood, FloodSeen, PathKey, RETURN_PATHS, ReturnPath,
};
use portolan_types::{FlowKey, Instant};

use crate::error::{LoadError, TableError};
use crate::objects::Objects;
use crate::table::Table;

/// The parameters of answers, the exempted flows, and the paths.
pub struct Floods {
    floods: Table<BindingKey, Flood>,
    count: Table<u32, u32>,
    spared: Table<FilterKey, u8>,
    cookies_until: Table<u32, u64>,
    paths: Table<PathKey, ReturnPath>,
    /// The contents of `paths`.
    known_paths: HashMap<PathKey, ReturnPath>,
    /// The contents of `floods`.
    known: HashMap<BindingKey, Flood>,
}

impl Floods {
    pub(crate) fn of(objects: &Objects) -> Result<Floods, LoadError> {
        Ok(Floods {
            floods: Table::of(objects, "floods")?,
            count: Table::of(objects, "flood_count")?,
            spared: Table::of(objects, "spared_flows")?,
            cookies_until: Table::of(objects, "cookies_until")?,
            paths: Table::of(objects, "return_paths")?,
            known_paths: HashMap::new(),
            known: HashMap::new(),
        })
    }

    /// Makes the filter answer the SYNs to a listener, or changes the parameters. Keeps the counters, except
    /// for concurrent updates.
    pub fn set(&mut self, binding: &BindingKey, flood: &Flood) -> Result<(), TableError> {
        if self.known.get(binding) == Some(flood) {
            return Ok(());
        }
        let FloodSeen { answered, dropped } = self.seen(binding);
        let next = Flood {
            answered,
            dropped,
            ..*flood
        };
        self.floods.set(binding, &next)?;
        self.known.insert(*binding, *flood);
        self.note_count()
    }

    /// Ends the answering: SYNs go to the listener's owner again.
    pub fn end(&mut self, binding: &BindingKey) -> Result<(), TableError> {
        if self.known.remove(binding).is_some() {
            self.floods.remove(binding)?;
            self.note_count()?;
        }
        Ok(())
    }

    fn note_count(&self) -> Result<(), TableError> {
        // Bounded by the size of the table.
        self.count.set(&0, &(self.known.len() as u32))
    }

    /// Lets all segments to listeners through until then: acknowledgements of cookies may be among them.
    pub fn expect_cookies(&self, until: Instant) -> Result<(), TableError> {
        self.cookies_until.set(&0, &until.as_nanos())
    }

    /// SYNs of a listener that the filter has dealt with since it is flooded.
    pub fn seen(&self, binding: &BindingKey) -> FloodSeen {
        let flood = self.floods.read(binding);
        flood.map_or_else(FloodSeen::default, |flood| FloodSeen {
            answered: flood.answered,
            dropped: flood.dropped,
        })
    }

    /// Exempts the SYNs of a flow, which go to its owner, who knows the flow.
    pub fn spare(&self, flow: &FlowKey) -> Result<(), TableError> {
        self.spared.set(&FilterKey::new(flow), &1)
    }

    pub fn spare_no_more(&self, flow: &FlowKey) -> Result<(), TableError> {
        self.spared.remove(&FilterKey::new(flow))
    }

    /// Sets the return paths to peers, replacing the former ones; none if there are too many.
    pub fn set_paths(&mut self, paths: HashMap<PathKey, ReturnPath>) -> Result<(), TableError> {
        let wanted = if paths.len() > RETURN_PATHS {
            HashMap::new()
        } else {
            paths
        };
        for key in self.known_paths.keys() {
            if !wanted.contains_key(key) {
                self.paths.remove(key)?;
            }
        }
        for (key, path) in &wanted {
            if self.known_paths.get(key) != Some(path) {
                self.paths.set(key, path)?;
            }
        }
        self.known_paths = wanted;
        Ok(())
    }
}
