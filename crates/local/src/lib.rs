//! Local sessions: streams between two programs of one host, through shared memory (ADR 9).
#![forbid(unsafe_code)]

mod end;
mod stream;
mod wake_word;

pub use end::{Direction, Local, Remains, Wake, WakeBy, WakeRequest};
pub use stream::Stream;

#[cfg(test)]
mod tests;
