//! The compiled objects, loaded so that they share one set of maps.

use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::{ErrorKind, MapCore, MapHandle, Object, ObjectBuilder, OpenObject};

use portolan_proto::filter::{FilterSettings, HANDLES, MEMBERS_MAX, SHARE_BUCKETS};
use zerocopy::IntoBytes;

use crate::error::LoadError;
use crate::filter::Limits;
use crate::predecessor::{Predecessor, SHARED, bind_map};

/// ELF sections are read in place, so the bytes must be aligned.
#[repr(C, align(8))]
pub(crate) struct Aligned<T: ?Sized>(pub(crate) T);

static PACKET_FILTER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/packet_filter.bpf.o"
)));
static DRIVER_FILTER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/driver_filter.bpf.o"
)));
static TRANSMIT_FILTER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/transmit_filter.bpf.o"
)));
static EXTENSION_MANAGER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/extension_manager.bpf.o"
)));

static SENDING_MANAGER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/sending_manager.bpf.o"
)));

static SYN_ANSWER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/syn_answer.bpf.o"
)));

/// What messages call the packet filter for drivers.
pub(crate) const IN_DRIVERS: &str = "packet filter for drivers";

/// The map that holds the constants of `bpf/settings.h`.
const SETTINGS: &str = ".rodata.settings";

/// Number of entries of a map whose size the loader sets.
pub(crate) fn entries(map: &str, limits: &Limits, settings: &FilterSettings) -> Option<u32> {
    match map {
        // One spare, so that a flow can move in a full table.
        "linear_rows" if settings.algorithm == FilterSettings::LINEAR => Some(limits.flows + 1),
        "handles" if settings.marker != 0 => Some(HANDLES),
        "flows" => Some(limits.flows),
        // Each socket that shares a binding has a row of its own in it.
        "bindings" | "senders" => Some(limits.bindings),
        // And in its list, beside those of groups.
        "members" => Some(limits.bindings + limits.groups.saturating_mul(MEMBERS_MAX as u32)),
        "shares" => Some(limits.shared.saturating_mul(SHARE_BUCKETS)),
        "channels" | "losses" | "rings" | "doorbells" | "attentions" | "unanswered_since" => {
            Some(limits.channels)
        }
        // Some channels have several taps.
        "taps" => Some(2 * limits.channels),
        _ => None,
    }
}

pub(crate) struct Objects {
    packet_filter: Object,
    transmit_filter: Object,
    extension_manager: Object,
    sending_manager: Object,
    syn_answer: Object,
}

impl Objects {
    /// Shares tables with the programs of a dead server, if there is one.
    pub(crate) fn load(
        limits: &Limits,
        settings: &FilterSettings,
        predecessor: Option<&Predecessor>,
    ) -> Result<Objects, LoadError> {
        let packet_filter =
            load_packet_filter(limits, settings, predecessor).map_err(refused("packet filter"))?;
        let transmit_filter =
            load_beside(&packet_filter, TRANSMIT_FILTER).map_err(refused("transmit filter"))?;
        let extension_manager = load_beside(&packet_filter, EXTENSION_MANAGER)
            .map_err(refused("managers of extensions"))?;
        let sending_manager = load_beside(&packet_filter, SENDING_MANAGER)
            .map_err(refused("managers of what is sent"))?;
        let syn_answer =
            load_beside(&packet_filter, SYN_ANSWER).map_err(refused("answers to SYNs"))?;
        Ok(Objects {
            packet_filter,
            transmit_filter,
            extension_manager,
            sending_manager,
            syn_answer,
        })
    }

    pub(crate) fn map(&self, name: &'static str) -> Result<MapHandle, LoadError> {
        self.packet_filter
            .maps()
            .find(|map| map.name() == name)
            .and_then(|map| MapHandle::try_from(&map).ok())
            .ok_or(LoadError::Incomplete { name })
    }

    /// The packet filter, and its maps that outlive a server.
    pub(crate) fn heritage(&self) -> Result<Vec<OwnedFd>, LoadError> {
        let mut heritage = vec![self.program("packet_filter")?];
        for name in SHARED.into_iter().chain([SETTINGS]) {
            let map = self.map(name)?.as_fd().try_clone_to_owned();
            heritage.push(map.map_err(|_| LoadError::Incomplete { name })?);
        }
        Ok(heritage)
    }

