//! Registration of connections that the server does not know yet (ADR 31): before another process can have the
//! descriptor, before a request about the connection, and at a certain age.

use std::net::SocketAddr;
use std::os::fd::{AsFd, RawFd};

use portolan_proto::control::{Blob, Delivery, MappingChoice, ReplyBody, RequestBody};
use portolan_stack::TcpSession;
use portolan_sys::{clock, shm};
use portolan_types::SessionId;
use rustix::io::Errno;

use crate::outcome::{Outcome, refusal};
use crate::process::Process;
use crate::runtime::unregistered::{Closed, DueConnections, Leaving};
use crate::socket::table;
use crate::socket::{Setup, Socket, SocketPhase, SocketState, Unregistered};

/// May the connection of this socket, or those of this listener, stay unregistered? Some choices take effect in the server.
pub(crate) fn may_wait(process: &Process, socket: &Socket) -> bool {
    let options = socket.options();
    options.delivery().unwrap_or(process.delivery()) != Delivery::Server
        && options.mapping().unwrap_or(process.mapping()) == MappingChoice::Shared
        && options.priority() == 0
        && !Socket::has_unseen_waits()
}

/// Registers the connection, unless the server knows it.
pub(crate) fn register(process: &Process, socket: &Socket) -> Outcome<()> {
    if !socket.is_unregistered() {
        return Ok(());
    }
    // Whoever closes the socket waits for this lock.
    let mut setup = socket.setup();
    let (Some(own), SocketState::Cached { slot }) = (&setup.unregistered, socket.state()) else {
        return Ok(());
    };
    if !process.lock().unregistered.has(slot) {
        // It was cut off.
        return Err(Errno::CONNRESET.into());
    }
    let (local, remote) = endpoints(&setup)?;
    let request = RequestBody::Register {
        port: own.port,
        local,
        remote,
        slot,
    };
    let ends = [own.pair.far.as_fd(), own.pair.near.as_fd()];
    match process.control.call(request, &ends) {
        Ok((ReplyBody::Bound { session, .. }, _)) => {
            setup.session = Some(session);
            setup.unregistered = None;
            process.lock().note_registered(clock::now(), slot, session);
            socket.note_registered();
            Ok(())
        }
        refused => Err(refusal(refused)),
    }
}

fn endpoints(setup: &Setup) -> Result<(SocketAddr, SocketAddr), Errno> {
    setup.local.zip(setup.remote).ok_or(Errno::NOTCONN)
}

/// As [`register`], for a connection that another process will have: without its session it ends.
pub(crate) fn register_for_others(process: &Process, socket: &Socket) {
    if register(process, socket).is_err() && !process.control.is_lost() {
        process.lock().cut_off_one(clock::now(), socket.slot());
    }
}

/// The server knows all connections of the listener when this returns, and there will be no others that it does not know.
pub(crate) fn register_all(process: &Process, listener: SessionId) {
    let taken = process.lock().take_unregistered(clock::now(), listener);
    pass_on(process, taken);
}

/// The server knows all open connections when this returns, and the closed ones, if this process ends.
pub(crate) fn register_all_of(process: &Process, closed: Closed) {
    let taken = process.lock().take_all_unregistered(clock::now(), closed);
    pass_on(process, taken);
}

/// The server gets to know these connections, which others will have.
fn pass_on(process: &Process, taken: DueConnections) {
    for socket in &taken.to_register {
        register_for_others(process, socket);
    }
    let is_left = !taken.to_hand_over.is_empty();
    hand_over(process, taken.to_hand_over);
    // Once the server has them, nothing more arrives here for them; this process may be about to end.
    if is_left && process.control.is_answered() {
        process.lock().take_in_all(clock::now());
    }
}

/// The program is about to bind the port: it ceases to be under lease.
pub(crate) fn give_up_lease(process: &Process, port: u16) {
    let ports = process.lock().leases.take_port(port);
    for port in &ports {
        register_all(process, *port);
    }
    return_ports(process, ports);
}

/// Registers connections that are old enough, hands over closed ones that do not end, and returns ports that nobody uses.
/// Called by the background thread.
pub(crate) fn attend(process: &Process) {
    let now = clock::now();
    let mut core = process.lock();
    if core.next_registration().is_none_or(|due| due > now) {
        return;
    }
    let taken = core.take_due_connections(now);
    let ports = core.take_unused_ports(now);
    drop(core);
    for socket in &taken.to_register {
        // If it fails, it is attempted again.
        let _ = register(process, socket);
    }
    hand_over(process, taken.to_hand_over);
    return_ports(process, ports);
}

/// Ends leases. A lost server has none.
fn return_ports(process: &Process, ports: Vec<SessionId>) {
    if !ports.is_empty() {
        let _ = process
            .control
            .tell(RequestBody::ReturnPorts { ports }, &[]);
    }
}

/// The server finishes closed connections; without one they stay here.
fn hand_over(process: &Process, closed: Vec<Leaving>) {
    let count = closed.len();
    for leaving in closed {
        let port = leaving.port;
        let request = |capsule| RequestBody::ReturnClosed { port, capsule };
        if tell_of(process, &leaving.session, request) {
            process.lock().stack.remove(leaving.slot);
        } else {
            process.lock().keep_leaving(clock::now(), leaving);
            if let Some(process) = Process::running() {
                process.note_unadopted();
            }
        }
    }
    note_handed_over(process, count);
}

/// Sends a connection that the server does not know. Returns false if that fails.
pub(crate) fn tell_of(
    process: &Process,
    session: &TcpSession,
    request: impl FnOnce(Blob) -> RequestBody,
) -> bool {
    let Ok((capsule, memfd)) = shm::pack(session.to_capsule()) else {
        return false;
    };
    let fds: Vec<_> = memfd.iter().map(AsFd::as_fd).collect();
    process.control.tell(request(capsule), &fds).is_ok()
}

/// Passes on what has come for connections that have left, now that the server has been told of them.
pub(crate) fn note_handed_over(process: &Process, count: usize) {
    if count > 0 {
        process.lock().note_handed_over(count);
    }
}

/// A request is about to name the socket of a descriptor: the server must know its connection, or all those of the
/// listener.
pub(crate) fn register_at(fd: RawFd) {
    let (Some(process), Some(socket)) = (Process::running(), table::socket(fd)) else {
        return;
    };
    if socket.phase() == SocketPhase::Listening {
        let listener = socket.setup().session;
        listener.inspect(|listener| register_all(process, *listener));
    } else {
        // Without its session the request is refused.
        let _ = register(process, &socket);
    }
}

/// Takes what a connection that is being closed was to be registered with, after a registration in progress.
pub(crate) fn give_up(socket: &Socket) -> Option<Unregistered> {
    if !socket.is_unregistered() {
        return None;
    }
    socket.setup().unregistered.take()
}
