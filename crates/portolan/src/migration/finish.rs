//! Sessions that their program no longer needs: the server finishes them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use portolan_local::Stream;
use portolan_proto::control::{AfterFlush, RequestBody, SocketOptionsBlob};
use portolan_stack::{Session, TcpSession};
use portolan_sys::clock;
use portolan_sys::unix::PairKind;
use portolan_types::SessionId;

use crate::migration::capsule::OutgoingCapsule;
use crate::migration::reopen::Found;
use crate::process::Process;
use crate::process::control::Lost;
use crate::runtime::NewSession;
use crate::runtime::orphans::Orphan;
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
        Session::Tcp(session) => hand_in_stream(process, session).map_err(Session::Tcp),
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

fn hand_in_stream(process: &Process, mut session: Box<TcpSession>) -> Result<(), Box<TcpSession>> {
    match flush_to_close(&mut session, |request, fds| {
        // Does not wait for the server: its reply would change nothing.
        process.control.tell(request, fds)
    }) {
        Ok(()) => Ok(()),
        Err(Lost) => Err(session),
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

fn flush_to_close(
    session: &mut TcpSession,
    send: impl FnOnce(RequestBody, &[BorrowedFd<'_>]) -> Result<(), Lost>,
) -> Result<(), Lost> {
    let Some(OutgoingCapsule { capsule, fds }) = OutgoingCapsule::of(session) else {
        // The server will see the descriptor closed, and reset the connection.
        return Ok(());
    };
    let request = RequestBody::Flush {
        session: session.id,
        capsule,
        then: AfterFlush::Close,
        options_blob: SocketOptionsBlob::default(),
    };
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    send(request, &fds)
}

/// Has the server finish what closed sockets have left here while there was none, or under an earlier one. Returns an error
/// if some have to stay.
pub(crate) fn finish_left(process: &Process) -> Result<(), Stay> {
    // Whoever finds none knows that they have left.
    let _turn = process.finishing();
    let orphans = process.lock().take_orphans();
    let mut outcome = Ok(());
    for orphan in orphans {
        outcome = finish_orphan(process, orphan).and(outcome);
    }
    outcome
}

/// The connection is served here as before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stay;

/// As [`finish_left`], when this process ends: waits for the next server if there is none.
pub(crate) fn finish_all_left(process: &'static Process) {
    while finish_left(process).is_err() && process.control.is_lost() && process.await_server() {}
}

/// A connection whose outcome is known is put back, too: it is removed here once its last segments are sent.
fn finish_orphan(process: &Process, orphan: Orphan) -> Result<(), Stay> {
    let adopted = adopt_orphan(process, orphan);
    let Ok(Some(_near)) = adopted else {
        process.lock().put_back(orphan);
        return adopted.map(drop);
    };
    let Some(Session::Tcp(mut session)) = process.lock().stack.take(orphan.slot) else {
        return Ok(());
    };
    // Its near end must not hang up before the server has it.
    let call = |request, fds: &[BorrowedFd<'_>]| process.control.call(request, fds).map(drop);
    match flush_to_close(&mut session, call) {
        Ok(()) => {
            process.lock().stack.remove(orphan.slot);
            Ok(())
        }
        Err(Lost) => {
            let session = Session::Tcp(session);
            process.lock().keep_orphan(clock::now(), orphan, session);
            Err(Stay)
        }
    }
}

/// Returns the near end of the connection's descriptor, or none if the connection has ended.
fn adopt_orphan(process: &Process, orphan: Orphan) -> Result<Option<OwnedFd>, Stay> {
    let slot = orphan.slot;
    let Some(found) = Found::on_network(&mut process.lock(), slot) else {
        return Ok(None);
    };
    let ends = process.control.replacing_pair(PairKind::Stream);
    let ends = ends.map_err(|_| Stay)?;
    let adopted = found.be_adopted(process, (slot, orphan.choices), &ends);
    let Some((session, _)) = adopted.map_err(|_| Stay)? else {
        process.lock().cut_off_one(clock::now(), slot);
        return Ok(None);
    };
    process
        .lock()
        .note_orphan_adopted(clock::now(), slot, session);
    Ok(Some(ends.0))
}
