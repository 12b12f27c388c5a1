//! Look-ups in the metastate: device, next hop, source address and MTU of a destination.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::{BTreeMap, HashMap};

use portolan_proto::filter::{PathKey, RETURN_PATHS, ReturnPath};
use portolan_proto::metastate::{Interface, Metastate, Route, RouteKind};
use portolan_types::{MacAddr, is_scoped};

/// One generation of the metastate, prepared for look-ups.
#[derive(Debug, Default)]
pub struct Routes {
    generation: u32,
    state: Metastate,
    /// Not a hash map, whose keys come from `getrandom`, where libc ends cancelled threads: this map is built in
    /// threads that wait.
    neighbours: BTreeMap<(u32, IpAddr), MacAddr>,
}

/// Where packets to a destination are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    pub interface: u32,
    /// Whether Portolan's filter serves the device.
    pub managed: bool,
    pub kind: RouteKind,
    /// The gateway, or the destination itself.
    pub next_hop: IpAddr,
    /// The default source address.
    pub source: Option<IpAddr>,
    pub mtu: u32,
    pub mac: MacAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoute {
    #[error("no route to host")]
    Missing,
    /// By a `blackhole`, `unreachable` or `prohibit` route; the kernel has an error for each.
    #[error("a route refuses the destination")]
    Refused,
}

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

    /// Generation of the metastate that this was built from.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Longest prefix first, then lowest metric, the order of the metastate; ignores routes through devices
    /// that are down.
    pub fn path(&self, destination: IpAddr) -> Result<Path, NoRoute> {
        self.path_in(destination, 0)
    }

    /// Like [`Routes::path`], restricted to the device `scope` of a scoped destination; 0 for any.
    pub fn path_in(&self, destination: IpAddr, scope: u32) -> Result<Path, NoRoute> {
        self.state
            .routes
            .iter()
            .filter(|route| scope == 0 || route.interface == scope)
            .filter(|route| covers(route.destination, route.prefix, destination))
            .find_map(|route| self.path_by(route, destination))
            .unwrap_or(Err(NoRoute::Missing))
    }

    /// The paths of answers that the packet filter makes itself, as [`Routes::path`] finds them. Empty if there are
    /// too many.
    pub fn return_paths(&self) -> HashMap<PathKey, ReturnPath> {
        let mut paths = HashMap::new();
        if self.state.routes.len() > RETURN_PATHS {
            return paths;
        }
        let routes = self.state.routes.iter();
        for route in routes {
            let path = match self.interface(route.interface) {
                _ if route.kind == RouteKind::Refuse => ReturnPath::default(),
                Some(device) => ReturnPath {
                    interface: if device.managed && route.kind == RouteKind::Unicast {
                        device.index
                    } else {
                        0
                    },
                    mtu: mtu_of(route, device),
                },
                None => continue,
            };
            let key = PathKey::new(route.destination, route.prefix);
            paths.entry(key).or_insert(path);
        }
        paths
    }

    /// None if the route's device is down.
    fn path_by(&self, route: &Route, destination: IpAddr) -> Option<Result<Path, NoRoute>> {
        if route.kind == RouteKind::Refuse {
            return Some(Err(NoRoute::Refused));
        }
        let interface = self.interface(route.interface)?;
        Some(Ok(Path {
            interface: interface.index,
            managed: interface.managed,
            kind: route.kind,
            next_hop: route.gateway.unwrap_or(destination),
            source: route
                .source
                .or_else(|| self.address_near(interface.index, destination)),
            mtu: mtu_of(route, interface),
            mac: interface.mac,
        }))
    }

    /// An address of the device in the destination's subnet, else any of its family; for IPv6 the
    /// address preferred by RFC 6724.
    fn address_near(&self, interface: u32, destination: IpAddr) -> Option<IpAddr> {
        let of_device = self
            .state
            .addresses
            .iter()
            .filter(|a| a.interface == interface);
        // The first of equals.
        let best = of_device.min_by_key(|a| {
            core::cmp::Reverse(match (a.address, destination) {
                (IpAddr::V4(_), IpAddr::V4(_)) => {
                    Some((covers(a.address, a.prefix, destination), false, 0))
                }
                (IpAddr::V6(source), IpAddr::V6(destination)) => {
                    Some(source_preference(source, destination))
                }
                _ => None,
            })
        })?;
        (best.address.is_ipv4() == destination.is_ipv4()).then_some(best.address)
    }

    /// Whether packets are sent through `interface` to `address` directly.
    pub fn is_next_hop(&self, interface: u32, address: IpAddr) -> bool {
        self.state.routes.iter().any(|route| {
            let is_reached = match route.gateway {
                Some(gateway) => gateway == address,
                None => covers(route.destination, route.prefix, address),
            };
            route.interface == interface && route.kind == RouteKind::Unicast && is_reached
        })
    }

    /// The path to an on-link destination, if the device is up.
    pub fn path_on(&self, interface: u32, destination: IpAddr) -> Option<Path> {
        let interface = self.interface(interface)?;
        Some(Path {
            interface: interface.index,
            managed: interface.managed,
            kind: RouteKind::Multicast,
            next_hop: destination,
            source: self.address_near(interface.index, destination),
            mtu: interface.mtu,
            mac: interface.mac,
        })
    }

    /// The device that has a local address, or the device of the address's local route.
    pub fn interface_with(&self, address: IpAddr) -> Option<u32> {
        let of = self.state.addresses.iter().find(|a| a.address == address);
        let routed = || {
            let path = self.path(address).ok();
            path.filter(|path| path.kind == RouteKind::Local)
                .map(|path| path.interface)
        };
        of.map(|address| address.interface).or_else(routed)
    }

    /// Whether the host has a policy of its own, which only the kernel applies.
    pub fn obey_policy(&self) -> bool {
        self.state.obeys_policy
    }

    /// Whether a device with that index exists, up or down.
    pub fn has_interface(&self, index: u32) -> bool {
        let mut interfaces = self.state.interfaces.iter();
        interfaces.any(|interface| interface.index == index)
    }

    /// The default device for a group, to join and to send (Linux: the device of its route).
    pub fn multicast_interface(&self, group: IpAddr) -> Option<u32> {
        let by_route = self.state.routes.iter().find(|route| {
            covers(route.destination, route.prefix, group)
                && route.kind != RouteKind::Refuse
                && self.interface(route.interface).is_some()
        });
        by_route.map(|route| route.interface)
    }

    /// Whether the address is the limited broadcast address or that of a local network.
    pub fn is_broadcast(&self, address: IpAddr) -> bool {
        address == IpAddr::V4(Ipv4Addr::BROADCAST)
            || self
                .state
                .routes
                .iter()
                .any(|route| route.kind == RouteKind::Broadcast && route.destination == address)
    }

    /// The device with that index, if it is up.
    fn interface(&self, index: u32) -> Option<&Interface> {
        self.state
            .interfaces
            .iter()
            .find(|interface| interface.index == index && interface.up)
    }

    /// Link-layer address of a neighbour, if the kernel knows it.
    pub fn neighbour(&self, interface: u32, address: IpAddr) -> Option<MacAddr> {
        self.neighbours.get(&(interface, address)).copied()
    }

    /// Whether Portolan serves the device of a local address. None if the address is not local.
    pub fn serves(&self, address: IpAddr) -> Option<bool> {
        let mut addresses = self.state.addresses.iter();
        let own = addresses.rfind(|own| own.address == address)?;
        let interfaces = &self.state.interfaces;
        let is_managed = |it: &Interface| it.index == own.interface && it.managed;
        Some(interfaces.iter().any(is_managed))
    }

    /// Whether the address is local.
    pub fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.state.addresses.iter().any(|a| a.address == address)
    }
}

