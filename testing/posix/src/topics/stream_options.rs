//! Rarely used options of streams: keys of Fast Open, figures of congestion control, memberships, `IPV6_ADDRFORM`,
//! `TCP_INQ`, `SO_ORIGINAL_DST`, the value of `TCP_QUICKACK`, records, and `TCP_INFO` of sockets without a connection.

use std::ffi::c_void;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use libc::{AF_INET, AF_INET6, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET, c_int};

use crate::call::{self, Answer, Fd, STREAM};
use crate::show::{events, read_text, told};
use crate::side::Side;

// linux/tcp.h, linux/in.h, linux/netfilter_ipv4.h
const TCP_CC_INFO: c_int = 26;
const TCP_FASTOPEN_KEY: c_int = 33;
const TCP_INQ: c_int = 36;
const MCAST: [(&str, c_int); 6] = [
    ("join", 42),
    ("join again", 42),
    ("block", 43),
    ("leave", 45),
    ("join source", 46),
    ("leave source", 47),
];
const SO_ORIGINAL_DST: c_int = 80;

pub(super) fn run(side: &mut Side) {
    if !side.is_server() {
        keys(side);
        congestion(side);
        groups(side);
        without_connection(side);
    }
    side.step();
    waiting(side);
    family(side);
    rest(side);
    quick(side);
    corked(side);
    records(side);
    delivered(side);
}

fn set_bytes(fd: Fd, name: c_int, value: &[u8]) -> Answer<c_int> {
    let pointer = value.as_ptr().cast::<c_void>();
    call::set_option_raw(fd, IPPROTO_TCP, name, pointer, value.len() as u32)
}

fn bytes<const N: usize>(fd: Fd, name: c_int) -> String {
    let found = call::option::<[u8; N]>(fd, IPPROTO_TCP, name);
    told(found.map(|(value, length)| format!("{:?}", &value[..length])))
}

fn keys(side: &mut Side) {
    let socket = side.socket(STREAM);
    side.report("keys: unset", bytes::<64>(socket, TCP_FASTOPEN_KEY));
    for length in [0, 1, 15, 16, 17, 31, 32, 33] {
        let value: Vec<u8> = (0..length).collect();
        let set = told(set_bytes(socket, TCP_FASTOPEN_KEY, &value));
        let shown = bytes::<64>(socket, TCP_FASTOPEN_KEY);
        side.report(&format!("keys: {length} bytes"), format!("{set}; {shown}"));
    }
    side.report("keys: cut", bytes::<8>(socket, TCP_FASTOPEN_KEY));
    let datagrams = side.socket(libc::SOCK_DGRAM);
    let set = told(set_bytes(datagrams, TCP_FASTOPEN_KEY, &[0; 16]));
    side.report("keys: of datagrams", set);
}

fn congestion(side: &mut Side) {
    let socket = side.socket(STREAM);
    for name in ["reno", "cubic"] {
        set_bytes(socket, libc::TCP_CONGESTION, name.as_bytes()).expect("it is there");
        let shown = bytes::<64>(socket, TCP_CC_INFO);
        side.report(&format!("figures of {name}"), shown);
    }
    let set = told(set_bytes(socket, TCP_CC_INFO, &[0; 20]));
    side.report("figures: set", set);
}

/// Encodes `struct group_source_req`, which begins with `struct group_req`, for the loopback device.
fn request(group: &str, source: &str) -> [u8; 264] {
    let mut request = [0; 264];
    request[..4].copy_from_slice(&1_i32.to_ne_bytes());
    for (at, address) in [(8, group), (136, source)] {
        let family = match address.parse().expect("an address") {
            IpAddr::V4(v4) => {
                request[at + 4..at + 8].copy_from_slice(&v4.octets());
                AF_INET
            }
            IpAddr::V6(v6) => {
                request[at + 8..at + 24].copy_from_slice(&v6.octets());
                AF_INET6
            }
        };
        request[at..at + 2].copy_from_slice(&(family as u16).to_ne_bytes());
    }
    request
}

fn groups(side: &mut Side) {
    let v4 = (IPPROTO_IP, request("239.1.2.3", "192.0.2.1"));
    let v6 = (IPPROTO_IPV6, request("ff05::1:3", "2001:db8::1"));
    let forms = if side.is_v6() {
        vec![("v6", v6), ("v4", v4)]
    } else {
        vec![("v4", v4)]
    };
    for (form, (level, request)) in forms {
        let socket = side.socket(STREAM);
        for (what, name) in MCAST {
            let set = call::set_option(socket, level, name, &request);
            side.report(&format!("group {form}: {what}"), told(set));
        }
    }
    let socket = side.socket(STREAM);
    let oldest = call::set_option(socket, IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &[0_u8; 12]);
    side.report("group: by the oldest option", told(oldest));
}

