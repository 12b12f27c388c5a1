//! Test beds of network namespaces, veth links and impaired links. They need root. A bed that cannot be
//! set up panics, which fails the test.
#![forbid(unsafe_code)]

mod bed;
mod bundle;
mod daemon;
mod link;
mod namespace;
mod segment;
mod wire;

pub use bed::Bed;
pub use daemon::{Daemon, Ready};
pub use link::{Counters, Impairment};
pub use namespace::Namespace;
