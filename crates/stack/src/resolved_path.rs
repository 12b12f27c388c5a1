//! How a session's packets reach their destination: the route, the neighbour, and the header
//! template that follows from both. Cached in the session until the metastate changes.

use core::net::IpAddr;

use portolan_proto::ip::{IpOptions, MtuDiscovery};
use portolan_proto::metastate::RouteKind;
use portolan_tcp::Segment;
use portolan_types::{Handle, MacAddr, Protocol};
use portolan_wire::{ipv4, ipv6};

use crate::frame::Template;
use crate::pmtu::PathMtus;
use crate::routes::{NoRoute, Path, Routes};

/// Both addresses of a packet, and its protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) protocol: Protocol,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// The device of the link of a scoped destination, else 0.
    pub(crate) scope: u32,
}

/// The neighbour to which packets are sent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NextHop {
    pub interface: u32,
    pub address: IpAddr,
}

/// A path to one destination, valid as long as the routes are unchanged.
#[derive(Debug)]
pub(crate) struct ResolvedPath {
    generation: u32,
    mtu_generation: u32,
    destination: IpAddr,
    scope: u32,
    /// MTU of the whole path.
    pub(crate) mtu: u32,
    /// MTU of the first link.
    pub(crate) link_mtu: u32,
    pub(crate) template: Template,
    /// The neighbour whose link-layer address is not known yet. The template then has a zero destination address; the
    /// kernel must resolve the neighbour.
    pub(crate) unresolved: Option<NextHop>,
    /// The handle enclosed last, and the template for it, if there can be one.
    enclosing: Option<(Handle, Option<Template>)>,
}

/// Why there is no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteError {
    NoRoute,
    /// The destination is local, not unicast, refused by a route, or reached through an unmanaged device, or the host has
    /// a policy of its own.
    NotOurs,
}

impl ResolvedPath {
    /// Looks up a path.
    pub(crate) fn find(
        ends: Ends,
        ip: IpOptions,
        routes: &Routes,
        mtus: &PathMtus,
    ) -> Result<ResolvedPath, RouteError> {
        let path =
            routes
                .path_in(ends.destination, ends.scope)
                .map_err(|refusal| match refusal {
                    NoRoute::Missing => RouteError::NoRoute,
                    NoRoute::Refused => RouteError::NotOurs,
                })?;
        if !path.managed || path.kind != RouteKind::Unicast || !is_unicast(ends.destination) {
            return Err(RouteError::NotOurs);
        }
        // A UDP session bound to a group or to a broadcast address sends from another one. A datagram may be the first
        // of its flow.
        if ends.protocol == Protocol::Udp && (routes.obey_policy() || !routes.is_local(ends.source))
        {
            return Err(RouteError::NotOurs);
        }
        let station = routes.neighbour(path.interface, path.next_hop);
        ResolvedPath::by(&path, station, ends, ip, routes, mtus)
    }

    /// The path to a group through the given device.
    pub(crate) fn to_group(
        ends: Ends,
        ip: IpOptions,
        interface: u32,
        routes: &Routes,
        mtus: &PathMtus,
    ) -> Result<ResolvedPath, RouteError> {
        let path = routes
            .path_on(interface, ends.destination)
            .filter(|_| !routes.obey_policy())
            .ok_or(RouteError::NotOurs)?;
        let (true, Some(group)) = (path.managed, MacAddr::of_group(ends.destination)) else {
            return Err(RouteError::NotOurs);
        };
        ResolvedPath::by(&path, Some(group), ends, ip, routes, mtus)
    }

    fn by(
        path: &Path,
        station: Option<MacAddr>,
        ends: Ends,
        ip: IpOptions,
        routes: &Routes,
        mtus: &PathMtus,
    ) -> Result<ResolvedPath, RouteError> {
        let Ends {
            protocol,
            source,
            destination,
            scope,
        } = ends;
        let next = station.unwrap_or_default();
        let template = Template::new(protocol, source, destination, path.mac, next, ip)
            .ok_or(RouteError::NoRoute)?;
        Ok(ResolvedPath {
            generation: routes.generation(),
            mtu_generation: mtus.generation(),
            destination,
            scope,
            mtu: mtus.limit(destination, path.mtu),
            link_mtu: path.mtu,
            template,
            unresolved: station.is_none().then_some(NextHop {
                interface: path.interface,
                address: path.next_hop,
            }),
            enclosing: None,
        })
    }

    /// Returns the cached path if it is current, else looks up and caches a new one.
    pub(crate) fn current<'a>(
        kept: &'a mut Option<ResolvedPath>,
        ends: Ends,
        ip: IpOptions,
        routes: &Routes,
        mtus: &PathMtus,
    ) -> Result<&'a mut ResolvedPath, RouteError> {
        if !kept
            .as_ref()
            .is_some_and(|resolved| resolved.is_current(&ends, routes, mtus))
        {
            *kept = Some(ResolvedPath::find(ends, ip, routes, mtus)?);
        }
        kept.as_mut().ok_or(RouteError::NoRoute)
    }

    /// The template for a segment, with or without a handle.
    pub(crate) fn template_for(&mut self, segment: &Segment<'_>) -> &Template {
        let Some(handle) = segment.handle else {
            return &self.template;
        };
        if self
            .enclosing
            .as_ref()
            .is_none_or(|(kept, _)| *kept != handle)
        {
            self.enclosing = Some((handle, self.template.enclosing(handle)));
        }
        let enclosing = self
            .enclosing
            .as_ref()
            .and_then(|(_, template)| template.as_ref());
        let length = segment.payload[0].len() + segment.payload[1].len();
        let enclosing = enclosing.filter(|template| template.takes(length, segment.segment_size));
        enclosing.unwrap_or(&self.template)
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.destination.is_ipv6()
    }

    pub(crate) fn ip_header(&self) -> usize {
        match self.destination {
            IpAddr::V4(_) => ipv4::HEADER_LEN,
            IpAddr::V6(_) => ipv6::HEADER_LEN,
        }
    }

    /// IP payload of one fragment on a link with `mtu`: a multiple of eight.
    pub(crate) fn fragment_size(&self, mtu: usize) -> Option<u16> {
        let headers = match self.destination {
            IpAddr::V4(_) => ipv4::HEADER_LEN,
            IpAddr::V6(_) => ipv6::HEADER_LEN + ipv6::FRAGMENT_HEADER_LEN,
        };
        let room = mtu.checked_sub(headers)? & !7;
        u16::try_from(room).ok().filter(|&room| room > 0)
    }

    /// Maximum size of a packet.
    pub(crate) fn mtu_for(&self, discovery: MtuDiscovery) -> u32 {
        if discovery.heeds_routers() {
            self.mtu
        } else {
            self.link_mtu
        }
    }

    pub(crate) fn is_current(&self, ends: &Ends, routes: &Routes, mtus: &PathMtus) -> bool {
        self.leads_to(ends.destination, ends.scope, routes)
            && self.mtu_generation == mtus.generation()
    }

    pub(crate) fn leads_to(&self, destination: IpAddr, scope: u32, routes: &Routes) -> bool {
        self.generation == routes.generation()
            && self.destination == destination
            && self.scope == scope
    }
}

fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_multicast() && !v4.is_broadcast() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_multicast() && !v6.is_unspecified(),
    }
}
