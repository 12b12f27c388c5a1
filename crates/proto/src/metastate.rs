//! Metastate: the state of the host's network that libraries need, written by the server, read by all
//! without a call.
//!
//! The memfd holds a [`HEADER`] and then `length` bytes that decode to a [`Metastate`]. The writer makes
//! `generation` odd, writes, and makes it even. A reader copies, checks that the generation was even and
//! has not changed, and decodes its copy.

use core::net::IpAddr;

use portolan_types::MacAddr;
use serde::{Deserialize, Serialize};

/// Bytes of the whole memfd.
pub const SIZE: usize = 1024 * 1024;

/// First bytes of the memfd: generation, then length of the encoded [`Metastate`], both `u32`
/// in host order.
pub const HEADER: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metastate {
    pub interfaces: Vec<Interface>,
    pub addresses: Vec<Address>,
    /// Longest prefix first, then lowest metric.
    pub routes: Vec<Route>,
    pub neighbours: Vec<Neighbour>,
    /// The host has a policy of its own (netfilter, policy rules), which the kernel applies to what its sockets send.
    pub obeys_policy: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub index: u32,
    pub name: String,
    pub mac: MacAddr,
    pub mtu: u32,
    pub up: bool,
    /// Portolan's filter is attached to it.
    pub managed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub interface: u32,
    pub address: IpAddr,
    pub prefix: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    pub destination: IpAddr,
    pub prefix: u8,
    pub gateway: Option<IpAddr>,
    pub interface: u32,
    /// The source address preferred by the kernel.
    pub source: Option<IpAddr>,
    pub metric: u32,
    pub mtu: Option<u32>,
    pub kind: RouteKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouteKind {
    Unicast,
    /// A local address, or loopback.
    Local,
    Broadcast,
    Multicast,
    /// Blackhole, unreachable, prohibit.
    Refuse,
}

/// A neighbour with a known link-layer address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    pub interface: u32,
    pub address: IpAddr,
    pub mac: MacAddr,
}
