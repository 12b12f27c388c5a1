//! `bind`, explicit or implied.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_stack::{Session, UdpSession};
use portolan_sys::clock;
use portolan_sys::port_right::BoundPort;
use portolan_sys::unix::PairKind;
use portolan_types::Protocol;
use rustix::io::Errno;

use super::asking::{UDP_RECEIVE_BUFFER, ask};
use super::find::find;
use super::groups::join_early_groups;
use crate::migration::active_open::note_failure;
use crate::migration::arrival::{SlotReservation, install};
use crate::migration::fallback::fall_back;
use crate::migration::registration::give_up_lease;
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::runtime::NewSession;
use crate::socket::{Family, Socket, SocketPhase};

pub fn bind(fd: RawFd, address: SocketAddr) -> Outcome<()> {
    let (socket, process) = find(fd)?;
    let local = match socket.given(address) {
        // Unlike a peer's address, it has to be of the socket's family.
        Ok(_) if socket.family() == Family::V6 && address.is_ipv4() => {
            return Err(Errno::INVAL.into());
        }
        // `connect` reports unreachable addresses, `bind` invalid ones.
        Err(Errno::NETUNREACH) => return Err(Errno::INVAL.into()),
        local => local?,
    };
    bind_as_asked(process, fd, &socket, local)
}

/// Binds to the application's address.
pub(super) fn bind_as_asked(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    local: SocketAddr,
) -> Outcome<()> {
    let range = socket.options().port_range();
    match range {
        Some(range) if local.port() == 0 => bind_within(process, fd, socket, local, range)?,
        _ => bind_session(process, fd, socket, local)?,
    }
    let mut setup = socket.setup();
    setup.is_bound = true;
    setup.has_chosen_port = local.port() != 0;
    Ok(())
}

/// Takes a free port of a range (`IP_LOCAL_PORT_RANGE`), starting anywhere in it.
fn bind_within(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    local: SocketAddr,
    (first, last): (u16, u16),
) -> Outcome<()> {
    let count = u64::from(last - first) + 1;
    let start = clock::now().as_nanos() % count;
    for turn in 0..count {
        let port = first + ((start + turn) % count) as u16;
        let mut named = local;
        named.set_port(port);
        match bind_session(process, fd, socket, named) {
            Err(CallError::Errno(Errno::ADDRINUSE)) => {}
            result => return result,
        }
    }
    Err(Errno::ADDRINUSE.into())
}

fn bind_session(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    local: SocketAddr,
) -> Outcome<()> {
    let mut setup = socket.setup();
    note_failure(&mut setup, socket);
    if socket.phase() != SocketPhase::Idle || setup.has_port() {
        return Err(if socket.phase() == SocketPhase::Relayed {
            CallError::NotOurs
        } else {
            Errno::INVAL.into()
        });
    }
    let (reuse, v6_only, binds_freely) = {
        let options = socket.options();
        (options.reuse(), options.v6_only(), options.binds_freely())
    };
    let protocol = socket.protocol;
    if protocol == Protocol::Tcp && local.port() != 0 {
        give_up_lease(process, local.port());
    }
    let is_new = setup.session.is_none();
    let reservation = SlotReservation::at(process);
    let request = |session| RequestBody::Bind {
        session,
        protocol,
        local: socket.shown(local),
        reuse,
        v6_only,
        slot: reservation.slot(),
    };
    let known = (&*setup, PairKind::SeqPacket);
    let answer = match ask(process, fd, socket, known, request) {
        // A privileged port: the kernel decides who may bind it.
        Err(CallError::Errno(Errno::ACCESS)) => {
            let wanted = BoundPort {
                protocol,
                local,
                v6_only,
            };
            process.show_right_to(wanted, reuse)?;
            match ask(process, fd, socket, known, request) {
                // The kernel lets this program bind it, and somebody else has it.
                Err(CallError::Errno(Errno::ACCESS)) => Err(Errno::ADDRINUSE.into()),
                answer => answer,
            }
        }
        answer => answer,
    };
    let reply = match answer {
        // Only the kernel sends from addresses that are not this host's.
        Err(CallError::Errno(Errno::ADDRNOTAVAIL)) if binds_freely => {
            return Err(fall_back(socket, &setup, None));
        }
        answer => answer?,
    };
    let ReplyBody::Bound {
        session,
        local,
        generation,
    } = reply
    else {
        return Err(Errno::PROTO.into());
    };
    setup.session = Some(session);
    setup.incarnation = process.incarnation();
    setup.carries_messages |= is_new && protocol == Protocol::Tcp;
    setup.set_local(local);
    if protocol == Protocol::Udp {
        let udp = UdpSession::new(session, local, None, generation, UDP_RECEIVE_BUFFER);
        let slot = reservation.keep();
        install(
            process,
            socket,
            slot,
            NewSession::Session(Session::Udp(Box::new(udp))),
        );
        drop(setup);
        let priority = socket.options().priority();
        if priority > 0 {
            process.prioritize(session, priority);
        }
        join_early_groups(process, socket, session);
    }
    Ok(())
}

/// Binds a socket that sends before it was bound to an ephemeral port.
pub(super) fn bind_implicitly(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
) -> Outcome<()> {
    match bind_session(process, fd, socket, socket.unspecified()) {
        // Lost the race to another thread.
        Err(CallError::Errno(Errno::INVAL)) if socket.phase() == SocketPhase::Cached => Ok(()),
        result => result,
    }
}
