//! Rights to low ports, which sockets of programs show.

use std::net::SocketAddr;

/// What a connection has shown for the next port that is bound by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRight {
    Nothing,
    /// A thread asks.
    Asking,
    /// The right to this address and port.
    To(SocketAddr),
}
