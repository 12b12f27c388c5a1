//! How packets reach the sessions of processes.

use portolan_proto::control::{Delivery, MappingChoice};
use serde::Deserialize;

use super::ConfigError;

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
    /// Octets of each, a power of two.
    pub direct_ring_size: u32,
}

impl Default for DeliveryConfig {
    fn default() -> DeliveryConfig {
        DeliveryConfig {
            form: Delivery::default(),
            mapping: MappingChoice::default(),
            direct_per_process: 8,
            direct_ring_size: 1 << 20,
        }
    }
}

impl DeliveryConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        check_ring_size("delivery.direct_ring_size", self.direct_ring_size)
    }
}

/// The server and its programs map as much as is asked for, so that it must be what the kernel makes.
pub(super) fn check_ring_size(key: &'static str, octets: u32) -> Result<(), ConfigError> {
    match octets.is_power_of_two() && RING_SIZES.contains(&octets) {
        true => Ok(()),
        false => Err(ConfigError::RingSize { key, octets }),
    }
}
