//! Endpoints of several sockets: distributed flows, copies for members, and who may send.

use std::net::{IpAddr, Ipv6Addr};

use portolan_proto::filter::{
    BindingKey, FlowRow, MemberKey, RecordHeader, SHARE_BUCKETS, ShareKey, mapped,
};
use portolan_types::{ChannelId, FlowKey, MacAddr, Protocol};

use super::bed::{
    Bed, CHANNEL, IFINDEX, OTHER_CHANNEL, OWN_MAC, REDIRECT, SHOT, UNSPEC, any_address, flows,
    outcome, row, sender, shared_row,
};
use super::fragments::piece;
use super::frames::Frame;

fn binding(flow: &FlowKey) -> BindingKey {
    BindingKey::new(flow.protocol, any_address(flow))
}

fn with_flags(flags: u16) -> FlowRow {
    FlowRow {
        flags,
        ..row(CHANNEL)
    }
}

/// A datagram from the flow's peer to a group, and the key of its member row.
fn to_group(flow: &FlowKey) -> (Vec<u8>, MemberKey) {
    let group = if flow.local.is_ipv4() {
        "224.0.0.251"
    } else {
        "ff02::fb"
    };
    let group = group.parse().unwrap();
    let mut frame = Frame {
        destination_mac: MacAddr::of_group(group).unwrap(),
        ..Frame::received(flow)
    };
    frame.destination.set_ip(group);
    let key = MemberKey {
        group: mapped(group),
        interface: IFINDEX,
        port: flow.local.port().to_be_bytes(),
        index: 0,
    };
    (frame.build(), key)
}

#[test]
fn flows_to_a_dealt_binding_spread_over_its_sockets_and_stay() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let binding = binding(&flow);
        for bucket in 0..SHARE_BUCKETS {
            let row = FlowRow {
                slot: bucket % 4,
                ..row(CHANNEL)
            };
            bed.filter.deal(&ShareKey { binding, bucket }, row).unwrap();
        }
        let flags = FlowRow::SHARED | FlowRow::DEALT;
        bed.filter.bind(&binding, with_flags(flags)).unwrap();
        let mut taken = [0; 4];
        for port in 1000..1400 {
            let mut frame = Frame::received(&flow);
            frame.source.set_port(port);
            let frame = frame.build();
            for _ in 0..2 {
                let delivered = outcome(SHOT, &["delivered"]);
                assert_eq!(bed.run("packet_filter", &frame), delivered);
            }
            let slots: Vec<u32> = bed
                .records()
                .iter()
                .map(|(header, _)| header.slot)
                .collect();
            assert_eq!(slots[0], slots[1], "{flow}");
            taken[slots[0] as usize] += 1;
        }
        // 100 each are expected; less than half of that is not chance.
        assert!(taken.iter().all(|&taken| taken > 50), "{taken:?}");
    }
}

#[test]
fn a_datagram_to_a_group_is_copied_to_members_and_goes_on() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let (frame, key) = to_group(&flow);
        let nobody = outcome(UNSPEC, &["pass_not_to_host"]);
        assert_eq!(bed.run("packet_filter", &frame), nobody, "{flow}");
        bed.filter.set_member(&key, row(CHANNEL)).unwrap();
        let second = MemberKey { index: 1, ..key };
        // A member of a removed channel does not keep the others from their copies.
        bed.filter.set_member(&second, row(OTHER_CHANNEL)).unwrap();
        let copied = outcome(UNSPEC, &["delivered_copy", "drop_no_channel"]);
        assert_eq!(bed.run("packet_filter", &frame), copied, "{flow}");
        let records = bed.records();
        assert_eq!((records.len(), &records[0].1), (1, &frame));
        assert_ne!(records[0].0.flags & RecordHeader::COPY, 0);
        assert_eq!(records[0].0.ifindex, IFINDEX);
    }
}

/// The kernel gives each member its own datagram, and the server passes them to the filter one by one.
#[test]
fn a_datagram_that_the_server_lets_in_for_one_member_is_copied_to_that_one() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let (mut frame, key) = to_group(&flow);
        for index in 0..3 {
            let slot = u32::from(index) + 1;
            let row = FlowRow {
                slot,
                ..row(CHANNEL)
            };
            bed.filter
                .set_member(&MemberKey { index, ..key }, row)
                .unwrap();
        }
        frame[..4].copy_from_slice(&2_u32.to_ne_bytes());
        frame[4..6].copy_from_slice(&(CHANNEL.0 as u16 + 1).to_ne_bytes());
        frame[6..10].copy_from_slice(&IFINDEX.to_ne_bytes());
        let copied = outcome(SHOT, &["delivered_copy"]);
        assert_eq!(bed.run("inject_filter", &frame), copied, "{flow}");
        let records = bed.records();
        let slots: Vec<u32> = records.iter().map(|(header, _)| header.slot).collect();
        assert_eq!(slots, [2], "{flow}");
    }
}

/// A fragment of a datagram to a group; the first one has the ports.
fn piece_to_group(flow: &FlowKey, offset: u16, more: bool) -> (Vec<u8>, MemberKey) {
    let (whole, key) = to_group(flow);
    let group = IpAddr::from(Ipv6Addr::from(key.group)).to_canonical();
    let mut to_group = *flow;
    to_group.local.set_ip(group);
    let mut frame = piece(&to_group, 9, offset, more);
    frame[..6].copy_from_slice(&whole[..6]);
    (frame, key)
}

