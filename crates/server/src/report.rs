//! What commands show: counters, sessions, the state of the server.

#[cfg(test)]
mod counters_tests;
pub mod listings;
pub mod reports;
