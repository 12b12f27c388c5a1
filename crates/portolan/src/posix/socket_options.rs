//! `getsockopt` and `setsockopt`.

use std::os::fd::RawFd;
use std::sync::Arc;

use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use portolan_sys::capability::Capability;
use portolan_sys::clock;
use portolan_sys::descriptor::set_socket_option;
use portolan_tcp::{BbrInfo, CongestionKind, StateName};
use portolan_types::Protocol;
use rustix::io::Errno;

use super::attach::{describe_to_others, notice_listening, waiting_at_server};
use super::datagram::uncork;
use super::find::{find, find_here};
use super::groups::{check_interface, sending_interface, set_membership};
use super::kernel_socket::repeat_on_kernel_socket;
use super::listen::listen_anew;
use super::tcp_info;
use crate::migration::active_open::complete_connect;
use crate::migration::fallback::{become_kernels, new_kernel_socket};
use crate::migration::registration;
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::socket::options::{
    CONGESTION_NAME, TCP_CC_INFO, is_privileged, is_the_kernels, timestamping,
};
use crate::socket::table;
use crate::socket::{Family, Socket, SocketPhase};

pub fn set_option(fd: RawFd, level: i32, name: i32, value: &[u8]) -> Outcome<()> {
    let (socket, process) = match find(fd) {
        // The session keeps its options here until its first user fetches it.
        Ok((socket, process)) if socket.accepted_unused() && !socket.is_shared() => {
            (socket, process)
        }
        _ => find_here(fd)?,
    };
    if level == IPPROTO_IPV6 && socket.family() == Family::V4 {
        return Err(Errno::NOPROTOOPT.into());
    }
    check_phase(&socket, level, name, value)?;
    if is_privileged(level, name, value) {
        let probe = new_kernel_socket(&socket)?;
        set_socket_option(&probe, level, name, value)?;
        return Err(leave_to_kernel(fd, &socket));
    }
    if (level, name) == (IPPROTO_IPV6, libc::IPV6_ADDRFORM) {
        return Ok(become_v4(process, fd, &socket, value)?);
    }
    if is_the_kernels(level, name) {
        return Err(leave_to_kernel(fd, &socket));
    }
    if let Some(changed) = set_membership(process, &socket, level, name, value) {
        return changed;
    }
    if (level, name) == (SOL_SOCKET, libc::SO_TIMESTAMPING) && socket.protocol == Protocol::Tcp {
        count_bytes(process, &socket, value)?;
    }
    if (level, name) == (IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) {
        check_interface(process, value)?;
    }
    let told = socket.options_blob();
    let told_priority = socket.options().priority();
    if level == SOL_SOCKET && matches!(name, libc::SO_RCVBUFFORCE | libc::SO_SNDBUFFORCE) {
        if !Capability::NetAdmin.in_effect() {
            return Err(Errno::PERM.into());
        }
        socket.options().force_buffer(name, value)?;
    } else if (level, name) == (IPPROTO_IP, libc::IP_MULTICAST_IF) {
        let interface = sending_interface(process, value)?;
        socket.options().keep(level, name, &interface);
    } else {
        socket.options().set(socket.protocol, level, name, value)?;
        socket.note_wanted_times();
    }
    if (level, name) == (SOL_SOCKET, libc::SO_PEEK_OFF)
        && let Some(offset) = value.first_chunk()
    {
        socket.set_peek_offset(i32::from_ne_bytes(*offset));
    }
    match socket.phase() {
        SocketPhase::Cached => {}
        SocketPhase::Listening if socket.options_blob() != told => {
            return tell_of_options(process, &socket);
        }
        SocketPhase::Idle if socket.is_shared() && socket.options_blob() != told => {
            describe_to_others(&socket);
            return Ok(());
        }
        _ => return Ok(()),
    }
    let priority = socket.options().priority();
    if priority != told_priority {
        registration::register(process, &socket)?;
        let session = socket.setup().session;
        session.inspect(|session| process.prioritize(*session, priority));
    }
    if socket.protocol == Protocol::Udp {
        repeat_on_kernel_socket(&socket, level, name);
        if !socket.options().udp_cork() && level == libc::SOL_UDP {
            uncork(process, &socket, 0)?;
        }
    }
    let mut core = process.lock();
    let slot = socket.slot();
    if let Some(session) = core.stack.get_mut(slot) {
        socket.options().apply(session);
    } else if let Some(stream) = core.stream(slot) {
        socket.options().apply_to_stream(stream);
    }
    if let Some(stream) = core.stream(slot).filter(|_| level == IPPROTO_TCP) {
        match name {
            libc::TCP_QUICKACK => socket.options().apply_quickack(stream),
            libc::TCP_NODELAY if stream.options().nodelay => stream.push(),
            _ => {}
        }
    }
    if core.is_local(slot) {
        // There may be more room now, here or at the peer.
        core.touch(slot);
    } else if core.stack.get_mut(slot).is_some() {
        core.stack.forget_path(slot);
        core.stack.touch(slot);
        core.poll_tx(clock::now());
    }
    Ok(())
}

