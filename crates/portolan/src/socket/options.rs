//! Socket options: the values that were set, the defaults that Linux shows, and what is passed to the engine.
//!
//! Every accepted `setsockopt` is also kept, to be repeated on the kernel's socket if this one falls back.

mod values;

use std::collections::BTreeMap;
use std::time::Duration;

use libc::{
    IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPV6_TCLASS, IPV6_UNICAST_HOPS, IPV6_V6ONLY, SOL_SOCKET,
    TCP_CORK, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_MAXSEG, TCP_NODELAY, TCP_QUICKACK,
    TCP_USER_TIMEOUT, TCP_WINDOW_CLAMP,
};
use portolan_local::Stream;
use portolan_proto::control::{
    Delivery, FastOpenKeys, HandshakeOptions, MappingChoice, Reuse, SocketOptionsBlob,
};
use portolan_proto::{decode, encode};
use portolan_stack::{
    Checksums, IpOptions, MtuDiscovery, MulticastOptions, Reports, Session, TcpSession, UdpSession,
    V6Sizes,
};
use portolan_tcp::{CongestionKind, OrphanWait};
use portolan_types::Protocol;
use rustix::io::Errno;

pub(crate) use self::values::CONGESTION_NAME;
use self::values::{Shape, check_range, congestion, int_of, kept_int, linger, rate, shape, time};
use crate::socket::Family;

/// Portolan's own, for listeners: positive, children of the process use accepted connections; 0,
/// the process itself does; -1, the server finds out (MS §IV-B).
const SO_CONCURRENT_SERVER: i32 = 0x5043;

/// Portolan's own, for listeners: positive, this process performs the handshakes; 0, the server
/// does; -1, the server chooses (ADR 15).
const SO_DELEGATE: i32 = 0x5044;

/// Portolan's own: the session's delivery form, numbered as in [`Delivery::ALL`]; -1, the default (ADR 13).
const SO_DELIVERY: i32 = 0x5045;

/// Portolan's own: positive, the session has a receive ring of its own; 0, the shared one; -1, the default (ADR 20).
const SO_DIRECT: i32 = 0x5046;

/// Maximum length of a value, in bytes.
const LONGEST: usize = 64;

/// Not in libc (`include/uapi/linux/tcp.h`).
pub(crate) const TCP_FASTOPEN_NO_COOKIE: i32 = 34;

/// As above.
const TCP_INQ: i32 = 36;
pub(crate) const TCP_CC_INFO: i32 = 26;
const TCP_FASTOPEN_KEY: i32 = 33;
const TCP_THIN_LINEAR_TIMEOUTS: i32 = 16;
const TCP_THIN_DUPACK: i32 = 17;

/// linux/in.h, linux/in6.h
const IP_MULTICAST_ALL: i32 = 49;
const IPV6_MINHOPCOUNT: i32 = 73;
const IPV6_MULTICAST_ALL: i32 = 29;
const IP_LOCAL_PORT_RANGE: i32 = 51;
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;

/// What a server has to know of a connection that it adopts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Choices {
    pub(crate) reuse: Reuse,
    pub(crate) v6_only: bool,
    /// None stands for the process's.
    pub(crate) delivery: Option<Delivery>,
    pub(crate) priority: u8,
}

/// Values that were set on one socket, by level and name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    values: BTreeMap<(i32, i32), Vec<u8>>,
}

const OF_LISTENERS: [(i32, i32); 7] = [
    (SOL_SOCKET, libc::SO_REUSEADDR),
    (SOL_SOCKET, libc::SO_REUSEPORT),
    (SOL_SOCKET, SO_CONCURRENT_SERVER),
    (SOL_SOCKET, SO_DELEGATE),
    (IPPROTO_IPV6, IPV6_V6ONLY),
    (IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
    (IPPROTO_TCP, libc::TCP_FASTOPEN),
];

/// `SO_LINGER`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Linger {
    pub(crate) time: Duration,
}

