//! `getsockopt` and `setsockopt`.

use std::os::fd::RawFd;

use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use portolan_sys::clock;
use portolan_tcp::{Connection, StateName};
use portolan_types::Protocol;
use rustix::io::Errno;

use super::connect::complete_connect;
use super::datagram::uncork;
use super::groups::{sending_interface, set_membership};
use super::twin::repeat_on_twin;
use super::{Answer, Stop, find};
use crate::options::CONGESTION_NAME;
use crate::process::Process;
use crate::socket::{Family, Phase, Socket};

/// Octets of the part of `struct tcp_info` that is filled; callers get what fits their buffer.
const TCP_INFO_LENGTH: usize = 104;

pub fn set_option(fd: RawFd, level: i32, name: i32, value: &[u8]) -> Answer<()> {
    fn set(fd: RawFd, level: i32, name: i32, value: &[u8]) -> Result<(), Stop> {
        let (socket, process) = find(fd)?;
        if let Some(changed) = set_membership(process, &socket, level, name, value) {
            return changed;
        }
        if (level, name) == (IPPROTO_IP, libc::IP_MULTICAST_IF) {
            let interface = sending_interface(process, value)?;
            socket.options().keep(level, name, &interface);
        } else {
            socket.options().set(socket.protocol, level, name, value)?;
        }
        if socket.phase() != Phase::Cached {
            return Ok(());
        }
        if socket.protocol == Protocol::Udp {
            repeat_on_twin(&socket, level, name);
            if !socket.options().udp_cork() && level == libc::SOL_UDP {
                uncork(process, &socket, 0)?;
            }
        }
        let mut core = process.lock();
        let slot = socket.slot();
        if let Some(session) = core.stack.get_mut(slot) {
            socket.options().apply(session);
            core.stack.forget_path(slot);
            core.stack.touch(slot);
            core.send_out(clock::now());
        }
        Ok(())
    }
    set(fd, level, name, value).into()
}

/// Writes at most `value.len()` octets and says how many.
pub fn get_option(fd: RawFd, level: i32, name: i32, value: &mut [u8]) -> Answer<usize> {
    fn get(fd: RawFd, level: i32, name: i32, value: &mut [u8]) -> Result<usize, Stop> {
        let (socket, process) = find(fd)?;
        complete_connect(process, fd, &socket);
        let found = match (level, name) {
            (SOL_SOCKET, _) => of_socket(process, &socket, name),
            (IPPROTO_TCP, libc::TCP_INFO | libc::TCP_MAXSEG)
                if socket.protocol == Protocol::Tcp =>
            {
                of_tcp(process, &socket, name)
            }
            (IPPROTO_TCP, libc::TCP_CONGESTION) if socket.protocol == Protocol::Tcp => {
                Some(congestion(process, &socket))
            }
            (IPPROTO_IP, libc::IP_MTU) | (IPPROTO_IPV6, libc::IPV6_MTU) => {
                Some(path_mtu(process, &socket)?.to_ne_bytes().to_vec())
            }
            _ => None,
        };
        let found = match found {
            Some(found) => found,
            None => socket.options().get(socket.protocol, level, name)?,
        };
        let found = match (level, name) {
            (SOL_SOCKET, libc::SO_MAX_PACING_RATE) => shown_rate(&found, value.len()),
            _ => found,
        };
        let length = found.len().min(value.len());
        value[..length].copy_from_slice(&found[..length]);
        Ok(length)
    }
    get(fd, level, name, value).into()
}

/// What follows from the socket itself rather than from what was set.
fn of_socket(process: &Process, socket: &Socket, name: i32) -> Option<Vec<u8>> {
    let number = match name {
        libc::SO_ERROR => {
            let mut core = process.lock();
            core.take_in(clock::now());
            socket
                .take_error(Some(&mut core))
                .map_or(0, Errno::raw_os_error)
        }
        libc::SO_TYPE => match socket.protocol {
            Protocol::Tcp => libc::SOCK_STREAM,
            Protocol::Udp => libc::SOCK_DGRAM,
        },
        libc::SO_DOMAIN => match socket.family {
            Family::V4 => libc::AF_INET,
            Family::V6 => libc::AF_INET6,
        },
        libc::SO_PROTOCOL => i32::from(socket.protocol.number()),
        libc::SO_ACCEPTCONN => i32::from(socket.phase() == Phase::Listening),
        _ => return None,
    };
    Some(number.to_ne_bytes().to_vec())
}

