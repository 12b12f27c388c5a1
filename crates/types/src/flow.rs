use core::fmt;
use core::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::canonical;

/// Transport protocol of a session, by its IP protocol number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum Protocol {
    Tcp = 6,
    Udp = 17,
}

impl Protocol {
    pub const fn number(self) -> u8 {
        self as u8
    }

    pub const fn from_number(number: u8) -> Option<Protocol> {
        match number {
            6 => Some(Protocol::Tcp),
            17 => Some(Protocol::Udp),
            _ => None,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        })
    }
}

/// The packet filter's matching criteria: protocol, this host's endpoint, the peer's endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FlowKey {
    pub protocol: Protocol,
    #[serde(with = "crate::endpoint")]
    pub local: SocketAddr,
    #[serde(with = "crate::endpoint")]
    pub remote: SocketAddr,
}

impl FlowKey {
    /// The flow as the peer sees it.
    pub fn reversed(self) -> FlowKey {
        FlowKey {
            local: self.remote,
            remote: self.local,
            ..self
        }
    }

    /// The flow in the form used for comparisons ([`canonical`]).
    pub fn canonical(self) -> FlowKey {
        FlowKey {
            local: canonical(self.local),
            remote: canonical(self.remote),
            ..self
        }
    }
}

impl fmt::Display for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} > {}", self.protocol, self.local, self.remote)
    }
}

/// Identifies a session for the lifetime of the server; never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct SessionId(pub u64);

impl SessionId {
    /// No session has this number.
    pub const NONE: SessionId = SessionId(0);
}

/// Identifies a channel; 0 is the server's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct ChannelId(pub u32);

impl ChannelId {
    pub const SERVER: ChannelId = ChannelId(0);
}

/// Index of a session in its holder's session table. The filter returns it with each packet, so that the
/// receiver needs no look-up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Slot(pub u32);

/// Counts the changes of a flow row: a packet with an old generation was filtered before the session
/// migrated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Generation(pub u32);

impl Generation {
    /// Of a connection that its process opened itself: its row is the first of its flow.
    pub const UNREGISTERED: Generation = Generation(0);
}

/// An IEEE 802 48-bit address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);

    /// The MAC address of a multicast group (RFC 1112 §6.4, RFC 2464 §7); `None` for an address that is not a
    /// group.
    pub const fn of_group(group: IpAddr) -> Option<MacAddr> {
        match group {
            IpAddr::V4(v4) if v4.is_multicast() => {
                let [_, b, c, d] = v4.octets();
                Some(MacAddr([1, 0, 0x5e, b & 0x7f, c, d]))
            }
            IpAddr::V6(v6) if v6.is_multicast() => {
                let [.., a, b, c, d] = v6.octets();
                Some(MacAddr([0x33, 0x33, a, b, c, d]))
            }
            _ => None,
        }
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_addresses_on_the_link() {
        let of = |group: &str| MacAddr::of_group(group.parse().unwrap());
        assert_eq!(of("224.0.0.251"), Some(MacAddr([1, 0, 0x5e, 0, 0, 251])));
        assert_eq!(of("239.129.2.3"), Some(MacAddr([1, 0, 0x5e, 1, 2, 3])));
        assert_eq!(of("ff02::fb"), Some(MacAddr([0x33, 0x33, 0, 0, 0, 0xfb])));
        assert_eq!(of("10.0.0.1"), None);
        assert_eq!(of("fd00::1"), None);
    }
}
