//! Sending through the kernel: a UDP session's twin is the kernel socket that holds its port. By it
//! go datagrams that Portolan's filter would not carry – to this host, by devices that are not
//! managed, broadcasts – and the copies that a sender's own host hears of its multicast.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;

use libc::{IPPROTO_IP, IPPROTO_IPV6, SOL_SOCKET};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_stack::Sending;
use portolan_sys::datagram::{self, Departure};
use portolan_sys::descriptor::set_socket_option;
use rustix::io::Errno;

use super::Stop;
use super::asking::refusal;
use crate::process::Process;
use crate::socket::{Family, Socket};
use crate::table::Hidden;

/// Sends as the kernel would have done it all along.
pub(super) fn send_by_kernel(
    process: &'static Process,
    socket: &Arc<Socket>,
    payload: [&[u8]; 2],
    to: SocketAddr,
    sending: &Sending,
) -> Result<usize, Stop> {
    with_twin(process, socket, |twin| {
        if to.ip().is_multicast() {
            set_hops(twin, socket, i32::from(socket.options().multicast().ttl))?;
        }
        let pieces = payload.map(IoSlice::new);
        datagram::send(twin, &pieces, &departure(socket, to, sending))
    })
}

/// Gives members on this host their copies of a datagram that has left for a group.
pub(super) fn loop_back(
    process: &'static Process,
    socket: &Arc<Socket>,
    payload: [&[u8]; 2],
    to: SocketAddr,
    sending: &Sending,
) {
    let sending = Sending {
        ttl: None,
        ..*sending
    };
    // With no hops left it goes no further than to this host.
    let looped = with_twin(process, socket, |twin| {
        set_hops(twin, socket, 0)?;
        let pieces = payload.map(IoSlice::new);
        datagram::send(twin, &pieces, &departure(socket, to, &sending))
    });
    // It is on the wire: a copy that is lost is lost like any datagram.
    let _ = looped;
}

fn departure(socket: &Socket, to: SocketAddr, sending: &Sending) -> Departure {
    Departure {
        to: Some(socket.shown(to)),
        source: sending.source,
        interface: sending.interface.unwrap_or(0),
        hops: sending.ttl,
        service: sending.tos,
        segment: sending.segment,
    }
}

fn set_hops(twin: &Hidden, socket: &Socket, hops: i32) -> Result<(), Errno> {
    let hops = hops.to_ne_bytes();
    set_socket_option(twin, IPPROTO_IP, libc::IP_MULTICAST_TTL, &hops)?;
    if socket.family == Family::V6 {
        set_socket_option(twin, IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, &hops)?;
    }
    Ok(())
}

/// Asks the server for the twin when it is first needed.
fn with_twin(
    process: &'static Process,
    socket: &Arc<Socket>,
    act: impl FnOnce(&Hidden) -> Result<usize, Errno>,
) -> Result<usize, Stop> {
    let session = socket.setup().session.ok_or(Errno::NETUNREACH)?;
    let mut datagrams = socket.datagrams();
    if datagrams.twin.is_none() {
        let is_v6 = socket.family == Family::V6;
        let request = RequestBody::Twin { session, is_v6 };
        let twin = match process.control.call(request, &[])? {
            (ReplyBody::Twin, fds) => fds.into_iter().next().ok_or(Errno::PROTO)?,
            other => return Err(refusal(Ok(other))),
        };
        for (level, name, value) in socket.options().all() {
            repeat_option(&twin, level, name, value);
        }
        datagrams.twin = Some(Hidden::new(twin));
    }
    let twin = datagrams.twin.as_ref().ok_or(Errno::PROTO)?;
    Ok(act(twin)?)
}

/// Has the twin do as the socket does.
pub(super) fn repeat_on_twin(socket: &Socket, level: i32, name: i32) {
    let value = socket.options().get(socket.protocol, level, name);
    if let (Ok(value), Some(twin)) = (value, &socket.datagrams().twin) {
        repeat_option(twin, level, name, &value);
    }
}

/// What steers receiving is the server's to set.
fn repeat_option(twin: impl std::os::fd::AsFd, level: i32, name: i32, value: &[u8]) {
    let steers_sending = match level {
        SOL_SOCKET => matches!(
            name,
            libc::SO_BROADCAST | libc::SO_DONTROUTE | libc::SO_PRIORITY | libc::SO_NO_CHECK
        ),
        IPPROTO_IP => matches!(
            name,
            libc::IP_TTL
                | libc::IP_TOS
                | libc::IP_MTU_DISCOVER
                | libc::IP_MULTICAST_IF
                | libc::IP_MULTICAST_LOOP
        ),
        IPPROTO_IPV6 => matches!(
            name,
            libc::IPV6_UNICAST_HOPS
                | libc::IPV6_TCLASS
                | libc::IPV6_MTU_DISCOVER
                | libc::IPV6_MULTICAST_IF
                | libc::IPV6_MULTICAST_LOOP
        ),
        _ => false,
    };
    if steers_sending {
        // Refused where the kernel would have refused it from the program: nothing is lost.
        let _ = set_socket_option(twin, level, name, value);
    }
}
