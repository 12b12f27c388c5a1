//! `listen` and `accept`: passive opens.

use std::net::SocketAddr;
use std::os::fd::{AsFd, IntoRawFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{Caching, DescriptorEvent, ReplyBody, RequestBody, SessionRef};
use portolan_sys::unix::{self, PairKind, ReceiveError};
use portolan_sys::wait::pollfd;
use portolan_sys::{descriptor, wait};
use portolan_types::{Instant, Protocol, SessionId};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};

use super::asking::denial;
use super::attach::notice_listening;
use super::bind::bind_implicitly;
use super::find::find;
use super::watching::Watching;
use crate::migration::active_open::complete_connect;
use crate::migration::arrival::{fetch, install_fetched};
use crate::migration::delegate::ListenerSlot;
use crate::migration::fallback::{accept_kernel, hand_to_kernel_epolls, wake_sleepers};
use crate::migration::{delegate, reopen};
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::{Absent, Process};
use crate::socket::near_end::{enter, replace_fds};
use crate::socket::{Setup, Socket, SocketPhase, SocketState};
use crate::threads::sleep::{Sleep, Woken, deadline_after, outside, restarts};
use crate::threads::start::start;
use crate::threads::successor;

/// Bytes of the longest message that a listener's descriptor carries.
const ACCEPT_MESSAGE: usize = 4096;

pub fn listen(fd: RawFd, backlog: i32) -> Outcome<()> {
    let (socket, process) = find(fd)?;
    if socket.protocol != Protocol::Tcp {
        return Err(Errno::OPNOTSUPP.into());
    }
    complete_connect(process, fd, &socket);
    // As on Linux, a negative backlog means the largest.
    let backlog = u32::try_from(backlog).unwrap_or(u32::MAX);
    let session = socket.setup().session;
    match (socket.phase(), session) {
        (SocketPhase::Idle, _) => {
            // An ephemeral port, unless it has one.
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
        (SocketPhase::Relayed, _) => Err(CallError::NotOurs),
        _ => Err(Errno::INVAL.into()),
    }
}

/// Listens with another backlog, or other options.
pub(super) fn listen_anew(
    process: &'static Process,
    socket: &Socket,
    session: SessionId,
    backlog: u32,
) -> Outcome<()> {
    let place = ListenerSlot::of(process, session);
    let request = delegate::request(process, socket, SessionRef::Known(session), backlog, &place);
    match process.control.call(request, &[]) {
        Ok((ReplyBody::Listening { rules, .. }, _)) => {
            delegate::heed(process, socket, (session, backlog), (place, None), rules);
            Ok(())
        }
        other => Err(refusal(other)),
    }
}

/// A listener's descriptor is one end of a message pair: each accepted session arrives as one
/// message, so that any number of processes can share the queue. A bound socket's descriptor is one
/// already. A process that performs the handshakes itself keeps the far end, too.
fn become_listener(process: &'static Process, socket: &Arc<Socket>, backlog: u32) -> Outcome<()> {
    let mut setup = socket.setup();
    let session = setup.session.map_or(SessionRef::New, SessionRef::Known);
    let place = ListenerSlot::new(process);
    let request = delegate::request(process, socket, session, backlog, &place);
    let pair = if setup.carries_messages {
        None
    } else {
        Some(process.control.replacing_pair(PairKind::SeqPacket)?)
    };
    let ends = pair.as_ref().map(|(near, far)| [far.as_fd(), near.as_fd()]);
    let ends = ends.as_ref().map_or(&[][..], |ends| &ends[..]);
    match process.control.call(request, ends) {
        Ok((
            ReplyBody::Listening {
                session,
                local,
                rules,
            },
            mut fds,
        )) => {
            setup.session = Some(session);
            setup.incarnation = process.incarnation();
            setup.set_local(local);
            setup.backlog = backlog;
            setup.carries_messages = true;
            if let Some((near, _)) = &pair {
                replace_fds(socket, near)?;
            }
            socket.become_unless_closed(SocketState::Listening);
            let far = pair.map(|(_, far)| far).or_else(|| fds.pop());
            delegate::heed(process, socket, (session, backlog), (place, far), rules);
            reopen::fetch_token(process, &mut setup);
            drop(setup);
            hand_to_kernel_epolls(socket);
            Ok(())
        }
        other => Err(denial(socket, &setup, other)),
    }
}

pub fn accept(fd: RawFd, flags: i32) -> Outcome<(RawFd, SocketAddr)> {
    let listener = crate::socket::table::socket(fd).ok_or(CallError::NotOurs)?;
    if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        return Err(Errno::INVAL.into());
    }
    if listener.protocol != Protocol::Tcp {
        return Err(Errno::OPNOTSUPP.into());
    }
    let deadline = deadline_after(listener.options().receive_timeout());
    let mut has_waited = false;
    loop {
        if listener.phase() == SocketPhase::Relayed {
            return Err(CallError::NotOurs);
        }
        match delegate::accept_at_hand(&listener, flags) {
            Ok(Some(accepted)) => return Ok(accepted),
            // Without a server it waits, and the rest may be the kernel's.
            Ok(None) | Err(CallError::Errno(Errno::NETDOWN)) => {}
            Err(stop) => return Err(stop),
        }
        if listener.phase() == SocketPhase::Listening && listener.stands_in() {
            match accept_from_kernel(fd, &listener, flags)? {
                Some(accepted) => return Ok(accepted),
                None if listener.is_nonblocking() => return Err(Errno::AGAIN.into()),
                None => {}
            }
            wait_for_connection(fd, &listener, deadline)?;
            has_waited = true;
            continue;
        }
        notice_listening(fd, &listener);
        if listener.phase() != SocketPhase::Listening {
            return Err(Errno::INVAL.into());
        }
        match try_accept(fd, &listener, flags)? {
            Next::Connection(accepted) => return Ok(accepted),
            Next::Nobody if listener.is_nonblocking() => return Err(Errno::AGAIN.into()),
            Next::Nobody => {}
            Next::HungUp => {
                outlive_server(&listener)?;
                let was_told = !has_waited && listener.announces_connections();
                if was_told && !listener.is_nonblocking() {
                    return Err(Errno::CONNABORTED.into());
                }
                continue;
            }
        }
        wait_for_connection(fd, &listener, deadline)?;
        has_waited = true;
    }
}

