//! All flows in one array, which the packet filter compares one by one. Kept beside the hash table that the transmit
//! filter uses. A concurrent search for a flow that moves finds its old row or its new one.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use portolan_proto::filter::{FilterKey, FlowRow, LinearRow};

use crate::error::{LoadError, TableError};
use crate::objects::Objects;
use crate::table::Table;

pub(crate) struct LinearTable {
    rows: Table<u32, LinearRow>,
    length: Table<u32, u32>,
    places: HashMap<FilterKey, RowPlace>,
    /// Unused places, with the version of the place.
    free: BinaryHeap<Reverse<(u32, u32)>>,
    /// Number of places ever used.
    used: u32,
    capacity: u32,
}

#[derive(Clone, Copy)]
struct RowPlace {
    index: u32,
    version: u32,
    row: FlowRow,
}

impl LinearTable {
    pub(crate) fn of(objects: &Objects, capacity: u32) -> Result<LinearTable, LoadError> {
        Ok(LinearTable {
            rows: Table::of(objects, "linear_rows")?,
            length: Table::of(objects, "linear_length")?,
            places: HashMap::new(),
            free: BinaryHeap::new(),
            used: 0,
            capacity,
        })
    }

    /// Adds a flow, or gives it a new row before the old one is removed.
    pub(crate) fn set(&mut self, key: &FilterKey, row: FlowRow) -> Result<(), TableError> {
        let (index, version) = self.take_place()?;
        let place = RowPlace {
            index,
            // Odd: valid for searches.
            version: version.wrapping_add(1),
            row,
        };
        // First write the contents, then mark them valid.
        self.write(key, RowPlace { version, ..place })?;
        self.write(key, place)?;
        match self.places.insert(*key, place) {
            Some(old) => self.give_up(key, old),
            None => Ok(()),
        }
    }

    pub(crate) fn remove(&mut self, key: &FilterKey) -> Result<(), TableError> {
        match self.places.remove(key) {
            Some(place) => self.give_up(key, place),
            None => Ok(()),
        }
    }

    /// Takes the first free place.
    fn take_place(&mut self) -> Result<(u32, u32), TableError> {
        if let Some(Reverse(place)) = self.free.pop() {
            return Ok(place);
        }
        if self.used == self.capacity {
            return Err(TableError::Full {
                table: "linear_rows",
            });
        }
        let index = self.used;
        self.length.set(&0, &(index + 1))?;
        self.used += 1;
        Ok((index, 0))
    }

    fn give_up(&mut self, key: &FilterKey, place: RowPlace) -> Result<(), TableError> {
        let version = place.version.wrapping_add(1);
        self.write(key, RowPlace { version, ..place })?;
        self.free.push(Reverse((place.index, version)));
        Ok(())
    }

    fn write(&self, key: &FilterKey, place: RowPlace) -> Result<(), TableError> {
        let row = LinearRow {
            version: place.version,
            reserved: 0,
            key: *key,
            row: place.row,
        };
        self.rows.set(&place.index, &row)
    }
}
