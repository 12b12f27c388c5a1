//! The maps of one channel: its ring and its doorbell.

use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::{MapHandle, MapType, libbpf_sys};
use portolan_proto::filter::Doorbell;

use crate::error::ChannelError;

/// Room for at least three records of the largest class.
const SMALLEST_RING: u32 = 256 * 1024;
const LARGEST_RING: u32 = 1 << 30;

/// The maps for the owner of a channel. Either descriptor may be passed to another process; it gives access
/// to this channel's map only.
#[derive(Debug)]
pub struct ChannelMaps {
    /// A BPF ring buffer of `RecordHeader` + frame; can be polled.
    pub ring: OwnedFd,
    /// An array map of one [`Doorbell`].
    pub doorbell: OwnedFd,
}

/// The same maps for use in this crate.
pub(crate) struct Maps {
    pub(crate) ring: MapHandle,
    pub(crate) doorbell: MapHandle,
}

impl Maps {
    /// `ring_size` is rounded up to a power of two, as the kernel requires.
    pub(crate) fn create(ring_size: u32) -> Result<Maps, ChannelError> {
        let entries = ring_size
            .clamp(SMALLEST_RING, LARGEST_RING)
            .next_power_of_two();
        let ring = MapHandle::create(
            MapType::RingBuf,
            Some("portolan_ring"),
            0,
            0,
            entries,
            &options(0),
        )
        .map_err(|source| ChannelError::Create {
            what: "ring",
            source,
        })?;
        let doorbell = MapHandle::create(
            MapType::Array,
            Some("portolan_bell"),
            size_of::<u32>() as u32,
            size_of::<Doorbell>() as u32,
            1,
            &options(libbpf_sys::BPF_F_MMAPABLE),
        )
        .map_err(|source| ChannelError::Create {
            what: "doorbell",
            source,
        })?;
        Ok(Maps { ring, doorbell })
    }

    pub(crate) fn share(&self) -> Result<ChannelMaps, ChannelError> {
        Ok(ChannelMaps {
            ring: self.ring.as_fd().try_clone_to_owned()?,
            doorbell: self.doorbell.as_fd().try_clone_to_owned()?,
        })
    }
}

fn options(map_flags: u32) -> libbpf_sys::bpf_map_create_opts {
    libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        map_flags,
        ..Default::default()
    }
}
