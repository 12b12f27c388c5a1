//! Programs started by libc, which inherit a connection.

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Command, Stdio};

use crate::{
    call::{self, Fd},
    show::{read_text, told},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    kept(side);
    as_standard(side);
    by_shell(side);
}

fn receive(socket: Fd) -> String {
    let mut buffer = [0; 64];
    let answer = call::receive(socket, &mut buffer, 0);
    read_text(answer, &buffer)
}

/// A program without a copy of the connection is started and ends.
fn kept(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("before a program", receive(socket));
        call::send(socket, b"go on", 0).expect("send");
        side.report("after a program", receive(socket));
    } else {
        call::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC).expect("F_SETFD");
        call::send(socket, b"one", 0).expect("send");
        side.report("kept", receive(socket));
        let status = Command::new("true").status().expect("it runs");
        side.report("program", status);
        call::send(socket, b"two", 0).expect("send");
    }
    side.step();
}

fn as_standard(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::send(socket, b"through cat", 0).expect("send");
        call::shutdown(socket, libc::SHUT_WR).expect("shutdown");
        let mut all = [0; 20];
        let answer = call::receive(socket, &mut all, libc::MSG_WAITALL);
        side.report("through a program, and after it", read_text(answer, &all));
    } else {
        let end = || {
            let copy = call::fcntl(socket, libc::F_DUPFD_CLOEXEC, 3).expect("F_DUPFD_CLOEXEC");
            // SAFETY: the descriptor is new, and nothing else owns it.
            Stdio::from(unsafe { OwnedFd::from_raw_fd(copy) })
        };
        let status = Command::new("cat").stdin(end()).stdout(end()).status();
        side.report("cat", status.expect("it runs"));
        side.report("send after it", told(call::send(socket, b"after cat", 0)));
    }
    side.step();
}

fn by_shell(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("by a shell", receive(socket));
        call::send(socket, b"heard", 0).expect("send");
    } else {
        // Debian's shell accepts one digit only.
        let low = call::dup2(socket, 9).expect("dup2");
        side.report("system", call::run_shell(&format!("echo shell >&{low}")));
        side.report("after system", receive(socket));
    }
    side.step();
}
