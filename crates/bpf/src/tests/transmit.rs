//! The transmit filter: who may send what.

use portolan_proto::filter::{BindingKey, CHOSEN_PRIORITY, FlowRow, TRAFFIC_HANDLE};
use portolan_types::{ChannelId, FlowKey, MacAddr, Protocol};

use super::attach::in_fresh_namespace;
use super::bed::{
    Bed, CHANNEL, Context, IFINDEX, OTHER_CHANNEL, OWN_MAC, Outcome, REDIRECT, SHOT, STOLEN,
    any_address, flows, outcome, row, sender, shared_row,
};
use super::frames::Frame;

/// Mark of a frame that passes the filter again, with its class.
const MARK_AGAIN: u32 = 0x706f_0000;

fn all_flows() -> impl Iterator<Item = FlowKey> {
    [Protocol::Tcp, Protocol::Udp].into_iter().flat_map(flows)
}

fn bed_with(flow: &FlowKey) -> Bed {
    let bed = Bed::new();
    bed.filter.steer(flow, row(CHANNEL)).unwrap();
    bed
}

/// A bed with the server's tap.
fn bed_of_server() -> Bed {
    let mut bed = Bed::new();
    bed.filter.register_tap(ChannelId::SERVER, IFINDEX).unwrap();
    bed
}

fn send(bed: &Bed, frame: &[u8]) -> Outcome {
    bed.run("transmit_filter", frame)
}

fn sent() -> Outcome {
    outcome(REDIRECT, &["sent"])
}

fn dropped(reason: &'static str) -> Outcome {
    outcome(SHOT, &[reason])
}

#[test]
fn a_channel_sends_from_its_own_flow() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        assert_eq!(
            send(&bed, &Frame::sent(&flow, OWN_MAC).build()),
            sent(),
            "{flow}"
        );
    }
}

#[test]
fn a_spoofed_source_mac_is_dropped() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        for spoof in 0..6 {
            let mut mac = OWN_MAC;
            mac.0[spoof] ^= 4;
            let frame = Frame::sent(&flow, mac).build();
            assert_eq!(
                send(&bed, &frame),
                dropped("drop_source_mac"),
                "byte {spoof}"
            );
        }
        let frame = Frame::sent(&flow, MacAddr::default()).build();
        assert_eq!(send(&bed, &frame), dropped("drop_source_mac"));
    }
}

#[test]
fn a_spoofed_address_port_or_protocol_is_dropped() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let base = Frame::sent(&flow, OWN_MAC);
        let mut spoofs = vec![base.clone(); 5];
        let stranger = if flow.local.is_ipv4() {
            "10.0.0.3"
        } else {
            "fd00::3"
        };
        spoofs[0].source.set_ip(stranger.parse().unwrap());
        spoofs[1].source.set_port(81);
        spoofs[2].destination.set_ip(stranger.parse().unwrap());
        spoofs[3].destination.set_port(81);
        spoofs[4].protocol = if flow.protocol == Protocol::Tcp {
            Protocol::Udp
        } else {
            Protocol::Tcp
        };
        for spoof in spoofs {
            assert_eq!(
                send(&bed, &spoof.build()),
                dropped("drop_no_flow"),
                "{flow}"
            );
        }
    }
}

#[test]
fn another_channels_flow_is_dropped() {
    for flow in all_flows() {
        let bed = Bed::new();
        bed.filter.steer(&flow, row(OTHER_CHANNEL)).unwrap();
        let frame = Frame::sent(&flow, OWN_MAC).build();
        assert_eq!(send(&bed, &frame), dropped("drop_foreign"), "{flow}");
    }
}

#[test]
fn another_channels_flow_is_dropped_even_from_a_port_of_ones_own() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = Bed::new();
    bed.filter.steer(&flow, row(OTHER_CHANNEL)).unwrap();
    bed.filter
        .bind(&BindingKey::new(flow.protocol, flow.local), row(CHANNEL))
        .unwrap();
    let frame = Frame::sent(&flow, OWN_MAC).build();
    assert_eq!(send(&bed, &frame), dropped("drop_foreign"));
}

