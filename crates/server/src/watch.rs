//! State that the host decides: routes, neighbours, addresses, devices and kernel parameters.

pub(crate) mod faults;
pub(crate) mod hooks;
pub(crate) mod metastate;
pub(crate) mod network;
pub(crate) mod policy;
pub(crate) mod sysctls;
