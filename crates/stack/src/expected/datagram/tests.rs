//! The fast path treats every datagram as the slow path does.

use portolan_proto::filter::RecordHeader;
use portolan_wire::ethernet::{EtherType, EthernetHeader};
use portolan_wire::ipv4::Ipv4Header;
use portolan_wire::ipv6::Ipv6Header;
use portolan_wire::udp::UdpHeader;

use super::super::pattern::IPV4;
use super::*;

fn ends(is_v4: bool) -> [SocketAddr; 2] {
    let text = if is_v4 {
        ["10.0.0.2:40000", "10.0.0.1:53"]
    } else {
        ["[fd00::2]:40000", "[fd00::1]:53"]
    };
    text.map(|end| end.parse().unwrap())
}

fn frame_between([source, destination]: [SocketAddr; 2], payload: &[u8]) -> Vec<u8> {
    let is_v4 = source.is_ipv4();
    let transport = transport_at(is_v4);
    let mut frame = vec![0; transport + HEADER_LEN];
    EthernetHeader {
        destination: Default::default(),
        source: Default::default(),
        ether_type: if is_v4 {
            EtherType::IPV4
        } else {
            EtherType::IPV6
        },
    }
    .emit(&mut frame);
    let payload_len = (HEADER_LEN + payload.len()) as u16;
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => Ipv4Header {
            traffic_class: 0x28,
            identification: 7,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            protocol: 17,
            source,
            destination,
            payload_len,
        }
        .emit(&mut frame[IP..]),
        (IpAddr::V6(source), IpAddr::V6(destination)) => Ipv6Header {
            traffic_class: 0x28,
            flow_label: 0x12345,
            hop_limit: 64,
            protocol: 17,
            source,
            destination,
            payload_len,
            fragment: None,
        }
        .emit(&mut frame[IP..]),
        _ => unreachable!("one family"),
    }
    UdpHeader {
        source_port: source.port(),
        destination_port: destination.port(),
        payload_len: payload.len() as u16,
        checksum: 0,
    }
    .emit(&mut frame[transport..]);
    frame.extend_from_slice(payload);
    seal(&mut frame, transport);
    frame
}

fn frame(is_v4: bool, payload: &[u8]) -> Vec<u8> {
    frame_between(ends(is_v4), payload)
}

/// Sets the right checksums for the lengths in the headers.
fn seal(frame: &mut [u8], transport: usize) {
    let addresses = if transport == IP + IPV4 {
        frame[IP + 10..IP + 12].fill(0);
        let sum = Sum::default().over(&frame[IP..transport]).checksum();
        frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
        Sum::default().over(&frame[IP + 12..transport])
    } else {
        Sum::default().over(&frame[IP + 8..transport])
    };
    let length = (frame.len() - transport) as u32;
    let pseudo = addresses.over(&length.to_be_bytes()).over(&[0, 17]);
    let field = transport + CHECKSUM_AT;
    frame[field..field + 2].fill(0);
    let sum = match pseudo.over(&frame[transport..]).checksum() {
        0 => 0xffff,
        sum => sum,
    };
    frame[field..field + 2].copy_from_slice(&sum.to_be_bytes());
}

/// The expectation after such a datagram, and the next datagram.
fn after(is_v4: bool) -> (ExpectedDatagram, Vec<u8>) {
    let before = frame(is_v4, b"hello");
    let packet = Packet::parse(&before, &RecordHeader::default()).unwrap();
    let expected = ExpectedDatagram::after(&before, &packet).expect("a plain datagram");
    (expected, frame(is_v4, b"world!!"))
}

fn assert_told_alike(expected: &ExpectedDatagram, frame: &[u8]) -> bool {
    let is_v4 = expected.source.is_ipv4();
    let Some(met) = expected.meet(frame, Some(ends(is_v4)[0])) else {
        return false;
    };
    let packet = Packet::parse(frame, &RecordHeader::default());
    let packet = packet.expect("the standard path takes it, too");
    assert_eq!([packet.source, packet.destination], ends(is_v4));
    assert_eq!([met.source, met.destination], ends(is_v4));
    match packet.transport {
        Transport::Udp {
            ip,
            payload,
            has_checksum,
        } => {
            assert!(has_checksum);
            assert_eq!((met.ip, met.payload), (ip, payload));
            assert_eq!(met.ip.ttl, packet.ttl);
        }
        other => panic!("{other:?}"),
    }
    true
}

fn change(is_v4: bool, place: usize, bits: u8) -> bool {
    let (expected, mut next) = after(is_v4);
    next[place] ^= bits;
    seal(&mut next, transport_at(is_v4));
    assert_told_alike(&expected, &next)
}

