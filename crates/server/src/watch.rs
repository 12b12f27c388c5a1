//! State that the host decides: routes, neighbours, addresses, devices and kernel parameters.

pub mod faults;
pub mod hooks;
pub mod metastate;
pub mod network;
pub mod policy;
pub mod sysctls;
