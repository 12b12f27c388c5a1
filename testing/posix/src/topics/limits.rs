//! Running out of descriptors (RLIMIT_NOFILE).

use libc::{F_GETFD, O_NONBLOCK, POLLIN};

use crate::{
    call::{self, Fd, STREAM},
    show::{read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    accepting(side);
    raised(side);
}

/// Uses all numbers up to the limit, so that none is free.
fn fill_up() -> (u64, Vec<Fd>) {
    let before = call::allowed_descriptors();
    call::allow_descriptors(64);
    let mut taken = Vec::new();
    while let Ok(fd) = call::eventfd(0, 0) {
        taken.push(fd);
    }
    (before, taken)
}

fn accepting(side: &mut Side) {
    let port = side.port();
    if !side.is_server() {
        side.step();
        let socket = side.socket(STREAM);
        side.report("connect", told(call::connect(socket, side.there(port))));
        call::send(socket, b"patient", 0).expect("send");
        side.step();
        let mut buffer = [0; 16];
        let answer = call::receive(socket, &mut buffer, 0);
        side.report("answer", read_text(answer, &buffer));
        return;
    }
    let listener = side.listener(port);
    let (before, taken) = fill_up();
    side.report("socket", worked(call::socket(side.domain(), STREAM, 0)));
    side.report("epoll", worked(call::epoll_create(0)));
    side.report("dup", worked(call::dup(listener)));
    side.step();
    call::wait_for(listener, POLLIN);
    side.report("accept", worked(call::accept(listener, 0)));
    side.report(
        "accept again",
        worked(call::accept(listener, libc::SOCK_NONBLOCK)),
    );
    side.step();
    for fd in taken {
        call::close(fd).expect("close");
    }
    let accepted = call::accept(listener, 0);
    side.report("accept with room", worked(accepted));
    if let Ok((accepted, _)) = accepted {
        let mut buffer = [0; 16];
        let answer = call::receive(accepted, &mut buffer, 0);
        side.report("what it sent", read_text(answer, &buffer));
        call::send(accepted, b"at last", 0).expect("send");
    }
    call::allow_descriptors(before);
}

/// Numbers beyond the limit at the start.
fn raised(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::send(socket, b"far", 0).expect("send");
        side.step();
        return;
    }
    call::allow_descriptors(2100);
    let far = call::dup2(socket, 2000);
    side.report("far", told(far));
    side.report("far: flags", told(call::fcntl(2000, F_GETFD, 0)));
    side.report("far: peer", worked(call::peer_address(2000)));
    call::fcntl(socket, libc::F_SETFL, O_NONBLOCK).expect("F_SETFL");
    call::wait_for(socket, POLLIN);
    let mut buffer = [0; 16];
    let answer = call::read(2000, &mut buffer);
    side.report("read far away", read_text(answer, &buffer));
    side.step();
}
