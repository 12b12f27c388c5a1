//! The state of a socket after its connection, its listening, or its open has ended.

use std::time::Duration;

use libc::{
    IPPROTO_TCP, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDHUP,
    POLLWRBAND, SHUT_RDWR, SHUT_WR, SO_REUSEADDR, SOL_SOCKET,
};

use crate::{
    call::{self, Fd, STREAM},
    show::{events, read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    reset_after_end(side);
    peeked_without_copy(side);
    both_ended(side);
    reused_port(side);
    idle_listener(side);
    deferred_open(side);
    refused(side);
}

fn receive(side: &Side, check: &str, socket: Fd, flags: i32) {
    let mut buffer = *b"untouched";
    let answer = call::receive(socket, &mut buffer, flags);
    side.report(check, read_text(answer, &buffer));
}

/// The peer's end is read, then a write is answered by a reset.
fn reset_after_end(side: &mut Side) {
    let socket = side.connection();
    if !side.is_server() {
        call::close(socket).expect("close");
        side.step();
        side.step();
        return;
    }
    side.step();
    call::wait_for(socket, POLLRDHUP);
    receive(side, "reset after end: the end", socket, 0);
    call::send(socket, b"nobody reads this", MSG_NOSIGNAL).expect("the first write is taken");
    call::wait_for(socket, POLLERR | POLLHUP);
    receive(side, "reset after end: receive", socket, 0);
    receive(side, "reset after end: receive again", socket, 0);
    side.report("reset after end: peer", worked(call::peer_address(socket)));
    side.report("reset after end: error", told(call::socket_error(socket)));
    side.report(
        "reset after end: send",
        told(call::send(socket, b"x", MSG_NOSIGNAL)),
    );
    receive(side, "reset after end: receive at last", socket, 0);
    side.report(
        "reset after end: shutdown",
        told(call::shutdown(socket, SHUT_RDWR)),
    );
    side.step();
}

fn peeked_without_copy(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::send(socket, b"eleven here", 0).expect("send");
        side.step();
        return;
    }
    side.step();
    call::wait_for(socket, POLLIN);
    receive(side, "look without copy", socket, MSG_PEEK | MSG_TRUNC);
    receive(side, "look", socket, MSG_PEEK);
    receive(side, "drop", socket, MSG_TRUNC);
    receive(side, "rest", socket, 0);
}

/// Both sides have shut down.
fn both_ended(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        call::wait_for(socket, POLLRDHUP);
        call::shutdown(socket, SHUT_WR).expect("connected");
    } else {
        call::shutdown(socket, SHUT_WR).expect("connected");
        side.step();
    }
    call::wait_for(socket, POLLHUP);
    // The last acknowledgement is in flight.
    std::thread::sleep(Duration::from_millis(100));
    side.report("both ended: peer", worked(call::peer_address(socket)));
    side.report(
        "both ended: shutdown",
        told(call::shutdown(socket, SHUT_WR)),
    );
    receive(side, "both ended: receive", socket, 0);
    side.step();
}

/// A port that the system chose for a connection is bound again.
fn reused_port(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        side.step();
        let accepted = call::accept(listener, 0);
        side.report("reuse: accept", worked(accepted));
        side.step();
        return;
    }
    side.step();
    let (connected, _) = side.alone(1, || {
        let connected = side.socket(STREAM);
        call::set_option(connected, SOL_SOCKET, SO_REUSEADDR, &1).expect("SO_REUSEADDR");
        (
            connected,
            call::connect(connected, side.there(port)).expect("connect"),
        )
    });
    let local = call::local_address(connected).expect("an address");
    for reuse in [0, 1] {
        let other = side.socket(STREAM);
        call::set_option(other, SOL_SOCKET, SO_REUSEADDR, &reuse).expect("SO_REUSEADDR");
        side.report(
            &format!("reuse {reuse}: bind"),
            told(call::bind(other, side.here(local.port()))),
        );
        call::close(other).expect("close");
    }
    side.step();
}

fn idle_listener(side: &mut Side) {
    let port = side.port();
    if !side.is_server() {
        return;
    }
    let listener = side.listener(port);
    let polled = call::poll(&[(listener, POLLIN | POLLOUT | POLLWRBAND)], 0);
    side.report(
        "idle listener: poll",
        told(polled.map(|(count, told)| format!("{count} {:#x}", told[0]))),
    );
    let unbound = side.socket(STREAM);
    side.report("unbound: listen", told(call::listen(unbound, 5)));
    let address = call::local_address(unbound).expect("an address");
    side.report("unbound: address", side.name(address, 0));
    side.report("unbound: stop", told(call::shutdown(unbound, SHUT_RDWR)));
    side.report("unbound: listen again", told(call::listen(unbound, 5)));
}

fn deferred_open(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        let queue = call::set_option(listener, IPPROTO_TCP, libc::TCP_FASTOPEN, &5);
        queue.expect("TCP_FASTOPEN");
        side.step();
        for _ in 0..2 {
            let (accepted, _) = call::accept(listener, 0).expect("accept");
            let mut buffer = [0; 8];
            let _ = call::receive(accepted, &mut buffer, 0);
            call::close(accepted).expect("close");
        }
        side.step();
        return;
    }
    side.step();
    for check in ["first", "second"] {
        let socket = side.socket(STREAM);
        call::set_option(socket, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &1)
            .expect("TCP_FASTOPEN_CONNECT");
        side.report(
            &format!("deferred, {check}: connect"),
            told(call::connect(socket, side.there(port))),
        );
        side.report(
            &format!("deferred, {check}: events"),
            told(call::events_now(socket).map(events)),
        );
        side.report(
            &format!("deferred, {check}: send"),
            told(call::send(socket, b"hello", 0)),
        );
        call::wait_for(socket, POLLIN);
        call::close(socket).expect("close");
    }
    side.step();
}

/// A socket whose open was refused may be used again.
fn refused(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        return;
    }
    for is_bound in [false, true] {
        let check = |what: &str| format!("refused, bound {is_bound}: {what}");
        let socket = side.socket(STREAM);
        if is_bound {
            call::bind(socket, side.here(0)).expect("bind");
        }
        side.report(
            &check("connect"),
            told(call::connect(socket, side.there(port))),
        );
        side.report(&check("bind"), told(call::bind(socket, side.here(0))));
        side.report(&check("listen"), told(call::listen(socket, 5)));
    }
}
