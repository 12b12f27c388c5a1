//! Active opens, and the end of sessions.

pub(crate) mod close;
pub(crate) mod fast_open;
pub(crate) mod leases;
pub(crate) mod opens;
pub(crate) mod rejoin;
pub(crate) mod rights;
