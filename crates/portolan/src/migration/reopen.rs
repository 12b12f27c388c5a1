//! Sockets that outlive their server: in its absence the kernel listens for listeners, and the next server is
//! asked to reopen the sockets. Sessions keep their numbers, by which the server recognises a listener that
//! several processes share: the first process has it listen again, and the others get its descriptor.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use portolan_proto::control::{
    DescriptorEvent, DescriptorOfAdopted, Evidence, FastOpenMode, GroupAction, GroupChange,
    HandshakeOptions, ReplyBody, RequestBody, SessionRef,
};
use portolan_proto::encode;
use portolan_sys::port_right::BoundPort;
use portolan_sys::unix::{self, PairKind, socket_pair};
use portolan_sys::{clock, descriptor, socket_filter};
use portolan_types::{Generation, Protocol, SessionId, Slot};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, acceptfrom_with, listen, shutdown, sockopt};

use crate::descriptors::InternalFd;
use crate::migration::active_open;
use crate::migration::arrival::{map_directly, retarget};
use crate::migration::delegate::{self, ListenerSlot};
use crate::migration::fallback::{new_kernel_socket, replace_listener, set_options, wake_sleepers};
use crate::migration::finish::finish_left;
use crate::migration::part;
use crate::outcome::{Outcome, refusal};
use crate::process::Process;
use crate::process::claims::claim_again;
use crate::process::installed::install_again;
use crate::runtime::Core;
use crate::settings::{Mode, settings};
use crate::socket::near_end::replace_fds;
use crate::socket::options::Choices;
use crate::socket::table;
use crate::socket::{Setup, Socket, SocketPhase};

/// Maximum number of connections, accepted by the kernel while there was no server, that are handed over.
const HANDED_ON: usize = 4096;

/// In a namespace that has another limit, ports in between are requested like those of any program.
const FIRST_UNPRIVILEGED: u16 = 1024;

/// Whether the sockets of the previous server were reopened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    All,
    Some,
}

/// Reopens all sockets of this process that the previous server knew; of connections, those that are held here.
pub(crate) fn open_again(process: &'static Process) -> Opened {
    let mut seen: HashSet<*const Socket> = HashSet::new();
    let mut opened = Opened::All;
    let mut connections = Vec::new();
    for (fd, socket) in table::sockets() {
        if !seen.insert(Arc::as_ptr(&socket)) {
            continue;
        }
        let outcome = match (socket.protocol, socket.phase()) {
            (Protocol::Tcp, SocketPhase::Listening) => open_listener(process, &socket).map(drop),
            (Protocol::Tcp, SocketPhase::Idle) => bind_stream(process, &socket),
            (Protocol::Tcp, SocketPhase::Connecting) => {
                if !active_open::open_again(process, fd, &socket) {
                    opened = Opened::Some;
                }
                Ok(())
            }
            (Protocol::Udp, SocketPhase::Cached) => bind_datagrams(process, &socket),
            (Protocol::Tcp, SocketPhase::Cached) => {
                // They keep working meanwhile.
                connections.push(Arc::clone(&socket));
                Ok(())
            }
            _ => Ok(()),
        };
        if outcome.is_err() {
            opened = Opened::Some;
        }
    }
    for socket in connections {
        if adopt(process, &socket).is_err() {
            opened = Opened::Some;
        }
    }
    // Extensions are for sockets and protocols that the server knows.
    let rest = [
        finish_left(process).is_ok(),
        claim_again(process).is_ok(),
        install_again(process).is_ok(),
    ];
    if rest.contains(&false) {
        opened = Opened::Some;
    }
    opened
}

/// Was the socket opened under an earlier server than the one that this process is registered with?
pub(crate) fn is_of_before(process: &Process, socket: &Socket) -> bool {
    is_old(process, &socket.setup())
}

/// Does the server that this process is registered with know it, and is it there?
pub(crate) fn is_open(process: &Process, setup: &Setup) -> bool {
    !process.control.is_lost() && setup.session.is_some() && !is_old(process, setup)
}

fn is_old(process: &Process, setup: &Setup) -> bool {
    setup.session.is_some() && setup.incarnation != process.incarnation()
}

// Without a server.

/// Has the kernel listen, on the port token from the server or else on a kernel socket of this process.
pub(crate) fn stand_in(listener: &Arc<Socket>, setup: &mut Setup) -> Result<(), Errno> {
    if setup.port_token.is_none() {
        setup.port_token = Some(own_token(listener, setup)?);
    }
    let token = setup.port_token.as_ref().ok_or(Errno::INVAL)?;
    set_options(listener, token);
    listen(token, backlog(setup))?;
    put_descriptor(listener, token)?;
    // Another process that shares it may take connections first.
    descriptor::set_nonblocking(token, true)?;
    setup.silent_far = None;
    listener.set_stands_in(true);
    Ok(())
}

