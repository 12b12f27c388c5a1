//! Two hosts and the network between them. Each has one device, `eth0`, with an IPv4 and an IPv6 address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use portolan_sys::{sysctl, tap::Tap};

use crate::link::{Counters, Impairment};
use crate::namespace::Namespace;
use crate::wire::Wire;

const MAC_A: &str = "02:00:00:00:77:01";
const MAC_B: &str = "02:00:00:00:77:02";

/// The host's gateway: its router's address on the host's link.
const GATEWAY: &str = "10.77.8.254";

/// Hosts `a` and `b` on one link. Dropping the bed removes the namespaces and the link, also during
/// a panic.
#[derive(Debug)]
pub struct Bed {
    /// Declared first, so that it stops before the namespaces are removed.
    wire: Option<Wire>,
    pub a: Namespace,
    pub b: Namespace,
    /// The namespaces between the hosts, in order from `a` to `b`.
    pub routers: Vec<Namespace>,
}

impl Bed {
    /// The name of each host's device.
    pub const DEVICE: &'static str = "eth0";
    pub const A4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
    pub const B4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
    pub const A6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1));
    pub const B6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2));

    /// Makes two hosts joined by a veth pair: fast, lossless, with all of the kernel's offloads.
    pub fn veth() -> Bed {
        let (a, b) = (Namespace::new("a"), Namespace::new("b"));
        let peer = b.path();
        a.ip(&format!(
            "link add eth0 address {MAC_A} type veth \
             peer name eth0 address {MAC_B} netns {peer}"
        ));
        let bed = Bed {
            wire: None,
            a,
            b,
            routers: Vec::new(),
        };
        bed.configure();
        bed
    }

    /// Makes two hosts with two routers between them, whose common link has an MTU of `mtu` bytes. The hosts
    /// have their usual addresses, and the routers as gateways: in IPv6, by link-local addresses.
    pub fn routed(mtu: u32) -> Bed {
        let (a, b) = (Namespace::new("a"), Namespace::new("b"));
        let routers = [Namespace::new("router-a"), Namespace::new("router-b")];
        for (host, router, mac) in [(&a, &routers[0], MAC_A), (&b, &routers[1], MAC_B)] {
            let peer = router.path();
            host.ip(&format!(
                "link add eth0 address {mac} type veth peer name host netns {peer}"
            ));
            router.enter(|| {
                for family in ["ipv4", "ipv6"] {
                    let forwarding = format!("net/{family}/conf/all/forwarding");
                    sysctl::write(&forwarding, "1").expect("a namespace's routers may be made");
                }
            });
        }
        let peer = routers[1].path();
        routers[0].ip(&format!(
            "link add between mtu {mtu} type veth peer name between mtu {mtu} netns {peer}"
        ));
        let ends = [(Bed::A4, Bed::A6), (Bed::B4, Bed::B6)];
        for (near, router) in routers.iter().enumerate() {
            let (far, (host4, host6)) = (1 - near, ends[near]);
            let (other4, other6) = ends[far];
            router.ip("link set host up");
            router.ip("link set between up");
            router.ip("addr add fe80::fe/64 dev host nodad");
            router.ip(&format!("addr add 10.77.9.{near}/31 dev between"));
            router.ip(&format!("addr add fd77:9::{near}/127 dev between nodad"));
            router.ip(&format!("addr add {GATEWAY}/32 dev host"));
            router.ip(&format!("route add {host4} dev host"));
            router.ip(&format!("route add {host6} dev host"));
            router.ip(&format!("route add {other4} via 10.77.9.{far}"));
            router.ip(&format!("route add {other6} via fd77:9::{far}"));
        }
        for (host, (v4, v6)) in [&a, &b].into_iter().zip(ends) {
            host.ip("link set eth0 up");
            host.ip(&format!("addr add {v4}/32 dev eth0"));
            host.ip(&format!("addr add {v6}/128 dev eth0 nodad"));
            host.ip(&format!("route add {GATEWAY} dev eth0"));
            host.ip(&format!("route add default via {GATEWAY} dev eth0"));
            host.ip("route add default via fe80::fe dev eth0");
        }
        Bed {
            wire: None,
            a,
            b,
            routers: routers.into(),
        }
    }

    /// Makes two hosts on one switch, to which [`Bed::guest`] adds further ones. The switch floods multicast.
    pub fn switched() -> Bed {
        let (a, b) = (Namespace::new("a"), Namespace::new("b"));
        let switch = Namespace::new("switch");
        switch.ip("link add switch type bridge mcast_snooping 0");
        switch.ip("link set switch up");
        plug(&switch, &a, MAC_A, "host-a");
        plug(&switch, &b, MAC_B, "host-b");
        let bed = Bed {
            wire: None,
            a,
            b,
            routers: vec![switch],
        };
        bed.configure();
        bed
    }

    /// Adds a host, `10.77.0.<number>`, to the switch of a bed that has one.
    pub fn guest(&self, number: u8) -> Namespace {
        let guest = Namespace::new("guest");
        let mac = format!("02:00:00:00:77:{number:02x}");
        plug(&self.routers[0], &guest, &mac, &format!("guest{number}"));
        guest.ip("link set eth0 up");
        guest.ip(&format!("addr add 10.77.0.{number}/24 dev eth0"));
        guest.ip(&format!("addr add fd77::{number:x}/64 dev eth0 nodad"));
        guest
    }

    /// Makes two hosts joined by an impaired link, with the same faults in both directions. Frames larger
    /// than the MTU are segmented first, as by a NIC, so that faults affect single segments. The hosts'
    /// neighbour entries are permanent: faults affect transport protocols, not ARP.
    pub fn impaired(impairment: Impairment) -> Bed {
        let (a, b) = (Namespace::new("a"), Namespace::new("b"));
        let taps = [tap_device(&a, MAC_A), tap_device(&b, MAC_B)];
        let wire = Wire::start(taps, impairment);
        let bed = Bed {
            wire: Some(wire),
            a,
            b,
            routers: Vec::new(),
        };
        bed.configure();
        introduce(&bed.a, [Bed::B4, Bed::B6], MAC_B);
        introduce(&bed.b, [Bed::A4, Bed::A6], MAC_A);
        bed
    }

    /// Returns the counters of the impaired link, summed up over both directions; zeros for a veth pair.
    pub fn counters(&self) -> Counters {
        self.wire.as_ref().map(Wire::counters).unwrap_or_default()
    }

    /// Sets the congestion control of the kernel's TCP between the hosts over IPv4. It is set on the route,
    /// because a namespace may not use every algorithm by sysctl.
    pub fn set_kernel_congestion(&self, name: &str) {
        for (host, v4) in [(&self.a, Bed::A4), (&self.b, Bed::B4)] {
            host.ip(&format!(
                "route replace 10.77.0.0/24 dev eth0 proto kernel scope link src {v4} \
                 congctl {name}"
            ));
        }
    }

    fn configure(&self) {
        for (host, v4, v6) in [(&self.a, Bed::A4, Bed::A6), (&self.b, Bed::B4, Bed::B6)] {
            host.ip("link set eth0 up");
            host.ip(&format!("addr add {v4}/24 dev eth0"));
            host.ip(&format!("addr add {v6}/64 dev eth0 nodad"));
        }
    }
}

/// Adds the host's device, whose peer is a port of the switch.
fn plug(switch: &Namespace, host: &Namespace, mac: &str, port: &str) {
    let peer = switch.path();
    host.ip(&format!(
        "link add eth0 address {mac} type veth peer name {port} netns {peer}"
    ));
    switch.ip(&format!("link set {port} master switch up"));
}

/// Makes a tap that is the host's NIC: unlike a channel's, it has ARP, IPv6 and multicast.
fn tap_device(host: &Namespace, mac: &str) -> Tap {
    let tap = host.enter(|| {
        let tap = Tap::create("eth").expect("root may create taps");
        sysctl::write("net/ipv6/conf/eth0/disable_ipv6", "0").expect("the kernel has IPv6");
        tap
    });
    host.ip(&format!("link set eth0 address {mac}"));
    tap
}

fn introduce(host: &Namespace, addresses: [IpAddr; 2], mac: &str) {
    for address in addresses {
        host.ip(&format!(
            "neigh replace {address} lladdr {mac} dev eth0 nud permanent"
        ));
    }
}

#[cfg(test)]
mod tests;
