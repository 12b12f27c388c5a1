//! Features of datagram sockets only: groups, broadcast, segments, corks and the error queue.

use std::net::IpAddr;

use libc::{
    IPPROTO_IP, IPPROTO_UDP, MSG_DONTWAIT, MSG_ERRQUEUE, MSG_MORE, POLLIN, SO_BROADCAST,
    SOL_SOCKET, c_int,
};

use crate::{
    call::{self, DATAGRAM, Fd},
    show::{events, message_flags, read_text, told, worked},
    side::Side,
};

const UDP_CORK: c_int = 1;
const GROUP: [u8; 4] = [239, 77, 0, 9];

pub(super) fn run(side: &mut Side) {
    let (port, closed) = (side.port(), side.port());
    let socket = side.socket(DATAGRAM);
    if side.is_server() {
        call::bind(socket, side.here(port)).expect("bind");
        side.step();
        echo(socket);
        return;
    }
    side.step();
    values(side);
    groups(side);
    broadcast(side);
    segments(side, port);
    corks(side, port);
    error_queue(side, closed);
    call::send_to(socket, b"end", 0, side.there(port)).expect("send");
}

/// Echoes each datagram, until one is "end".
pub(super) fn echo(socket: Fd) {
    let mut buffer = vec![0; 65_536];
    loop {
        let (length, from) = call::receive_from(socket, &mut buffer, 0).expect("receive");
        if &buffer[..length] == b"end" {
            return;
        }
        let from = from.expect("a datagram has a source");
        call::send_to(socket, &buffer[..length], 0, from).expect("send");
    }
}

/// Initial values of options, and values that are accepted and refused.
fn values(side: &Side) {
    let rows: [(&str, c_int, c_int, &[c_int]); 8] = [
        ("broadcast", SOL_SOCKET, SO_BROADCAST, &[1, 0]),
        (
            "group TTL",
            IPPROTO_IP,
            libc::IP_MULTICAST_TTL,
            &[0, 255, -1, 256, -2],
        ),
        (
            "group loop",
            IPPROTO_IP,
            libc::IP_MULTICAST_LOOP,
            &[0, 1, 2],
        ),
        ("all groups", IPPROTO_IP, libc::IP_MULTICAST_ALL, &[0, 1, 2]),
        (
            "segment",
            IPPROTO_UDP,
            libc::UDP_SEGMENT,
            &[1, 65_535, 65_536, -1, 0],
        ),
        ("coalesce", IPPROTO_UDP, libc::UDP_GRO, &[1, 0]),
        ("cork", IPPROTO_UDP, UDP_CORK, &[1, 0]),
        ("errors", IPPROTO_IP, libc::IP_RECVERR, &[1, 0]),
    ];
    for (name, level, option, values) in rows {
        let socket = side.socket(DATAGRAM);
        let now = || told(call::flag(socket, level, option));
        side.report(&format!("value: {name}"), now());
        for value in values {
            let set = told(call::set_option(socket, level, option, value));
            side.report(
                &format!("value: {name} {value}"),
                format!("{set}; {}", now()),
            );
        }
    }
}

fn groups(side: &Side) {
    let IpAddr::V4(own) = side.here(0).ip() else {
        return;
    };
    let request = |group: [u8; 4], device: [u8; 4]| -> [u8; 8] {
        [group, device].concat().try_into().expect("two addresses")
    };
    let socket = side.socket(DATAGRAM);
    let set = |option, value: [u8; 8]| told(call::set_option(socket, IPPROTO_IP, option, &value));
    let (join, leave) = (libc::IP_ADD_MEMBERSHIP, libc::IP_DROP_MEMBERSHIP);
    let (own, nobody) = (own.octets(), [192, 0, 2, 1]);
    side.report("join what is no group", set(join, request(own, own)));
    side.report(
        "join at nobody's address",
        set(join, request(GROUP, nobody)),
    );
    side.report("leave before joining", set(leave, request(GROUP, own)));
    side.report("join", set(join, request(GROUP, own)));
    side.report("join again", set(join, request(GROUP, own)));
    side.report("leave", set(leave, request(GROUP, own)));
    side.report("leave again", set(leave, request(GROUP, own)));
    let device = |value| {
        told(call::set_option(
            socket,
            IPPROTO_IP,
            libc::IP_MULTICAST_IF,
            &value,
        ))
    };
    side.report("send by nobody's address", device(nobody));
    side.report("send by its own address", device(own));
}

