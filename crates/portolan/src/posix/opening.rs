//! `bind`, `connect`, `listen`, `accept`: the calls that go to the server.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use portolan_proto::MAX_MESSAGE;
use portolan_proto::control::{DescriptorEvent, ReplyBody, RequestBody, SessionRef};
use portolan_stack::{Session, TcpSession, UdpSession};
use portolan_sys::unix::{self, PairKind, ReceiveError};
use portolan_sys::{clock, descriptor};
use portolan_tcp::Events;
use portolan_types::{Generation, Protocol, SessionId, Slot};
use rustix::io::Errno;

use super::fallback::fall_back;
use super::lifecycle::{dissolve, enter, put_under_all};
use super::{Answer, Stop, Watching, deadline_after, find, restarts};
use crate::control::{self, Lost};
use crate::process::{Absent, Process};
use crate::socket::{Phase, Setup, Socket};
use crate::wait::{Sleep, Woken, pollfd};

/// Default receive buffer of a UDP socket (Linux: `net.core.rmem_default`).
const UDP_RECEIVE_BUFFER: usize = 212_992;

/// Octets of the longest message a listener's descriptor carries.
const ACCEPT_MESSAGE: usize = 4096;

impl From<Lost> for Stop {
    /// What calls report once the server has gone.
    fn from(_: Lost) -> Stop {
        Stop::Failed(Errno::NETDOWN)
    }
}

/// How a request names the socket's session, and the descriptors that come with a new one.
fn introduce<'a>(
    setup: &'a Setup,
    near: BorrowedFd<'a>,
) -> Result<(SessionRef, Vec<BorrowedFd<'a>>), Errno> {
    match (setup.session, &setup.far) {
        (Some(session), _) => Ok((SessionRef::Known(session), Vec::new())),
        (None, Some(far)) => Ok((SessionRef::New, vec![far.as_fd(), near])),
        (None, None) => Err(Errno::INVAL),
    }
}

impl Setup {
    /// The server knows the session now, and holds the far end.
    fn opened(&mut self, session: SessionId) {
        self.session = Some(session);
        self.far = None;
    }
}

pub fn bind(fd: RawFd, address: SocketAddr) -> Answer<()> {
    fn take(fd: RawFd, address: SocketAddr) -> Result<(), Stop> {
        let (socket, process) = find(fd)?;
        let local = socket.given(address)?;
        bind_as_asked(process, fd, &socket, local)
    }
    take(fd, address).into()
}

/// Binds to what the application chose.
pub(super) fn bind_as_asked(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    local: SocketAddr,
) -> Result<(), Stop> {
    bind_session(process, fd, socket, local)?;
    socket.setup().is_bound = true;
    Ok(())
}

fn bind_session(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    local: SocketAddr,
) -> Result<(), Stop> {
    let mut setup = socket.setup();
    if socket.phase() != Phase::Idle || setup.local.is_some() {
        return Err(if socket.phase() == Phase::Relayed {
            Stop::NotOurs
        } else {
            Errno::INVAL.into()
        });
    }
    let (reuse, v6_only) = {
        let options = socket.options();
        (options.reuse(), options.v6_only())
    };
    let slot = process.lock().stack.reserve();
    let (session, fds) = introduce(&setup, descriptor::borrow(fd)?)?;
    let protocol = socket.protocol;
    let request = RequestBody::Bind {
        session,
        protocol,
        local,
        reuse,
        v6_only,
        slot,
    };
    let answer = process.control.call(request, &fds);
    drop(fds);
    let bound = match answer {
        Ok((
            ReplyBody::Bound {
                session,
                local,
                generation,
            },
            _,
        )) => {
            setup.opened(session);
            setup.local = Some(local);
            if protocol == Protocol::Udp {
                let udp = UdpSession::new(session, local, None, generation, UDP_RECEIVE_BUFFER);
                install(process, socket, slot, Session::Udp(udp));
                return Ok(());
            }
            Ok(())
        }
        Ok((ReplyBody::UseKernel { .. }, fds)) => {
            Err(fall_back(socket, &setup, fds.into_iter().next()))
        }
        other => Err(denial(socket, &setup, other)),
    };
    process.lock().stack.remove(slot);
    bound
}

/// An ephemeral port for a socket that sends before it was bound.
pub(super) fn bind_implicitly(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
) -> Result<(), Stop> {
    match bind_session(process, fd, socket, socket.unspecified()) {
        // Another thread was faster.
        Err(Stop::Failed(Errno::INVAL)) if socket.phase() == Phase::Cached => Ok(()),
        result => result,
    }
}