/// Makes the socket the kernel's because of an option, if that is still possible.
fn leave_to_kernel(fd: RawFd, socket: &Arc<Socket>) -> CallError {
    become_kernels(fd, socket);
    match table::socket(fd) {
        Some(_) => Errno::NOPROTOOPT.into(),
        None => CallError::NotOurs,
    }
}

/// With `SOF_TIMESTAMPING_OPT_ID` stamps identify bytes by number, counted from the acknowledged
/// sequence number when the flag is first set.
fn count_bytes(process: &Process, socket: &Socket, value: &[u8]) -> Result<(), Errno> {
    socket.start_stamping();
    let Some(flags) = value.first_chunk().map(|flags| u32::from_ne_bytes(*flags)) else {
        return Ok(());
    };
    if flags & !socket.options().timestamping() & timestamping::OPT_ID == 0 {
        return Ok(());
    }
    let mut core = process.lock();
    let stream = core.stream(socket.slot());
    let stream = stream.filter(|_| socket.phase() == SocketPhase::Cached);
    let base = stream.ok_or(Errno::INVAL)?.edges().una;
    socket.stamps().count_from(base);
    Ok(())
}

/// `IPV6_ADDRFORM`, for a socket connected to an IPv4 peer.
fn become_v4(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    value: &[u8],
) -> Result<(), Errno> {
    complete_connect(process, fd, socket);
    let family = value
        .first_chunk()
        .map(|family| i32::from_ne_bytes(*family));
    if family != Some(libc::AF_INET) {
        return Err(Errno::INVAL);
    }
    let is_connected = socket.phase() == SocketPhase::Cached;
    let remote = socket.setup().remote.filter(|_| is_connected);
    if socket.protocol == Protocol::Tcp && is_connected {
        let mut core = process.lock();
        let state = core.stream(socket.slot()).map(|stream| stream.state());
        state
            .filter(|state| *state == StateName::Established)
            .ok_or(Errno::NOTCONN)?;
    }
    if !remote.ok_or(Errno::NOTCONN)?.is_ipv4() {
        return Err(Errno::ADDRNOTAVAIL);
    }
    socket.become_v4();
    Ok(())
}

/// Refuses options that Linux accepts only before a socket is connected, or only afterwards.
fn check_phase(socket: &Socket, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
    let is_zero = value.iter().take(4).all(|byte| *byte == 0);
    let phase = socket.phase();
    let refused = level == IPPROTO_TCP
        && match name {
            libc::TCP_FASTOPEN => !matches!(phase, SocketPhase::Idle | SocketPhase::Listening),
            libc::TCP_FASTOPEN_CONNECT => phase != SocketPhase::Idle,
            libc::TCP_WINDOW_CLAMP => is_zero && phase != SocketPhase::Idle,
            _ => false,
        };
    if refused { Err(Errno::INVAL) } else { Ok(()) }
}

/// Reports changed options of a listener to the server: some apply to future connections, and other
/// processes may get the descriptor.
fn tell_of_options(process: &'static Process, socket: &Socket) -> Outcome<()> {
    let setup = socket.setup();
    let Some(session) = setup.session else {
        return Ok(());
    };
    listen_anew(process, socket, session, setup.backlog)
}

