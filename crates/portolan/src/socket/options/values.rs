//! The form of each option's values, which values Linux accepts, and how it stores and shows them.

use libc::{
    IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPV6_TCLASS, IPV6_UNICAST_HOPS, IPV6_V6ONLY, SOL_SOCKET,
    TCP_CORK, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_MAXSEG, TCP_NODELAY, TCP_QUICKACK,
    TCP_USER_TIMEOUT, TCP_WINDOW_CLAMP,
};
use portolan_tcp::CongestionKind;
use portolan_types::Protocol;
use rustix::io::Errno;

use super::timestamping;
use super::{
    IP_LOCAL_PORT_RANGE, IP_MULTICAST_ALL, IPV6_MINHOPCOUNT, IPV6_MULTICAST_ALL,
    SO_CONCURRENT_SERVER, SO_DELEGATE, SO_DELIVERY, SO_DIRECT, TCP_FASTOPEN_KEY,
    TCP_FASTOPEN_NO_COOKIE, TCP_INQ, TCP_THIN_DUPACK, TCP_THIN_LINEAR_TIMEOUTS, UDP_NO_CHECK6_RX,
    UDP_NO_CHECK6_TX,
};

/// Linux's `net.core.wmem_max` and `rmem_max`: limits for applications, in bytes.
const BUFFER_MAX: u32 = 4 << 20;
/// Linux's `SOCK_MIN_SNDBUF` and `SOCK_MIN_RCVBUF`.
const SEND_BUFFER_MIN: u32 = 4608;
const RECEIVE_BUFFER_MIN: u32 = 2304;

/// Linux's minimum window clamp: half of `SOCK_MIN_RCVBUF`.
const WINDOW_CLAMP_MIN: i32 = 1152;

/// Linux's `TCP_FIN_TIMEOUT_MAX` and `tcp_fin_timeout`, seconds.
const LINGER2_MAX: i32 = 120;
const LINGER2: i32 = 60;

/// Linux's `TCP_TIMEOUT_INIT` and `TCP_RTO_MAX`, seconds.
const FIRST_RTO: i32 = 1;
const LAST_RTO: i32 = 120;

/// Half of the largest receive buffer, as on Linux.
const LOW_WATER_MAX: i32 = 3 << 20;

/// Linux's `TCP_CA_NAME_MAX`.
pub(crate) const CONGESTION_NAME: usize = 16;

/// Minimum MTU of an IPv6 link (RFC 8200 §5).
const LEAST_V6_MTU: i32 = 1280;

/// Resets a number of hops to its default.
const RESTORE: i32 = -1;

/// The form of a value, and what Linux shows when it was not set.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    Int {
        default: i32,
    },
    Flag {
        default: i32,
    },
    /// `struct linger`.
    Linger,
    /// `struct timeval`.
    Time,
    /// The name of an algorithm.
    Congestion,
    /// Bytes per second.
    Rate,
    /// One key, or a primary and a backup key.
    FastOpenKeys,
    ReadOnly {
        default: i32,
    },
    /// Empty, and cannot be changed.
    Nothing,
    /// Known, but not supported by Internet sockets.
    OfUnixOnly,
}

/// The options Portolan knows. Others get `ENOPROTOOPT`.
pub(super) fn shape(protocol: Protocol, level: i32, name: i32) -> Option<Shape> {
    match level {
        SOL_SOCKET => socket_shape(protocol, name),
        IPPROTO_TCP => tcp_shape(name),
        IPPROTO_IP => ip_shape(name),
        IPPROTO_IPV6 => ipv6_shape(name),
        libc::SOL_UDP if protocol == Protocol::Udp => udp_shape(name),
        _ => None,
    }
}

fn udp_shape(name: i32) -> Option<Shape> {
    Some(match name {
        libc::UDP_CORK | libc::UDP_GRO | UDP_NO_CHECK6_TX | UDP_NO_CHECK6_RX => {
            Shape::Flag { default: 0 }
        }
        libc::UDP_SEGMENT => Shape::Int { default: 0 },
        _ => return None,
    })
}