#[test]
fn a_channel_sends_datagrams_from_a_port_that_it_has_bound() {
    for flow in flows(Protocol::Udp) {
        for local in [flow.local, any_address(&flow)] {
            let bed = Bed::new();
            let key = BindingKey::new(flow.protocol, local);
            bed.filter.bind(&key, row(CHANNEL)).unwrap();
            let frame = Frame::sent(&flow, OWN_MAC);
            assert_eq!(send(&bed, &frame.build()), sent(), "{local}");
            let mut spoof = frame.clone();
            spoof.source.set_port(81);
            assert_eq!(send(&bed, &spoof.build()), dropped("drop_no_flow"));
            bed.filter.bind(&key, row(OTHER_CHANNEL)).unwrap();
            assert_eq!(send(&bed, &frame.build()), dropped("drop_foreign"));
        }
    }
}

#[test]
fn a_port_bound_to_any_address_does_not_give_foreign_addresses() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let key = BindingKey::new(flow.protocol, any_address(&flow));
        bed.filter.bind(&key, row(CHANNEL)).unwrap();
        let mut frame = Frame::sent(&flow, OWN_MAC);
        frame.source.set_ip(flow.remote.ip());
        assert_eq!(send(&bed, &frame.build()), dropped("drop_source_address"));
    }
}

#[test]
fn a_tcp_listener_does_not_let_its_channel_send() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = Bed::new();
    bed.filter
        .bind(&BindingKey::new(flow.protocol, flow.local), row(CHANNEL))
        .unwrap();
    assert_eq!(
        send(&bed, &Frame::sent(&flow, OWN_MAC).build()),
        dropped("drop_no_flow")
    );
}

#[test]
fn a_delegated_listener_lets_its_channel_and_no_other_send() {
    for flow in flows(Protocol::Tcp) {
        for local in [flow.local, any_address(&flow)] {
            let bed = Bed::new();
            let key = BindingKey::new(flow.protocol, local);
            let delegated = |channel| FlowRow {
                flags: FlowRow::DELEGATED,
                ..row(channel)
            };
            bed.filter.bind(&key, delegated(CHANNEL)).unwrap();
            let frame = Frame::sent(&flow, OWN_MAC);
            assert_eq!(send(&bed, &frame.build()), sent(), "{local}");
            let mut spoof = frame.clone();
            spoof.source.set_port(81);
            assert_eq!(send(&bed, &spoof.build()), dropped("drop_no_flow"));
            bed.filter.bind(&key, delegated(OTHER_CHANNEL)).unwrap();
            assert_eq!(send(&bed, &frame.build()), dropped("drop_foreign"));
            // Another process's connection on the port does not belong to the delegate.
            bed.filter.bind(&key, delegated(CHANNEL)).unwrap();
            bed.filter.steer(&flow, row(OTHER_CHANNEL)).unwrap();
            assert_eq!(send(&bed, &frame.build()), dropped("drop_foreign"));
        }
    }
}

#[test]
fn a_delegated_port_of_any_address_gives_nothing_of_a_listener_on_one() {
    for flow in flows(Protocol::Tcp) {
        let bed = Bed::new();
        let delegated = FlowRow {
            flags: FlowRow::DELEGATED,
            ..row(CHANNEL)
        };
        let any = BindingKey::new(flow.protocol, any_address(&flow));
        bed.filter.bind(&any, delegated).unwrap();
        let exact = BindingKey::new(flow.protocol, flow.local);
        bed.filter.bind(&exact, row(ChannelId::SERVER)).unwrap();
        let frame = Frame::sent(&flow, OWN_MAC).build();
        assert_eq!(send(&bed, &frame), dropped("drop_no_flow"));
    }
}

