//! Options of a datagram socket about the path of its datagrams: headers, sizes, errors with all
//! their fields, sources of groups, and the offset of peeks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use libc::{
    IPPROTO_IP, IPPROTO_IPV6, IPPROTO_UDP, MSG_DONTWAIT, MSG_ERRQUEUE, MSG_PEEK, MSG_TRUNC, POLLIN,
    SOL_SOCKET, c_int,
};

use crate::{
    call::{self, Answer, DATAGRAM, Fd, Message, STREAM},
    show::{events, message_flags, read_text, told},
    side::Side,
    topics::datagram_options::echo,
};

pub(super) fn run(side: &mut Side) {
    let (port, closed, deaf) = (side.port(), side.port(), side.port());
    let socket = side.socket(DATAGRAM);
    if side.is_server() {
        call::bind(socket, side.here(port)).expect("bind");
        // A socket for datagrams that would be too many to echo.
        call::bind(side.socket(DATAGRAM), side.here(deaf)).expect("bind");
        side.step();
        echo(socket);
        look_ahead(side);
        return;
    }
    side.step();
    values(side);
    told_with(side, port);
    coalesced(side, port);
    segments(side, deaf);
    sizes(side, port);
    errors(side, closed);
    local_errors(side, port);
    checksums(side, port);
    late_ports(side);
    sources(side);
    peeks(side, port);
    call::send_to(socket, b"end", 0, side.there(port)).expect("send");
    look_ahead(side);
}

const IP_LOCAL_PORT_RANGE: c_int = 51;
const UDP_NO_CHECK6_TX: c_int = 101;
const UDP_NO_CHECK6_RX: c_int = 102;

/// Name, option, values to set.
type Row = (&'static str, c_int, &'static [c_int]);

const OF_SOCKETS: [Row; 4] = [
    ("peek offset", libc::SO_PEEK_OFF, &[0, 5, -1, -2]),
    ("no checksum", libc::SO_NO_CHECK, &[1, 0]),
    ("priority", libc::SO_PRIORITY, &[1, 6, 0]),
    ("mark", libc::SO_MARK, &[0]),
];

const OF_IP: [Row; 10] = [
    ("receive TTL", libc::IP_RECVTTL, &[1, 2, 0]),
    ("receive TOS", libc::IP_RECVTOS, &[1, 2, 0]),
    ("original destination", libc::IP_RECVORIGDSTADDR, &[1, 0]),
    ("free bind", libc::IP_FREEBIND, &[1, 2, 0]),
    ("transparent", libc::IP_TRANSPARENT, &[1, 0]),
    ("late port", libc::IP_BIND_ADDRESS_NO_PORT, &[1, 2, 0]),
    (
        "port range",
        IP_LOCAL_PORT_RANGE,
        &[0x9c50_9c40_u32 as i32, 0, 0x0001_0002],
    ),
    (
        "discover",
        libc::IP_MTU_DISCOVER,
        &[0, 1, 2, 3, 4, 5, 6, -1],
    ),
    ("errors", libc::IP_RECVERR, &[1, 2, 0]),
    ("packet info", libc::IP_PKTINFO, &[1, 0]),
];

const OF_IPV6: [Row; 12] = [
    ("v6 packet info", libc::IPV6_RECVPKTINFO, &[1, 2, 0]),
    ("v6 hop limit", libc::IPV6_RECVHOPLIMIT, &[1, 2, 0]),
    ("v6 class", libc::IPV6_RECVTCLASS, &[1, 2, 0]),
    ("v6 receive path MTU", libc::IPV6_RECVPATHMTU, &[1, 2, 0]),
    ("v6 don't fragment", libc::IPV6_DONTFRAG, &[1, 2, 0]),
    ("v6 MTU", libc::IPV6_MTU, &[1279, 1280, 0]),
    (
        "v6 original destination",
        libc::IPV6_RECVORIGDSTADDR,
        &[1, 0],
    ),
    ("v6 free bind", libc::IPV6_FREEBIND, &[1, 0]),
    ("v6 transparent", libc::IPV6_TRANSPARENT, &[1, 0]),
    ("v6 all groups", libc::IPV6_MULTICAST_ALL, &[0, 2, 1]),
    ("v6 errors", libc::IPV6_RECVERR, &[1, 2, 0]),
    ("v6 discover", libc::IPV6_MTU_DISCOVER, &[0, 2, 3, 5, 6, -1]),
];