fn words<const N: usize>(fd: Fd, places: [usize; N]) -> String {
    let (info, _) = call::option::<[u8; 232]>(fd, IPPROTO_TCP, libc::TCP_INFO).expect("TCP_INFO");
    let word = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("four bytes"));
    format!("{:?}", places.map(word))
}

fn without_connection(side: &mut Side) {
    // State and flags, rto, snd_mss, unacked, sacked, rttvar, snd_ssthresh, snd_cwnd, reordering, max_pacing, min_rtt.
    const PLACES: [usize; 12] = [0, 4, 8, 16, 24, 28, 72, 76, 80, 88, 112, 148];
    let socket = side.socket(STREAM);
    side.report("TCP_INFO: fresh", words(socket, PLACES));
    call::bind(socket, side.here(0)).expect("bind");
    side.report("TCP_INFO: bound", words(socket, PLACES));
    call::listen(socket, 7).expect("listen");
    side.report("TCP_INFO: listening", words(socket, PLACES));
}

/// A listener reports how many connections wait to be accepted, and the limit.
fn waiting(side: &mut Side) {
    const WAITING: [usize; 2] = [24, 28];
    let port = side.port();
    if side.is_server() {
        let listener = side.socket(STREAM);
        call::bind(listener, side.here(port)).expect("bind");
        call::listen(listener, 7).expect("listen");
        side.step();
        side.step();
        // The last segment of a handshake may arrive after its client has returned from `connect`.
        let until = Instant::now() + Duration::from_secs(3);
        while words(listener, WAITING) != "[3, 7]" && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        side.report("TCP_INFO: three wait", words(listener, WAITING));
        let first = call::accept_quietly(listener).expect("accept");
        side.report("TCP_INFO: two wait", words(listener, WAITING));
        side.step();
        let others = [(); 2].map(|()| call::accept_quietly(listener).expect("accept"));
        // The clients close first, so that this port has no TIME-WAIT.
        for accepted in [first, others[0], others[1]] {
            call::wait_for(accepted, libc::POLLRDHUP);
            call::close(accepted).expect("close");
        }
        call::close(listener).expect("close");
    } else {
        side.step();
        let sockets = [(); 3].map(|()| side.socket(STREAM));
        for socket in sockets {
            call::connect(socket, side.there(port)).expect("connect");
        }
        side.step();
        side.step();
        for socket in sockets {
            call::close(socket).expect("close");
        }
    }
    side.step();
}

/// `IPV6_ADDRFORM`: an IPv6 socket with an IPv4 peer becomes an IPv4 socket.
fn family(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        side.step();
        let (accepted, _) = call::accept(listener, 0).expect("accept");
        let mut room = [0; 16];
        let got = call::receive(accepted, &mut room, 0);
        side.report("family: what comes of it", read_text(got, &room));
        side.step();
        return;
    }
    let socket = call::socket(AF_INET6, STREAM, 0).expect("a socket");
    let change = |side: &Side, when: &str, family: c_int| {
        let set = call::set_option(socket, IPPROTO_IPV6, libc::IPV6_ADDRFORM, &family);
        side.report(&format!("family: {when}"), told(set));
    };
    change(side, "unconnected", AF_INET);
    change(side, "unconnected, to another", AF_INET6);
    side.step();
    let there = match side.there(port) {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), port),
        v6 => v6,
    };
    call::connect(socket, there).expect("connect");
    change(side, "connected, to what it is", AF_INET6);
    change(side, "connected", AF_INET);
    let domain = call::flag(socket, SOL_SOCKET, libc::SO_DOMAIN);
    side.report("family: its domain", told(domain));
    for (name, address) in [
        ("here", call::local_address(socket)),
        ("there", call::peer_address(socket)),
    ] {
        let shown = address.map(|address| side.name(address, port));
        side.report(&format!("family: {name}"), told(shown));
    }
    let form = call::flag(socket, IPPROTO_IPV6, libc::IPV6_ADDRFORM);
    side.report("family: shown", told(form));
    change(side, "again", AF_INET);
    call::send(socket, b"the same", 0).expect("send");
    side.step();
}