/// Returns the next connection that the kernel has accepted for a listener without a server.
fn accept_from_kernel(
    fd: RawFd,
    listener: &Arc<Socket>,
    flags: i32,
) -> Outcome<Option<(RawFd, SocketAddr)>> {
    let mut polled = [pollfd(fd, libc::POLLIN)];
    if wait::ppoll(&mut polled, Some(Instant::ZERO), None)? == 0 {
        return Ok(None);
    }
    match acceptfrom_with(descriptor::borrow(fd)?, SocketFlags::CLOEXEC) {
        Ok((connection, remote)) => {
            let remote = remote.and_then(|remote| SocketAddr::try_from(remote).ok());
            let remote = remote.ok_or(Errno::CONNABORTED)?;
            Ok(Some((accept_kernel(connection, flags)?, remote)))
        }
        // Lost the race to another thread or process.
        Err(Errno::AGAIN | Errno::CONNABORTED) => Ok(None),
        Err(Errno::INVAL) => stop_standing_in(listener).map(|()| None),
        Err(errno) => Err(errno.into()),
    }
}

fn wait_for_connection(
    fd: RawFd,
    listener: &Arc<Socket>,
    deadline: Option<Instant>,
) -> Outcome<()> {
    let mut kernel = vec![pollfd(fd, libc::POLLIN)];
    kernel.extend(listener.own_near().map(|near| pollfd(near, libc::POLLIN)));
    let Some(process) = Process::running() else {
        // Without a server only connections through the kernel's stack arrive.
        return match outside(|| wait::ppoll(&mut kernel, deadline, None)) {
            Ok(0) => Err(Errno::AGAIN.into()),
            Err(Errno::INTR) if restarts(deadline) => Ok(()),
            Err(errno) => Err(errno.into()),
            Ok(_) => Ok(()),
        };
    };
    let session = listener.setup().session;
    let sleep = Sleep {
        kernel: &mut kernel,
        accepts: session,
        ..Sleep::until(deadline)
    };
    let _watching = Watching::new(vec![listener]);
    let woken = process.wait(sleep, |core, _| {
        let has_some = || session.is_some_and(|id| core.delegations.has_at_hand(id));
        (listener.phase() != SocketPhase::Listening || has_some()).then_some(())
    });
    match woken {
        Ok(Woken::TimedOut) => Err(Errno::AGAIN.into()),
        Err(Errno::INTR) if restarts(deadline) => Ok(()),
        Err(errno) => Err(errno.into()),
        Ok(Woken::Ready(()) | Woken::Kernel) => Ok(()),
    }
}

