//! accept: flags, order, inherited options, and calls on the listener itself.

use libc::{F_GETFD, F_GETFL, IPPROTO_TCP, O_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK, SOL_SOCKET};

use crate::{
    call::{self, Fd, STREAM},
    show::{events, read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        serve(side, port);
    } else {
        ask(side, port);
    }
    abandoned(side);
}

fn serve(side: &mut Side, port: u16) {
    let listener = side.listener(port);
    for (name, value) in [(libc::SO_KEEPALIVE, 1), (libc::SO_RCVBUF, 100_000)] {
        call::set_option(listener, SOL_SOCKET, name, &value).expect("an option");
    }
    call::set_option(listener, IPPROTO_TCP, libc::TCP_NODELAY, &1).expect("TCP_NODELAY");
    let flags = call::fcntl(listener, F_GETFL, 0).expect("flags");
    call::fcntl(listener, libc::F_SETFL, flags | O_NONBLOCK).expect("O_NONBLOCK");
    side.report(
        "listener: events",
        told(call::events_now(listener).map(events)),
    );
    side.report(
        "listener: accept nothing",
        told(call::accept_quietly(listener)),
    );
    side.report(
        "listener: bad flags",
        worked(call::accept(listener, 0x4000_0000)),
    );
    side.report(
        "listener: accepts",
        told(call::flag(listener, SOL_SOCKET, libc::SO_ACCEPTCONN)),
    );
    side.report(
        "listener: receive",
        told(call::receive(listener, &mut [0; 4], 0)),
    );
    side.report(
        "listener: send",
        told(call::send(listener, b"x", libc::MSG_NOSIGNAL)),
    );
    side.report("listener: listen again", told(call::listen(listener, 5)));
    side.step();
    for flags in [0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC] {
        side.step();
        side.report(
            "listener: events",
            told(call::events_within(listener, 3000).map(events)),
        );
        let (accepted, peer) = call::accept(listener, flags).expect("accept");
        describe(side, accepted, peer, flags);
        side.step();
        call::close(accepted).expect("close");
    }
    side.step();
    for _ in 0..3 {
        call::wait_for(listener, libc::POLLIN);
        let accepted = call::accept(listener, 0).expect("accept").0;
        let mut buffer = [0; 8];
        side.report(
            "in order",
            read_text(call::receive(accepted, &mut buffer, 0), &buffer),
        );
        call::close(accepted).expect("close");
    }
}

fn describe(side: &Side, accepted: Fd, peer: std::net::SocketAddr, flags: i32) {
    let check = |what: &str| format!("flags {flags:#x}: {what}");
    side.report(&check("peer"), side.name(peer, 0));
    side.report(
        &check("peer again"),
        told(call::peer_address(accepted).map(|again| again == peer)),
    );
    side.report(
        &check("status"),
        told(call::fcntl(accepted, F_GETFL, 0).map(|flags| format!("{flags:#o}"))),
    );
    side.report(
        &check("descriptor"),
        told(call::fcntl(accepted, F_GETFD, 0)),
    );
    side.report(
        &check("keep-alive"),
        told(call::flag(accepted, SOL_SOCKET, libc::SO_KEEPALIVE)),
    );
    side.report(
        &check("receive buffer"),
        told(call::flag(accepted, SOL_SOCKET, libc::SO_RCVBUF)),
    );
    side.report(
        &check("no delay"),
        told(call::flag(accepted, IPPROTO_TCP, libc::TCP_NODELAY)),
    );
    side.report(
        &check("accepts"),
        told(call::flag(accepted, SOL_SOCKET, libc::SO_ACCEPTCONN)),
    );
}

fn ask(side: &mut Side, port: u16) {
    side.step();
    for _ in 0..4 {
        let socket = side.socket(STREAM);
        call::connect(socket, side.there(port)).expect("connect");
        side.step();
        side.step();
        call::close(socket).expect("close");
    }
    for text in [b"one", b"two", b"six"] {
        let socket = side.socket(STREAM);
        call::connect(socket, side.there(port)).expect("connect");
        call::send(socket, text, 0).expect("send");
    }
    side.step();
}

/// Closing a listener resets connections that were not accepted.
fn abandoned(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        side.step();
        side.step();
        call::wait_for(listener, libc::POLLIN);
        call::close(listener).expect("close");
        side.step();
    } else {
        side.step();
        let socket = side.socket(STREAM);
        side.report(
            "abandoned: connect",
            told(call::connect(socket, side.there(port))),
        );
        side.step();
        side.step();
        call::wait_for(socket, libc::POLLIN);
        side.report(
            "abandoned: events",
            told(call::events_now(socket).map(events)),
        );
        side.report(
            "abandoned: receive",
            told(call::receive(socket, &mut [0; 8], 0)),
        );
    }
}
