//! Raw flows: protocols that a program runs itself, above Ethernet, above IP, or at a port of TCP or UDP.

use core::fmt;
use core::net::SocketAddr;

use portolan_types::Protocol;
use serde::{Deserialize, Serialize};

/// Identifies the packets of a raw protocol. Only one program of a host can have it at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Guard {
    /// Frames of this EtherType, including those to groups.
    EtherType(u16),
    /// Unfragmented packets of this protocol over IPv4 and IPv6 to this host.
    IpProtocol(u8),
    /// Packets of TCP or UDP to this address, or to any of this host, and port, including fragments, and ICMP errors
    /// about packets sent from there. Port 0 requests an ephemeral one; `::` includes IPv4.
    Port {
        protocol: Protocol,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
    },
}

/// Smaller values are lengths (IEEE 802.3).
const LEAST_ETHERTYPE: u16 = 0x600;
/// IPv4, ARP, VLANs (802.1Q, 802.1ad), IPv6.
const KERNELS_ETHERTYPES: [u16; 5] = [0x0800, 0x0806, 0x8100, 0x88a8, 0x86dd];
/// ICMP, IGMP, TCP, UDP, ICMPv6, and the extension headers of IPv6 (RFC 8200 §4).
const STACKS_PROTOCOLS: [u8; 14] = [0, 1, 2, 6, 17, 43, 44, 50, 51, 58, 59, 60, 135, 139];

impl Guard {
    /// Whether a program may have it: not if the stacks of this host depend on it.
    pub fn is_free(self) -> bool {
        match self {
            Guard::EtherType(number) => {
                number >= LEAST_ETHERTYPE && !KERNELS_ETHERTYPES.contains(&number)
            }
            Guard::IpProtocol(number) => !STACKS_PROTOCOLS.contains(&number),
            /// The table of ports decides.
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