fn socket_shape(protocol: Protocol, name: i32) -> Option<Shape> {
    let (send_buffer, receive_buffer) = match protocol {
        Protocol::Tcp => (16_384, 131_072),
        Protocol::Udp => (212_992, 212_992),
    };
    Some(match name {
        libc::SO_SNDBUF => Shape::Int {
            default: send_buffer,
        },
        libc::SO_RCVBUF => Shape::Int {
            default: receive_buffer,
        },
        libc::SO_RCVLOWAT => Shape::Int { default: 1 },
        libc::SO_SNDLOWAT => Shape::ReadOnly { default: 1 },
        libc::SO_PRIORITY | libc::SO_MARK | libc::SO_BUSY_POLL => Shape::Int { default: 0 },
        libc::SO_TIMESTAMPING | libc::SO_ZEROCOPY => Shape::Int { default: 0 },
        libc::SO_PEEK_OFF | SO_CONCURRENT_SERVER | SO_DELEGATE | SO_DELIVERY | SO_DIRECT => {
            Shape::Int { default: -1 }
        }
        libc::SO_RXQ_OVFL | libc::SO_NO_CHECK => Shape::Flag { default: 0 },
        libc::SO_DEBUG
        | libc::SO_REUSEADDR
        | libc::SO_REUSEPORT
        | libc::SO_DONTROUTE
        | libc::SO_BROADCAST
        | libc::SO_KEEPALIVE
        | libc::SO_OOBINLINE
        | libc::SO_TIMESTAMP
        | libc::SO_TIMESTAMPNS => Shape::Flag { default: 0 },
        // Bound to no device: a socket that is bound to one is the kernel's.
        libc::SO_BINDTODEVICE => Shape::Nothing,
        // Packets do not arrive by a device queue that the socket could name.
        libc::SO_INCOMING_CPU => Shape::Int { default: -1 },
        libc::SO_INCOMING_NAPI_ID => Shape::ReadOnly { default: 0 },
        libc::SO_SELECT_ERR_QUEUE => Shape::Flag { default: 0 },
        libc::SO_LINGER => Shape::Linger,
        libc::SO_MAX_PACING_RATE => Shape::Rate,
        libc::SO_RCVTIMEO | libc::SO_SNDTIMEO => Shape::Time,
        libc::SO_PASSCRED => Shape::OfUnixOnly,
        _ => return None,
    })
}

fn tcp_shape(name: i32) -> Option<Shape> {
    let int = |default| Shape::Int { default };
    Some(match name {
        TCP_NODELAY | TCP_CORK | libc::TCP_FASTOPEN_CONNECT | TCP_FASTOPEN_NO_COOKIE => {
            Shape::Flag { default: 0 }
        }
        TCP_INQ | TCP_THIN_LINEAR_TIMEOUTS | TCP_THIN_DUPACK => int(0),
        TCP_QUICKACK => Shape::Flag { default: 1 },
        TCP_KEEPIDLE => int(7200),
        TCP_KEEPINTVL => int(75),
        TCP_KEEPCNT => int(9),
        TCP_MAXSEG => int(536),
        libc::TCP_SYNCNT => int(6),
        libc::TCP_LINGER2 => int(60),
        libc::TCP_DEFER_ACCEPT
        | TCP_WINDOW_CLAMP
        | TCP_USER_TIMEOUT
        | libc::TCP_FASTOPEN
        | libc::TCP_NOTSENT_LOWAT => int(0),
        libc::TCP_CONGESTION => Shape::Congestion,
        TCP_FASTOPEN_KEY => Shape::FastOpenKeys,
        _ => return None,
    })
}

fn ip_shape(name: i32) -> Option<Shape> {
    Some(match name {
        libc::IP_TTL => Shape::Int { default: 64 },
        libc::IP_OPTIONS => Shape::Nothing,
        libc::IP_TOS | libc::IP_MINTTL => Shape::Int { default: 0 },
        libc::IP_MTU_DISCOVER | libc::IP_MULTICAST_TTL => Shape::Int { default: 1 },
        libc::IP_MULTICAST_LOOP => Shape::Flag { default: 1 },
        // Unlike its IPv6 counterpart it is not a flag: it takes 0 and 1 only.
        IP_MULTICAST_ALL => Shape::Int { default: 1 },
        libc::IP_MULTICAST_IF | IP_LOCAL_PORT_RANGE => Shape::Int { default: 0 },
        libc::IP_BIND_ADDRESS_NO_PORT
        | libc::IP_RECVERR
        | libc::IP_PKTINFO
        | libc::IP_FREEBIND
        | libc::IP_RECVTTL
        | libc::IP_RECVTOS
        | libc::IP_RECVOPTS
        | libc::IP_RECVORIGDSTADDR
        | libc::IP_TRANSPARENT => Shape::Flag { default: 0 },
        _ => return None,
    })
}

