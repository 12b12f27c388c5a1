//! connect, blocking and non-blocking, successful and refused, and calls on an unconnected socket.

use std::{net::SocketAddr, thread, time::Duration};

use libc::{MSG_NOSIGNAL, POLLIN, POLLOUT, SHUT_RDWR, SHUT_WR, SOCK_NONBLOCK, sockaddr_in};

use crate::{
    call::{self, DATAGRAM, STREAM},
    show::{events, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let (open, closed, early) = (side.port(), side.port(), side.port());
    if side.is_server() {
        side.listener(open);
    }
    side.step();
    if !side.is_server() {
        unconnected(side);
        binding(side);
        refused(side, closed);
        in_progress(side, open, closed);
        twice(side, open);
        addresses(side, open);
    }
    side.step();
    unlooked(side, early);
}

/// A connection that its program never looks at is one nevertheless: shut down or closed it ends in order.
fn unlooked(side: &mut Side, port: u16) {
    let listener = side.is_server().then(|| side.listener(port));
    for way in ["shut down", "closed"] {
        side.step();
        if let Some(listener) = listener {
            let (accepted, _) = call::accept(listener, 0).expect("accept");
            let mut buffer = [0; 8];
            let answer = call::receive(accepted, &mut buffer, 0);
            side.report(&format!("unlooked, {way}: the end"), told(answer));
            call::close(accepted).expect("close");
            continue;
        }
        let socket = side.socket(STREAM | SOCK_NONBLOCK);
        // The server may have answered by now where both are on one host.
        let _ = call::connect(socket, side.there(port));
        thread::sleep(Duration::from_millis(100));
        if way == "shut down" {
            let answer = call::shutdown(socket, SHUT_WR);
            side.report("unlooked: shutdown", told(answer));
            call::wait_for(socket, POLLIN);
        }
        call::close(socket).expect("close");
    }
    side.step();
}

fn unconnected(side: &Side) {
    let socket = side.socket(STREAM);
    side.report(
        "fresh socket: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "fresh socket: receive",
        told(call::receive(socket, &mut [0; 8], 0)),
    );
    side.report(
        "fresh socket: send",
        told(call::send(socket, b"x", MSG_NOSIGNAL)),
    );
    side.report(
        "fresh socket: shutdown",
        told(call::shutdown(socket, SHUT_RDWR)),
    );
    side.report("fresh socket: peer", worked(call::peer_address(socket)));
    side.report("fresh socket: accept", told(call::accept_quietly(socket)));
    side.report("fresh socket: disconnect", told(call::disconnect(socket)));
    side.report(
        "fresh socket: error",
        told(call::socket_error(socket).map(|error| error.0)),
    );
    side.report("fresh socket: close", told(call::close(socket)));
    side.report("fresh socket: close again", told(call::close(socket)));
    let inet = side.domain();
    side.report("socket of a bad type", worked(call::socket(inet, 77, 0)));
    side.report(
        "stream socket of UDP",
        worked(call::socket(inet, STREAM, libc::IPPROTO_UDP)),
    );
    side.report(
        "datagram socket of TCP",
        worked(call::socket(inet, DATAGRAM, libc::IPPROTO_TCP)),
    );
}

fn binding(side: &Side) {
    let port = side.port();
    let first = side.socket(STREAM);
    side.report("bind", told(call::bind(first, side.here(port))));
    side.report("bind again", told(call::bind(first, side.here(port))));
    let second = side.socket(STREAM);
    side.report(
        "bind a port in use",
        told(call::bind(second, side.here(port))),
    );
    let foreign: SocketAddr = if side.is_v6() {
        "[2001:db8::77]:0".parse().expect("an address")
    } else {
        "198.51.100.77:0".parse().expect("an address")
    };
    side.report("bind a foreign address", told(call::bind(second, foreign)));
    side.report("listen", told(call::listen(first, 1)));
    side.report(
        "connect a listener",
        told(call::connect(first, side.there(port))),
    );
    side.report("listen unbound", told(call::listen(second, 1)));
    side.report(
        "listen unbound: port",
        told(call::local_address(second).map(|name| name.port() != 0)),
    );
}

fn refused(side: &Side, closed: u16) {
    let socket = side.socket(STREAM);
    side.report(
        "refused: connect",
        told(call::connect(socket, side.there(closed))),
    );
    side.report(
        "refused: error",
        told(call::socket_error(socket).map(|error| error.0)),
    );
    side.report(
        "refused: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "refused: receive",
        told(call::receive(socket, &mut [0; 8], 0)),
    );
    side.report(
        "refused: connect again",
        told(call::connect(socket, side.there(closed))),
    );
}

fn in_progress(side: &Side, open: u16, closed: u16) {
    let socket = side.socket(STREAM | SOCK_NONBLOCK);
    side.report(
        "no wait: connect",
        told(call::connect(socket, side.there(open))),
    );
    let ready = call::poll(&[(socket, POLLOUT)], 3000).map(|(_, found)| events(found[0]));
    side.report("no wait: events", told(ready));
    side.report(
        "no wait: error",
        told(call::socket_error(socket).map(|error| error.0)),
    );
    side.report(
        "no wait: connect again",
        told(call::connect(socket, side.there(open))),
    );
    side.report(
        "no wait: connect once more",
        told(call::connect(socket, side.there(open))),
    );

    let socket = side.socket(STREAM | SOCK_NONBLOCK);
    side.report(
        "no wait, refused: connect",
        told(call::connect(socket, side.there(closed))),
    );
    let ready = call::poll(&[(socket, POLLOUT)], 3000).map(|(_, found)| events(found[0]));
    side.report("no wait, refused: events", told(ready));
    side.report("no wait, refused: error", told(call::socket_error(socket)));
    side.report(
        "no wait, refused: error again",
        told(call::socket_error(socket).map(|error| error.0)),
    );
    side.report(
        "no wait, refused: events again",
        told(call::events_now(socket).map(events)),
    );

    let socket = side.socket(STREAM | SOCK_NONBLOCK);
    let _ = call::connect(socket, side.there(closed));
    call::wait_for(socket, POLLOUT);
    side.report(
        "no wait, refused: connect tells",
        told(call::connect(socket, side.there(closed))),
    );
}

fn twice(side: &Side, open: u16) {
    let socket = side.socket(STREAM);
    side.report("connected", told(call::connect(socket, side.there(open))));
    side.report(
        "connected: connect again",
        told(call::connect(socket, side.there(open))),
    );
    side.report("connected: listen", told(call::listen(socket, 1)));
    side.report("connected: bind", told(call::bind(socket, side.here(0))));
    side.report("connected: accept", told(call::accept_quietly(socket)));
    side.report(
        "connected: events",
        told(call::events_now(socket).map(events)),
    );
    side.report("connected: disconnect", told(call::disconnect(socket)));
    side.report("disconnected: peer", worked(call::peer_address(socket)));
    side.report(
        "disconnected: connect",
        told(call::connect(socket, side.there(open))),
    );
}

fn addresses(side: &Side, open: u16) {
    let socket = side.socket(STREAM);
    let whole = size_of::<sockaddr_in>() as u32;
    side.report(
        "address cut",
        told(call::connect_short(socket, side.there(open), whole - 1)),
    );
    side.report(
        "address of one byte",
        told(call::connect_short(socket, side.there(open), 1)),
    );
    side.report(
        "address of UNIX",
        told(call::connect_family(
            socket,
            side.there(open),
            libc::AF_UNIX as u16,
        )),
    );
    let other = if side.is_v6() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    side.report(
        "address of the other family",
        worked(call::connect_family(socket, side.there(open), other as u16)),
    );
}