/// The ancillary data that `recvmsg` has to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WantedControl {
    pub(crate) timestamp: bool,
    pub(crate) timestamp_ns: bool,
    /// `SO_TIMESTAMPING` of received datagrams.
    pub(crate) timestamping: bool,
    pub(crate) destination: bool,
    pub(crate) original: bool,
    pub(crate) hops: bool,
    pub(crate) service: bool,
    pub(crate) v6_destination: bool,
    pub(crate) v6_original: bool,
    pub(crate) v6_hops: bool,
    pub(crate) v6_class: bool,
    pub(crate) segment: bool,
    pub(crate) dropped: bool,
}

/// linux/net_tstamp.h
pub(crate) mod timestamping {
    pub(crate) const TX_SOFTWARE: u32 = 1 << 1;
    pub(crate) const RX_SOFTWARE: u32 = 1 << 3;
    pub(crate) const SOFTWARE: u32 = 1 << 4;
    pub(crate) const OPT_ID: u32 = 1 << 7;
    pub(crate) const TX_SCHED: u32 = 1 << 8;
    pub(crate) const TX_ACK: u32 = 1 << 9;
    pub(crate) const OPT_TSONLY: u32 = 1 << 11;
    /// All flags.
    pub(crate) const MASK: i32 = (1 << 18) - 1;
}

impl Options {
    /// Checks a value and keeps it.
    pub(crate) fn set(
        &mut self,
        protocol: Protocol,
        level: i32,
        name: i32,
        value: &[u8],
    ) -> Result<(), Errno> {
        if level == IPPROTO_TCP && protocol != Protocol::Tcp {
            return Err(Errno::NOPROTOOPT);
        }
        let kept = match shape(protocol, level, name).ok_or(Errno::NOPROTOOPT)? {
            Shape::ReadOnly { .. } => return Err(Errno::NOPROTOOPT),
            Shape::OfUnixOnly => return Err(Errno::OPNOTSUPP),
            Shape::Linger => linger(value)?,
            Shape::Time => time(value)?,
            Shape::Congestion => congestion(value)?,
            Shape::Rate => rate(value)?.to_ne_bytes().to_vec(),
            Shape::FastOpenKeys if matches!(value.len(), 16 | 32) => value.to_vec(),
            Shape::FastOpenKeys => return Err(Errno::INVAL),
            // Removing what is not there succeeds; anything else is refused.
            Shape::Nothing if value.is_empty() => return Ok(()),
            Shape::Nothing => return Err(Errno::NOPROTOOPT),
            Shape::Flag { .. } => i32::from(int_of(value, level)? != 0).to_ne_bytes().to_vec(),
            Shape::Int { default } => {
                let number = int_of(value, level)?;
                check_range(protocol, level, name, number)?;
                kept_int(protocol, (level, name), number, default)
                    .to_ne_bytes()
                    .to_vec()
            }
        };
        if (level, name) == (IPPROTO_TCP, TCP_MAXSEG) && kept.iter().all(|byte| *byte == 0) {
            // Zero removes an earlier clamp.
            self.values.remove(&(level, name));
            return Ok(());
        }
        let before = self.tos(protocol);
        self.values.insert((level, name), kept);
        if self.tos(protocol) != before {
            // The later of the two determines the priority.
            self.values.remove(&(SOL_SOCKET, libc::SO_PRIORITY));
        }
        Ok(())
    }

    /// Returns `IP_TOS` as far as the application may choose it: the two low bits of a stream are TCP's.
    fn tos(&self, protocol: Protocol) -> u8 {
        let tos = self.int(IPPROTO_IP, libc::IP_TOS).unwrap_or(0) as u8;
        match protocol {
            Protocol::Tcp => tos & !3,
            Protocol::Udp => tos,
        }
    }

