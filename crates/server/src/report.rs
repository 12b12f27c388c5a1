//! What commands show: counters, sessions, the state of the server.

pub mod counters;
pub mod listings;
pub mod reports;
