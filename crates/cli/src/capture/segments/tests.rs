//! Segments, as another parser of packets and a receiver would take them.

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use portolan_types::{ChannelId, SessionId};

use super::*;

fn conversation(opener: &str, accepter: &str) -> Conversation {
    Conversation::new(&CapturedEnd {
        channel: ChannelId(3),
        session: SessionId(4),
        pair: 1,
        side: Side::Opener,
        opener: opener.parse().unwrap(),
        accepter: accepter.parse().unwrap(),
        from_opener: 0,
        from_accepter: 0,
        at: 0,
    })
}

fn record(position: u64, length: usize, flags: u32) -> RecordHeader {
    RecordHeader {
        position,
        length: length as u32,
        captured: length as u32,
        flags,
        ..RecordHeader::default()
    }
}

/// Ports, sequence and acknowledgement numbers, payload, and whether it is a SYN, a FIN or a RST.
fn parsed(segment: &Segment) -> ([u32; 4], Vec<u8>, [bool; 3]) {
    let packet = SlicedPacket::from_ethernet(&segment.bytes).unwrap();
    let Some(TransportSlice::Tcp(tcp)) = &packet.transport else {
        panic!("{packet:?}");
    };
    let checksum = match &packet.net {
        Some(NetSlice::Ipv4(ip)) => {
            let header = ip.header().to_header();
            assert_eq!(header.calc_header_checksum(), header.header_checksum);
            tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination())
        }
        Some(NetSlice::Ipv6(ip)) => tcp.calc_checksum_ipv6(
            ip.header().to_header().source,
            ip.header().to_header().destination,
        ),
        other => panic!("{other:?}"),
    };
    assert_eq!(checksum.unwrap(), tcp.checksum());
    let ports = [tcp.source_port(), tcp.destination_port()].map(u32::from);
    let numbers = [tcp.sequence_number(), tcp.acknowledgment_number()];
    let numbers = [ports[0], ports[1], numbers[0], numbers[1]];
    (
        numbers,
        tcp.payload().to_vec(),
        [tcp.syn(), tcp.fin(), tcp.rst()],
    )
}

const NOTHING: Vec<u8> = Vec::new();

#[test]
fn a_session_is_shown_as_a_connection_with_consistent_numbers() {
    for (opener, accepter) in [
        ("10.0.0.1:40000", "10.0.0.2:80"),
        ("[::1]:40000", "[::1]:80"),
    ] {
        let mut session = conversation(opener, accepter);
        let opening: Vec<_> = session.handshake().iter().map(parsed).collect();
        assert_eq!(
            opening,
            [
                ([40000, 80, 0, 0], NOTHING, [true, false, false]),
                ([80, 40000, 0, 1], NOTHING, [true, false, false]),
                ([40000, 80, 1, 1], NOTHING, [false; 3]),
            ]
        );
        let asked = session.record(Side::Opener, &record(0, 3, 0), b"ask");
        assert_eq!(
            parsed(&asked[0]),
            ([40000, 80, 1, 1], b"ask".to_vec(), [false; 3])
        );
        let said = session.record(Side::Accepter, &record(0, 4, flags::FIN), b"said");
        assert_eq!(
            parsed(&said[0]),
            ([80, 40000, 1, 4], b"said".to_vec(), [false, true, false])
        );
        let end = session.close(Side::Opener, false).unwrap();
        assert_eq!(
            parsed(&end),
            ([40000, 80, 4, 6], NOTHING, [false, true, false])
        );
        assert_eq!(session.close(Side::Accepter, false), None, "it is shown");
    }
}

#[test]
fn what_both_ends_record_is_shown_once() {
    let mut session = conversation("10.0.0.1:40000", "10.0.0.2:80");
    assert_eq!(
        session
            .record(Side::Opener, &record(0, 4, 0), b"1234")
            .len(),
        1
    );
    assert_eq!(session.record(Side::Opener, &record(0, 4, 0), b"1234"), []);
    let rest = session.record(Side::Opener, &record(2, 4, 0), b"3456");
    assert_eq!(parsed(&rest[0]).1, b"56");
    let end = session.record(Side::Opener, &record(6, 0, flags::FIN), b"");
    assert_eq!(parsed(&end[0]).0[2], 7);
    assert_eq!(
        session.record(Side::Opener, &record(6, 0, flags::FIN), b""),
        []
    );
}

#[test]
fn what_was_lost_is_a_gap_in_the_numbers() {
    let mut session = conversation("10.0.0.1:40000", "10.0.0.2:80");
    session.record(Side::Opener, &record(0, 4, 0), b"1234");
    let late = session.record(Side::Opener, &record(100, 2, 0), b"xy");
    assert_eq!(parsed(&late[0]).0[2], 101);
}

#[test]
fn bytes_beyond_the_snapshot_length_are_announced() {
    let mut session = conversation("10.0.0.1:40000", "10.0.0.2:80");
    let shown = session.record(Side::Opener, &record(0, 1000, 0), b"12");
    let packet = etherparse::LaxSlicedPacket::from_ethernet(&shown[0].bytes).unwrap();
    assert!(packet.transport.is_some());
    assert_eq!(shown[0].length as usize, shown[0].bytes.len() + 998);
}

#[test]
fn a_reset_is_shown_once_and_ends_the_stream() {
    let mut session = conversation("10.0.0.1:40000", "10.0.0.2:80");
    let ended = session.record(Side::Opener, &record(0, 2, flags::RESET), b"12");
    assert_eq!(
        parsed(&ended[1]),
        ([40000, 80, 3, 1], NOTHING, [false, false, true])
    );
    assert_eq!(session.close(Side::Opener, true), None);
    assert_eq!(session.record(Side::Opener, &record(2, 2, 0), b"34"), []);
}

#[test]
fn no_claim_makes_it_panic() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<(bool, u64, u32, u32, u8)>>()
        .for_each(|claims| {
            let mut session = conversation("[::1]:1", "[::1]:2");
            for (is_opener, position, length, flags, captured) in claims {
                let from = if *is_opener {
                    Side::Opener
                } else {
                    Side::Accepter
                };
                let length = (*length % 65_484) as usize;
                let claim = record(*position, length, *flags);
                let bytes = vec![0; length.min((*captured).into())];
                for segment in session.record(from, &claim, &bytes) {
                    assert!(segment.bytes.len() <= segment.length as usize);
                }
            }
        });
}
