//! The protocol library: sockets whose TCP and UDP run in the application's address space.
//!
//! [`posix`] is the surface: BSD socket calls on descriptor numbers. Beneath it lie [`process`]
//! (one channel, one server connection), `core` (the sessions and whoever attends to them),
//! `socket` and `epoll`. [`qos`] asks for guarantees, [`raw`] is for protocols of a program's own,
//! [`extension`] puts handlers into the packet filter.
//!
//! Lock order: a socket's `setup` → `Core` → a socket's `watchers` → an epoll set's state. No
//! system call that can block is made with `Core` held.
#![deny(unsafe_code)]

mod accounts;
mod cancel;
mod channel;
mod control;
mod delegations;
mod epoll;
pub mod extension;
mod helper;
mod inboxes;
mod inside;
pub mod layers;
mod locals;
mod migrated_flows;
mod openings;
mod options;
pub mod posix;
mod process;
pub mod qos;
pub mod raw;
mod report;
mod rings;
mod runtime;
mod settings;
mod socket;
mod stamps;
mod table;
mod tx_queues;
mod unseen;
mod wait;
mod watch;
