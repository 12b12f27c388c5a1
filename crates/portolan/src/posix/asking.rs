//! Common parts of calls that go to the server: how to name a socket's session, and what becomes of the socket if the
//! server refuses it.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{ReplyBody, RequestBody, SessionRef};
use portolan_sys::unix::PairKind;
use rustix::io::Errno;

use crate::migration::fallback::{fall_back, leave_session};
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::control::Lost;
use crate::process::{Absent, Process};
use crate::socket::near_end::replace_first_fds;
use crate::socket::{Setup, Socket, SocketPhase};
use crate::threads::start::start;

/// Default receive buffer of a UDP socket (Linux: `net.core.rmem_default`).
pub(super) const UDP_RECEIVE_BUFFER: usize = 212_992;

/// Makes a request about the socket's session. For a session that is new to the server, a pair of that kind is made,
/// whose far end the server keeps, and such a request waits for the next server. If the reply makes it a kernel socket, it
/// is one when this returns.
pub(super) fn ask(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    (setup, kind): (&Setup, PairKind),
    request: impl Fn(SessionRef) -> RequestBody,
) -> Outcome<ReplyBody> {
    let (session, pair) = match setup.session {
        Some(session) => (SessionRef::Known(session), None),
        None => (SessionRef::New, Some(process.control.replacing_pair(kind)?)),
    };
    let ends = pair.as_ref().map(|(near, far)| [far.as_fd(), near.as_fd()]);
    let fds = ends.as_ref().map_or(&[][..], |ends| &ends[..]);
    let mut answer = process.control.call(request(session), fds);
    // The next server does not know a session before it is reopened, which the lock on `setup` prevents.
    while answer.is_err() && pair.is_some() && process.await_server() {
        answer = process.control.call(request(session), fds);
    }
    match answer {
        Ok((ReplyBody::UseKernel { .. }, fds)) => {
            let kernel = match (socket.phase(), setup.session) {
                (SocketPhase::Cached, Some(session)) => {
                    let kernel = leave_session(fd, socket, session);
                    Some(kernel.ok_or(Errno::NETDOWN)?)
                }
                _ => fds.into_iter().next(),
            };
            Err(fall_back(socket, setup, kernel))
        }
        refused @ (Ok((ReplyBody::Error { .. }, _)) | Err(Lost)) => {
            Err(denial(socket, setup, refused))
        }
        // The server does not know it yet.
        Ok((ReplyBody::Deferred, _)) => Ok(ReplyBody::Deferred),
        Ok((reply, _)) => {
            if let Some((near, _)) = &pair {
                replace_first_fds(socket, fd, near)?;
            }
            Ok(reply)
        }
    }
}

/// Returns the error of a call on a socket without a session. If the server is gone, the socket
/// becomes the kernel's.
pub(super) fn denial(
    socket: &Arc<Socket>,
    setup: &Setup,
    answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>,
) -> CallError {
    match (answer, start()) {
        (Err(Lost), Err(Absent::UseKernel)) => fall_back(socket, setup, None),
        (answer, _) => refusal(answer),
    }
}
