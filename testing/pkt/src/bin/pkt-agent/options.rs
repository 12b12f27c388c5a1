//! Socket options by name.

use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET, c_int};
use portolan_pkt::agent::Value;
use portolan_posix_check::call::{self, Errno, Fd};

use crate::{Found, Made, number, plain};

/// linux/in6.h
const IPV6_MINHOPCOUNT: c_int = 73;
/// linux/tcp.h
const TCP_FASTOPEN_KEY: c_int = 33;

/// Options whose value is an int.
const INTEGERS: [(&str, c_int, c_int); 45] = [
    ("SO_REUSEADDR", SOL_SOCKET, libc::SO_REUSEADDR),
    ("SO_REUSEPORT", SOL_SOCKET, libc::SO_REUSEPORT),
    ("SO_KEEPALIVE", SOL_SOCKET, libc::SO_KEEPALIVE),
    ("SO_OOBINLINE", SOL_SOCKET, libc::SO_OOBINLINE),
    ("SO_RCVBUF", SOL_SOCKET, libc::SO_RCVBUF),
    ("SO_SNDBUF", SOL_SOCKET, libc::SO_SNDBUF),
    ("SO_RCVLOWAT", SOL_SOCKET, libc::SO_RCVLOWAT),
    ("SO_ERROR", SOL_SOCKET, libc::SO_ERROR),
    ("SO_ACCEPTCONN", SOL_SOCKET, libc::SO_ACCEPTCONN),
    ("SO_NO_CHECK", SOL_SOCKET, libc::SO_NO_CHECK),
    ("SO_PRIORITY", SOL_SOCKET, libc::SO_PRIORITY),
    ("SO_MAX_PACING_RATE", SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    ("TCP_NODELAY", IPPROTO_TCP, libc::TCP_NODELAY),
    ("TCP_CORK", IPPROTO_TCP, libc::TCP_CORK),
    ("TCP_QUICKACK", IPPROTO_TCP, libc::TCP_QUICKACK),
    ("TCP_MAXSEG", IPPROTO_TCP, libc::TCP_MAXSEG),
    ("TCP_KEEPIDLE", IPPROTO_TCP, libc::TCP_KEEPIDLE),
    ("TCP_KEEPINTVL", IPPROTO_TCP, libc::TCP_KEEPINTVL),
    ("TCP_KEEPCNT", IPPROTO_TCP, libc::TCP_KEEPCNT),
    ("TCP_SYNCNT", IPPROTO_TCP, libc::TCP_SYNCNT),
    ("TCP_LINGER2", IPPROTO_TCP, libc::TCP_LINGER2),
    ("TCP_DEFER_ACCEPT", IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
    ("TCP_WINDOW_CLAMP", IPPROTO_TCP, libc::TCP_WINDOW_CLAMP),
    ("TCP_USER_TIMEOUT", IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    ("TCP_FASTOPEN", IPPROTO_TCP, libc::TCP_FASTOPEN),
    (
        "TCP_FASTOPEN_CONNECT",
        IPPROTO_TCP,
        libc::TCP_FASTOPEN_CONNECT,
    ),
    (
        "TCP_FASTOPEN_NO_COOKIE",
        IPPROTO_TCP,
        libc::TCP_FASTOPEN_NO_COOKIE,
    ),
    ("TCP_NOTSENT_LOWAT", IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    ("TCP_INQ", IPPROTO_TCP, libc::TCP_INQ),
    (
        "TCP_THIN_LINEAR_TIMEOUTS",
        IPPROTO_TCP,
        libc::TCP_THIN_LINEAR_TIMEOUTS,
    ),
    ("TCP_TIMESTAMP", IPPROTO_TCP, libc::TCP_TIMESTAMP),
    ("TCP_SAVE_SYN", IPPROTO_TCP, libc::TCP_SAVE_SYN),
    ("IP_TTL", IPPROTO_IP, libc::IP_TTL),
    ("IP_TOS", IPPROTO_IP, libc::IP_TOS),
    ("IP_MINTTL", IPPROTO_IP, libc::IP_MINTTL),
    ("IP_RECVERR", IPPROTO_IP, libc::IP_RECVERR),
    ("IP_MTU_DISCOVER", IPPROTO_IP, libc::IP_MTU_DISCOVER),
    ("IP_MTU", IPPROTO_IP, libc::IP_MTU),
    ("IPV6_UNICAST_HOPS", IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
    ("IPV6_TCLASS", IPPROTO_IPV6, libc::IPV6_TCLASS),
    ("IPV6_MINHOPCOUNT", IPPROTO_IPV6, IPV6_MINHOPCOUNT),
    ("IPV6_V6ONLY", IPPROTO_IPV6, libc::IPV6_V6ONLY),
    ("IPV6_RECVERR", IPPROTO_IPV6, libc::IPV6_RECVERR),
    ("IPV6_MTU_DISCOVER", IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    ("IPV6_MTU", IPPROTO_IPV6, libc::IPV6_MTU),
];

fn find(option: &[String]) -> Result<(c_int, c_int), Errno> {
    let name = option.first().map(String::as_str).unwrap_or_default();
    let row = INTEGERS.iter().find(|row| row.0 == name);
    row.map(|row| (row.1, row.2)).ok_or(Errno(libc::ENOSYS))
}

pub(crate) fn set(fd: Fd, option: &[String], value: &[Value]) -> Made {
    let name = option.first().map(String::as_str).unwrap_or_default();
    match (name, value) {
        ("SO_LINGER", [Value::Number(on), Value::Number(seconds)]) => {
            let linger = libc::linger {
                l_onoff: *on as c_int,
                l_linger: *seconds as c_int,
            };
            plain(call::set_option(fd, SOL_SOCKET, libc::SO_LINGER, &linger))
        }
        // Values in milliseconds.
        ("SO_RCVTIMEO" | "SO_SNDTIMEO", [Value::Number(milliseconds)]) => {
            let which = match name {
                "SO_RCVTIMEO" => libc::SO_RCVTIMEO,
                _ => libc::SO_SNDTIMEO,
            };
            let time = libc::timeval {
                tv_sec: milliseconds / 1000,
                tv_usec: milliseconds % 1000 * 1000,
            };
            plain(call::set_option(fd, SOL_SOCKET, which, &time))
        }
        ("TCP_CONGESTION", [Value::Text(name)]) => set_congestion(fd, name),
        ("TCP_FASTOPEN_KEY", [Value::Text(key)]) => {
            let length = key.len() as libc::socklen_t;
            let key = key.as_ptr().cast();
            plain(call::set_option_raw(
                fd,
                IPPROTO_TCP,
                TCP_FASTOPEN_KEY,
                key,
                length,
            ))
        }
        (_, [Value::Number(value)]) => {
            let (level, name) = find(option)?;
            plain(call::set_option(fd, level, name, &(*value as c_int)))
        }
        _ => Err(Errno(libc::ENOSYS)),
    }
}

pub(crate) fn set_congestion(fd: Fd, name: &[u8]) -> Made {
    let mut value = [0_u8; 16];
    let room = value.get_mut(..name.len()).ok_or(Errno(libc::EINVAL))?;
    room.copy_from_slice(name);
    plain(call::set_option(
        fd,
        IPPROTO_TCP,
        libc::TCP_CONGESTION,
        &value,
    ))
}

pub(crate) fn get(fd: Fd, option: &[String]) -> Made {
    if option.first().is_some_and(|name| name == "TCP_CONGESTION") {
        let (value, length) = call::option::<[u8; 16]>(fd, IPPROTO_TCP, libc::TCP_CONGESTION)?;
        let end = value.iter().position(|byte| *byte == 0);
        return Ok(Found {
            number: length as i64,
            data: Some(value[..end.unwrap_or(16)].to_vec()),
            words: Vec::new(),
        });
    }
    let (level, name) = find(option)?;
    let value = call::flag(fd, level, name)?;
    // A pending error is returned as an error, so that a script can name it.
    if level == SOL_SOCKET && name == libc::SO_ERROR && value != 0 {
        return Err(Errno(value));
    }
    number(value.into())
}

/// Offsets and sizes of the fields of `struct tcp_info` (`include/uapi/linux/tcp.h`).
const INFO_FIELDS: [(&str, usize, usize); 33] = [
    ("state", 0, 1),
    ("ca_state", 1, 1),
    ("retransmits", 2, 1),
    ("probes", 3, 1),
    ("backoff", 4, 1),
    ("options", 5, 1),
    ("rto", 8, 4),
    ("ato", 12, 4),
    ("snd_mss", 16, 4),
    ("rcv_mss", 20, 4),
    ("unacked", 24, 4),
    ("sacked", 28, 4),
    ("lost", 32, 4),
    ("retrans", 36, 4),
    ("last_data_sent", 44, 4),
    ("last_data_recv", 52, 4),
    ("pmtu", 60, 4),
    ("rtt", 68, 4),
    ("snd_ssthresh", 76, 4),
    ("snd_cwnd", 80, 4),
    ("advmss", 84, 4),
    ("reordering", 88, 4),
    ("total_retrans", 100, 4),
    ("bytes_acked", 120, 8),
    ("bytes_received", 128, 8),
    ("data_segs_in", 152, 4),
    ("data_segs_out", 156, 4),
    ("busy_time", 168, 8),
    ("rwnd_limited", 176, 8),
    ("sndbuf_limited", 184, 8),
    ("delivered", 192, 4),
    ("dsack_dups", 216, 4),
    ("rcv_ooopack", 224, 4),
];

pub(crate) fn tcp_info(fd: Fd, field: &[String]) -> Made {
    let (info, _) = call::option::<[u8; 232]>(fd, IPPROTO_TCP, libc::TCP_INFO)?;
    let wanted = field.first().map(String::as_str).unwrap_or_default();
    let find = |(name, ..): &&(&str, usize, usize)| *name == wanted;
    let Some((_, at, len)) = INFO_FIELDS.iter().find(find) else {
        return Err(Errno(libc::ENOSYS));
    };
    let mut value = [0; 8];
    value[..*len].copy_from_slice(&info[*at..at + len]);
    number(i64::from_le_bytes(value))
}
