//! Raw flows: protocols that a program runs itself, above Ethernet, above IP, or at a port of TCP or UDP.

use core::fmt;
use core::net::SocketAddr;

use portolan_types::Protocol;
use serde::{Deserialize, Serialize};

/// What tells the packets of such a protocol from all others. One program of a host has it at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Guard {
    /// Frames of this EtherType, those to groups included.
    EtherType(u16),
    /// Packets of this protocol over IPv4 and IPv6 that are whole and for this host.
    IpProtocol(u8),
    /// Packets of TCP or UDP for this address, or for any of this host's, and port, in fragments too, and ICMP
    /// errors about what was sent from there. Port 0 asks for an ephemeral one; `::` is for IPv4, too.
    Port {
        protocol: Protocol,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
    },
}

/// Below are lengths (IEEE 802.3).
const LEAST_ETHERTYPE: u16 = 0x600;
/// IPv4, ARP, VLANs (802.1Q, 802.1ad), IPv6.
const KERNELS_ETHERTYPES: [u16; 5] = [0x0800, 0x0806, 0x8100, 0x88a8, 0x86dd];
/// ICMP, IGMP, TCP, UDP, ICMPv6, and the extension headers of IPv6 (RFC 8200 §4).
const STACKS_PROTOCOLS: [u8; 14] = [0, 1, 2, 6, 17, 43, 44, 50, 51, 58, 59, 60, 135, 139];

impl Guard {
    /// Can a program have it? Not what the stacks of this host live by.
    pub fn is_free(self) -> bool {
        match self {
            Guard::EtherType(number) => {
                number >= LEAST_ETHERTYPE && !KERNELS_ETHERTYPES.contains(&number)
            }
            Guard::IpProtocol(number) => !STACKS_PROTOCOLS.contains(&number),
            // Whose it is the table of ports knows.
            Guard::Port { .. } => true,
        }
    }
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Guard::EtherType(number) => write!(f, "ethertype {number:#06x}"),
            Guard::IpProtocol(number) => write!(f, "ip protocol {number}"),
            Guard::Port { protocol, local } => write!(f, "{protocol} port {local}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_stacks_live_by_is_nobodys() {
        for number in [0, 0x5ff, 0x0800, 0x0806, 0x8100, 0x86dd] {
            assert!(!Guard::EtherType(number).is_free(), "{number:#x}");
        }
        for number in [0, 1, 6, 17, 58, 44] {
            assert!(!Guard::IpProtocol(number).is_free(), "{number}");
        }
        // Local experiments (IEEE 802, RFC 3692).
        assert!(Guard::EtherType(0x88b5).is_free());
        assert!(Guard::IpProtocol(253).is_free());
    }
}
