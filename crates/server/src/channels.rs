//! The channels of processes: how they are made and handed out, and how packets reach them.

pub(crate) mod channel;
pub(crate) mod channel_pool;
pub(crate) mod delivery;
pub(crate) mod device_turns;
pub(crate) mod direct;
pub(crate) mod handles;
pub(crate) mod pool;
pub(crate) mod processes;
pub(crate) mod rings;
