//! `getsockname` and `getpeername`.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use rustix::io::Errno;

use super::find::find;
use super::lifecycle::has_ended;
use crate::migration::active_open::complete_connect;
use crate::outcome::{CallError, Outcome};
use crate::socket::SocketPhase;
use crate::socket::table;

pub fn local_address(fd: RawFd) -> Outcome<SocketAddr> {
    let socket = table::socket(fd).ok_or(CallError::NotOurs)?;
    let local = socket.setup().local;
    Ok(local.map_or_else(|| socket.unspecified(), |local| socket.shown(local)))
}

pub fn peer_address(fd: RawFd) -> Outcome<SocketAddr> {
    let (socket, process) = find(fd)?;
    complete_connect(process, fd, &socket);
    if !matches!(
        socket.phase(),
        SocketPhase::Cached | SocketPhase::Relayed | SocketPhase::HeldElsewhere
    ) {
        return Err(Errno::NOTCONN.into());
    }
    let remote = socket.setup().remote.ok_or(Errno::NOTCONN)?;
    let is_closed = process
        .lock()
        .stream(socket.slot())
        .is_some_and(|stream| has_ended(stream));
    if is_closed && socket.phase() == SocketPhase::Cached {
        return Err(Errno::NOTCONN.into());
    }
    Ok(socket.shown(remote))
}