/// The next event of the listener's descriptor.
enum Next {
    Connection((RawFd, SocketAddr)),
    Nobody,
    /// No more connections will arrive.
    HungUp,
}

/// Accepts the next session. Sessions that have ended in the meantime are skipped.
fn try_accept(fd: RawFd, listener: &Arc<Socket>, flags: i32) -> Outcome<Next> {
    // A forked worker registers with its first accept.
    let process = match start() {
        Ok(process) => process,
        Err(_) => match delegate_of(listener) {
            Some(process) => process,
            None => return next_without_server(fd, listener),
        },
    };
    match accept_from(process, fd, listener, flags) {
        // The server went away during the request.
        Err(CallError::Errno(Errno::NETDOWN)) if process.control.is_lost() => Ok(Next::HungUp),
        next => next,
    }
}

/// Returns this process if it alone performs the handshakes of the listener, with or without a server.
fn delegate_of(listener: &Socket) -> Option<&'static Process> {
    let id = listener.setup().session?;
    Process::running().filter(|process| process.lock().delegations.is_sole(id))
}

fn next_without_server(fd: RawFd, listener: &Socket) -> Outcome<Next> {
    if is_silent(&listener.setup()) {
        return Ok(Next::Nobody);
    }
    let mut near = [pollfd(fd, 0)];
    wait::ppoll(&mut near, Some(Instant::ZERO), None)?;
    let is_lost = Process::running().is_some() || near[0].revents & libc::POLLHUP != 0;
    if is_lost {
        Ok(Next::HungUp)
    } else {
        // The server does not admit this process.
        Err(Errno::NETDOWN.into())
    }
}

/// Has a listener's descriptor been replaced by one that stays silent?
fn is_silent(setup: &Setup) -> bool {
    setup.silent_far.is_some()
}

