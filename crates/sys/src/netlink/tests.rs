//! The monitor's snapshot matches what `ip` has set up, and follows changes.

use std::os::fd::AsRawFd;
use std::time::Duration;

use portolan_proto::metastate::RouteKind;
use portolan_types::MacAddr;

use std::cmp::Reverse;

use super::*;
use crate::tap::Tap;
use crate::testing::{in_fresh_namespace, ip};
use crate::{clock, device, namespace, wait};

const PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 8]);

/// Two joined devices, `p0` with addresses.
fn set_up() {
    ip("link set lo up");
    ip("link add p0 address 02:00:00:00:00:07 type veth peer name p1 address 02:00:00:00:00:08");
    ip("link set p0 up");
    ip("link set p1 up");
    ip("addr add 10.1.0.1/24 dev p0");
    ip("addr add fd01::1/64 dev p0 nodad");
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn p0(monitor: &Monitor) -> u32 {
    let named = |link: &&Interface| link.name == "p0";
    monitor.tables.links.iter().find(named).unwrap().index
}

fn route_to<'a>(metastate: &'a Metastate, destination: &str) -> Option<&'a Route> {
    let destination = address(destination);
    metastate
        .routes
        .iter()
        .find(|route| route.destination == destination)
}

/// Lets the monitor run until `condition` holds, at most two seconds.
fn until(monitor: &mut Monitor, condition: impl Fn(&Metastate) -> bool) {
    let deadline = clock::now() + Duration::from_secs(2);
    while !condition(&monitor.tables().snapshot(&BTreeSet::new())) {
        assert!(clock::now() < deadline, "{monitor:#?}");
        let mut fds = [wait::pollfd(monitor.as_fd().as_raw_fd(), libc::POLLIN)];
        wait::ppoll(&mut fds, Some(deadline), None).unwrap();
        monitor.process(clock::now()).unwrap();
    }
}

#[test]
fn the_first_snapshot_is_complete() {
    in_fresh_namespace(|| {
        set_up();
        ip("route add default via 10.1.0.254 src 10.1.0.1 mtu 1300");
        ip("route add unreachable 10.66.0.0/16");
        ip("route add 10.67.0.0/16 via 10.1.0.253 table 99");
        ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:08 dev p0 nud stale");
        ip("neigh add 10.1.0.3 dev p0 nud none");
        let monitor = Monitor::new().unwrap();
        let index = p0(&monitor);
        let metastate = monitor.tables().snapshot(&BTreeSet::from([index]));

        let interface = metastate
            .interfaces
            .iter()
            .find(|one| one.index == index)
            .unwrap();
        assert_eq!(interface.mac, MacAddr([2, 0, 0, 0, 0, 7]));
        assert!(interface.up && interface.managed && interface.mtu == 1500);
        assert!(
            metastate
                .interfaces
                .iter()
                .filter(|one| one.managed)
                .count()
                == 1
        );

        for (text, prefix) in [("10.1.0.1", 24), ("fd01::1", 64)] {
            let expected = Address {
                interface: index,
                address: address(text),
                prefix,
            };
            assert!(metastate.addresses.contains(&expected), "{text}");
            assert_eq!(route_to(&metastate, text).unwrap().kind, RouteKind::Local);
        }

        let default = route_to(&metastate, "0.0.0.0").unwrap();
        assert_eq!(default.gateway, Some(address("10.1.0.254")));
        assert_eq!(default.source, Some(address("10.1.0.1")));
        assert_eq!((default.mtu, default.interface), (Some(1300), index));
        let refused = route_to(&metastate, "10.66.0.0").unwrap();
        assert_eq!(refused.kind, RouteKind::Refuse);
        assert_eq!(route_to(&metastate, "10.67.0.0"), None);
        assert!(route_to(&metastate, "fd01::").is_some());

        let neighbours: Vec<IpAddr> = metastate
            .neighbours
            .iter()
            .filter(|one| one.interface == index && one.address.is_ipv4())
            .map(|one| one.address)
            .collect();
        assert_eq!(neighbours, [address("10.1.0.2")]);
    });
}

#[test]
fn routes_are_sorted_by_prefix_then_metric() {
    in_fresh_namespace(|| {
        set_up();
        ip("route add 10.9.0.0/16 via 10.1.0.3 metric 50");
        ip("route add 10.9.0.0/16 via 10.1.0.2 metric 10");
        ip("route add 10.9.9.0/24 via 10.1.0.4 metric 99");
        let routes = Monitor::new()
            .unwrap()
            .tables()
            .snapshot(&BTreeSet::new())
            .routes;
        assert!(routes.is_sorted_by_key(|route| Reverse(route.prefix)));
        let gateways: Vec<_> = routes
            .iter()
            .filter(|route| route.destination.to_string().starts_with("10.9."))
            .filter_map(|route| route.gateway)
            .collect();
        let expected = ["10.1.0.4", "10.1.0.2", "10.1.0.3"].map(address);
        assert_eq!(gateways, expected);
    });
}

