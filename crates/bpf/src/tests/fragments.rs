//! Fragments: later ones follow the first of their datagram; the kernel's stay the kernel's; a library
//! sends none, and does not choose their identification.

use portolan_proto::filter::RecordHeader;
use portolan_types::{ChannelId, FlowKey, Protocol};

use super::bed::{Bed, CHANNEL, Context, OWN_MAC, Outcome, REDIRECT, SHOT, UNSPEC};
use super::bed::{flows, outcome, row};
use super::frames::Frame;

/// A fragment of a datagram of the flow. The first one begins with the flow's ports.
pub(super) fn piece(flow: &FlowKey, id: u16, offset: u16, more: bool) -> Vec<u8> {
    let mut body = vec![7; 64];
    if offset == 0 {
        body[0..2].copy_from_slice(&flow.remote.port().to_be_bytes());
        body[2..4].copy_from_slice(&flow.local.port().to_be_bytes());
    }
    let frame = Frame::received(flow);
    if flow.local.is_ipv6() {
        let mut payload = vec![flow.protocol.number(), 0];
        payload.extend((offset | u16::from(more)).to_be_bytes());
        payload.extend(u32::from(id).to_be_bytes());
        payload.extend(body);
        return frame.around(44, &payload);
    }
    let mut frame = frame.around(flow.protocol.number(), &body);
    frame[18..20].copy_from_slice(&id.to_be_bytes());
    let field = offset >> 3 | u16::from(more) << 13;
    frame[20..22].copy_from_slice(&field.to_be_bytes());
    frame
}

fn bed_with(flow: &FlowKey) -> Bed {
    let mut bed = Bed::new();
    bed.filter
        .create_channel(ChannelId::SERVER, 4 << 20)
        .unwrap();
    bed.filter.steer(flow, row(CHANNEL)).unwrap();
    bed
}

fn filter(bed: &Bed, frame: &[u8]) -> Outcome {
    bed.run("packet_filter", frame)
}

fn delivered() -> Outcome {
    outcome(SHOT, &["delivered"])
}

fn all_flows() -> impl Iterator<Item = FlowKey> {
    [Protocol::Tcp, Protocol::Udp].into_iter().flat_map(flows)
}

#[test]
fn later_fragments_follow_the_first_of_their_datagram() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let pieces = [
            piece(&flow, 9, 0, true),
            piece(&flow, 9, 64, true),
            piece(&flow, 9, 128, false),
        ];
        for frame in &pieces {
            assert_eq!(filter(&bed, frame), delivered(), "{flow}");
        }
        let records = bed.records();
        assert_eq!(records.len(), 3);
        for ((header, copy), frame) in records.iter().zip(&pieces) {
            assert_eq!((header.slot, header.generation), (77, 5));
            assert_eq!(header.flags, RecordHeader::FRAGMENT);
            assert_eq!(copy, frame);
        }
    }
}

#[test]
fn fragments_of_the_kernels_datagrams_are_left_to_it_untouched() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let mut others = flow;
        others.local.set_port(81);
        let first = filter(&bed, &piece(&others, 9, 0, true));
        assert_eq!(first, outcome(UNSPEC, &["pass_unclaimed"]));
        for offset in [64, 128] {
            let later = filter(&bed, &piece(&others, 9, offset, true));
            assert_eq!(later, outcome(UNSPEC, &["pass_fragment"]), "{flow}");
        }
        assert!(bed.records().is_empty());
    }
}

#[test]
fn fragments_of_other_protocols_are_left_to_the_kernel() {
    for flow in flows(Protocol::Udp) {
        let bed = bed_with(&flow);
        let mut frame = piece(&flow, 9, 64, true);
        let at = if flow.local.is_ipv4() { 23 } else { 54 };
        frame[at] = if flow.local.is_ipv4() { 1 } else { 58 };
        assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_fragment"]));
    }
}

#[test]
fn a_fragment_that_comes_early_goes_to_the_kernel_and_as_a_copy_to_the_server() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let early = piece(&flow, 9, 64, true);
        let held = outcome(UNSPEC, &["held_fragment", "pass_fragment"]);
        assert_eq!(filter(&bed, &early), held, "{flow}");
        assert_eq!(filter(&bed, &piece(&flow, 9, 128, true)), held);
        // The server learns that the owner is known, and has the copies filtered again.
        let first = filter(&bed, &piece(&flow, 9, 0, true));
        assert_eq!(first, outcome(SHOT, &["delivered", "held_fragment"]));
        assert_eq!(bed.run("inject_filter", &early), delivered());
        assert_eq!(filter(&bed, &piece(&flow, 9, 192, false)), delivered());
        assert_eq!(bed.records().len(), 3);
    }
}

