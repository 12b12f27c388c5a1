//! A session and its capsule: what a holder keeps, and what travels when the holder changes.

use portolan_tcp::Connection;
use portolan_types::{FlowKey, Generation, SessionId};
use serde::{Deserialize, Serialize};

use crate::udp::UdpSession;

/// Version of the capsule format; the first octet of each capsule.
const CAPSULE_VERSION: u8 = 1;

#[derive(Debug)]
pub enum Session {
    Tcp(Box<TcpSession>),
    Udp(Box<UdpSession>),
}

/// A TCP session: its endpoints, and the machine that runs it.
#[derive(Debug, Serialize, Deserialize)]
pub struct TcpSession {
    pub id: SessionId,
    pub flow: FlowKey,
    /// Packets filtered for an earlier holder carry another generation.
    #[serde(skip)]
    pub generation: Generation,
    pub ip: IpOptions,
    pub connection: Connection,
}

/// Fields of the IP header that the application sets, or is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpOptions {
    pub ttl: u8,
    pub tos: u8,
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
    pub(crate) fn forbids_routers(self) -> bool {
        matches!(
            self,
            MtuDiscovery::Want | MtuDiscovery::Do | MtuDiscovery::Probe
        )
    }

    pub(crate) fn fragments_here(self) -> bool {
        matches!(
            self,
            MtuDiscovery::Dont | MtuDiscovery::Want | MtuDiscovery::Omit
        )
    }

    pub(crate) fn heeds_routers(self) -> bool {
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
            discovery: MtuDiscovery::default(),
        }
    }
}

/// Why a capsule was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCapsule {
    #[error("capsule of another version")]
    Version,
    #[error("capsule does not decode")]
    Malformed,
    #[error("capsule breaks an invariant of TCP")]
    Inconsistent,
}

impl TcpSession {
    pub fn new(id: SessionId, flow: FlowKey, connection: Connection) -> TcpSession {
        TcpSession {
            id,
            flow,
            generation: Generation::default(),
            ip: IpOptions::default(),
            connection,
        }
    }

    pub fn to_capsule(&self) -> Vec<u8> {
        let octets = vec![CAPSULE_VERSION];
        postcard::to_extend(self, octets).expect("plain data encodes into a growing vector")
    }

    /// Decodes a capsule that may come from a hostile process: whatever this returns is safe to
    /// run.
    pub fn from_capsule(octets: &[u8]) -> Result<TcpSession, BadCapsule> {
        let [CAPSULE_VERSION, body @ ..] = octets else {
            return Err(BadCapsule::Version);
        };
        let Ok((session, [])) = postcard::take_from_bytes::<TcpSession>(body) else {
            return Err(BadCapsule::Malformed);
        };
        session
            .connection
            .validate()
            .map_err(|_| BadCapsule::Inconsistent)?;
        Ok(session)
    }
}
