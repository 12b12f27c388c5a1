//! The port namespace follows Linux.

use std::time::Duration;

use super::*;

const REMOTE: &str = "192.0.2.9:80";

fn claim(local: &str) -> PortClaim {
    PortClaim {
        protocol: Protocol::Tcp,
        local: local.parse().unwrap(),
        reuse: Reuse::default(),
        v6_only: false,
        uid: 1000,
    }
}

fn reusing(local: &str) -> PortClaim {
    PortClaim {
        reuse: Reuse {
            address: true,
            port: false,
        },
        ..claim(local)
    }
}

fn port_sharing(local: &str, uid: u32) -> PortClaim {
    PortClaim {
        reuse: Reuse {
            address: false,
            port: true,
        },
        uid,
        ..claim(local)
    }
}

fn table() -> PortTable {
    PortTable::new(20000..=20003)
}

fn remote() -> SocketAddr {
    REMOTE.parse().unwrap()
}

#[test]
fn two_binds_of_one_endpoint_conflict() {
    let mut ports = table();
    ports.bind(claim("10.0.0.1:80"), 0).unwrap();
    assert_eq!(ports.bind(claim("10.0.0.1:80"), 0), Err(ClaimError::InUse));
    assert_eq!(ports.bind(claim("0.0.0.0:80"), 0), Err(ClaimError::InUse));
    ports.bind(claim("10.0.0.2:80"), 0).unwrap();
}

#[test]
fn tcp_and_udp_have_separate_ports() {
    let mut ports = table();
    ports.bind(claim("0.0.0.0:53"), 0).unwrap();
    let udp = PortClaim {
        protocol: Protocol::Udp,
        ..claim("0.0.0.0:53")
    };
    ports.bind(udp, 0).unwrap();
}

#[test]
fn a_dual_stack_any_covers_ipv4_unless_v6_only() {
    let mut ports = table();
    let (dual, _) = ports.bind(claim("[::]:80"), 0).unwrap();
    assert_eq!(ports.bind(claim("0.0.0.0:80"), 0), Err(ClaimError::InUse));
    ports.release(dual);
    let only = PortClaim {
        v6_only: true,
        ..claim("[::]:80")
    };
    ports.bind(only, 0).unwrap();
    ports.bind(claim("0.0.0.0:80"), 0).unwrap();
}

#[test]
fn a_mapped_address_is_the_ipv4_address() {
    let mut ports = table();
    ports.bind(claim("[::ffff:10.0.0.1]:80"), 0).unwrap();
    assert_eq!(ports.bind(claim("10.0.0.1:80"), 0), Err(ClaimError::InUse));
}

#[test]
fn reuse_address_shares_with_connections_but_not_with_a_listener() {
    let mut ports = table();
    let (first, _) = ports.bind(reusing("0.0.0.0:80"), 0).unwrap();
    let (second, _) = ports.bind(reusing("0.0.0.0:80"), 0).unwrap();
    ports.listen(first).unwrap();
    assert_eq!(ports.listen(second), Err(ClaimError::InUse));
    assert_eq!(ports.bind(reusing("0.0.0.0:80"), 0), Err(ClaimError::InUse));
    ports.release(second);
    ports.join(reusing("10.0.0.1:80"), remote()).unwrap();
    ports.release(first);
    ports.bind(reusing("0.0.0.0:80"), 0).unwrap();
    assert_eq!(ports.bind(claim("0.0.0.0:80"), 0), Err(ClaimError::InUse));
}

#[test]
fn a_listener_that_stops_keeps_its_port_and_listens_again_beside_its_connections_only_if_all_reuse()
{
    for (kind, is_free) in [(claim("0.0.0.0:80"), false), (reusing("0.0.0.0:80"), true)] {
        let mut ports = table();
        let (listener, _) = ports.bind(kind, 0).unwrap();
        ports.listen(listener).unwrap();
        ports.stop_listening(listener);
        assert_eq!(ports.bind(claim("0.0.0.0:80"), 0), Err(ClaimError::InUse));
        ports.listen(listener).unwrap();
        let accepted = PortClaim {
            local: "10.0.0.1:80".parse().unwrap(),
            ..kind
        };
        let flow = ports.join(accepted, remote()).unwrap();
        ports.stop_listening(listener);
        assert_eq!(ports.listen(listener).is_ok(), is_free);
        ports.release(flow);
        ports.listen(listener).unwrap();
    }
}

#[test]
fn reuse_port_shares_a_listener_within_one_user() {
    let mut ports = table();
    let (first, _) = ports.bind(port_sharing("0.0.0.0:80", 1000), 0).unwrap();
    ports.listen(first).unwrap();
    let (second, _) = ports.bind(port_sharing("0.0.0.0:80", 1000), 0).unwrap();
    ports.listen(second).unwrap();
    assert_eq!(
        ports.bind(port_sharing("0.0.0.0:80", 1001), 0),
        Err(ClaimError::InUse)
    );
}

