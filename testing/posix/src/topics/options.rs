//! Socket options: the initial values of a new socket, and the values after a change.

use libc::{
    IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET, c_int, linger, socklen_t, tcp_info, timeval,
};

use crate::{
    call::{self, Answer, DATAGRAM, Fd, STREAM},
    show::{told, worked},
    side::Side,
};

/// Name, level and number, and a value to set.
type Row = (&'static str, c_int, c_int, c_int);

const COMMON: &[Row] = &[
    ("SO_REUSEADDR", SOL_SOCKET, libc::SO_REUSEADDR, 1),
    ("SO_REUSEPORT", SOL_SOCKET, libc::SO_REUSEPORT, 1),
    ("SO_KEEPALIVE", SOL_SOCKET, libc::SO_KEEPALIVE, 7),
    ("SO_BROADCAST", SOL_SOCKET, libc::SO_BROADCAST, 1),
    ("SO_OOBINLINE", SOL_SOCKET, libc::SO_OOBINLINE, 1),
    ("SO_DONTROUTE", SOL_SOCKET, libc::SO_DONTROUTE, 1),
    ("SO_TIMESTAMP", SOL_SOCKET, libc::SO_TIMESTAMP, 1),
    ("SO_TIMESTAMPNS", SOL_SOCKET, libc::SO_TIMESTAMPNS, 1),
    ("SO_RCVLOWAT", SOL_SOCKET, libc::SO_RCVLOWAT, 5),
    ("SO_SNDLOWAT", SOL_SOCKET, libc::SO_SNDLOWAT, 5),
    ("SO_PRIORITY", SOL_SOCKET, libc::SO_PRIORITY, 3),
    ("SO_MARK", SOL_SOCKET, libc::SO_MARK, 0),
    ("SO_RCVBUF", SOL_SOCKET, libc::SO_RCVBUF, 50_000),
    ("SO_SNDBUF", SOL_SOCKET, libc::SO_SNDBUF, 50_000),
    ("SO_RCVBUF small", SOL_SOCKET, libc::SO_RCVBUF, 1),
    ("SO_SNDBUF small", SOL_SOCKET, libc::SO_SNDBUF, 1),
    ("SO_RCVBUF negative", SOL_SOCKET, libc::SO_RCVBUF, -1),
    ("SO_SNDBUF negative", SOL_SOCKET, libc::SO_SNDBUF, -1),
    ("SO_RCVBUFFORCE", SOL_SOCKET, libc::SO_RCVBUFFORCE, 50_000),
    ("SO_SNDBUFFORCE", SOL_SOCKET, libc::SO_SNDBUFFORCE, 50_000),
    ("SO_BUSY_POLL", SOL_SOCKET, libc::SO_BUSY_POLL, 0),
    ("SO_ZEROCOPY", SOL_SOCKET, libc::SO_ZEROCOPY, 1),
    ("SO_TYPE", SOL_SOCKET, libc::SO_TYPE, 1),
    ("SO_DOMAIN", SOL_SOCKET, libc::SO_DOMAIN, 1),
    ("SO_PROTOCOL", SOL_SOCKET, libc::SO_PROTOCOL, 1),
    ("SO_ACCEPTCONN", SOL_SOCKET, libc::SO_ACCEPTCONN, 1),
    ("SO_ERROR", SOL_SOCKET, libc::SO_ERROR, 1),
    ("SO_PASSCRED", SOL_SOCKET, libc::SO_PASSCRED, 1),
    ("unknown of SOL_SOCKET", SOL_SOCKET, 9999, 1),
];

/// linux/in6.h
const IPV6_MINHOPCOUNT: i32 = 73;

const IP: &[Row] = &[
    ("IP_TTL", IPPROTO_IP, libc::IP_TTL, 33),
    ("IP_TTL too large", IPPROTO_IP, libc::IP_TTL, 256),
    ("IP_TTL default", IPPROTO_IP, libc::IP_TTL, -1),
    ("IP_TOS", IPPROTO_IP, libc::IP_TOS, 0x10),
    ("IP_TOS with TCP's bits", IPPROTO_IP, libc::IP_TOS, 0x13),
    ("IP_TOS too large", IPPROTO_IP, libc::IP_TOS, 0x1f0),
    ("IP_RECVOPTS", IPPROTO_IP, libc::IP_RECVOPTS, 1),
    ("IP_MINTTL", IPPROTO_IP, libc::IP_MINTTL, 33),
    ("IP_MINTTL too large", IPPROTO_IP, libc::IP_MINTTL, 256),
    ("IP_MINTTL too small", IPPROTO_IP, libc::IP_MINTTL, -1),
    (
        "IP_MTU_DISCOVER",
        IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_DO,
    ),
    ("IP_RECVERR", IPPROTO_IP, libc::IP_RECVERR, 1),
    ("IP_PKTINFO", IPPROTO_IP, libc::IP_PKTINFO, 1),
    ("IP_RECVTTL", IPPROTO_IP, libc::IP_RECVTTL, 1),
    ("IP_RECVTOS", IPPROTO_IP, libc::IP_RECVTOS, 1),
    ("IP_FREEBIND", IPPROTO_IP, libc::IP_FREEBIND, 1),
    (
        "IP_BIND_ADDRESS_NO_PORT",
        IPPROTO_IP,
        libc::IP_BIND_ADDRESS_NO_PORT,
        1,
    ),
    ("IP_MULTICAST_TTL", IPPROTO_IP, libc::IP_MULTICAST_TTL, 4),
    ("IP_MULTICAST_LOOP", IPPROTO_IP, libc::IP_MULTICAST_LOOP, 0),
    ("IP_MTU", IPPROTO_IP, libc::IP_MTU, 1400),
    ("unknown of IPPROTO_IP", IPPROTO_IP, 9999, 1),
];

const IPV6: &[Row] = &[
    ("IPV6_V6ONLY", IPPROTO_IPV6, libc::IPV6_V6ONLY, 1),
    (
        "IPV6_UNICAST_HOPS",
        IPPROTO_IPV6,
        libc::IPV6_UNICAST_HOPS,
        33,
    ),
    ("IPV6_TCLASS", IPPROTO_IPV6, libc::IPV6_TCLASS, 0x10),
    (
        "IPV6_TCLASS with TCP's bits",
        IPPROTO_IPV6,
        libc::IPV6_TCLASS,
        0x13,
    ),
    (
        "IPV6_TCLASS too large",
        IPPROTO_IPV6,
        libc::IPV6_TCLASS,
        256,
    ),
    ("IPV6_TCLASS default", IPPROTO_IPV6, libc::IPV6_TCLASS, -1),
    ("IPV6_MINHOPCOUNT", IPPROTO_IPV6, IPV6_MINHOPCOUNT, 33),
    (
        "IPV6_MINHOPCOUNT too large",
        IPPROTO_IPV6,
        IPV6_MINHOPCOUNT,
        256,
    ),
    ("IPV6_RECVPKTINFO", IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1),
    (
        "IPV6_MTU_DISCOVER",
        IPPROTO_IPV6,
        libc::IPV6_MTU_DISCOVER,
        libc::IP_PMTUDISC_DO,
    ),
    ("unknown of IPPROTO_IPV6", IPPROTO_IPV6, 9999, 1),
];

/// linux/tcp.h
const TCP_INQ: i32 = 36;

const TCP: &[Row] = &[
    ("TCP_NODELAY", IPPROTO_TCP, libc::TCP_NODELAY, 1),
    ("TCP_CORK", IPPROTO_TCP, libc::TCP_CORK, 1),
    ("TCP_QUICKACK", IPPROTO_TCP, libc::TCP_QUICKACK, 0),
    ("TCP_MAXSEG", IPPROTO_TCP, libc::TCP_MAXSEG, 1000),
    ("TCP_MAXSEG too small", IPPROTO_TCP, libc::TCP_MAXSEG, 10),
    ("TCP_KEEPIDLE", IPPROTO_TCP, libc::TCP_KEEPIDLE, 60),
    ("TCP_KEEPIDLE too small", IPPROTO_TCP, libc::TCP_KEEPIDLE, 0),
    ("TCP_KEEPINTVL", IPPROTO_TCP, libc::TCP_KEEPINTVL, 10),
    ("TCP_KEEPCNT", IPPROTO_TCP, libc::TCP_KEEPCNT, 4),
    ("TCP_SYNCNT", IPPROTO_TCP, libc::TCP_SYNCNT, 3),
    ("TCP_LINGER2", IPPROTO_TCP, libc::TCP_LINGER2, 20),
    ("TCP_DEFER_ACCEPT", IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 0),
    ("TCP_WINDOW_CLAMP", IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, 0),
    (
        "TCP_USER_TIMEOUT",
        IPPROTO_TCP,
        libc::TCP_USER_TIMEOUT,
        5000,
    ),
    ("TCP_FASTOPEN", IPPROTO_TCP, libc::TCP_FASTOPEN, 0),
    (
        "TCP_NOTSENT_LOWAT",
        IPPROTO_TCP,
        libc::TCP_NOTSENT_LOWAT,
        16_384,
    ),
    ("TCP_INQ", IPPROTO_TCP, TCP_INQ, 1),
    ("TCP_INQ too large", IPPROTO_TCP, TCP_INQ, 2),
    ("TCP_THIN_LINEAR_TIMEOUTS", IPPROTO_TCP, 16, 1),
    ("TCP_THIN_DUPACK", IPPROTO_TCP, 17, 1),
    ("unknown of IPPROTO_TCP", IPPROTO_TCP, 9999, 1),
];

pub(super) fn run(side: &mut Side) {
    let connected = side.connection();
    if side.is_server() {
        side.step();
        return;
    }
    let network = if side.is_v6() { IPV6 } else { IP };
    for (kind, name) in [(STREAM, "stream"), (DATAGRAM, "datagram")] {
        [COMMON, network, TCP]
            .concat()
            .iter()
            .for_each(|row| change(side, name, side.socket(kind), row));
        structures(side, name, side.socket(kind));
        lengths(side, name, side.socket(kind));
        odd(side, name, side.socket(kind));
        device(side, name, side.socket(kind));
        filter(side, name, side.socket(kind));
    }
    congestion(side);
    state(side, connected);
    side.step();
}

/// Binding to a device, which leaves a Portolan socket to the kernel.
fn device(side: &Side, kind: &str, socket: Fd) {
    let bind = |name: &str| {
        let (start, length) = (name.as_ptr().cast(), name.len() as socklen_t);
        told(call::set_option_raw(
            socket,
            SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            start,
            length,
        ))
    };
    side.report(&format!("{kind} to no device"), bind("nosuch0"));
    side.report(&format!("{kind} to a device"), bind("lo"));
    let name: Answer<([u8; 16], usize)> = call::option(socket, SOL_SOCKET, libc::SO_BINDTODEVICE);
    let shown = name.map(|(name, length)| String::from_utf8_lossy(&name[..length]).into_owned());
    side.report(&format!("{kind} device"), format!("{shown:?}"));
    let ttl = call::set_option(socket, IPPROTO_IP, libc::IP_TTL, &9);
    side.report(&format!("{kind} afterwards"), told(ttl));
    let bound = call::bind(socket, side.here(0));
    side.report(&format!("{kind} bind there"), told(bound));
}

/// Attaching a filter.
fn filter(side: &Side, kind: &str, socket: Fd) {
    const ALL: libc::sock_filter = libc::sock_filter {
        code: 6,
        jt: 0,
        jf: 0,
        k: u32::MAX,
    };
    let mut program = [ALL];
    let filter = libc::sock_fprog {
        len: 1,
        filter: program.as_mut_ptr(),
    };
    let attach = call::set_option_raw(
        socket,
        SOL_SOCKET,
        libc::SO_ATTACH_FILTER,
        std::ptr::from_ref(&filter).cast(),
        size_of_val(&filter) as socklen_t,
    );
    side.report(&format!("{kind} filter"), told(attach));
    let detach = call::set_option(socket, SOL_SOCKET, libc::SO_DETACH_FILTER, &0);
    side.report(&format!("{kind} filter gone"), told(detach));
}

fn change(side: &Side, kind: &str, socket: Fd, &(name, level, number, value): &Row) {
    let before = told(call::flag(socket, level, number));
    let set = told(call::set_option(socket, level, number, &value));
    let after = told(call::flag(socket, level, number));
    side.report(
        &format!("{kind} {name}"),
        format!("{before}; set {value}: {set}; {after}"),
    );
}

fn structures(side: &Side, kind: &str, socket: Fd) {
    let show =
        |answer: Answer<(linger, usize)>| {
            told(answer.map(|(linger, length)| {
                format!("{} {} ({length})", linger.l_onoff, linger.l_linger)
            }))
        };
    let before = show(call::option(socket, SOL_SOCKET, libc::SO_LINGER));
    let value = linger {
        l_onoff: 5,
        l_linger: 3,
    };
    let set = told(call::set_option(
        socket,
        SOL_SOCKET,
        libc::SO_LINGER,
        &value,
    ));
    let after = show(call::option(socket, SOL_SOCKET, libc::SO_LINGER));
    side.report(
        &format!("{kind} SO_LINGER"),
        format!("{before}; {set}; {after}"),
    );

    let show = |answer: Answer<(timeval, usize)>| {
        told(answer.map(|(time, length)| format!("{}.{:06} ({length})", time.tv_sec, time.tv_usec)))
    };
    for (name, number) in [
        ("SO_RCVTIMEO", libc::SO_RCVTIMEO),
        ("SO_SNDTIMEO", libc::SO_SNDTIMEO),
    ] {
        for (tv_sec, tv_usec) in [(2, 500_000), (0, 1_000_000), (-1, 0), (0, 0)] {
            let before = show(call::option(socket, SOL_SOCKET, number));
            let set = told(call::set_option(
                socket,
                SOL_SOCKET,
                number,
                &timeval { tv_sec, tv_usec },
            ));
            let after = show(call::option(socket, SOL_SOCKET, number));
            let check = format!("{kind} {name} {tv_sec}.{tv_usec}");
            side.report(&check, format!("{before}; {set}; {after}"));
        }
    }
}

/// Lengths other than an int's.
fn lengths(side: &Side, kind: &str, socket: Fd) {
    let short = call::set_option(socket, SOL_SOCKET, libc::SO_KEEPALIVE, &1_u8);
    side.report(&format!("{kind} set one byte"), told(short));
    let long = call::set_option(socket, SOL_SOCKET, libc::SO_KEEPALIVE, &[1_u8; 16]);
    side.report(&format!("{kind} set sixteen bytes"), told(long));
    let byte = call::option::<u8>(socket, SOL_SOCKET, libc::SO_KEEPALIVE);
    side.report(
        &format!("{kind} one byte"),
        told(byte.map(|(value, length)| format!("{value} ({length})"))),
    );
    let many = call::option::<[u8; 16]>(socket, SOL_SOCKET, libc::SO_KEEPALIVE);
    side.report(
        &format!("{kind} sixteen bytes"),
        told(many.map(|(_, length)| format!("({length})"))),
    );
    let mut place: c_int = 0;
    let mut negative = -1_i32 as socklen_t;
    let refused = call::option_raw(
        socket,
        SOL_SOCKET,
        libc::SO_TYPE,
        (&raw mut place).cast(),
        &mut negative,
    );
    side.report(&format!("{kind} negative length"), told(refused));
    let refused = call::set_option_raw(
        socket,
        SOL_SOCKET,
        libc::SO_KEEPALIVE,
        (&raw const place).cast(),
        negative,
    );
    side.report(&format!("{kind} set a negative length"), told(refused));
}

fn congestion(side: &Side) {
    let socket = side.socket(STREAM);
    let get = || call::option::<[u8; 16]>(socket, IPPROTO_TCP, libc::TCP_CONGESTION);
    let name = |(bytes, length): ([u8; 16], usize)| {
        format!(
            "{} ({length})",
            String::from_utf8_lossy(&bytes).trim_end_matches('\0')
        )
    };
    side.report("TCP_CONGESTION", told(get().map(name)));
    side.report(
        "TCP_CONGESTION reno",
        told(call::set_option(
            socket,
            IPPROTO_TCP,
            libc::TCP_CONGESTION,
            b"reno",
        )),
    );
    side.report("TCP_CONGESTION then", told(get().map(name)));
    side.report(
        "TCP_CONGESTION none",
        worked(call::set_option(
            socket,
            IPPROTO_TCP,
            libc::TCP_CONGESTION,
            b"none",
        )),
    );
}

/// Buffers beyond the limits, and options whose value is empty.
fn odd(side: &Side, kind: &str, socket: Fd) {
    const LARGE: c_int = 40 << 20;
    for (name, force, plain) in [
        ("SO_RCVBUFFORCE", libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        ("SO_SNDBUFFORCE", libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    ] {
        let set = told(call::set_option(socket, SOL_SOCKET, force, &LARGE));
        let shown = told(call::flag(socket, SOL_SOCKET, plain));
        side.report(&format!("{kind} {name} large"), format!("{set}; {shown}"));
    }
    let length = |level, name| {
        let answer: Answer<([u8; 40], usize)> = call::option(socket, level, name);
        told(answer.map(|(_, length)| length))
    };
    let device = length(SOL_SOCKET, libc::SO_BINDTODEVICE);
    side.report(&format!("{kind} no device"), device);
    if !side.is_v6() {
        let options = length(IPPROTO_IP, libc::IP_OPTIONS);
        side.report(&format!("{kind} IP_OPTIONS"), options);
    }
}

fn state(side: &Side, connected: Fd) {
    let state = |socket| {
        let info = call::option::<tcp_info>(socket, IPPROTO_TCP, libc::TCP_INFO);
        told(info.map(|(info, _)| info.tcpi_state))
    };
    side.report("TCP_INFO state fresh", state(side.socket(STREAM)));
    side.report(
        "TCP_INFO state listening",
        state(side.listener(side.port())),
    );
    side.report("TCP_INFO state connected", state(connected));
    let info = call::option::<tcp_info>(connected, IPPROTO_TCP, libc::TCP_INFO);
    let plausible = info
        .map(|(info, _)| info.tcpi_snd_mss > 500 && info.tcpi_rtt > 0 && info.tcpi_snd_cwnd > 1);
    side.report("TCP_INFO plausible", told(plausible));
    let segment = call::flag(connected, IPPROTO_TCP, libc::TCP_MAXSEG);
    side.report(
        "TCP_MAXSEG connected",
        told(segment.map(|segment| segment > 500)),
    );
    if !side.is_v6() {
        side.report(
            "IP_MTU connected",
            told(call::flag(connected, IPPROTO_IP, libc::IP_MTU)),
        );
    }
}
