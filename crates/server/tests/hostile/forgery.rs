//! Sending in the name of others.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::ReplyBody;
use portolan_stack::Session;
use portolan_types::{FlowKey, Protocol, Slot};
use portolan_wire::vnet::{Gso, VnetHeader};

use crate::capture::Capture;
use crate::common::{Library, control_path, start_server};
use crate::frames::{Forgery, ICMP, MARK, UDP, arp, is_marked, v4};
use crate::meter::Meter;
use crate::{TIMEOUT, Victim, assert_serves_others, counter, hostile_library, open_to_b};

const STRANGER_MAC: [u8; 6] = [2, 0, 0, 0, 0x99, 0x99];

/// Every reason for which the transmit filter drops.
const REASONS: [&str; 10] = [
    "drop_no_channel",
    "drop_source_mac",
    "drop_vlan",
    "drop_not_ip",
    "drop_malformed",
    "drop_protocol",
    "drop_no_flow",
    "drop_foreign",
    "drop_source_address",
    "drop_offload",
];

pub(crate) fn flow_of(library: &Library, slot: Slot) -> FlowKey {
    match library.stack.get(slot) {
        Some(Session::Tcp(session)) => session.flow,
        other => panic!("{other:?}"),
    }
}

/// Returns the MAC addresses of this host's device and of the neighbour on its wire.
pub(crate) fn macs(library: &Library) -> ([u8; 6], [u8; 6]) {
    let metastate = library.metastate();
    let device = metastate.interfaces.iter().find(|i| i.managed).unwrap();
    let peer = metastate.neighbours.iter().find(|n| n.address == Bed::B4);
    (device.mac.0, peer.unwrap().mac.0)
}

/// Returns which drop counters moved during `action`.
pub(crate) fn drops_of(path: &Path, action: impl FnOnce()) -> Vec<&'static str> {
    let read = || REASONS.map(|reason| counter(path, "transmit", reason));
    let before = read();
    action();
    let after = read();
    let moved = REASONS.iter().zip(before.iter().zip(after));
    moved
        .filter(|(_, (before, after))| **before != *after)
        .map(|(reason, _)| *reason)
        .collect()
}

pub(crate) fn write(library: &Library, frame: &[u8]) {
    library.tap.0.write(&[IoSlice::new(frame)]).unwrap();
}

/// Forgeries of a TCP segment, each with the counter it must move.
pub(crate) fn forgeries(
    own: &Forgery,
    victims: &Forgery,
) -> Vec<(&'static str, Forgery, &'static str)> {
    let change = |change: fn(&mut Forgery)| {
        let mut forgery = own.clone();
        change(&mut forgery);
        forgery
    };
    vec![
        ("another's flow", victims.clone(), "drop_foreign"),
        (
            "stranger's MAC",
            change(|f| f.source_mac = STRANGER_MAC),
            "drop_source_mac",
        ),
        (
            "no MAC",
            change(|f| f.source_mac = [0; 6]),
            "drop_source_mac",
        ),
        (
            "peer's MAC",
            change(|f| f.source_mac = f.destination_mac),
            "drop_source_mac",
        ),
        (
            "peer's address",
            change(|f| f.source = f.destination),
            "drop_no_flow",
        ),
        (
            "nobody's address",
            change(|f| f.source = Ipv4Addr::new(10, 77, 0, 99)),
            "drop_no_flow",
        ),
        (
            "other source port",
            change(|f| f.source_port += 1),
            "drop_no_flow",
        ),
        (
            "well-known source port",
            change(|f| f.source_port = 22),
            "drop_no_flow",
        ),
        (
            "other peer port",
            change(|f| f.destination_port += 1),
            "drop_no_flow",
        ),
        (
            "other peer",
            change(|f| f.destination = Ipv4Addr::new(10, 77, 0, 3)),
            "drop_no_flow",
        ),
        ("UDP for TCP", change(|f| f.protocol = UDP), "drop_no_flow"),
        ("ICMP", change(|f| f.protocol = ICMP), "drop_protocol"),
        ("SCTP", change(|f| f.protocol = 132), "drop_protocol"),
        (
            "first fragment",
            change(|f| f.fragment = 0x2000),
            "drop_malformed",
        ),
        (
            "later fragment",
            change(|f| f.fragment = 0x0010),
            "drop_malformed",
        ),
        (
            "IP options",
            change(|f| f.ip_options = true),
            "drop_malformed",
        ),
        ("VLAN tag", change(|f| f.vlan = true), "drop_vlan"),
    ]
}

