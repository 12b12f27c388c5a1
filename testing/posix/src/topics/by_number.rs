//! The same calls by number, as some runtimes make them.

use std::net::SocketAddr;

use libc::{
    SYS_close, SYS_dup, SYS_fcntl, SYS_getpid, SYS_read, SYS_recvfrom, SYS_sendto, SYS_shutdown,
    SYS_socket, SYS_write, c_long,
};

use crate::{
    call::{self, Answer, Fd, STREAM, by_number},
    show::{read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let mut buffer = [0; 9];
        side.report(
            "peer",
            read_text(
                call::receive(socket, &mut buffer, libc::MSG_WAITALL),
                &buffer,
            ),
        );
        call::send(socket, b"reply", 0).expect("send");
        call::wait_for(socket, libc::POLLRDHUP);
        side.report(
            "peer has ended",
            told(call::receive(socket, &mut [0; 4], 0)),
        );
        side.step();
        return;
    }
    side.report(
        "process",
        told(by_number(SYS_getpid, [0; 4]).map(|pid| pid == std::process::id() as usize)),
    );
    side.report("write", told(give(SYS_write, socket, b"write")));
    side.report("sendto", told(give(SYS_sendto, socket, b"send")));
    let mut buffer = [0; 2];
    side.report(
        "read",
        read_text(take(SYS_read, socket, &mut buffer), &buffer),
    );
    let mut buffer = [0; 16];
    side.report(
        "recvfrom",
        read_text(take(SYS_recvfrom, socket, &mut buffer), &buffer),
    );
    let status = by_number(SYS_fcntl, [socket as usize, libc::F_GETFL as usize, 0, 0]);
    side.report("fcntl", told(status.map(|flags| format!("{flags:#o}"))));
    let copy = by_number(SYS_dup, [socket as usize, 0, 0, 0]).expect("dup") as Fd;
    side.report(
        "dup",
        told(call::peer_address(copy).map(|peer: SocketAddr| side.name(peer, 0))),
    );
    side.report(
        "close",
        told(by_number(SYS_close, [socket as usize, 0, 0, 0])),
    );
    side.report(
        "close again",
        told(by_number(SYS_close, [socket as usize, 0, 0, 0])),
    );
    side.report(
        "shutdown",
        told(by_number(
            SYS_shutdown,
            [copy as usize, libc::SHUT_WR as usize, 0, 0],
        )),
    );
    side.step();
    let fresh = by_number(SYS_socket, [side.domain() as usize, STREAM as usize, 0, 0]);
    side.report("socket", worked(fresh));
    let fresh = fresh.expect("a socket") as Fd;
    side.report(
        "socket: kind",
        told(call::flag(fresh, libc::SOL_SOCKET, libc::SO_TYPE)),
    );
}

fn give(call: c_long, socket: Fd, bytes: &[u8]) -> Answer<usize> {
    by_number(
        call,
        [socket as usize, bytes.as_ptr() as usize, bytes.len(), 0],
    )
}

fn take(call: c_long, socket: Fd, room: &mut [u8]) -> Answer<usize> {
    by_number(
        call,
        [socket as usize, room.as_mut_ptr() as usize, room.len(), 0],
    )
}
