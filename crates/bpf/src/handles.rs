//! Handles for active demultiplexing (MS §VI): rows that packets name themselves. A handle is valid for one flow and
//! its owner; it is revoked when the flow is steered elsewhere.

use std::collections::HashMap;

use portolan_proto::filter::{FilterKey, FlowRow, HANDLES, HandleRow};

use crate::error::{LoadError, TableError};
use crate::objects::Objects;
use crate::table::Table;

pub(crate) struct HandleTable {
    rows: Table<u32, HandleRow>,
    given: HashMap<FilterKey, Given>,
    free: Vec<u16>,
    /// The lowest index never used so far.
    unused: u32,
}

#[derive(Clone, Copy)]
struct Given {
    index: u16,
    nonce: u64,
    row: FlowRow,
}

impl HandleTable {
    pub(crate) fn of(objects: &Objects) -> Result<HandleTable, LoadError> {
        Ok(HandleTable {
            rows: Table::of(objects, "handles")?,
            given: HashMap::new(),
            free: Vec::new(),
            unused: 0,
        })
    }

    /// Creates a handle for a flow, replacing an earlier one. `None` if all are in use.
    pub(crate) fn give(
        &mut self,
        key: &FilterKey,
        row: FlowRow,
        nonce: u64,
    ) -> Result<Option<u16>, TableError> {
        self.revoke(key)?;
        let Some(index) = self.take_index() else {
            return Ok(None);
        };
        let given = Given { index, nonce, row };
        // A peer that knew the former handle of this index does not know the nonce.
        self.write(Given { nonce: 0, ..given })?;
        self.write(given)?;
        self.given.insert(*key, given);
        Ok(Some(index))
    }

    /// The flow has a new row. Revokes the handle if that has another owner.
    pub(crate) fn follow(&mut self, key: &FilterKey, row: FlowRow) -> Result<(), TableError> {
        let Some(given) = self.given.get(key).copied() else {
            return Ok(());
        };
        let owner = |row: FlowRow| (row.channel, row.slot, row.generation);
        if owner(given.row) != owner(row) {
            return self.revoke(key);
        }
        let changed = Given { row, ..given };
        self.write(Given { nonce: 0, ..given })?;
        self.write(Given {
            nonce: 0,
            ..changed
        })?;
        self.write(changed)?;
        self.given.insert(*key, changed);
        Ok(())
    }

    pub(crate) fn revoke(&mut self, key: &FilterKey) -> Result<(), TableError> {
        let Some(given) = self.given.remove(key) else {
            return Ok(());
        };
        self.write(Given { nonce: 0, ..given })?;
        self.free.push(given.index);
        Ok(())
    }

    fn take_index(&mut self) -> Option<u16> {
        if let Some(index) = self.free.pop() {
            return Some(index);
        }
        let index = u16::try_from(self.unused).ok()?;
        self.unused += 1;
        Some(index)
    }

    fn write(&self, given: Given) -> Result<(), TableError> {
        let row = HandleRow {
            nonce: given.nonce,
            row: given.row,
        };
        self.rows.set(&given.index.into(), &row)
    }
}

const _: () = assert!(HANDLES == u16::MAX as u32 + 1);
