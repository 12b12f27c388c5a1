//! Protocol extensions in the kernel: their maps, their programs, and the managers' tables. The caller
//! decides what is admitted, and for which packets.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};
use portolan_proto::extension::layout::{
    Chain, ExtensionControl, ExtensionStatistics, GuardKey, MANAGER_APPLY, MANAGER_APPLY_SENT,
    MANAGER_RECEIVE, MANAGER_SEND, MANAGER_SYN,
};
use portolan_proto::extension::{MapDefinition, MapKind};
use zerocopy::{FromBytes, IntoBytes};

use crate::error::{LoadError, TableError};
use crate::load::{self, Loaded, Refused};
use crate::objects::Objects;
use crate::predecessor::{map_of, name_of};
use crate::table::Table;

/// The kernel's name of all maps of extensions.
const MAP_NAME: &str = "portolan_ext";

/// The managers' tables.
pub struct Extensions {
    programs: Table<u32, i32>,
    guards: Table<GuardKey, Chain>,
    controls: Table<u32, ExtensionControl>,
    statistics: MapHandle,
    linkage: Arc<Linkage>,
    /// The kernel clears the slots when the last reference to this table is closed.
    _managers: Table<u32, i32>,
}

/// What is needed to link a program with the managers; may be used from any thread.
pub struct Linkage {
    work: MapHandle,
    views: MapHandle,
    sendings: MapHandle,
    managers: MapHandle,
}

impl Extensions {
    pub(crate) fn of(objects: &Objects) -> Result<Extensions, LoadError> {
        let managers = Table::of(objects, "managers")?;
        for (index, name) in [
            (MANAGER_RECEIVE, "extension_receive"),
            (MANAGER_APPLY, "extension_apply"),
            (MANAGER_SEND, "extension_send"),
            (MANAGER_APPLY_SENT, "extension_apply_sent"),
            (MANAGER_SYN, "answer_syn"),
        ] {
            let program = objects.program(name)?;
            managers
                .set(&index, &program.as_raw_fd())
                .map_err(|_| LoadError::Incomplete { name })?;
        }
        Ok(Extensions {
            programs: Table::of(objects, "extensions")?,
            guards: Table::of(objects, "guards")?,
            controls: Table::of(objects, "extension_controls")?,
            statistics: objects.map("extension_statistics")?,
            linkage: Arc::new(Linkage {
                work: objects.map("extension_work")?,
                views: objects.map("extension_views")?,
                sendings: objects.map("extension_sendings")?,
                managers: objects.map("managers")?,
            }),
            _managers: managers,
        })
    }

    /// Links and loads programs, in this or another thread.
    pub fn linkage(&self) -> Arc<Linkage> {
        Arc::clone(&self.linkage)
    }

    /// Enters a program into the table used by chains; it may run for `limit` nanoseconds.
    pub fn enter(&self, number: u16, program: &OwnedFd, limit: u64) -> Result<(), TableError> {
        let index = u32::from(number);
        self.clear_statistics(index);
        let control = ExtensionControl {
            limit,
            ..ExtensionControl::default()
        };
        self.controls.set(&index, &control)?;
        self.programs.set(&index, &program.as_raw_fd())
    }

    pub fn remove(&self, number: u16) -> Result<(), TableError> {
        self.programs.remove(&number.into())
    }

    /// Sets the chain of handlers for an endpoint's packets.
    pub fn guard(&self, key: &GuardKey, chain: &Chain) -> Result<(), TableError> {
        self.guards.set(key, chain)
    }

    pub fn unguard(&self, key: &GuardKey) -> Result<(), TableError> {
        self.guards.remove(key)
    }

    /// Whether the program was stopped because it overran its limit too often.
    pub fn is_stopped(&self, number: u16) -> bool {
        let control = self.controls.read(&number.into());
        control.is_some_and(|control| control.is_stopped != 0)
    }

    /// The sum over all CPUs.
    pub fn statistics(&self, number: u16) -> ExtensionStatistics {
        let key = u32::from(number).to_ne_bytes();
        let Ok(Some(values)) = self.statistics.lookup_percpu(&key, MapFlags::ANY) else {
            return ExtensionStatistics::default();
        };
        let mut all = ExtensionStatistics::default();
        for value in values {
            if let Ok(one) = ExtensionStatistics::read_from_bytes(&value) {
                all.add(&one);
            }
        }
        all
    }

    fn clear_statistics(&self, index: u32) {
        let zero = ExtensionStatistics::default().as_bytes().to_vec();
        let key = index.to_ne_bytes();
        let processors = libbpf_rs::num_possible_cpus().unwrap_or(1);
        // The entries of an array always exist.
        let _ = self
            .statistics
            .update_percpu(&key, &vec![zero; processors], MapFlags::ANY);
    }
}

impl Linkage {
    pub fn work(&self) -> i32 {
        self.work.as_fd().as_raw_fd()
    }

    pub fn views(&self) -> i32 {
        self.views.as_fd().as_raw_fd()
    }

    /// The views of sent packets.
    pub fn sendings(&self) -> i32 {
        self.sendings.as_fd().as_raw_fd()
    }

    pub fn managers(&self) -> i32 {
        self.managers.as_fd().as_raw_fd()
    }

    /// Creates a map of an extension; the kernel may refuse.
    pub fn create_map(&self, map: &MapDefinition) -> libbpf_rs::Result<OwnedFd> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: flags_of(map),
            ..Default::default()
        };
        let handle = MapHandle::create(
            kind_of(map.kind),
            Some(MAP_NAME),
            map.key,
            map.value,
            map.entries,
            &options,
        )?;
        if !map.contents.is_empty() {
            let mut value = map.contents.clone();
            value.resize(map.value as usize, 0);
            handle.update(&[0; 4], &value, MapFlags::ANY)?;
        }
        if map.is_constant {
            handle.freeze()?;
        }
        Ok(handle.as_fd().try_clone_to_owned()?)
    }

    /// Whether a descriptor is that of a map that [`Linkage::create_map`] makes of this definition: a process shows it, and
    /// may have other maps.
    pub fn is_map(&self, map: &MapDefinition, descriptor: BorrowedFd<'_>) -> bool {
        let Some(info) = map_of(descriptor) else {
            return false;
        };
        let kind = kind_of(map.kind) as u32;
        let shape = (info.type_, info.key_size, info.value_size, info.max_entries);
        shape == (kind, map.key, map.value, map.entries)
            && info.map_flags == flags_of(map)
            && is_extension_map(descriptor)
    }

    /// Loads a linked program, which the kernel verifies.
    pub fn load(&self, instructions: &[u64]) -> Result<Loaded, Refused> {
        load::load(c"extension", instructions)
    }
}

/// Whether a descriptor is that of a map that was made for an extension.
pub fn is_extension_map(descriptor: BorrowedFd<'_>) -> bool {
    map_of(descriptor).is_some_and(|info| name_of(&info).as_deref() == Some(MAP_NAME))
}

fn kind_of(kind: MapKind) -> MapType {
    match kind {
        MapKind::Hash => MapType::Hash,
        MapKind::Array => MapType::Array,
        MapKind::PerCpuArray => MapType::PercpuArray,
        MapKind::LruHash => MapType::LruHash,
        MapKind::Ring => MapType::RingBuf,
    }
}

fn flags_of(map: &MapDefinition) -> u32 {
    match (map.kind, map.is_constant) {
        (MapKind::Array, true) => libbpf_sys::BPF_F_RDONLY_PROG,
        (MapKind::Array, false) => libbpf_sys::BPF_F_MMAPABLE,
        _ => 0,
    }
}