/// Makes a token for a listener that came here without one.
fn own_token(listener: &Socket, setup: &Setup) -> Result<InternalFd, Errno> {
    let local = setup.local.ok_or(Errno::INVAL)?;
    let kernel = new_kernel_socket(listener)?;
    set_options(listener, &kernel);
    sockopt::set_socket_reuseaddr(&kernel, true)?;
    if listener.is_shared() {
        // Each process that accepts may have one.
        sockopt::set_socket_reuseport(&kernel, true)?;
    }
    rustix::net::bind(&kernel, &listener.shown(local))?;
    Ok(InternalFd::inherited(kernel))
}

fn backlog(setup: &Setup) -> i32 {
    i32::try_from(setup.backlog).unwrap_or(i32::MAX)
}

/// Replaces the descriptor of a listener by `near`, and keeps its blocking mode.
fn put_descriptor(listener: &Arc<Socket>, near: impl AsFd) -> Result<(), Errno> {
    replace_listener(listener, &near)?;
    descriptor::set_nonblocking(&near, listener.is_nonblocking())
}

/// Replaces the descriptor by one that stays silent: no connection arrives until there is a server.
pub(crate) fn fall_silent(listener: &Arc<Socket>, setup: &mut Setup) -> Result<(), Errno> {
    let (near, far) = socket_pair(PairKind::SeqPacket)?;
    put_descriptor(listener, &near)?;
    setup.silent_far = Some(InternalFd::new(far));
    listener.set_stands_in(false);
    Ok(())
}

/// The kernel may not listen for this program. Until [`refuse_peers`] it drops SYNs, which the peers repeat, instead of
/// refusing them.
pub(crate) fn have_peers_wait(setup: &Setup) -> Result<(), Errno> {
    let token = setup.port_token.as_ref().ok_or(Errno::INVAL)?;
    socket_filter::nothing(token)?;
    listen(token, backlog(setup))
}

/// Refuses the peers of listeners that [`have_peers_wait`] is for.
pub(crate) fn refuse_peers() {
    for (_, socket) in table::sockets() {
        if socket.phase() != SocketPhase::Listening {
            continue;
        }
        let setup = socket.setup();
        if let (Some(token), Some(_)) = (&setup.port_token, &setup.silent_far) {
            stop_listening(token);
        }
    }
}

fn stop_listening(token: &InternalFd) {
    // Fails for a socket that does not listen: another process of the program may have done so already.
    let _ = shutdown(token, Shutdown::Read);
    let _ = socket_filter::lift(token);
}

// With the next one.

/// Fetches a kernel socket on a listener's port, for the time when there is no server.
pub(crate) fn fetch_token(process: &Process, setup: &mut Setup) {
    let Some(session) = setup.session else { return };
    if setup.port_token.is_some() {
        return;
    }
    // Without one the process listens by a socket of its own, if it may.
    if let Ok((ReplyBody::PortToken, fds)) = process
        .control
        .call(RequestBody::PortToken { session }, &[])
    {
        setup.port_token = fds.into_iter().next().map(InternalFd::inherited);
    }
}

/// Has a listener of the previous server listen again. Returns false if it is not one.
pub(crate) fn open_listener(process: &'static Process, listener: &Arc<Socket>) -> Outcome<bool> {
    let mut setup = listener.setup();
    if listener.phase() != SocketPhase::Listening || !is_old(process, &setup) {
        return Ok(false);
    }
    let opened = listen_again(process, listener, &mut setup);
    if opened.is_err() && is_silent_for_want(listener, &setup) {
        // This keeps the port, and the next attempt may succeed.
        let _ = stand_in(listener, &mut setup);
    }
    drop(setup);
    wake_sleepers(listener);
    opened.map(|()| true)
}

/// Has the kernel stopped listening for it, although it could?
fn is_silent_for_want(listener: &Socket, setup: &Setup) -> bool {
    !listener.stands_in() && setup.port_token.is_some() && !is_required()
}

fn is_required() -> bool {
    settings().mode == Mode::Require
}

