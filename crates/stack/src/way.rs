//! How a session's packets reach their destination: the route, the neighbour, and the header
//! template that follows from both. Kept with the session until metastate moves.

use core::net::IpAddr;

use portolan_proto::metastate::RouteKind;
use portolan_types::Protocol;

use crate::frame::Template;
use crate::routes::{NoRoute, Routes};
use crate::session::IpOptions;

/// Both ends of a packet, and what it carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) protocol: Protocol,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
}

/// A way to one destination, valid as long as the routes stay what they were.
#[derive(Debug)]
pub(crate) struct Way {
    generation: u32,
    destination: IpAddr,
    pub(crate) mtu: u32,
    pub(crate) template: Template,
}

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoWay {
    NoRoute,
    /// The destination is this host's, not unicast, or behind a device that is not managed.
    NotOurs,
    /// Nobody has told the next hop's link-layer address yet.
    Unresolved(IpAddr),
}

impl Way {
    /// Looks for a way.
    pub(crate) fn find(ends: Ends, ip: IpOptions, routes: &Routes) -> Result<Way, NoWay> {
        let Ends {
            protocol,
            source,
            destination,
        } = ends;
        let path = routes.path(destination).map_err(|NoRoute| NoWay::NoRoute)?;
        if !path.managed || path.kind != RouteKind::Unicast || !is_unicast(destination) {
            return Err(NoWay::NotOurs);
        }
        let neighbour = routes
            .neighbour(path.interface, path.next_hop)
            .ok_or(NoWay::Unresolved(path.next_hop))?;
        let template = Template::new(protocol, source, destination, path.mac, neighbour, ip)
            .ok_or(NoWay::NoRoute)?;
        Ok(Way {
            generation: routes.generation(),
            destination,
            mtu: path.mtu,
            template,
        })
    }

    /// The kept way if it still leads there, else a new one, which is kept.
    pub(crate) fn current<'a>(
        kept: &'a mut Option<Way>,
        ends: Ends,
        ip: IpOptions,
        routes: &Routes,
    ) -> Result<&'a Way, NoWay> {
        if !kept
            .as_ref()
            .is_some_and(|way| way.leads_to(ends.destination, routes))
        {
            *kept = Some(Way::find(ends, ip, routes)?);
        }
        kept.as_ref().ok_or(NoWay::NoRoute)
    }

    pub(crate) fn leads_to(&self, destination: IpAddr, routes: &Routes) -> bool {
        self.generation == routes.generation() && self.destination == destination
    }
}

fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_multicast() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_multicast(),
    }
}
