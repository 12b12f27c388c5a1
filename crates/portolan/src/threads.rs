//! The threads in which the protocol runs: those of the program, while they wait for it (`sleep`), and one in the
//! background (`helper`). `embedded` is the sleep in an event loop of the program's own. `start` registers the process with the server; `successor` has a thread that looks for the
//! next server when that is gone.

#[cfg(feature = "tokio")]
pub(crate) mod embedded;
pub(crate) mod helper;
pub(crate) mod sleep;
pub(crate) mod start;
pub(crate) mod successor;
mod unseen;
