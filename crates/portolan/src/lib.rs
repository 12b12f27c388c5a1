//! The protocol library: sockets whose TCP and UDP run in the application's address space.
//!
//! [`net`] has sockets in the shape of the standard library's, and shared buffers, for programs that are written for
//! Portolan. They build on [`posix`]: BSD socket calls on descriptor numbers. Below are `process` (one channel, one
//! server connection), `socket` (the state behind a descriptor), `wait` (which threads sleep, and which one polls for
//! them), `runtime` (the sessions, under one lock) and `channel` (tap and rings). [`qos`] requests guarantees, [`raw`]
//! is for a program's own protocols, and [`extension`] installs handlers in the packet filter.
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
mod wait;

pub use channel::layers;