#[test]
fn options_extension_headers_and_fragments_are_dropped() {
    let [v4, v6] = flows(Protocol::Udp);
    let bed = bed_with(&v4);
    bed.filter.steer(&v6, row(CHANNEL)).unwrap();
    let options = Frame::sent(&v4, OWN_MAC).build_with_options();
    assert_eq!(send(&bed, &options), dropped("drop_malformed"));
    let mut fragment = Frame::sent(&v4, OWN_MAC).build();
    fragment[20] = 0x20;
    assert_eq!(send(&bed, &fragment), dropped("drop_malformed"));
    let extension = Frame::sent(&v6, OWN_MAC).build_with_options();
    assert_eq!(send(&bed, &extension), dropped("drop_protocol"));
}

#[test]
fn other_protocols_are_dropped() {
    for flow in flows(Protocol::Udp) {
        let bed = bed_with(&flow);
        for protocol in [1, 2, 47, 58, 132] {
            let frame = Frame::sent(&flow, OWN_MAC).around(protocol, &[0; 16]);
            assert_eq!(send(&bed, &frame), dropped("drop_protocol"));
        }
        let mut arp = Frame::sent(&flow, OWN_MAC).build();
        arp[12..14].copy_from_slice(&[0x08, 0x06]);
        assert_eq!(send(&bed, &arp), dropped("drop_not_ip"));
    }
}

#[test]
fn short_frames_are_dropped() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let whole = Frame::sent(&flow, OWN_MAC).build();
        let ip_header = if flow.local.is_ipv4() { 20 } else { 40 };
        let cut = &whole[..14 + ip_header + 3];
        assert_eq!(send(&bed, cut), dropped("drop_malformed"), "{flow}");
    }
}

#[test]
fn a_tap_of_no_channel_sends_nothing() {
    let [flow, _] = flows(Protocol::Tcp);
    let mut bed = bed_with(&flow);
    bed.filter.remove_channel(CHANNEL).unwrap();
    assert_eq!(
        send(&bed, &Frame::sent(&flow, OWN_MAC).build()),
        dropped("drop_no_channel")
    );
}

#[test]
fn the_server_sends_anything_from_a_local_address() {
    for flow in all_flows() {
        let bed = bed_of_server();
        let frame = Frame::sent(&flow, OWN_MAC);
        assert_eq!(send(&bed, &frame.build()), sent());
        assert_eq!(send(&bed, &frame.around(1, &[0; 16])), sent());
        let foreign = Frame {
            source: flow.remote,
            ..frame.clone()
        };
        assert_eq!(send(&bed, &foreign.build()), dropped("drop_source_address"));
        let spoof = Frame {
            source_mac: MacAddr([2, 9, 9, 9, 9, 9]),
            ..frame
        };
        assert_eq!(send(&bed, &spoof.build()), dropped("drop_source_mac"));
    }
}

/// The priority of a frame when it is sent.
fn priority_of(bed: &Bed, frame: &[u8]) -> u32 {
    let mut context = Context::default();
    let outcome = bed.run_with("transmit_filter", frame, &mut context);
    assert_eq!(outcome, sent());
    context.priority()
}

fn priority(class: u16) -> u32 {
    u32::from(TRAFFIC_HANDLE) << 16 | u32::from(class)
}

fn in_class(class: u16) -> FlowRow {
    FlowRow {
        class,
        ..row(CHANNEL)
    }
}

#[test]
fn a_flow_is_sent_in_its_class_and_else_in_its_channels() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let frame = Frame::sent(&flow, OWN_MAC).build();
        assert_eq!(priority_of(&bed, &frame), 0, "{flow}");
        bed.filter.set_tap(CHANNEL, IFINDEX, 2).unwrap();
        assert_eq!(priority_of(&bed, &frame), priority(2), "{flow}");
        bed.filter.steer(&flow, in_class(0x10)).unwrap();
        assert_eq!(priority_of(&bed, &frame), priority(0x10), "{flow}");
        bed.filter.set_tap(CHANNEL, IFINDEX, 0).unwrap();
        assert_eq!(priority_of(&bed, &frame), priority(0x10), "{flow}");
    }
}

