//! Sending and delivery of datagrams.

use core::net::{IpAddr, SocketAddr};

use portolan_proto::filter::RecordHeader;
use portolan_tcp::Events;
use portolan_types::{Instant, Protocol, Slot, scope_of};
use portolan_wire::icmp::Cause;
use portolan_wire::{ipv4, ipv6, udp};

use super::{SessionEntry, Stack, Step, entry_of, tell};
use crate::frame::{Frame, HEAD_MAX, Segmentation, Wire};
use crate::packet::{IcmpMessage, Packet};
use crate::pmtu::PathMtus;
use crate::resolved_path::{Ends, ResolvedPath, RouteError};
use crate::routes::{NoRoute, Routes};
use crate::session::Session;
use crate::udp::{Datagram, DatagramError, ErrorCause, UdpSession, V6Sizes};
use portolan_proto::ip::{IpOptions, MtuDiscovery};

/// Settings of one datagram that differ from those of its session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sending {
    pub source: Option<IpAddr>,
    /// Index of the output device.
    pub interface: Option<u32>,
    pub ttl: Option<u8>,
    pub tos: Option<u8>,
    /// Payload of each datagram that the payload is cut into; 0 for a single datagram.
    pub segment: u16,
}

impl Sending {
    /// Whether the datagram uses the session's settings.
    fn is_usual(&self) -> bool {
        let Sending {
            source,
            interface,
            ttl,
            tos,
            segment: _,
        } = self;
        source.is_none() && interface.is_none() && ttl.is_none() && tos.is_none()
    }
}

/// Why a datagram was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("no UDP session there")]
    NoSession,
    #[error("no destination")]
    NoDestination,
    #[error("message too long")]
    TooLong,
    /// The path MTU is `mtu`, and the session does not permit fragmentation.
    #[error("message longer than the path takes")]
    DoesNotFit { mtu: u32 },
    /// A payload cannot be cut into datagrams without checksums.
    #[error("datagrams to be cut out without checksums")]
    Unchecked,
    #[error("no route to host")]
    NoRoute,
    /// The destination is not reached through a managed device: the kernel may know how.
    #[error("destination is not behind a managed device")]
    NotOurs,
    /// The device is busy; try again when the wire has room.
    #[error("device busy")]
    Full,
}

impl From<NoRoute> for SendError {
    fn from(no_route: NoRoute) -> SendError {
        match no_route {
            NoRoute::Missing => SendError::NoRoute,
            NoRoute::Refused => SendError::NotOurs,
        }
    }
}

impl Stack {
    /// Sends one datagram, to `destination` if given, else to the session's peer. Returns the length of the payload.
    pub fn send_datagram(
        &mut self,
        slot: Slot,
        destination: Option<SocketAddr>,
        payload: [&[u8]; 2],
        sending: &Sending,
        routes: &Routes,
        wire: &mut impl Wire,
    ) -> Result<usize, SendError> {
        let entry = entry_of(&mut self.places, slot.0).ok_or(SendError::NoSession)?;
        if !entry.enter(wire) {
            self.await_room(slot);
            return Err(SendError::Full);
        }
        let SessionEntry {
            session: Session::Udp(session),
            resolved,
            ..
        } = entry
        else {
            return Err(SendError::NoSession);
        };
        let destination = match (destination, session.remote) {
            // The transmit filter lets a connected session send to its peer only.
            (Some(other), Some(remote)) if other != remote => return Err(SendError::NotOurs),
            (given, remote) => given.or(remote).ok_or(SendError::NoDestination)?,
        };
        let length = payload[0].len() + payload[1].len();
        if length > longest(destination.ip()) {
            return Err(SendError::TooLong);
        }
        let no_checksum = session.checksums.are_unsent(destination.ip());
        if no_checksum && sending.segment != 0 {
            return Err(SendError::Unchecked);
        }
        let is_group = destination.ip().is_multicast();
        if is_group && session.multicast.is_looped {
            // The kernel knows whether this host has members, and sends to them and to the network.
            return Err(SendError::NotOurs);
        }
        let (found, source) = if sending.is_usual() && !is_group {
            let source = usual_source(session, resolved, destination, routes)?;
            let ends = ends(source, destination);
            (
                ResolvedPath::current(resolved, ends, session.ip, routes, &self.mtus)
                    .map(|resolved| &*resolved),
                source,
            )
        } else {
            *resolved = None;
            let (found, source) = unusual_way(session, destination, sending, routes, &self.mtus)?;
            (found.map(|found| &*resolved.insert(found)), source)
        };
        let source = SocketAddr::new(source, session.local.port());
        let found = found.map_err(|no_way| match no_way {
            RouteError::NotOurs => SendError::NotOurs,
            RouteError::NoRoute => SendError::NoRoute,
        })?;
        let output = Output {
            resolved: found,
            ports: (source.port(), destination.port()),
            discovery: session.ip.discovery,
            segment: sending.segment,
            no_checksum,
            v6_sizes: session.v6_sizes,
        };
        tell(self.observer, Step::Headers);
        let done = output.transmit(payload, wire);
        tell(self.observer, Step::Session);
        done?;
        if !sending.is_usual() || is_group {
            // Not cached: the next datagram may take the usual path.
            *resolved = None;
        }
        session.datagrams_out += 1;
        session.bytes_out += length as u64;
        Ok(length)
    }
}