    /// The descriptor of a program, for attaching.
    pub(crate) fn program(&self, name: &'static str) -> Result<OwnedFd, LoadError> {
        find_program(self.programs(), name)
    }

    /// The packet filter for drivers, which the kernel has not verified yet.
    pub(crate) fn driver_filter(&self) -> Result<OpenObject, LoadError> {
        prepare_beside(&self.packet_filter, DRIVER_FILTER).map_err(refused(IN_DRIVERS))
    }

    #[cfg(test)]
    pub(crate) fn programs_mut(&mut self) -> impl Iterator<Item = libbpf_rs::ProgramMut<'_>> {
        self.packet_filter
            .progs_mut()
            .chain(self.transmit_filter.progs_mut())
            .chain(self.extension_manager.progs_mut())
            .chain(self.sending_manager.progs_mut())
            .chain(self.syn_answer.progs_mut())
    }

    fn programs(&self) -> impl Iterator<Item = libbpf_rs::Program<'_>> {
        self.packet_filter
            .progs()
            .chain(self.transmit_filter.progs())
            .chain(self.extension_manager.progs())
            .chain(self.sending_manager.progs())
            .chain(self.syn_answer.progs())
    }
}

/// The descriptor of a program, for attaching.
pub(crate) fn find_program<'a>(
    mut programs: impl Iterator<Item = libbpf_rs::Program<'a>>,
    name: &'static str,
) -> Result<OwnedFd, LoadError> {
    programs
        .find(|program| program.name() == name)
        .and_then(|program| program.as_fd().try_clone_to_owned().ok())
        .ok_or(LoadError::Incomplete { name })
}

fn load_packet_filter(
    limits: &Limits,
    settings: &FilterSettings,
    predecessor: Option<&Predecessor>,
) -> libbpf_rs::Result<Object> {
    let mut object = open(PACKET_FILTER)?;
    for mut map in object.maps_mut() {
        if map.name() == SETTINGS {
            map.set_initial_value(settings.as_bytes())?;
        }
        let name = map.name().to_string_lossy().into_owned();
        let shared = predecessor.filter(|_| SHARED.contains(&&*name));
        if let Some(map_of_dead) = shared.and_then(|predecessor| predecessor.map(&name)) {
            map.reuse_fd(map_of_dead.as_fd())?;
        } else if let Some(entries) = entries(&name, limits, settings) {
            map.set_max_entries(entries)?;
        }
    }
    let object = object.load()?;
    keep_with_program(&object, "packet_filter", "taps")?;
    keep_with_program(&object, "packet_filter", "senders")?;
    Ok(object)
}

/// Makes the map one of the program's, which does not use it, so that the next server finds it.
fn keep_with_program(object: &Object, program: &str, map: &str) -> libbpf_rs::Result<()> {
    let program = object.progs().find(|found| found.name() == program);
    let map = object.maps().find(|found| found.name() == map);
    match (program, map) {
        (Some(program), Some(map)) => bind_map(program.as_fd(), map.as_fd()),
        _ => Ok(()),
    }
}

/// Loads an object that shares the maps of the packet filter.
fn load_beside(packet_filter: &Object, object: &Aligned<[u8]>) -> libbpf_rs::Result<Object> {
    prepare_beside(packet_filter, object)?.load()
}

/// Opens an object that shares the maps of the packet filter.
fn prepare_beside(packet_filter: &Object, object: &Aligned<[u8]>) -> libbpf_rs::Result<OpenObject> {
    let mut object = open(object)?;
    for mut map in object.maps_mut() {
        if let Some(shared) = packet_filter
            .maps()
            .find(|shared| shared.name() == map.name())
        {
            map.reuse_fd(shared.as_fd())?;
        }
    }
    Ok(object)
}

pub(crate) fn open(object: &Aligned<[u8]>) -> libbpf_rs::Result<OpenObject> {
    ObjectBuilder::default().open_memory(&object.0)
}

pub(crate) fn refused(object: &'static str) -> impl Fn(libbpf_rs::Error) -> LoadError {
    move |source| match source.kind() {
        ErrorKind::PermissionDenied => LoadError::NotPermitted,
        _ => LoadError::Refused { object, source },
    }
}