fn broadcast(side: &Side) {
    if side.is_v6() {
        return;
    }
    let everyone = "255.255.255.255:9".parse().expect("an address");
    let socket = side.socket(DATAGRAM);
    let connect = || told(call::connect(socket, everyone));
    side.report("broadcast: connect without leave", connect());
    call::set_option(socket, SOL_SOCKET, SO_BROADCAST, &1).expect("SO_BROADCAST");
    side.report("broadcast: connect with leave", connect());
}

/// Returns a socket whose datagrams are echoed.
fn answered(side: &Side, port: u16) -> Fd {
    let socket = side.socket(DATAGRAM);
    call::connect(socket, side.there(port)).expect("connect");
    socket
}

fn received(socket: Fd) -> String {
    let mut buffer = vec![0; 65_536];
    call::wait_for(socket, POLLIN);
    let length = call::receive(socket, &mut buffer, MSG_DONTWAIT);
    read_text(length, &buffer)
}

fn segments(side: &Side, port: u16) {
    let socket = answered(side, port);
    let segment = |size: c_int| call::set_option(socket, IPPROTO_UDP, libc::UDP_SEGMENT, &size);
    segment(1000).expect("UDP_SEGMENT");
    side.report("segments: send", told(call::send(socket, &[b'x'; 2500], 0)));
    let lengths: Vec<usize> = (0..3)
        .map(|_| received(socket).matches('x').count())
        .collect();
    side.report("segments: receive", format!("{lengths:?}"));
    for (size, length) in [(1, 200), (1472, 2944), (1473, 2946), (1473, 100)] {
        segment(size).expect("UDP_SEGMENT");
        let sent = told(call::send(socket, &vec![0; length], 0));
        side.report(&format!("segments: {length} by {size}"), sent);
    }
}

fn corks(side: &Side, port: u16) {
    let socket = answered(side, port);
    let cork = |on: c_int| told(call::set_option(socket, IPPROTO_UDP, UDP_CORK, &on));
    side.report("cork: put in", cork(1));
    side.report("cork: send", told(call::send(socket, b"one ", 0)));
    side.report("cork: send more", told(call::send(socket, b"two", 0)));
    side.report("cork: pull out", cork(0));
    side.report("cork: receive", received(socket));
    side.report("more: send", told(call::send(socket, b"three ", MSG_MORE)));
    side.report("more: send the rest", told(call::send(socket, b"four", 0)));
    side.report("more: receive", received(socket));
}

/// An unconnected socket gets errors, too, if it requests them.
fn error_queue(side: &Side, closed: u16) {
    let socket = side.socket(DATAGRAM);
    call::set_option(socket, IPPROTO_IP, libc::IP_RECVERR, &1).expect("IP_RECVERR");
    let sent = call::send_to(socket, b"lost", 0, side.there(closed));
    side.report("errors: send", told(sent));
    call::wait_for(socket, 0);
    side.report("errors: events", told(call::events_now(socket).map(events)));
    let mut room = [0; 16];
    let message = call::receive_message(socket, &mut [&mut room], MSG_ERRQUEUE);
    let shown = message.map(|message| {
        let from = message.from.map(|from| side.name(from, closed));
        let flags = message_flags(message.flags);
        format!("{} {from:?} {flags} {:?}", message.length, message.control)
    });
    side.report("errors: first", told(shown));
    side.report("errors: what was sent", String::from_utf8_lossy(&room[..4]));
    let second = call::receive_message(socket, &mut [&mut room], MSG_ERRQUEUE);
    side.report("errors: second", worked(second));
    let again = call::send_to(socket, b"lost", 0, side.there(closed));
    side.report("errors: send again", worked(again));
}