fn ends(source: IpAddr, destination: SocketAddr) -> Ends {
    Ends {
        protocol: Protocol::Udp,
        source,
        destination: destination.ip(),
        scope: scope_of(destination),
    }
}

/// The session's own address, or the source address of the route.
fn usual_source(
    session: &UdpSession,
    resolved: &Option<ResolvedPath>,
    destination: SocketAddr,
    routes: &Routes,
) -> Result<IpAddr, SendError> {
    match session.local.ip() {
        any if any.is_unspecified() => resolved
            .as_ref()
            .filter(|resolved| resolved.leads_to(destination.ip(), scope_of(destination), routes))
            .map(|resolved| resolved.template.source())
            .map_or_else(|| source_of_route(destination, routes), Ok),
        bound => Ok(bound),
    }
}

/// The source address of the route. Like the kernel, treats the unspecified address as this host.
fn source_of_route(destination: SocketAddr, routes: &Routes) -> Result<IpAddr, SendError> {
    if destination.ip().is_unspecified() {
        return Err(SendError::NotOurs);
    }
    let path = routes.path_in(destination.ip(), scope_of(destination))?;
    path.source.ok_or(SendError::NoRoute)
}

/// The path of a datagram to a group, or of one with settings of its own.
fn unusual_way(
    session: &UdpSession,
    destination: SocketAddr,
    sending: &Sending,
    routes: &Routes,
    mtus: &PathMtus,
) -> Result<(Result<ResolvedPath, RouteError>, IpAddr), SendError> {
    let target = destination.ip();
    let is_group = target.is_multicast();
    if target.is_unspecified() {
        return Err(SendError::NotOurs);
    }
    let bound = session.local.ip();
    let is_free = bound.is_unspecified() || bound.is_multicast();
    let named = sending
        .interface
        .or(Some(scope_of(destination)).filter(|&scope| scope != 0));
    // As on Linux: an IPv4 source address selects the device.
    let of_source = || {
        let source = sending.source.or(Some(bound).filter(|_| !is_free))?;
        source.is_ipv4().then(|| routes.interface_with(source))?
    };
    let interface = match named {
        None if is_group => session
            .multicast
            .interface
            .or_else(of_source)
            .or_else(|| routes.multicast_interface(target)),
        interface => interface,
    };
    let path = match interface {
        Some(interface) if is_group => routes
            .path_on(interface, target)
            .ok_or(SendError::NoRoute)?,
        _ => routes.path_in(target, scope_of(destination))?,
    };
    if interface.is_some_and(|interface| interface != path.interface) {
        return Err(SendError::NotOurs);
    }
    let source = match sending.source {
        // The kernel decides about a source that the filter would not let pass.
        Some(source) if !is_free && source != bound => return Err(SendError::NotOurs),
        Some(source) if !routes.is_local(source) => return Err(SendError::NotOurs),
        Some(source) => source,
        None if is_free => path.source.ok_or(SendError::NoRoute)?,
        None => bound,
    };
    let usual = if is_group {
        session.multicast.ttl
    } else {
        session.ip.ttl
    };
    let ip = IpOptions {
        ttl: sending.ttl.unwrap_or(usual),
        tos: sending.tos.unwrap_or(session.ip.tos),
        ..session.ip
    };
    let ends = ends(source, destination);
    let found = if is_group {
        ResolvedPath::to_group(ends, ip, path.interface, routes, mtus)
    } else {
        ResolvedPath::find(ends, ip, routes, mtus)
    };
    Ok((found, source))
}

/// The longest payload that the length fields of UDP and IP can express.
fn longest(destination: IpAddr) -> usize {
    let headers = match destination {
        IpAddr::V4(_) => ipv4::HEADER_LEN + udp::HEADER_LEN,
        IpAddr::V6(_) => udp::HEADER_LEN,
    };
    usize::from(u16::MAX) - headers
}

/// Destination of a payload, and how it is cut into datagrams.
struct Output<'a> {
    resolved: &'a ResolvedPath,
    ports: (u16, u16),
    discovery: MtuDiscovery,
    segment: u16,
    no_checksum: bool,
    v6_sizes: V6Sizes,
}