fn mtu_of(route: &Route, interface: &Interface) -> u32 {
    let limit = route.mtu.unwrap_or(u32::MAX);
    limit.min(interface.mtu)
}

/// RFC 6724 §5, for addresses of one device, greater is better: rules 2 (scope), 6 (label), 8 (longest prefix).
fn source_preference(source: Ipv6Addr, destination: Ipv6Addr) -> (bool, bool, u32) {
    let is_narrow = |address: Ipv6Addr| is_scoped(address.into());
    let has_scope = is_narrow(source) == is_narrow(destination);
    let has_label = label(source) == label(destination);
    let common = (source.to_bits() ^ destination.to_bits()).leading_zeros();
    (has_scope, has_label, common)
}

/// RFC 6724 §2.1, for the prefixes still in use.
fn label(address: Ipv6Addr) -> u8 {
    match address.segments() {
        [0x2002, ..] => 2,
        [0x2001, 0, ..] => 5,
        [first, ..] if first & 0xfe00 == 0xfc00 => 13,
        _ => 1,
    }
}

/// Whether `network/prefix` covers `address`. Families must match.
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
    use portolan_proto::metastate::{Address, Neighbour};

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

    #[test]
    fn the_filter_is_told_of_the_routes_that_paths_take() {
        let paths = host().return_paths();
        let of = |address, prefix| paths.get(&PathKey::new(ip(address), prefix)).copied();
        let by_managed = Some(ReturnPath {
            interface: 2,
            mtu: 1500,
        });
        assert_eq!(of("10.0.0.0", 24), by_managed);
        assert_eq!(of("0.0.0.0", 0), by_managed, "the other's device is down");
        assert_eq!(paths.len(), 2);
    }

    #[test]
    fn the_filter_answers_nobody_who_is_not_reached_through_it() {
        let mut host = host();
        host.state.interfaces[1].up = true;
        host.state.routes.push(Route {
            kind: RouteKind::Local,
            ..route("10.0.0.1", 32, None, 2)
        });
        let paths = host.return_paths();
        for (address, prefix) in [("0.0.0.0", 0), ("10.0.0.1", 32)] {
            let path = paths[&PathKey::new(ip(address), prefix)];
            assert_eq!(path.interface, 0, "{address}");
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
                obeys_policy: false,
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
    fn a_route_that_refuses_hides_less_specific_ones() {
        let mut host = host();
        let refusal = Route {
            kind: RouteKind::Refuse,
            ..route("10.0.0.8", 29, None, 0)
        };
        host.state.routes.insert(0, refusal);
        assert_eq!(host.path(ip("10.0.0.9")), Err(NoRoute::Refused));
        assert!(host.path(ip("10.0.0.2")).is_ok());
        let paths = host.return_paths();
        let path_to = |text, prefix| paths[&PathKey::new(ip(text), prefix)].interface;
        assert_eq!((path_to("10.0.0.8", 29), path_to("10.0.0.0", 24)), (0, 2));
    }

    #[test]
    fn the_source_has_the_scope_and_the_label_of_the_destination() {
        let address = |text| Address {
            interface: 2,
            address: ip(text),
            prefix: 64,
        };
        let mut host = host();
        let addresses = ["fe80::1", "fd00::1", "2001:db8:1::1", "2001:db8:2::1"];
        host.state.addresses.extend(addresses.map(address));
        host.state.routes.push(route("::", 0, Some("fe80::fe"), 2));
        host.state.routes.push(route("fe80::", 64, None, 2));
        host.state.routes.push(route("fe80::", 64, None, 3));
        let source = |text| host.path(ip(text)).unwrap().source;
        assert_eq!(source("2001:db8:2::9"), Some(ip("2001:db8:2::1")));
        assert_eq!(source("2600::1"), Some(ip("2001:db8:1::1")));
        assert_eq!(source("fd99::1"), Some(ip("fd00::1")));
        assert_eq!(source("fe80::9"), Some(ip("fe80::1")));
        assert_eq!(host.path(ip("2600::1")).unwrap().next_hop, ip("fe80::fe"));
        assert!(host.is_next_hop(2, ip("fe80::fe")) && host.is_next_hop(2, ip("fe80::9")));
        assert!(!host.is_next_hop(3, ip("2600::1")) && !host.is_next_hop(2, ip("2600::1")));
        assert!(host.path_in(ip("fe80::9"), 3).is_err(), "it is down");
        assert_eq!(host.path_in(ip("fe80::9"), 2).unwrap().interface, 2);
    }

    #[test]
    fn families_do_not_mix() {
        assert_eq!(host().path(ip("2001:db8::1")), Err(NoRoute::Missing));
    }
}
