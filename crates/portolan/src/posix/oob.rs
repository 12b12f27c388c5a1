//! Urgent data: `MSG_OOB` on the receiving side.

use std::io::IoSliceMut;
use std::sync::Arc;

use portolan_sys::{clock, memory};
use portolan_tcp::OutOfBand;
use rustix::io::Errno;

use super::blocking::gone;
use super::message::Received;
use crate::outcome::Outcome;
use crate::process::Process;
use crate::socket::Socket;

/// Linux's `tcp_recv_urg`: never waits.
pub(super) fn receive_urgent(
    process: &'static Process,
    socket: &Arc<Socket>,
    buffers: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Outcome<Received> {
    let place = buffers.iter_mut().find(|buffer| !buffer.is_empty());
    let is_wanted = flags & libc::MSG_TRUNC == 0;
    let mut core = process.lock();
    core.poll(clock::now());
    let Some(connection) = core.stream(socket.slot()) else {
        return gone(socket);
    };
    let found = if flags & libc::MSG_PEEK != 0 {
        connection.peek_urgent()
    } else {
        connection.take_urgent()
    };
    let byte = match found {
        OutOfBand::Nothing => return Err(Errno::INVAL.into()),
        OutOfBand::Announced if connection.is_receive_shut() => return Ok(Received::default()),
        OutOfBand::Announced => return Err(Errno::AGAIN.into()),
        OutOfBand::Byte(byte) => byte,
    };
    let mut received = Received {
        flags: libc::MSG_OOB,
        ..Received::default()
    };
    match place {
        Some(buffer) => {
            if is_wanted {
                let first = memory::writable(&mut buffer[..1]).first_mut();
                *first.ok_or(Errno::FAULT)? = byte;
            }
            received.length = 1;
        }
        None => received.flags |= libc::MSG_TRUNC,
    }
    Ok(received)
}