    /// Returns the value Linux would show, except for options that need the session (`TCP_INFO`, `SO_ERROR` …).
    pub(crate) fn get(&self, protocol: Protocol, level: i32, name: i32) -> Result<Vec<u8>, Errno> {
        if level == IPPROTO_TCP && protocol != Protocol::Tcp {
            return Err(Errno::OPNOTSUPP);
        }
        if let Some(value) = self.values.get(&(level, name)) {
            return Ok(match (level, name, value.as_slice()) {
                // Kept as `struct ip_mreqn`, shown as its address.
                (IPPROTO_IP, libc::IP_MULTICAST_IF, [_, _, _, _, address @ .., _, _, _, _]) => {
                    address.to_vec()
                }
                (SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO, time)
                    if values::is_before_now(time) =>
                {
                    vec![0; 16]
                }
                _ => value.clone(),
            });
        }
        if (level, name) == (SOL_SOCKET, libc::SO_PRIORITY) {
            return Ok(priority_of(self.tos(protocol)).to_ne_bytes().to_vec());
        }
        match shape(protocol, level, name).ok_or(Errno::NOPROTOOPT)? {
            Shape::Int { default } | Shape::Flag { default } | Shape::ReadOnly { default } => {
                Ok(default.to_ne_bytes().to_vec())
            }
            Shape::Linger => Ok(vec![0; 8]),
            Shape::Time => Ok(vec![0; 16]),
            Shape::Congestion => congestion(CongestionKind::default().name().as_bytes()),
            Shape::Rate => Ok(u64::MAX.to_ne_bytes().to_vec()),
            Shape::Nothing | Shape::FastOpenKeys => Ok(Vec::new()),
            Shape::OfUnixOnly => Err(Errno::OPNOTSUPP),
        }
    }

    pub(crate) fn is_set(&self, level: i32, name: i32) -> bool {
        self.values.contains_key(&(level, name))
    }

    /// Returns all values that were set, in `setsockopt`'s form.
    pub(crate) fn all(&self) -> impl Iterator<Item = (i32, i32, &[u8])> {
        self.values
            .iter()
            .map(|(&(level, name), value)| (level, name, value.as_slice()))
    }

    /// Was no option set?
    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Does none change data transfer on a connection? An accepted socket has these options from its listener.
    pub(crate) fn are_of_listeners(&self) -> bool {
        self.values
            .keys()
            .all(|option| OF_LISTENERS.contains(option))
    }

    /// Encodes the options for the next library that has the socket's descriptor.
    pub(crate) fn to_options_blob(&self, family: Family) -> SocketOptionsBlob {
        SocketOptionsBlob(encode(&(family == Family::V6, &self.values)))
    }

    /// Decodes options from another process, which may not run this library: values that are too
    /// long or unknown are dropped.
    pub(crate) fn from_options_blob(
        options_blob: &SocketOptionsBlob,
        protocol: Protocol,
    ) -> Option<(Family, Options)> {
        let (is_v6, mut values): (bool, BTreeMap<(i32, i32), Vec<u8>>) =
            decode(&options_blob.0).ok()?;
        values.retain(|&(level, name), value| {
            value.len() <= LONGEST && shape(protocol, level, name).is_some()
        });
        let family = if is_v6 { Family::V6 } else { Family::V4 };
        Some((family, Options { values }))
    }

    /// Returns the initial options of an accepted socket (Linux copies the listener's socket, except its keys).
    pub(crate) fn inherited(&self) -> Options {
        let mut inherited = self.clone();
        inherited.values.remove(&(IPPROTO_TCP, TCP_FASTOPEN_KEY));
        inherited
    }

    fn fast_open_keys(&self) -> Option<FastOpenKeys> {
        let keys = self.values.get(&(IPPROTO_TCP, TCP_FASTOPEN_KEY))?;
        Some(FastOpenKeys {
            primary: *keys.first_chunk()?,
            backup: keys.get(16..).and_then(|key| key.first_chunk()).copied(),
        })
    }

    fn int(&self, level: i32, name: i32) -> Option<i32> {
        let value = self.values.get(&(level, name))?;
        Some(i32::from_ne_bytes(value.get(..4)?.try_into().ok()?))
    }

    fn flag(&self, level: i32, name: i32) -> bool {
        self.int(level, name).is_some_and(|value| value != 0)
    }

    fn seconds(&self, level: i32, name: i32) -> Option<Duration> {
        Some(Duration::from_secs(
            u64::try_from(self.int(level, name)?).ok()?,
        ))
    }

