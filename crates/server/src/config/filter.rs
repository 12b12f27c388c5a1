//! How the packet filter finds the receiver of a packet.

use portolan_proto::filter::FilterSettings;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct FilterConfig {
    pub algorithm: Algorithm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Algorithm {
    /// One table look-up.
    #[default]
    Hash,
    /// All flows are compared, one after the other.
    Linear,
}

impl Algorithm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Algorithm::Hash => "hash",
            Algorithm::Linear => "linear",
        }
    }

    /// Returns the number that the BPF programs use.
    pub(crate) fn number(self) -> u32 {
        match self {
            Algorithm::Hash => FilterSettings::HASH,
            Algorithm::Linear => FilterSettings::LINEAR,
        }
    }
}
