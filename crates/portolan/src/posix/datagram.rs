//! Sending and receiving datagrams, with their ancillary data.

use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use portolan_stack::{
    Datagram, DatagramError, ErrorCause, IpOptions, Routes, SendError, Sending, UdpSession,
};
use portolan_sys::{clock, memory};
use portolan_tcp::Events;
use portolan_types::{Instant, scope_of};
use rustix::io::Errno;

use super::bind::bind_implicitly;
use super::blocking::{Call, gone};
use super::buffers::{are_readable, scatter};
use super::kernel_socket::send_by_kernel;
use super::message::{Control, Destination, ExtendedError, Received, SendControl};
use crate::channel::layers::{self, Layer};
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::runtime::Core;
use crate::socket::options::{Options, timestamping};
use crate::socket::stamps::SentEvent;
use crate::socket::{Corked, Family, RECEIVE, SEND, Socket, SocketPhase};

/// The origins in `linux/errqueue.h` that are not errors.
const ORIGIN_TIMESTAMPING: u8 = 4;
const ORIGIN_ZEROCOPY: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED`
const COPIED: u8 = 1;

/// Maximum number of datagrams that a payload is cut into (Linux's `UDP_MAX_SEGMENTS`).
const SEGMENTS_MAX: usize = 128;

/// Linux refuses a longer datagram without reading its bytes.
const LENGTH_MAX: usize = 65_535;

/// Length of the longest payload.
const PAYLOAD_MAX: usize = 65_507;

pub(super) fn receive_udp(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Outcome<Received> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return receive_error(process, socket, buffers);
    }
    let is_peek = flags & libc::MSG_PEEK != 0;
    let mut look = |core: &mut Core| -> Option<Outcome<Received>> {
        if let Some(errno) = core.take_error(socket) {
            return Some(Err(errno.into()));
        }
        let Core { stack, routes, .. } = core;
        let Some(session) = stack.udp(socket.slot()) else {
            return Some(gone(socket));
        };
        if let Some(path) = session.path_mtu.take() {
            return Some(Ok(of_path(socket, path)));
        }
        let mut unload = |datagram: &_, start| {
            unload(socket, routes, (datagram, start), buffers, flags).map_err(CallError::from)
        };
        if is_peek {
            let start = socket.peek_start();
            return match start {
                None => session.queue.front().map(|datagram| unload(datagram, 0)),
                Some(start) => {
                    let seen = session.look_from(start);
                    seen.map(|(datagram, start)| unload(datagram, start))
                }
            };
        }
        session.receive().map(|datagram| unload(&datagram, 0))
    };
    let mut waits = false;
    let attempt = |core: &mut Core, _: Instant| {
        // As on Linux: shutdown ends a wait, but is no end of file for a call that does not wait.
        let is_over = std::mem::replace(&mut waits, true) && socket.is_shut(RECEIVE);
        look(core).or_else(|| is_over.then(|| Ok(Received::default())))
    };
    let call = Call {
        process,
        socket,
        flags,
        timeout: Options::receive_timeout,
    };
    call.complete(call.lock_to_receive()?, attempt, || None)
}

/// A socket without a port receives nothing, and receiving does not bind it. A waiting thread
/// continues when another thread binds the socket.
pub(super) fn await_port(
    process: &'static Process,
    socket: &Arc<Socket>,
    flags: i32,
) -> Outcome<Received> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::AGAIN.into());
    }
    let mut waits = false;
    let attempt = |_: &mut Core, _: Instant| {
        let is_over = std::mem::replace(&mut waits, true) && socket.is_shut(RECEIVE);
        match (socket.phase(), socket.take_error()) {
            (_, Some(errno)) => Some(Err(errno.into())),
            (SocketPhase::Idle, None) => is_over.then(|| Ok(Received::default())),
            _ => Some(Err(CallError::Moved)),
        }
    };
    let call = Call {
        process,
        socket,
        flags,
        timeout: Options::receive_timeout,
    };
    call.complete(process.lock(), attempt, || None)
}

/// Returns a path MTU instead of a datagram.
fn of_path(socket: &Socket, (to, mtu): (SocketAddr, u32)) -> Received {
    let to = socket.shown(SocketAddr::new(to.ip(), 0));
    Received {
        from: Some(to),
        control: Control {
            path_mtu: Some((to, mtu)),
            ..Control::default()
        },
        ..Received::default()
    }
}

/// Copies a datagram out. Bytes that do not fit are lost (udp(7)), as is all of it if the buffers cannot be written.
fn unload(
    socket: &Socket,
    routes: &Routes,
    (datagram, start): (&Datagram, usize),
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Result<Received, Errno> {
    let _copy = layers::enter(Layer::Copy);
    let (copied, _) = copy_out(&datagram.data[start..], buffers)?;
    let whole = datagram.data.len();
    // A peek with room to spare is complete, wherever it began.
    let room: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let is_truncated = room <= whole - start && room < whole;
    Ok(Received {
        length: if flags & libc::MSG_TRUNC != 0 {
            whole
        } else {
            copied
        },
        from: Some(socket.shown(datagram.from)),
        flags: if is_truncated { libc::MSG_TRUNC } else { 0 },
        control: control(socket, routes, datagram),
    })
}

fn control(socket: &Socket, routes: &Routes, datagram: &Datagram) -> Control {
    let wants = socket.options().wanted_control();
    let received = || since_epoch(datagram.received);
    let is_v6 = datagram.to.is_ipv6();
    let destination = || Destination {
        address: socket.shown(datagram.to).ip(),
        own: own_address(socket, routes, datagram),
        interface: datagram.interface,
    };
    let unmapped = |destination: Destination| Destination {
        address: destination.address.to_canonical(),
        own: destination.own.to_canonical(),
        ..destination
    };
    Control {
        timestamp: wants.timestamp.then(received),
        timestamp_ns: wants.timestamp_ns.then(received),
        timestamping: wants.timestamping.then(received),
        destination: (wants.destination && !is_v6).then(|| unmapped(destination())),
        v6_destination: wants.v6_destination.then(destination),
        original: (wants.original && !is_v6).then_some(datagram.to),
        v6_original: (wants.v6_original && is_v6).then_some(datagram.to),
        path_mtu: None,
        hops: (wants.hops && !is_v6).then_some(datagram.ip.ttl),
        service: (wants.service && !is_v6).then_some(datagram.ip.tos),
        v6_hops: (wants.v6_hops && is_v6).then_some(datagram.ip.ttl),
        v6_class: (wants.v6_class && is_v6).then_some(datagram.ip.tos),
        segment: Some(datagram.segment).filter(|&size| wants.segment && size > 0),
        dropped: Some(datagram.dropped).filter(|&lost| wants.dropped && lost > 0),
        rest: None,
        error: None,
    }
}

/// Arrival time of the latest bytes that a stream has.
pub(super) fn times(socket: &Socket, received: Instant) -> Control {
    let wants = socket.options().wanted_control();
    let received = || since_epoch(received);
    Control {
        timestamp: wants.timestamp.then(received),
        timestamp_ns: wants.timestamp_ns.then(received),
        timestamping: wants.timestamping.then(received),
        ..Control::default()
    }
}

/// Converts a time of the packets' clock to the programs' one.
fn since_epoch(instant: Instant) -> Duration {
    let age = clock::now().since(instant);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    now.saturating_sub(age)
}

/// Returns the address that a reply to the datagram would come from, also if it was sent to many.
fn own_address(socket: &Socket, routes: &Routes, datagram: &Datagram) -> IpAddr {
    if is_own(datagram.to.ip()) {
        return socket.shown(datagram.to).ip();
    }
    let path = routes.path_on(datagram.interface, datagram.from.ip());
    let own = path
        .and_then(|path| path.source)
        .unwrap_or(datagram.to.ip());
    socket.shown(SocketAddr::new(own, 0)).ip()
}

/// Certainly an address of one host: no group, and no broadcast address.
fn is_own(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_multicast() && v4.octets()[3] != 255,
        IpAddr::V6(v6) => !v6.is_multicast(),
    }
}

/// `MSG_ERRQUEUE`: never waits.
fn receive_error(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &mut [IoSliceMut<'_>],
) -> Outcome<Received> {
    if socket.is_stamping()
        && let Some(event) = socket.stamps().take()
    {
        return Ok(of_sent(socket, event));
    }
    let mut core = process.lock();
    core.poll_rx(clock::now());
    let error = match core.stack.udp(socket.slot()) {
        Some(session) => session.take_error().ok_or(Errno::AGAIN)?,
        None => return gone(socket),
    };
    drop(core);
    let (length, is_truncated) = copy_out(&error.payload, buffers)?;
    let truncated = if is_truncated { libc::MSG_TRUNC } else { 0 };
    let is_stamp = error.cause == ErrorCause::Timestamp;
    let wants = socket.options().wanted_control();
    let (of_v4, of_v6) = match error.cause {
        ErrorCause::Icmp { is_v6, .. } => (!is_v6, is_v6),
        ErrorCause::Local | ErrorCause::Timestamp => (false, false),
    };
    Ok(Received {
        length,
        from: error.to.map(|to| socket.shown(to)),
        flags: libc::MSG_ERRQUEUE | truncated,
        control: Control {
            timestamping: is_stamp.then(|| since_epoch(error.at)),
            hops: (wants.hops && of_v4).then_some(error.ip.ttl),
            service: (wants.service && of_v4).then_some(error.ip.tos),
            v6_hops: (wants.v6_hops && of_v6).then_some(error.ip.ttl),
            v6_class: (wants.v6_class && of_v6).then_some(error.ip.tos),
            error: Some(extended(socket, &error)),
            ..Control::default()
        },
    })
}

/// `MSG_ERRQUEUE` of a stream.
pub(super) fn receive_report(process: &'static Process, socket: &Arc<Socket>) -> Outcome<Received> {
    process.lock().poll(clock::now());
    let event = socket.stamps().take().ok_or(Errno::AGAIN)?;
    Ok(of_sent(socket, event))
}

/// Returns a report of sent data.
fn of_sent(socket: &Socket, event: SentEvent) -> Received {
    let (errno, origin) = match event {
        SentEvent::Stamp(_) => (libc::ENOMSG, ORIGIN_TIMESTAMPING),
        SentEvent::Completed { .. } => (0, ORIGIN_ZEROCOPY),
    };
    let (code, info, data) = match event {
        SentEvent::Stamp(stamp) => (0, stamp.kind, stamp.number),
        SentEvent::Completed { first, last } => (COPIED, first, last),
    };
    let at = match event {
        SentEvent::Stamp(stamp) => Some(stamp.at),
        SentEvent::Completed { .. } => None,
    };
    let is_told = socket.options().timestamping() & timestamping::SOFTWARE != 0;
    Received {
        flags: libc::MSG_ERRQUEUE,
        control: Control {
            timestamping: at.filter(|_| is_told).map(since_epoch),
            error: Some(ExtendedError {
                errno,
                origin,
                kind: 0,
                code,
                info,
                data,
                offender: None,
                is_v6: socket.family() == Family::V6,
            }),
            ..Control::default()
        },
        ..Received::default()
    }
}

fn extended(socket: &Socket, error: &DatagramError) -> ExtendedError {
    let (origin, kind, code) = match error.cause {
        ErrorCause::Local => (1, 0, 0),
        ErrorCause::Icmp {
            is_v6: false,
            kind,
            code,
        } => (2, kind, code),
        ErrorCause::Icmp { kind, code, .. } => (3, kind, code),
        ErrorCause::Timestamp => (ORIGIN_TIMESTAMPING, 0, 0),
    };
    let is_v6 = socket.family() == Family::V6;
    let shown = |offender: IpAddr| socket.shown(SocketAddr::new(offender, 0)).ip();
    ExtendedError {
        errno: error.errno,
        origin,
        kind,
        code,
        info: error.info,
        data: error.data,
        offender: error.offender.map(shown),
        is_v6,
    }
}

/// Copies bytes out. Returns how many, and whether some did not fit.
fn copy_out(bytes: &[u8], buffers: &mut [IoSliceMut<'_>]) -> Result<(usize, bool), Errno> {
    let mut rest = bytes;
    let mut is_bad = false;
    scatter(buffers, 0, |piece| {
        let (now, later) = rest.split_at(rest.len().min(piece.len()));
        let place = memory::writable(&mut piece[..now.len()]);
        if place.len() < now.len() {
            is_bad = true;
            return 0;
        }
        place.copy_from_slice(now);
        rest = later;
        now.len()
    });
    if is_bad {
        Err(Errno::FAULT)
    } else {
        Ok((bytes.len() - rest.len(), !rest.is_empty()))
    }
}

pub(super) fn send_udp(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    buffers: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    flags: i32,
    control: &SendControl,
) -> Outcome<usize> {
    let to = to.map(|to| socket.given(to)).transpose()?;
    if to.is_some_and(|to| to.port() == 0) {
        return Err(Errno::INVAL.into());
    }
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::OPNOTSUPP.into());
    }
    if socket.is_shut(SEND) {
        return Err(refusal_of_shut(process, socket, to).into());
    }
    let sending = sending(socket, control);
    if socket.phase() == SocketPhase::Idle {
        if to.is_none() {
            return Err(Errno::DESTADDRREQ.into());
        }
        bind_implicitly(process, fd, socket)?;
    }
    let length: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    if length > LENGTH_MAX {
        return Err(Errno::MSGSIZE.into());
    }
    are_readable(buffers)?;
    let is_held = flags & libc::MSG_MORE != 0 || socket.options().udp_cork();
    if is_held || socket.datagrams().corked.is_some() {
        let length = cork(process, socket, buffers, to, sending)?;
        if !is_held {
            uncork(process, socket, flags)?;
        }
        return Ok(length);
    }
    let joined: Vec<u8>;
    let payload: [&[u8]; 2] = match buffers {
        [] => [&[], &[]],
        [one] => [one, &[]],
        [one, two] => [one, two],
        many => {
            joined = join(many);
            [&joined, &[]]
        }
    };
    let sent = send_payload(process, socket, payload, to, &sending, flags)?;
    if let Some(flags) = stamps(socket, control) {
        stamp(process, socket, payload, flags);
    }
    Ok(sent)
}

/// As on Linux: the route is checked before the shutdown.
fn refusal_of_shut(process: &Process, socket: &Socket, to: Option<SocketAddr>) -> Errno {
    let to = to.or_else(|| socket.setup().remote);
    let is_reached = |to: SocketAddr| {
        let core = process.lock();
        to.ip().is_unspecified() || core.routes.path_in(to.ip(), scope_of(to)).is_ok()
    };
    match to {
        None => Errno::DESTADDRREQ,
        Some(to) if is_reached(to) => Errno::PIPE,
        Some(_) => Errno::NETUNREACH,
    }
}

fn join(buffers: &[IoSlice<'_>]) -> Vec<u8> {
    buffers
        .iter()
        .flat_map(|buffer| buffer.iter().copied())
        .collect()
}

fn sending(socket: &Socket, control: &SendControl) -> Sending {
    Sending {
        source: control.source.map(|source| source.to_canonical()),
        interface: control.interface,
        ttl: control.hops,
        tos: control.service,
        segment: control
            .segment
            .unwrap_or_else(|| socket.options().segment()),
    }
}

/// Appends to the corked datagram; the first piece sets its destination.
fn cork(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    sending: Sending,
) -> Outcome<usize> {
    let is_connected = || {
        let mut core = process.lock();
        let session = core.stack.udp(socket.slot());
        session.is_some_and(|session| session.remote.is_some())
    };
    let mut datagrams = socket.datagrams();
    if datagrams.corked.is_none() && to.is_none() && !is_connected() {
        return Err(Errno::DESTADDRREQ.into());
    }
    let corked = datagrams.corked.get_or_insert_with(|| Corked {
        to,
        sending,
        data: Vec::new(),
    });
    let piece = join(buffers);
    if corked.data.len() + piece.len() > PAYLOAD_MAX {
        // Linux drops the corked data, too.
        datagrams.corked = None;
        return Err(Errno::MSGSIZE.into());
    }
    corked.data.extend(&piece);
    Ok(piece.len())
}

/// Sends the corked datagram.
pub(super) fn uncork(process: &'static Process, socket: &Arc<Socket>, flags: i32) -> Outcome<()> {
    let Some(corked) = socket.datagrams().corked.take() else {
        return Ok(());
    };
    let payload: [&[u8]; 2] = [&corked.data, &[]];
    send_payload(process, socket, payload, corked.to, &corked.sending, flags)?;
    Ok(())
}

fn send_payload(
    process: &'static Process,
    socket: &Arc<Socket>,
    payload: [&[u8]; 2],
    to: Option<SocketAddr>,
    sending: &Sending,
    flags: i32,
) -> Outcome<usize> {
    let length = payload[0].len() + payload[1].len();
    let segment = usize::from(sending.segment);
    if segment > 0 && length > segment * SEGMENTS_MAX {
        return Err(Errno::INVAL.into());
    }
    let attempt = |core: &mut Core, now: Instant| -> Option<Outcome<usize>> {
        if let Some(errno) = core.take_error(socket) {
            return Some(Err(errno.into()));
        }
        let Core {
            stack,
            routes,
            channel,
            ..
        } = core;
        channel.accounts.begin(socket.slot());
        let output = layers::enter(Layer::OutputSession);
        let sent = stack.send_datagram(socket.slot(), to, payload, sending, routes, channel);
        drop(output);
        channel.accounts.end();
        match sent {
            Ok(length) => Some(Ok(length)),
            Err(SendError::Full) => None,
            Err(SendError::NoSession) => Some(gone(socket)),
            Err(SendError::NoDestination) => Some(Err(Errno::DESTADDRREQ.into())),
            Err(SendError::TooLong) => Some(Err(Errno::MSGSIZE.into())),
            Err(SendError::DoesNotFit { mtu }) => {
                if let Some(session) = core.stack.udp(socket.slot()) {
                    note_size(session, to, mtu, now);
                }
                Some(Err(Errno::MSGSIZE.into()))
            }
            Err(SendError::Unchecked) => Some(Err(Errno::INVAL.into())),
            Err(SendError::NoRoute) => Some(Err(Errno::NETUNREACH.into())),
            Err(SendError::NotOurs) => Some(Err(CallError::NotOurs)),
        }
    };
    let call = Call {
        process,
        socket,
        flags,
        timeout: Options::send_timeout,
    };
    match call.complete(process.lock(), attempt, || None) {
        Err(CallError::NotOurs) if socket.phase() == SocketPhase::Cached => {
            send_by_kernel(&call, payload, to, sending)
        }
        result => result,
    }
}

/// A datagram was refused for its length: reports the path MTU to programs that request it.
fn note_size(session: &mut UdpSession, to: Option<SocketAddr>, mtu: u32, now: Instant) {
    let Some(destination) = to.or(session.remote) else {
        return;
    };
    if destination.is_ipv6() && session.v6_sizes.whole_only && session.reports.path_mtu {
        session.path_mtu = Some((destination, mtu));
    }
    if !session.reports.of(destination.ip()) {
        return;
    }
    // For IPv4, Linux names the port of the socket's own peer there.
    let port = match destination {
        SocketAddr::V4(_) => session.remote.map_or(0, |remote| remote.port()),
        SocketAddr::V6(v6) => v6.port(),
    };
    session.note_error(DatagramError {
        errno: libc::EMSGSIZE,
        cause: ErrorCause::Local,
        info: mtu,
        data: 0,
        to: Some(SocketAddr::new(destination.ip(), port)),
        offender: None,
        ip: IpOptions::default(),
        at: now,
        payload: Vec::new(),
    });
}

/// Returns the flags of `SO_TIMESTAMPING` if sent datagrams are to be stamped.
fn stamps(socket: &Socket, control: &SendControl) -> Option<u32> {
    let of_socket = socket.options().timestamping();
    let wanted = control.timestamping.unwrap_or(of_socket);
    (wanted & timestamping::TX_SOFTWARE != 0).then_some(of_socket | wanted)
}

/// Stamps a datagram that has just been passed to the device.
fn stamp(process: &Process, socket: &Arc<Socket>, payload: [&[u8]; 2], flags: u32) {
    let number = {
        let mut datagrams = socket.datagrams();
        let number = datagrams.stamped;
        datagrams.stamped = number.wrapping_add(1);
        number
    };
    let mut core = process.lock();
    let Some(session) = core.stack.udp(socket.slot()) else {
        return;
    };
    let is_bare = flags & timestamping::OPT_TSONLY != 0;
    session.note_error(DatagramError {
        errno: libc::ENOMSG,
        cause: ErrorCause::Timestamp,
        info: 0,
        data: if flags & timestamping::OPT_ID != 0 {
            number
        } else {
            0
        },
        to: None,
        offender: None,
        ip: IpOptions::default(),
        at: clock::now(),
        payload: if is_bare {
            Vec::new()
        } else {
            payload.concat()
        },
    });
    socket.notify(Events::ERROR);
}
