//! What an application wants of IP headers, of those it sends and of those it gets.

use serde::{Deserialize, Serialize};

/// Fields of the IP header that the application sets, or is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpOptions {
    pub ttl: u8,
    pub tos: u8,
    /// What comes with less is dropped (`IP_MINTTL`, RFC 5082); TCP only.
    pub min_ttl: u8,
    pub discovery: MtuDiscovery,
}

/// `IP_MTU_DISCOVER` and `IPV6_MTU_DISCOVER`: who answers for packets that a path does not take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MtuDiscovery {
    /// Routers may fragment; so does this host.
    Dont,
    /// Packets that fit the path say "don't fragment"; this host fragments the others.
    #[default]
    Want,
    /// Datagrams that do not fit the path are refused.
    Do,
    /// As `Do`, by the first link's MTU: reports of routers are not heeded.
    Probe,
    /// As `Probe`, but routers may fragment.
    Interface,
    /// As `Interface`, but this host fragments what does not fit.
    Omit,
}

impl MtuDiscovery {
    /// The packet says "don't fragment" if it is not a fragment itself.
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
