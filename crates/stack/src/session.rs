//! A session and its capsule: the state of a holder, and the form in which it is transferred.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use portolan_proto::ip::{IpOptions, MtuDiscovery};
use portolan_tcp::capsule::{self, Encoded, Reader, Refused, Writer};
use portolan_tcp::{Connection, HandoffBuffer};
use portolan_types::{FlowKey, Generation, Protocol, SessionId};

use crate::udp::UdpSession;

/// Usual maximum size of a capsule without stored data.
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

/// A TCP session: its endpoints, and the TCP engine.
#[derive(Debug)]
pub struct TcpSession {
    pub id: SessionId,
    pub flow: FlowKey,
    /// Packets filtered for an earlier holder carry another generation.
    pub generation: Generation,
    pub ip: IpOptions,
    pub connection: Connection,
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

    /// Encodes the session and its endpoints, then the connection. Memory read in place ([`Connection::handoff`])
    /// must travel beside the capsule.
    pub fn to_capsule(&self) -> Vec<u8> {
        let mut out = Writer::new(STATE_ROOM + self.connection.stored());
        self.id.0.put(&mut out);
        put_endpoint(self.flow.local, &mut out);
        put_endpoint(self.flow.remote, &mut out);
        put_ip(&self.ip, &mut out);
        capsule::encode(&self.connection, &mut out);
        out.finish()
    }

    /// Parses a capsule that may come from a hostile process: a session that this returns is safe to run.
    pub fn from_capsule(bytes: &[u8]) -> Result<TcpSession, Refused> {
        TcpSession::from_parts(bytes, None)
    }

    /// Like [`TcpSession::from_capsule`], with the unread bytes that travelled beside the capsule.
    pub fn from_parts(bytes: &[u8], unread: Option<HandoffBuffer>) -> Result<TcpSession, Refused> {
        let mut from = Reader::new(bytes)?;
        let id = SessionId(u64::take(&mut from)?);
        let local = take_endpoint(&mut from)?;
        let remote = take_endpoint(&mut from)?;
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local,
            remote,
        };
        let ip = take_ip(&mut from)?;
        let connection = capsule::parse(from, unread)?;
        Ok(TcpSession {
            ip,
            ..TcpSession::new(id, flow, connection)
        })
    }
}

/// Address families in capsules.
const V4: u8 = 4;
const V6: u8 = 6;

fn put_endpoint(endpoint: SocketAddr, out: &mut Writer) {
    match endpoint {
        SocketAddr::V4(v4) => {
            V4.put(out);
            out.bytes(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            V6.put(out);
            out.bytes(&v6.ip().octets());
            v6.scope_id().put(out);
        }
    }
    endpoint.port().put(out);
}

fn take_endpoint(from: &mut Reader<'_>) -> Result<SocketAddr, Refused> {
    match u8::take(from)? {
        V4 => {
            let ip = IpAddr::from(*array::<4>(from)?);
            Ok(SocketAddr::new(ip, u16::take(from)?))
        }
        V6 => {
            let ip = (*array::<16>(from)?).into();
            let scope = u32::take(from)?;
            Ok(SocketAddrV6::new(ip, u16::take(from)?, 0, scope).into())
        }
        _ => Err(Refused::Value("the family of an endpoint")),
    }
}

fn array<'a, const N: usize>(from: &mut Reader<'a>) -> Result<&'a [u8; N], Refused> {
    let bytes = from.bytes(N)?;
    bytes.first_chunk().ok_or(Refused::Short)
}

const DISCOVERIES: [MtuDiscovery; 6] = [
    MtuDiscovery::Dont,
    MtuDiscovery::Want,
    MtuDiscovery::Do,
    MtuDiscovery::Probe,
    MtuDiscovery::Interface,
    MtuDiscovery::Omit,
];

fn put_ip(ip: &IpOptions, out: &mut Writer) {
    let IpOptions {
        ttl,
        tos,
        min_ttl,
        discovery,
    } = ip;
    let number = DISCOVERIES.iter().position(|known| known == discovery);
    out.bytes(&[*ttl, *tos, *min_ttl, number.unwrap_or(0) as u8]);
}

fn take_ip(from: &mut Reader<'_>) -> Result<IpOptions, Refused> {
    let [ttl, tos, min_ttl, number] = *array(from)?;
    let discovery = DISCOVERIES.get(usize::from(number));
    Ok(IpOptions {
        ttl,
        tos,
        min_ttl,
        discovery: *discovery.ok_or(Refused::Value("path MTU discovery"))?,
    })
}
