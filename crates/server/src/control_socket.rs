//! The control socket: its connections, their requests, and the descriptors that come with them.

pub mod client;
pub mod clients;
pub mod closes;
pub mod shortage;
pub mod sink;