#[test]
fn what_a_program_chooses_counts_where_nothing_is_reserved() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let frame = Frame::sent(&flow, OWN_MAC).build();
        bed.filter
            .steer(&flow, in_class(CHOSEN_PRIORITY | 5))
            .unwrap();
        assert_eq!(priority_of(&bed, &frame), 5, "{flow}");
        // Best effort is the qdisc's default anyway.
        bed.filter.set_tap(CHANNEL, IFINDEX, 2).unwrap();
        assert_eq!(priority_of(&bed, &frame), 5, "{flow}");
        bed.filter.set_tap(CHANNEL, IFINDEX, 0x10).unwrap();
        assert_eq!(priority_of(&bed, &frame), priority(0x10), "{flow}");
    }
}

#[test]
fn a_bound_port_has_a_class_also_when_it_is_shared() {
    for flow in flows(Protocol::Udp) {
        let bed = Bed::new();
        let binding = BindingKey::new(flow.protocol, any_address(&flow));
        let frame = Frame::sent(&flow, OWN_MAC).build();
        bed.filter.bind(&binding, in_class(0x11)).unwrap();
        assert_eq!(priority_of(&bed, &frame), priority(0x11), "{flow}");
        let shared = FlowRow {
            class: 0x12,
            ..shared_row()
        };
        bed.filter.bind(&binding, shared).unwrap();
        bed.filter.allow_sender(&sender(binding), 0x13).unwrap();
        assert_eq!(priority_of(&bed, &frame), priority(0x13), "{flow}");
    }
}

#[test]
fn what_goes_to_no_station_leaves_by_way_of_the_kernel_in_its_class() {
    in_fresh_namespace(|| {
        for flow in all_flows() {
            let bed = Bed::new();
            bed.filter.steer(&flow, in_class(0x10)).unwrap();
            let mut frame = Frame::sent(&flow, OWN_MAC);
            frame.destination_mac = MacAddr::default();
            let unaddressed = outcome(STOLEN, &["unaddressed"]);
            assert_eq!(send(&bed, &frame.build()), unaddressed, "{flow}");
            let mut again = Context::with_mark(MARK_AGAIN | 0x10);
            let left = bed.run_with("transmit_filter", &frame.build(), &mut again);
            assert_eq!(left, sent(), "{flow}");
            assert_eq!(again.priority(), priority(0x10), "{flow}");
            frame.source.set_port(81);
            assert_eq!(send(&bed, &frame.build()), dropped("drop_no_flow"));
        }
    });
}

/// Handlers may see what is sent from a shared port.
#[test]
fn what_goes_to_no_station_from_a_shared_port_does_so_too() {
    in_fresh_namespace(|| {
        for flow in flows(Protocol::Udp) {
            let bed = Bed::new();
            let binding = BindingKey::new(flow.protocol, flow.local);
            bed.filter.bind(&binding, shared_row()).unwrap();
            bed.filter.allow_sender(&sender(binding), 0).unwrap();
            let mut frame = Frame::sent(&flow, OWN_MAC);
            frame.destination_mac = MacAddr::default();
            let unaddressed = outcome(STOLEN, &["unaddressed"]);
            assert_eq!(send(&bed, &frame.build()), unaddressed, "{flow}");
        }
    });
}

#[test]
fn a_relayed_flow_keeps_its_class() {
    for flow in all_flows() {
        let bed = bed_of_server();
        let frame = Frame::sent(&flow, OWN_MAC);
        let row = FlowRow {
            class: 0x14,
            ..row(ChannelId::SERVER)
        };
        bed.filter.steer(&flow, row).unwrap();
        bed.filter.set_tap(ChannelId::SERVER, IFINDEX, 2).unwrap();
        assert_eq!(priority_of(&bed, &frame.build()), priority(0x14), "{flow}");
        let other = frame.around(1, &[0; 16]);
        assert_eq!(priority_of(&bed, &other), priority(2), "{flow}");
        bed.filter.unsteer(&flow).unwrap();
        assert_eq!(priority_of(&bed, &frame.build()), priority(2), "{flow}");
    }
}