fn listen_again(
    process: &'static Process,
    listener: &Arc<Socket>,
    setup: &mut Setup,
) -> Outcome<()> {
    let session = setup.session.ok_or(Errno::INVAL)?;
    let (near, far) = process.control.replacing_pair(PairKind::SeqPacket)?;
    let waiting = give_up_kernels(process, listener, setup)?;
    put_descriptor(listener, &near)?;
    listener.set_stands_in(false);
    process.lock().delegations.begin_anew(session);
    let near = match bind_again(process, listener, setup, (&near, &far))? {
        Bound::First { .. } => {
            hand_on(&far, waiting);
            near
        }
        Bound::Rejoined(near) => {
            put_descriptor(listener, &near)?;
            near
        }
    };
    drop(far);
    let place = match ListenerSlot::of(process, session) {
        ListenerSlot::Nowhere => ListenerSlot::new(process),
        known => known,
    };
    let known = SessionRef::Known(session);
    let request = delegate::request(process, listener, known, setup.backlog, &place);
    let answer = process.control.call(request, &[]);
    let Ok((ReplyBody::Listening { local, rules, .. }, mut fds)) = answer else {
        return Err(refusal(answer));
    };
    drop(near);
    setup.set_local(local);
    setup.carries_messages = true;
    setup.silent_far = None;
    setup.incarnation = process.incarnation();
    let whose = (session, setup.backlog);
    delegate::heed(process, listener, whose, (place, fds.pop()), rules);
    part::go_on(process, listener, whose);
    fetch_token(process, setup);
    Ok(())
}

/// Has the kernel stop listening, so that the server can; the kernel socket proves the right to the
/// port. Returns the connections that were not accepted yet.
fn give_up_kernels(
    process: &Process,
    listener: &Socket,
    setup: &Setup,
) -> Result<Vec<(OwnedFd, SocketAddr)>, Errno> {
    let Some(token) = &setup.port_token else {
        return Ok(Vec::new());
    };
    if !listener.stands_in() {
        let port = setup.local.map_or(0, |local| local.port());
        if port >= FIRST_UNPRIVILEGED {
            stop_listening(token);
            return Ok(Vec::new());
        }
        // Only a listening socket proves it.
        if is_required() {
            socket_filter::nothing(token)?;
        }
        if listen(token, backlog(setup)).is_err() {
            // The server listens already, for another process of this program.
            return Ok(Vec::new());
        }
    }
    process.show_right_by(token.as_fd());
    let mut waiting = Vec::new();
    descriptor::set_nonblocking(token, true)?;
    while waiting.len() < HANDED_ON
        && let Ok((connection, Some(remote))) = acceptfrom_with(token, SocketFlags::CLOEXEC)
    {
        if let Ok(remote) = SocketAddr::try_from(remote) {
            waiting.push((connection, remote));
        }
    }
    stop_listening(token);
    Ok(waiting)
}

/// Passes connections of the kernel's on a listener's descriptor, as the server does. Those that do not fit are reset.
fn hand_on(far: &OwnedFd, waiting: Vec<(OwnedFd, SocketAddr)>) {
    for (connection, remote) in waiting {
        // In the form in which the server names peers.
        let remote = portolan_types::canonical(remote);
        let event = encode(&DescriptorEvent::AcceptedKernel { remote });
        if unix::send(far, &event, &[connection.as_fd()]).is_err() {
            return;
        }
    }
}

enum Bound {
    First {
        local: SocketAddr,
        generation: Generation,
    },
    /// Another process has reopened it: its descriptor.
    Rejoined(OwnedFd),
}

/// Requests the session's port by the session's number, with a new descriptor.
fn bind_again(
    process: &Process,
    socket: &Socket,
    setup: &Setup,
    (near, far): (&OwnedFd, &OwnedFd),
) -> Outcome<Bound> {
    let session = setup.session.ok_or(Errno::INVAL)?;
    let local = setup.local.ok_or(Errno::INVAL)?;
    let (reuse, v6_only) = {
        let options = socket.options();
        (options.reuse(), options.v6_only())
    };
    let request = || RequestBody::Bind {
        session: SessionRef::Again(session),
        protocol: socket.protocol,
        local: socket.shown(local),
        reuse,
        v6_only,
        slot: socket.slot(),
    };
    let ask = || {
        process
            .control
            .call(request(), &[far.as_fd(), near.as_fd()])
    };
    let answer = match ask() {
        Ok((ReplyBody::Error { errno }, _)) if errno == libc::EACCES => {
            let wanted = BoundPort {
                protocol: socket.protocol,
                local,
                v6_only,
            };
            process.show_right_to(wanted, reuse)?;
            ask()
        }
        answer => answer,
    };
    match answer {
        Ok((
            ReplyBody::Bound {
                local, generation, ..
            },
            _,
        )) => Ok(Bound::First { local, generation }),
        Ok((ReplyBody::Rejoined { .. }, fds)) => {
            let near = fds.into_iter().next().ok_or(Errno::MFILE)?;
            Ok(Bound::Rejoined(near))
        }
        refused => Err(refusal(refused)),
    }
}

