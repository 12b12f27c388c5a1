//! Active opens, and the end of sessions.

pub mod close;
pub mod fast_open;
pub mod opens;
pub mod rejoin;
pub mod rights;
