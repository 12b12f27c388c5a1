//! The tables of a dead server, found by the packet filter that it has left on a device: the kernel keeps them as long as
//! the filter is attached, and forgets them with it.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::{ErrorKind, MapHandle, Program, libbpf_sys};
use portolan_proto::filter::FilterSettings;
use zerocopy::IntoBytes;

use crate::filter::Limits;
use crate::hook;

/// Tables that the next server's filters use, too.
pub(crate) const SHARED: [&str; 10] = [
    "flows",
    "bindings",
    "shares",
    "senders",
    ".data.lasting",
    "rings",
    "doorbells",
    "channels",
    "losses",
    "taps",
];

/// The map that holds the settings; the kernel keeps 15 bytes of its name.
const SETTINGS: &str = ".rodata.setting";

/// Maximum number of maps of one program (`MAX_USED_MAPS`).
const MAPS_MAX: usize = 64;

/// The tables of a dead server.
pub struct Predecessor {
    maps: HashMap<String, OwnedFd>,
}

/// Why the tables of a dead server cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum InheritError {
    #[error("its filter can be opened with CAP_SYS_ADMIN, or must be kept by the service manager")]
    NotPermitted,
    #[error("cannot open its filter: {0}")]
    Open(io::Error),
    #[error("its tables have another format than those of this version")]
    Format,
    #[error("its filter has other settings")]
    Settings,
    #[error("its tables have other sizes")]
    Sizes,
}

impl From<libbpf_rs::Error> for InheritError {
    fn from(error: libbpf_rs::Error) -> InheritError {
        match error.kind() {
            ErrorKind::PermissionDenied => InheritError::NotPermitted,
            _ => InheritError::Open(io::Error::other(error)),
        }
    }
}

impl Predecessor {
    /// Looks for the filter of a dead server on these devices; `None` if there is none. `kept` are descriptors of programs
    /// and maps, perhaps those of that server.
    pub fn find(
        devices: impl IntoIterator<Item = u32>,
        kept: &[OwnedFd],
        (limits, settings): (&Limits, &FilterSettings),
    ) -> Result<Option<Predecessor>, InheritError> {
        for device in devices {
            let program = hook::attached_program(device).map_err(InheritError::Open)?;
            if let Some(program) = program {
                let predecessor = Predecessor::of(program, kept)?;
                predecessor.check(limits, settings)?;
                return Ok(Some(predecessor));
            }
        }
        Ok(None)
    }

    fn of(program: u32, kept: &[OwnedFd]) -> Result<Predecessor, InheritError> {
        let of_program = kept.iter().find(|fd| has_program(fd.as_fd(), program));
        let program = match of_program {
            Some(fd) => fd.try_clone().map_err(InheritError::Open)?,
            None => Program::fd_from_id(program)?,
        };
        let mut maps = HashMap::new();
        for id in map_ids(program.as_fd()).map_err(InheritError::Open)? {
            let is_it = |fd: &&OwnedFd| map_of(fd.as_fd()).is_some_and(|map| map.id == id);
            let map = match kept.iter().find(is_it) {
                Some(fd) => fd.try_clone().map_err(InheritError::Open)?,
                // Those that were kept are enough.
                None if of_program.is_some() => continue,
                None => {
                    let map = MapHandle::from_map_id(id)?;
                    map.as_fd()
                        .try_clone_to_owned()
                        .map_err(InheritError::Open)?
                }
            };
            if let Some(name) = map_of(map.as_fd()).as_ref().and_then(name_of) {
                maps.insert(name, map);
            }
        }
        Ok(Predecessor { maps })
    }

    fn check(&self, limits: &Limits, settings: &FilterSettings) -> Result<(), InheritError> {
        let theirs = self.settings().ok_or(InheritError::Format)?;
        if theirs.format != settings.format || SHARED.iter().any(|name| self.map(name).is_none()) {
            return Err(InheritError::Format);
        }
        // The other forms of search have tables and indices of their own.
        let is_plain = theirs.algorithm == FilterSettings::HASH && theirs.marker == 0;
        if theirs != *settings || !is_plain {
            return Err(InheritError::Settings);
        }
        let sizes = SHARED.iter().all(|name| {
            let entries = crate::objects::entries(name, limits, settings);
            let found = self.map(name).and_then(|map| map_of(map.as_fd()));
            entries.is_none_or(|entries| found.is_some_and(|map| map.max_entries == entries))
        });
        if sizes {
            Ok(())
        } else {
            Err(InheritError::Sizes)
        }
    }

