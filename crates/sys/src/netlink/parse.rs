//! Building and parsing of rtnetlink messages: requests for whole tables, and the entries that Portolan
//! uses. Other entries become `None`.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteNextHop,
    RouteNextHopFlags, RouteType, RouteVia,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use portolan_proto::metastate::{Address, Interface, Neighbour, Route, RouteKind};
use portolan_types::MacAddr;

use crate::tap;

const MAIN_TABLE: u32 = libc::RT_TABLE_MAIN as u32;
const LOCAL_TABLE: u32 = libc::RT_TABLE_LOCAL as u32;

pub(super) fn all_links() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetLink(LinkMessage::default())
}

pub(super) fn all_addresses() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetAddress(AddressMessage::default())
}

pub(super) fn all_routes() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetRoute(RouteMessage::default())
}

pub(super) fn all_neighbours() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default())
}

pub(super) fn all_rules() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetRule(RuleMessage::default())
}

/// A policy rule, as far as it can be one of those that a namespace begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) is_v6: bool,
    priority: u32,
    /// Of a rule without conditions.
    table: Option<u32>,
}

impl Rule {
    pub(super) const USUAL: [Rule; 3] = [
        Rule::usual(0, LOCAL_TABLE),
        Rule::usual(32_766, MAIN_TABLE),
        Rule::usual(32_767, libc::RT_TABLE_DEFAULT as u32),
    ];
    pub(super) const USUAL_V6: [Rule; 2] = [
        Rule {
            is_v6: true,
            ..Rule::USUAL[0]
        },
        Rule {
            is_v6: true,
            ..Rule::USUAL[1]
        },
    ];

    const fn usual(priority: u32, table: u32) -> Rule {
        Rule {
            is_v6: false,
            priority,
            table: Some(table),
        }
    }
}

/// The kernel reports the rules of a family by priority. Those of multicast routing are of families of their own.
pub(super) fn rule(message: &RouteNetlinkMessage) -> Option<Rule> {
    let RouteNetlinkMessage::NewRule(rule) = message else {
        return None;
    };
    let is_v6 = match rule.header.family {
        AddressFamily::Inet => false,
        AddressFamily::Inet6 => true,
        _ => return None,
    };
    let mut found = Rule {
        is_v6,
        priority: 0,
        table: None,
    };
    let mut is_plain = rule.header.action == RuleAction::ToTable
        && rule.header.tos == 0
        && !rule.header.flags.contains(RuleFlags::Invert);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => found.priority = *priority,
            RuleAttribute::Table(table) => found.table = Some(*table),
            // No prefix is too short to be suppressed.
            RuleAttribute::Protocol(_) | RuleAttribute::SuppressPrefixLen(u32::MAX) => {}
            _ => is_plain = false,
        }
    }
    found.table = found.table.filter(|_| is_plain);
    Some(found)
}

/// Makes the kernel treat the neighbour as if it had a packet for it.
pub(super) fn use_neighbour(ifindex: u32, address: IpAddr) -> RouteNetlinkMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(address);
    message.header.ifindex = ifindex;
    message.header.flags = NeighbourFlags::Use;
    message.attributes = vec![NeighbourAttribute::Destination(address.into())];
    RouteNetlinkMessage::NewNeighbour(message)
}

pub(super) fn delete_link(ifindex: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = ifindex;
    RouteNetlinkMessage::DelLink(message)
}

pub(super) fn up_quietly(ifindex: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = ifindex;
    message.header.flags = LinkFlags::Up | LinkFlags::Noarp;
    message.header.change_mask = LinkFlags::Up | LinkFlags::Noarp | LinkFlags::Multicast;
    RouteNetlinkMessage::SetLink(message)
}

/// Moves a device to a group.
pub(super) fn set_group(ifindex: u32, group: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = ifindex;
    message.attributes = vec![LinkAttribute::Group(group)];
    RouteNetlinkMessage::SetLink(message)
}

pub(super) fn delete_group(group: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::Group(group)];
    RouteNetlinkMessage::DelLink(message)
}

/// Removes the queueing discipline: frames go to the device's driver directly.
pub(super) fn no_discipline(ifindex: u32) -> RouteNetlinkMessage {
    let mut message = TcMessage::with_index(ifindex as i32);
    message.header.parent = TcHandle::ROOT;
    message.attributes = vec![TcAttribute::Kind("noqueue".to_owned())];
    RouteNetlinkMessage::NewQueueDiscipline(message)
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

/// Whether it is a tap of a server.
pub(super) fn is_own_tap(link: &LinkMessage) -> bool {
    let name = link
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.as_str()),
            _ => None,
        });
    let suffix = name.and_then(|name| name.strip_prefix(tap::PREFIX));
    suffix.is_some_and(|suffix| {
        suffix.starts_with('-') || suffix.bytes().all(|byte| byte.is_ascii_digit())
    })
}

pub(super) fn link(message: &RouteNetlinkMessage) -> Option<Interface> {
    let RouteNetlinkMessage::NewLink(link) = message else {
        return None;
    };
    if is_own_tap(link) {
        return None;
    }
    let mut interface = Interface {
        index: link.header.index,
        name: String::new(),
        mac: MacAddr::default(),
        mtu: 0,
        up: link
            .header
            .flags
            .contains(LinkFlags::Up | LinkFlags::LowerUp),
        managed: false,
    };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Address(bytes) => {
                interface.mac = mac(bytes).unwrap_or_default();
            }
            _ => {}
        }
    }
    Some(interface)
}

fn mac(bytes: &[u8]) -> Option<MacAddr> {
    bytes.try_into().ok().map(MacAddr)
}