const OF_UDP: [Row; 2] = [
    ("send without", UDP_NO_CHECK6_TX, &[1, 2, 0]),
    ("receive without", UDP_NO_CHECK6_RX, &[1, 2, 0]),
];

/// Initial values of options, and values that are accepted and refused.
fn values(side: &Side) {
    let levels: [(c_int, &[Row]); 4] = [
        (SOL_SOCKET, &OF_SOCKETS),
        (IPPROTO_IP, &OF_IP),
        (IPPROTO_IPV6, &OF_IPV6),
        (IPPROTO_UDP, &OF_UDP),
    ];
    for (level, rows) in levels {
        for &(name, option, values) in rows {
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
}

/// Returns a socket whose datagrams are echoed.
fn answered(side: &Side, port: u16) -> Fd {
    let socket = side.socket(DATAGRAM);
    call::connect(socket, side.there(port)).expect("connect");
    socket
}

fn set(socket: Fd, level: c_int, option: c_int, value: c_int) -> Answer<c_int> {
    call::set_option(socket, level, option, &value)
}

/// Formats a message with its control messages, without ports that vary.
fn shown(side: &Side, message: &Message, known: u16) -> String {
    let from = message.from.map(|from| side.name(from, known));
    let control: Vec<String> = message
        .control
        .iter()
        .zip(&message.contents)
        .map(|(&(level, kind), data)| match (level, kind) {
            (IPPROTO_IP, libc::IP_RECVERR) | (IPPROTO_IPV6, libc::IPV6_RECVERR) => {
                format!("{level} {kind} {}", error(side, data))
            }
            // Ports are ephemeral.
            (IPPROTO_IP, libc::IP_ORIGDSTADDR) | (IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR) => {
                format!("{level} {kind} {:?} … {:?}", &data[..2], &data[4..])
            }
            _ => format!("{level} {kind} {data:?}"),
        })
        .collect();
    let flags = message_flags(message.flags);
    format!("{} {from:?} {flags} {control:?}", message.length)
}

/// Formats `struct sock_extended_err` and the offender's address.
fn error(side: &Side, data: &[u8]) -> String {
    let (fixed, offender) = data.split_at(16);
    let family = u16::from_ne_bytes([offender[0], offender[1]]);
    let host: Option<IpAddr> = match i32::from(family) {
        libc::AF_INET => offender[4..8]
            .first_chunk()
            .map(|bytes: &[u8; 4]| Ipv4Addr::from(*bytes).into()),
        libc::AF_INET6 => offender[8..24]
            .first_chunk()
            .map(|bytes: &[u8; 16]| Ipv6Addr::from(*bytes).into()),
        _ => None,
    };
    let host = host.map(|host| side.name((host, 0).into(), 0));
    format!("{fixed:?} {} bytes of {family} {host:?}", offender.len())
}

fn received(side: &Side, socket: Fd, flags: c_int, port: u16) -> String {
    let mut room = [0; 2048];
    let message = call::receive_message(socket, &mut [&mut room], flags);
    told(message.map(|message| shown(side, &message, port)))
}

/// Control messages that an option requests, with their contents.
fn told_with(side: &Side, port: u16) {
    let rows = [
        ("destination", IPPROTO_IP, libc::IP_PKTINFO),
        ("hops", IPPROTO_IP, libc::IP_RECVTTL),
        ("service", IPPROTO_IP, libc::IP_RECVTOS),
        ("original destination", IPPROTO_IP, libc::IP_RECVORIGDSTADDR),
        ("v6 destination", IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
        ("v6 hops", IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
        ("v6 class", IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
        (
            "v6 original destination",
            IPPROTO_IPV6,
            libc::IPV6_RECVORIGDSTADDR,
        ),
    ];
    for (name, level, option) in rows {
        let socket = side.socket(DATAGRAM);
        // Disable automatic flow labels, which vary.
        let _ = set(socket, IPPROTO_IPV6, libc::IPV6_AUTOFLOWLABEL, 0);
        let answer = told(set(socket, level, option, 1));
        call::send_to(socket, b"with", 0, side.there(port)).expect("send");
        call::wait_for(socket, POLLIN);
        let contents = received(side, socket, MSG_DONTWAIT, port);
        side.report(
            &format!("told with it: {name}"),
            format!("{answer}; {contents}"),
        );
    }
}

/// Coalesced segments keep the sizes in which they were sent, if the reader requests them.
fn coalesced(side: &Side, port: u16) {
    let socket = answered(side, port);
    for gro in [1, 0] {
        let set_gro = told(set(socket, IPPROTO_UDP, libc::UDP_GRO, gro));
        side.report(&format!("coalesce {gro}"), set_gro);
        for (segment, length) in [(0, 1000), (500, 400), (500, 500)] {
            set(socket, IPPROTO_UDP, libc::UDP_SEGMENT, segment).expect("UDP_SEGMENT");
            let sent = told(call::send(socket, &vec![1; length], 0));
            call::wait_for(socket, POLLIN);
            let back = received(side, socket, MSG_DONTWAIT, port);
            side.report(
                &format!("coalesce {gro}: {length} by {segment}"),
                format!("{sent}; {back}"),
            );
        }
    }
}

/// Limits of the segment sizes and their number.
fn segments(side: &Side, deaf: u16) {
    let socket = answered(side, deaf);
    for (segment, length) in [
        (1, 128),
        (1, 129),
        (1000, 65_000),
        (1000, 65_535),
        (1472, 0),
    ] {
        set(socket, IPPROTO_UDP, libc::UDP_SEGMENT, segment).expect("UDP_SEGMENT");
        let sent = told(call::send(socket, &vec![1; length], 0));
        side.report(&format!("segments: {length} by {segment}"), sent);
    }
    let _ = set(socket, SOL_SOCKET, libc::SO_NO_CHECK, 1);
    let _ = set(socket, IPPROTO_UDP, UDP_NO_CHECK6_TX, 1);
    set(socket, IPPROTO_UDP, libc::UDP_SEGMENT, 100).expect("UDP_SEGMENT");
    for length in [100, 101] {
        let sent = told(call::send(socket, &vec![1; length], 0));
        side.report(&format!("segments: {length} without checksum"), sent);
    }
}

/// The MTU of a path, and which calls report it.
fn sizes(side: &Side, port: u16) {
    let fresh = side.socket(DATAGRAM);
    side.report(
        "MTU: unconnected",
        told(call::flag(fresh, IPPROTO_IP, libc::IP_MTU)),
    );
    side.report(
        "v6 MTU: unconnected",
        told(call::flag(fresh, IPPROTO_IPV6, libc::IPV6_MTU)),
    );
    let socket = answered(side, port);
    side.report("MTU", told(call::flag(socket, IPPROTO_IP, libc::IP_MTU)));
    side.report(
        "v6 MTU",
        told(call::flag(socket, IPPROTO_IPV6, libc::IPV6_MTU)),
    );
    let path = call::option::<[u8; 32]>(socket, IPPROTO_IPV6, libc::IPV6_PATHMTU);
    side.report(
        "v6 path MTU",
        told(path.map(|(value, length)| format!("{length} {:?}", &value[28..]))),
    );
    if !side.is_v6() {
        return;
    }
    let _ = set(socket, IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1);
    let _ = set(socket, IPPROTO_IPV6, libc::IPV6_RECVPATHMTU, 1);
    for length in [1452, 1453] {
        side.report(
            &format!("don't fragment: {length}"),
            told(call::send(socket, &vec![0; length], 0)),
        );
    }
    // Wait until the datagrams that fit are echoed.
    call::wait_for(socket, POLLIN);
    std::thread::sleep(std::time::Duration::from_millis(100));
    let mut room = [0; 2048];
    for turn in ["first", "second", "third"] {
        let message = call::receive_message(socket, &mut [&mut room], MSG_DONTWAIT);
        let text = message.map(|message| {
            let path: Vec<_> = message
                .contents
                .iter()
                .map(|data| data.get(28..).map(<[u8]>::to_vec))
                .collect();
            format!(
                "{} {} {:?} {path:?}",
                message.length,
                message_flags(message.flags),
                message.control
            )
        });
        side.report(&format!("don't fragment: told {turn}"), told(text));
    }
    let _ = set(socket, IPPROTO_IPV6, libc::IPV6_DONTFRAG, 0);
    side.report(
        "may fragment: 1453",
        told(call::send(socket, &[0; 1453], 0)),
    );
    side.report(
        "smaller",
        told(set(socket, IPPROTO_IPV6, libc::IPV6_MTU, 1280)),
    );
    side.report(
        "smaller: MTU",
        told(call::flag(socket, IPPROTO_IPV6, libc::IPV6_MTU)),
    );
    side.report("smaller: 1300", told(call::send(socket, &[0; 1300], 0)));
}

/// Errors from the network, each with all its fields, in order.
fn errors(side: &Side, closed: u16) {
    let (level, option) = error_option(side);
    for connected in [false, true] {
        let name = if connected {
            "connected"
        } else {
            "unconnected"
        };
        let socket = side.socket(DATAGRAM);
        set(socket, level, option, 1).expect("errors");
        let _ = set(socket, IPPROTO_IP, libc::IP_RECVTTL, 1);
        let _ = set(socket, IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1);
        let there = side.there(closed);
        if connected {
            call::connect(socket, there).expect("connect");
        }
        let send = |text: &[u8]| {
            if connected {
                call::send(socket, text, 0)
            } else {
                call::send_to(socket, text, 0, there)
            }
        };
        side.report(&format!("errors, {name}: send"), told(send(b"first")));
        call::wait_for(socket, 0);
        side.report(
            &format!("errors, {name}: send again"),
            told(send(b"second")),
        );
        side.report(&format!("errors, {name}: and again"), told(send(b"second")));
        call::wait_for(socket, 0);
        for turn in ["first", "second", "third"] {
            side.report(
                &format!("errors, {name}: events before {turn}"),
                told(call::events_now(socket).map(events)),
            );
            let told = received(side, socket, MSG_ERRQUEUE, closed);
            side.report(&format!("errors, {name}: {turn}"), told);
        }
        let error = call::socket_error(socket);
        side.report(&format!("errors, {name}: left"), told(error));
    }
}

fn error_option(side: &Side) -> (c_int, c_int) {
    if side.is_v6() {
        (IPPROTO_IPV6, libc::IPV6_RECVERR)
    } else {
        (IPPROTO_IP, libc::IP_RECVERR)
    }
}

/// Errors of this host itself, which does not send the datagram.
fn local_errors(side: &Side, port: u16) {
    let (level, option) = error_option(side);
    let socket = answered(side, port);
    set(socket, level, option, 1).expect("errors");
    let discover = if side.is_v6() {
        libc::IPV6_MTU_DISCOVER
    } else {
        libc::IP_MTU_DISCOVER
    };
    set(socket, level, discover, libc::IP_PMTUDISC_DO).expect("discovery");
    side.report("too long: send", told(call::send(socket, &[0; 3000], 0)));
    side.report(
        "too long: events",
        told(call::events_now(socket).map(events)),
    );
    side.report("too long: told", received(side, socket, MSG_ERRQUEUE, port));
    side.report(
        "too long: told again",
        received(side, socket, MSG_ERRQUEUE, port),
    );
    side.report("too long: left", told(call::socket_error(socket)));
    side.report(
        "too long: the next one",
        told(call::send(socket, b"short", 0)),
    );
}

fn checksums(side: &Side, port: u16) {
    let socket = answered(side, port);
    let _ = set(socket, SOL_SOCKET, libc::SO_NO_CHECK, 1);
    let _ = set(socket, IPPROTO_UDP, UDP_NO_CHECK6_TX, 1);
    side.report("no checksum: send", told(call::send(socket, b"bare", 0)));
    if !side.is_v6() {
        call::wait_for(socket, POLLIN);
        side.report(
            "no checksum: receive",
            received(side, socket, MSG_DONTWAIT, port),
        );
    }
}

/// Binding to an address does not choose a port yet, and an address that no host has can be bound.
fn late_ports(side: &Side) {
    let socket = side.socket(DATAGRAM);
    let _ = set(socket, IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
    side.report("late port: bind", told(call::bind(socket, side.here(0))));
    let name = call::local_address(socket).map(|name| side.name(name, 1));
    side.report("late port: name", told(name));
    let nobody = if side.is_v6() {
        "[2001:db8:ffff::1]:0"
    } else {
        "192.0.2.77:0"
    };
    let nobody = nobody.parse().expect("an address");
    for free in [0, 1] {
        let socket = side.socket(DATAGRAM);
        let _ = set(socket, IPPROTO_IP, libc::IP_FREEBIND, free);
        side.report(
            &format!("free bind {free}: bind"),
            told(call::bind(socket, nobody)),
        );
    }
    let socket = side.socket(DATAGRAM);
    let range: c_int = 42_003 << 16 | 42_000;
    side.report(
        "port range: set",
        told(set(socket, IPPROTO_IP, IP_LOCAL_PORT_RANGE, range)),
    );
    side.report("port range: bind", told(call::bind(socket, side.here(0))));
    let name = call::local_address(socket);
    let is_within = name.map(|name| (42_000..=42_003).contains(&name.port()));
    side.report("port range: within", told(is_within));
}

/// Joining and leaving the sources of a group one by one.
fn sources(side: &Side) {
    let IpAddr::V4(own) = side.here(0).ip() else {
        return;
    };
    let own = own.octets();
    let group = [232, 77, 0, 9];
    let socket = side.socket(DATAGRAM);
    call::bind(socket, side.here(0)).expect("bind");
    let source = |option, source: [u8; 4]| {
        let value: [u8; 12] = [group, own, source]
            .concat()
            .try_into()
            .expect("three addresses");
        told(call::set_option(socket, IPPROTO_IP, option, &value))
    };
    let plain = |option| {
        let value: [u8; 8] = [group, own].concat().try_into().expect("two addresses");
        told(call::set_option(socket, IPPROTO_IP, option, &value))
    };
    let (add, drop_source) = (
        libc::IP_ADD_SOURCE_MEMBERSHIP,
        libc::IP_DROP_SOURCE_MEMBERSHIP,
    );
    let (block, unblock) = (libc::IP_BLOCK_SOURCE, libc::IP_UNBLOCK_SOURCE);
    let (a, b) = ([10, 1, 1, 1], [10, 1, 1, 2]);
    side.report("sources: drop none", source(drop_source, a));
    side.report("sources: block without", source(block, a));
    side.report("sources: add", source(add, a));
    side.report("sources: add again", source(add, a));
    side.report("sources: add another", source(add, b));
    side.report("sources: block one of them", source(block, a));
    side.report("sources: join all", plain(libc::IP_ADD_MEMBERSHIP));
    side.report("sources: drop", source(drop_source, a));
    side.report("sources: drop again", source(drop_source, a));
    side.report("sources: drop the last", source(drop_source, b));
    side.report("all: join", plain(libc::IP_ADD_MEMBERSHIP));
    side.report("all: add", source(add, a));
    side.report("all: block", source(block, a));
    side.report("all: block again", source(block, a));
    side.report("all: unblock", source(unblock, a));
    side.report("all: unblock again", source(unblock, a));
    side.report("all: leave", plain(libc::IP_DROP_MEMBERSHIP));
    side.report("all: leave again", plain(libc::IP_DROP_MEMBERSHIP));
    all_at_once(side, (group, own), [a, b]);
}

/// The sources of a group in one call (RFC 3678 §4.1.3), beside others that were joined before.
fn all_at_once(side: &Side, (group, own): ([u8; 4], [u8; 4]), sources: [[u8; 4]; 2]) {
    let socket = side.socket(DATAGRAM);
    call::bind(socket, side.here(0)).expect("bind");
    let other = [[239, 77, 0, 9], own].concat();
    let other: [u8; 8] = other.try_into().expect("two addresses");
    let join = call::set_option(socket, IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &other);
    side.report("list: join another", told(join));
    const INCLUDE: u32 = 1;
    let [mode, count] = [INCLUDE, 2].map(u32::to_ne_bytes);
    let list = [group, own, mode, count, sources[0], sources[1]].concat();
    let list: [u8; 24] = list.try_into().expect("six words");
    let set = |list| call::set_option(socket, IPPROTO_IP, libc::IP_MSFILTER, list);
    side.report("list: before joining", told(set(&list)));
    let one = [group, own, sources[1]].concat();
    let one: [u8; 12] = one.try_into().expect("three addresses");
    let add = |option| told(call::set_option(socket, IPPROTO_IP, option, &one));
    side.report("list: add one", add(libc::IP_ADD_SOURCE_MEMBERSHIP));
    side.report("list: set", told(set(&list)));
    side.report("list: one is in it", add(libc::IP_ADD_SOURCE_MEMBERSHIP));
    let leave = call::set_option(socket, IPPROTO_IP, libc::IP_DROP_MEMBERSHIP, &other);
    side.report("list: leave the other", told(leave));
    let name = call::local_address(socket).map(|name| side.name(name, 1));
    side.report("list: name", told(name));
}

/// `SO_PEEK_OFF` on datagrams.
fn peeks(side: &Side, port: u16) {
    let socket = answered(side, port);
    for text in [&b"abcdef"[..], b"ghi", b"jk"] {
        call::send(socket, text, 0).expect("send");
        call::wait_for(socket, POLLIN);
    }
    // Wait until all three have arrived.
    while call::ioctl(socket, libc::FIONREAD, -1).is_ok_and(|count| count < 6) {}
    std::thread::sleep(std::time::Duration::from_millis(50));
    set(socket, SOL_SOCKET, libc::SO_PEEK_OFF, 0).expect("SO_PEEK_OFF");
    walk(
        side,
        "peek",
        socket,
        &[
            (4, MSG_PEEK),
            (4, MSG_PEEK),
            (4, MSG_PEEK),
            (2, 0),
            (4, MSG_PEEK),
            (9, MSG_PEEK | MSG_TRUNC),
            (9, 0),
            (9, MSG_PEEK),
            (9, 0),
        ],
    );
}

/// Reads and peeks, and reports the offset of the next peek.
fn walk(side: &Side, name: &str, socket: Fd, steps: &[(usize, c_int)]) {
    for (turn, &(room, flags)) in steps.iter().enumerate() {
        let mut buffer = vec![0; room];
        let got = call::receive(socket, &mut buffer, flags | MSG_DONTWAIT);
        let next = told(call::flag(socket, SOL_SOCKET, libc::SO_PEEK_OFF));
        side.report(
            &format!("{name} {turn}"),
            format!("{}; {next}", read_text(got, &buffer)),
        );
    }
}

/// `SO_PEEK_OFF` on a stream.
fn look_ahead(side: &mut Side) {
    let socket = side.connection();
    let kind = call::flag(socket, SOL_SOCKET, libc::SO_TYPE);
    side.report("stream", kind.is_ok_and(|kind| kind == STREAM));
    if side.is_server() {
        call::send(socket, b"abcdefghij", 0).expect("send");
        side.step();
        side.step();
        return;
    }
    side.step();
    while call::ioctl(socket, libc::FIONREAD, -1).is_ok_and(|count| count < 10) {}
    side.report(
        "stream: no offset",
        told(call::flag(socket, SOL_SOCKET, libc::SO_PEEK_OFF)),
    );
    set(socket, SOL_SOCKET, libc::SO_PEEK_OFF, 2).expect("SO_PEEK_OFF");
    walk(
        side,
        "stream",
        socket,
        &[
            (3, MSG_PEEK),
            (3, MSG_PEEK),
            (4, 0),
            (1, MSG_PEEK),
            (9, MSG_PEEK),
            (9, MSG_PEEK),
            (9, 0),
        ],
    );
    side.step();
}