impl Output<'_> {
    /// Sends a datagram whole if it fits the path, else in fragments or not at all; or the datagrams
    /// that the payload is cut into.
    fn transmit(&self, payload: [&[u8]; 2], wire: &mut impl Wire) -> Result<(), SendError> {
        let length = payload[0].len() + payload[1].len();
        let size = usize::from(self.segment);
        if size == 0 || length <= size {
            let cut = self.cut_of(length)?;
            self.transmit_one(payload, cut, wire);
            return Ok(());
        }
        if self.cut_of(size) != Ok(Segmentation::Not) {
            return Err(SendError::TooLong);
        }
        if wire.cuts_datagrams() {
            self.transmit_one(payload, Segmentation::Datagrams(self.segment), wire);
            return Ok(());
        }
        for piece in payload.concat().chunks(size) {
            self.transmit_one([piece, &[]], Segmentation::Not, wire);
        }
        Ok(())
    }

    /// How one datagram of that length must be cut.
    fn cut_of(&self, length: usize) -> Result<Segmentation, SendError> {
        let sizes = if self.resolved.is_v6() {
            self.v6_sizes
        } else {
            V6Sizes::default()
        };
        let path = self.resolved.mtu_for(self.discovery);
        let mtu = sizes.most.map_or(path, |most| path.min(most));
        if self.resolved.ip_header() + udp::HEADER_LEN + length <= mtu as usize {
            return Ok(Segmentation::Not);
        }
        if sizes.whole_only || !self.discovery.fragments_here() {
            return Err(SendError::DoesNotFit { mtu });
        }
        let size = self.resolved.fragment_size(mtu as usize);
        let size = size.ok_or(SendError::TooLong)?;
        Ok(Segmentation::Fragments(size))
    }

    fn transmit_one(&self, payload: [&[u8]; 2], cut: Segmentation, wire: &mut impl Wire) {
        let mut head = [0; HEAD_MAX];
        let length = payload[0].len() + payload[1].len();
        let template = &self.resolved.template;
        let head = template.udp_head(&mut head, self.ports, length, cut, self.no_checksum);
        wire.transmit(&Frame { head, payload });
    }
}

/// Whether the session accepts the destination of a datagram; always true for unicast.
pub(super) fn hears(session: &UdpSession, packet: &Packet<'_>, record: &RecordHeader) -> bool {
    let to = packet.destination.ip();
    !to.is_multicast()
        || session
            .memberships
            .accept(to, record.ifindex, packet.source.ip())
}

/// Queues a datagram, or the parts of a coalesced one; returns false if one was lost.
pub(super) fn deliver_datagrams(
    session: &mut UdpSession,
    (from, to): (SocketAddr, SocketAddr),
    ip: IpOptions,
    payload: &[u8],
    record: &RecordHeader,
) -> bool {
    let datagram = |data: &[u8], segment| Datagram {
        from,
        to,
        interface: record.ifindex,
        ip,
        received: Instant::from_nanos(record.timestamp),
        segment,
        dropped: 0,
        is_seen: false,
        data: data.to_vec(),
    };
    let size = usize::from(record.gso_size);
    if size == 0 || payload.len() <= size {
        return session.deliver(datagram(payload, 0));
    }
    if session.coalesce {
        return session.deliver(datagram(payload, record.gso_size));
    }
    let mut all = true;
    for piece in payload.chunks(size) {
        all &= session.deliver(datagram(piece, 0));
    }
    all
}

/// As on Linux: without `IP_RECVERR` only connected sockets get errors, and only hard ones.
pub(super) fn report_to_udp(
    now: Instant,
    session: &mut UdpSession,
    packet: &Packet<'_>,
    message: &IcmpMessage<'_>,
) -> Events {
    if !session.reports.of(packet.source.ip()) {
        return match message.errno_for_udp(session.ip.discovery) {
            Some(errno) if session.remote == Some(packet.source) => {
                session.error = Some(errno);
                Events::ERROR
            }
            _ => Events::NONE,
        };
    }
    let Some((errno, _)) = message.errno() else {
        return Events::NONE;
    };
    session.error = Some(errno);
    session.note_error(DatagramError {
        errno,
        cause: ErrorCause::Icmp {
            is_v6: message.from.is_ipv6(),
            kind: message.kind,
            code: message.code,
        },
        info: match message.cause {
            Cause::TooBig { mtu } => mtu,
            _ => 0,
        },
        data: 0,
        to: Some(packet.source),
        offender: Some(message.from),
        ip: message.ip,
        at: now,
        payload: quoted_payload(message.packet).to_vec(),
    });
    Events::ERROR
}

/// The part of a quoted packet behind the UDP header, as far as it is quoted.
fn quoted_payload(packet: &[u8]) -> &[u8] {
    let headers = match packet.first() {
        Some(first) if first >> 4 == 4 => usize::from(first & 15) * 4,
        _ => ipv6::HEADER_LEN,
    };
    packet.get(headers + udp::HEADER_LEN..).unwrap_or_default()
}