pub(super) fn address(message: &RouteNetlinkMessage) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = message else {
        return None;
    };
    // RFC 4862 §5.4: a tentative address is not assigned yet.
    let unusable = AddressHeaderFlags::Tentative | AddressHeaderFlags::Dadfailed;
    let optimistic = AddressHeaderFlags::Optimistic;
    let flags = message.header.flags;
    if flags.intersects(unusable) && !flags.contains(optimistic) {
        return None;
    }
    // On a point-to-point link `Address` is the peer's and `Local` this host's.
    let local = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            AddressAttribute::Local(address) => Some(*address),
            _ => None,
        });
    let address = local.or_else(|| {
        message
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            })
    })?;
    Some(Address {
        interface: message.header.index,
        address,
        prefix: message.header.prefix_len,
    })
}

/// A route and its table.
#[derive(Debug)]
pub(super) struct RankedRoute {
    pub(super) route: Route,
    table: u32,
}

/// Longest prefix first, then the local table, then the lowest metric. The destination keeps the
/// order stable between readings.
pub(super) fn route_order(ranked: &RankedRoute) -> (Reverse<u8>, bool, u32, IpAddr, u32) {
    let route = &ranked.route;
    (
        Reverse(route.prefix),
        ranked.table != LOCAL_TABLE,
        route.metric,
        route.destination,
        route.interface,
    )
}

pub(super) fn route(message: &RouteNetlinkMessage) -> Option<RankedRoute> {
    let RouteNetlinkMessage::NewRoute(message) = message else {
        return None;
    };
    let header = &message.header;
    let dead = RouteFlags::Dead | RouteFlags::Cloned;
    // The metastate has no routes by source or by type of service.
    if header.flags.intersects(dead) || header.source_prefix_length != 0 || header.tos != 0 {
        return None;
    }
    let mut route = Route {
        destination: unspecified(header.address_family)?,
        prefix: header.destination_prefix_length,
        gateway: None,
        interface: 0,
        source: None,
        metric: 0,
        mtu: None,
        kind: kind(header.kind)?,
    };
    let mut table = u32::from(header.table);
    for attribute in &message.attributes {
        if let RouteAttribute::Table(number) = attribute {
            table = *number;
        }
        apply(&mut route, attribute);
    }
    matches!(table, MAIN_TABLE | LOCAL_TABLE).then_some(RankedRoute { route, table })
}

fn unspecified(family: AddressFamily) -> Option<IpAddr> {
    match family {
        AddressFamily::Inet => Some(Ipv4Addr::UNSPECIFIED.into()),
        AddressFamily::Inet6 => Some(Ipv6Addr::UNSPECIFIED.into()),
        _ => None,
    }
}

fn kind(kind: RouteType) -> Option<RouteKind> {
    match kind {
        RouteType::Unicast => Some(RouteKind::Unicast),
        RouteType::Local | RouteType::Anycast => Some(RouteKind::Local),
        RouteType::Broadcast => Some(RouteKind::Broadcast),
        RouteType::Multicast => Some(RouteKind::Multicast),
        RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit => {
            Some(RouteKind::Refuse)
        }
        _ => None,
    }
}

fn apply(route: &mut Route, attribute: &RouteAttribute) {
    match attribute {
        RouteAttribute::Destination(address) => {
            if let Some(address) = ip(address) {
                route.destination = address;
            }
        }
        RouteAttribute::Gateway(address) => route.gateway = ip(address),
        RouteAttribute::Via(RouteVia::Inet(address)) => route.gateway = Some((*address).into()),
        RouteAttribute::Via(RouteVia::Inet6(address)) => route.gateway = Some((*address).into()),
        RouteAttribute::PrefSource(address) => route.source = ip(address),
        RouteAttribute::Oif(index) => route.interface = *index,
        RouteAttribute::Priority(metric) => route.metric = *metric,
        RouteAttribute::Metrics(metrics) => {
            route.mtu = metrics.iter().find_map(|metric| match metric {
                RouteMetric::Mtu(mtu) => Some(*mtu),
                _ => None,
            });
        }
        RouteAttribute::MultiPath(hops) => first_living(route, hops),
        _ => {}
    }
}

/// Of several next hops, uses the first that works.
fn first_living(route: &mut Route, hops: &[RouteNextHop]) {
    let dead = RouteNextHopFlags::Dead | RouteNextHopFlags::Linkdown;
    if let Some(hop) = hops.iter().find(|hop| !hop.flags.intersects(dead)) {
        route.interface = hop.interface_index;
        for attribute in &hop.attributes {
            if let RouteAttribute::Gateway(_) | RouteAttribute::Via(_) = attribute {
                apply(route, attribute);
            }
        }
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

pub(super) fn neighbour(message: &RouteNetlinkMessage) -> Option<Neighbour> {
    let RouteNetlinkMessage::NewNeighbour(message) = message else {
        return None;
    };
    if !usable(message.header.state) || message.header.flags.contains(NeighbourFlags::Proxy) {
        return None;
    }
    let mut address = None;
    let mut link_layer = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                address = Some(IpAddr::V4(*v4));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                address = Some(IpAddr::V6(*v6));
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => link_layer = mac(bytes),
            _ => {}
        }
    }
    Some(Neighbour {
        interface: message.header.ifindex,
        address: address?,
        mac: link_layer?,
    })
}

/// Whether the kernel itself would send to the address in this state (RFC 4861 §7.3.2), which
/// includes stale ones, until they prove wrong.
fn usable(state: NeighbourState) -> bool {
    matches!(
        state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
            | NeighbourState::Noarp
    )
}
