use core::net::Ipv4Addr;
use std::vec;
use std::vec::Vec;

use super::*;

const CAUSES: [Cause; 7] = [
    Cause::NetworkUnreachable,
    Cause::HostUnreachable,
    Cause::ProtocolUnreachable,
    Cause::PortUnreachable,
    Cause::Prohibited,
    Cause::TooBig { mtu: 1280 },
    Cause::HopLimitExceeded,
];
const A: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const B: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);

fn emit_v4(message: &IcmpMessage) -> Vec<u8> {
    let mut bytes = vec![0; message.emitted_len()];
    message.emit_v4(&mut bytes);
    bytes
}

/// An IPv4 packet with only eight bytes of its transport header.
fn quoted_v4(protocol: u8, fragment_offset: u16) -> Vec<u8> {
    let mut packet = vec![0; 28];
    Ipv4Header {
        traffic_class: 0,
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset,
        ttl: 1,
        protocol,
        source: Ipv4Addr::new(10, 0, 0, 1),
        destination: Ipv4Addr::new(10, 0, 0, 2),
        payload_len: 1000,
    }
    .emit(&mut packet);
    packet[20..28].copy_from_slice(&[0x9c, 0x40, 0, 80, 0, 0, 1, 2]);
    packet
}

#[test]
fn every_cause_survives_both_versions() {
    for cause in CAUSES {
        let quoted = quoted_v4(6, 0);
        let message = IcmpMessage::Error(IcmpError {
            cause,
            quoted: &quoted,
        });
        assert_eq!(IcmpMessage::parse_v4(&emit_v4(&message)), Ok(message));
        let mut bytes = vec![0; message.emitted_len()];
        message.emit_v6(A, B, &mut bytes);
        assert_eq!(IcmpMessage::parse_v6(A, B, &bytes), Ok(message));
    }
}

#[test]
fn echo_is_read_as_etherparse_reads_it() {
    let echo = Echo {
        identifier: 7,
        sequence: 9,
        data: b"ping",
    };
    let bytes = emit_v4(&IcmpMessage::EchoRequest(echo));
    let oracle = etherparse::Icmpv4Slice::from_slice(&bytes).unwrap();
    let expected = etherparse::IcmpEchoHeader { id: 7, seq: 9 };
    assert_eq!(
        oracle.icmp_type(),
        etherparse::Icmpv4Type::EchoRequest(expected)
    );
    assert_eq!(oracle.checksum(), oracle.icmp_type().calc_checksum(b"ping"));
    assert_eq!(
        IcmpMessage::parse_v4(&bytes),
        Ok(IcmpMessage::EchoRequest(echo))
    );
}

#[test]
fn the_flow_of_a_quoted_packet_is_found() {
    let flow = |quoted: &[u8]| {
        IcmpError {
            cause: Cause::PortUnreachable,
            quoted,
        }
        .flow()
    };
    let tcp = quoted_v4(6, 0);
    let quoted = flow(&tcp).unwrap();
    assert_eq!(quoted.source, "10.0.0.1:40000".parse().unwrap());
    assert_eq!(quoted.destination, "10.0.0.2:80".parse().unwrap());
    assert_eq!(quoted.seq, Some(SeqNum(0x102)));
    assert_eq!(flow(&quoted_v4(17, 0)).unwrap().seq, None);
    assert_eq!(flow(&quoted_v4(47, 0)), None);
    assert_eq!(flow(&quoted_v4(6, 8)), None);
    assert_eq!(flow(&tcp[..27]), None);
}

#[test]
fn a_bad_checksum_is_malformed() {
    let echo = Echo {
        identifier: 7,
        sequence: 9,
        data: b"ping",
    };
    let mut bytes = emit_v4(&IcmpMessage::EchoReply(echo));
    bytes[9] ^= 4;
    assert_eq!(IcmpMessage::parse_v4(&bytes), Err(Malformed));
}

#[test]
fn no_bytes_make_the_parser_panic() {
    portolan_fuzz::check!(2000).for_each(|bytes| {
        for message in [
            IcmpMessage::parse_v4(bytes),
            IcmpMessage::parse_v6(A, B, bytes),
        ] {
            if let Ok(IcmpMessage::Error(error)) = message {
                error.flow();
            }
        }
        IcmpError {
            cause: Cause::HostUnreachable,
            quoted: bytes,
        }
        .flow();
    });
}
