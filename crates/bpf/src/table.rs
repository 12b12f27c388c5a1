//! A hash or array map with typed keys and values.

use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{LoadError, TableError};
use crate::objects::Objects;

pub(crate) struct Table<K, V> {
    map: MapHandle,
    name: &'static str,
    types: PhantomData<fn(K, V)>,
}

impl<K: IntoBytes + Immutable, V: IntoBytes + Immutable> Table<K, V> {
    pub(crate) fn of(objects: &Objects, name: &'static str) -> Result<Table<K, V>, LoadError> {
        Ok(Table {
            map: objects.map(name)?,
            name,
            types: PhantomData,
        })
    }

    /// Adds or replaces a row; concurrent look-ups see the old one or the new one.
    pub(crate) fn set(&self, key: &K, value: &V) -> Result<(), TableError> {
        self.map
            .update(key.as_bytes(), value.as_bytes(), MapFlags::ANY)
            .map_err(|source| self.error(source))
    }

    /// Returns a row; none if it does not exist.
    pub(crate) fn read(&self, key: &K) -> Option<V>
    where
        V: FromBytes,
    {
        let bytes = self.map.lookup(key.as_bytes(), MapFlags::ANY).ok()??;
        V::read_from_bytes(&bytes).ok()
    }

    /// Returns the keys of all rows.
    pub(crate) fn keys(&self) -> Vec<K>
    where
        K: FromBytes,
    {
        let keys = self.map.keys();
        keys.filter_map(|key| K::read_from_bytes(&key).ok())
            .collect()
    }

    /// Removes a row, if it exists.
    pub(crate) fn remove(&self, key: &K) -> Result<(), TableError> {
        match self.map.delete(key.as_bytes()) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.error(error)),
            _ => Ok(()),
        }
    }

    fn error(&self, source: libbpf_rs::Error) -> TableError {
        match source.kind() {
            ErrorKind::TooBig => TableError::Full { table: self.name },
            _ => TableError::Refused {
                table: self.name,
                source,
            },
        }
    }
}

impl Table<u32, i32> {
    /// Puts a map into an array of maps, which takes its descriptor as the value.
    pub(crate) fn set_map(&self, key: u32, map: &OwnedFd) -> Result<(), TableError> {
        self.set(&key, &map.as_raw_fd())
    }
}
