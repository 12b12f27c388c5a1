//! Sockets that become the kernel's, and descriptors whose events the kernel reports.

use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use portolan_proto::control::{Blob, ReplyBody, RequestBody};
use portolan_proto::datagram::UnreadDatagram;
use portolan_proto::encode;
use portolan_stack::Datagram;
use portolan_sys::{clock, descriptor, owner, shm};
use portolan_tcp::Events;
use portolan_types::{Protocol, SessionId, Slot};
use rustix::io::Errno;

use crate::descriptors;
use crate::outcome::CallError;
use crate::process::Process;
use crate::socket::near_end::replace_fds;
use crate::socket::table;
use crate::socket::{Family, Setup, Socket, SocketPhase, SocketState, UseHere};
use crate::wait::epoll::Epoll;
use crate::wait::events::OUT;

/// Makes the socket a kernel socket under all its descriptors: `kernel` if the server had one that
/// holds its port, else a new one on the same address. All options are set again. The lock on
/// `setup` keeps other threads out. Returns why the call ends here: `NotOurs` on success.
pub(crate) fn fall_back(socket: &Arc<Socket>, setup: &Setup, kernel: Option<OwnedFd>) -> CallError {
    let became = become_kernel(socket, setup, kernel);
    wake_sleepers(socket);
    match became {
        Ok(()) => CallError::NotOurs,
        Err(errno) => CallError::Errno(errno),
    }
}

/// Makes the socket the kernel's as far as possible: one without a session yet, or a UDP socket,
/// with its port and its unread datagrams.
pub(crate) fn become_kernels(fd: RawFd, socket: &Arc<Socket>) {
    let setup = socket.setup();
    let kernel = match (socket.protocol, socket.phase(), setup.session) {
        (Protocol::Udp, SocketPhase::Cached | SocketPhase::HeldElsewhere, Some(session)) => {
            match share_port(fd, socket, session) {
                Some(kernel) => Some(kernel),
                None => return lose(socket),
            }
        }
        (_, SocketPhase::Idle, None) => None,
        _ => return,
    };
    // If no descriptors are available it stays as it is.
    let _ = become_kernel(socket, &setup, kernel);
    wake_sleepers(socket);
}

/// Wakes threads that wait for events, which the kernel reports from now on.
pub(crate) fn wake_sleepers(socket: &Socket) {
    // They are signalled with the core locked.
    let _core = Process::running().map(Process::lock);
    socket.notify(Events::READABLE | Events::WRITABLE | Events::CLOSED);
}

/// Marks the session as lost, and wakes threads that wait for it.
pub(crate) fn lose(socket: &Arc<Socket>) {
    // Waiters are signalled with the core locked.
    let _core = Process::running().map(Process::lock);
    socket.become_unless_closed(SocketState::Closed);
    socket.notify(Events::CLOSED);
}

/// Called before this process closes a UDP socket that others may share.
pub(crate) fn leave_to_sharers(fd: RawFd, socket: &Socket) {
    let setup = socket.setup();
    if let (Protocol::Udp, SocketPhase::Cached, Some(session)) =
        (socket.protocol, socket.phase(), setup.session)
    {
        drop(share_port(fd, socket, session));
        socket.become_unless_closed(SocketState::Closed);
    }
}

/// Moves a UDP session that is here to the kernel: returns the kernel socket on the same port,
/// which has got the unread datagrams. The lock on `setup` keeps other threads out.
pub(crate) fn leave_session(fd: RawFd, socket: &Socket, session: SessionId) -> Option<OwnedFd> {
    let kernel = share_port(fd, socket, session);
    if kernel.is_none() {
        socket.become_unless_closed(SocketState::Closed);
    }
    kernel
}