fn ipv6_shape(name: i32) -> Option<Shape> {
    Some(match name {
        IPV6_UNICAST_HOPS => Shape::Int { default: 64 },
        IPV6_TCLASS | IPV6_MINHOPCOUNT => Shape::Int { default: 0 },
        libc::IPV6_MTU_DISCOVER | libc::IPV6_MULTICAST_HOPS => Shape::Int { default: 1 },
        libc::IPV6_MULTICAST_LOOP | IPV6_MULTICAST_ALL => Shape::Flag { default: 1 },
        libc::IPV6_MULTICAST_IF | libc::IPV6_MTU => Shape::Int { default: 0 },
        IPV6_V6ONLY
        | libc::IPV6_DONTFRAG
        | libc::IPV6_FREEBIND
        | libc::IPV6_RECVORIGDSTADDR
        | libc::IPV6_RECVPATHMTU
        | libc::IPV6_TRANSPARENT
        | libc::IPV6_RECVERR
        | libc::IPV6_RECVPKTINFO
        | libc::IPV6_RECVHOPLIMIT
        | libc::IPV6_RECVTCLASS => Shape::Flag { default: 0 },
        _ => return None,
    })
}

/// IP options may be given as one byte, all others as an `int`.
pub(super) fn int_of(value: &[u8], level: i32) -> Result<i32, Errno> {
    match value {
        [a, b, c, d, ..] => Ok(i32::from_ne_bytes([*a, *b, *c, *d])),
        [byte, ..] if level == IPPROTO_IP => Ok(i32::from(*byte)),
        _ => Err(Errno::INVAL),
    }
}

pub(super) fn check_range(
    protocol: Protocol,
    level: i32,
    name: i32,
    value: i32,
) -> Result<(), Errno> {
    let allowed = match (level, name) {
        (IPPROTO_TCP, TCP_KEEPIDLE | TCP_KEEPINTVL) => 1..=32_767,
        (IPPROTO_TCP, TCP_KEEPCNT | libc::TCP_SYNCNT) => 1..=127,
        (IPPROTO_TCP, TCP_MAXSEG) if value != 0 => 88..=32_767,
        (IPPROTO_TCP, libc::TCP_FASTOPEN) => 0..=i32::MAX,
        (IPPROTO_TCP, TCP_USER_TIMEOUT) => 0..=i32::MAX,
        (libc::SOL_UDP, libc::UDP_SEGMENT) => 0..=i32::from(u16::MAX),
        (SOL_SOCKET, libc::SO_TIMESTAMPING) => 0..=timestamping::MASK,
        (SOL_SOCKET, libc::SO_ZEROCOPY) => 0..=1,
        // A stream is never sent to a group.
        (IPPROTO_IP, libc::IP_MULTICAST_TTL) if protocol == Protocol::Tcp => {
            return Err(Errno::INVAL);
        }
        (IPPROTO_IP, libc::IP_MTU_DISCOVER) | (IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER) => {
            libc::IP_PMTUDISC_DONT..=libc::IP_PMTUDISC_OMIT
        }
        (IPPROTO_IP, IP_MULTICAST_ALL) => 0..=1,
        (IPPROTO_TCP, TCP_INQ | TCP_THIN_LINEAR_TIMEOUTS | TCP_THIN_DUPACK) => 0..=1,
        (IPPROTO_IPV6, IPV6_TCLASS) => RESTORE..=255,
        (IPPROTO_IP, libc::IP_MINTTL) | (IPPROTO_IPV6, IPV6_MINHOPCOUNT) => 0..=255,
        (IPPROTO_IPV6, libc::IPV6_MTU) if value != 0 => LEAST_V6_MTU..=i32::MAX,
        (IPPROTO_IP, IP_LOCAL_PORT_RANGE) => {
            let (low, high) = (value & 0xffff, value.cast_unsigned() >> 16);
            if low != 0 && high != 0 && low.cast_unsigned() > high {
                return Err(Errno::INVAL);
            }
            i32::MIN..=i32::MAX
        }
        (IPPROTO_IP, libc::IP_TTL) if value != RESTORE => 1..=255,
        (IPPROTO_IP, libc::IP_TTL | libc::IP_MULTICAST_TTL)
        | (IPPROTO_IPV6, IPV6_UNICAST_HOPS | libc::IPV6_MULTICAST_HOPS) => RESTORE..=255,
        _ => i32::MIN..=i32::MAX,
    };
    if allowed.contains(&value) {
        Ok(())
    } else {
        Err(Errno::INVAL)
    }
}

