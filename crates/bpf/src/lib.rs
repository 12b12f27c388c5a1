//! The packet filter and the transmit filter in the kernel: loading, attaching, filling their
//! tables, reading their counters. The caller decides what belongs in the tables. The programs
//! themselves are in `bpf/`; the layouts in `portolan_proto::filter`.
#![deny(unsafe_code)]

mod cgroup;
mod channel;
mod counters;
mod driver;
mod error;
mod extensions;
mod filter;
mod floods;
mod handles;
mod holders;
mod hook;
mod inheritance;
mod linear;
mod load;
mod map_builder;
mod objects;
mod predecessor;
mod removals;
mod run_time;
mod table;
mod workers;

#[cfg(test)]
mod tests;

pub use cgroup::has_deciding_programs;
pub use channel::ChannelMaps;
pub use counters::{Counter, counter_names};
pub use driver::{DriverError, DriverHook};
pub use error::{AttachError, ChannelError, LoadError, TableError};
pub use extensions::{Extensions, Linkage, is_extension_map};
pub use filter::{Filter, Limits, Restored};
pub use holders::HolderCount;
pub use hook::{HookEvents, is_attached};
pub use inheritance::{Inheritance, InheritedChannel};
pub use load::{Loaded, Refused};
pub use map_builder::MapBuilder;
pub use predecessor::{InheritError, Predecessor, map_id};
pub use run_time::RunTime;
