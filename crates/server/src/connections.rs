//! Active opens, and the end of sessions.

pub mod close;
pub mod due;
pub mod opens;
pub mod orphans;
