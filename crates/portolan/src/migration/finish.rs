//! Sessions that their program no longer needs: the server finishes them.

use std::os::fd::AsFd;
use std::sync::Arc;

use portolan_local::Stream;
use portolan_proto::control::{AfterFlush, RequestBody, SocketOptionsBlob};
use portolan_stack::{Session, TcpSession};
use portolan_sys::clock;
use portolan_types::SessionId;

use crate::migration::capsule::OutgoingCapsule;
use crate::process::Process;
use crate::process::control::Lost;
use crate::runtime::NewSession;
use crate::socket::Socket;

/// Closes a session that arrived for a socket after its program had closed it.
pub(crate) fn close_arrival(process: &Process, socket: &Arc<Socket>, arrival: NewSession) {
    let now = clock::now();
    match arrival {
        NewSession::Local(mut arrival) => {
            arrival.end.close(now);
            flush_local(process, arrival.id);
        }
        NewSession::Session(mut session) => {
            if let Session::Tcp(session) = &mut session {
                session.connection.close(now);
            }
            // A lost server has nothing to finish, and this process has sent nothing.
            let _ = hand_in(process, socket, session);
        }
    }
}

/// Has the server finish a session; returns it if there is no server, or one that does not know the session.
pub(crate) fn finish(process: &Process, socket: &Socket, session: Session) -> Result<(), Session> {
    match session {
        Session::Tcp(_) if is_unknown(process, socket) => Err(session),
        session => hand_in(process, socket, session),
    }
}

fn hand_in(process: &Process, socket: &Socket, session: Session) -> Result<(), Session> {
    match session {
        Session::Tcp(mut session) => match flush_to_close(process, &mut session) {
            Ok(()) => Ok(()),
            Err(Lost) => Err(Session::Tcp(session)),
        },
        Session::Udp(session) => {
            socket.datagrams().kernel_socket = None;
            let release = RequestBody::Release {
                session: session.id,
            };
            // The port is free when `close` returns; a lost server has freed it already.
            let _ = process.control.call(release, &[]);
            Ok(())
        }
    }
}

/// Is the connection of an earlier server's time, and not adopted by this one? An adoption in progress is awaited.
fn is_unknown(process: &Process, socket: &Socket) -> bool {
    let is_of_before = || socket.is_unknown_to(process.incarnation());
    is_of_before() && {
        let _adoption = socket.setup();
        is_of_before()
    }
}

/// The state of a local session is where its next holder finds it. A lost server has nothing to finish.
pub(crate) fn flush_local(process: &Process, session: SessionId) {
    let request = RequestBody::Flush {
        session,
        capsule: OutgoingCapsule::empty().capsule,
        then: AfterFlush::Close,
        options_blob: SocketOptionsBlob::default(),
    };
    let _ = process.control.tell(request, &[]);
}

/// Does not wait for the server: its reply would change nothing.
fn flush_to_close(process: &Process, session: &mut TcpSession) -> Result<(), Lost> {
    let Some(OutgoingCapsule { capsule, fds }) = OutgoingCapsule::of(session) else {
        // The server will see the descriptor closed, and reset the connection.
        return Ok(());
    };
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let then = AfterFlush::Close;
    process.control.tell(
        RequestBody::Flush {
            session: session.id,
            capsule,
            then,
            options_blob: SocketOptionsBlob::default(),
        },
        &fds,
    )
}
