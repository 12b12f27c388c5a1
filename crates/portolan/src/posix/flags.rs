//! `fcntl` and `ioctl`.

use std::os::fd::RawFd;

use portolan_sys::{descriptor, memory};
use portolan_types::Protocol;
use rustix::io::Errno;

use super::find::find;
use crate::descriptors;
use crate::migration::fallback::new_kernel_socket;
use crate::migration::obtain;
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::socket::{Socket, SocketPhase};

/// Is the next byte urgent? (`asm-generic/sockios.h`)
const SIOCATMARK: u64 = 0x8905;
/// Bytes that were not sent yet (`linux/sockios.h`).
const SIOCOUTQNSD: u64 = 0x894b;

/// Notes flags that concern the library; the descriptor's flags themselves are set by the kernel.
pub fn fcntl(fd: RawFd, command: i32, argument: usize) -> Outcome<i32> {
    if matches!(command, libc::F_SETOWN | F_SETOWN_EX | F_SETSIG) && descriptors::is_ours(fd) {
        note_owner();
    }
    if command == libc::F_SETFL
        && let Ok((socket, _)) = find(fd)
    {
        socket.set_nonblocking(argument & libc::O_NONBLOCK as usize != 0);
        socket.set_async(argument & libc::O_ASYNC as usize != 0);
    }
    Err(CallError::NotOurs)
}

/// Notes that a socket has an owner that gets signals.
fn note_owner() {
    Socket::note_owner();
    if let Some(process) = Process::running() {
        process.lock().note_owner();
    }
}

/// Not in libc (`asm-generic/fcntl.h`).
const F_SETOWN_EX: i32 = 15;
const F_SETSIG: i32 = 10;

/// `asm-generic/sockios.h`
const FIOSETOWN: u64 = 0x8901;
const SIOCSPGRP: u64 = 0x8902;

/// Requests about the open file, not the socket (`asm-generic/ioctls.h`, `sockios.h`).
const OF_FILE: [u64; 9] = [
    libc::FIOCLEX,
    libc::FIONCLEX,
    libc::FIONBIO,
    libc::FIOASYNC,
    FIOSETOWN,
    SIOCSPGRP,
    0x8903, // FIOGETOWN
    0x8904, // SIOCGPGRP
    0x5460, // FIOQSIZE
];

pub fn ioctl(fd: RawFd, request: u64, argument: usize) -> Outcome<i32> {
    let (socket, process) = find(fd)?;
    if request == libc::FIONBIO {
        let on = memory::read_int(argument)? != 0;
        socket.set_nonblocking(on);
        return Err(CallError::NotOurs);
    }
    if request == libc::FIOASYNC {
        socket.set_async(memory::read_int(argument)? != 0);
    }
    if matches!(request, FIOSETOWN | SIOCSPGRP) {
        note_owner();
    }
    if OF_FILE.contains(&request) {
        return Err(CallError::NotOurs);
    }
    obtain(process, fd, &socket)?;
    let is_known = match request {
        libc::FIONREAD | libc::TIOCOUTQ => true,
        SIOCOUTQNSD | SIOCATMARK => socket.protocol == Protocol::Tcp,
        _ => false,
    };
    if !is_known {
        // Interfaces, routes, neighbours: the descriptor itself is not of an Internet family.
        let kernel = new_kernel_socket(&socket)?;
        return Ok(descriptor::request(&kernel, request, argument)?);
    }
    match socket.phase() {
        SocketPhase::Cached => {}
        SocketPhase::Listening if request != SIOCATMARK => return Err(Errno::INVAL.into()),
        SocketPhase::Connecting | SocketPhase::Idle | SocketPhase::Listening => {
            memory::write_int(argument, 0)?;
            return Ok(0);
        }
        _ => return Err(CallError::NotOurs),
    }
    let mut core = process.lock();
    core.poll_rx(portolan_sys::clock::now());
    let slot = socket.slot();
    let bytes = match (request, core.stream(slot)) {
        (libc::FIONREAD, Some(stream)) => stream.inquiry(),
        (SIOCATMARK, Some(stream)) => usize::from(stream.is_at_mark()),
        (SIOCOUTQNSD, Some(stream)) => stream.tcp_info().unsent as usize,
        (_, Some(stream)) => stream.tcp_info().send_queue,
        (libc::FIONREAD, None) => core
            .stack
            .udp(slot)
            .and_then(|session| session.queue.front())
            .map_or(0, |datagram| datagram.data.len()),
        (_, None) => 0,
    };
    drop(core);
    memory::write_int(argument, i32::try_from(bytes).unwrap_or(i32::MAX))?;
    Ok(0)
}