/// A connection of before, as it is here.
pub(super) struct Found {
    session: SessionId,
    local: SocketAddr,
    remote: SocketAddr,
    evidence: Evidence,
    /// Of a session within the host.
    memory: Option<Arc<InternalFd>>,
}

impl Found {
    fn at(core: &mut Core, setup: &Setup, slot: Slot) -> Option<Found> {
        if let Some((session, side, memory)) = core.locals.evidence(slot) {
            return Some(Found {
                session,
                local: setup.local?,
                remote: setup.remote?,
                evidence: Evidence::Memory(side),
                memory: Some(memory),
            });
        }
        Found::on_network(core, slot)
    }

    pub(super) fn on_network(core: &mut Core, slot: Slot) -> Option<Found> {
        let session = core.stack.tcp(slot);
        let session = session.filter(|it| !it.connection.is_closed())?;
        Some(Found {
            session: session.id,
            local: session.flow.local,
            remote: session.flow.remote,
            evidence: Evidence::Row(session.generation),
            memory: None,
        })
    }

    /// Has the server adopt it, on the descriptor of before or the new one with these ends (near, far). Returns its number,
    /// or none if the server refuses it; an error if a later attempt may succeed.
    pub(super) fn be_adopted(
        &self,
        process: &Process,
        (slot, choices): (Slot, Choices),
        (near, far): &(OwnedFd, OwnedFd),
    ) -> Outcome<Option<(SessionId, DescriptorOfAdopted)>> {
        let request = RequestBody::Adopt {
            session: self.session,
            local: self.local,
            remote: self.remote,
            slot,
            evidence: self.evidence,
            reuse: choices.reuse,
            v6_only: choices.v6_only,
            delivery: choices.delivery.unwrap_or(process.delivery()),
            priority: choices.priority,
        };
        let memory = self.memory.as_ref().map(|memory| memory.as_fd());
        let fds: Vec<_> = [far.as_fd(), near.as_fd()]
            .into_iter()
            .chain(memory)
            .collect();
        match process.control.call(request, &fds) {
            Ok((
                ReplyBody::Adopted {
                    session,
                    descriptor,
                },
                _,
            )) => Ok(Some((session, descriptor))),
            Ok((ReplyBody::Error { errno }, _)) if is_shortage(errno) => {
                Err(Errno::from_raw_os_error(errno).into())
            }
            Ok(_) => Ok(None),
            lost => Err(refusal(lost)),
        }
    }
}

/// Has the next server adopt a connection, as [`adopt`], before others get it: waits for that server.
pub(crate) fn adopt_next(process: &'static Process, socket: &Arc<Socket>) {
    process.await_server();
    // One that it does not know stays this process's alone.
    let _ = adopt(process, socket);
}

/// Has the server adopt a connection of before, on its descriptor, or a new one if the server has not the other end of that.
/// One that it refuses ends.
fn adopt(process: &'static Process, socket: &Arc<Socket>) -> Outcome<()> {
    let mut setup = socket.setup();
    let is_here = |socket: &Socket| socket.phase() == SocketPhase::Cached;
    if !is_here(socket) || !socket.is_unknown_to(process.incarnation()) {
        return Ok(());
    }
    let slot = socket.slot();
    let Some(found) = ({
        let mut core = process.lock();
        if core.is_on_delegated_port(slot) {
            // It is registered later, as under the server of before.
            socket.note_server(process.incarnation());
            return Ok(());
        }
        Found::at(&mut core, &setup, slot)
    }) else {
        // It has ended.
        return Ok(());
    };
    let ends = process.control.replacing_pair(PairKind::Stream)?;
    let choices = socket.options().choices();
    let Some((session, which)) = found.be_adopted(process, (slot, choices), &ends)? else {
        // One within the host works without a server, too, except that nobody else can have it.
        if found.memory.is_none() {
            process.lock().cut_off_one(clock::now(), slot);
        }
        return Ok(());
    };
    note_adopted(process, socket, &mut setup, session);
    let (near, _) = ends;
    socket.note_server(process.incarnation());
    setup.carries_messages = false;
    setup.incarnation = process.incarnation();
    if found.memory.is_none() {
        map_directly(process, socket, session);
    }
    if which == DescriptorOfAdopted::Kept {
        return Ok(());
    }
    if is_here(socket) {
        return Ok(replace_fds(socket, &near)?);
    }
    // Closed meanwhile: its end must reach the server before the hang-up.
    setup.kept = Some(InternalFd::new(near));
    Ok(())
}

