//! The channels of processes: how they are made and handed out, and how packets reach them.

pub mod channel;
pub mod channel_pool;
pub mod delivery;
pub mod device_turns;
pub mod direct;
pub mod handles;
pub mod pool;
pub mod processes;
pub mod rings;