/// `asm-generic/socket.h`.
const SO_PEERPIDFD: i32 = 77;

/// `linux/netfilter_ipv4.h`, `linux/netfilter_ipv6/ip6_tables.h`.
const SO_ORIGINAL_DST: i32 = 80;

/// `struct ucred` of a peer that is not a process of this host: 0 and twice -1.
const NOBODY: [u8; 12] = [0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255];

/// Writes at most `value.len()` bytes. Returns how many.
pub fn get_option(fd: RawFd, level: i32, name: i32, value: &mut [u8]) -> Outcome<usize> {
    let (socket, process) = find_here(fd)?;
    complete_connect(process, fd, &socket);
    if level == IPPROTO_IPV6 && socket.family() == Family::V4 {
        return Err(Errno::OPNOTSUPP.into());
    }
    let found = match (level, name) {
        // The descriptor's own value is as unique as a socket's would be.
        (SOL_SOCKET, libc::SO_COOKIE | libc::SO_NETNS_COOKIE) => return Err(CallError::NotOurs),
        (SOL_SOCKET, libc::SO_PEERGROUPS | SO_PEERPIDFD) => return Err(Errno::NODATA.into()),
        (SOL_SOCKET, libc::SO_PEERCRED) => Some(NOBODY.to_vec()),
        (SOL_SOCKET, libc::SO_ACCEPTCONN) => {
            notice_listening(fd, &socket);
            let listens = socket.phase() == SocketPhase::Listening;
            Some(i32::from(listens).to_ne_bytes().to_vec())
        }
        (SOL_SOCKET, _) => of_socket(process, &socket, name),
        (IPPROTO_TCP, libc::TCP_INFO | libc::TCP_MAXSEG | libc::TCP_QUICKACK)
            if socket.protocol == Protocol::Tcp =>
        {
            of_tcp(process, fd, &socket, name)
        }
        (IPPROTO_TCP, libc::TCP_CONGESTION) if socket.protocol == Protocol::Tcp => {
            Some(congestion(process, &socket))
        }
        (IPPROTO_TCP, TCP_CC_INFO) if socket.protocol == Protocol::Tcp => {
            Some(congestion_info(process, &socket))
        }
        (IPPROTO_IP, libc::IP_MTU) | (IPPROTO_IPV6, libc::IPV6_MTU) => {
            Some(path_mtu(process, &socket)?.to_ne_bytes().to_vec())
        }
        // Only an IPv4 socket receives from all its groups by default.
        (IPPROTO_IP, libc::IP_MULTICAST_ALL)
            if socket.family() == Family::V6 && !socket.options().is_set(level, name) =>
        {
            Some(vec![0; 4])
        }
        // No connection was redirected on its way here.
        (IPPROTO_IP | IPPROTO_IPV6, SO_ORIGINAL_DST) => return Err(Errno::NOENT.into()),
        (IPPROTO_IPV6, libc::IPV6_ADDRFORM) => {
            let _connected = socket.setup().remote.ok_or(Errno::NOTCONN)?;
            Some(libc::AF_INET6.to_ne_bytes().to_vec())
        }
        (IPPROTO_IPV6, libc::IPV6_PATHMTU) => Some(known_path(process, &socket)?),
        // The two families differ: UDP over IPv4 reports that it is not supported.
        (IPPROTO_TCP, _) if socket.protocol == Protocol::Udp && socket.family() == Family::V6 => {
            return Err(Errno::NOPROTOOPT.into());
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

/// Returns options that follow from the socket itself, not from values that were set.
fn of_socket(process: &Process, socket: &Socket, name: i32) -> Option<Vec<u8>> {
    let number = match name {
        libc::SO_ERROR => {
            let mut core = process.lock();
            core.poll_rx(clock::now());
            core.take_error(socket).map_or(0, Errno::raw_os_error)
        }
        libc::SO_TYPE => match socket.protocol {
            Protocol::Tcp => libc::SOCK_STREAM,
            Protocol::Udp => libc::SOCK_DGRAM,
        },
        libc::SO_DOMAIN => match socket.family() {
            Family::V4 => libc::AF_INET,
            Family::V6 => libc::AF_INET6,
        },
        libc::SO_PROTOCOL => i32::from(socket.protocol.number()),
        libc::SO_PEEK_OFF => socket.peek_offset(),
        _ => return None,
    };
    Some(number.to_ne_bytes().to_vec())
}

/// Returns the session's congestion control; before there is a session, the one it will have.
fn congestion(process: &Process, socket: &Socket) -> Vec<u8> {
    let chosen = socket.options().congestion();
    let mut core = process.lock();
    let kind = match core.stack.tcp(socket.slot()) {
        Some(session) if socket.phase() == SocketPhase::Cached => session.connection.congestion(),
        _ => chosen.unwrap_or(process.congestion()),
    };
    let mut name = kind.name().as_bytes().to_vec();
    name.resize(CONGESTION_NAME, 0);
    name
}

/// `TCP_CC_INFO`: empty, except for BBR, as on Linux.
fn congestion_info(process: &Process, socket: &Socket) -> Vec<u8> {
    let chosen = socket.options().congestion();
    let mut core = process.lock();
    let session = core.stack.tcp(socket.slot());
    let info = match session.filter(|_| socket.phase() == SocketPhase::Cached) {
        Some(session) => session.connection.congestion_info(),
        None => {
            (chosen.unwrap_or(process.congestion()) == CongestionKind::Bbr).then(BbrInfo::default)
        }
    };
    info.map_or_else(Vec::new, tcp_info::of_bbr)
}

/// Returns a rate as an `unsigned long` if there is room for one, else as an `unsigned int`.
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
    let mtu = core.stack.path_mtu(remote.ip(), &core.routes);
    let mtu = mtu.ok_or(Errno::NOTCONN)?;
    // No IPv4 packet is longer, whatever the loopback device accepts.
    Ok(if remote.is_ipv4() {
        mtu.min(0xffff)
    } else {
        mtu
    })
}

/// `struct ip6_mtuinfo`, whose address is left empty here.
fn known_path(process: &Process, socket: &Socket) -> Result<Vec<u8>, Errno> {
    let mtu = path_mtu(process, socket)?;
    let mut bytes = vec![0; 28];
    bytes.extend(mtu.to_ne_bytes());
    Ok(bytes)
}

fn of_tcp(process: &Process, fd: RawFd, socket: &Socket, name: i32) -> Option<Vec<u8>> {
    if name == libc::TCP_INFO && socket.phase() != SocketPhase::Cached {
        return Some(without_connection(process, fd, socket));
    }
    let path_mtu = path_mtu(process, socket).unwrap_or(0);
    let mut core = process.lock();
    let stream = core.stream(socket.slot());
    let connection = stream.filter(|_| socket.phase() == SocketPhase::Cached);
    match name {
        libc::TCP_INFO => {
            let max_pacing = socket.options().max_pacing();
            let now = clock::now();
            Some(match connection {
                Some(connection) => tcp_info::of_connection(connection, path_mtu, max_pacing, now),
                None => tcp_info::of_phase(socket.phase(), (0, 0), now),
            })
        }
        libc::TCP_QUICKACK => {
            let is_quick = i32::from(!connection?.tcp_info().pingpong);
            Some(is_quick.to_ne_bytes().to_vec())
        }
        _ => Some((connection?.tcp_info().mss as i32).to_ne_bytes().to_vec()),
    }
}

/// `TCP_INFO` of a socket that has no connection here.
fn without_connection(process: &Process, fd: RawFd, socket: &Socket) -> Vec<u8> {
    let (session, backlog) = {
        let setup = socket.setup();
        (setup.session, setup.backlog)
    };
    let waiting = match (socket.phase(), session) {
        (SocketPhase::Listening, Some(session)) => {
            let here = process.lock().delegations.waiting(session);
            here.or_else(|| waiting_at_server(fd)).unwrap_or(0)
        }
        _ => 0,
    };
    tcp_info::of_phase(socket.phase(), (backlog, waiting), clock::now())
}
