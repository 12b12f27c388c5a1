//! A deterministic network for two TCP connections: links with rate, delay, loss, reordering and
//! duplication, a virtual clock, a seeded generator. No real time, no sockets.
#![forbid(unsafe_code)]

mod link;
mod pair;
mod random;
mod states;

pub use link::{Link, Packet};
pub use pair::{End, PORT_A, PORT_B, Pair, Side, Transfer, cut, merge};
pub use random::Random;
pub use states::{IRS, ISS, STATES, begin};

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

/// A start time late enough that subtractions do not underflow.
pub const START: Instant = Instant::from_millis(1_000_000);

/// A segment without payload from `source` to `destination`, for tests that make their own segments.
pub fn segment(source: u16, destination: u16, seq: SeqNum, flags: TcpFlags) -> TcpHeader {
    TcpHeader {
        source_port: source,
        destination_port: destination,
        seq,
        flags,
        window: 0xffff,
        ..TcpHeader::default()
    }
}