    pub(crate) fn choices(&self) -> Choices {
        Choices {
            reuse: self.reuse(),
            v6_only: self.v6_only(),
            delivery: self.delivery(),
            priority: self.priority(),
        }
    }

    pub(crate) fn reuse(&self) -> Reuse {
        Reuse {
            address: self.flag(SOL_SOCKET, libc::SO_REUSEADDR),
            port: self.flag(SOL_SOCKET, libc::SO_REUSEPORT),
        }
    }

    /// May be bound to an address that is not this host's (`IP_FREEBIND`, `IP_TRANSPARENT`).
    pub(crate) fn binds_freely(&self) -> bool {
        self.flag(IPPROTO_IP, libc::IP_FREEBIND)
            || self.flag(IPPROTO_IP, libc::IP_TRANSPARENT)
            || self.flag(IPPROTO_IPV6, libc::IPV6_FREEBIND)
            || self.flag(IPPROTO_IPV6, libc::IPV6_TRANSPARENT)
    }

    /// First and last port for a socket that is bound without one (`IP_LOCAL_PORT_RANGE`).
    pub(crate) fn port_range(&self) -> Option<(u16, u16)> {
        let range = self.int(IPPROTO_IP, IP_LOCAL_PORT_RANGE)?.cast_unsigned();
        match (range as u16, (range >> 16) as u16) {
            (0, _) | (_, 0) => None,
            range => Some(range),
        }
    }

    pub(crate) fn v6_only(&self) -> bool {
        self.flag(IPPROTO_IPV6, IPV6_V6ONLY)
    }

    pub(crate) fn receive_buffer(&self) -> Option<u32> {
        self.int(SOL_SOCKET, libc::SO_RCVBUF)
            .and_then(|bytes| u32::try_from(bytes).ok())
    }

    /// Bytes that a blocking receive waits for (`SO_RCVLOWAT`).
    pub(crate) fn receive_low_water(&self) -> usize {
        let bytes = self.int(SOL_SOCKET, libc::SO_RCVLOWAT);
        bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .map_or(1, |bytes| bytes.max(1))
    }

    pub(crate) fn receive_timeout(&self) -> Option<Duration> {
        self.timeout(libc::SO_RCVTIMEO)
    }

    pub(crate) fn send_timeout(&self) -> Option<Duration> {
        self.timeout(libc::SO_SNDTIMEO)
    }

    /// A zero `timeval` means no limit, a negative one not to wait.
    fn timeout(&self, name: i32) -> Option<Duration> {
        let value = self.values.get(&(SOL_SOCKET, name))?;
        if values::is_before_now(value) {
            return Some(Duration::ZERO);
        }
        let seconds = u64::from_ne_bytes(value.get(..8)?.try_into().ok()?);
        let micros = u64::from_ne_bytes(value.get(8..16)?.try_into().ok()?);
        let timeout = Duration::from_secs(seconds) + Duration::from_micros(micros);
        (!timeout.is_zero()).then_some(timeout)
    }

    pub(crate) fn linger(&self) -> Option<Linger> {
        let value = self.values.get(&(SOL_SOCKET, libc::SO_LINGER))?;
        let on = i32::from_ne_bytes(value.get(..4)?.try_into().ok()?);
        let seconds = i32::from_ne_bytes(value.get(4..8)?.try_into().ok()?);
        let time = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        (on != 0).then_some(Linger { time })
    }

