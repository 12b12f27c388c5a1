//! getsockname and getpeername before and after each step.

use crate::{
    call::{self, DATAGRAM, Fd, STREAM},
    show::{told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let port = side.port();
    let listener = side.is_server().then(|| side.listener(port));
    side.step();
    if let Some(listener) = listener {
        names(side, "listener", listener, port);
        let (accepted, _) = call::accept(listener, 0).expect("accept");
        names(side, "accepted", accepted, port);
        side.step();
    } else {
        stream(side, port);
        datagram(side, port);
        side.step();
    }
}

fn names(side: &Side, check: &str, socket: Fd, known: u16) {
    let local = call::local_address(socket).map(|address| side.name(address, known));
    side.report(&format!("{check}: local"), told(local));
    let peer = call::peer_address(socket).map(|address| side.name(address, known));
    side.report(&format!("{check}: peer"), told(peer));
}

fn stream(side: &Side, port: u16) {
    let socket = side.socket(STREAM);
    names(side, "fresh", socket, port);
    call::bind(socket, side.here(0)).expect("bind");
    names(side, "bound", socket, port);
    let before = call::local_address(socket);
    call::connect(socket, side.there(port)).expect("connect");
    names(side, "connected", socket, port);
    side.report(
        "connected: same port",
        call::local_address(socket) == before,
    );
    for room in [0, 2, 8, 16, 64] {
        let (written, length) = call::local_address_cut(socket, room).expect("getsockname");
        side.report(
            &format!("room for {room}"),
            format!("{} written, {length} told", written <= room),
        );
    }
    let reserved = side.socket(STREAM);
    let any = if side.is_v6() { "[::]:0" } else { "0.0.0.0:0" };
    side.report(
        "bind any",
        worked(call::bind(reserved, any.parse().expect("an address"))),
    );
    names(side, "bound to any", reserved, port);
}

fn datagram(side: &Side, port: u16) {
    let socket = side.socket(DATAGRAM);
    names(side, "fresh datagram", socket, port);
    call::connect(socket, side.there(port)).expect("connect");
    names(side, "connected datagram", socket, port);
    call::disconnect(socket).expect("disconnect");
    names(side, "disconnected datagram", socket, port);
}