#[test]
fn changes_are_followed() {
    in_fresh_namespace(|| {
        set_up();
        let mut monitor = Monitor::new().unwrap();
        let index = p0(&monitor);
        ip("route add 10.9.0.0/16 via 10.1.0.2");
        until(&mut monitor, |now| route_to(now, "10.9.0.0").is_some());
        ip("addr add 10.2.0.1/24 dev p0");
        until(&mut monitor, |now| {
            now.addresses
                .iter()
                .any(|one| one.address == address("10.2.0.1"))
        });
        ip("link set p0 mtu 1400");
        until(&mut monitor, |now| {
            now.interfaces
                .iter()
                .any(|one| one.index == index && one.mtu == 1400)
        });
        ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:08 dev p0");
        until(&mut monitor, |now| {
            let known = |one: &Neighbour| one.address == address("10.1.0.2") && one.mac == PEER;
            now.neighbours.iter().any(known)
        });
        // The kernel silently drops the IPv4 routes.
        ip("link set p0 down");
        until(&mut monitor, |now| route_to(now, "10.9.0.0").is_none());
    });
}

#[test]
fn nothing_new_is_no_change() {
    in_fresh_namespace(|| {
        // Other devices change by themselves for two seconds: carrier, IPv6 addresses.
        ip("link set lo up");
        let mut monitor = Monitor::new().unwrap();
        ip("route add 10.9.0.0/16 dev lo");
        assert!(monitor.process(clock::now()).unwrap());
        ip("route add 10.8.0.0/16 dev lo");
        ip("route del 10.8.0.0/16 dev lo");
        assert!(!monitor.process(clock::now()).unwrap());
    });
}

#[test]
fn lost_events_are_made_up_for() {
    in_fresh_namespace(|| {
        set_up();
        let mut monitor = Monitor::new().unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&monitor.events, 1).unwrap();
        for number in 0..50 {
            ip(&format!("route add 10.9.{number}.0/24 via 10.1.0.2"));
        }
        assert!(monitor.process(clock::now()).unwrap());
        let metastate = monitor.tables().snapshot(&BTreeSet::new());
        for number in 0..50 {
            assert!(route_to(&metastate, &format!("10.9.{number}.0")).is_some());
        }
    });
}

#[test]
fn the_kernel_resolves_a_neighbour_on_request() {
    in_fresh_namespace(|| {
        set_up();
        let other = namespace::create().unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.as_raw_fd());
        ip(&format!("link set p1 netns {path}"));
        let peer = std::thread::spawn(move || {
            namespace::enter(&other).unwrap();
            ip("link set p1 up");
            ip("addr add 10.1.0.2/24 dev p1");
            other
        });
        let _alive = peer.join().unwrap();

        let mut monitor = Monitor::new().unwrap();
        let index = p0(&monitor);
        monitor.resolve(index, address("10.1.0.2")).unwrap();
        until(&mut monitor, |now| {
            let known = |one: &Neighbour| one.address == address("10.1.0.2") && one.mac == PEER;
            now.neighbours.iter().any(known)
        });
    });
}

#[test]
fn resolving_on_a_device_that_is_not_there_is_an_error() {
    in_fresh_namespace(|| {
        let mut monitor = Monitor::new().unwrap();
        let error = monitor.resolve(4242, address("10.1.0.2")).unwrap_err();
        assert_eq!(error.errno, Errno::NODEV);
    });
}

#[test]
fn a_device_is_deleted_and_one_that_has_gone_is_no_error() {
    in_fresh_namespace(|| {
        set_up();
        let mut monitor = Monitor::new().unwrap();
        let index = p0(&monitor);
        delete_devices(&[index]).unwrap();
        until(&mut monitor, |state| {
            state.interfaces.iter().all(|i| i.index != index)
        });
        delete_devices(&[index]).unwrap();
    });
}

#[test]
fn taps_are_deleted_together_whoever_has_their_descriptors_and_no_other_device() {
    in_fresh_namespace(|| {
        let taps: Vec<Tap> = (0..20).map(|_| Tap::create("doomed").unwrap()).collect();
        let other = Tap::create("kept").unwrap();
        let gone = taps[3].ifindex;
        delete_devices(&[gone]).unwrap();
        let devices: Vec<u32> = taps.iter().map(|tap| tap.ifindex).collect();
        delete_devices(&devices).unwrap();
        for tap in &taps {
            assert!(device::by_name(&tap.name).is_err(), "{}", tap.name);
        }
        assert_eq!(device::by_name(&other.name).unwrap().index, other.ifindex);
        delete_devices(&devices).unwrap();
        delete_devices(&[]).unwrap();
    });
}

#[test]
fn a_table_that_cannot_be_read_is_read_later() {
    in_fresh_namespace(|| {
        set_up();
        let mut monitor = Monitor::new().unwrap();
        let requests = std::mem::replace(&mut monitor.requests, Requests::broken());
        ip("addr add 10.9.0.1/24 dev p0");
        let now = clock::now();
        assert!(monitor.process(now).is_err());
        let due = monitor.deadline().expect("tables are stale");
        assert!(due > now);

        // No further event arrives.
        monitor.requests = requests;
        assert!(monitor.process(due).unwrap());
        let snapshot = monitor.tables().snapshot(&BTreeSet::new());
        assert_eq!(
            route_to(&snapshot, "10.9.0.1").unwrap().kind,
            RouteKind::Local
        );
        assert_eq!(monitor.deadline(), None);
    });
}

#[test]
fn a_storm_of_changes_is_read_with_pauses() {
    in_fresh_namespace(|| {
        set_up();
        let mut monitor = Monitor::new().unwrap();
        let now = clock::now();
        monitor.rest(now, Duration::from_millis(5));
        ip("neigh add 10.1.0.9 lladdr 02:00:00:00:00:08 dev p0");
        assert!(!monitor.process(now).unwrap());
        let due = monitor.deadline().expect("the table is stale");
        assert_eq!(due, now + Duration::from_millis(45));
        assert!(monitor.process(due).unwrap());
    });
}
