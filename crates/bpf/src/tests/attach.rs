//! Attaching and detaching, and frames larger than a test run allows: on the loopback device of a
//! network namespace that lives for one test.

use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;

use portolan_netns::Namespace;
use portolan_types::{FlowKey, Protocol};

use super::bed::{Bed, CHANNEL, IFINDEX, row};

pub(super) fn in_fresh_namespace(test: impl FnOnce() + Send) {
    let namespace = Namespace::new("filter");
    namespace.ip("link set lo mtu 65536");
    namespace.enter(test);
}

/// The output of a command of the host, run in this thread's namespace.
pub(super) fn run(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap())
        .args(words)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn qdiscs() -> String {
    run("tc qdisc show dev lo")
}

fn filters() -> usize {
    run("tc filter show dev lo ingress").matches("bpf").count()
}

#[test]
fn detaching_leaves_the_device_as_it_was() {
    in_fresh_namespace(|| {
        let mut bed = Bed::new();
        bed.filter.attach_interface(IFINDEX).unwrap();
        bed.filter.attach_interface(IFINDEX).unwrap();
        assert!(qdiscs().contains("clsact"));
        assert!(run("tc filter show dev lo ingress").contains("packet_filter"));
        bed.filter.detach_interface(IFINDEX).unwrap();
        bed.filter.detach_interface(IFINDEX).unwrap();
        assert!(!qdiscs().contains("clsact"));
    });
}

#[test]
fn another_users_discipline_and_filter_stay() {
    in_fresh_namespace(|| {
        run("tc qdisc add dev lo clsact");
        let mut bed = Bed::new();
        bed.filter.attach_interface(IFINDEX).unwrap();
        bed.filter.detach_interface(IFINDEX).unwrap();
        assert!(qdiscs().contains("clsact"));
    });
}

#[test]
fn a_discipline_of_ours_that_others_have_come_to_use_stays() {
    in_fresh_namespace(|| {
        let mut bed = Bed::new();
        bed.filter.attach_interface(IFINDEX).unwrap();
        run("tc filter add dev lo egress protocol ip prio 9 u32 match u32 0 0 flowid 1:1");
        bed.filter.detach_interface(IFINDEX).unwrap();
        assert!(run("tc filter show dev lo egress").contains("u32"));
    });
}

#[test]
fn the_filter_of_a_dead_server_is_replaced() {
    in_fresh_namespace(|| {
        let mut dead = Bed::new();
        dead.filter.attach_interface(IFINDEX).unwrap();
        let before = run("tc filter show dev lo ingress");
        drop(dead);
        let mut bed = Bed::new();
        bed.filter.attach_interface(IFINDEX).unwrap();
        assert_ne!(run("tc filter show dev lo ingress"), before);
        assert_eq!(filters(), before.matches("bpf").count());
        bed.filter.detach_interface(IFINDEX).unwrap();
        assert!(!qdiscs().contains("clsact"));
    });
}

#[test]
fn a_filter_that_cannot_be_put_back_is_tried_again() {
    in_fresh_namespace(|| {
        run("ip link add d0 type veth peer name d1");
        let shown = run("ip -o link show d0");
        let index = shown.split_once(':').unwrap().0.parse().unwrap();
        let mut bed = Bed::new();
        bed.filter.attach_interface(index).unwrap();
        run("ip link del d0");
        for _ in 0..2 {
            assert!(bed.filter.restore_interface(index).is_err());
        }
    });
}

#[test]
fn datagrams_up_to_the_longest_are_copied_whole_from_a_live_device() {
    in_fresh_namespace(|| {
        let mut bed = Bed::new();
        bed.filter
            .set_local_addresses(&[Ipv4Addr::LOCALHOST.into()], &[])
            .unwrap();
        bed.filter.attach_interface(IFINDEX).unwrap();
        let port = "127.0.0.1:9000".parse().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let flow = FlowKey {
            protocol: Protocol::Udp,
            local: port,
            remote: socket.local_addr().unwrap(),
        };
        bed.filter.steer(&flow, row(CHANNEL)).unwrap();
        for length in [
            1, 2000, 4000, 4023, 4200, 9100, 9200, 16300, 16400, 32700, 32800, 65507,
        ] {
            let payload: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
            socket.send_to(&payload, port).unwrap();
            let records = bed.records();
            assert_eq!(records.len(), 1, "{length} bytes");
            assert_eq!(&records[0].1[42..], &payload[..], "{length} bytes");
        }
        bed.filter.detach_interface(IFINDEX).unwrap();
    });
}
