//! Processes that move from one cgroup to another: what their new one is guaranteed holds for them within a second.

mod serve;

use std::collections::HashMap;

use portolan_types::ChannelId;

/// Where each process was at the last look.
#[derive(Debug, Default)]
pub struct Whereabouts {
    by_channel: HashMap<ChannelId, String>,
}
