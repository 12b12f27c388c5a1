//! What a socket whose session is here reports: readiness and errors.

use portolan_local::Stream;
use portolan_stack::UdpSession;
use portolan_types::Protocol;
use rustix::io::Errno;

use crate::runtime::Core;
use crate::socket::{RECEIVE, SEND, Socket, SocketPhase};
use crate::wait::events::{ERR, HUP, IN, OUT, PRI, RDHUP};

impl Core {
    /// The pending error of the socket or of its session; reading clears it (`SO_ERROR`).
    pub(crate) fn take_error(&mut self, socket: &Socket) -> Option<Errno> {
        if let Some(own) = socket.take_error() {
            return Some(own);
        }
        let errno = match self.stream(socket.slot()) {
            Some(stream) => stream.take_error()?.errno(),
            None => self.stack.udp(socket.slot())?.error.take()?,
        };
        Some(Errno::from_raw_os_error(errno))
    }

    /// Returns what poll and epoll report of the socket now.
    pub(crate) fn readiness(&mut self, socket: &Socket) -> u32 {
        let error = match socket.protocol {
            _ if !socket.has_error() => 0,
            Protocol::Tcp => IN | OUT | ERR,
            Protocol::Udp => ERR,
        };
        match socket.phase() {
            SocketPhase::Cached => error | self.session_readiness(socket),
            SocketPhase::Idle if socket.is_deferred() => error | OUT,
            // As on Linux: a TCP socket that is not connected is writable and hung up; after a
            // failed open its receive side has ended, too.
            SocketPhase::Idle if socket.protocol == Protocol::Tcp => {
                let ended = if socket.has_news() { IN | RDHUP } else { 0 };
                // Unlike the error of a connection, that of an open which was given up is nothing to read.
                (error & ERR) | OUT | HUP | ended | shut_readiness(socket)
            }
            SocketPhase::Idle => error | OUT | shut_readiness(socket),
            SocketPhase::Closed => HUP | ERR,
            SocketPhase::Connecting
            | SocketPhase::Listening
            | SocketPhase::Relayed
            | SocketPhase::HeldElsewhere => error,
        }
    }

    fn session_readiness(&mut self, socket: &Socket) -> u32 {
        let slot = socket.slot();
        let retained = if self.lending.is_active() && self.lending.has_some(slot) {
            IN
        } else {
            0
        };
        let has_reports = socket.is_stamping() && socket.stamps().has_some();
        let reports = if has_reports { ERR } else { 0 };
        if let Some(stream) = self.stream_to_send(slot) {
            return stream_readiness(stream) | reports | retained;
        }
        let has_room = self.stack.has_room(slot, &mut self.channel);
        match self.stack.udp(slot) {
            Some(session) => udp_readiness(session, has_room) | reports | shut_readiness(socket),
            None => HUP | ERR,
        }
    }
}

fn shut_readiness(socket: &Socket) -> u32 {
    match (socket.is_shut(RECEIVE), socket.is_shut(SEND)) {
        (true, true) => IN | RDHUP | HUP,
        (true, false) => IN | RDHUP,
        (false, _) => 0,
    }
}

fn stream_readiness(connection: &mut dyn Stream) -> u32 {
    let mut bits = 0;
    let has_ended = connection.is_receive_shut();
    if connection.is_readable() {
        bits |= IN;
    }
    if has_ended {
        bits |= IN | RDHUP;
    }
    if connection.has_urgent() {
        bits |= PRI;
    }
    if connection.poll_writable() || connection.is_send_closed() {
        bits |= OUT;
    }
    if (has_ended && connection.is_send_closed()) || connection.is_closed() {
        bits |= HUP;
    }
    if connection.error().is_some() {
        bits |= ERR | IN | OUT;
    }
    bits
}

fn udp_readiness(session: &UdpSession, has_room: bool) -> u32 {
    let mut bits = if has_room { OUT } else { 0 };
    if !session.queue.is_empty() {
        bits |= IN;
    }
    if session.error.is_some() || !session.errors.is_empty() {
        bits |= ERR;
    }
    bits
}