#[test]
fn forged_segments_never_reach_the_wire_and_genuine_ones_do() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (_, _near, slot, _peer) = open_to_b(&bed, &mut hostile);
    let (device, peer) = macs(&hostile);
    let own = Forgery::of(&flow_of(&hostile, slot), device, peer);
    let victims = Forgery::of(&flow_of(&victim.library, victim.slot), device, peer);
    let capture = Capture::start(&bed.b);

    for (case, forgery, reason) in forgeries(&own, &victims) {
        let drops = drops_of(&path, || write(&hostile, &forgery.frame()));
        assert_eq!(drops, [reason], "{case}");
    }
    let gratuitous = arp(device, v4(Bed::A4), v4(Bed::B4));
    let drops = drops_of(&path, || write(&hostile, &gratuitous));
    assert_eq!(drops, ["drop_not_ip"]);
    let cut = &own.frame()[..10 + 14 + 20 + 2];
    assert_eq!(drops_of(&path, || write(&hostile, cut)), ["drop_malformed"]);

    std::thread::sleep(Duration::from_millis(50));
    let escaped = capture.frames().into_iter().find(|frame| is_marked(frame));
    assert_eq!(escaped, None);
    let genuine = own.frame();
    assert!(drops_of(&path, || write(&hostile, &genuine)).is_empty());
    let passed = || capture.frames().iter().any(|frame| is_marked(frame));
    crate::common::await_some("genuine frame", || passed().then_some(()));
    victim.assert_unharmed();
}

#[test]
fn datagrams_leave_only_from_ones_own_port() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let any = |port| ([0, 0, 0, 0], port).into();
    let (reply, _victims) = victim.library.bind(Protocol::Udp, any(5353), Slot(7));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let mut hostile = hostile_library(&path);
    let (reply, _own) = hostile.bind(Protocol::Udp, any(6000), Slot(0));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let peer = bed.b.enter(|| UdpSocket::bind((Bed::B4, 7000))).unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();

    let (device, neighbour) = macs(&hostile);
    let datagram = |source, port| {
        let flow = FlowKey {
            protocol: Protocol::Udp,
            local: (source, port).into(),
            remote: peer.local_addr().unwrap(),
        };
        Forgery::of(&flow, device, neighbour).frame()
    };
    let cases = [
        ("another's port", v4(Bed::A4), 5353, "drop_foreign"),
        ("nobody's port", v4(Bed::A4), 6001, "drop_no_flow"),
        (
            "the peer's address",
            v4(Bed::B4),
            6000,
            "drop_source_address",
        ),
        (
            "a foreign address",
            Ipv4Addr::new(192, 0, 2, 1),
            6000,
            "drop_source_address",
        ),
        ("loopback", Ipv4Addr::LOCALHOST, 6000, "drop_source_address"),
    ];
    for (case, source, port, reason) in cases {
        let frame = datagram(source, port);
        assert_eq!(
            drops_of(&path, || write(&hostile, &frame)),
            [reason],
            "{case}"
        );
    }
    let mut heard = [0; 100];
    assert!(peer.recv(&mut heard).is_err(), "the peer heard a forgery");
    write(&hostile, &datagram(v4(Bed::A4), 6000));
    assert!(
        peer.recv(&mut heard).is_ok(),
        "the peer hears the true port"
    );
}

/// Returns the frame with a checksum that the kernel completes.
pub(crate) fn to_be_summed(mut frame: Vec<u8>, start: u16, offset: u16) -> Vec<u8> {
    VnetHeader::partial_checksum(start, offset).emit(&mut frame);
    frame
}