fn accept_from(
    process: &'static Process,
    fd: RawFd,
    listener: &Arc<Socket>,
    flags: i32,
) -> Outcome<Next> {
    let near = descriptor::borrow(fd)?;
    let mut buffer = [0; ACCEPT_MESSAGE];
    loop {
        // As on Linux the number is checked first: a descriptor that arrives without a free number is lost.
        descriptor::close(rustix::io::fcntl_dupfd_cloexec(near, 0)?.into_raw_fd());
        let received = match unix::receive(near, &mut buffer) {
            Ok(received) => received,
            Err(ReceiveError::Blocked) => return Ok(Next::Nobody),
            // This process has inherited the listener of a server before the current one.
            Err(ReceiveError::Closed)
                if !process.control.is_lost() && reopen::is_of_before(process, listener) =>
            {
                reopen::open_listener(process, listener)?;
                return Ok(Next::Nobody);
            }
            // A server that was killed closes its descriptors one after the other, which may take seconds; one that lives
            // answers.
            Err(ReceiveError::Closed) if !process.control.is_answered() => return Ok(Next::HungUp),
            // Another process has shut the listener down.
            Err(ReceiveError::Closed) => return Err(Errno::INVAL.into()),
            Err(ReceiveError::Truncated) => return Err(Errno::PROTO.into()),
            Err(ReceiveError::Failed(errno)) => return Err(errno.into()),
        };
        if received.is_short {
            // Another thread took the number first.
            return Err(Errno::MFILE.into());
        }
        let event = portolan_proto::decode(&buffer[..received.length]);
        if let Ok(DescriptorEvent::AcceptedHere) = event {
            match delegate::accept(process, listener, flags)? {
                Some(accepted) => return Ok(Next::Connection(accepted)),
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
                    relays_writes: caching == Caching::WithFirstUse,
                    ..Setup::default()
                };
                let taken = match caching {
                    // Without room for the session's descriptors, it is fetched by its first use.
                    Caching::WithAccept if process.control.has_room() => {
                        cache(process, listener, session, setup)
                    }
                    Caching::WithAccept | Caching::WithFirstUse => leave(process, session)
                        .map(|()| Arc::new(Socket::accepted(listener, setup))),
                };
                match taken {
                    Ok(socket) => {
                        let fd = enter(descriptor, Arc::clone(&socket), flags)?;
                        delegate::note_accept(process, listener);
                        return Ok(Next::Connection((fd, listener.shown(remote))));
                    }
                    Err(CallError::Errno(Errno::CONNABORTED | Errno::NOENT)) => {}
                    Err(stop) => return Err(stop),
                }
            }
            Ok(DescriptorEvent::AcceptedKernel { remote }) => {
                let fd = accept_kernel(descriptor, flags)?;
                return Ok(Next::Connection((fd, listener.shown(remote))));
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// The descriptor of a listener hangs up. Returns whether it may be another descriptor by now.
pub(super) fn outlive_hang_up(listener: &Arc<Socket>) -> Outcome<bool> {
    let Some(process) = Process::running().filter(|_| listener.phase() == SocketPhase::Listening)
    else {
        return Ok(false);
    };
    // A server that is ending has not hung up everywhere yet: this waits until it has.
    process.control.is_answered();
    if listener.stands_in() {
        stop_standing_in(listener)?;
    } else {
        outlive_server(listener)?;
    }
    Ok(true)
}

/// Another thread or process has stopped listening by the kernel socket, because there is a server.
fn stop_standing_in(listener: &Arc<Socket>) -> Outcome<()> {
    // Waits while a thread opens the listener again.
    let mut setup = listener.setup();
    if listener.stands_in() {
        reopen::fall_silent(listener, &mut setup)?;
    }
    drop(setup);
    successor::watch();
    Ok(())
}

/// The server is gone, and the listener's queue with it: the kernel listens from now on, if allowed and
/// possible. Otherwise no connection arrives before there is another server, and the descriptor stays silent.
fn outlive_server(listener: &Arc<Socket>) -> Outcome<()> {
    let mut setup = listener.setup();
    let process = Process::running();
    // The next server may have it already.
    let listens = process.is_some_and(|process| reopen::is_open(process, &setup));
    if listener.phase() != SocketPhase::Listening || listener.stands_in() || listens {
        // Another thread was faster.
        return Ok(());
    }
    successor::watch();
    if let (Some(process), Some(session)) = (process, setup.session)
        && process.lock().delegations.is_sole(session)
    {
        return Ok(());
    }
    let may_be_kernels = matches!(start(), Err(Absent::UseKernel));
    if may_be_kernels && reopen::stand_in(listener, &mut setup).is_ok() {
        drop(setup);
        wake_sleepers(listener);
        return Ok(());
    }
    // Other holders of the old descriptor detect it by themselves.
    if !is_silent(&setup) {
        reopen::fall_silent(listener, &mut setup)?;
        if !may_be_kernels && successor::may_peers_wait() {
            // Without a token they are refused.
            let _ = reopen::have_peers_wait(&setup);
        }
    }
    Ok(())
}

/// Leaves an accepted session with the server until its first use.
fn leave(process: &Process, session: SessionId) -> Outcome<()> {
    let accepted = RequestBody::Accepted { session };
    Ok(process.control.tell(accepted, &[])?)
}

/// Fetches an accepted session from the server.
fn cache(
    process: &'static Process,
    listener: &Socket,
    session: SessionId,
    setup: Setup,
) -> Outcome<Arc<Socket>> {
    // A session that was never accepted has no other user: it is not relayed.
    let fetched = fetch(process, session, &[])?.ok_or(Errno::PROTO)?;
    let socket = Arc::new(Socket::accepted(listener, setup));
    install_fetched(process, &socket, fetched);
    Ok(socket)
}