#[test]
fn pieces_of_a_datagram_to_a_group_are_copied_to_its_members() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let (first, key) = piece_to_group(&flow, 0, true);
        let (last, _) = piece_to_group(&flow, 64, false);
        bed.filter.set_member(&key, row(CHANNEL)).unwrap();
        let copied = outcome(UNSPEC, &["delivered_copy"]);
        for frame in [&first, &last] {
            assert_eq!(bed.run("packet_filter", frame), copied, "{flow}");
        }
        let records = bed.records();
        let frames: Vec<_> = records.iter().map(|(_, frame)| frame).collect();
        assert_eq!(frames, [&first, &last]);
        for (header, _) in &records {
            assert_ne!(header.flags & RecordHeader::FRAGMENT, 0);
        }
    }
}

#[test]
fn a_piece_that_comes_before_the_first_is_held_for_the_members() {
    for flow in flows(Protocol::Udp) {
        let mut bed = Bed::new();
        let server = ChannelId::SERVER;
        bed.filter.create_channel(server, 4 << 20).unwrap();
        let (first, key) = piece_to_group(&flow, 0, true);
        let (last, _) = piece_to_group(&flow, 64, false);
        bed.filter.set_member(&key, row(CHANNEL)).unwrap();
        let held = outcome(UNSPEC, &["held_fragment", "pass_not_to_host"]);
        assert_eq!(bed.run("packet_filter", &last), held, "{flow}");
        // The first fragment tells the server to release it.
        let shown = outcome(UNSPEC, &["held_fragment", "delivered_copy"]);
        assert_eq!(bed.run("packet_filter", &first), shown, "{flow}");
        let copied = outcome(SHOT, &["delivered_copy"]);
        let mut again = last.clone();
        again[..6].fill(0);
        again[6..10].copy_from_slice(&IFINDEX.to_ne_bytes());
        assert_eq!(bed.run("inject_filter", &again), copied, "{flow}");
    }
}

#[test]
fn a_membership_is_of_one_device_and_one_port() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let (frame, key) = to_group(&flow);
        let elsewhere = MemberKey {
            interface: IFINDEX + 1,
            ..key
        };
        let otherwise = MemberKey {
            port: 99_u16.to_be_bytes(),
            ..key
        };
        for key in [elsewhere, otherwise] {
            bed.filter.set_member(&key, row(CHANNEL)).unwrap();
        }
        let nobody = outcome(UNSPEC, &["pass_not_to_host"]);
        assert_eq!(bed.run("packet_filter", &frame), nobody, "{flow}");
        assert!(bed.records().is_empty());
    }
}

#[test]
fn a_datagram_to_a_group_from_an_address_that_no_other_host_has_is_not_copied() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let (_, key) = to_group(&flow);
        bed.filter.set_member(&key, row(CHANNEL)).unwrap();
        let sources: &[&str] = if flow.local.is_ipv4() {
            &["127.0.0.1", "224.0.0.1", "255.255.255.255", "10.0.0.1"]
        } else {
            &["::1", "ff02::1"]
        };
        for source in sources.iter().map(|text| text.parse().unwrap()) {
            let mut strange = flow;
            strange.remote.set_ip(source);
            let (frame, _) = to_group(&strange);
            let passed = outcome(UNSPEC, &["drop_martian", "pass_not_to_host"]);
            assert_eq!(bed.run("packet_filter", &frame), passed, "{flow} {source}");
        }
        assert!(bed.records().is_empty());
    }
}

/// Like a DHCP client that has no address yet.
#[test]
fn a_broadcast_from_a_host_without_an_address_is_copied() {
    let [flow, _] = flows(Protocol::Udp);
    let mut bed = Bed::new();
    let everybody = "255.255.255.255".parse().unwrap();
    bed.filter.set_local_addresses(&[], &[everybody]).unwrap();
    bed.filter.bind(&binding(&flow), row(CHANNEL)).unwrap();
    let mut frame = Frame {
        destination_mac: MacAddr::BROADCAST,
        ..Frame::received(&flow)
    };
    frame.destination.set_ip(everybody);
    frame.source.set_ip("0.0.0.0".parse().unwrap());
    let copied = outcome(UNSPEC, &["delivered_copy"]);
    assert_eq!(bed.run("packet_filter", &frame.build()), copied);
}

#[test]
fn a_broadcast_is_copied_to_the_socket_of_its_port() {
    let [flow, _] = flows(Protocol::Udp);
    let mut bed = Bed::new();
    let everybody = "10.0.0.255".parse().unwrap();
    bed.filter.set_local_addresses(&[], &[everybody]).unwrap();
    bed.filter.bind(&binding(&flow), row(CHANNEL)).unwrap();
    let mut frame = Frame {
        destination_mac: MacAddr::BROADCAST,
        ..Frame::received(&flow)
    };
    frame.destination.set_ip(everybody);
    let copied = outcome(UNSPEC, &["delivered_copy"]);
    assert_eq!(bed.run("packet_filter", &frame.build()), copied);
    assert_eq!(bed.records().len(), 1);
}

#[test]
fn only_channels_with_a_socket_on_a_shared_binding_send_from_it() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let binding = binding(&flow);
        bed.filter.bind(&binding, shared_row()).unwrap();
        let frame = Frame::sent(&flow, OWN_MAC).build();
        let foreign = outcome(SHOT, &["drop_foreign"]);
        assert_eq!(bed.run("transmit_filter", &frame), foreign, "{flow}");
        let sender = sender(binding);
        bed.filter.allow_sender(&sender, 0).unwrap();
        let sent = outcome(REDIRECT, &["sent"]);
        assert_eq!(bed.run("transmit_filter", &frame), sent, "{flow}");
        bed.filter.forbid_sender(&sender).unwrap();
        assert_eq!(bed.run("transmit_filter", &frame), foreign, "{flow}");
    }
}
