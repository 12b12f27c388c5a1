//! How packets reach the sessions of processes.

use portolan_bpf::DriverHook;
use portolan_proto::control::{Delivery, MappingChoice};
use serde::Deserialize;

use super::error::ConfigError;

const RING_SIZES: core::ops::RangeInclusive<u32> = 256 << 10..=1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeliveryConfig {
    /// Of sessions that choose nothing.
    pub form: Delivery,
    /// The same.
    pub mapping: MappingChoice,
    /// Rings that one process may have beside its channel's, each for one session; 0: none has.
    pub direct_per_process: u32,
    /// Bytes of each, a power of two.
    pub direct_ring_size: u32,
    /// By which hooks the packet filter goes into the drivers of devices; if not said, by any if the form wants it.
    pub xdp: Option<Xdp>,
}

/// The hooks that a device may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    Off,
    Native,
    Generic,
    /// Native where its driver has it.
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

    /// The hooks in the order in which they are tried.
    pub fn xdp(&self) -> &'static [DriverHook] {
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

/// The server and its programs map as much as is asked for, so that it must be what the kernel makes.
pub(super) fn check_ring_size(key: &'static str, bytes: u32) -> Result<(), ConfigError> {
    if bytes.is_power_of_two() && RING_SIZES.contains(&bytes) {
        Ok(())
    } else {
        Err(ConfigError::RingSize { key, bytes })
    }
}
