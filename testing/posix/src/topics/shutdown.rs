//! shutdown in each direction, and the events that follow.

use libc::{MSG_NOSIGNAL, POLLHUP, POLLIN, POLLRDHUP, SHUT_RD, SHUT_RDWR, SHUT_WR};

use crate::{
    call::{self, Fd},
    show::{events, read_text, told},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    sending(side);
    receiving(side);
    both(side);
    listener(side);
}

fn receive(side: &Side, check: &str, socket: Fd) {
    let mut buffer = [0; 16];
    side.report(
        check,
        read_text(call::receive(socket, &mut buffer, 0), &buffer),
    );
}

fn sending(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::wait_for(socket, POLLRDHUP);
        side.report(
            "peer ended: events",
            told(call::events_now(socket).map(events)),
        );
        receive(side, "peer ended: receive", socket);
        receive(side, "peer ended: receive again", socket);
        side.report("peer ended: send", told(call::send(socket, b"reply", 0)));
        side.step();
        call::close(socket).expect("close");
        side.step();
    } else {
        call::send(socket, b"request", 0).expect("send");
        side.report("bad direction", told(call::shutdown(socket, 7)));
        side.report("end sending", told(call::shutdown(socket, SHUT_WR)));
        side.report("end sending again", told(call::shutdown(socket, SHUT_WR)));
        side.report("ended: send", told(call::send(socket, b"x", MSG_NOSIGNAL)));
        side.step();
        call::wait_for(socket, POLLIN);
        receive(side, "ended: receive", socket);
        side.step();
        call::wait_for(socket, POLLHUP);
        side.report(
            "both ended: events",
            told(call::events_now(socket).map(events)),
        );
        receive(side, "both ended: receive", socket);
        side.report(
            "both ended: send",
            told(call::send(socket, b"x", MSG_NOSIGNAL)),
        );
    }
}

fn receiving(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        side.report(
            "to a deaf peer: send",
            told(call::send(socket, b"late", MSG_NOSIGNAL)),
        );
        side.step();
    } else {
        side.report("end receiving", told(call::shutdown(socket, SHUT_RD)));
        side.report("deaf: events", told(call::events_now(socket).map(events)));
        receive(side, "deaf: receive", socket);
        side.step();
        side.step();
        let _ = call::poll(&[(socket, 0)], 50);
        receive(side, "deaf: receive what came", socket);
        receive(side, "deaf: receive again", socket);
        side.report("deaf: send", told(call::send(socket, b"x", MSG_NOSIGNAL)));
    }
}

fn both(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::wait_for(socket, POLLRDHUP);
        receive(side, "peer ended both: receive", socket);
        side.step();
    } else {
        side.report("end both", told(call::shutdown(socket, SHUT_RDWR)));
        side.report(
            "end both: events",
            told(call::events_now(socket).map(events)),
        );
        receive(side, "end both: receive", socket);
        side.report(
            "end both: send",
            told(call::send(socket, b"x", MSG_NOSIGNAL)),
        );
        side.step();
    }
}

fn listener(side: &mut Side) {
    let port = side.port();
    if !side.is_server() {
        return;
    }
    let listener = side.listener(port);
    side.report("listener", told(call::shutdown(listener, SHUT_RDWR)));
    side.report("listener: accept", told(call::accept_quietly(listener)));
    side.report(
        "listener: events",
        told(call::events_now(listener).map(events)),
    );
    side.report("listener: listen again", told(call::listen(listener, 3)));
}
