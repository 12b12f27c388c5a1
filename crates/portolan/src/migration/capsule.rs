//! Sessions as capsules (ADR 30), packed and opened, with the memory of large unread data (ADR 12).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use portolan_proto::control::{Blob, Capsule};
use portolan_stack::TcpSession;
use portolan_sys::shm::{self, SetAside};
use portolan_tcp::{Connection, HandoffBuffer};
use portolan_types::Generation;

/// A session and the descriptors that travel with it.
pub(crate) struct OutgoingCapsule {
    pub(crate) capsule: Capsule,
    pub(crate) fds: Vec<OwnedFd>,
}

impl OutgoingCapsule {
    /// The capsule of a local session: all its state is in shared memory.
    pub(crate) fn empty() -> OutgoingCapsule {
        OutgoingCapsule {
            capsule: Blob::Inline(Vec::new()).into(),
            fds: Vec::new(),
        }
    }

    pub(crate) fn of(session: &mut TcpSession) -> Option<OutgoingCapsule> {
        set_aside(&mut session.connection);
        let unread = match session.connection.handoff() {
            Some(prefix) => {
                let memory = prefix.memory().as_any().downcast_ref::<SetAside>()?;
                Some((memory, prefix.start(), prefix.length()))
            }
            None => None,
        };
        let (capsule, fds) = shm::pack_capsule(session.to_capsule(), unread).ok()?;
        Some(OutgoingCapsule { capsule, fds })
    }
}

/// Puts much unread data into memory of its own, which the next holder reads without a copy. If
/// that is not possible it goes in the capsule.
fn set_aside(connection: &mut Connection) {
    let length = connection.arrived();
    let is_worth_it = length >= shm::WORTH_SETTING_ASIDE || connection.handoff().is_some();
    if is_worth_it && let Ok(memory) = SetAside::write(length, connection.arrived_pieces()) {
        connection.set_aside(Arc::new(memory));
    }
}

/// The server is trusted, but versions may differ: a bad capsule is a protocol error.
pub(crate) fn open_capsule(
    capsule: Capsule,
    generation: Generation,
    fds: Vec<OwnedFd>,
) -> Result<TcpSession, i32> {
    let mut session = unpack(capsule, fds).ok_or(libc::EPROTO)?;
    session.generation = generation;
    Ok(session)
}

/// Unread bytes are read in place; their descriptor is closed, because it would be in the program's way.
fn unpack(capsule: Capsule, fds: Vec<OwnedFd>) -> Option<TcpSession> {
    let (bytes, unread) = shm::unpack_capsule(capsule, fds).ok()?;
    let unread = match unread {
        Some((memory, at)) => {
            let memory = Arc::new(memory.into_bytes());
            Some(HandoffBuffer::new(
                memory,
                at.start as usize,
                at.length as usize,
            )?)
        }
        None => None,
    };
    TcpSession::from_parts(&bytes, unread).ok()
}
