//! `[extension]`: how much protocol extensions may take.

use serde::Deserialize;

use super::ConfigError;

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExtensionConfig {
    /// Nanoseconds that one run of a handler may take; one that takes longer again and again is
    /// removed.
    pub time_limit_ns: u64,
    /// Instructions that the verifier may go through to see that a handler ends: no run takes more.
    pub instructions: u32,
    /// Octets of maps that one process may be given.
    pub memory_per_process: u64,
}

impl Default for ExtensionConfig {
    fn default() -> ExtensionConfig {
        ExtensionConfig {
            time_limit_ns: 10_000,
            instructions: 65_536,
            memory_per_process: 32 << 20,
        }
    }
}

pub(super) fn check(config: &ExtensionConfig) -> Result<(), ConfigError> {
    if !(100..=10_000_000).contains(&config.time_limit_ns) {
        return Err(ConfigError::ExtensionTime(config.time_limit_ns));
    }
    Ok(())
}