/// Returns the kernel socket that holds a UDP session's port, for all processes that share the descriptor.
fn share_port(fd: RawFd, socket: &Socket, session: SessionId) -> Option<OwnedFd> {
    socket.datagrams().kernel_socket = None;
    let near = descriptor::borrow(fd).ok()?;
    let is_v6 = socket.family() == Family::V6;
    let request = |unread| RequestBody::Share {
        session,
        is_v6,
        unread,
    };
    let answer = match (socket.state(), Process::running()) {
        (SocketState::Cached { slot }, Some(process)) => {
            // From now on other calls on it wait for `setup`. The session stays at its slot until it is empty.
            socket.become_unless_closed(SocketState::HeldElsewhere {
                use_here: UseHere::Before,
            });
            let (unread, memory) = pack_unread(take_unread(process, slot));
            let fds: Vec<_> = [near]
                .into_iter()
                .chain(memory.as_ref().map(AsFd::as_fd))
                .collect();
            let answer = process.control.call(request(unread), &fds).ok();
            // Datagrams that arrived before the server had processed the request.
            let late = take_unread(process, slot);
            let mut core = process.lock();
            core.detach(slot);
            core.stack.remove(slot);
            drop(core);
            if answer.is_some() && !late.is_empty() {
                let (unread, memory) = pack_unread(late);
                let fds: Vec<_> = memory.as_ref().map(AsFd::as_fd).into_iter().collect();
                // Without a server there is no socket to take them.
                let _ = process
                    .control
                    .tell(RequestBody::Unread { session, unread }, &fds);
            }
            answer
        }
        _ => Process::ask(|| request(pack_unread(Vec::new()).0), near),
    };
    match answer? {
        (ReplyBody::KernelSocket, fds) => fds.into_iter().next(),
        _ => None,
    }
}

/// Takes the datagrams out of a session, including those still on the ring.
fn take_unread(process: &Process, slot: Slot) -> Vec<UnreadDatagram> {
    let mut core = process.lock();
    core.take_in_all(clock::now());
    let Some(session) = core.stack.udp(slot) else {
        return Vec::new();
    };
    let datagrams = std::iter::from_fn(|| session.receive());
    datagrams.flat_map(single_datagrams).collect()
}

/// Splits a coalesced datagram.
fn single_datagrams(datagram: Datagram) -> Vec<UnreadDatagram> {
    let unread = |payload: &[u8]| UnreadDatagram {
        from: datagram.from,
        to: datagram.to.ip(),
        interface: datagram.interface,
        hops: datagram.ip.ttl,
        traffic_class: datagram.ip.tos,
        payload: payload.to_vec(),
    };
    match usize::from(datagram.segment) {
        0 => vec![unread(&datagram.data)],
        size => datagram.data.chunks(size).map(unread).collect(),
    }
}

/// A list that cannot be packed, for lack of descriptors or memory, is dropped.
fn pack_unread(unread: Vec<UnreadDatagram>) -> (Blob, Option<OwnedFd>) {
    shm::pack(encode(&unread))
        .unwrap_or_else(|_| (Blob::Inline(encode(&Vec::<UnreadDatagram>::new())), None))
}

fn become_kernel(
    socket: &Arc<Socket>,
    setup: &Setup,
    kernel: Option<OwnedFd>,
) -> Result<(), Errno> {
    let is_new = kernel.is_none();
    let kernel = match kernel {
        Some(kernel) => kernel,
        None => new_kernel_socket(socket)?,
    };
    set_options(socket, &kernel);
    if let Some(local) = setup.local.filter(|_| is_new && setup.is_bound) {
        rustix::net::bind(&kernel, &socket.shown(local))?;
    }
    let numbers = table::numbers_of(socket);
    if let Some(number) = numbers.first() {
        owner::inherit_status(*number, &kernel)?;
    }
    // Calls in progress continue with the kernel's.
    socket.become_unless_closed(SocketState::Relayed);
    for number in numbers {
        let is_cloexec = descriptor::is_close_on_exec(number).unwrap_or(false);
        descriptors::replace(&kernel, number, is_cloexec)?;
        table::remove(number);
    }
    hand_to_kernel_epolls(socket);
    Ok(())
}

pub(crate) fn set_options(socket: &Socket, kernel: impl AsFd) {
    let kernel = kernel.as_fd();
    for (level, name, value) in socket.options().all() {
        // The kernel may refuse an option, but the program's call has succeeded long ago.
        let _ = descriptor::set_socket_option(kernel, level, name, value);
    }
}

