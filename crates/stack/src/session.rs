//! A session and its capsule: what a holder keeps, and what travels when the holder changes.

use portolan_proto::ip::IpOptions;
use portolan_tcp::{Connection, HandoffBuffer};
use portolan_types::{FlowKey, Generation, SessionId};
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};

use crate::udp::UdpSession;

/// Version of the capsule format; the first byte of each capsule.
const CAPSULE_VERSION: u8 = 2;

/// Bytes that a capsule seldom exceeds, stored data aside.
const STATE_ROOM: usize = 1024;

#[derive(Debug)]
pub enum Session {
    Tcp(Box<TcpSession>),
    Udp(Box<UdpSession>),
}

impl Session {
    pub fn id(&self) -> SessionId {
        match self {
            Session::Tcp(session) => session.id,
            Session::Udp(session) => session.id,
        }
    }
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

    /// Bytes that are read elsewhere ([`Connection::prefix`]) have to travel beside it.
    pub fn to_capsule(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(STATE_ROOM + self.connection.stored());
        bytes.push(CAPSULE_VERSION);
        postcard::serialize_with_flavor(self, Growing(bytes))
            .expect("plain data encodes into a growing vector")
    }

    /// Decodes a capsule that may come from a hostile process: whatever this returns is safe to
    /// run.
    pub fn from_capsule(bytes: &[u8]) -> Result<TcpSession, BadCapsule> {
        TcpSession::from_parts(bytes, None)
    }

    /// As [`TcpSession::from_capsule`], with the unread bytes that travelled beside the capsule.
    pub fn from_parts(
        bytes: &[u8],
        unread: Option<HandoffBuffer>,
    ) -> Result<TcpSession, BadCapsule> {
        let [CAPSULE_VERSION, body @ ..] = bytes else {
            return Err(BadCapsule::Version);
        };
        let Ok((mut session, [])) = postcard::take_from_bytes::<TcpSession>(body) else {
            return Err(BadCapsule::Malformed);
        };
        if let Some(unread) = unread {
            session.connection.lead_with(unread);
            if session.connection.handoff().is_none() {
                // There is nothing in it for this one.
                return Err(BadCapsule::Inconsistent);
            }
        }
        session
            .connection
            .validate()
            .map_err(|_| BadCapsule::Inconsistent)?;
        Ok(session)
    }
}

/// Where a capsule is encoded. Unlike postcard's own, it has room from the start and takes bytes as
/// a whole.
struct Growing(Vec<u8>);

impl Flavor for Growing {
    type Output = Vec<u8>;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}
