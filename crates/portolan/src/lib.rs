//! The protocol library: sockets whose TCP and UDP run in the application's address space.
//!
//! [`net`] has sockets in the shape of the standard library's, and shared buffers, for programs that are written for
//! Portolan. They build on [`posix`]: BSD socket calls on descriptor numbers. [`qos`] requests guarantees, [`raw`] is
//! for a program's own protocols, and [`extension`] installs handlers in the packet filter.
//!
//! Below are, each using only what follows: `threads` (which sleep, and which run the protocol), `migration` (sessions
//! that come and go), `process` (one channel, one server connection), `runtime` (the sessions, under one lock), `socket`
//! (the state behind a descriptor), `wait` (the parts of waiting) and `channel` (tap and rings).
//!
//! Lock order: a socket's `setup` → `Core` → a socket's `watchers` → an epoll set's state. No
//! system call that can block is made with `Core` held.
#![deny(unsafe_code)]

mod channel;
mod descriptors;
pub mod extension;
mod migration;
pub mod net;
mod outcome;
pub mod posix;
mod process;
pub mod qos;
pub mod raw;
mod runtime;
mod settings;
mod socket;
mod threads;
mod wait;

pub use channel::layers;
