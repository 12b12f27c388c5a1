//! `connect`: active opens, and setting or clearing a peer.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use portolan_proto::control::{FastOpenMode, HandshakeOptions, ReplyBody, RequestBody};
use portolan_stack::{Session, UdpSession};
use portolan_sys::unix::PairKind;
use portolan_sys::wait::pollfd;
use portolan_types::{Instant, Protocol};
use rustix::io::Errno;

use super::asking::{UDP_RECEIVE_BUFFER, ask};
use super::find::find;
use super::lifecycle::{carry_bytes, reset_to_idle};
use super::watching::Watching;
use crate::migration::active_open::complete_connect;
use crate::migration::arrival::{SlotReservation, install, retarget};
use crate::migration::own_open::open_here;
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::Process;
use crate::runtime::NewSession;
use crate::runtime::openings::Taker;
use crate::socket::{Family, Socket, SocketPhase, SocketState};
use crate::threads::sleep::{Sleep, Woken, deadline_after, restarts};

pub fn connect(fd: RawFd, address: Option<SocketAddr>) -> Outcome<()> {
    let (socket, process) = find(fd)?;
    complete_connect(process, fd, &socket);
    match (socket.protocol, address) {
        (Protocol::Udp, Some(address)) => {
            let remote = socket.given(address).map_err(|errno| match address {
                // `sendto` reports it as unreachable.
                SocketAddr::V4(_) if socket.family() == Family::V6 => Errno::AFNOSUPPORT,
                _ => errno,
            })?;
            connect_udp(process, fd, &socket, remote)
        }
        (Protocol::Udp, None) => disconnect_udp(process, fd, &socket),
        (Protocol::Tcp, Some(address)) => connect_tcp(process, fd, &socket, socket.given(address)?),
        (Protocol::Tcp, None) => disconnect_tcp(process, fd, &socket),
    }
}

fn connect_udp(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    remote: SocketAddr,
) -> Outcome<()> {
    if matches!(
        socket.phase(),
        SocketPhase::Relayed | SocketPhase::HeldElsewhere
    ) {
        return Err(CallError::NotOurs);
    }
    let chosen = socket.options().delivery();
    let priority = socket.options().priority();
    let mut setup = socket.setup();
    let reservation = (socket.phase() != SocketPhase::Cached).then(|| SlotReservation::at(process));
    let slot = reservation
        .as_ref()
        .map_or_else(|| socket.slot(), SlotReservation::slot);
    let reply = ask(
        process,
        fd,
        socket,
        (&setup, PairKind::SeqPacket),
        |session| RequestBody::Connect {
            session,
            protocol: Protocol::Udp,
            remote,
            slot,
            options: HandshakeOptions {
                delivery: chosen.or(Some(process.delivery())),
                priority,
                ..HandshakeOptions::default()
            },
            early: FastOpenMode::No,
        },
    );
    let ReplyBody::Connected {
        session,
        local,
        generation,
    } = reply?
    else {
        return Err(Errno::PROTO.into());
    };
    setup.session = Some(session);
    setup.incarnation = process.incarnation();
    setup.set_local(local);
    setup.remote = Some(remote);
    match reservation {
        None => retarget(process, slot, local, Some(remote), generation),
        Some(reservation) => {
            let udp = UdpSession::new(session, local, Some(remote), generation, UDP_RECEIVE_BUFFER);
            let slot = reservation.keep();
            install(
                process,
                socket,
                slot,
                NewSession::Session(Session::Udp(Box::new(udp))),
            );
        }
    }
    Ok(())
}

fn disconnect_udp(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    let mut setup = socket.setup();
    let (SocketPhase::Cached, Some(session)) = (socket.phase(), setup.session) else {
        return Ok(());
    };
    if !setup.is_bound {
        // Linux releases the port, too.
        drop(setup);
        return reset_to_idle(process, fd, socket);
    }
    let slot = socket.slot();
    match process
        .control
        .call(RequestBody::Disconnect { session, slot }, &[])
    {
        Ok((
            ReplyBody::Bound {
                local, generation, ..
            },
            _,
        )) => {
            setup.set_local(local);
            setup.remote = None;
            retarget(process, slot, local, None, generation);
            Ok(())
        }
        other => Err(refusal(other)),
    }
}

