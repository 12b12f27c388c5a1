//! The fast path treats every frame as the slow path does.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use portolan_proto::filter::RecordHeader;
use portolan_wire::ethernet::{EtherType, EthernetHeader};
use portolan_wire::ipv4::Ipv4Header;
use portolan_wire::ipv6::Ipv6Header;

use super::pattern::{IPV4, IPV6};
use super::*;

const NEXT: SeqNum = SeqNum(5000);

fn addresses(is_v4: bool) -> [IpAddr; 2] {
    if is_v4 {
        [
            Ipv4Addr::new(10, 0, 0, 2).into(),
            Ipv4Addr::new(10, 0, 0, 1).into(),
        ]
    } else {
        [
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into(),
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(),
        ]
    }
}

fn header(is_stamped: bool) -> TcpHeader {
    TcpHeader {
        source_port: 40_000,
        destination_port: 80,
        seq: NEXT,
        ack: SeqNum(77),
        flags: TcpFlags::ACK,
        window: 500,
        urgent: 0,
        options: TcpOptions {
            timestamps: is_stamped.then_some(Timestamps { value: 8, echo: 9 }),
            ..TcpOptions::default()
        },
    }
}

/// A frame with the right lengths; changes may require [`seal`].
fn frame(is_v4: bool, header: &TcpHeader, payload: &[u8]) -> Vec<u8> {
    let [source, destination] = addresses(is_v4);
    let tcp = IP + if is_v4 { IPV4 } else { IPV6 };
    let mut frame = vec![0; tcp + header.header_len()];
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
    let payload_len = (header.header_len() + payload.len()) as u16;
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => Ipv4Header {
            traffic_class: 0,
            identification: 7,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            protocol: 6,
            source,
            destination,
            payload_len,
        }
        .emit(&mut frame[IP..]),
        (IpAddr::V6(source), IpAddr::V6(destination)) => Ipv6Header {
            traffic_class: 0,
            flow_label: 0x12345,
            hop_limit: 64,
            protocol: 6,
            source,
            destination,
            payload_len,
            fragment: None,
        }
        .emit(&mut frame[IP..]),
        _ => unreachable!("one family"),
    }
    header.emit(&mut frame[tcp..]);
    frame.extend_from_slice(payload);
    seal(&mut frame, tcp);
    frame
}

