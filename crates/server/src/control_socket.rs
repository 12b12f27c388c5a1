//! The control socket: its connections, their requests, and the descriptors that come with them.

pub(crate) mod client;
pub(crate) mod clients;
pub(crate) mod closes;
pub(crate) mod shortage;
pub(crate) mod sink;
