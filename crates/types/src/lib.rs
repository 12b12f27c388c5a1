//! The vocabulary of Portolan. Plain values, `no_std`, no behaviour beyond arithmetic and display.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod flow;
mod handle;
mod instant;
mod memory;
mod scope;
mod seq;

pub use flow::{ChannelId, FlowKey, Generation, MacAddr, Protocol, SessionId, Slot};
pub use handle::Handle;
pub use instant::Instant;
pub use memory::Memory;
pub use scope::{canonical, endpoint, is_scoped, scope_of, scoped};
pub use seq::SeqNum;