/// What moves the session's window now; before there is a session, what will.
fn congestion(process: &Process, socket: &Socket) -> Vec<u8> {
    let chosen = socket.options().congestion();
    let mut core = process.lock();
    let kind = match core.stack.tcp(socket.slot()) {
        Some(session) if socket.phase() == Phase::Cached => session.connection.congestion(),
        _ => chosen.unwrap_or(process.congestion()),
    };
    let mut name = kind.name().as_bytes().to_vec();
    name.resize(CONGESTION_NAME, 0);
    name
}

/// A rate as an `unsigned long` if there is room for one, else as an `unsigned int`.
fn shown_rate(rate: &[u8], room: usize) -> Vec<u8> {
    match rate.first_chunk() {
        Some(long) if room < 8 => {
            let rate = u64::from_ne_bytes(*long);
            u32::try_from(rate)
                .unwrap_or(u32::MAX)
                .to_ne_bytes()
                .to_vec()
        }
        _ => rate.to_vec(),
    }
}

fn path_mtu(process: &Process, socket: &Socket) -> Result<u32, Errno> {
    let remote = socket.setup().remote.ok_or(Errno::NOTCONN)?;
    let core = process.lock();
    core.stack
        .path_mtu(remote.ip(), &core.routes)
        .ok_or(Errno::NOTCONN)
}

fn of_tcp(process: &Process, socket: &Socket, name: i32) -> Option<Vec<u8>> {
    let mut core = process.lock();
    let connection = match core.stack.tcp(socket.slot()) {
        Some(session) if socket.phase() == Phase::Cached => Some(&session.connection),
        _ => None,
    };
    match name {
        libc::TCP_INFO => Some(tcp_info(connection, socket.phase())),
        _ => Some((connection?.figures().mss as i32).to_ne_bytes().to_vec()),
    }
}

/// `struct tcp_info` of Linux, up to `tcpi_total_retrans`.
fn tcp_info(connection: Option<&Connection>, phase: Phase) -> Vec<u8> {
    let mut info = vec![0; TCP_INFO_LENGTH];
    let Some(connection) = connection else {
        info[0] = match phase {
            Phase::Listening => 10,
            Phase::Connecting => 2,
            _ => 7,
        };
        return info;
    };
    let figures = connection.figures();
    info[0] = linux_state(connection.state());
    info[2] = u8::try_from(figures.backoff).unwrap_or(u8::MAX);
    info[3] = u8::try_from(figures.probes).unwrap_or(u8::MAX);
    info[4] = u8::try_from(figures.backoff).unwrap_or(u8::MAX);
    info[5] = u8::from(figures.timestamps)
        | u8::from(figures.sack) << 1
        | u8::from(figures.window_scaling) << 2;
    info[6] = figures.send_scale & 0xf | figures.receive_scale << 4;
    let micros =
        |duration: core::time::Duration| u32::try_from(duration.as_micros()).unwrap_or(u32::MAX);
    let per_mss = |octets: u32| octets / figures.mss.max(1);
    let now = clock::now();
    let since = |then| u32::try_from(now.since(then).as_millis()).unwrap_or(u32::MAX);
    let words = [
        (8, micros(figures.rto)),
        (12, 40_000), // delayed acknowledgement
        (16, figures.mss),
        (20, figures.receive_mss),
        (24, per_mss(figures.unacknowledged)),
        (28, per_mss(figures.sacked)),
        (32, per_mss(figures.lost)),
        (36, u32::try_from(figures.retransmits).unwrap_or(u32::MAX)),
        (44, since(figures.last_data_sent)),
        (52, since(figures.last_data_received)),
        (60, figures.mss + 40),
        (68, figures.srtt.map_or(0, micros)),
        (72, micros(figures.rttvar)),
        (76, per_mss(figures.ssthresh)),
        (80, per_mss(figures.cwnd)),
        (84, figures.mss),
        (88, 3),
        (96, figures.receive_window),
        (100, u32::try_from(figures.retransmits).unwrap_or(u32::MAX)),
    ];
    for (at, word) in words {
        info[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    }
    info
}

/// `enum` of `include/net/tcp_states.h`.
fn linux_state(state: StateName) -> u8 {
    match state {
        StateName::Established => 1,
        StateName::SynSent => 2,
        StateName::SynReceived => 3,
        StateName::FinWait1 => 4,
        StateName::FinWait2 => 5,
        StateName::TimeWait => 6,
        StateName::Closed => 7,
        StateName::CloseWait => 8,
        StateName::LastAck => 9,
        StateName::Closing => 11,
    }
}
