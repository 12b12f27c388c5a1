//! Look-ups on metastate: which device, next hop, source address and MTU a destination has.

use core::net::IpAddr;
use std::collections::HashMap;

use portolan_proto::metastate::{Metastate, Route, RouteKind};
use portolan_types::MacAddr;

/// One generation of metastate, ready for look-ups.
#[derive(Debug, Default)]
pub struct Routes {
    generation: u32,
    state: Metastate,
    neighbours: HashMap<(u32, IpAddr), MacAddr>,
}

/// Where packets to one destination go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    pub interface: u32,
    /// Portolan's filter serves that device.
    pub managed: bool,
    pub kind: RouteKind,
    /// The gateway, or the destination itself.
    pub next_hop: IpAddr,
    /// The address packets leave from unless the session has one.
    pub source: Option<IpAddr>,
    pub mtu: u32,
    pub mac: MacAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no route to host")]
pub struct NoRoute;

impl Routes {
    pub fn new(generation: u32, state: Metastate) -> Routes {
        let neighbours = state
            .neighbours
            .iter()
            .map(|n| ((n.interface, n.address), n.mac))
            .collect();
        Routes {
            generation,
            state,
            neighbours,
        }
    }

    /// Generation of the metastate this was made from.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Longest prefix first, then lowest metric, as metastate is sorted; routes through devices
    /// that are down do not count.
    pub fn path(&self, destination: IpAddr) -> Result<Path, NoRoute> {
        self.state
            .routes
            .iter()
            .filter(|route| covers(route.destination, route.prefix, destination))
            .find_map(|route| self.path_by(route, destination))
            .ok_or(NoRoute)
    }

    fn path_by(&self, route: &Route, destination: IpAddr) -> Option<Path> {
        if route.kind == RouteKind::Refuse {
            return None;
        }
        let interface = self
            .state
            .interfaces
            .iter()
            .find(|i| i.index == route.interface && i.up)?;
        Some(Path {
            interface: interface.index,
            managed: interface.managed,
            kind: route.kind,
            next_hop: route.gateway.unwrap_or(destination),
            source: route
                .source
                .or_else(|| self.address_near(interface.index, destination)),
            mtu: route
                .mtu
                .map_or(interface.mtu, |mtu| mtu.min(interface.mtu)),
            mac: interface.mac,
        })
    }

    /// An address of the device in the destination's subnet, else any of its family.
    fn address_near(&self, interface: u32, destination: IpAddr) -> Option<IpAddr> {
        let mut of_family =
            self.state.addresses.iter().filter(|a| {
                a.interface == interface && a.address.is_ipv4() == destination.is_ipv4()
            });
        let first = of_family.clone().next();
        of_family
            .find(|a| covers(a.address, a.prefix, destination))
            .or(first)
            .map(|a| a.address)
    }

    /// Link-layer address of a neighbour, if the kernel knows it.
    pub fn neighbour(&self, interface: u32, address: IpAddr) -> Option<MacAddr> {
        self.neighbours.get(&(interface, address)).copied()
    }

    /// Is this one of the host's own addresses?
    pub fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.state.addresses.iter().any(|a| a.address == address)
    }
}

/// Does `network/prefix` cover `address`? Families must agree.
fn covers(network: IpAddr, prefix: u8, address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(n), IpAddr::V4(a)) => {
            let mask = u32::MAX
                .checked_shl(32 - u32::from(prefix.min(32)))
                .unwrap_or(0);
            (n.to_bits() ^ a.to_bits()) & mask == 0
        }
        (IpAddr::V6(n), IpAddr::V6(a)) => {
            let mask = u128::MAX
                .checked_shl(128 - u32::from(prefix.min(128)))
                .unwrap_or(0);
            (n.to_bits() ^ a.to_bits()) & mask == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use portolan_proto::metastate::{Address, Interface, Neighbour};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn route(destination: &str, prefix: u8, gateway: Option<&str>, interface: u32) -> Route {
        Route {
            destination: ip(destination),
            prefix,
            gateway: gateway.map(ip),
            interface,
            source: None,
            metric: 0,
            mtu: None,
            kind: RouteKind::Unicast,
        }
    }

    fn host() -> Routes {
        let interface = |index, up| Interface {
            index,
            name: format!("eth{index}"),
            mac: MacAddr([2, 0, 0, 0, 0, index as u8]),
            mtu: 1500,
            up,
            managed: index == 2,
        };
        Routes::new(
            4,
            Metastate {
                interfaces: vec![interface(2, true), interface(3, false)],
                addresses: vec![
                    Address {
                        interface: 2,
                        address: ip("10.0.0.1"),
                        prefix: 24,
                    },
                    Address {
                        interface: 2,
                        address: ip("192.168.1.1"),
                        prefix: 24,
                    },
                ],
                routes: vec![
                    route("10.0.0.0", 24, None, 2),
                    route("0.0.0.0", 0, Some("10.0.0.254"), 3),
                    route("0.0.0.0", 0, Some("192.168.1.254"), 2),
                ],
                neighbours: vec![Neighbour {
                    interface: 2,
                    address: ip("10.0.0.2"),
                    mac: MacAddr([4; 6]),
                }],
            },
        )
    }

    #[test]
    fn the_longest_prefix_wins_and_a_direct_route_has_the_destination_as_next_hop() {
        let path = host().path(ip("10.0.0.2")).unwrap();
        assert_eq!(
            (path.next_hop, path.source),
            (ip("10.0.0.2"), Some(ip("10.0.0.1")))
        );
        assert_eq!(host().neighbour(2, path.next_hop), Some(MacAddr([4; 6])));
    }

    #[test]
    fn routes_through_a_device_that_is_down_do_not_count() {
        assert_eq!(
            host().path(ip("8.8.8.8")).unwrap().next_hop,
            ip("192.168.1.254")
        );
    }

    #[test]
    fn families_do_not_mix() {
        assert_eq!(host().path(ip("2001:db8::1")), Err(NoRoute));
    }
}