/// Puts a session at its slot and makes the socket its face.
fn install(process: &'static Process, socket: &Arc<Socket>, slot: Slot, mut session: Session) {
    socket.options().apply(&mut session);
    let mut core = process.lock();
    let now = clock::now();
    core.stack.insert_at(now, slot, session);
    core.attach(slot, Arc::clone(socket));
    socket.cache_at(slot);
    core.attend(now);
    socket.notify(Events::CONNECTED | Events::WRITABLE | Events::READABLE);
    drop(core);
    process.ensure_helper();
}

/// What becomes of a call on a socket without a session. If the server has gone, the socket is the
/// kernel's.
fn denial(
    socket: &Arc<Socket>,
    setup: &Setup,
    answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>,
) -> Stop {
    match (answer, Process::start()) {
        (Err(Lost), Err(Absent::UseKernel)) => fall_back(socket, setup, None),
        (answer, _) => refusal(answer),
    }
}

fn refusal(answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>) -> Stop {
    match answer {
        Ok((ReplyBody::Error { errno }, _)) => Errno::from_raw_os_error(errno).into(),
        Ok(_) => Errno::PROTO.into(),
        Err(lost) => lost.into(),
    }
}

pub fn connect(fd: RawFd, address: Option<SocketAddr>) -> Answer<()> {
    fn start(fd: RawFd, address: Option<SocketAddr>) -> Result<(), Stop> {
        let (socket, process) = find(fd)?;
        complete_connect(process, fd, &socket);
        match (socket.protocol, address) {
            (Protocol::Udp, Some(address)) => {
                connect_udp(process, fd, &socket, socket.given(address)?)
            }
            (Protocol::Udp, None) => disconnect_udp(process, fd, &socket),
            (Protocol::Tcp, Some(address)) => {
                connect_tcp(process, fd, &socket, socket.given(address)?)
            }
            (Protocol::Tcp, None) => disconnect_tcp(process, fd, &socket),
        }
    }
    start(fd, address).into()
}

fn connect_udp(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    remote: SocketAddr,
) -> Result<(), Stop> {
    if socket.phase() == Phase::Relayed {
        return Err(Stop::NotOurs);
    }
    let mut setup = socket.setup();
    let has_slot = socket.phase() == Phase::Cached;
    let slot = if has_slot {
        socket.slot()
    } else {
        process.lock().stack.reserve()
    };
    let (session, fds) = introduce(&setup, descriptor::borrow(fd)?)?;
    let receive_buffer = None;
    let protocol = Protocol::Udp;
    let request = RequestBody::Connect {
        session,
        protocol,
        remote,
        slot,
        receive_buffer,
    };
    let answer = process.control.call(request, &fds);
    drop(fds);
    let failure = match answer {
        Ok((
            ReplyBody::Connected {
                session,
                local,
                generation,
            },
            _,
        )) => {
            setup.opened(session);
            setup.local = Some(local);
            setup.remote = Some(remote);
            if has_slot {
                retarget(process, slot, local, Some(remote), generation);
            } else {
                let udp =
                    UdpSession::new(session, local, Some(remote), generation, UDP_RECEIVE_BUFFER);
                install(process, socket, slot, Session::Udp(udp));
            }
            return Ok(());
        }
        Ok((ReplyBody::UseKernel { .. }, fds)) => fall_back(socket, &setup, fds.into_iter().next()),
        other => denial(socket, &setup, other),
    };
    if !has_slot || failure == Stop::NotOurs {
        process.lock().stack.remove(slot);
    }
    Err(failure)
}

fn retarget(
    process: &Process,
    slot: Slot,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    generation: Generation,
) {
    if let Some(session) = process.lock().stack.udp(slot) {
        session.local = local;
        session.remote = remote;
        session.generation = generation;
        if let Some(remote) = remote {
            session.queue.retain(|datagram| datagram.from == remote);
        }
    }
}