    fn settings(&self) -> Option<FilterSettings> {
        let map = self.map(SETTINGS)?;
        let info = map_of(map.as_fd())?;
        let mut settings = FilterSettings::default();
        if info.value_size as usize != size_of_val(&settings) {
            return None;
        }
        let key = 0u32;
        // SAFETY: the kernel reads a key of four bytes, as arrays have, and writes a value of the size just checked.
        let answer = unsafe {
            libbpf_sys::bpf_map_lookup_elem(
                map.as_raw_fd(),
                (&raw const key).cast(),
                settings.as_mut_bytes().as_mut_ptr().cast(),
            )
        };
        (answer == 0).then_some(settings)
    }

    pub(crate) fn map(&self, name: &str) -> Option<&OwnedFd> {
        self.maps.get(name)
    }
}

/// Returns the number by which the kernel knows the ring that the descriptor refers to. None if it is no ring's.
pub fn map_id(descriptor: BorrowedFd<'_>) -> Option<u32> {
    let info = map_of(descriptor)?;
    // What the kernel says of a program begins likewise, but has a tag here.
    let is_ring = info.type_ == libbpf_sys::BPF_MAP_TYPE_RINGBUF
        && (info.key_size, info.value_size) == (0, 0);
    is_ring.then_some(info.id)
}

/// Makes a map one of those that the kernel keeps with a program.
pub(crate) fn bind_map(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> libbpf_rs::Result<()> {
    // SAFETY: no options are given, and both descriptors are open.
    let answer = unsafe {
        libbpf_sys::bpf_prog_bind_map(program.as_raw_fd(), map.as_raw_fd(), std::ptr::null())
    };
    match answer {
        0 => Ok(()),
        failed => Err(libbpf_rs::Error::from_raw_os_error(-failed)),
    }
}

fn has_program(descriptor: BorrowedFd<'_>, id: u32) -> bool {
    let mut info = libbpf_sys::bpf_prog_info::default();
    is_about(descriptor, &mut info)
        && (info.type_, info.id) == (libbpf_sys::BPF_PROG_TYPE_SCHED_CLS, id)
        && info.tag != [0; 8]
}

pub(crate) fn map_of(descriptor: BorrowedFd<'_>) -> Option<libbpf_sys::bpf_map_info> {
    let mut info = libbpf_sys::bpf_map_info::default();
    is_about(descriptor, &mut info).then_some(info)
}

pub(crate) fn name_of(map: &libbpf_sys::bpf_map_info) -> Option<String> {
    let name = map.name.map(|letter| letter.to_ne_bytes()[0]);
    let name = CStr::from_bytes_until_nul(&name).ok()?;
    Some(name.to_str().ok()?.to_owned())
}

/// What the kernel says of an object: numbers, which request no arrays while they are zero.
trait Info {}

impl Info for libbpf_sys::bpf_map_info {}
impl Info for libbpf_sys::bpf_prog_info {}

fn is_about<T: Info>(descriptor: BorrowedFd<'_>, info: &mut T) -> bool {
    let mut length = size_of::<T>() as u32;
    // SAFETY: the kernel writes at most `length` bytes into `info`, which is zero and so requests no arrays.
    let answer = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(
            descriptor.as_raw_fd(),
            (&raw mut *info).cast(),
            &raw mut length,
        )
    };
    answer == 0
}

fn map_ids(program: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut ids = vec![0u32; MAPS_MAX];
    let mut info = libbpf_sys::bpf_prog_info {
        nr_map_ids: MAPS_MAX as u32,
        map_ids: ids.as_mut_ptr() as u64,
        ..Default::default()
    };
    let mut length = size_of_val(&info) as u32;
    // SAFETY: the kernel writes at most `length` bytes into `info`, and at most `nr_map_ids` numbers into `ids`.
    let answer = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(
            program.as_raw_fd(),
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        return Err(io::Error::from_raw_os_error(-answer));
    }
    ids.truncate(info.nr_map_ids as usize);
    Ok(ids)
}