/// Sets the right checksums.
fn seal(frame: &mut [u8], tcp: usize) {
    if frame.len() < tcp + BARE {
        return;
    }
    let is_v4 = tcp == IP + IPV4;
    let pseudo = if is_v4 {
        frame[IP + 10..IP + 12].fill(0);
        let sum = Sum::default().over(&frame[IP..tcp]).checksum();
        frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
        Sum::default().over(&frame[IP + 12..tcp])
    } else {
        Sum::default().over(&frame[IP + 8..tcp])
    };
    let length = (frame.len() - tcp) as u32;
    let pseudo = pseudo.over(&length.to_be_bytes()).over(&[0, 6]);
    frame[tcp + 16..tcp + 18].fill(0);
    let sum = pseudo.over(&frame[tcp..]).checksum();
    frame[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
}

fn record() -> RecordHeader {
    RecordHeader::default()
}

/// The expectation after such a frame, the next frame, and the offset of its TCP header.
fn after(is_v4: bool, is_stamped: bool) -> (Expected, Vec<u8>) {
    let before = TcpHeader {
        seq: NEXT - 5,
        flags: TcpFlags::ACK.with(TcpFlags::PSH),
        ..header(is_stamped)
    };
    let before = frame(is_v4, &before, b"hello");
    let packet = Packet::parse(&before, &record()).unwrap();
    let expected = Expected::after(&before, &packet, NEXT).expect("a plain frame");
    (expected, frame(is_v4, &header(is_stamped), b"world!"))
}

const SHAPES: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

fn assert_told_alike(expected: &Expected, frame: &[u8]) -> bool {
    let Some(segment) = expected.meet(frame) else {
        return false;
    };
    let packet = Packet::parse(frame, &record()).expect("the standard path takes it, too");
    let [source, destination] = addresses(expected.pattern.transport == IP + IPV4);
    assert_eq!((packet.source.ip(), packet.source.port()), (source, 40_000));
    let to = (packet.destination.ip(), packet.destination.port());
    assert_eq!(to, (destination, 80));
    match packet.transport {
        Transport::Tcp {
            header,
            payload,
            codepoint,
        } => assert_eq!(
            segment,
            Segment {
                header,
                payload,
                codepoint
            }
        ),
        other => panic!("{other:?}"),
    }
    true
}

#[test]
fn the_next_segment_is_expected_in_every_shape() {
    for (is_v4, is_stamped) in SHAPES {
        let (expected, next) = after(is_v4, is_stamped);
        assert!(assert_told_alike(&expected, &next), "{is_v4} {is_stamped}");
        let empty = frame(is_v4, &header(is_stamped), b"");
        assert!(assert_told_alike(&expected, &empty));
    }
}

/// The position of a byte, in the IP or the TCP header.
#[derive(Clone, Copy, Debug)]
enum At {
    Ip(usize),
    Tcp(usize),
}

fn change(shape: (bool, bool), at: At, bits: u8) -> bool {
    let (expected, mut next) = after(shape.0, shape.1);
    let place = match at {
        At::Ip(offset) => IP + offset,
        At::Tcp(offset) => expected.pattern.transport + offset,
    };
    next[place] ^= bits;
    seal(&mut next, expected.pattern.transport);
    assert_told_alike(&expected, &next)
}

#[test]
fn what_changes_from_segment_to_segment_is_no_surprise() {
    for shape in SHAPES {
        let ip = if shape.0 {
            vec![(1, 0xfc), (4, 0xff), (6, 0x40), (8, 0xff)]
        } else {
            vec![(0, 0x0f), (1, 0xc0), (2, 0xff), (7, 0xff)]
        };
        let tcp = [(8, 0xff), (13, 0x08), (14, 0xff), (19, 0xff)];
        let stamps = [(24, 0xff), (31, 0xff)];
        let places = ip.into_iter().map(|(at, bits)| (At::Ip(at), bits));
        let stamps = stamps.into_iter().filter(|_| shape.1);
        let tcp = tcp.into_iter().chain(stamps);
        for (at, bits) in places.chain(tcp.map(|(at, bits)| (At::Tcp(at), bits))) {
            assert!(change(shape, at, bits), "{shape:?} {at:?}");
        }
    }
}

#[test]
fn all_else_takes_the_standard_path() {
    for shape in SHAPES {
        let ip: Vec<(usize, u8)> = if shape.0 {
            // Options, ECN, fragments, another protocol or host.
            vec![
                (0, 3),
                (1, 1),
                (1, 2),
                (6, 0x20),
                (7, 1),
                (9, 23),
                (15, 1),
                (19, 1),
            ]
        } else {
            vec![(0, 0x20), (1, 0x10), (1, 0x20), (6, 6), (23, 1), (39, 1)]
        };
        // Ports, a hole, other options, FIN, SYN, RST, ACK, URG, ECE, CWR.
        let tcp = [(1, 1), (3, 1), (7, 1), (12, 0x10)];
        let flags = [1, 2, 4, 0x10, 0x20, 0x40, 0x80].map(|bit| (13, bit));
        let places = ip.into_iter().map(|(at, bits)| (At::Ip(at), bits));
        let tcp = tcp.into_iter().chain(flags);
        for (at, bits) in places.chain(tcp.map(|(at, bits)| (At::Tcp(at), bits))) {
            assert!(!change(shape, at, bits), "{shape:?} {at:?} {bits}");
        }
    }
}

#[test]
fn a_frame_that_is_damaged_padded_or_cut_short_is_not_met() {
    for (is_v4, is_stamped) in SHAPES {
        let (expected, next) = after(is_v4, is_stamped);
        for length in 0..next.len() {
            assert!(!assert_told_alike(&expected, &next[..length]), "{length}");
        }
        let padded = [&next[..], &[0; 4]].concat();
        assert!(!assert_told_alike(&expected, &padded));
        let mut damaged = next.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert!(!assert_told_alike(&expected, &damaged));
        if is_v4 {
            let mut damaged = next;
            damaged[IP + 8] ^= 1;
            assert!(!assert_told_alike(&expected, &damaged), "IP's checksum");
        }
    }
}

#[test]
fn other_options_and_protocols_are_not_learned_from() {
    for (is_v4, _) in SHAPES {
        let odd = TcpHeader {
            flags: TcpFlags::SYN,
            options: TcpOptions {
                mss: Some(1000),
                ..TcpOptions::default()
            },
            ..header(false)
        };
        let odd = frame(is_v4, &odd, b"");
        let packet = Packet::parse(&odd, &record()).unwrap();
        assert!(Expected::after(&odd, &packet, NEXT).is_none());
    }
}

#[test]
fn whatever_is_changed_both_paths_tell_the_same() {
    bolero::check!()
        .with_type::<(u8, Vec<(u8, u8)>)>()
        .for_each(|(shape, changes)| {
            let (is_v4, is_stamped) = SHAPES[usize::from(shape % 4)];
            let (expected, mut next) = after(is_v4, is_stamped);
            for (at, bits) in changes {
                if let Some(byte) = next.get_mut(START + usize::from(*at)) {
                    *byte ^= bits;
                }
            }
            if shape & 0x80 == 0 {
                seal(&mut next, expected.pattern.transport);
            }
            assert_told_alike(&expected, &next);
        });
}
