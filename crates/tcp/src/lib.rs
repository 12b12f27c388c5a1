//! One TCP connection as a sans-IO state machine (RFC 9293): segments, time and bytes in,
//! segments and events out. No clock, no I/O, no randomness, no allocation per segment.
#![forbid(unsafe_code)]

mod assembler;
mod buffer;
pub mod capsule;
mod cc;
mod challenge;
mod chrono;
mod config;
mod connection;
pub mod cookie;
mod demux;
mod ecn;
mod encoding;
mod error;
mod event_counters;
mod events;
mod fastopen;
mod handshake;
mod input;
pub mod isn;
mod listen;
mod output;
mod path_mtu;
mod queue;
mod receive;
mod reset;
mod rtt;
mod sack;
mod send;
mod send_queue;
mod state;
mod tcp_info;
mod time_wait;
mod timers;
mod timestamps;
mod urgent;
mod validate;

pub use buffer::ByteRing;
pub use cc::BbrInfo;
pub use chrono::{Chronometer, Times};
pub use config::{
    ASSUMED_MSS_V4, ASSUMED_MSS_V6, Config, CongestionKind, EcnMode, KeepAlive, Options, OrphanWait,
};
pub use connection::{Connection, OutOfBand};
pub use ecn::Codepoint;
pub use error::{Error, IcmpError, IcmpKind};
pub use event_counters::{EVENTS, EVENTS_MAX, EventCounters};
pub use events::Events;
pub use fastopen::{
    Cookie, CookieVerdict, FastOpen, GrantedCookie, fast_open_cookie, judge_cookie,
    judge_shared_cookie, shared_cookie,
};
pub use listen::{ListenAnswer, judge_at_listener, opens_connection};
pub use output::Segment;
pub use queue::HandoffBuffer;
pub use reset::reset_for;
pub use send_queue::{Chunk, Placed};
pub use state::StateName;
pub use tcp_info::{RunningTimer, SendSpace, TcpInfo};
pub use time_wait::TimeWait;
