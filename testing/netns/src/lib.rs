//! Test beds of network namespaces, veth wires and impaired links; root only. A bed that cannot be
//! set up panics: then the test that wants it has failed.
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