    pub(crate) fn wanted_control(&self) -> WantedControl {
        WantedControl {
            timestamp: self.flag(SOL_SOCKET, libc::SO_TIMESTAMP),
            timestamp_ns: self.flag(SOL_SOCKET, libc::SO_TIMESTAMPNS),
            hops: self.flag(IPPROTO_IP, libc::IP_RECVTTL),
            service: self.flag(IPPROTO_IP, libc::IP_RECVTOS),
            destination: self.flag(IPPROTO_IP, libc::IP_PKTINFO),
            original: self.flag(IPPROTO_IP, libc::IP_RECVORIGDSTADDR),
            v6_destination: self.flag(IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
            v6_original: self.flag(IPPROTO_IPV6, libc::IPV6_RECVORIGDSTADDR),
            timestamping: {
                let wanted = timestamping::RX_SOFTWARE | timestamping::SOFTWARE;
                self.timestamping() & wanted == wanted
            },
            v6_hops: self.flag(IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
            v6_class: self.flag(IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
            segment: self.flag(libc::SOL_UDP, libc::UDP_GRO),
            dropped: self.flag(SOL_SOCKET, libc::SO_RXQ_OVFL),
        }
    }

    /// `TCP_CONGESTION`, if it was set.
    pub(crate) fn congestion(&self) -> Option<CongestionKind> {
        let name = self.values.get(&(IPPROTO_TCP, libc::TCP_CONGESTION))?;
        let name = name.split(|&byte| byte == 0).next()?;
        CongestionKind::from_name(core::str::from_utf8(name).ok()?)
    }

    /// `SO_MAX_PACING_RATE`, if it limits anything.
    pub(crate) fn max_pacing(&self) -> Option<u64> {
        let value = self.values.get(&(SOL_SOCKET, libc::SO_MAX_PACING_RATE))?;
        let rate = u64::from_ne_bytes(value.get(..8)?.try_into().ok()?);
        (rate != u64::MAX).then_some(rate)
    }

    /// Does `recvmsg` of a stream have to return more than bytes: their arrival time, or how many are left?
    pub(crate) fn wants_times(&self) -> bool {
        let wanted = self.wanted_control();
        wanted.timestamp || wanted.timestamp_ns || wanted.timestamping || self.tells_rest()
    }

    /// Flags of `SO_TIMESTAMPING`.
    pub(crate) fn timestamping(&self) -> u32 {
        self.int(SOL_SOCKET, libc::SO_TIMESTAMPING)
            .map_or(0, i32::cast_unsigned)
    }

    /// Are calls with `MSG_ZEROCOPY` to be reported as completed (`SO_ZEROCOPY`)?
    pub(crate) fn reports_completions(&self) -> bool {
        self.flag(SOL_SOCKET, libc::SO_ZEROCOPY)
    }

    /// `UDP_SEGMENT`; 0 if unset.
    pub(crate) fn segment(&self) -> u16 {
        self.int(libc::SOL_UDP, libc::UDP_SEGMENT)
            .and_then(|size| u16::try_from(size).ok())
            .unwrap_or(0)
    }

    pub(crate) fn udp_cork(&self) -> bool {
        self.flag(libc::SOL_UDP, libc::UDP_CORK)
    }

    /// `TCP_INQ`: `recvmsg` returns how much is left.
    pub(crate) fn tells_rest(&self) -> bool {
        self.flag(IPPROTO_TCP, TCP_INQ)
    }

    /// `SO_RCVBUFFORCE` and `SO_SNDBUFFORCE`: as the plain options, without their limit, for privileged callers.
    pub(crate) fn force_buffer(&mut self, name: i32, value: &[u8]) -> Result<(), Errno> {
        let bytes = values::forced_buffer(name, int_of(value, SOL_SOCKET)?);
        let plain = match name {
            libc::SO_RCVBUFFORCE => libc::SO_RCVBUF,
            _ => libc::SO_SNDBUF,
        };
        self.keep(SOL_SOCKET, plain, &bytes.to_ne_bytes());
        Ok(())
    }

    /// Keeps a value that was checked elsewhere, in the kernel's form.
    pub(crate) fn keep(&mut self, level: i32, name: i32, value: &[u8]) {
        self.values.insert((level, name), value.to_vec());
    }

    pub(crate) fn multicast(&self) -> MulticastOptions {
        let byte = |level, name| self.int(level, name).and_then(|v| u8::try_from(v).ok());
        let on = |level, name| self.int(level, name).is_none_or(|value| value != 0);
        let default = MulticastOptions::default();
        let v4_interface = self
            .values
            .get(&(IPPROTO_IP, libc::IP_MULTICAST_IF))
            .and_then(|value| value.get(8..12)?.first_chunk().copied())
            .map(u32::from_ne_bytes);
        let interface = v4_interface.or(self
            .int(IPPROTO_IPV6, libc::IPV6_MULTICAST_IF)
            .map(i32::cast_unsigned));
        MulticastOptions {
            ttl: byte(IPPROTO_IP, libc::IP_MULTICAST_TTL)
                .or(byte(IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS))
                .unwrap_or(default.ttl),
            is_looped: on(IPPROTO_IP, libc::IP_MULTICAST_LOOP)
                && on(IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP),
            interface: interface.filter(|&index| index != 0),
        }
    }

    fn apply_to_udp(&self, session: &mut UdpSession) {
        session.ip = self.ip();
        if let Some(bytes) = self.receive_buffer() {
            session.receive_buffer = bytes as usize;
        }
        session.multicast = self.multicast();
        let hears_all = |level, name| self.int(level, name).is_none_or(|value| value != 0);
        session.memberships.all =
            hears_all(IPPROTO_IP, IP_MULTICAST_ALL) && hears_all(IPPROTO_IPV6, IPV6_MULTICAST_ALL);
        session.coalesce = self.flag(libc::SOL_UDP, libc::UDP_GRO);
        session.checksums = Checksums {
            v4_unsent: self.flag(SOL_SOCKET, libc::SO_NO_CHECK),
            v6_unsent: self.flag(libc::SOL_UDP, UDP_NO_CHECK6_TX),
            v6_unwanted: self.flag(libc::SOL_UDP, UDP_NO_CHECK6_RX),
        };
        session.reports = Reports {
            v4: self.flag(IPPROTO_IP, libc::IP_RECVERR),
            v6: self.flag(IPPROTO_IPV6, libc::IPV6_RECVERR),
            path_mtu: self.flag(IPPROTO_IPV6, libc::IPV6_RECVPATHMTU),
        };
        session.v6_sizes = V6Sizes {
            whole_only: self.flag(IPPROTO_IPV6, libc::IPV6_DONTFRAG),
            most: self
                .int(IPPROTO_IPV6, libc::IPV6_MTU)
                .and_then(|mtu| u32::try_from(mtu).ok())
                .filter(|&mtu| mtu > 0),
        };
    }

    pub(crate) fn is_corked(&self) -> bool {
        self.flag(IPPROTO_TCP, TCP_CORK)
    }

    fn window_clamp(&self) -> Option<u32> {
        let clamp = self.int(IPPROTO_TCP, TCP_WINDOW_CLAMP)?;
        Some(clamp.unsigned_abs()).filter(|&bytes| bytes > 0)
    }

    /// Returns what the server must know for the handshakes it performs.
    pub(crate) fn handshake(&self) -> HandshakeOptions {
        let positive = |name| {
            let value = self.int(IPPROTO_TCP, name)?;
            u32::try_from(value).ok().filter(|&value| value > 0)
        };
        HandshakeOptions {
            ip: self.ip(),
            reuse_address: self.reuse().address,
            window_clamp: self.window_clamp(),
            receive_buffer: self.receive_buffer(),
            max_segment: positive(TCP_MAXSEG).and_then(|mss| u16::try_from(mss).ok()),
            syn_retries: positive(libc::TCP_SYNCNT).and_then(|count| u8::try_from(count).ok()),
            user_timeout_ms: positive(TCP_USER_TIMEOUT),
            defer_accept_seconds: positive(libc::TCP_DEFER_ACCEPT),
            fast_open_queue: positive(libc::TCP_FASTOPEN),
            fast_open_keys: self.fast_open_keys(),
            is_concurrent_server: self
                .int(SOL_SOCKET, SO_CONCURRENT_SERVER)
                .filter(|&value| value >= 0)
                .map(|value| value > 0),
            is_delegated: self
                .int(SOL_SOCKET, SO_DELEGATE)
                .filter(|&value| value >= 0)
                .map(|value| value > 0),
            delivery: self.delivery(),
            priority: self.priority(),
        }
    }

    /// Returns the priority of sent frames that `SO_PRIORITY` sets; 0 if `IP_TOS` determines it, in the transmit filter.
    pub(crate) fn priority(&self) -> u8 {
        let chosen = self.int(SOL_SOCKET, libc::SO_PRIORITY).unwrap_or(0);
        u8::try_from(chosen).unwrap_or(0)
    }

    /// Returns the delivery form, if one was chosen.
    pub(crate) fn delivery(&self) -> Option<Delivery> {
        let number = usize::try_from(self.int(SOL_SOCKET, SO_DELIVERY)?).ok()?;
        Delivery::ALL.get(number).copied()
    }

    /// Returns the receive ring, if one was chosen.
    pub(crate) fn mapping(&self) -> Option<MappingChoice> {
        match self.int(SOL_SOCKET, SO_DIRECT)? {
            0 => Some(MappingChoice::Shared),
            chosen => (chosen > 0).then_some(MappingChoice::Direct),
        }
    }

    /// Applies the options to a session.
    pub(crate) fn apply(&self, session: &mut Session) {
        match session {
            Session::Tcp(session) => self.apply_to_tcp(session),
            Session::Udp(session) => self.apply_to_udp(session),
        }
    }

    fn apply_to_tcp(&self, session: &mut TcpSession) {
        session.ip = self.ip();
        if let Some(kind) = self.congestion() {
            session.connection.set_congestion(kind);
        }
        self.apply_to_stream(&mut session.connection);
    }

    /// Applies the options to a stream of any kind.
    pub(crate) fn apply_to_stream(&self, stream: &mut dyn Stream) {
        if let Some(bytes) = self.int(SOL_SOCKET, libc::SO_SNDBUF) {
            stream.set_send_buffer(usize::try_from(bytes).unwrap_or(0));
        }
        if let Some(bytes) = self.receive_buffer() {
            stream.set_receive_buffer(bytes as usize);
        }
        let low_water = self.receive_low_water();
        let options = stream.options();
        options.nodelay = self.flag(IPPROTO_TCP, TCP_NODELAY);
        options.cork = self.is_corked();
        options.reset_on_close = self.linger().is_some_and(|linger| linger.time.is_zero());
        options.urgent_inline = self.flag(SOL_SOCKET, libc::SO_OOBINLINE);
        options.keepalive.enabled = self.flag(SOL_SOCKET, libc::SO_KEEPALIVE);
        if let Some(idle) = self.seconds(IPPROTO_TCP, TCP_KEEPIDLE) {
            options.keepalive.idle = idle;
        }
        if let Some(interval) = self.seconds(IPPROTO_TCP, TCP_KEEPINTVL) {
            options.keepalive.interval = interval;
        }
        if let Some(count) = self.int(IPPROTO_TCP, TCP_KEEPCNT) {
            options.keepalive.count = count.unsigned_abs();
        }
        let timeout = self
            .int(IPPROTO_TCP, TCP_USER_TIMEOUT)
            .map(i32::unsigned_abs);
        options.user_timeout = timeout
            .filter(|&ms| ms > 0)
            .map(|ms| Duration::from_millis(u64::from(ms)));
        options.window_clamp = self.window_clamp();
        let segment = self
            .int(IPPROTO_TCP, TCP_MAXSEG)
            .and_then(|mss| u16::try_from(mss).ok());
        options.max_segment = segment.filter(|&mss| mss > 0);
        options.receive_low_water = low_water;
        options.max_pacing = self.max_pacing();
        let unsent = self.int(IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT);
        options.unsent_low_water = unsent.map(i32::cast_unsigned).filter(|&bytes| bytes > 0);
        options.orphan_wait = match self.int(IPPROTO_TCP, libc::TCP_LINGER2) {
            None | Some(0) => OrphanWait::Default,
            Some(..0) => OrphanWait::Never,
            Some(seconds) => {
                OrphanWait::For(Duration::from_secs(u64::from(seconds.unsigned_abs())))
            }
        };
    }

    /// `TCP_FASTOPEN_CONNECT`.
    pub(crate) fn opens_fast(&self) -> bool {
        self.flag(IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT)
    }

    pub(crate) fn opens_without_cookie(&self) -> bool {
        self.flag(IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE)
    }

    /// `TCP_QUICKACK` acts once: it is not a state of the socket (tcp(7)).
    pub(crate) fn apply_quickack(&self, stream: &mut dyn Stream) {
        match self.int(IPPROTO_TCP, TCP_QUICKACK) {
            Some(0) => stream.ack_lazily(),
            Some(_) => stream.ack_quickly(),
            None => {}
        }
    }

    /// The option of the socket's own family counts, for an IPv6 socket also if its peer is IPv4.
    fn mtu_discovery(&self) -> MtuDiscovery {
        let value = self
            .int(IPPROTO_IP, libc::IP_MTU_DISCOVER)
            .or(self.int(IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER));
        match value {
            Some(libc::IP_PMTUDISC_DONT) => MtuDiscovery::Dont,
            Some(libc::IP_PMTUDISC_DO) => MtuDiscovery::Do,
            Some(libc::IP_PMTUDISC_PROBE) => MtuDiscovery::Probe,
            Some(libc::IP_PMTUDISC_INTERFACE) => MtuDiscovery::Interface,
            Some(libc::IP_PMTUDISC_OMIT) => MtuDiscovery::Omit,
            _ => MtuDiscovery::Want,
        }
    }

    fn ip(&self) -> IpOptions {
        let byte = |level, name| self.int(level, name).and_then(|v| u8::try_from(v).ok());
        let default = IpOptions::default();
        IpOptions {
            ttl: byte(IPPROTO_IP, libc::IP_TTL)
                .or(byte(IPPROTO_IPV6, IPV6_UNICAST_HOPS))
                .unwrap_or(default.ttl),
            tos: byte(IPPROTO_IP, libc::IP_TOS)
                .or(byte(IPPROTO_IPV6, IPV6_TCLASS))
                .unwrap_or(default.tos),
            min_ttl: byte(IPPROTO_IP, libc::IP_MINTTL)
                .or(byte(IPPROTO_IPV6, IPV6_MINHOPCOUNT))
                .unwrap_or(default.min_ttl),
            discovery: self.mtu_discovery(),
        }
    }
}

/// `asm-generic/socket.h`
const SO_BINDTOIFINDEX: i32 = 62;

/// Options that Portolan leaves to the kernel, together with the sockets that they are set on.
pub(crate) fn is_the_kernels(level: i32, name: i32) -> bool {
    match level {
        SOL_SOCKET => matches!(
            name,
            libc::SO_BINDTODEVICE
                | SO_BINDTOIFINDEX
                | libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
                | libc::SO_ATTACH_REUSEPORT_CBPF
                | libc::SO_ATTACH_REUSEPORT_EBPF
        ),
        IPPROTO_IP => matches!(name, libc::IP_MSFILTER | libc::MCAST_MSFILTER),
        IPPROTO_IPV6 => name == libc::MCAST_MSFILTER,
        IPPROTO_TCP => matches!(name, libc::TCP_MD5SIG | libc::TCP_REPAIR),
        _ => false,
    }
}

/// Values that need privileges, and that have an effect only on kernel sockets: a mark selects
/// routes, and a priority beyond the usual ones a class of the user's.
pub(crate) fn is_privileged(level: i32, name: i32, value: &[u8]) -> bool {
    let number = value
        .first_chunk()
        .map_or(0, |value| i32::from_ne_bytes(*value));
    let most = i32::from(HandshakeOptions::PRIORITY_MAX);
    match (level, name) {
        (SOL_SOCKET, libc::SO_PRIORITY) => !(0..=most).contains(&number),
        (SOL_SOCKET, libc::SO_MARK) => number != 0,
        _ => false,
    }
}

/// Linux's `rt_tos2priority`, by the bits of RFC 1349: bulk for throughput, interactive for low
/// delay, in between for both. The transmit filter does the same (`bpf/send.h`).
fn priority_of(tos: u8) -> i32 {
    match tos & 0x18 {
        0x08 => 2,
        0x10 => 6,
        0x18 => 4,
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