fn disconnect_udp(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Result<(), Stop> {
    let mut setup = socket.setup();
    let (Phase::Cached, Some(session)) = (socket.phase(), setup.session) else {
        return Ok(());
    };
    if !setup.is_bound {
        // Linux gives the port up too.
        drop(setup);
        return dissolve(process, fd, socket);
    }
    let slot = socket.slot();
    match process
        .control
        .call(RequestBody::Disconnect { session, slot }, &[])
    {
        Ok((
            ReplyBody::Bound {
                local, generation, ..
            },
            _,
        )) => {
            setup.local = Some(local);
            setup.remote = None;
            retarget(process, slot, local, None, generation);
            Ok(())
        }
        other => Err(refusal(other)),
    }
}

fn disconnect_tcp(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Result<(), Stop> {
    socket.take_news();
    match socket.phase() {
        Phase::Idle => Ok(()),
        Phase::Relayed => Err(Stop::NotOurs),
        Phase::Connecting | Phase::Cached | Phase::Listening | Phase::Closed => {
            dissolve(process, fd, socket)
        }
    }
}

fn connect_tcp(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    remote: SocketAddr,
) -> Result<(), Stop> {
    match socket.phase() {
        // The open that an earlier call began has ended: this call tells how (connect(2)).
        Phase::Idle if socket.take_news() => {
            let error = socket.take_error(None).unwrap_or(Errno::CONNABORTED);
            return Err(error.into());
        }
        Phase::Cached if socket.take_news() => return Ok(()),
        Phase::Idle => start_connect(process, fd, socket, remote)?,
        Phase::Connecting if socket.is_nonblocking() => return Err(Errno::ALREADY.into()),
        Phase::Connecting => {}
        Phase::Cached | Phase::Listening => return Err(Errno::ISCONN.into()),
        Phase::Relayed => return Err(Stop::NotOurs),
        Phase::Closed => return Err(Errno::BADF.into()),
    }
    if socket.is_nonblocking() {
        return Err(Errno::INPROGRESS.into());
    }
    wait_connected(process, fd, socket)
}

fn start_connect(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    remote: SocketAddr,
) -> Result<(), Stop> {
    let mut setup = socket.setup();
    let receive_buffer = socket.options().receive_buffer();
    let slot = process.lock().stack.reserve();
    let (session, fds) = introduce(&setup, descriptor::borrow(fd)?)?;
    let protocol = Protocol::Tcp;
    let request = RequestBody::Connect {
        session,
        protocol,
        remote,
        slot,
        receive_buffer,
    };
    let answer = process.control.call(request, &fds);
    drop(fds);
    let failure = match answer {
        Ok((ReplyBody::Connecting { session, local }, _)) => {
            setup.opened(session);
            setup.local = Some(local);
            setup.remote = Some(remote);
            socket.cache_at(slot);
            socket.set_phase(Phase::Connecting);
            socket.expect_news();
            return Ok(());
        }
        Ok((ReplyBody::UseKernel { .. }, fds)) => fall_back(socket, &setup, fds.into_iter().next()),
        other => denial(socket, &setup, other),
    };
    process.lock().stack.remove(slot);
    Err(failure)
}

fn wait_connected(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Result<(), Stop> {
    let deadline = deadline_after(socket.options().send_timeout());
    let watching = Watching::new(vec![socket])?;
    loop {
        let mut kernel = [pollfd(fd, libc::POLLIN)];
        let sleep = Sleep {
            kernel: &mut kernel,
            deadline,
            mask: None,
        };
        let is_over = || (socket.phase() != Phase::Connecting).then_some(());
        match process.wait(sleep, |_, _| is_over()) {
            Ok(Woken::Ready(())) => break,
            Ok(Woken::Kernel) => complete_connect(process, fd, socket),
            Ok(Woken::TimedOut) => return Err(Errno::INPROGRESS.into()),
            Err(Errno::INTR) if restarts(deadline) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    drop(watching);
    socket.take_news();
    match socket.take_error(None) {
        Some(errno) => Err(errno.into()),
        None if socket.phase() == Phase::Cached => Ok(()),
        None => Err(Errno::CONNABORTED.into()),
    }
}

/// Takes the outcome of an active open from the descriptor, if it has come.
pub(crate) fn complete_connect(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) {
    if socket.phase() != Phase::Connecting {
        return;
    }
    let mut setup = socket.setup();
    if socket.phase() != Phase::Connecting {
        return;
    }
    let Ok(near) = descriptor::borrow(fd) else {
        return;
    };
    let mut buffer = vec![0; MAX_MESSAGE];
    let outcome = match unix::receive(near, &mut buffer) {
        Ok(received) => {
            let mut fds: Vec<OwnedFd> = received.fds.into_iter().collect();
            match portolan_proto::decode(&buffer[..received.length]) {
                Ok(DescriptorEvent::Established {
                    capsule,
                    generation,
                }) => open_capsule(capsule, generation, &mut fds),
                Ok(DescriptorEvent::Failed { errno }) => Err(errno),
                Ok(_) | Err(_) => Err(libc::EPROTO),
            }
        }
        Err(ReceiveError::Blocked) => return,
        Err(_) => Err(libc::ECONNABORTED),
    };
    let slot = socket.slot();
    match outcome {
        Ok(session) => {
            drop(setup);
            install(process, socket, slot, Session::Tcp(Box::new(session)));
        }
        Err(errno) => {
            setup.remote = None;
            socket.set_error(errno);
            socket.set_phase(Phase::Idle);
            let mut core = process.lock();
            core.stack.remove(slot);
            socket.notify(Events::ERROR);
        }
    }
}

/// The server is trusted not to lie, but versions may differ: a bad capsule is a protocol error.
fn open_capsule(
    capsule: portolan_proto::control::Blob,
    generation: Generation,
    fds: &mut Vec<OwnedFd>,
) -> Result<TcpSession, i32> {
    let octets = control::unpack(capsule, fds).ok_or(libc::EPROTO)?;
    let mut session = TcpSession::from_capsule(&octets).map_err(|_| libc::EPROTO)?;
    session.generation = generation;
    Ok(session)
}

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
            (Phase::Idle, _) => become_listener(process, &socket, backlog),
            (Phase::Listening, Some(session)) => {
                let session = SessionRef::Known(session);
                match process
                    .control
                    .call(RequestBody::Listen { session, backlog }, &[])
                {
                    Ok((ReplyBody::Listening { .. }, _)) => Ok(()),
                    other => Err(refusal(other)),
                }
            }
            (Phase::Relayed, _) => Err(Stop::NotOurs),
            _ => Err(Errno::INVAL.into()),
        }
    }
    start(fd, backlog).into()
}

/// A listener's descriptor is one end of a message pair: each accepted session comes as one
/// message, so the kernel lets any number of processes share the queue.
fn become_listener(
    process: &'static Process,
    socket: &Arc<Socket>,
    backlog: u32,
) -> Result<(), Stop> {
    let mut setup = socket.setup();
    let (near, far) = unix::socket_pair(PairKind::SeqPacket)?;
    let session = setup.session.map_or(SessionRef::New, SessionRef::Known);
    let request = RequestBody::Listen { session, backlog };
    match process.control.call(request, &[far.as_fd(), near.as_fd()]) {
        Ok((ReplyBody::Listening { session, local }, _)) => {
            setup.opened(session);
            setup.local = Some(local);
            put_under_all(socket, &near)?;
            socket.set_phase(Phase::Listening);
            drop(setup);
            super::fallback::hand_to_kernel_epolls(socket);
            Ok(())
        }
        other => Err(denial(socket, &setup, other)),
    }
}

pub fn accept(fd: RawFd, flags: i32) -> Answer<(RawFd, SocketAddr)> {
    fn next(fd: RawFd, flags: i32) -> Result<(RawFd, SocketAddr), Stop> {
        let listener = crate::table::socket(fd).ok_or(Stop::NotOurs)?;
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
            if listener.phase() != Phase::Listening {
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
            };
            match process.wait(sleep, |_, _| None::<()>) {
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
        let received = match unix::receive(near, &mut buffer) {
            Ok(received) => received,
            Err(ReceiveError::Blocked) => return Ok(None),
            // The listener was shut down, or the server has gone.
            Err(ReceiveError::Closed) => return Err(Errno::INVAL.into()),
            Err(ReceiveError::Truncated) => return Err(Errno::MFILE.into()),
            Err(ReceiveError::Failed(errno)) => return Err(errno.into()),
        };
        let Some(descriptor) = received.fds.into_iter().next() else {
            continue;
        };
        match portolan_proto::decode(&buffer[..received.length]) {
            Ok(DescriptorEvent::Accepted {
                session,
                local,
                remote,
            }) => {
                let setup = Setup {
                    session: Some(session),
                    local: Some(local),
                    remote: Some(remote),
                    ..Setup::default()
                };
                match cache(process, listener, session, setup) {
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

/// Has the server hand over an accepted session.
fn cache(
    process: &'static Process,
    listener: &Socket,
    session: SessionId,
    setup: Setup,
) -> Result<Arc<Socket>, Stop> {
    let slot = process.lock().stack.reserve();
    let cached = match process
        .control
        .call(RequestBody::Cache { session, slot }, &[])
    {
        Ok((
            ReplyBody::Cached {
                capsule,
                generation,
            },
            mut fds,
        )) => open_capsule(capsule, generation, &mut fds)
            .map_err(|errno| Stop::Failed(Errno::from_raw_os_error(errno))),
        other => Err(refusal(other)),
    };
    match cached {
        Ok(session) => {
            let socket = Arc::new(Socket::accepted(listener, setup, slot));
            install(process, &socket, slot, Session::Tcp(Box::new(session)));
            Ok(socket)
        }
        Err(stop) => {
            process.lock().stack.remove(slot);
            Err(stop)
        }
    }
}
