//! Black-box tests of a TCP/IP stack: scripts of packets and calls, and the runner that plays the
//! remote host. See `docs/reference/scripts.md`.

pub mod agent;
pub mod bed;
pub mod deviations;
pub mod pool;
pub mod prompt;
pub mod run;
pub mod script;
pub mod segment;
pub mod wire;
