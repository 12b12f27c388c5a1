//! The application's settings of IP headers, for sent and received packets.

use serde::{Deserialize, Serialize};

/// Fields of the IP header that the application sets, or gets to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpOptions {
    pub ttl: u8,
    pub tos: u8,
    /// Packets with a lower TTL are dropped (`IP_MINTTL`, RFC 5082); TCP only.
    pub min_ttl: u8,
    pub discovery: MtuDiscovery,
}

/// `IP_MTU_DISCOVER` and `IPV6_MTU_DISCOVER`: how packets too large for the path are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MtuDiscovery {
    /// Routers may fragment; so may this host.
    Dont,
    /// Packets that fit the path have "don't fragment" set; this host fragments the others.
    #[default]
    Want,
    /// Datagrams that do not fit the path are refused.
    Do,
    /// As `Do`, with the first link's MTU: reports of routers are ignored.
    Probe,
    /// As `Probe`, but routers may fragment.
    Interface,
    /// As `Interface`, but this host fragments what does not fit.
    Omit,
}

impl MtuDiscovery {
    /// Whether packets have "don't fragment" set, unless they are fragments themselves.
    pub fn forbids_routers(self) -> bool {
        matches!(
            self,
            MtuDiscovery::Want | MtuDiscovery::Do | MtuDiscovery::Probe
        )
    }

    pub fn fragments_here(self) -> bool {
        matches!(
            self,
            MtuDiscovery::Dont | MtuDiscovery::Want | MtuDiscovery::Omit
        )
    }

    pub fn heeds_routers(self) -> bool {
        matches!(
            self,
            MtuDiscovery::Dont | MtuDiscovery::Want | MtuDiscovery::Do
        )
    }
}

impl Default for IpOptions {
    fn default() -> IpOptions {
        IpOptions {
            ttl: 64,
            tos: 0,
            min_ttl: 0,
            discovery: MtuDiscovery::default(),
        }
    }
}