#[test]
fn ephemeral_ports_start_at_random_and_run_out() {
    let mut ports = table();
    let mut got: Vec<u16> = (0..4)
        .map(|_| ports.bind(claim("0.0.0.0:0"), 2).unwrap().1.port())
        .collect();
    assert_eq!(got[0], 20002);
    got.sort_unstable();
    assert_eq!(got, [20000, 20001, 20002, 20003]);
    assert_eq!(ports.bind(claim("0.0.0.0:0"), 2), Err(ClaimError::InUse));
}

#[test]
fn connections_to_different_peers_share_a_port() {
    let mut ports = PortTable::new(20000..=20000);
    ports.connect(claim("10.0.0.1:0"), remote(), 0).unwrap();
    assert_eq!(
        ports.connect(claim("10.0.0.1:0"), remote(), 0),
        Err(ClaimError::Exhausted)
    );
    let other = "192.0.2.10:80".parse().unwrap();
    ports.connect(claim("10.0.0.1:0"), other, 0).unwrap();
}

#[test]
fn a_connection_has_a_port_of_its_own_as_long_as_there_is_one() {
    let mut ports = PortTable::new(20000..=20019);
    let peer = |i: u16| SocketAddr::new([192, 0, 2, 9].into(), i);
    let opener = |ports: &mut PortTable, i| ports.connect(reusing("10.0.0.1:0"), peer(i), 0);
    for i in 0..16 {
        let (_, local) = opener(&mut ports, i).unwrap();
        assert_eq!(local.port(), 20000 + i);
        ports.bind(reusing(&local.to_string()), 0).unwrap();
    }
    let mut ports = PortTable::new(20000..=20019);
    for i in 0..20 {
        let plain = ports.connect(claim("10.0.0.1:0"), peer(i), 0).unwrap();
        assert_eq!(plain.1.port(), 20000 + i);
    }
    let (_, shared) = opener(&mut ports, 20).unwrap();
    assert_eq!(shared.port(), 20000, "there is none");
    assert_eq!(
        ports.bind(reusing(&shared.to_string()), 0),
        Err(ClaimError::InUse),
        "the other connection there does not share"
    );
}

#[test]
fn a_connection_within_the_host_takes_no_port_whose_last_one_is_still_closing_at_the_other_end() {
    let mut ports = table();
    let listener: SocketAddr = "127.0.0.1:80".parse().unwrap();
    let opener = |ports: &mut PortTable| ports.connect(claim("127.0.0.1:0"), listener, 0);
    let (first, local) = opener(&mut ports).unwrap();
    let accepted = ports.join(claim("127.0.0.1:80"), local).unwrap();
    ports.release(first);
    let (second, other) = opener(&mut ports).unwrap();
    assert_ne!(other, local);
    ports.join(claim("127.0.0.1:80"), other).unwrap();
    ports.release(second);
    ports.release(accepted);
    assert_eq!(opener(&mut ports).unwrap().1, local);
}

#[test]
fn a_connection_never_takes_a_bound_port() {
    let mut ports = PortTable::new(20000..=20000);
    ports.bind(reusing("0.0.0.0:20000"), 0).unwrap();
    assert_eq!(
        ports.connect(reusing("10.0.0.1:0"), remote(), 0),
        Err(ClaimError::Exhausted)
    );
}

#[test]
fn a_held_back_port_needs_reuse_address_until_it_expires() {
    let mut ports = table();
    let now = Instant::from_millis(1);
    let until = now + Duration::from_secs(60);
    let flow = ports.join(claim("10.0.0.1:80"), remote()).unwrap();
    ports.hold_back(flow, until);
    assert_eq!(ports.bind(claim("0.0.0.0:80"), 0), Err(ClaimError::InUse));
    assert_eq!(
        ports.join(claim("10.0.0.1:80"), remote()),
        Err(ClaimError::FlowExists)
    );
    let (taken, _) = ports.bind(reusing("0.0.0.0:80"), 0).unwrap();
    ports.listen(taken).unwrap();
    ports.release(taken);
    assert_eq!(ports.expire(now), Some(until));
    assert_eq!(ports.expire(until), None);
    assert!(ports.is_empty());
    ports.bind(claim("0.0.0.0:80"), 0).unwrap();
}

#[test]
fn a_peer_may_open_a_held_back_flow_but_not_a_live_one() {
    let mut ports = table();
    let until = Instant::from_millis(1);
    let flow = ports.join(claim("10.0.0.1:80"), remote()).unwrap();
    let live = ports.admit(claim("10.0.0.1:80"), remote());
    assert_eq!(live, Err(ClaimError::FlowExists));
    ports.hold_back(flow, until);
    let next = ports.admit(claim("10.0.0.1:80"), remote()).unwrap();
    assert_eq!(ports.expire(until), None);
    ports.release(next);
    assert!(ports.is_empty());
}

