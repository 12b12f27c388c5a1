//! Processes that move between cgroups: the guarantees of the new cgroup apply to them within a second.

mod serve;

use std::collections::HashMap;

use portolan_types::ChannelId;

/// The cgroups of each process at the last check.
#[derive(Debug, Default)]
pub(super) struct Whereabouts {
    by_channel: HashMap<ChannelId, String>,
}