/// Returns a number as Linux stores it.
pub(super) fn kept_int(
    protocol: Protocol,
    (level, name): (i32, i32),
    number: i32,
    default: i32,
) -> i32 {
    match (level, name) {
        // The two low bits of a stream are TCP's own (RFC 3168).
        (IPPROTO_IP, libc::IP_TOS) if protocol == Protocol::Tcp => number & 0xfc,
        (IPPROTO_IP, libc::IP_TOS) => number & 0xff,
        (IPPROTO_IPV6, IPV6_TCLASS) if number == RESTORE => 0,
        (IPPROTO_IPV6, IPV6_TCLASS) if protocol == Protocol::Tcp => number & 0xfc,
        // It has no effect any more, in Linux neither.
        (IPPROTO_TCP, TCP_THIN_DUPACK) => 0,
        (SOL_SOCKET, libc::SO_SNDBUF) => doubled(number, SEND_BUFFER_MIN),
        (SOL_SOCKET, libc::SO_RCVBUF) => doubled(number, RECEIVE_BUFFER_MIN),
        (
            IPPROTO_IP | IPPROTO_IPV6,
            libc::IP_TTL | libc::IP_MULTICAST_TTL | IPV6_UNICAST_HOPS | libc::IPV6_MULTICAST_HOPS,
        ) if number == RESTORE => default,
        (SOL_SOCKET, libc::SO_RCVLOWAT) => match number {
            0 => 1,
            i32::MIN..=-1 => LOW_WATER_MAX,
            bytes => bytes.min(LOW_WATER_MAX),
        },
        (IPPROTO_TCP, TCP_WINDOW_CLAMP) if number != 0 => number.max(WINDOW_CLAMP_MIN),
        (IPPROTO_TCP, libc::TCP_LINGER2) => match number {
            i32::MIN..=-1 => -1,
            0 => LINGER2,
            seconds => seconds.min(LINGER2_MAX),
        },
        (IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => deferral(number),
        _ => number,
    }
}

/// Linux counts `TCP_DEFER_ACCEPT` in retransmissions of the SYN+ACK. Returns the time that the
/// smallest sufficient number of them takes, in seconds.
fn deferral(seconds: i32) -> i32 {
    let (mut period, mut wait) = (0, FIRST_RTO);
    let mut retries = 0;
    while period < seconds && retries < u8::MAX {
        period += wait;
        wait = (2 * wait).min(LAST_RTO);
        retries += 1;
    }
    period
}

/// As in socket(7), the kernel doubles the requested value.
fn doubled(asked: i32, least: u32) -> i32 {
    let bytes = asked
        .cast_unsigned()
        .min(BUFFER_MAX)
        .saturating_mul(2)
        .max(least);
    i32::try_from(bytes).unwrap_or(i32::MAX)
}

/// As [`doubled`], without the limit for applications.
pub(super) fn forced_buffer(name: i32, asked: i32) -> i32 {
    let least = match name {
        libc::SO_RCVBUFFORCE => RECEIVE_BUFFER_MIN,
        _ => SEND_BUFFER_MIN,
    };
    let least = i32::try_from(least).unwrap_or(i32::MAX);
    asked.clamp(0, i32::MAX / 2).saturating_mul(2).max(least)
}

/// `struct linger`; the switch reads back as 1.
pub(super) fn linger(value: &[u8]) -> Result<Vec<u8>, Errno> {
    let (on, seconds) = (value.first_chunk::<4>(), value.get(4..8));
    let (Some(on), Some(seconds)) = (on, seconds) else {
        return Err(Errno::INVAL);
    };
    let on = i32::from(i32::from_ne_bytes(*on) != 0);
    Ok([&on.to_ne_bytes()[..], seconds].concat())
}

/// An `unsigned int`, whose largest value means no limit, or an `unsigned long`.
pub(super) fn rate(value: &[u8]) -> Result<u64, Errno> {
    if let Some(long) = value.first_chunk() {
        return Ok(u64::from_ne_bytes(*long));
    }
    let int = u32::from_ne_bytes(*value.first_chunk().ok_or(Errno::INVAL)?);
    Ok(match int {
        u32::MAX => u64::MAX,
        int => u64::from(int),
    })
}

/// Is it a `struct timeval` with negative seconds?
pub(super) fn is_before_now(value: &[u8]) -> bool {
    let seconds = value.first_chunk();
    value.len() == 16 && seconds.is_some_and(|seconds| i64::from_ne_bytes(*seconds) < 0)
}

/// `struct timeval`.
pub(super) fn time(value: &[u8]) -> Result<Vec<u8>, Errno> {
    let word = |at: usize| -> Result<i64, Errno> {
        let bytes = value.get(at..at + 8).and_then(|word| word.first_chunk());
        Ok(i64::from_ne_bytes(*bytes.ok_or(Errno::INVAL)?))
    };
    match (word(0)?, word(8)?) {
        (_, ..0 | 1_000_000..) => Err(Errno::DOM),
        _ => Ok(value[..16].to_vec()),
    }
}

/// The name of a known algorithm, padded as Linux shows it.
pub(super) fn congestion(value: &[u8]) -> Result<Vec<u8>, Errno> {
    let name = value.split(|&byte| byte == 0).next().unwrap_or_default();
    core::str::from_utf8(name)
        .ok()
        .and_then(CongestionKind::from_name)
        .ok_or(Errno::NOENT)?;
    let mut kept = name.to_vec();
    kept.resize(CONGESTION_NAME, 0);
    Ok(kept)
}
