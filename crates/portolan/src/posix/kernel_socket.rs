//! Sending through the kernel: a UDP session's kernel socket is the one that holds its port. It
//! sends datagrams that Portolan's filter would not carry: to this host, by devices that are not
//! managed, to others than the session's peer, from sockets that are bound to a group, to groups
//! and broadcast addresses.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use libc::{IPPROTO_IP, IPPROTO_IPV6, SOL_SOCKET};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_stack::Sending;
use portolan_sys::datagram::{self, Departure};
use portolan_sys::descriptor::set_socket_option;
use portolan_sys::wait::pollfd;
use rustix::io::Errno;

use super::blocking::Call;
use crate::descriptors::InternalFd;
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::Process;
use crate::socket::{Family, Socket, SocketPhase};
use crate::threads::sleep::{Sleep, Woken, deadline_after, restarts};

/// Sends through the kernel socket; without an address, to the session's peer.
pub(super) fn send_by_kernel(
    call: &Call<'_>,
    payload: [&[u8]; 2],
    to: Option<SocketAddr>,
    sending: &Sending,
) -> Outcome<usize> {
    let Call {
        process, socket, ..
    } = *call;
    let departure = departure(socket, to, sending);
    let pieces = payload.map(IoSlice::new);
    let mut deadline = None;
    loop {
        let act = |kernel_socket: &InternalFd| datagram::send(kernel_socket, &pieces, &departure);
        let full = match with_kernel_socket(process, socket, act)? {
            Sent::Whole(bytes) => {
                if let Some(session) = process.lock().stack.udp(socket.slot()) {
                    session.datagrams_out += 1;
                    session.bytes_out += bytes as u64;
                }
                return Ok(bytes);
            }
            Sent::Full(_) if call.never_waits() => return Err(Errno::AGAIN.into()),
            Sent::Full(copy) => copy,
        };
        let until = *deadline.get_or_insert_with(|| {
            let timeout = (call.timeout)(&socket.options());
            deadline_after(timeout)
        });
        let mut kernel = [pollfd(full.as_fd().as_raw_fd(), libc::POLLOUT)];
        let sleep = Sleep {
            kernel: &mut kernel,
            ..Sleep::until(until)
        };
        match process.wait(sleep, |_, _| {
            (socket.phase() != SocketPhase::Cached).then_some(())
        }) {
            Ok(Woken::Kernel) => {}
            // Its session has moved to the kernel in the meantime, or is closed.
            Ok(Woken::Ready(())) => return Err(CallError::Moved),
            Ok(Woken::TimedOut) => return Err(Errno::AGAIN.into()),
            Err(Errno::INTR) if restarts(until) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn departure(socket: &Socket, to: Option<SocketAddr>, sending: &Sending) -> Departure {
    Departure {
        to: to.map(|to| socket.shown(to)),
        source: sending.source,
        interface: sending.interface.unwrap_or(0),
        hops: sending.ttl,
        service: sending.tos,
        segment: sending.segment,
    }
}

/// The outcome of sending a datagram.
enum Sent {
    Whole(usize),
    /// The kernel socket has no room for it: a copy of it to wait on.
    Full(InternalFd),
}

/// Fetches the kernel socket from the server when it is first needed.
fn with_kernel_socket(
    process: &'static Process,
    socket: &Arc<Socket>,
    act: impl FnOnce(&InternalFd) -> Result<usize, Errno>,
) -> Outcome<Sent> {
    let session = socket.setup().session.ok_or(Errno::NETUNREACH)?;
    let mut datagrams = socket.datagrams();
    if datagrams.kernel_socket.is_none() {
        let is_v6 = socket.family() == Family::V6;
        let request = RequestBody::KernelSocket { session, is_v6 };
        let kernel_socket = match process.control.call(request, &[])? {
            (ReplyBody::KernelSocket, fds) => fds.into_iter().next().ok_or(Errno::PROTO)?,
            other => return Err(refusal(Ok(other))),
        };
        for (level, name, value) in socket.options().all() {
            repeat_option(&kernel_socket, level, name, value);
        }
        datagrams.kernel_socket = Some(InternalFd::new(kernel_socket));
    }
    let kernel_socket = datagrams.kernel_socket.as_ref().ok_or(Errno::PROTO)?;
    match act(kernel_socket) {
        Ok(bytes) => Ok(Sent::Whole(bytes)),
        Err(Errno::AGAIN) => {
            let copy = rustix::io::fcntl_dupfd_cloexec(kernel_socket.as_fd(), 0)?;
            Ok(Sent::Full(InternalFd::new(copy)))
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Repeats an option of the socket on its kernel socket.
pub(super) fn repeat_on_kernel_socket(socket: &Socket, level: i32, name: i32) {
    let value = socket.options().get(socket.protocol, level, name);
    if let (Ok(value), Some(kernel_socket)) = (value, &socket.datagrams().kernel_socket) {
        repeat_option(kernel_socket, level, name, &value);
    }
}

/// Options that affect receiving are set by the server.
fn repeat_option(kernel_socket: impl std::os::fd::AsFd, level: i32, name: i32, value: &[u8]) {
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
                | libc::IP_MULTICAST_TTL
        ),
        IPPROTO_IPV6 => matches!(
            name,
            libc::IPV6_UNICAST_HOPS
                | libc::IPV6_TCLASS
                | libc::IPV6_MTU_DISCOVER
                | libc::IPV6_MULTICAST_IF
                | libc::IPV6_MULTICAST_LOOP
                | libc::IPV6_MULTICAST_HOPS
        ),
        _ => false,
    };
    if steers_sending {
        // The kernel refuses what it would have refused to the program: nothing is lost.
        let _ = set_socket_option(kernel_socket, level, name, value);
    }
}