fn disconnect_tcp(process: &'static Process, fd: RawFd, socket: &Arc<Socket>) -> Outcome<()> {
    socket.take_news();
    match socket.phase() {
        SocketPhase::Idle => Ok(()),
        SocketPhase::Relayed => Err(CallError::NotOurs),
        SocketPhase::HeldElsewhere => Err(Errno::ISCONN.into()),
        SocketPhase::Connecting
        | SocketPhase::Cached
        | SocketPhase::Listening
        | SocketPhase::Closed => reset_to_idle(process, fd, socket),
    }
}

fn connect_tcp(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    remote: SocketAddr,
) -> Outcome<()> {
    let taking = match socket.phase() {
        // The open that an earlier call began has ended: this call reports the outcome (connect(2)).
        SocketPhase::Idle if socket.take_news() => {
            let error = socket.take_error().unwrap_or(Errno::CONNABORTED);
            return Err(error.into());
        }
        SocketPhase::Cached if socket.take_news() => return Ok(()),
        SocketPhase::Idle if socket.setup().deferred.is_some() => return Err(Errno::ISCONN.into()),
        SocketPhase::Idle => {
            let taker = Taker::if_it_waits(!socket.is_nonblocking());
            let early = if socket.options().opens_fast() {
                FastOpenMode::IfCookie
            } else {
                FastOpenMode::No
            };
            match start_connect(process, fd, socket, remote, (early, taker))? {
                Opening::Started { taking, .. } => taking,
                // The SYN is sent with the first data.
                Opening::Deferred => return Ok(()),
            }
        }
        SocketPhase::Connecting if socket.is_nonblocking() => return Err(Errno::ALREADY.into()),
        SocketPhase::Connecting => Some(TakesOutcome::new(process, socket)),
        SocketPhase::Cached | SocketPhase::Listening => return Err(Errno::ISCONN.into()),
        SocketPhase::Relayed => return Err(CallError::NotOurs),
        SocketPhase::HeldElsewhere => return Err(Errno::ISCONN.into()),
        SocketPhase::Closed => return Err(Errno::BADF.into()),
    };
    let Some(taking) = taking else {
        return Err(Errno::INPROGRESS.into());
    };
    let deadline = deadline_after(socket.options().send_timeout());
    wait_connected(taking, fd, deadline)
}

/// The state of an active open.
enum Opening<'a> {
    /// It is in progress, and `early` bytes went with the SYN.
    Started {
        early: usize,
        /// `Some` if the caller receives the outcome.
        taking: Option<TakesOutcome<'a>>,
    },
    /// It waits for data that can go with the SYN (`TCP_FASTOPEN_CONNECT`).
    Deferred,
}

/// `MSG_FASTOPEN`, or the first data of a deferred open: connects with as much of `text` as fits
/// the SYN. Returns how much that was (Linux's `tcp_sendmsg_fastopen`).
pub(super) fn connect_with(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    remote: SocketAddr,
    (text, flags): (Vec<u8>, i32),
) -> Outcome<usize> {
    let cookieless = socket.options().opens_without_cookie();
    let waits = !socket.is_nonblocking() && flags & libc::MSG_DONTWAIT == 0;
    let early = FastOpenMode::Payload {
        bytes: text,
        cookieless,
        waits,
    };
    let taker = Taker::if_it_waits(waits);
    let (taken, taking) = match start_connect(process, fd, socket, remote, (early, taker))? {
        Opening::Started { early, taking } => (early, taking),
        Opening::Deferred => (0, None),
    };
    match taking {
        Some(taking) => {
            let deadline = deadline_after(socket.options().send_timeout());
            wait_connected(taking, fd, deadline)?;
            Ok(taken)
        }
        None if taken == 0 => Err(Errno::INPROGRESS.into()),
        None => Ok(taken),
    }
}

