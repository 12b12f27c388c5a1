//! `listen` and `accept`: passive opens.

use std::net::SocketAddr;
use std::os::fd::{AsFd, IntoRawFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{Caching, DescriptorEvent, ReplyBody, RequestBody, SessionRef};
use portolan_sys::descriptor;
use portolan_sys::unix::{self, PairKind, ReceiveError};
use portolan_types::{Protocol, SessionId};
use rustix::io::Errno;

use super::asking::{denial, install, refusal};
use super::bind::bind_implicitly;
use super::delegate::{self, ListenerSlot};
use super::lifecycle::{enter, replace_fds};
use super::migrate::fetch;
use super::{Answer, Stop, Watching, deadline_after, find, restarts};
use crate::process::Process;
use crate::socket::{Setup, Socket, SocketPhase};
use crate::wait::{Sleep, Woken, pollfd};

/// Bytes of the longest message a listener's descriptor carries.
const ACCEPT_MESSAGE: usize = 4096;

pub fn listen(fd: RawFd, backlog: i32) -> Answer<()> {
    fn start(fd: RawFd, backlog: i32) -> Result<(), Stop> {
        let (socket, process) = find(fd)?;
        if socket.protocol != Protocol::Tcp {
            return Err(Errno::OPNOTSUPP.into());
        }
        // Linux takes a negative backlog for the largest.
        let backlog = u32::try_from(backlog).unwrap_or(u32::MAX);
        let session = socket.setup().session;
        match (socket.phase(), session) {
            (SocketPhase::Idle, _) => {
                // A port of its family's addresses, unless it has one.
                let has_port = socket.setup().has_port();
                if !has_port {
                    bind_implicitly(process, fd, &socket)?;
                }
                become_listener(process, &socket, backlog)
            }
            (SocketPhase::Listening, Some(session)) => {
                socket.setup().backlog = backlog;
                listen_anew(process, &socket, session, backlog)
            }
            (SocketPhase::Relayed, _) => Err(Stop::NotOurs),
            _ => Err(Errno::INVAL.into()),
        }
    }
    start(fd, backlog).into()
}

/// With another backlog, or other options.
pub(super) fn listen_anew(
    process: &'static Process,
    socket: &Socket,
    session: SessionId,
    backlog: u32,
) -> Result<(), Stop> {
    let place = ListenerSlot::of(process, socket);
    let request = delegate::request(process, socket, SessionRef::Known(session), backlog, &place);
    match process.control.call(request, &[]) {
        Ok((ReplyBody::Listening { rules, .. }, _)) => {
            delegate::heed(process, socket, (session, backlog), (place, None), rules);
            Ok(())
        }
        other => Err(refusal(other)),
    }
}

/// A listener's descriptor is one end of a message pair: each accepted session comes as one
/// message, so the kernel lets any number of processes share the queue.
fn become_listener(
    process: &'static Process,
    socket: &Arc<Socket>,
    backlog: u32,
) -> Result<(), Stop> {
    let mut setup = socket.setup();
    let (near, far) = process.control.brief_pair(PairKind::SeqPacket)?;
    let session = setup.session.map_or(SessionRef::New, SessionRef::Known);
    let place = ListenerSlot::new(process);
    let request = delegate::request(process, socket, session, backlog, &place);
    match process.control.call(request, &[far.as_fd(), near.as_fd()]) {
        Ok((
            ReplyBody::Listening {
                session,
                local,
                rules,
            },
            _,
        )) => {
            setup.opened(session);
            setup.set_local(local);
            setup.backlog = backlog;
            replace_fds(socket, &near)?;
            socket.set_phase(SocketPhase::Listening);
            delegate::heed(
                process,
                socket,
                (session, backlog),
                (place, Some(far)),
                rules,
            );
            drop(setup);
            super::fallback::hand_to_kernel_epolls(socket);
            Ok(())
        }
        other => Err(denial(socket, &setup, other)),
    }
}

pub fn accept(fd: RawFd, flags: i32) -> Answer<(RawFd, SocketAddr)> {
    fn next(fd: RawFd, flags: i32) -> Result<(RawFd, SocketAddr), Stop> {
        let listener = crate::socket::table::socket(fd).ok_or(Stop::NotOurs)?;
        if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
            return Err(Errno::INVAL.into());
        }
        if listener.protocol != Protocol::Tcp {
            return Err(Errno::OPNOTSUPP.into());
        }
        // A forked worker registers with its first accept.
        let process = Process::start().map_err(|_| Errno::NETDOWN)?;
        let deadline = deadline_after(listener.options().receive_timeout());
        loop {
            if listener.phase() != SocketPhase::Listening {
                return Err(Errno::INVAL.into());
            }
            if let Some(accepted) = try_accept(process, fd, &listener, flags)? {
                return Ok(accepted);
            }
            if listener.is_nonblocking() {
                return Err(Errno::AGAIN.into());
            }
            let mut kernel = [pollfd(fd, libc::POLLIN)];
            let sleep = Sleep {
                kernel: &mut kernel,
                deadline,
                mask: None,
                begins_again: None,
            };
            let _watching = Watching::new(vec![&listener])?;
            let is_over = || (listener.phase() != SocketPhase::Listening).then_some(());
            match process.wait(sleep, |_, _| is_over()) {
                Ok(Woken::TimedOut) => return Err(Errno::AGAIN.into()),
                Err(Errno::INTR) if restarts(deadline) => {}
                Err(errno) => return Err(errno.into()),
                Ok(Woken::Ready(()) | Woken::Kernel) => {}
            }
        }
    }
    next(fd, flags).into()
}