/// Opens a kernel socket of the socket's family and kind.
pub(crate) fn new_kernel_socket(socket: &Socket) -> Result<OwnedFd, Errno> {
    let domain = match socket.family() {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    let kind = match socket.protocol {
        Protocol::Tcp => libc::SOCK_STREAM,
        Protocol::Udp => libc::SOCK_DGRAM,
    };
    descriptor::kernel_socket(domain, kind | libc::SOCK_CLOEXEC, 0)
}

/// Moves the socket's epoll memberships to the kernel's sets.
pub(crate) fn hand_to_kernel_epolls(socket: &Arc<Socket>) {
    for (epoll, fd) in socket.epolls() {
        let interest = epoll.interest(fd);
        epoll.remove(fd);
        socket.leave_epoll(&epoll, fd);
        if let Some(interest) = interest {
            enter_kernel_epoll(socket, &epoll, (fd, interest));
        }
    }
}

fn enter_kernel_epoll(
    socket: &Arc<Socket>,
    epoll: &Epoll<Socket>,
    (fd, interest): (RawFd, libc::epoll_event),
) {
    let event = Some(kernel_event(socket, interest));
    let register = |operation| descriptor::epoll_control(epoll.fd(), operation, fd, event);
    // Another process that shares the set may have added it first.
    if register(libc::EPOLL_CTL_ADD).is_ok() || register(libc::EPOLL_CTL_MOD).is_ok() {
        socket.leave_to_kernel();
        epoll.kernel_member_added();
        if socket.phase() == SocketPhase::Listening {
            epoll.note_listener(fd, socket, Some(interest));
        }
    }
}

/// A listener's membership in a kernel's set.
struct Membership {
    epoll: Arc<Epoll<Socket>>,
    fd: RawFd,
    interest: libc::epoll_event,
}

/// Takes the memberships of a listener in the kernel's sets, which end when its descriptor is replaced.
fn take_from_kernel_epolls(listener: &Arc<Socket>) -> Vec<Membership> {
    let mut taken = Vec::new();
    for (_, epoll) in table::epolls() {
        for (fd, interest) in epoll.take_listener(listener) {
            let is_still = table::socket(fd).is_some_and(|known| Arc::ptr_eq(&known, listener));
            if is_still {
                taken.push(Membership {
                    epoll: Arc::clone(&epoll),
                    fd,
                    interest,
                });
            }
        }
    }
    taken
}

/// Called when a listener's descriptor was replaced and it no longer listens: the library reports its events again.
pub(crate) fn return_from_kernel_epolls(socket: &Arc<Socket>) {
    // It would not have listened without.
    let Some(process) = Process::running() else {
        return;
    };
    for member in take_from_kernel_epolls(socket) {
        let Membership {
            epoll,
            fd,
            interest,
        } = member;
        socket.join_epoll(&epoll, fd);
        // Sleepers of the set are signalled with the core held.
        let mut core = process.lock();
        epoll.set((fd, socket), interest, |socket| core.readiness(socket));
    }
}

/// Replaces a listener's descriptors by `near`, in the kernel's sets, too.
pub(crate) fn replace_listener(socket: &Arc<Socket>, near: impl AsFd) -> Result<(), Errno> {
    let memberships = take_from_kernel_epolls(socket);
    for member in &memberships {
        // Other processes may have the former descriptor open, and the set would go on reporting its events.
        let removed = libc::EPOLL_CTL_DEL;
        let _ = descriptor::epoll_control(member.epoll.fd(), removed, member.fd, None);
    }
    replace_fds(socket, near)?;
    for member in memberships {
        enter_kernel_epoll(socket, &member.epoll, (member.fd, member.interest));
    }
    Ok(())
}

/// The events that the kernel's set waits for. A listener's descriptor is always writable, a
/// listening socket never.
pub(crate) fn kernel_event(socket: &Socket, event: libc::epoll_event) -> libc::epoll_event {
    let ignored = match socket.phase() {
        SocketPhase::Listening => OUT,
        _ => 0,
    };
    libc::epoll_event {
        events: event.events & !ignored,
        u64: event.u64,
    }
}

/// Sets up a connection that came through the kernel's stack, as an ordinary kernel socket.
pub(crate) fn accept_kernel(socket: OwnedFd, flags: i32) -> Result<RawFd, Errno> {
    descriptor::set_nonblocking(socket.as_fd(), flags & libc::SOCK_NONBLOCK != 0)?;
    descriptor::set_close_on_exec(&socket, flags & libc::SOCK_CLOEXEC != 0)?;
    Ok(socket.into_raw_fd())
}
