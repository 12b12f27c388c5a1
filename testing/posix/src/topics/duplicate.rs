//! dup, dup2, dup3 and F_DUPFD: copies share everything except the flags of the descriptor itself.

use libc::{
    F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_GETFL, F_SETFL, MSG_DONTWAIT, O_CLOEXEC, O_NONBLOCK,
};

use crate::{
    call::{self, Fd, STREAM},
    show::{read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    copies(side);
    onto(side);
    listener(side);
}

fn receive(socket: Fd, flags: i32) -> String {
    let mut buffer = [0; 16];
    let answer = call::receive(socket, &mut buffer, flags);
    read_text(answer, &buffer)
}

fn copies(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("peer", receive(socket, 0));
        side.report("peer is still there", receive(socket, MSG_DONTWAIT));
        side.step();
        side.step();
        call::wait_for(socket, libc::POLLRDHUP);
        side.report("peer has closed", receive(socket, MSG_DONTWAIT));
        return;
    }
    let copy = call::dup(socket).expect("dup");
    call::fcntl(copy, F_SETFL, O_NONBLOCK).expect("F_SETFL");
    side.report(
        "status is shared",
        told(call::fcntl(socket, F_GETFL, 0).map(|flags| flags & O_NONBLOCK != 0)),
    );
    side.report(
        "name is shared",
        call::local_address(copy) == call::local_address(socket),
    );
    side.report("close the first", told(call::close(socket)));
    side.report("first is closed", told(call::send(socket, b"x", 0)));
    side.report("send by the copy", told(call::send(copy, b"copy", 0)));
    side.step();
    let higher = call::fcntl(copy, F_DUPFD, 200).expect("F_DUPFD");
    side.report("F_DUPFD", higher);
    side.report("F_DUPFD flags", told(call::fcntl(higher, F_GETFD, 0)));
    let marked = call::fcntl(copy, F_DUPFD_CLOEXEC, 200).expect("F_DUPFD_CLOEXEC");
    side.report("F_DUPFD_CLOEXEC", marked);
    side.report(
        "F_DUPFD_CLOEXEC flags",
        told(call::fcntl(marked, F_GETFD, 0)),
    );
    side.report("F_DUPFD negative", told(call::fcntl(copy, F_DUPFD, -1)));
    for copy in [copy, higher, marked] {
        side.report("close a copy", told(call::close(copy)));
    }
    side.step();
}

fn onto(side: &mut Side) {
    let (first, second) = (side.connection(), side.connection());
    if side.is_server() {
        call::wait_for(second, libc::POLLRDHUP);
        side.report("overwritten peer has closed", receive(second, MSG_DONTWAIT));
        side.report("kept peer", receive(first, 0));
        side.step();
        return;
    }
    side.report(
        "onto itself",
        told(call::dup2(first, first).map(|copy| copy == first)),
    );
    side.report("dup3 onto itself", worked(call::dup3(first, first, 0)));
    side.report("dup3 bad flags", worked(call::dup3(first, second, 1)));
    side.report("of a closed one", worked(call::dup2(9999, second)));
    side.report(
        "onto another socket",
        told(call::dup2(first, second).map(|copy| copy == second)),
    );
    side.report("send by the copy", told(call::send(second, b"onto", 0)));
    let (reader, writer) = call::pipe();
    let place = call::dup(reader).expect("dup");
    side.report(
        "onto a pipe",
        told(call::dup3(first, place, O_CLOEXEC).map(|copy| copy == place)),
    );
    side.report("onto a pipe: flags", told(call::fcntl(place, F_GETFD, 0)));
    side.report("onto a pipe: connected", worked(call::peer_address(place)));
    side.report(
        "pipe onto a socket",
        told(call::dup2(reader, place).map(|copy| copy == place)),
    );
    call::write(writer, b"pipe").expect("write");
    let mut buffer = [0; 8];
    side.report(
        "pipe onto a socket: read",
        read_text(call::read(place, &mut buffer), &buffer),
    );
    side.report(
        "pipe onto a socket: peer",
        worked(call::peer_address(place)),
    );
    side.step();
}

fn listener(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        let copy = call::dup(listener).expect("dup");
        call::close(listener).expect("close");
        side.step();
        call::wait_for(copy, libc::POLLIN);
        side.report("accept by the copy", worked(call::accept(copy, 0)));
    } else {
        side.step();
        let socket = side.socket(STREAM);
        side.report(
            "connect to the copy",
            told(call::connect(socket, side.there(port))),
        );
    }
    side.step();
}