/// `TCP_INQ`: the bytes left unread after a call. `SO_ORIGINAL_DST`: the connection was not redirected.
fn rest(side: &mut Side) {
    let socket = side.connection();
    if !side.is_server() {
        call::send(socket, &[7; 1000], 0).expect("send");
        side.step();
        side.step();
        call::send(socket, &[7; 1000], 0).expect("send");
        call::close(socket).expect("close");
        side.step();
        return;
    }
    let (level, name) = if side.is_v6() {
        (IPPROTO_IPV6, SO_ORIGINAL_DST)
    } else {
        (IPPROTO_IP, SO_ORIGINAL_DST)
    };
    let original = call::option::<[u8; 28]>(socket, level, name);
    side.report("original destination", told(original.map(|(_, n)| n)));
    side.step();
    let look = |side: &Side, when: &str, room: usize, flags: c_int| {
        let mut room = vec![0; room];
        let message = call::receive_message(socket, &mut [&mut room], flags);
        let shown = message.map(|m| format!("{} {:?} {:?}", m.length, m.control, m.contents));
        side.report(&format!("rest: {when}"), told(shown));
    };
    call::wait_for(socket, libc::POLLIN);
    // Time for all bytes to arrive.
    thread::sleep(Duration::from_millis(50));
    look(side, "not asked for", 100, 0);
    let set = call::set_option(socket, IPPROTO_TCP, TCP_INQ, &1);
    side.report("rest: asked for", told(set));
    look(side, "of much", 100, 0);
    look(side, "of a look", 100, libc::MSG_PEEK);
    look(side, "of all", 2000, 0);
    look(side, "of nothing", 100, libc::MSG_DONTWAIT);
    side.step();
    side.step();
    call::wait_for(socket, libc::POLLRDHUP);
    look(side, "before the end", 100, 0);
    look(side, "up to the end", 2000, 0);
    look(side, "of the end", 100, 0);
}

/// `TCP_QUICKACK` returns whether acknowledgements are delayed for answers.
fn quick(side: &mut Side) {
    let socket = side.connection();
    let show = |side: &Side, when: &str| {
        let shown = call::flag(socket, IPPROTO_TCP, libc::TCP_QUICKACK);
        side.report(&format!("quick: {when}"), told(shown));
    };
    show(side, "at first");
    side.step();
    let mut room = [0; 8];
    for _ in 0..20 {
        if side.is_server() {
            call::receive(socket, &mut room, 0).expect("receive");
            call::send(socket, b"answer", 0).expect("send");
        } else {
            call::send(socket, b"request", 0).expect("send");
            call::receive(socket, &mut room, 0).expect("receive");
        }
    }
    show(side, "after turns");
    side.step();
    for value in [1, 0, 1] {
        let set = call::set_option(socket, IPPROTO_TCP, libc::TCP_QUICKACK, &value);
        side.report(&format!("quick: set to {value}"), told(set));
        show(side, &format!("after {value}"));
    }
    side.step();
}

/// `TCP_NODELAY` sends what `TCP_CORK` holds back; later data is held back again.
fn corked(side: &mut Side) {
    let socket = side.connection();
    let mut room = [0; 16];
    if side.is_server() {
        for when in ["held", "sent", "held again"] {
            side.step();
            let ready = call::events_within(socket, 60).map(events);
            side.report(&format!("corked: {when}"), told(ready));
            if when == "sent" {
                let got = call::receive(socket, &mut room, libc::MSG_DONTWAIT);
                side.report("corked: what", read_text(got, &room));
            }
            side.step();
        }
        return;
    }
    call::set_option(socket, IPPROTO_TCP, libc::TCP_CORK, &1).expect("cork");
    call::send(socket, b"first", 0).expect("send");
    side.step();
    side.step();
    call::set_option(socket, IPPROTO_TCP, libc::TCP_NODELAY, &1).expect("no delay");
    side.step();
    side.step();
    call::send(socket, b"second", 0).expect("send");
    side.step();
    side.step();
}

/// `MSG_EOR` has no effect that a reader observes.
fn records(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let mut room = [0; 64];
        let got = call::receive(socket, &mut room[..24], libc::MSG_WAITALL);
        side.report("records: received", read_text(got, &room));
    } else {
        for flags in [
            libc::MSG_EOR,
            0,
            libc::MSG_EOR | libc::MSG_MORE,
            libc::MSG_EOR,
        ] {
            let sent = call::send(socket, b"record", flags);
            side.report(&format!("records: flags {flags:x}"), told(sent));
        }
    }
    side.step();
}

/// `tcpi_delivered` and `tcpi_unacked` count segments of any size; `tcpi_last_data_recv` counts from the open.
fn delivered(side: &mut Side) {
    let socket = side.connection();
    let word = |at: usize| {
        let (info, _) =
            call::option::<[u8; 232]>(socket, IPPROTO_TCP, libc::TCP_INFO).expect("TCP_INFO");
        u32::from_ne_bytes(info[at..at + 4].try_into().expect("four bytes"))
    };
    let is_recent = |at: usize| word(at) < 30_000;
    side.report("delivered: nothing yet", word(192));
    side.report("delivered: recent", is_recent(52));
    call::set_option(socket, IPPROTO_TCP, libc::TCP_NODELAY, &1).expect("no delay");
    if side.is_server() {
        let mut room = [0; 100];
        call::receive(socket, &mut room, libc::MSG_WAITALL).expect("receive");
        side.step();
        return;
    }
    for _ in 0..10 {
        call::send(socket, &[1; 10], 0).expect("send");
    }
    side.step();
    thread::sleep(Duration::from_millis(300));
    side.report("delivered: ten", word(192));
    side.report("delivered: in flight", word(24));
}