/// The kernel writes a checksum where the header before a frame says, after the filter: possibly over the source's
/// port or its address.
#[test]
fn a_checksum_is_completed_where_it_belongs_and_nowhere_else() {
    const TRANSPORT: u16 = 14 + 20;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (_, _near, slot, _peer) = open_to_b(&bed, &mut hostile);
    let any = ([0, 0, 0, 0], 6000).into();
    let (reply, _own) = hostile.bind(Protocol::Udp, any, Slot(9));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let (device, neighbour) = macs(&hostile);
    let segment = Forgery::of(&flow_of(&hostile, slot), device, neighbour).frame();
    let flow = FlowKey {
        protocol: Protocol::Udp,
        local: (Bed::A4, 6000).into(),
        remote: (Bed::B4, 7000).into(),
    };
    let datagram = Forgery::of(&flow, device, neighbour).frame();
    let capture = Capture::start(&bed.b);
    let places = [
        ("the source's port", TRANSPORT, 0),
        ("the destination's port", TRANSPORT, 2),
        ("the source's address", 20, 6),
        ("the lifetime and the protocol", 20, 2),
        ("the TCP checksum, from elsewhere", 24, 10 + 16),
        ("the UDP checksum, from elsewhere", 24, 10 + 6),
        ("the payload", TRANSPORT + 8, 0),
    ];
    for (case, start, offset) in places {
        for frame in [&segment, &datagram] {
            let forged = to_be_summed(frame.clone(), start, offset);
            let drops = drops_of(&path, || write(&hostile, &forged));
            assert_eq!(drops, ["drop_offload"], "{case}");
        }
    }
    for (frame, others) in [(&segment, 6), (&datagram, 16)] {
        let forged = to_be_summed(frame.clone(), TRANSPORT, others);
        let drops = drops_of(&path, || write(&hostile, &forged));
        assert_eq!(drops, ["drop_offload"], "the other protocol's checksum");
    }
    let escaped = capture.frames().into_iter().find(|frame| is_marked(frame));
    assert_eq!(escaped, None);
    for (frame, own) in [(segment, 16), (datagram, 6)] {
        let genuine = to_be_summed(frame, TRANSPORT, own);
        assert!(drops_of(&path, || write(&hostile, &genuine)).is_empty());
    }
    let passed = || capture.frames().iter().filter(|f| is_marked(f)).count() >= 2;
    crate::common::await_some("genuine frames", || passed().then_some(()));
    meter.finish_but_for_starts();
}

/// Returns the frame as one that the kernel cuts into fragments of eight bytes.
fn to_be_cut(mut frame: Vec<u8>) -> Vec<u8> {
    VnetHeader::segments(Gso::UdpFragments, 14 + 20 + 8, 14 + 20, 8).emit(&mut frame);
    frame
}

#[test]
fn fragments_leave_only_of_ones_own_datagrams_and_with_a_number_nobody_chose() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let any = |port| ([0, 0, 0, 0], port).into();
    let (_, _victims) = victim.library.bind(Protocol::Udp, any(5353), Slot(7));
    let mut hostile = hostile_library(&path);
    let (_, _own) = hostile.bind(Protocol::Udp, any(6000), Slot(0));
    let peer = bed.b.enter(|| UdpSocket::bind((Bed::B4, 7000))).unwrap();
    peer.set_read_timeout(TIMEOUT).unwrap();
    let (device, neighbour) = macs(&hostile);
    let datagram = |port| {
        let flow = FlowKey {
            protocol: Protocol::Udp,
            local: (Bed::A4, port).into(),
            remote: peer.local_addr().unwrap(),
        };
        Forgery::of(&flow, device, neighbour)
    };
    let capture = Capture::start(&bed.b);
    let foreign = to_be_cut(datagram(5353).frame());
    assert_eq!(
        drops_of(&path, || write(&hostile, &foreign)),
        ["drop_foreign"]
    );
    // A fragment made by the program itself, for a datagram that the victim may be sending.
    for fragment in [0x2000, 0x2001, 0x0002] {
        let mut forgery = datagram(6000);
        forgery.fragment = fragment;
        let drops = drops_of(&path, || write(&hostile, &forgery.frame()));
        assert_eq!(drops, ["drop_malformed"], "{fragment:#x}");
    }
    let own = to_be_cut(datagram(6000).frame());
    for _ in 0..2 {
        write(&hostile, &own);
        let mut heard = [0; 100];
        assert_eq!(peer.recv(&mut heard).unwrap(), MARK.len());
    }
    let numbers: BTreeSet<[u8; 2]> = capture
        .frames()
        .iter()
        .filter(|frame| frame[12..14] == [8, 0] && frame[20..22] != [0, 0] && frame[23] == UDP)
        .filter(|frame| frame[20] & 0x40 == 0)
        .map(|frame| [frame[18], frame[19]])
        .collect();
    assert_eq!(numbers.len(), 2, "{numbers:x?}");
    victim.assert_unharmed();
}

#[test]
fn a_tap_outlives_its_channel_as_a_dead_end() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (_, _near, slot, _peer) = open_to_b(&bed, &mut hostile);
    let (device, peer) = macs(&hostile);
    let own = Forgery::of(&flow_of(&hostile, slot), device, peer).frame();
    let Library { client, tap, .. } = hostile;
    drop(client);
    assert_serves_others(&bed, &path);
    // Frames that get this far while the device is removed are dropped.
    let drops = drops_of(&path, || {
        crate::common::await_some("the end of the device", || {
            tap.0.write(&[IoSlice::new(&own)]).err()
        });
    });
    assert!(
        drops.is_empty() || drops == ["drop_no_channel"],
        "{drops:?}"
    );
    meter.finish_but_for_starts();
}
