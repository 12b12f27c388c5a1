//! Datagrams: connected and not, errors reported by ICMP, sizes, and control messages.

use std::net::SocketAddr;

use libc::{
    FIONREAD, IPPROTO_IP, MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, MSG_WAITFORONE, SHUT_RD, SHUT_RDWR,
    SHUT_WR, SOL_SOCKET,
};

use crate::{
    call::{self, Answer, DATAGRAM, Fd},
    show::{events, message_flags, read_text, text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let (port, closed) = (side.port(), side.port());
    let socket = side.socket(DATAGRAM);
    if side.is_server() {
        call::bind(socket, side.here(port)).expect("bind");
        side.step();
        echo(side, socket);
        return;
    }
    side.step();
    fresh(side);
    bindings(side);
    unconnected(side, socket, port);
    sizes(side, socket, port);
    many(side, socket, port);
    told_with(side, port);
    connected(side, port);
    unreachable(side, closed);
    shut_down(side, port);
    call::send_to(socket, b"end", 0, side.there(port)).expect("send");
}

/// Echoes each datagram, until one is "end".
fn echo(side: &Side, socket: Fd) {
    let mut buffer = vec![0; 65_536];
    loop {
        let (length, from) = call::receive_from(socket, &mut buffer, 0).expect("receive");
        let from = from.expect("a datagram has a source");
        if &buffer[..length] == b"end" {
            side.report("ended by", side.name(from, 0));
            return;
        }
        call::send_to(socket, &buffer[..length], 0, from).expect("send");
    }
}

fn received(side: &Side, socket: Fd, room: usize, flags: i32, port: u16) -> String {
    let mut buffer = vec![0; room];
    call::wait_for(socket, libc::POLLIN);
    match call::receive_from(socket, &mut buffer, flags) {
        Ok((length, from)) => {
            let from = from.map_or("nobody".to_owned(), |from| side.name(from, port));
            format!("{} from {from}", read_text(Ok(length), &buffer))
        }
        Err(errno) => errno.to_string(),
    }
}

fn fresh(side: &Side) {
    let socket = side.socket(DATAGRAM);
    side.report("fresh: events", told(call::events_now(socket).map(events)));
    side.report("fresh: send", told(call::send(socket, b"x", 0)));
    side.report(
        "fresh: receive",
        told(call::receive(socket, &mut [0; 8], MSG_DONTWAIT)),
    );
    side.report("fresh: listen", told(call::listen(socket, 1)));
    side.report("fresh: accept", told(call::accept_quietly(socket)));
    side.report("fresh: peer", worked(call::peer_address(socket)));
    side.report("fresh: shutdown", told(call::shutdown(socket, SHUT_RDWR)));
    side.report("fresh: count", told(call::ioctl(socket, FIONREAD, -1)));
    side.report(
        "fresh: to port 0",
        told(call::send_to(socket, b"x", 0, side.there(0))),
    );
    if !side.is_v6() {
        let broadcast: SocketAddr = "255.255.255.255:9".parse().expect("an address");
        side.report(
            "fresh: broadcast",
            told(call::send_to(socket, b"x", 0, broadcast)),
        );
    }
}

fn bindings(side: &Side) {
    let port = side.port();
    let (first, second) = (side.socket(DATAGRAM), side.socket(DATAGRAM));
    side.report("bind", told(call::bind(first, side.here(port))));
    side.report("bind in use", told(call::bind(second, side.here(port))));
    for socket in [first, second] {
        call::set_option(socket, SOL_SOCKET, libc::SO_REUSEADDR, &1).expect("SO_REUSEADDR");
    }
    side.report(
        "bind in use, reusing",
        told(call::bind(second, side.here(port))),
    );
}

fn unconnected(side: &Side, socket: Fd, port: u16) {
    let there = side.there(port);
    side.report("send", told(call::send_to(socket, b"hello", 0, there)));
    side.report(
        "own name",
        told(call::local_address(socket).map(|name| side.name(name, port))),
    );
    side.report("peek", received(side, socket, 16, MSG_PEEK, port));
    side.report("count", told(call::ioctl(socket, FIONREAD, -1)));
    side.report("events", told(call::events_now(socket).map(events)));
    side.report("receive", received(side, socket, 16, 0, port));
    side.report(
        "receive nothing",
        told(call::receive(socket, &mut [0; 8], MSG_DONTWAIT)),
    );
    side.report("send nothing", told(call::send_to(socket, b"", 0, there)));
    side.report("receive an empty one", received(side, socket, 16, 0, port));
    side.report(
        "send pieces",
        told(call::send_message(
            socket,
            &[b"pie", b"", b"ces"],
            Some(there),
            0,
        )),
    );
    side.report("receive pieces", received(side, socket, 16, 0, port));
}

fn sizes(side: &Side, socket: Fd, port: u16) {
    let there = side.there(port);
    let send = |bytes: &[u8]| told(call::send_to(socket, bytes, 0, there));
    send(b"truncated");
    side.report("cut", received(side, socket, 4, 0, port));
    side.report(
        "the rest is gone",
        told(call::receive(socket, &mut [0; 8], MSG_DONTWAIT)),
    );
    send(b"truncated");
    side.report(
        "cut, true length",
        received(side, socket, 4, MSG_TRUNC, port),
    );
    send(b"truncated");
    call::wait_for(socket, libc::POLLIN);
    let mut room = [0; 4];
    let message = call::receive_message(socket, &mut [&mut room], 0);
    side.report(
        "cut message",
        told(message.map(|message| {
            format!(
                "{} {} {:?}",
                message.length,
                message_flags(message.flags),
                message.control
            )
        })),
    );
    send(b"no room");
    side.report("no room", received(side, socket, 0, 0, port));
    for length in [1472, 1473, 9000, 65_507, 65_508, 70_000] {
        let bytes: Vec<u8> = (0..length).map(|index| index as u8).collect();
        let sent = call::send_to(socket, &bytes, 0, there);
        let back = sent.is_ok().then(|| {
            let mut buffer = vec![0; length + 1];
            call::wait_for(socket, libc::POLLIN);
            let got = call::receive(socket, &mut buffer, MSG_DONTWAIT);
            told(got.map(|got| format!("{got} {}", buffer[..got] == bytes[..])))
        });
        side.report(
            &format!("{length} bytes"),
            format!("{} {}", told(sent), back.unwrap_or_default()),
        );
    }
}

fn many(side: &Side, socket: Fd, port: u16) {
    call::connect(socket, side.there(port)).expect("connect");
    side.report(
        "send many",
        told(call::send_messages(socket, &[b"a", b"bb", b"ccc"], 0)),
    );
    let mut texts = Vec::new();
    while texts.len() < 3
        && call::poll(&[(socket, libc::POLLIN)], 1000).is_ok_and(|(ready, _)| ready > 0)
    {
        texts.extend(call::receive_messages(socket, 4, MSG_WAITFORONE, None).expect("recvmmsg"));
    }
    let texts: Vec<_> = texts.iter().map(|bytes| text(bytes)).collect();
    side.report("receive many", texts.join(" "));
    let none = call::receive_messages(socket, 4, MSG_DONTWAIT, None);
    side.report(
        "receive many, none there",
        told(none.map(|texts| texts.len())),
    );
    call::disconnect(socket).expect("disconnect");
}

/// Control messages that an option requests.
fn told_with(side: &Side, port: u16) {
    let rows = [
        ("time", SOL_SOCKET, libc::SO_TIMESTAMP),
        ("nanoseconds", SOL_SOCKET, libc::SO_TIMESTAMPNS),
        ("destination", IPPROTO_IP, libc::IP_PKTINFO),
        ("time to live", IPPROTO_IP, libc::IP_RECVTTL),
        ("type of service", IPPROTO_IP, libc::IP_RECVTOS),
    ];
    for (name, level, option) in rows {
        let socket = side.socket(DATAGRAM);
        let set = told(call::set_option(socket, level, option, &1));
        call::send_to(socket, b"with", 0, side.there(port)).expect("send");
        call::wait_for(socket, libc::POLLIN);
        let mut room = [0; 16];
        let message = call::receive_message(socket, &mut [&mut room], 0);
        let told = told(message.map(|message| format!("{} {:?}", message.length, message.control)));
        side.report(&format!("told with it: {name}"), format!("{set}; {told}"));
    }
}

fn connected(side: &Side, port: u16) {
    let socket = side.socket(DATAGRAM);
    side.report("connect", told(call::connect(socket, side.there(port))));
    side.report("connected: send", told(call::send(socket, b"connected", 0)));
    side.report("connected: receive", received(side, socket, 16, 0, port));
    let elsewhere = side.there(port + 100);
    side.report(
        "connected: send elsewhere",
        told(call::send_to(socket, b"x", 0, elsewhere)),
    );
    let stranger = side.socket(DATAGRAM);
    let own = call::local_address(socket).expect("a name");
    let _ = call::send_to(stranger, b"stranger", 0, own);
    side.report(
        "connected: strangers are not heard",
        told(call::receive(socket, &mut [0; 16], MSG_DONTWAIT)),
    );
    side.report("connected: disconnect", told(call::disconnect(socket)));
    side.report("disconnected: send", told(call::send(socket, b"x", 0)));
    side.report(
        "disconnected: connect",
        told(call::connect(socket, side.there(port))),
    );
}

/// Port unreachable is reported to connected sockets only.
fn unreachable(side: &Side, closed: u16) {
    let socket = side.socket(DATAGRAM);
    call::connect(socket, side.there(closed)).expect("connect");
    let provoke = || {
        let sent = call::send(socket, b"x", 0);
        call::wait_for(socket, 0);
        worked(sent)
    };
    side.report("unreachable: send", provoke());
    side.report(
        "unreachable: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "unreachable: receive",
        told(call::receive(socket, &mut [0; 8], MSG_DONTWAIT)),
    );
    side.report(
        "unreachable: receive again",
        told(call::receive(socket, &mut [0; 8], MSG_DONTWAIT)),
    );
    side.report("unreachable: send", provoke());
    side.report(
        "unreachable: send again",
        worked(call::send(socket, b"x", 0)),
    );
    call::wait_for(socket, 0);
    side.report("unreachable: error", told(call::socket_error(socket)));
    side.report(
        "unreachable: error again",
        told(call::socket_error(socket).map(|error| error.0)),
    );
    let deaf = side.socket(DATAGRAM);
    call::send_to(deaf, b"x", 0, side.there(closed)).expect("send");
    let answer: Answer<_> = call::poll(&[(deaf, 0)], 100);
    side.report(
        "unreachable, unconnected: events",
        told(answer.map(|(_, found)| events(found[0]))),
    );
    side.report(
        "unreachable, unconnected: error",
        told(call::socket_error(deaf).map(|error| error.0)),
    );
}

fn shut_down(side: &Side, port: u16) {
    let socket = side.socket(DATAGRAM);
    call::connect(socket, side.there(port)).expect("connect");
    side.report("end sending", told(call::shutdown(socket, SHUT_WR)));
    side.report(
        "ended: send",
        told(call::send(socket, b"x", libc::MSG_NOSIGNAL)),
    );
    side.report("end receiving", told(call::shutdown(socket, SHUT_RD)));
    side.report(
        "ended: receive",
        told(call::receive(socket, &mut [0; 8], 0)),
    );
    side.report("ended: events", told(call::events_now(socket).map(events)));
}