/// `None` if nobody waits to be accepted. Sessions that ended meanwhile are passed over.
fn try_accept(
    process: &'static Process,
    fd: RawFd,
    listener: &Arc<Socket>,
    flags: i32,
) -> Result<Option<(RawFd, SocketAddr)>, Stop> {
    let near = descriptor::borrow(fd)?;
    let mut buffer = [0; ACCEPT_MESSAGE];
    loop {
        // As on Linux the number comes first: what a message brings that has none is lost.
        descriptor::close(rustix::io::fcntl_dupfd_cloexec(near, 0)?.into_raw_fd());
        let received = match unix::receive(near, &mut buffer) {
            Ok(received) => received,
            Err(ReceiveError::Blocked) => return Ok(None),
            // The listener was shut down, or the server has gone.
            Err(ReceiveError::Closed) => return Err(Errno::INVAL.into()),
            Err(ReceiveError::Truncated) => return Err(Errno::PROTO.into()),
            Err(ReceiveError::Failed(errno)) => return Err(errno.into()),
        };
        if received.is_short {
            // Another thread was faster.
            return Err(Errno::MFILE.into());
        }
        let event = portolan_proto::decode(&buffer[..received.length]);
        if let Ok(DescriptorEvent::AcceptedHere) = event {
            match delegate::accept(process, listener, flags)? {
                Some(accepted) => return Ok(Some(accepted)),
                None => continue,
            }
        }
        let Some(descriptor) = received.fds.into_iter().next() else {
            continue;
        };
        match event {
            Ok(DescriptorEvent::Accepted {
                session,
                local,
                remote,
                caching,
            }) => {
                let setup = Setup {
                    session: Some(session),
                    local: Some(local),
                    remote: Some(remote),
                    ..Setup::default()
                };
                let taken = match caching {
                    // Without room for what comes with it, its first use may have some.
                    Caching::WithAccept if process.control.has_room() => {
                        cache(process, listener, session, setup)
                    }
                    Caching::WithAccept | Caching::WithFirstUse => leave(process, session)
                        .map(|()| Arc::new(Socket::accepted(listener, setup))),
                };
                match taken {
                    Ok(socket) => {
                        let fd = enter(descriptor, Arc::clone(&socket), flags)?;
                        return Ok(Some((fd, listener.shown(remote))));
                    }
                    Err(Stop::Failed(Errno::CONNABORTED | Errno::NOENT)) => {}
                    Err(stop) => return Err(stop),
                }
            }
            Ok(DescriptorEvent::AcceptedKernel { remote }) => {
                let fd = super::fallback::accept_kernel(descriptor, flags)?;
                return Ok(Some((fd, listener.shown(remote))));
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// Leaves an accepted session with the server until somebody uses it.
fn leave(process: &Process, session: SessionId) -> Result<(), Stop> {
    let accepted = RequestBody::Accepted { session };
    Ok(process.control.tell(accepted, &[])?)
}

/// Has the server hand over an accepted session.
fn cache(
    process: &'static Process,
    listener: &Socket,
    session: SessionId,
    setup: Setup,
) -> Result<Arc<Socket>, Stop> {
    // Nobody else can have one that was never accepted: it is not relayed.
    let (session, slot, _) = fetch(process, session, &[])?.ok_or(Errno::PROTO)?;
    let socket = Arc::new(Socket::accepted(listener, setup));
    install(process, &socket, slot, session);
    Ok(socket)
}
