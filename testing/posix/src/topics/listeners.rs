//! A listener's port after it has stopped listening, and a client's port when there is no listener.

use std::net::SocketAddr;

use libc::{POLLIN, POLLRDHUP, SHUT_RD, SHUT_RDWR, SO_ACCEPTCONN, SO_REUSEADDR, SOL_SOCKET};

use crate::{
    call::{self, Fd, STREAM},
    show::{events, read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    for (name, is_reusing) in [("stopped", false), ("stopped, reusing", true)] {
        stopped(side, name, is_reusing);
    }
    stopped_alone(side);
    chosen_port(side);
    refused(side);
    shared(side);
}

fn reusing(side: &Side) -> Fd {
    let socket = side.socket(STREAM);
    call::set_option(socket, SOL_SOCKET, SO_REUSEADDR, &1).expect("SO_REUSEADDR");
    socket
}

/// Reports whether another socket can bind the port.
fn report_binds(side: &Side, check: &str, port: u16) {
    let plain = side.socket(STREAM);
    side.report(
        &format!("{check}: bind"),
        told(call::bind(plain, side.here(port))),
    );
    call::close(plain).expect("close");
    let sharing = reusing(side);
    side.report(
        &format!("{check}: bind, reusing"),
        told(call::bind(sharing, side.here(port))),
    );
    call::close(sharing).expect("close");
}

/// Stops with one accepted connection that is open, and one that is not accepted.
fn stopped(side: &mut Side, name: &str, is_reusing: bool) {
    let port = side.port();
    let check = |what: &str| format!("{name}: {what}");
    if side.is_server() {
        let listener = if is_reusing {
            reusing(side)
        } else {
            side.socket(STREAM)
        };
        call::bind(listener, side.here(port)).expect("bind");
        call::listen(listener, 16).expect("listen");
        side.step();
        let accepted = call::accept_quietly(listener).expect("accept");
        side.step();
        call::wait_for(listener, POLLIN);
        side.report(
            &check("shutdown"),
            told(call::shutdown(listener, SHUT_RDWR)),
        );
        side.report(
            &check("shutdown again"),
            told(call::shutdown(listener, SHUT_RDWR)),
        );
        let local = call::local_address(listener).map(|local| side.name(local, port));
        side.report(&check("name"), told(local));
        side.report(
            &check("accepts"),
            told(call::flag(listener, SOL_SOCKET, SO_ACCEPTCONN)),
        );
        side.report(&check("error"), told(call::socket_error(listener)));
        side.report(
            &check("events"),
            told(call::events_now(listener).map(events)),
        );
        side.report(&check("accept"), told(call::accept_quietly(listener)));
        side.report(&check("bind"), told(call::bind(listener, side.here(port))));
        report_binds(side, &check("another"), port);
        side.step();
        side.step();
        side.report(&check("listen again"), told(call::listen(listener, 3)));
        call::send(accepted, b"alive", 0).expect("send");
        side.step();
        side.step();
        if is_reusing {
            side.report(
                &check("accept again"),
                worked(call::accept_quietly(listener)),
            );
        }
        call::close(listener).expect("close");
        // The client closes first, so that this port has no TIME-WAIT.
        call::wait_for(accepted, POLLRDHUP);
        call::close(accepted).expect("close");
    } else {
        side.step();
        let first = side.socket(STREAM);
        call::connect(first, side.there(port)).expect("connect");
        let second = side.socket(STREAM);
        call::connect(second, side.there(port)).expect("connect");
        side.step();
        side.step();
        let mut buffer = [0; 8];
        side.report(
            &check("not accepted"),
            read_text(call::receive(second, &mut buffer, 0), &buffer),
        );
        let third = side.socket(STREAM);
        side.report(
            &check("connect"),
            told(call::connect(third, side.there(port))),
        );
        side.step();
        side.step();
        side.report(
            &check("accepted"),
            read_text(call::receive(first, &mut buffer, 0), &buffer),
        );
        if is_reusing {
            let fourth = side.socket(STREAM);
            side.report(
                &check("connect again"),
                told(call::connect(fourth, side.there(port))),
            );
        }
        side.step();
        call::close(first).expect("close");
    }
    side.step();
}

/// Stops without any connection; then the socket opens one itself.
fn stopped_alone(side: &mut Side) {
    let (port, other) = (side.port(), side.port());
    if side.is_server() {
        let listener = side.socket(STREAM);
        call::bind(listener, side.here(port)).expect("bind");
        call::listen(listener, 16).expect("listen");
        for how in [SHUT_RD, SHUT_RDWR] {
            side.report("alone: shutdown", told(call::shutdown(listener, how)));
            report_binds(side, "alone: another", port);
            side.report("alone: listen again", told(call::listen(listener, 3)));
        }
        side.step();
        let accepted = call::accept_quietly(listener).expect("accept");
        call::wait_for(accepted, POLLRDHUP);
        call::close(accepted).expect("close");
        call::shutdown(listener, SHUT_RDWR).expect("shutdown");
        side.step();
        side.report(
            "alone: connect",
            told(call::connect(listener, side.there(other))),
        );
        let local = call::local_address(listener).map(|local| side.name(local, port));
        side.report("alone: name", told(local));
        call::wait_for(listener, POLLRDHUP);
        call::close(listener).expect("close");
    } else {
        let listener = side.listener(other);
        side.step();
        let socket = side.socket(STREAM);
        side.report(
            "alone: connect",
            told(call::connect(socket, side.there(port))),
        );
        call::close(socket).expect("close");
        side.step();
        let (accepted, peer) = call::accept(listener, 0).expect("accept");
        side.report("alone: peer", side.name(peer, port));
        call::close(accepted).expect("close");
        call::close(listener).expect("close");
    }
    side.step();
}

/// A port that the program did not choose is released.
fn chosen_port(side: &mut Side) {
    if !side.is_server() {
        return;
    }
    for (name, bound) in [("unbound", None), ("bound to any port", Some(side.here(0)))] {
        let listener = side.socket(STREAM);
        if let Some(local) = bound {
            call::bind(listener, local).expect("bind");
        }
        call::listen(listener, 16).expect("listen");
        let port = call::local_address(listener).expect("a name").port();
        call::shutdown(listener, SHUT_RDWR).expect("shutdown");
        report_binds(side, &format!("{name}: another"), port);
        side.report(
            &format!("{name}: listen again"),
            told(call::listen(listener, 3)),
        );
        let again = call::local_address(listener).expect("a name").port();
        side.report(&format!("{name}: has a port"), again != 0);
        call::close(listener).expect("close");
    }
}

/// Returns a socket whose connection was refused, and what `connect` returned.
fn refused_socket(side: &Side, nobodys: u16, bound: Option<SocketAddr>) -> (Fd, String) {
    side.alone(0, || {
        let socket = side.socket(STREAM);
        if let Some(local) = bound {
            call::bind(socket, local).expect("bind");
        }
        let connect = told(call::connect(socket, side.there(nobodys)));
        (socket, connect)
    })
}

/// A refused connection releases a port that was chosen for it.
fn refused(side: &mut Side) {
    let (nobodys, chosen, last) = (side.port(), side.port(), side.port());
    if side.is_server() {
        side.step();
        return;
    }
    for (name, bound) in [
        ("unbound", None),
        ("bound to any port", Some(side.here(0))),
        ("bound", Some(side.here(chosen))),
    ] {
        let (socket, connect) = refused_socket(side, nobodys, bound);
        side.report(&format!("refused, {name}: connect"), connect);
        let port = call::local_address(socket).expect("a name").port();
        if port != 0 {
            report_binds(side, &format!("refused, {name}: another"), port);
        }
        side.report(
            &format!("refused, {name}: connect again"),
            told(call::connect(socket, side.there(nobodys))),
        );
        side.report(
            &format!("refused, {name}: bind"),
            told(call::bind(socket, side.here(last))),
        );
        side.report(
            &format!("refused, {name}: listen"),
            told(call::listen(socket, 1)),
        );
        let local = call::local_address(socket).map(|local| side.name(local, last));
        side.report(&format!("refused, {name}: name"), told(local));
        call::close(socket).expect("close");
    }
    let socket = side.socket(STREAM);
    let refused = call::connect(socket, side.there(nobodys));
    side.report("refused, not bound: connect", told(refused));
    side.report("refused, not bound: listen", told(call::listen(socket, 1)));
    call::close(socket).expect("close");
    side.step();
}

/// The port of a connection, which was chosen for it.
fn shared(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        side.step();
        let accepted: Vec<_> = (0..2)
            .map(|_| call::accept_quietly(listener).expect("accept"))
            .collect();
        side.step();
        accepted.into_iter().for_each(|fd| {
            call::close(fd).expect("close");
        });
        call::close(listener).expect("close");
    } else {
        side.step();
        for (name, socket) in [("plain", side.socket(STREAM)), ("reusing", reusing(side))] {
            call::connect(socket, side.there(port)).expect("connect");
            let own = call::local_address(socket).expect("a name").port();
            report_binds(side, &format!("port of a connection, {name}"), own);
        }
        side.step();
    }
    side.step();
}
