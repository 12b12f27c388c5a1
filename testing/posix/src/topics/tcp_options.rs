//! Effects of TCP options: TCP_INFO after the same traffic, TCP_NOTSENT_LOWAT, SO_RCVLOWAT,
//! TCP_DEFER_ACCEPT, queue sizes by ioctl, and options whose value differs from the one set.

use std::time::{Duration, Instant};

use libc::{IPPROTO_TCP, MSG_DONTWAIT, SO_RCVLOWAT, SOL_SOCKET, TCP_INFO, TCP_NOTSENT_LOWAT};

use crate::{
    call::{self, Fd, STREAM},
    show::{events, read_text, told},
    side::Side,
};

const SIOCOUTQNSD: libc::c_ulong = 0x894b;
/// linux/net_tstamp.h: software time stamps, for received packets, and reported.
const RECEIVED: i32 = 1 << 3 | 1 << 4;

pub(super) fn run(side: &mut Side) {
    kept(side);
    information(side);
    unsent(side);
    low_water(side);
    queues(side);
    deferred(side);
    times(side);
    sent_times(side);
}

/// Reports of sent bytes in the error queue: the kind of time stamp, and the byte.
fn sent_times(side: &mut Side) {
    // linux/net_tstamp.h
    const SOFTWARE: i32 = 1 << 4;
    const SENT: i32 = 1 << 1;
    const NUMBERED: i32 = 1 << 7;
    const QUEUED: i32 = 1 << 8;
    const ACKNOWLEDGED: i32 = 1 << 9;
    const BARE: i32 = 1 << 11;
    if !side.is_server() {
        let idle = side.socket(STREAM);
        let set = call::set_option(idle, SOL_SOCKET, libc::SO_TIMESTAMPING, &NUMBERED);
        side.report("time of sending: unconnected", told(set));
    }
    let rows = [
        ("sent", SENT | SOFTWARE | BARE),
        ("acknowledged", SENT | ACKNOWLEDGED | SOFTWARE | BARE),
        (
            "numbered",
            SENT | QUEUED | ACKNOWLEDGED | NUMBERED | SOFTWARE | BARE,
        ),
        ("untold", SENT | NUMBERED | BARE),
    ];
    let socket = side.connection();
    for (name, flags) in rows {
        if side.is_server() {
            let mut room = [0; 100];
            call::receive(socket, &mut room, libc::MSG_WAITALL).expect("receive");
            side.step();
            continue;
        }
        let set = call::set_option(socket, SOL_SOCKET, libc::SO_TIMESTAMPING, &flags);
        call::send(socket, &[1; 60], 0).expect("send");
        call::send(socket, &[1; 40], 0).expect("send");
        side.step();
        until_acknowledged(socket);
        side.report(&format!("time of sending: {name}: set"), told(set));
        let ready = call::events_now(socket).map(events);
        side.report(&format!("time of sending: {name}: ready"), told(ready));
        let mut stamps: Vec<String> = (0..8).map_while(|_| report_of_sent(socket)).collect();
        stamps.sort();
        // Linux stamps retransmissions again, which a busy machine may cause.
        stamps.dedup();
        side.report(&format!("time of sending: {name}"), format!("{stamps:?}"));
    }
    side.step();
}