#[test]
fn a_port_whose_connection_lingers_is_shared_as_with_a_live_one() {
    let start = Instant::ZERO;
    let until = start + Duration::from_secs(60);
    for (old, new, is_free) in [
        (claim("10.0.0.1:80"), claim("10.0.0.1:80"), false),
        (claim("10.0.0.1:80"), reusing("0.0.0.0:80"), false),
        (reusing("10.0.0.1:80"), claim("10.0.0.1:80"), false),
        (reusing("10.0.0.1:80"), reusing("10.0.0.1:80"), true),
        (claim("10.0.0.1:80"), claim("10.0.0.2:80"), true),
    ] {
        let mut ports = table();
        let flow = ports.join(old, remote()).unwrap();
        assert!(!ports.linger(flow, until, 9));
        assert_eq!(ports.bind(new, 0).is_ok(), is_free, "{old:?} {new:?}");
        assert_eq!(ports.expire(start + Duration::from_secs(59)), Some(until));
        assert_eq!(ports.expire(until), None);
        assert_eq!(ports.len(), usize::from(is_free));
    }
}

#[test]
fn a_connection_takes_the_place_of_one_that_lingers_if_its_port_was_chosen() {
    let until = Instant::ZERO + Duration::from_secs(60);
    let mut ports = table();
    let first = ports.join(claim("10.0.0.1:20000"), remote()).unwrap();
    assert_eq!(
        ports.join(claim("10.0.0.1:20000"), remote()),
        Err(ClaimError::FlowExists)
    );
    ports.linger(first, until, 9);
    for random in 0..4 {
        let (other, local) = ports
            .connect(claim("10.0.0.1:0"), remote(), random)
            .unwrap();
        assert_ne!(local.port(), 20000);
        ports.release(other);
    }
    ports.join(claim("10.0.0.1:20000"), remote()).unwrap();
    assert_eq!(ports.expire(Instant::ZERO), None, "it lingers no more");
    assert_eq!(ports.len(), 1);
}

#[test]
fn of_too_many_that_linger_the_one_that_would_end_next_goes() {
    let after = |seconds| Instant::ZERO + Duration::from_secs(seconds);
    let mut ports = table();
    let flows: Vec<ClaimId> = (0..3)
        .map(|i| ports.connect(claim("10.0.0.1:0"), remote(), i).unwrap().0)
        .collect();
    assert!(!ports.linger(flows[0], after(5), 2));
    assert!(!ports.linger(flows[1], after(3), 2));
    assert!(!ports.linger(flows[1], after(9), 2), "for longer");
    assert!(ports.linger(flows[2], after(7), 2));
    assert_eq!(ports.claim(flows[0]), None);
    assert!(!ports.linger(flows[0], after(8), 2), "it is gone");
    assert_eq!(ports.expire(after(7)), Some(after(9)));
    assert_eq!(ports.expire(after(9)), None);
    assert!(ports.is_empty());
}

#[test]
fn release_is_idempotent_and_leaves_nothing() {
    let mut ports = table();
    let (id, _) = ports.connect(claim("10.0.0.1:0"), remote(), 3).unwrap();
    ports.release(id);
    ports.release(id);
    assert!(ports.is_empty() && ports.ports.is_empty() && ports.flows.is_empty());
}

fn only_v6(local: &str) -> PortClaim {
    PortClaim {
        v6_only: true,
        ..claim(local)
    }
}

#[test]
fn a_claim_covers_its_own_protocol_address_and_port() {
    let covers = |own: &str, other: &str| claim(own).covers(&claim(other));
    assert!(covers("10.0.0.1:80", "10.0.0.1:80"));
    assert!(covers("10.0.0.1:80", "[::ffff:10.0.0.1]:80"));
    assert!(covers("0.0.0.0:80", "10.0.0.1:80"));
    assert!(covers("[::]:80", "[::1]:80"));
    assert!(covers("[::]:80", "0.0.0.0:80"));
    for (own, other) in [
        ("10.0.0.1:80", "10.0.0.1:81"),
        ("10.0.0.1:80", "10.0.0.2:80"),
        ("10.0.0.1:80", "0.0.0.0:80"),
        ("10.0.0.1:80", "[::]:80"),
        ("0.0.0.0:80", "[::]:80"),
        ("0.0.0.0:80", "[::1]:80"),
        ("[::1]:80", "[::]:80"),
    ] {
        assert!(!covers(own, other), "{own} {other}");
    }
    let udp = PortClaim {
        protocol: Protocol::Udp,
        ..claim("10.0.0.1:80")
    };
    assert!(!udp.covers(&claim("10.0.0.1:80")));
    assert!(only_v6("[::]:80").covers(&only_v6("[::]:80")));
    assert!(!only_v6("[::]:80").covers(&claim("[::]:80")));
    assert!(!only_v6("[::]:80").covers(&claim("10.0.0.1:80")));
}

#[test]
fn a_user_has_what_its_claims_cover() {
    let mut ports = table();
    let (id, _) = ports.bind(claim("10.0.0.1:80"), 0).unwrap();
    assert!(ports.has(&claim("10.0.0.1:80")));
    assert!(!ports.has(&claim("0.0.0.0:80")));
    let other = PortClaim {
        uid: 1001,
        ..claim("10.0.0.1:80")
    };
    assert!(!ports.has(&other));
    ports.release(id);
    assert!(!ports.has(&claim("10.0.0.1:80")));
}
