//! Descriptors that this process did not open: inherited over `exec`, received from another
//! process, or taken by `pidfd_getfd`. The server knows the session behind each descriptor; the
//! session itself is fetched by the first call that needs it.

use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{Probed, ProbedState, ReplyBody, RequestBody};
use portolan_sys::{descriptor, unix};
use portolan_types::{Protocol, SessionId};

use super::lifecycle::forget;
use crate::descriptors;
use crate::migration::fallback::hand_to_kernel_epolls;
use crate::migration::{is_standard_stream, make_relayed};
use crate::process::Process;
use crate::process::vfork::own_memory;
use crate::socket::options::Options;
use crate::socket::table::{self, File};
use crate::socket::{Family, Setup, Socket, SocketPhase, SocketState, UseHere};
use crate::threads::start::here;

/// Looks for sockets among the descriptors inherited over `exec`.
pub fn attach_inherited() {
    own_memory();
    for fd in descriptor::all_open() {
        attach(fd);
    }
}

/// Registers a newly received descriptor, if it is one of Portolan's sockets.
pub fn attach(fd: RawFd) {
    let Ok(near) = descriptor::borrow(fd) else {
        return;
    };
    if !descriptors::can_hold(fd) || !unix::is_pair_end(near) {
        return;
    }
    // The former file of this number was closed by a call that the library does not see.
    forget(fd);
    let Some(probed) = probe(near) else { return };
    let socket = match known(probed.session) {
        Some(socket) => {
            socket.add_reference();
            socket
        }
        None => Arc::new(attached(near, probed)),
    };
    table::insert(fd, File::Socket(Arc::clone(&socket)));
    if is_standard_stream(fd) {
        make_relayed(fd, &socket, here);
    }
}

pub(super) fn probe(near: BorrowedFd<'_>) -> Option<Probed> {
    match Process::ask(|| RequestBody::Probe, near)? {
        (ReplyBody::Probed(probed), _) => probed,
        _ => None,
    }
}

/// Another process that shares the descriptor may have called `listen` in the meantime.
pub(super) fn notice_listening(fd: RawFd, socket: &Arc<Socket>) {
    if socket.phase() != SocketPhase::Idle || !socket.is_shared() {
        return;
    }
    let mut setup = socket.setup();
    let (Some(session), Ok(near)) = (setup.session, descriptor::borrow(fd)) else {
        return;
    };
    if let Some(Probed {
        session: known,
        standing: ProbedState::Listening { backlog, .. },
        ..
    }) = probe(near)
        && known == session
    {
        setup.backlog = backlog;
        socket.become_unless_closed(SocketState::Listening);
        drop(setup);
        hand_to_kernel_epolls(socket);
    }
}

/// Returns how many connections wait to be accepted from a listener whose queue is at the server.
pub(super) fn waiting_at_server(fd: RawFd) -> Option<u32> {
    match probe(descriptor::borrow(fd).ok()?)?.standing {
        ProbedState::Listening { waiting, .. } => Some(waiting),
        _ => None,
    }
}

/// Called when other processes have or will get the descriptor of a bound socket: they learn from
/// the server which options were set on it.
pub(super) fn describe_to_others(socket: &Socket) {
    let session = socket.setup().session;
    if let (SocketPhase::Idle, Protocol::Tcp) = (socket.phase(), socket.protocol)
        && let (Some(process), Some(session)) = (Process::running(), session)
    {
        let options_blob = socket.options_blob();
        let request = RequestBody::Describe {
            session,
            options_blob,
        };
        // Without a server nobody can learn them.
        let _ = process.control.call(request, &[]);
    }
}

/// Returns the session's socket, if the process has another descriptor of it.
fn known(session: SessionId) -> Option<Arc<Socket>> {
    let mut sockets = table::sockets().into_iter().map(|(_, socket)| socket);
    sockets.find(|socket| socket.setup().session == Some(session))
}

fn attached(near: BorrowedFd<'_>, probed: Probed) -> Socket {
    let by_address = if probed.is_v6 { Family::V6 } else { Family::V4 };
    let protocol = match probed.standing {
        ProbedState::Datagrams { .. } => Protocol::Udp,
        _ => Protocol::Tcp,
    };
    let (family, options) = Options::from_options_blob(&probed.options_blob, protocol)
        .unwrap_or((by_address, Options::default()));
    let mut setup = Setup {
        session: Some(probed.session),
        local: Some(probed.local),
        incarnation: probed.incarnation,
        ..Setup::default()
    };
    let away = SocketState::HeldElsewhere {
        use_here: UseHere::Before,
    };
    let state = match probed.standing {
        ProbedState::Bound => {
            setup.is_bound = true;
            setup.has_chosen_port = true;
            setup.carries_messages = unix::carries_messages(near);
            SocketState::Idle
        }
        ProbedState::Listening { backlog, .. } => {
            setup.is_bound = true;
            setup.has_chosen_port = true;
            setup.backlog = backlog;
            SocketState::Listening
        }
        ProbedState::Connected { remote } => {
            setup.remote = Some(remote);
            away
        }
        ProbedState::Datagrams { remote } => {
            setup.remote = remote;
            away
        }
    };
    let socket = Socket::attached(family, protocol, state, setup, options);
    socket.set_nonblocking(descriptor::is_nonblocking(near.as_fd()).unwrap_or(false));
    socket
}