/// Waits for the last acknowledgement, which may be delayed.
pub(super) fn until_acknowledged(socket: Fd) {
    let start = Instant::now();
    while call::ioctl_int(socket, libc::TIOCOUTQ) != Ok(0) {
        assert!(start.elapsed() < Duration::from_secs(10), "unacknowledged");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The kernel counts what is acknowledged first, and reports it afterwards, with the lock of the socket that this takes.
    call::option::<[u8; 8]>(socket, IPPROTO_TCP, TCP_INFO).expect("TCP_INFO");
}

/// Returns one entry of the error queue.
pub(super) fn report_of_sent(socket: Fd) -> Option<String> {
    let mut room = [0; 256];
    let message = call::receive_message(socket, &mut [&mut room], libc::MSG_ERRQUEUE).ok()?;
    let entries = message.control.iter().zip(&message.contents);
    let entries = entries.map(|(kind, contents)| match kind.0 {
        // The time varies.
        SOL_SOCKET => format!("{kind:?}"),
        _ => format!("{kind:?} {:?}", &contents[..16]),
    });
    let entries: Vec<String> = entries.collect();
    Some(format!(
        "{} bytes, flags {:x}, {}",
        message.length,
        message.flags,
        entries.join(", ")
    ))
}

/// Returns a socket whose datagrams have times when they arrive. Linux begins with it in a work queue, some time after
/// the first socket requested it (seconds on a busy machine), and goes on while one does.
fn stamped(side: &Side) -> Fd {
    let socket = side.socket(libc::SOCK_DGRAM);
    call::set_option(socket, SOL_SOCKET, libc::SO_TIMESTAMPING, &RECEIVED).expect("on");
    call::bind(socket, side.here(0)).expect("bind");
    let itself = call::local_address(socket).expect("a name");
    let has_time = || {
        call::send_to(socket, b"when", 0, itself).expect("send");
        let mut room = [0; 16];
        let message = call::receive_message(socket, &mut [&mut room], 0);
        !message.expect("the same").control.is_empty()
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while !has_time() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    socket
}

/// Times of received bytes, as far as options request them; unread bytes have no time.
fn times(side: &mut Side) {
    let socket = side.connection();
    let first = stamped(side);
    let rows = [
        ("nothing", libc::SO_TIMESTAMPING, 0),
        ("time", libc::SO_TIMESTAMP, 1),
        ("nanoseconds", libc::SO_TIMESTAMPNS, 1),
        ("stamping", libc::SO_TIMESTAMPING, RECEIVED),
    ];
    for (name, option, value) in rows {
        if side.is_server() {
            let set = told(call::set_option(socket, SOL_SOCKET, option, &value));
            side.step();
            call::wait_for(socket, libc::POLLIN);
            let mut room = [0; 16];
            let message = call::receive_message(socket, &mut [&mut room], 0);
            let shown = told(message.map(|m| format!("{} {:?}", m.length, m.control)));
            side.report(&format!("time of bytes: {name}"), format!("{set}; {shown}"));
            let none = call::receive_message(socket, &mut [&mut room], MSG_DONTWAIT);
            side.report(
                &format!("time of nothing: {name}"),
                told(none.map(|m| m.length)),
            );
            call::set_option(socket, SOL_SOCKET, option, &0).expect("off again");
        } else {
            side.step();
            call::send(socket, b"when", 0).expect("send");
        }
        side.step();
    }
    call::close(first).expect("close");
}

/// Values that Linux stores in its own units.
fn kept(side: &mut Side) {
    if side.is_server() {
        return;
    }
    let rows = [
        (
            "TCP_DEFER_ACCEPT",
            libc::TCP_DEFER_ACCEPT,
            [0, 1, 2, 5, 30, -1],
        ),
        ("TCP_LINGER2", libc::TCP_LINGER2, [0, 1, 60, 121, -1, -5]),
        (
            "TCP_WINDOW_CLAMP",
            libc::TCP_WINDOW_CLAMP,
            [1, 1152, 5000, 0, 7, 9],
        ),
        ("TCP_SYNCNT", libc::TCP_SYNCNT, [0, 1, 127, 128, -1, 3]),
        (
            "TCP_MAXSEG",
            libc::TCP_MAXSEG,
            [0, 87, 88, 32_767, 32_768, 1000],
        ),
        ("TCP_FASTOPEN", libc::TCP_FASTOPEN, [0, 5, -1, 1000, 1, 2]),
        ("TCP_NOTSENT_LOWAT", TCP_NOTSENT_LOWAT, [0, 1, -1, 5, 6, 7]),
        (
            "TCP_USER_TIMEOUT",
            libc::TCP_USER_TIMEOUT,
            [0, 1, -1, 5, 6, 7],
        ),
        ("TCP_QUICKACK", libc::TCP_QUICKACK, [0, 1, 0, 2, 3, 1]),
    ];
    for (name, option, values) in rows {
        let socket = side.socket(STREAM);
        for value in values {
            let set = told(call::set_option(socket, IPPROTO_TCP, option, &value));
            let now = told(call::flag(socket, IPPROTO_TCP, option));
            side.report(&format!("{name} {value}"), format!("{set}; {now}"));
        }
    }
    let socket = side.socket(STREAM);
    for value in [0, 7] {
        let set = told(call::set_option(socket, SOL_SOCKET, SO_RCVLOWAT, &value));
        let now = told(call::flag(socket, SOL_SOCKET, SO_RCVLOWAT));
        side.report(&format!("SO_RCVLOWAT {value}"), format!("{set}; {now}"));
    }
}

/// `struct tcp_info` of Linux 6.1, accessed by offsets.
struct Info([u8; 232]);

impl Info {
    fn of(socket: Fd) -> Self {
        let (info, length) = call::option(socket, IPPROTO_TCP, TCP_INFO).expect("TCP_INFO");
        assert_eq!(length, 232);
        Self(info)
    }

    fn word(&self, at: usize) -> u64 {
        let bytes = self.0[at..at + 4].try_into().expect("four bytes");
        u64::from(u32::from_ne_bytes(bytes))
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }
}

/// Exchanges of 1,000 bytes each way, and 100,000 bytes from the client: figures that must be equal.
fn information(side: &mut Side) {
    let socket = side.connection();
    const LARGE: usize = 100_000;
    let mut buffer = vec![0; LARGE];
    let whole = libc::MSG_WAITALL;
    for _ in 0..10 {
        if side.is_server() {
            call::receive(socket, &mut buffer[..1000], whole).expect("receive");
            call::send(socket, &[1; 1000], 0).expect("send");
        } else {
            call::send(socket, &[1; 1000], 0).expect("send");
            call::receive(socket, &mut buffer[..1000], whole).expect("receive");
        }
    }
    side.step();
    if side.is_server() {
        let got = call::receive(socket, &mut buffer, whole);
        side.report("TCP_INFO: received", told(got));
    } else {
        call::send(socket, &buffer, 0).expect("send");
    }
    side.step();
    // The last acknowledgement may be delayed.
    std::thread::sleep(Duration::from_millis(300));
    let info = Info::of(socket);
    let exact = [
        ("state", u64::from(info.0[0])),
        ("ca_state", u64::from(info.0[1])),
        ("retransmits", u64::from(info.0[2])),
        ("probes", u64::from(info.0[3])),
        ("backoff", u64::from(info.0[4])),
        ("options", u64::from(info.0[5] & 0x27)),
        ("snd_mss", info.word(16)),
        ("unacked", info.word(24)),
        ("sacked", info.word(28)),
        ("lost", info.word(32)),
        ("retrans", info.word(36)),
        ("fackets", info.word(40)),
        ("last_ack_sent", info.word(48)),
        ("pmtu", info.word(60)),
        ("snd_ssthresh", info.word(76)),
        ("advmss", info.word(84)),
        ("bytes_acked", info.long(120)),
        ("bytes_received", info.long(128)),
        ("notsent_bytes", info.word(144)),
        ("delivered_ce", info.word(196)),
        (
            "bytes_sent for the first time",
            info.long(200) - info.long(208),
        ),
    ];
    for (name, value) in exact {
        side.report(&format!("TCP_INFO {name}"), value);
    }
    // These depend on timing: they must be present and plausible.
    let between = |low: u64, high: u64, value: u64| {
        if (low..=high).contains(&value) {
            "plausible".to_owned()
        } else {
            format!("{value} is not between {low} and {high}")
        }
    };
    let rough = [
        ("rto", between(200_000, 320_000, info.word(8))),
        ("ato", between(40_000, 320_000, info.word(12))),
        ("rcv_mss", between(500, 1448, info.word(20))),
        ("last_data_sent", between(100, 10_000, info.word(44))),
        ("last_data_recv", between(100, 10_000, info.word(52))),
        ("last_ack_recv", between(50, 10_000, info.word(56))),
        ("rcv_ssthresh", between(10_000, 8 << 20, info.word(64))),
        ("rtt", between(1, 80_000, info.word(68))),
        ("rttvar", between(1, 80_000, info.word(72))),
        ("snd_cwnd", between(10, 1000, info.word(80))),
        // The kernel caches it from earlier connections to the same host.
        ("reordering", between(3, 300, info.word(88))),
        ("rcv_space", between(10_000, 8 << 20, info.word(96))),
        (
            "pacing_rate",
            between(100_000, u64::MAX - 1, info.long(104)),
        ),
        ("segs_out", between(11, 300, info.word(136))),
        ("segs_in", between(11, 300, info.word(140))),
        ("min_rtt", between(1, 80_000, info.word(148))),
        ("data_segs_in", between(1, 110, info.word(152))),
        ("data_segs_out", between(1, 110, info.word(156))),
        ("delivery_rate", between(1, u64::MAX, info.long(160))),
        ("busy_time", between(0, 10_000_000, info.long(168))),
        ("rwnd_limited", between(0, 10_000_000, info.long(176))),
        // Segments that the kernel sends from two processors can overtake each other on the bed's link, which
        // causes some retransmissions.
        ("rcv_ooopack", between(0, 60, info.word(224))),
        ("total_retrans", between(0, 60, info.word(100))),
        ("bytes_retrans", between(0, 90_000, info.long(208))),
        ("dsack_dups", between(0, 60, info.word(216))),
        ("sndbuf_limited", between(0, 10_000_000, info.long(184))),
        ("delivered", between(1, 110, info.word(192))),
        ("snd_wnd", between(10_000, 8 << 20, info.word(228))),
    ];
    for (name, verdict) in rough {
        side.report(&format!("TCP_INFO {name}"), verdict);
    }
    side.step();
}

/// TCP_NOTSENT_LOWAT: writable only while little data is unsent.
fn unsent(side: &mut Side) {
    let socket = side.connection();
    side.step();
    if side.is_server() {
        // Without reads the window fills, and then the limit applies.
        side.step();
        let mut sink = vec![0; 1 << 20];
        let mut total = 0;
        let expected: usize = side.hear().parse().expect("a number");
        while total < expected {
            total += call::receive(socket, &mut sink, 0).expect("receive");
        }
        side.step();
        return;
    }
    call::set_option(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &16_384).expect("TCP_NOTSENT_LOWAT");
    let chunk = vec![7; 1 << 16];
    let mut sent = 0;
    let mut waits = 0;
    while waits < 20 {
        match call::send(socket, &chunk, MSG_DONTWAIT) {
            Ok(count) => {
                sent += count;
                waits = 0;
            }
            Err(_) => {
                std::thread::sleep(Duration::from_millis(10));
                waits += 1;
            }
        }
    }
    let ready = told(call::events_now(socket).map(events));
    let left = call::ioctl_int(socket, SIOCOUTQNSD).expect("SIOCOUTQNSD");
    let bounded = (16_384..=16_384 + (1 << 16)).contains(&left);
    side.report(
        "TCP_NOTSENT_LOWAT full",
        format!("{ready}; unsent within bounds: {bounded}"),
    );
    side.step();
    side.tell(sent);
    call::wait_for(socket, libc::POLLOUT);
    side.report(
        "TCP_NOTSENT_LOWAT drained",
        told(call::events_now(socket).map(events)),
    );
    side.step();
}

/// SO_RCVLOWAT: poll reports nothing until there is enough data.
fn low_water(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::send(socket, b"abc", 0).expect("send");
        side.step();
        side.step();
        call::send(socket, b"defgh", 0).expect("send");
        side.step();
        side.step();
        return;
    }
    call::set_option(socket, SOL_SOCKET, SO_RCVLOWAT, &6).expect("SO_RCVLOWAT");
    side.step();
    std::thread::sleep(Duration::from_millis(100));
    side.report(
        "SO_RCVLOWAT few",
        told(call::events_now(socket).map(events)),
    );
    side.step();
    side.step();
    call::wait_for(socket, libc::POLLIN);
    side.report(
        "SO_RCVLOWAT enough",
        told(call::events_now(socket).map(events)),
    );
    let mut buffer = [0; 64];
    let got = call::receive(socket, &mut buffer, MSG_DONTWAIT);
    side.report("SO_RCVLOWAT read", read_text(got, &buffer));
    side.step();
}

/// SIOCINQ, SIOCOUTQ and SIOCOUTQNSD of an idle connection, a new socket and a listener.
fn queues(side: &mut Side) {
    let socket = side.connection();
    side.step();
    if side.is_server() {
        call::send(socket, b"twelve bytes", 0).expect("send");
        side.step();
    } else {
        side.step();
        call::wait_for(socket, libc::POLLIN);
    }
    // The acknowledgement may be delayed.
    std::thread::sleep(Duration::from_millis(300));
    let rows = [
        ("connected", socket),
        ("fresh", side.socket(STREAM)),
        ("listening", side.own_listener()),
    ];
    for (name, socket) in rows {
        for (request, number) in [
            ("SIOCINQ", libc::FIONREAD),
            ("SIOCOUTQ", libc::TIOCOUTQ),
            ("SIOCOUTQNSD", SIOCOUTQNSD),
            ("SIOCATMARK", 0x8905),
        ] {
            let answer = told(call::ioctl_int(socket, number));
            side.report(&format!("{request} {name}"), answer);
        }
    }
    side.step();
}

/// TCP_DEFER_ACCEPT: a connection cannot be accepted before its first bytes arrive.
fn deferred(side: &mut Side) {
    let port = side.port();
    if !side.is_server() {
        side.step();
        let socket = side.socket(STREAM);
        side.report(
            "deferred: connect",
            told(call::connect(socket, side.there(port))),
        );
        side.step();
        side.step();
        call::send(socket, b"hello", 0).expect("send");
        side.step();
        return;
    }
    let listener = side.listener(port);
    call::set_option(listener, IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &10).expect("DEFER_ACCEPT");
    side.step();
    side.step();
    std::thread::sleep(Duration::from_millis(200));
    side.report(
        "deferred: before the bytes",
        told(call::events_now(listener).map(events)),
    );
    side.step();
    let (accepted, _) = call::accept(listener, 0).expect("accept");
    let mut buffer = [0; 16];
    let got = call::receive(accepted, &mut buffer, MSG_DONTWAIT);
    side.report("deferred: accepted with", read_text(got, &buffer));
    side.step();
}
