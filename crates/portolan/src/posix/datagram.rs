//! Sending and receiving datagrams, with what comes beside them.

use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use portolan_stack::{Datagram, SendError};
use portolan_sys::clock;
use portolan_types::Instant;
use rustix::io::Errno;

use super::bind::bind_implicitly;
use super::data::{Received, gone, scatter};
use super::{Stop, Watching, deadline_after, restarts};
use crate::core::Core;
use crate::process::Process;
use crate::socket::{Phase, RECEIVE, SEND, Socket};
use crate::wait::{Sleep, Woken};

/// Ancillary data, as far as the socket's options ask for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// When the packet filter saw the datagram, since the epoch (`SO_TIMESTAMP`).
    pub timestamp: Option<Duration>,
    /// The same for `SO_TIMESTAMPNS`.
    pub timestamp_ns: Option<Duration>,
    /// Where it came to (`IP_PKTINFO`, `IPV6_RECVPKTINFO`).
    pub destination: Option<Destination>,
    /// Its time to live (`IP_RECVTTL`).
    pub hops: Option<u8>,
    /// Its type of service (`IP_RECVTOS`).
    pub service: Option<u8>,
}

/// The host's address and device that a datagram came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    pub address: IpAddr,
    pub interface: u32,
}

pub(super) fn receive_udp(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Result<Received, Stop> {
    let is_peek = flags & libc::MSG_PEEK != 0;
    let mut attempt = |core: &mut Core, _: Instant| -> Option<Result<Received, Stop>> {
        if let Some(errno) = socket.take_error(Some(core)) {
            return Some(Err(errno.into()));
        }
        let Some(session) = core.stack.udp(socket.slot()) else {
            return Some(gone(socket));
        };
        if is_peek {
            return session
                .queue
                .front()
                .map(|d| Ok(unload(socket, d, buffers, flags)));
        }
        if let Some(datagram) = session.receive() {
            return Some(Ok(unload(socket, &datagram, buffers, flags)));
        }
        None
    };
    let now = clock::now();
    let mut core = process.lock();
    core.take_in(now);
    let first = attempt(&mut core, now);
    drop(core);
    if let Some(result) = first {
        return result;
    }
    if socket.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0 {
        return Err(Errno::AGAIN.into());
    }
    let deadline = deadline_after(socket.options().receive_timeout());
    let mut attempt = |core: &mut Core, now: Instant| {
        let ended = || socket.is_shut(RECEIVE).then(|| Ok(Received::default()));
        attempt(core, now).or_else(ended)
    };
    let _watching = Watching::new(vec![socket])?;
    loop {
        return match process.wait(Sleep::until(deadline), &mut attempt) {
            Ok(Woken::Ready(result)) => result,
            Ok(Woken::TimedOut | Woken::Kernel) => Err(Errno::AGAIN.into()),
            Err(Errno::INTR) if restarts(deadline) => continue,
            Err(errno) => Err(errno.into()),
        };
    }
}

/// Copies a datagram out; what does not fit is lost (udp(7)).
fn unload(
    socket: &Socket,
    datagram: &Datagram,
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Received {
    let mut rest = datagram.data.as_slice();
    scatter(buffers, 0, |piece| {
        let (now, later) = rest.split_at(rest.len().min(piece.len()));
        piece[..now.len()].copy_from_slice(now);
        rest = later;
        now.len()
    });
    let whole = datagram.data.len();
    let is_truncated = !rest.is_empty();
    Received {
        length: if flags & libc::MSG_TRUNC != 0 {
            whole
        } else {
            whole - rest.len()
        },
        from: Some(socket.shown(datagram.from)),
        flags: if is_truncated { libc::MSG_TRUNC } else { 0 },
        control: control(socket, datagram),
    }
}

fn control(socket: &Socket, datagram: &Datagram) -> Control {
    let wants = socket.options().wanted_control();
    let received = || {
        let age = clock::now().since(datagram.received);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        now.saturating_sub(age)
    };
    let address = socket.shown(datagram.to).ip();
    Control {
        timestamp: wants.timestamp.then(received),
        timestamp_ns: wants.timestamp_ns.then(received),
        destination: wants.destination.then_some(Destination {
            address,
            interface: datagram.interface,
        }),
        hops: wants.hops.then_some(datagram.ip.ttl),
        service: wants.service.then_some(datagram.ip.tos),
    }
}

pub(super) fn send_udp(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    buffers: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    flags: i32,
) -> Result<usize, Stop> {
    let to = to.map(|to| socket.given(to)).transpose()?;
    if to.is_some_and(|to| to.port() == 0) {
        return Err(Errno::INVAL.into());
    }
    if socket.is_shut(SEND) {
        return Err(Errno::PIPE.into());
    }
    if socket.phase() == Phase::Idle {
        if to.is_none() {
            return Err(Errno::DESTADDRREQ.into());
        }
        bind_implicitly(process, fd, socket)?;
    }
    let joined: Vec<u8>;
    let payload: [&[u8]; 2] = match buffers {
        [] => [&[], &[]],
        [one] => [one, &[]],
        [one, two] => [one, two],
        many => {
            joined = many
                .iter()
                .flat_map(|buffer| buffer.iter().copied())
                .collect();
            [&joined, &[]]
        }
    };
    let attempt = |core: &mut Core, now: Instant| -> Option<Result<usize, Stop>> {
        if let Some(errno) = socket.take_error(Some(core)) {
            return Some(Err(errno.into()));
        }
        let Core {
            stack,
            routes,
            channel,
            ..
        } = core;
        let sent = stack.send_datagram(socket.slot(), to, payload, routes, channel);
        core.send_out(now);
        match sent {
            Ok(length) => Some(Ok(length)),
            Err(SendError::Full) => None,
            Err(SendError::NoSession) => Some(gone(socket)),
            Err(SendError::NoDestination) => Some(Err(Errno::DESTADDRREQ.into())),
            Err(SendError::TooLong) => Some(Err(Errno::MSGSIZE.into())),
            Err(SendError::NoRoute) => Some(Err(Errno::NETUNREACH.into())),
            Err(SendError::NotOurs) => Some(Err(Stop::NotOurs)),
        }
    };
    let now = clock::now();
    let mut core = process.lock();
    core.take_in(now);
    let first = attempt(&mut core, now);
    drop(core);
    match (first, to) {
        (Some(Err(Stop::NotOurs)), Some(to)) if socket.phase() == Phase::Cached => {
            return super::fallback::leave_for_kernel(process, socket, to);
        }
        (Some(result), _) => return result,
        (None, _) => {}
    }
    if socket.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0 {
        return Err(Errno::AGAIN.into());
    }
    let deadline = deadline_after(socket.options().send_timeout());
    match process.wait(Sleep::until(deadline), attempt)? {
        Woken::Ready(result) => result,
        Woken::TimedOut | Woken::Kernel => Err(Errno::AGAIN.into()),
    }
}