/// The connection may have been unregistered until now.
fn note_adopted(process: &Process, socket: &Socket, setup: &mut Setup, session: SessionId) {
    setup.session = Some(session);
    if setup.unregistered.take().is_some() {
        let mut core = process.lock();
        core.note_registered(clock::now(), socket.slot(), session);
        socket.note_registered();
    }
}

/// Are descriptors lacking, here or in the server, of which there may be some soon?
fn is_shortage(errno: i32) -> bool {
    [libc::EMFILE, libc::ENFILE, libc::ETOOMANYREFS].contains(&errno)
}

/// Reopens a TCP socket that is bound and not in use yet.
fn bind_stream(process: &'static Process, socket: &Arc<Socket>) -> Outcome<()> {
    let mut setup = socket.setup();
    if socket.phase() != SocketPhase::Idle || !is_old(process, &setup) {
        return Ok(());
    }
    if !setup.has_port() {
        // As one that no server knows.
        setup.session = None;
        setup.carries_messages = false;
        return Ok(());
    }
    let (near, far) = process.control.replacing_pair(PairKind::SeqPacket)?;
    let near = match bind_again(process, socket, &setup, (&near, &far))? {
        Bound::First { local, .. } => {
            setup.set_local(local);
            near
        }
        Bound::Rejoined(near) => near,
    };
    replace_fds(socket, &near)?;
    setup.carries_messages = true;
    setup.incarnation = process.incarnation();
    Ok(())
}

/// Reopens a UDP socket with its port, its peer and its groups. Unread datagrams stay.
fn bind_datagrams(process: &'static Process, socket: &Arc<Socket>) -> Outcome<()> {
    if !is_of_before(process, socket) {
        return Ok(());
    }
    // It is on the same port.
    socket.datagrams().kernel_socket = None;
    let mut setup = socket.setup();
    if socket.phase() != SocketPhase::Cached || !is_old(process, &setup) {
        return Ok(());
    }
    let session = setup.session.ok_or(Errno::INVAL)?;
    let (near, far) = process.control.replacing_pair(PairKind::SeqPacket)?;
    let Bound::First { local, generation } = bind_again(process, socket, &setup, (&near, &far))?
    else {
        return Err(Errno::PROTO.into());
    };
    replace_fds(socket, &near)?;
    let slot = socket.slot();
    setup.set_local(local);
    setup.incarnation = process.incarnation();
    let remote = setup.remote;
    retarget(process, slot, local, None, generation);
    if let Some(remote) = remote {
        connect_datagrams(process, socket, session, remote)?;
    }
    drop(setup);
    let priority = socket.options().priority();
    if priority > 0 {
        process.prioritize(session, priority);
    }
    join_again(process, socket, session);
    map_directly(process, socket, session);
    Ok(())
}

fn connect_datagrams(
    process: &Process,
    socket: &Socket,
    session: SessionId,
    remote: SocketAddr,
) -> Outcome<()> {
    let slot = socket.slot();
    let chosen = socket.options().delivery();
    let request = RequestBody::Connect {
        session: SessionRef::Known(session),
        protocol: Protocol::Udp,
        remote,
        slot,
        options: HandshakeOptions {
            delivery: chosen.or(Some(process.delivery())),
            priority: socket.options().priority(),
            ..HandshakeOptions::default()
        },
        early: FastOpenMode::No,
    };
    match process.control.call(request, &[]) {
        Ok((
            ReplyBody::Connected {
                local, generation, ..
            },
            _,
        )) => {
            retarget(process, slot, local, Some(remote), generation);
            Ok(())
        }
        other => Err(refusal(other)),
    }
}

fn join_again(process: &Process, socket: &Socket, session: SessionId) {
    let joins = {
        let mut core = process.lock();
        let udp = core.stack.udp(socket.slot());
        udp.map_or_else(Vec::new, |udp| udp.memberships.joins())
    };
    for (group, interface, source) in joins {
        let change = GroupChange {
            action: GroupAction::Join,
            group,
            interface,
            source,
        };
        // The program's call succeeded long ago, and no call is left to report a failure.
        let _ = process
            .control
            .call(RequestBody::Group { session, change }, &[]);
    }
}
