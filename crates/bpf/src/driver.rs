//! The packet filter in a device's driver (XDP), before the one at tc: a link that ends with its descriptor, so that
//! nothing remains of a dead server. It never displaces another program.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::{OpenObject, libbpf_sys};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, netdevice, socket};

use crate::error::LoadError;
use crate::objects::{IN_DRIVERS, Objects, find_program, refused};

/// Hooks at which a device can run the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverHook {
    /// In the driver, before the kernel makes a buffer.
    Native,
    /// In the kernel, after it has made a buffer.
    Generic,
}

impl DriverHook {
    pub const fn name(self) -> &'static str {
        match self {
            DriverHook::Native => "native",
            DriverHook::Generic => "generic",
        }
    }

    const fn flag(self) -> u32 {
        match self {
            DriverHook::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            DriverHook::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
        }
    }
}

/// Why a device has no filter in its driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("the kernel has refused the program before")]
    NotLoaded,
    #[error("another XDP program is attached, which stays")]
    InUse,
    #[error("VLAN devices are on it, whose tags an XDP program does not see")]
    Vlan,
    #[error("its driver has no native XDP")]
    NotNative,
    #[error("the kernel refuses the program as {hook}: {source}")]
    Refused {
        hook: &'static str,
        source: io::Error,
    },
}

/// The packet filter for each hook. Verifying both takes the kernel a sixth of the time for all programs, and most servers
/// need neither.
pub(crate) enum DriverPrograms {
    Prepared(Box<OpenObject>),
    Loaded { native: OwnedFd, generic: OwnedFd },
    Refused,
}

impl DriverPrograms {
    pub(crate) fn of(objects: &Objects) -> Result<DriverPrograms, LoadError> {
        Ok(DriverPrograms::Prepared(Box::new(objects.driver_filter()?)))
    }

    /// Loads both programs with the first call.
    pub(crate) fn of_hook(&mut self, hook: DriverHook) -> Result<BorrowedFd<'_>, DriverError> {
        *self = match std::mem::replace(self, DriverPrograms::Refused) {
            DriverPrograms::Prepared(object) => DriverPrograms::load(*object)?,
            loaded_or_refused => loaded_or_refused,
        };
        match (&*self, hook) {
            (DriverPrograms::Loaded { native, .. }, DriverHook::Native) => Ok(native.as_fd()),
            (DriverPrograms::Loaded { generic, .. }, DriverHook::Generic) => Ok(generic.as_fd()),
            _ => Err(DriverError::NotLoaded),
        }
    }

    fn load(object: OpenObject) -> Result<DriverPrograms, LoadError> {
        let object = object.load().map_err(refused(IN_DRIVERS))?;
        Ok(DriverPrograms::Loaded {
            native: find_program(object.progs(), "driver_filter")?,
            generic: find_program(object.progs(), "generic_filter")?,
        })
    }
}

/// An attached program; dropping it detaches the program.
#[derive(Debug)]
pub(crate) struct DriverLink {
    _link: OwnedFd,
    pub(crate) hook: DriverHook,
}

impl DriverLink {
    pub(crate) fn attach(
        program: BorrowedFd<'_>,
        ifindex: u32,
        hook: DriverHook,
    ) -> Result<DriverLink, DriverError> {
        if has_vlans(ifindex) {
            return Err(DriverError::Vlan);
        }
        let link = link(program, ifindex, hook).map_err(|source| refusal(source, hook))?;
        Ok(DriverLink { _link: link, hook })
    }
}

fn refusal(source: io::Error, hook: DriverHook) -> DriverError {
    match (Errno::from_io_error(&source), hook) {
        // The hook is taken, or the other kind is in use.
        (Some(Errno::BUSY | Errno::EXIST), _) => DriverError::InUse,
        (Some(Errno::OPNOTSUPP), DriverHook::Native) => DriverError::NotNative,
        _ => DriverError::Refused {
            hook: hook.name(),
            source,
        },
    }
}

fn link(program: BorrowedFd<'_>, ifindex: u32, hook: DriverHook) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: hook.flag(),
        ..Default::default()
    };
    // SAFETY: the call reads the options, and nothing else of this process.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            ifindex as i32,
            libbpf_sys::BPF_XDP,
            &raw const options,
        )
    };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call has just opened it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether this network namespace has VLAN devices on the device. If the device or the kernel's emulation of it strips
/// tags, they are not in the frame.
pub(crate) fn has_vlans(ifindex: u32) -> bool {
    let (Ok(name), Ok(table)) = (
        name_of(ifindex),
        fs::read_to_string("/proc/thread-self/net/vlan/config"),
    ) else {
        // Without the table there are no VLAN devices.
        return false;
    };
    is_beneath(&name, &table)
}

/// `ENODEV` if there is no such device.
pub(crate) fn name_of(ifindex: u32) -> Result<String, Errno> {
    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    netdevice::index_to_name(any, ifindex)
}

/// Lines have the form `vlan5  | 5  | eth0`.
fn is_beneath(device: &str, table: &str) -> bool {
    table
        .lines()
        .filter_map(|line| line.split('|').nth(2))
        .any(|beneath| beneath.trim() == device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_beneath_a_vlan_by_its_whole_name() {
        let table = "VLAN Dev name    | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\n\
                     eth1.5         | 5  | eth1\n";
        assert!(is_beneath("eth1", table));
        assert!(!is_beneath("eth", table));
        assert!(!is_beneath("eth1.5", table));
    }
}
