//! One TCP connection as a sans-IO state machine (RFC 9293): segments, time and octets in,
//! segments and events out. No clock, no I/O, no randomness, no allocation per segment.
#![forbid(unsafe_code)]

mod assembler;
mod buffer;
mod cc;
mod config;
mod connection;
pub mod cookie;
mod ecn;
mod error;
mod events;
mod figures;
mod handshake;
mod input;
pub mod isn;
mod output;
mod receive;
mod reset;
mod rtt;
mod sack;
mod send;
mod state;
mod tally;
mod timers;
mod timestamps;
mod validate;

pub use config::{Config, CongestionKind, EcnMode, KeepAlive, Options};
pub use connection::Connection;
pub use ecn::Codepoint;
pub use error::{Error, IcmpError, IcmpKind};
pub use events::Events;
pub use figures::Figures;
pub use output::Segment;
pub use reset::reset_for;
pub use state::StateName;
pub use tally::{EVENTS, EVENTS_MAX};
pub use validate::Invalid;
