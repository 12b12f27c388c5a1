//! `fcntl` and `ioctl`.

use std::os::fd::RawFd;

use portolan_stack::Session;
use portolan_sys::memory;
use portolan_types::Protocol;
use rustix::io::Errno;

use super::migrate::obtain;
use super::{Answer, Stop, find};
use crate::socket::Phase;

/// Is the next octet urgent? (`asm-generic/sockios.h`)
const SIOCATMARK: u64 = 0x8905;
/// Octets that were never sent (`linux/sockios.h`).
const SIOCOUTQNSD: u64 = 0x894b;

/// Notes what concerns us; the descriptor's own flags are the kernel's.
pub fn fcntl(fd: RawFd, command: i32, argument: usize) -> Answer<i32> {
    if command == libc::F_SETFL
        && let Ok((socket, _)) = find(fd)
    {
        socket.set_nonblocking(argument & libc::O_NONBLOCK as usize != 0);
    }
    Answer::NotOurs
}

pub fn ioctl(fd: RawFd, request: u64, argument: usize) -> Answer<i32> {
    fn answer(fd: RawFd, request: u64, argument: usize) -> Result<i32, Stop> {
        let (socket, process) = find(fd)?;
        if request == libc::FIONBIO {
            let on = memory::read_int(argument)? != 0;
            socket.set_nonblocking(on);
            return Err(Stop::NotOurs);
        }
        obtain(process, fd, &socket)?;
        if request == SIOCATMARK && socket.protocol == Protocol::Udp {
            return Err(Errno::NOTTY.into());
        }
        let is_known = matches!(
            request,
            libc::FIONREAD | libc::TIOCOUTQ | SIOCOUTQNSD | SIOCATMARK
        );
        match (is_known, socket.phase()) {
            (true, Phase::Cached) => {}
            (true, Phase::Listening) if request != SIOCATMARK => return Err(Errno::INVAL.into()),
            (true, Phase::Connecting | Phase::Idle | Phase::Listening)
                if socket.protocol == Protocol::Tcp =>
            {
                memory::write_int(argument, 0)?;
                return Ok(0);
            }
            _ => return Err(Stop::NotOurs),
        }
        let mut core = process.lock();
        core.take_in(portolan_sys::clock::now());
        let octets = match (request, core.stack.get(socket.slot())) {
            (libc::FIONREAD, Some(Session::Tcp(session))) => session.connection.inquiry(),
            (SIOCATMARK, Some(Session::Tcp(session))) => {
                usize::from(session.connection.is_at_mark())
            }
            (SIOCOUTQNSD, Some(Session::Tcp(session))) => {
                session.connection.figures().unsent as usize
            }
            (libc::FIONREAD, Some(Session::Udp(session))) => session
                .queue
                .front()
                .map_or(0, |datagram| datagram.data.len()),
            (_, Some(Session::Tcp(session))) => session.connection.figures().send_queue,
            (_, Some(Session::Udp(_)) | None) => 0,
        };
        drop(core);
        memory::write_int(argument, i32::try_from(octets).unwrap_or(i32::MAX))?;
        Ok(0)
    }
    answer(fd, request, argument).into()
}
