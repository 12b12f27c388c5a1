//! Unread datagrams of a socket, in transfer with it.

use core::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// A received datagram, with fields of its headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadDatagram {
    #[serde(with = "portolan_types::endpoint")]
    pub from: SocketAddr,
    pub to: IpAddr,
    /// Index of the device on which it arrived.
    pub interface: u32,
    pub hops: u8,
    pub traffic_class: u8,
    #[serde(with = "crate::bytes")]
    pub payload: Vec<u8>,
}
