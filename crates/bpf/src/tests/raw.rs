//! Raw protocols: who gets their frames, and who may send them.

use portolan_proto::filter::{BindingKey, FlowRow, RawKey, RecordHeader};
use portolan_proto::raw::Guard;
use portolan_types::{ChannelId, FlowKey, MacAddr, Protocol};
use portolan_wire::icmp::Cause;

use super::bed::{
    Bed, CHANNEL, OTHER_CHANNEL, OWN_MAC, Outcome, REDIRECT, SHOT, UNSPEC, any_address, flows,
    outcome, row,
};
use super::fragments::piece;
use super::frames::Frame;

const ETHERTYPE: Guard = Guard::EtherType(0x88b5);
const PROTOCOL: Guard = Guard::IpProtocol(253);

fn key(guard: Guard) -> RawKey {
    RawKey::new(guard).unwrap()
}

/// A bed on which the channel has both raw protocols.
fn bed() -> Bed {
    let bed = Bed::new();
    for guard in [ETHERTYPE, PROTOCOL] {
        bed.filter.claim(&key(guard), row(CHANNEL)).unwrap();
    }
    bed
}

fn received(bed: &Bed, frame: &[u8]) -> Outcome {
    bed.run("packet_filter", frame)
}

fn sent(bed: &Bed, frame: &[u8]) -> Outcome {
    bed.run("transmit_filter", frame)
}

fn any_flows() -> [FlowKey; 2] {
    flows(Protocol::Udp)
}

/// The IP frame with another EtherType.
fn of_ethertype(mut frame: Vec<u8>) -> Vec<u8> {
    frame[12..14].copy_from_slice(&0x88b5_u16.to_be_bytes());
    frame
}

#[test]
fn frames_of_an_ethertype_go_whole_to_whoever_has_it() {
    let bed = bed();
    let mut frame = of_ethertype(Frame::received(&any_flows()[0]).build());
    for destination in [
        MacAddr([0; 6]),
        MacAddr([0xff; 6]),
        MacAddr([1, 2, 3, 4, 5, 6]),
    ] {
        frame[..6].copy_from_slice(&destination.0);
        assert_eq!(received(&bed, &frame), outcome(SHOT, &["delivered_raw"]));
        let (header, copy) = &bed.records()[0];
        assert_eq!(copy, &frame);
        assert_eq!((header.slot, header.flags), (77, RecordHeader::RAW));
    }
    frame[..6].copy_from_slice(&[2, 9, 9, 9, 9, 9]);
    let others = outcome(UNSPEC, &["pass_not_to_host"]);
    assert_eq!(received(&bed, &frame), others);
}

#[test]
fn packets_of_an_ip_protocol_go_to_whoever_has_it() {
    let bed = bed();
    for flow in any_flows() {
        let frame = Frame::received(&flow).around(253, b"own");
        assert_eq!(received(&bed, &frame), outcome(SHOT, &["delivered_raw"]));
        assert_eq!(bed.records()[0].1, frame, "{flow}");
        let other = Frame::received(&flow).around(254, b"own");
        assert_eq!(received(&bed, &other), outcome(UNSPEC, &["pass_protocol"]));
    }
}

#[test]
fn what_is_not_for_this_host_is_the_kernels() {
    let bed = bed();
    let mut frame = Frame::received(&any_flows()[0]);
    frame.destination.set_ip("10.0.0.9".parse().unwrap());
    let frame = frame.around(253, b"own");
    assert_eq!(received(&bed, &frame), outcome(UNSPEC, &["pass_protocol"]));
}

#[test]
fn an_error_about_a_packet_is_not_one_of_its_protocol() {
    let bed = bed();
    for flow in any_flows() {
        let quoted = Frame::sent(&flow, OWN_MAC).around(253, &[0; 8]);
        let (protocol, kind) = if flow.local.is_ipv4() {
            (1, 3)
        } else {
            (58, 1)
        };
        let mut error = vec![kind, 1, 0, 0, 0, 0, 0, 0];
        error.extend_from_slice(&quoted[14..]);
        let frame = Frame::received(&flow).around(protocol, &error);
        assert_eq!(received(&bed, &frame), outcome(UNSPEC, &["pass_protocol"]));
    }
}

#[test]
fn fragments_are_the_kernels() {
    let bed = bed();
    let mut first = Frame::received(&any_flows()[0]).around(253, &[0; 64]);
    first[20] = 0x20;
    assert_eq!(received(&bed, &first), outcome(UNSPEC, &["pass_protocol"]));
    first[21] = 1;
    assert_eq!(received(&bed, &first), outcome(UNSPEC, &["pass_fragment"]));
}

