//! How packets reach the sessions of processes.

use portolan_bpf::DriverHook;
use portolan_proto::control::{Delivery, MappingChoice};
use serde::Deserialize;

use super::error::ConfigError;

const RING_SIZES: core::ops::RangeInclusive<u32> = 256 << 10..=1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DeliveryConfig {
    /// Of sessions that choose none.
    pub form: Delivery,
    /// Likewise.
    pub mapping: MappingChoice,
    /// Rings that one process may have besides its channel's, each for one session; 0 disables them.
    pub direct_per_process: u32,
    /// Bytes of each such ring, a power of two.
    pub direct_ring_size: u32,
    /// Driver hooks to attach the packet filter to; by default any, if the form needs one.
    pub xdp: Option<Xdp>,
}

/// The driver hooks to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Xdp {
    Off,
    Native,
    Generic,
    /// Native where the driver supports it.
    Any,
}

impl Default for DeliveryConfig {
    fn default() -> DeliveryConfig {
        DeliveryConfig {
            form: Delivery::default(),
            mapping: MappingChoice::default(),
            direct_per_process: 8,
            direct_ring_size: 1 << 20,
            xdp: None,
        }
    }
}

impl DeliveryConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.form == Delivery::ShmIpf && self.xdp().is_empty() {
            return Err(ConfigError::NoDriverHook);
        }
        check_ring_size("delivery.direct_ring_size", self.direct_ring_size)
    }

    /// Returns the hooks in the order in which they are tried.
    pub(crate) fn xdp(&self) -> &'static [DriverHook] {
        match (self.xdp, self.form) {
            (Some(Xdp::Off), _) => &[],
            (Some(Xdp::Native), _) => &[DriverHook::Native],
            (Some(Xdp::Generic), _) => &[DriverHook::Generic],
            (Some(Xdp::Any), _) | (None, Delivery::ShmIpf) => {
                &[DriverHook::Native, DriverHook::Generic]
            }
            (None, Delivery::Shm | Delivery::Ipc | Delivery::Server) => &[],
        }
    }
}

/// The server and its programs map exactly this size, so it must be one that the kernel makes.
pub(super) fn check_ring_size(key: &'static str, bytes: u32) -> Result<(), ConfigError> {
    if bytes.is_power_of_two() && RING_SIZES.contains(&bytes) {
        Ok(())
    } else {
        Err(ConfigError::RingSize { key, bytes })
    }
}