#[test]
fn the_next_datagram_is_expected_in_both_families_and_of_any_length() {
    for is_v4 in [true, false] {
        let (expected, next) = after(is_v4);
        assert!(assert_told_alike(&expected, &next), "{is_v4}");
        for length in [0, 1, 1472, 9000] {
            let next = frame(is_v4, &vec![7; length]);
            assert!(assert_told_alike(&expected, &next), "{is_v4} {length}");
        }
    }
}

#[test]
fn what_changes_from_datagram_to_datagram_is_no_surprise() {
    // DSCP and congestion marks, identification, DF, TTL; flow label.
    for (place, bits) in [(1, 0xff), (4, 0xff), (6, 0x40), (8, 0xff)] {
        assert!(change(true, IP + place, bits), "{place}");
    }
    for (place, bits) in [(0, 0x0f), (1, 0xff), (2, 0xff), (7, 0xff)] {
        assert!(change(false, IP + place, bits), "{place}");
    }
}

#[test]
fn all_else_takes_the_standard_path() {
    // Options, fragments, another protocol or host; ports.
    for (place, bits) in [
        (0, 3),
        (6, 0x20),
        (7, 1),
        (9, 23),
        (15, 1),
        (19, 1),
        (21, 1),
        (23, 1),
    ] {
        assert!(!change(true, IP + place, bits), "{place}");
    }
    for (place, bits) in [(0, 0x20), (6, 6), (23, 1), (39, 1), (41, 1), (43, 1)] {
        assert!(!change(false, IP + place, bits), "{place}");
    }
}

#[test]
fn a_datagram_that_is_damaged_padded_or_cut_short_is_not_met() {
    for is_v4 in [true, false] {
        let (expected, next) = after(is_v4);
        let transport = transport_at(is_v4);
        for length in 0..next.len() {
            assert!(!assert_told_alike(&expected, &next[..length]), "{length}");
        }
        assert!(!assert_told_alike(
            &expected,
            &[&next[..], &[0; 4]].concat()
        ));
        let mut damaged = next.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert!(!assert_told_alike(&expected, &damaged));
        // UDP's length is less than IP's: the slow path removes the rest.
        let mut shorter = next.clone();
        shorter[transport + 5] -= 1;
        seal(&mut shorter, transport);
        assert!(!assert_told_alike(&expected, &shorter));
        // The session decides whether a checksum may be missing.
        let mut unchecked = next.clone();
        unchecked[transport + 6..transport + 8].fill(0);
        assert!(!assert_told_alike(&expected, &unchecked));
    }
    let (expected, mut damaged) = after(true);
    damaged[IP + 8] ^= 1;
    assert!(!assert_told_alike(&expected, &damaged), "IP's checksum");
}

#[test]
fn a_checksum_that_the_device_was_to_complete_is_right_on_both_paths() {
    for is_v4 in [true, false] {
        let (expected, mut next) = after(is_v4);
        let transport = transport_at(is_v4);
        let [source, destination] = ends(is_v4);
        let partial = UdpHeader {
            source_port: source.port(),
            destination_port: destination.port(),
            payload_len: 7,
            checksum: 0,
        }
        .with_partial_checksum(source.ip(), destination.ip());
        partial.emit(&mut next[transport..]);
        assert!(assert_told_alike(&expected, &next), "{is_v4}");
    }
}

#[test]
fn nobody_but_the_peer_is_expected() {
    let (expected, next) = after(true);
    let [_, other] = ends(true);
    assert_eq!(expected.meet(&next, Some(other)), None);
    assert_eq!(expected.meet(&next, None), None);
}

#[test]
fn where_the_device_counts_nothing_is_learned() {
    for (source, destination) in [
        ("[fe80::2]:5", "[fe80::1]:6"),
        ("[fd00::2]:5", "[ff02::1]:6"),
        ("10.0.0.2:5", "224.0.0.9:6"),
    ] {
        let ends = [source, destination].map(|end| end.parse().unwrap());
        let frame = frame_between(ends, b"x");
        let packet = Packet::parse(&frame, &RecordHeader::default()).unwrap();
        assert!(
            ExpectedDatagram::after(&frame, &packet).is_none(),
            "{source}"
        );
    }
}

#[test]
fn whatever_is_changed_both_paths_tell_the_same() {
    bolero::check!()
        .with_type::<(u8, Vec<(u8, u8)>)>()
        .for_each(|(shape, changes)| {
            let is_v4 = shape & 1 == 0;
            let (expected, mut next) = after(is_v4);
            for (at, bits) in changes {
                if let Some(byte) = next.get_mut(START + usize::from(*at)) {
                    *byte ^= bits;
                }
            }
            if shape & 0x80 == 0 {
                seal(&mut next, transport_at(is_v4));
            }
            assert_told_alike(&expected, &next);
        });
}
