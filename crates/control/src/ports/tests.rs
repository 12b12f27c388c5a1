//! The port namespace follows Linux.

use std::time::Duration;

use super::*;

const REMOTE: &str = "192.0.2.9:80";

fn claim(local: &str) -> Claim {
    Claim {
        protocol: Protocol::Tcp,
        local: local.parse().unwrap(),
        reuse: Reuse::default(),
        v6_only: false,
        uid: 1000,
    }
}

fn reusing(local: &str) -> Claim {
    Claim {
        reuse: Reuse {
            address: true,
            port: false,
        },
        ..claim(local)
    }
}

fn port_sharing(local: &str, uid: u32) -> Claim {
    Claim {
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
    let udp = Claim {
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
    let only = Claim {
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
fn release_is_idempotent_and_leaves_nothing() {
    let mut ports = table();
    let (id, _) = ports.connect(claim("10.0.0.1:0"), remote(), 3).unwrap();
    ports.release(id);
    ports.release(id);
    assert!(ports.is_empty() && ports.ports.is_empty() && ports.flows.is_empty());
}
