//! Sending and receiving: the calls that never go to the server.

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_local::Stream;
use portolan_sys::{clock, descriptor, probes};
use portolan_tcp::{Events, StateName};
use portolan_types::{Instant, Protocol};
use rustix::io::Errno;

use super::blocking::{Call, gone};
use super::buffers::{are_readable, gather, may_be_filled, may_be_sent, scatter};
use super::connect::{TakesOutcome, connect_with, wait_connected};
use super::datagram::{await_port, receive_report, receive_udp, send_udp, times};
use super::find::{Transfer, find_here, find_to_use, retry_if_moved};
use super::message::{Control, Received, SendControl};
use super::oob::receive_urgent;
use crate::channel::layers::{self, Layer};
use crate::migration::active_open::complete_connect;
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::runtime::Core;
use crate::socket::options::{Options, timestamping};
use crate::socket::{Socket, SocketPhase};
use crate::threads::sleep::deadline_after;

pub fn receive(fd: RawFd, buffers: &mut [IoSliceMut<'_>], flags: i32) -> Outcome<Received> {
    fn take(fd: RawFd, buffers: &mut [IoSliceMut<'_>], flags: i32) -> Outcome<Received> {
        let (socket, process) = find_to_use(fd, || Transfer::Any)?;
        complete_connect(process, fd, &socket);
        let received = by_phase(process, fd, &socket, buffers, flags)?;
        if flags & (libc::MSG_ERRQUEUE | libc::MSG_OOB) == 0 {
            let bytes = i32::try_from(received.length).unwrap_or(i32::MAX);
            let is_peek = flags & libc::MSG_PEEK != 0;
            socket.move_peek_offset(if is_peek { bytes } else { -bytes });
        }
        probes::received(fd as u64, received.length as u64);
        Ok(received)
    }
    let _call = layers::enter(Layer::Call);
    retry_if_moved(|| take(fd, buffers, flags))
}

pub(super) fn by_phase(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Outcome<Received> {
    match (socket.settled_phase(), socket.protocol) {
        (SocketPhase::Cached, Protocol::Tcp) => receive_tcp(process, socket, buffers, flags),
        (SocketPhase::Cached, Protocol::Udp) => receive_udp(process, socket, buffers, flags),
        (SocketPhase::Idle, Protocol::Udp) => await_port(process, socket, flags),
        (SocketPhase::Connecting, _) => {
            let deadline = deadline_after(socket.options().receive_timeout());
            wait_opened(process, fd, socket, (deadline, flags))?;
            receive_tcp(process, socket, buffers, flags)
        }
        (SocketPhase::Relayed, _) => Err(CallError::NotOurs),
        (SocketPhase::HeldElsewhere, _) => Err(CallError::Moved),
        (SocketPhase::Idle | SocketPhase::Listening | SocketPhase::Closed, _) => {
            Err(socket.take_error().unwrap_or(Errno::NOTCONN).into())
        }
    }
}

fn receive_tcp(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Outcome<Received> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return receive_report(process, socket);
    }
    if flags & libc::MSG_OOB != 0 {
        return receive_urgent(process, socket, buffers, flags);
    }
    let wanted: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let is_peek = flags & libc::MSG_PEEK != 0;
    let waits_for_all = flags & libc::MSG_WAITALL != 0;
    let done = Cell::new(0);
    let came = Cell::new(None);
    let attempt = |core: &mut Core, now: Instant| -> Option<Outcome<usize>> {
        let slot = socket.slot();
        let Some(connection) = core.stream(slot) else {
            return Some(some(done.get()).map_or_else(|| gone(socket), Ok));
        };
        let has_some = connection.readable() > 0;
        let least = if waits_for_all {
            wanted
        } else {
            connection.options().receive_low_water.max(1).min(wanted)
        };
        let before = if is_peek { 0 } else { done.get() };
        let start = socket.peek_start().unwrap_or(0);
        let (taken, is_bad) = read_out(connection, now, buffers, (before, start), flags);
        done.set(before + taken);
        let has_ended = connection.is_receive_finished();
        let has_read_end = connection.has_read_end();
        let is_at_mark = !is_peek && connection.is_at_mark();
        let has_output = connection.has_output();
        if (taken > 0 || has_read_end) && socket.wants_times() {
            let at = (taken > 0).then(|| connection.last_text_at());
            came.set(Some((at, left(connection))));
        }
        if taken > 0 && !is_peek && has_output {
            core.touch_after_read(slot);
        }
        let done = done.get();
        if is_bad {
            return Some(some(done).ok_or(Errno::FAULT.into()));
        }
        let is_at_mark = is_at_mark && done > 0;
        let is_enough = (done >= least || is_at_mark) && (done > 0 || has_some);
        if is_enough || (done > 0 && has_ended) {
            return Some(Ok(done));
        }
        // An error after the end of the stream is reported by `SO_ERROR` only (Linux: `SOCK_DONE`).
        if has_read_end {
            return Some(Ok(done));
        }
        if let Some(errno) = core.take_error(socket) {
            return Some(some(done).ok_or(errno.into()));
        }
        has_ended.then_some(Ok(done))
    };
    let call = Call {
        process,
        socket,
        flags,
        timeout: Options::receive_timeout,
    };
    let length = call.complete(call.lock_to_receive()?, attempt, || some(done.get()))?;
    let came = came.get();
    Ok(Received {
        length,
        control: came.map_or_else(Control::default, |(at, rest)| {
            let tells_rest = socket.options().tells_rest();
            Control {
                rest: tells_rest.then_some(rest),
                ..at.map_or_else(Control::default, |at| times(socket, at))
            }
        }),
        ..Received::default()
    })
}

/// The value of `TCP_INQ`: bytes left, and one more for the peer's end, so that the reader reads it, too.
fn left(stream: &dyn Stream) -> usize {
    let has_end = matches!(
        stream.state(),
        StateName::CloseWait | StateName::Closing | StateName::LastAck | StateName::TimeWait
    );
    stream.inquiry() + usize::from(has_end)
}

/// Copies bytes to `buffers`, behind the first `before` of them. Returns how many, and whether a
/// buffer that they should have gone to cannot be written.
fn read_out(
    connection: &mut dyn Stream,
    now: Instant,
    buffers: &mut [IoSliceMut<'_>],
    (before, start): (usize, usize),
    flags: i32,
) -> (usize, bool) {
    let _copy = layers::enter(Layer::Copy);
    let is_peek = flags & libc::MSG_PEEK != 0;
    // With MSG_TRUNC bytes are dropped without a copy (tcp(7)).
    let is_drop = flags & libc::MSG_TRUNC != 0;
    let offset = if is_peek { start } else { 0 };
    let there = connection.readable().saturating_sub(offset);
    if !is_drop && !may_be_filled(buffers, before, there) {
        return (0, true);
    }
    let mut taken = 0;
    scatter(buffers, before, |piece| {
        // A read ends at the urgent mark.
        if before + taken > 0 && !is_peek && connection.is_at_mark() {
            return 0;
        }
        let count = if is_peek && is_drop {
            let left = connection.readable().saturating_sub(start + taken);
            piece.len().min(left)
        } else if is_peek {
            connection.peek(start + taken, piece)
        } else if is_drop {
            let bytes = piece.len().min(connection.readable());
            connection.recv(now, &mut vec![0; bytes])
        } else {
            connection.recv(now, piece)
        };
        taken += count;
        count
    });
    (taken, false)
}

/// The result of a call that has moved `bytes` bytes, which it returns rather than an error.
fn some(bytes: usize) -> Option<usize> {
    (bytes > 0).then_some(bytes)
}

/// Data calls on a connecting socket wait until it is connected.
fn wait_opened(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    (deadline, flags): (Option<Instant>, i32),
) -> Outcome<()> {
    if socket.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0 {
        return Err(Errno::AGAIN.into());
    }
    let taking = TakesOutcome::new(process, socket);
    wait_connected(taking, fd, deadline).map_err(|stop| match stop {
        CallError::Errno(Errno::INPROGRESS) => Errno::AGAIN.into(),
        stop => stop,
    })
}

pub fn send(
    fd: RawFd,
    buffers: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    flags: i32,
) -> Outcome<usize> {
    send_message(fd, buffers, to, flags, &SendControl::default())
}

pub fn send_message(
    fd: RawFd,
    buffers: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    flags: i32,
    control: &SendControl,
) -> Outcome<usize> {
    fn give(
        fd: RawFd,
        buffers: &[IoSlice<'_>],
        to: Option<SocketAddr>,
        flags: i32,
        control: &SendControl,
    ) -> Outcome<usize> {
        let (socket, process) = find_to_use(fd, || transfer_of(buffers, flags, control))?;
        complete_connect(process, fd, &socket);
        let sent = match (socket.settled_phase(), socket.protocol) {
            (SocketPhase::Cached, Protocol::Tcp) if flags & libc::MSG_FASTOPEN != 0 => {
                Err(Errno::ISCONN.into())
            }
            (SocketPhase::Cached, Protocol::Tcp) => {
                let sent = send_tcp(process, &socket, buffers, flags)?;
                stamp_stream(process, &socket, control);
                Ok(sent)
            }
            (SocketPhase::Cached | SocketPhase::Idle, Protocol::Udp) => {
                send_udp(process, fd, &socket, buffers, to, flags, control)
            }
            (SocketPhase::Connecting, _) if flags & libc::MSG_FASTOPEN != 0 => {
                Err(Errno::ALREADY.into())
            }
            (SocketPhase::Connecting, _) => {
                let deadline = deadline_after(socket.options().send_timeout());
                wait_opened(process, fd, &socket, (deadline, flags))?;
                send_tcp(process, &socket, buffers, flags)
            }
            (SocketPhase::Relayed, _) => Err(CallError::NotOurs),
            (SocketPhase::HeldElsewhere, _) => Err(CallError::Moved),
            (SocketPhase::Idle, Protocol::Tcp) => {
                send_first(process, fd, &socket, buffers, to, flags)
            }
            (SocketPhase::Listening | SocketPhase::Closed, _) => {
                Err(socket.take_error().unwrap_or(Errno::PIPE).into())
            }
        };
        let is_sent = |bytes| bytes > 0 || socket.protocol == Protocol::Udp;
        if flags & libc::MSG_ZEROCOPY != 0 && sent.is_ok_and(is_sent) {
            report_completion(process, &socket);
        }
        sent
    }
    let _call = layers::enter(Layer::Call);
    let answer = retry_if_moved(|| give(fd, buffers, to, flags, control));
    if let Ok(bytes) = answer {
        probes::sent(fd as u64, bytes as u64);
    }
    if answer == Err(CallError::Errno(Errno::PIPE)) && flags & libc::MSG_NOSIGNAL == 0 {
        descriptor::raise_sigpipe();
    }
    answer
}

/// Returns how many bytes `send` would accept on a stream now.
pub fn send_space(fd: RawFd) -> Outcome<usize> {
    fn look(fd: RawFd) -> Outcome<usize> {
        let (socket, process) = find_here(fd)?;
        complete_connect(process, fd, &socket);
        let mut core = process.lock();
        core.poll_rx(clock::now());
        match (socket.phase(), core.stream(socket.slot())) {
            (SocketPhase::Cached, Some(stream)) => Ok(stream.send_space()),
            (SocketPhase::Relayed, _) => Err(CallError::NotOurs),
            _ => Ok(0),
        }
    }
    look(fd)
}

/// Bytes that a SYN could carry; the rest is sent once the connection is established.
const EARLY_MAX: usize = 1460;

/// Sends on a socket that is not connected: with `MSG_FASTOPEN`, or after a deferred open, this
/// opens the connection.
fn send_first(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    buffers: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    flags: i32,
) -> Outcome<usize> {
    let deferred = socket.setup().deferred;
    let remote = match (flags & libc::MSG_FASTOPEN != 0, to, deferred) {
        (_, _, Some(remote)) => remote,
        (true, Some(to), None) => socket.given(to)?,
        (true, None, None) => return Err(Errno::INVAL.into()),
        (false, _, None) => {
            return Err(socket.take_error().unwrap_or(Errno::PIPE).into());
        }
    };
    are_readable(buffers)?;
    let mut text = Vec::new();
    gather(buffers, 0, |piece| {
        let count = piece.len().min(EARLY_MAX - text.len());
        text.extend_from_slice(&piece[..count]);
        count
    });
    let total: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let taken = connect_with(process, fd, socket, remote, (text, flags))?;
    if taken == total || socket.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0 {
        return Ok(taken);
    }
    let rest = buffers.iter().flat_map(|buffer| buffer.iter().copied());
    let rest: Vec<u8> = rest.skip(taken).collect();
    match send_tcp(process, socket, &[IoSlice::new(&rest)], flags) {
        Ok(count) => Ok(taken + count),
        Err(_) if taken > 0 => Ok(taken),
        Err(stop) => Err(stop),
    }
}

/// Tracks the last byte sent, if time stamps are requested.
fn stamp_stream(process: &Process, socket: &Socket, control: &SendControl) {
    match control.timestamping {
        Some(_) => socket.start_stamping(),
        None if socket.is_stamping() => {}
        None => return,
    }
    let of_socket = socket.options().timestamping();
    let flags = of_socket | control.timestamping.unwrap_or(0);
    if flags & (timestamping::TX_SCHED | timestamping::TX_SOFTWARE | timestamping::TX_ACK) != 0 {
        process.lock().stamp(clock::now(), socket.slot(), flags);
    }
}

/// Reports a call with `MSG_ZEROCOPY` as completed: its bytes have been copied.
fn report_completion(process: &Process, socket: &Socket) {
    if socket.options().reports_completions() {
        socket.start_stamping();
        socket.stamps().complete();
        process.lock().tell(socket.slot(), Events::ERROR);
    }
}

fn send_tcp(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &[IoSlice<'_>],
    flags: i32,
) -> Outcome<usize> {
    let total: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let marks_end = flags & (libc::MSG_OOB | libc::MSG_EOR) != 0 && total > 0;
    let more = flags & libc::MSG_MORE != 0;
    let done = Cell::new(0);
    let attempt = |core: &mut Core, now: Instant| -> Option<Outcome<usize>> {
        let slot = socket.slot();
        if core
            .stream_to_send(slot)
            .is_some_and(|stream| stream.error().is_some())
            && let Some(errno) = core.take_error(socket)
        {
            return Some(some(done.get()).ok_or(errno.into()));
        }
        let Some(connection) = core.stream_to_send(slot) else {
            return Some(some(done.get()).map_or_else(|| gone(socket), Ok));
        };
        if connection.is_send_closed() {
            let mut why = || core.take_error(socket).unwrap_or(Errno::PIPE);
            return Some(some(done.get()).ok_or_else(|| why().into()));
        }
        connection.options().more = more;
        let copy = layers::enter(Layer::Copy);
        if !may_be_sent(buffers, done.get(), connection.send_space()) {
            return Some(some(done.get()).ok_or(Errno::FAULT.into()));
        }
        gather(buffers, done.get(), |piece| {
            let count = connection.send(now, piece);
            done.set(done.get() + count);
            count
        });
        drop(copy);
        if marks_end && done.get() == total {
            mark_end(connection, flags);
        }
        core.touch(slot);
        (done.get() == total).then_some(Ok(total))
    };
    let call = Call {
        process,
        socket,
        flags,
        timeout: Options::send_timeout,
    };
    call.complete(process.lock(), attempt, || some(done.get()))
}

/// Marks the last byte sent as urgent, or as the end of a record.
fn mark_end(stream: &mut dyn Stream, flags: i32) {
    if flags & libc::MSG_OOB != 0 {
        stream.mark_urgent();
    }
    if flags & libc::MSG_EOR != 0 {
        stream.end_record();
    }
}

/// More than this is worth a channel.
const BRIEF_MAX: usize = 16 << 10;

/// Could the kernel's own call send this on a relayed descriptor?
fn transfer_of(buffers: &[IoSlice<'_>], flags: i32, control: &SendControl) -> Transfer {
    let length: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let is_plain = flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == 0
        && *control == SendControl::default();
    if is_plain && length <= BRIEF_MAX {
        Transfer::Brief
    } else {
        Transfer::Any
    }
}