#[test]
fn only_whoever_has_a_protocol_sends_it() {
    let flow = &any_flows()[0];
    let frame = of_ethertype(Frame::sent(flow, OWN_MAC).build());
    let packet = Frame::sent(flow, OWN_MAC).around(253, b"own");
    let bed = bed();
    for own in [&frame, &packet] {
        assert_eq!(sent(&bed, own), outcome(REDIRECT, &["sent"]));
    }
    for guard in [ETHERTYPE, PROTOCOL] {
        bed.filter.claim(&key(guard), row(OTHER_CHANNEL)).unwrap();
    }
    for foreign in [&frame, &packet] {
        assert_eq!(sent(&bed, foreign), outcome(SHOT, &["drop_foreign"]));
    }
    for guard in [ETHERTYPE, PROTOCOL] {
        bed.filter.unclaim(&key(guard)).unwrap();
    }
    assert_eq!(sent(&bed, &frame), outcome(SHOT, &["drop_not_ip"]));
    assert_eq!(sent(&bed, &packet), outcome(SHOT, &["drop_protocol"]));
}

#[test]
fn sources_are_this_hosts() {
    let bed = bed();
    let flow = &any_flows()[0];
    let mut frame = of_ethertype(Frame::sent(flow, OWN_MAC).build());
    frame[6] ^= 4;
    assert_eq!(sent(&bed, &frame), outcome(SHOT, &["drop_source_mac"]));
    let mut packet = Frame::sent(flow, OWN_MAC);
    packet.source.set_ip("10.0.0.9".parse().unwrap());
    let packet = packet.around(253, b"own");
    assert_eq!(sent(&bed, &packet), outcome(SHOT, &["drop_source_address"]));
}

/// A bed with a raw port of both families, on any address.
fn bed_at_port(protocol: Protocol, channel: ChannelId) -> Bed {
    let bed = Bed::new();
    for flow in flows(protocol) {
        let delegated = match protocol {
            Protocol::Tcp => FlowRow::DELEGATED,
            Protocol::Udp => 0,
        };
        let row = FlowRow {
            flags: FlowRow::RAW | delegated,
            ..row(channel)
        };
        let key = BindingKey::new(protocol, any_address(&flow));
        bed.filter.bind(&key, row).unwrap();
    }
    bed
}

fn transports() -> [Protocol; 2] {
    [Protocol::Tcp, Protocol::Udp]
}

#[test]
fn what_is_for_a_port_comes_as_it_is_to_whoever_has_it() {
    for protocol in transports() {
        let bed = bed_at_port(protocol, CHANNEL);
        bed.set_doorbell(portolan_proto::filter::Doorbell::ASLEEP_ON_TAP);
        for flow in flows(protocol) {
            let frame = Frame::received(&flow).build();
            assert_eq!(received(&bed, &frame), outcome(SHOT, &["delivered_raw"]));
            let (header, copy) = &bed.records()[0];
            assert_eq!(copy, &frame);
            assert_eq!((header.slot, header.flags), (77, RecordHeader::RAW));
            let mut other = Frame::received(&flow);
            other.destination.set_port(81);
            let unclaimed = outcome(UNSPEC, &["pass_unclaimed"]);
            assert_eq!(received(&bed, &other.build()), unclaimed);
        }
    }
}

#[test]
fn fragments_for_a_port_come_after_their_first() {
    let bed = bed_at_port(Protocol::Udp, CHANNEL);
    for flow in flows(Protocol::Udp) {
        for frame in [piece(&flow, 9, 0, true), piece(&flow, 9, 64, false)] {
            assert_eq!(received(&bed, &frame), outcome(SHOT, &["delivered_raw"]));
            assert_eq!(bed.records()[0].1, frame, "{flow}");
        }
    }
}

#[test]
fn errors_about_what_was_sent_from_a_port_come_there_and_to_the_kernel() {
    for protocol in transports() {
        let bed = bed_at_port(protocol, CHANNEL);
        for flow in flows(protocol) {
            let error = Frame::sent(&flow, OWN_MAC).build_error_about(Cause::PortUnreachable);
            assert_eq!(received(&bed, &error), outcome(UNSPEC, &["delivered_raw"]));
            assert_eq!(bed.records()[0].1, error, "{flow}");
        }
    }
}

#[test]
fn only_whoever_has_a_port_sends_from_there() {
    for protocol in transports() {
        let own = bed_at_port(protocol, CHANNEL);
        let others = bed_at_port(protocol, OTHER_CHANNEL);
        for flow in flows(protocol) {
            let frame = Frame::sent(&flow, OWN_MAC);
            let bytes = frame.build();
            assert_eq!(sent(&own, &bytes), outcome(REDIRECT, &["sent"]));
            assert_eq!(sent(&others, &bytes), outcome(SHOT, &["drop_foreign"]));
            let mut elsewhere = frame.clone();
            elsewhere.source.set_port(81);
            let nobodys = outcome(SHOT, &["drop_no_flow"]);
            assert_eq!(sent(&own, &elsewhere.build()), nobodys);
            let mut forged = frame;
            forged.source.set_ip(flow.remote.ip());
            let not_ours = outcome(SHOT, &["drop_source_address"]);
            assert_eq!(sent(&own, &forged.build()), not_ours);
        }
    }
}