#[test]
fn what_the_server_held_in_vain_is_dropped_and_not_held_again() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    let early = piece(&flow, 9, 64, true);
    assert_eq!(
        bed.run("inject_filter", &early),
        outcome(SHOT, &["drop_unclaimed", "pass_fragment"])
    );
}

#[test]
fn a_flood_of_early_fragments_does_not_fill_the_servers_ring() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    // Five thousand fragments, in less than the second in which all would be accepted.
    let early = piece(&flow, 9, 64, true);
    bed.time("packet_filter", &early, || {});
    let counted = |name: &str| {
        let counters = bed.filter.counters();
        counters.iter().find(|c| c.name == name).unwrap().value
    };
    assert!(counted("held_fragment") >= 512);
    assert!(counted("pass_fragment_flood") > 0);
    assert_eq!(counted("pass_fragment"), 5000);
}

#[test]
fn a_datagrams_name_is_its_addresses_protocol_and_identification() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    assert_eq!(filter(&bed, &piece(&flow, 9, 0, true)), delivered());
    let mut other_peer = flow;
    other_peer.remote.set_ip("10.0.0.3".parse().unwrap());
    let mut other_protocol = flow;
    other_protocol.protocol = Protocol::Tcp;
    let strangers = [
        piece(&flow, 10, 64, true),
        piece(&other_peer, 9, 64, true),
        piece(&other_protocol, 9, 64, true),
    ];
    for stranger in strangers {
        assert_eq!(filter(&bed, &stranger).verdict, UNSPEC);
    }
    assert_eq!(bed.records().len(), 1);
}

#[test]
fn a_fragment_header_on_a_whole_packet_means_nothing() {
    let [_, flow] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    assert_eq!(filter(&bed, &piece(&flow, 9, 0, false)), delivered());
    assert_eq!(bed.records()[0].0.flags, 0);
}

#[test]
fn a_source_route_that_goes_on_is_the_kernels_to_refuse() {
    let [_, flow] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    let ports = [0x9c, 0x40, 0, 80, 0, 8, 0, 0];
    for (left, expected) in [(0, delivered()), (1, outcome(UNSPEC, &["pass_protocol"]))] {
        let mut payload = vec![17, 0, 4, left, 0, 0, 0, 0];
        payload.extend(ports);
        let frame = Frame::received(&flow).around(43, &payload);
        assert_eq!(filter(&bed, &frame), expected, "{left}");
    }
}

#[test]
fn a_library_sends_no_fragments() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let reason = if flow.local.is_ipv4() {
            "drop_malformed"
        } else {
            "drop_protocol"
        };
        for (offset, more) in [(0, true), (64, true), (64, false)] {
            // A frame from this host, made by reversing one to it.
            let turned = FlowKey {
                local: flow.remote,
                remote: flow.local,
                ..flow
            };
            let mut frame = piece(&turned, 9, offset, more);
            frame[6..12].copy_from_slice(&OWN_MAC.0);
            let sent = bed.run("transmit_filter", &frame);
            assert_eq!(sent, outcome(SHOT, &[reason]), "{flow} {offset}");
        }
    }
}

#[test]
fn who_sends_a_datagram_in_fragments_does_not_choose_its_identification() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    let mut frame = Frame {
        payload: 3000,
        ..Frame::sent(&flow, OWN_MAC)
    }
    .build();
    let chosen = 0x1234u16;
    frame[18..20].copy_from_slice(&chosen.to_be_bytes());
    let mut seen = Vec::new();
    for _ in 0..4 {
        let (outcome, sent) =
            bed.run_and_see("transmit_filter", &frame, &mut Context::with_gso_size(1480));
        assert_eq!(outcome, super::bed::outcome(REDIRECT, &["sent"]));
        let header: u32 = sent[14..34]
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        let before: u32 = frame[14..34]
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        assert_eq!(header % 0xffff, before % 0xffff, "the checksum follows");
        seen.push(u16::from_be_bytes([sent[18], sent[19]]));
    }
    let consecutive = seen
        .windows(2)
        .all(|pair| pair[1] == pair[0].wrapping_add(1));
    assert!(consecutive, "{seen:x?}");
    // The first is random: once in 65,536 runs it is the chosen one.
    assert_ne!(seen[0], chosen);
    // An unfragmented packet that must not be fragmented keeps its identification.
    let whole = Frame::sent(&flow, OWN_MAC).build();
    let (_, sent) = bed.run_and_see("transmit_filter", &whole, &mut Context::default());
    assert_eq!(sent, whole);
}