fn start_connect<'a>(
    process: &'static Process,
    fd: RawFd,
    socket: &'a Arc<Socket>,
    remote: SocketAddr,
    (early, taker): (FastOpenMode, Taker),
) -> Outcome<Opening<'a>> {
    let mut setup = socket.setup();
    carry_bytes(process, socket, &mut setup)?;
    let options = process.handshake_options(socket);
    if early == FastOpenMode::No && open_here(process, fd, socket, (&mut setup, remote), &options) {
        let taking = (taker == Taker::Caller).then_some(TakesOutcome { process, socket });
        // The program may never ask for the outcome.
        process.ensure_helper();
        return Ok(Opening::Started { early: 0, taking });
    }
    let reservation = SlotReservation::at(process);
    let is_repeatable = early == FastOpenMode::No && setup.session.is_none();
    let reply = ask(process, fd, socket, (&setup, PairKind::Stream), |session| {
        RequestBody::Connect {
            session,
            protocol: Protocol::Tcp,
            remote,
            slot: reservation.slot(),
            options,
            early: early.clone(),
        }
    })?;
    match reply {
        ReplyBody::Connecting {
            session,
            local,
            early,
        } => {
            setup.session = Some(session);
            setup.incarnation = process.incarnation();
            setup.is_open_repeatable = is_repeatable;
            setup.silent_far = None;
            setup.set_local(local);
            setup.remote = Some(remote);
            setup.deferred = None;
            socket.note_deferred(false);
            socket.expect_news();
            let mut core = process.lock();
            let slot = reservation.keep();
            socket.become_unless_closed(SocketState::Connecting { slot });
            core.add_opening(socket, fd, taker);
            drop(core);
            let taking = (taker == Taker::Caller).then_some(TakesOutcome { process, socket });
            // The program may never ask for the outcome.
            process.ensure_helper();
            Ok(Opening::Started {
                early: early as usize,
                taking,
            })
        }
        ReplyBody::Deferred => {
            setup.deferred = Some(remote);
            socket.note_deferred(true);
            Ok(Opening::Deferred)
        }
        _ => Err(Errno::PROTO.into()),
    }
}

/// Waits on the descriptor `fd` for the outcome that the caller receives.
pub(super) fn wait_connected(
    taking: TakesOutcome<'_>,
    fd: RawFd,
    deadline: Option<Instant>,
) -> Outcome<()> {
    let (process, socket) = (taking.process, taking.socket);
    let watching = Watching::new(vec![socket]);
    loop {
        let mut kernel = [pollfd(fd, libc::POLLIN)];
        let sleep = Sleep {
            kernel: &mut kernel,
            ..Sleep::until(deadline)
        };
        let is_over = || (socket.phase() != SocketPhase::Connecting).then_some(());
        match process.wait(sleep, |_, _| is_over()) {
            Ok(Woken::Ready(())) => break,
            Ok(Woken::Kernel) => complete_connect(process, fd, socket),
            Ok(Woken::TimedOut) => return Err(Errno::INPROGRESS.into()),
            Err(Errno::INTR) if restarts(deadline) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    drop(watching);
    socket.take_news();
    match socket.take_error() {
        Some(errno) => Err(errno.into()),
        None if socket.phase() == SocketPhase::Cached => Ok(()),
        None => Err(Errno::CONNABORTED.into()),
    }
}

/// While this lives, the calling thread polls the descriptor for the outcome itself.
pub(super) struct TakesOutcome<'a> {
    process: &'static Process,
    socket: &'a Arc<Socket>,
}

impl<'a> TakesOutcome<'a> {
    pub(super) fn new(process: &'static Process, socket: &'a Arc<Socket>) -> TakesOutcome<'a> {
        process.lock().openings.enter(socket);
        TakesOutcome { process, socket }
    }
}

impl Drop for TakesOutcome<'_> {
    fn drop(&mut self) {
        self.process.lock().leave_opening(self.socket);
    }
}
