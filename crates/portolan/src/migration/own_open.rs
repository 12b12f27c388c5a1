//! Active opens from ports under lease, without the server (ADR 31).

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_proto::control::{HandshakeOptions, ReplyBody, RequestBody};
use portolan_stack::passive::OpenRules;
use portolan_sys::clock;
use portolan_types::canonical;
use rustix::io::Errno;

use crate::migration::registration::may_wait;
use crate::process::Process;
use crate::runtime::leases::{OwnOpen, Way};
use crate::socket::near_end::replace_by_prepared;
use crate::socket::pair::Pair;
use crate::socket::{Setup, Socket, Unregistered};

/// Sends the SYN of a connection from an ephemeral port, if this process has one for it. Returns false if the server must
/// open the connection.
pub(crate) fn open_here(
    process: &Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    (setup, remote): (&mut Setup, SocketAddr),
    options: &HandshakeOptions,
) -> bool {
    if !may_open_here(process, socket, setup) {
        return false;
    }
    let Some(open) = way_to(process, canonical(remote)) else {
        return false;
    };
    let Ok(pair) = give_pair(process, fd, socket) else {
        process.lock().give_up_open(&open);
        return false;
    };
    socket.note_unregistered();
    socket.expect_news();
    socket.note_server(process.incarnation());
    let is_open = {
        let mut core = process.lock();
        core.open_here(clock::now(), socket, &open, options)
    };
    if !is_open {
        socket.note_registered();
        socket.take_news();
        return false;
    }
    setup.unregistered = Some(Unregistered {
        port: open.port,
        pair,
    });
    setup.set_local(open.flow.local);
    setup.remote = Some(remote);
    setup.deferred = None;
    socket.note_deferred(false);
    true
}

/// Makes the near end of a pair the socket's descriptor. If that fails, the server may have descriptors.
fn give_pair(process: &Process, fd: RawFd, socket: &Arc<Socket>) -> Result<Pair, Errno> {
    let mut pair = process.pairs().take()?;
    pair.prepare(socket.is_nonblocking())?;
    replace_by_prepared(socket, fd, &pair.near)?;
    Ok(pair)
}

/// Has nothing been chosen that takes effect in the server?
fn may_open_here(process: &Process, socket: &Socket, setup: &Setup) -> bool {
    let is_new = setup.session.is_none()
        && setup.unregistered.is_none()
        && !setup.is_bound
        && !setup.carries_messages
        && !socket.is_shared();
    let chooses_port = || {
        let options = socket.options();
        let reuse = options.reuse();
        options.port_range().is_some() || reuse.port || reuse.address
    };
    is_new && may_wait(process, socket) && !chooses_port() && !Socket::has_owner()
}

/// Returns how to open the connection here; requests ports for that if there are too few.
fn way_to(process: &Process, remote: SocketAddr) -> Option<OwnOpen> {
    let mut way = process.lock().way_to(clock::now(), remote);
    if let Way::Lease { local, slot, most } = way {
        let incarnation = process.incarnation();
        let request = RequestBody::LeasePorts { local, slot, most };
        let leased = match process.control.call(request, &[]) {
            Ok((ReplyBody::Leased { ports, rules }, _)) => {
                let rules = portolan_proto::decode::<OpenRules>(&rules).ok();
                rules.map(|rules| (ports, rules))
            }
            _ => None,
        };
        let (mut core, now) = (process.lock(), clock::now());
        // The next server knows nothing of an earlier one's leases.
        let leased = leased.filter(|_| incarnation == process.incarnation());
        core.leases.add(now, local, leased);
        way = core.way_to(now, remote);
    }
    match way {
        Way::Here(open) => Some(open),
        Way::Server | Way::Lease { .. } => {
            process.lock().leases.note_open_by_server();
            None
        }
    }
}
