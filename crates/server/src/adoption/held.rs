//! What a server leaves to the next one in the messages of a socket: the connections that it holds itself, and its ends
//! of the descriptors of those that processes hold.

use std::os::fd::OwnedFd;

use portolan_control::{Closing, HeldBefore, Holder, Life, Reach, SessionEntry};
use portolan_proto::control::{Capsule, SocketOptionsBlob};
use portolan_proto::local::Side;
use portolan_proto::{Speaks, decode, encode};
use portolan_sys::unix::{self, ReceiveError};
use portolan_types::{FlowKey, Protocol};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::adoption::left_ends::LeftEnd;

/// Raised with every change of [`Message`] that [`PROTOCOL`](portolan_proto::PROTOCOL) does not cover. Both are the first
/// message.
const FORMAT: u32 = 3;

/// Most bytes of a message: larger states are in memory that the message carries.
const MESSAGE_MAX: usize = 256 * 1024;

/// What the server does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Role {
    Relays,
    Parks,
    /// In the accept queue of its listener, which listens again with the next server.
    Queues,
    Finishes,
}

impl Role {
    pub(crate) fn of(session: &SessionEntry) -> Option<Role> {
        let role = match session.life {
            Life::Relayed(_) => Role::Relays,
            Life::Parked if session.has_descriptor => Role::Parks,
            // Or still waits for its listener.
            Life::Parked | Life::Offered => Role::Queues,
            Life::Closing(Closing::Finishing(_)) => Role::Finishes,
            _ => return None,
        };
        let is_held = session.protocol == Protocol::Tcp
            && match session.holder {
                Holder::Server(_) => true,
                Holder::None => session.is_local(),
                Holder::Process(..) => false,
            };
        (is_held && (session.has_descriptor || !role.has_descriptor())).then_some(role)
    }

    /// Has its descriptor reached a program?
    pub(crate) fn has_descriptor(self) -> bool {
        matches!(self, Role::Relays | Role::Parks)
    }
}

/// Where the state of a connection is.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum HeldState {
    Capsule(Capsule),
    /// This end of the memory that the message carries.
    Memory(Side),
}

impl HeldState {
    pub(crate) fn reach(&self) -> Reach {
        match self {
            HeldState::Capsule(_) => Reach::Network,
            HeldState::Memory(_) => Reach::WithinHost,
        }
    }
}

/// A connection without its descriptors, which the message carries: the end of the session's descriptor is the first, then
/// come those of its state.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HeldConnection {
    pub session: HeldBefore,
    pub role: Role,
    pub options_blob: SocketOptionsBlob,
    pub state: HeldState,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    Held(Box<HeldConnection>),
    /// As many as the message carries descriptors.
    Ends(Vec<LeftEnd>),
}

/// All that the previous server has left in messages.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    pub connections: Vec<LeftConnection>,
    pub ends: Vec<(LeftEnd, OwnedFd)>,
}

/// A connection of the previous server, until it is in the tables of this one.
#[derive(Debug)]
pub(crate) struct LeftConnection {
    pub connection: HeldConnection,
    pub fds: Vec<OwnedFd>,
}

impl LeftConnection {
    pub(crate) fn flow(&self) -> &FlowKey {
        &self.connection.session.flow
    }
}

/// The first message, by which the next server knows whether it understands the others.
pub(crate) fn first_message() -> Vec<u8> {
    encode(&(Speaks::OWN.word(), FORMAT))
}

/// Does this version understand the messages of a server that has sent this first?
fn is_understood((speaks, format): (u32, u32)) -> bool {
    format == FORMAT && Speaks::OWN.fits(Speaks::from_word(speaks))
}

/// Returns what the previous server has left. The messages stay, for the next start if this one fails.
pub(crate) fn read(kept: &OwnedFd) -> Leftovers {
    let mut buffer = vec![0; MESSAGE_MAX];
    let mut left = Leftovers::default();
    if let Err(error) = unix::peek_from_first(kept) {
        warn!(%error, "connections that the previous server held are reset");
        return left;
    }
    match next::<(u32, u32)>(kept, &mut buffer) {
        Some((first, _)) if is_understood(first) => {}
        _ => {
            warn!("connections that a server of another version held are reset");
            return left;
        }
    }
    while let Some((message, fds)) = next(kept, &mut buffer) {
        match message {
            Message::Held(connection) => left.connections.push(LeftConnection {
                connection: *connection,
                fds,
            }),
            Message::Ends(ends) => left.ends.extend(ends.into_iter().zip(fds)),
        }
    }
    left
}

/// Takes the messages out, with which their descriptors would stay open: this server has the connections now.
pub(crate) fn clear(kept: &OwnedFd) {
    let mut fds = Vec::new();
    while let Ok(_) | Err(ReceiveError::Truncated) = unix::receive_all(kept, &mut [0], &mut fds) {
        fds.clear();
    }
}

fn next<T: for<'a> Deserialize<'a>>(kept: &OwnedFd, bytes: &mut [u8]) -> Option<(T, Vec<OwnedFd>)> {
    let mut fds = Vec::new();
    let message = unix::peek_all(kept, bytes, &mut fds).ok()?;
    let message = decode(&bytes[..message.length]).ok()?;
    Some((message, fds))
}
