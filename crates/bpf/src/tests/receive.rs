//! The packet filter: who gets which frame.

use std::thread::sleep;
use std::time::Duration;

use portolan_proto::filter::{BindingKey, Doorbell, FlowRow, RecordHeader};
use portolan_types::{ChannelId, FlowKey, MacAddr, Protocol};
use portolan_wire::icmp::{Cause, Echo, IcmpMessage};
use rustix::time::{ClockId, clock_gettime};

use super::bed::{Bed, CHANNEL, Context, IFINDEX, OWN_MAC, Outcome, REDIRECT, SHOT, UNSPEC};
use super::bed::{any_address, doorbell_of, flows, outcome, records_of, row};
use super::frames::Frame;

fn all_flows() -> impl Iterator<Item = FlowKey> {
    [Protocol::Tcp, Protocol::Udp].into_iter().flat_map(flows)
}

/// A bed on which the flow is steered to the channel.
fn bed_with(flow: &FlowKey) -> Bed {
    let bed = Bed::new();
    bed.filter.steer(flow, row(CHANNEL)).unwrap();
    bed
}

fn filter(bed: &Bed, frame: &[u8]) -> Outcome {
    bed.run("packet_filter", frame)
}

#[test]
fn a_packet_of_a_flow_goes_into_the_owners_ring() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let frame = Frame::received(&flow).build();
        assert_eq!(
            filter(&bed, &frame),
            outcome(SHOT, &["delivered"]),
            "{flow}"
        );
        let records = bed.records();
        let (header, copy) = &records[0];
        assert_eq!(copy, &frame, "{flow}");
        assert_eq!((header.slot, header.generation), (77, 5));
        assert_eq!(
            (header.flags, header.gso_size, header.ifindex),
            (0, 0, IFINDEX)
        );
        assert!(header.timestamp > 0);
        assert_eq!(records.len(), 1);
        assert_eq!(bed.doorbell().delivered, 1);
    }
}

#[test]
fn frames_that_an_awake_owner_leaves_alone_wake_it_after_a_while() {
    const WHILE: Duration = Duration::from_millis(5);
    let flow = flows(Protocol::Tcp)[0];
    let bed = bed_with(&flow);
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame).verdict, SHOT);
    sleep(WHILE);
    assert_eq!(unattended(&bed), 0, "nobody wants to be woken");
    bed.want_attention(0);
    assert_eq!(filter(&bed, &frame).verdict, SHOT);
    sleep(WHILE);
    assert_eq!(unattended(&bed), 1);
    sleep(WHILE);
    assert_eq!(unattended(&bed), 1, "once for each time that more comes");
    assert_eq!(bed.records().len(), 2, "what woke is no frame");
}

fn unattended(bed: &Bed) -> u64 {
    let counters = bed.filter.counters();
    let mut counters = counters.into_iter();
    let found = counters.find(|counter| counter.name == "unattended");
    found.expect("there is one").value
}

#[test]
fn a_frame_for_an_owner_who_looked_long_ago_wakes_at_once() {
    /// After this time the timer may have woken the owner, too.
    const TIMER: Duration = Duration::from_micros(150);
    let flow = flows(Protocol::Tcp)[0];
    let bed = bed_with(&flow);
    let frame = Frame::received(&flow).build();
    filter(&bed, &frame);
    let looked_at = bed.records()[0].0.timestamp;
    // Until the machine runs the test in time.
    for turn in 0..1000 {
        sleep(Duration::from_millis(1));
        bed.want_attention(looked_at + turn);
        let first = filter(&bed, &frame);
        assert_eq!(first, outcome(SHOT, &["delivered", "unattended"]));
        let second = filter(&bed, &frame);
        let seen = monotonic();
        let came = Duration::from_nanos(bed.records()[1].0.timestamp);
        if seen - came < TIMER {
            let once = outcome(SHOT, &["delivered"]);
            assert_eq!(second, once, "once for each of its looks");
            return;
        }
    }
    panic!("the test never looked in time");
}

/// Neither time that passes while frames are left alone, nor an owner limited by a window, lengthens the
/// wait.
#[test]
fn an_owner_that_comes_often_and_then_computes_is_woken_for_as_soon() {
    let flow = flows(Protocol::Tcp)[0];
    let bed = bed_with(&flow);
    let frame = Frame::received(&flow).build();
    let come_often = || {
        for _ in 0..30 {
            filter(&bed, &frame);
            sleep(Duration::from_micros(300));
            bed.records();
        }
    };
    bed.want_attention(0);
    come_often();
    let before = unattended(&bed);
    filter(&bed, &frame);
    sleep(Duration::from_micros(200));
    filter(&bed, &frame);
    assert!(unattended(&bed) > before, "the first was left alone");

    bed.records();
    sleep(Duration::from_millis(5));
    come_often();
    let before = unattended(&bed);
    bed.await_window();
    filter(&bed, &frame);
    sleep(Duration::from_millis(1));
    assert!(unattended(&bed) > before, "it waits for its window");
}

/// The timer started while the owner polled continuously is brought forward.
#[test]
fn an_owner_that_leaves_off_polling_is_woken_for_as_soon() {
    const LATER: Duration = Duration::from_micros(500);
    let flow = flows(Protocol::Tcp)[0];
    let bed = bed_with(&flow);
    let frame = Frame::received(&flow).build();
    // On a busy machine interrupts may be later than that.
    let is_woken = (0..100).any(|_| {
        bed.want_attention(0);
        let take = || drop(bed.records());
        // The last of them starts the timer with its longest interval.
        bed.time("packet_filter", &frame, take);
        let begun = monotonic();
        bed.want_attention(begun.as_nanos() as u64);
        let before = unattended(&bed);
        bed.test_run("packet_filter", &frame, &mut Context::default(), 1, None);
        sleep(LATER);
        unattended(&bed) > before && monotonic() - begun < 2 * LATER
    });
    assert!(is_woken, "it computes");
}

fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap()
}

#[test]
fn a_flow_with_a_ring_of_its_own_shares_neither_ring_nor_notifier() {
    const RING: ChannelId = ChannelId(5);
    for flow in all_flows() {
        let bed = Bed::new();
        let own = bed.add_ring(RING);
        let direct = FlowRow {
            ring: RING.0,
            ..row(CHANNEL)
        };
        bed.filter.steer(&flow, direct).unwrap();
        // The owner of the channel's ring sleeps on the tap; that of the flow's ring is awake.
        bed.set_doorbell(Doorbell::ASLEEP_ON_TAP);
        let frame = Frame::received(&flow).build();
        assert_eq!(
            filter(&bed, &frame),
            outcome(SHOT, &["delivered_direct"]),
            "{flow}"
        );
        let records = records_of(&own);
        assert_eq!(records[0].1, frame, "{flow}");
        assert_eq!((records[0].0.slot, records.len()), (77, 1));
        assert_eq!(doorbell_of(&own).delivered, 1);
        assert!(bed.records().is_empty());
        assert_eq!(bed.doorbell().delivered, 0);
        // In all other respects it belongs to the channel: packets it sends pass.
        let sent = Frame::sent(&flow, OWN_MAC).build();
        let passed = bed.run("transmit_filter", &sent);
        assert_eq!(passed.counted, ["sent"], "{flow}");
    }
}

#[test]
fn a_ring_that_is_full_or_gone_is_its_sessions_loss() {
    const RING: ChannelId = ChannelId(5);
    let [flow, other] = flows(Protocol::Udp);
    let mut bed = Bed::new();
    let _own = bed.add_ring(RING);
    let direct = FlowRow {
        ring: RING.0,
        ..row(CHANNEL)
    };
    bed.filter.steer(&flow, direct).unwrap();
    bed.filter.steer(&other, row(CHANNEL)).unwrap();
    let large = Frame {
        payload: 3000,
        ..Frame::received(&flow)
    }
    .build();
    let full = || filter(&bed, &large) == outcome(SHOT, &["drop_ring_full"]);
    assert!((0..10_000).any(|_| full()));
    assert_eq!(bed.filter.losses(CHANNEL).ring_full, 1);
    let frame = Frame::received(&other).build();
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["delivered"]));

    bed.filter.remove_channel(RING).unwrap();
    bed.filter.map_builder().await_removal(RING);
    assert_eq!(filter(&bed, &large), outcome(SHOT, &["drop_no_channel"]));
}

#[test]
fn frames_of_every_length_are_copied_whole() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    // The edges of the record classes that a test run can reach; attach.rs goes to 64 KiB.
    for payload in [
        0, 1, 181, 182, 183, 437, 438, 439, 949, 950, 951, 1973, 1974, 1975, 3000,
    ] {
        let frame = Frame {
            payload,
            ..Frame::received(&flow)
        }
        .build();
        assert_eq!(filter(&bed, &frame), outcome(SHOT, &["delivered"]));
        let records = bed.records();
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].1, frame, "{payload} bytes");
    }
}

#[test]
fn a_coalesced_frame_keeps_its_segment_size() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    let frame = Frame {
        payload: 3000,
        ..Frame::received(&flow)
    }
    .build();
    bed.run_with("packet_filter", &frame, &mut Context::with_gso_size(1448));
    assert_eq!(bed.records()[0].0.gso_size, 1448);
}

#[test]
fn a_packet_that_differs_in_any_part_of_the_key_is_left_to_the_kernel() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let base = Frame::received(&flow);
        let mut spoilt = vec![base.clone(); 5];
        spoilt[0].source.set_port(40001);
        spoilt[1].destination.set_port(81);
        let [v4, v6] = flows(flow.protocol);
        let stranger = if flow.local.is_ipv4() {
            "10.0.0.3"
        } else {
            "fd00::3"
        };
        spoilt[2].source.set_ip(stranger.parse().unwrap());
        spoilt[3].destination.set_ip(stranger.parse().unwrap());
        spoilt[4].protocol = if flow.protocol == Protocol::Tcp {
            Protocol::Udp
        } else {
            Protocol::Tcp
        };
        for frame in spoilt {
            let expected = outcome(UNSPEC, &["pass_unclaimed"]);
            assert_eq!(filter(&bed, &frame.build()), expected, "{flow}");
        }
        let other_family = if flow == v4 { v6 } else { v4 };
        let frame = Frame::received(&other_family).build();
        assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_unclaimed"]));
        assert!(bed.records().is_empty());
    }
}

#[test]
fn unaimed_flows_are_left_to_the_kernel() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    bed.filter.unsteer(&flow).unwrap();
    bed.filter.unsteer(&flow).unwrap();
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_unclaimed"]));
}

#[test]
fn a_packet_without_a_flow_goes_to_the_binding_of_its_port() {
    for flow in all_flows() {
        for local in [flow.local, any_address(&flow)] {
            let bed = Bed::new();
            let key = BindingKey::new(flow.protocol, local);
            bed.filter.bind(&key, row(CHANNEL)).unwrap();
            let frame = Frame::received(&flow).build();
            assert_eq!(
                filter(&bed, &frame),
                outcome(SHOT, &["delivered"]),
                "{flow} {local}"
            );
            assert_eq!(bed.records()[0].0.flags, RecordHeader::BINDING);
            bed.filter.unbind(&key).unwrap();
            assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_unclaimed"]));
        }
    }
}

/// The kernel's sockets on the port receive what the policy admits. A delegated listener's handshakes have no flows.
#[test]
fn where_the_host_has_a_policy_only_flows_are_not_left_to_the_kernel() {
    for flow in all_flows() {
        let bed = Bed::new();
        let key = BindingKey::new(flow.protocol, flow.local);
        bed.filter.bind(&key, row(CHANNEL)).unwrap();
        bed.filter.set_policy(true).unwrap();
        let frame = Frame::received(&flow).build();
        let left = outcome(UNSPEC, &["pass_policy"]);
        assert_eq!(filter(&bed, &frame), left, "{flow}");
        bed.filter.steer(&flow, row(CHANNEL)).unwrap();
        let delivered = outcome(SHOT, &["delivered"]);
        assert_eq!(filter(&bed, &frame), delivered, "{flow}");
        bed.filter.unsteer(&flow).unwrap();
        bed.filter.set_policy(false).unwrap();
        assert_eq!(filter(&bed, &frame), delivered, "{flow}");
    }
}

#[test]
fn a_flow_goes_before_a_binding_and_an_address_before_any() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = Bed::new();
    let any = BindingKey::new(flow.protocol, any_address(&flow));
    let exact = BindingKey::new(flow.protocol, flow.local);
    let with_slot = |slot| portolan_proto::filter::FlowRow {
        slot,
        ..row(CHANNEL)
    };
    let frame = Frame::received(&flow).build();
    bed.filter.bind(&any, with_slot(1)).unwrap();
    filter(&bed, &frame);
    bed.filter.bind(&exact, with_slot(2)).unwrap();
    filter(&bed, &frame);
    bed.filter.steer(&flow, with_slot(3)).unwrap();
    filter(&bed, &frame);
    let slots: Vec<u32> = bed
        .records()
        .iter()
        .map(|(header, _)| header.slot)
        .collect();
    assert_eq!(slots, [1, 2, 3]);
}

#[test]
fn a_bound_port_on_a_foreign_address_is_left_to_the_kernel() {
    let [flow, _] = flows(Protocol::Udp);
    let mut bed = Bed::new();
    let any = BindingKey::new(flow.protocol, any_address(&flow));
    bed.filter.bind(&any, row(CHANNEL)).unwrap();
    bed.filter
        .set_local_addresses(&["10.9.9.9".parse().unwrap()], &[])
        .unwrap();
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_not_local"]));
}

/// RFC 1122 §3.2.1.3, RFC 4291 §2.5: no other host has such an address.
#[test]
fn a_packet_from_an_address_that_no_other_host_has_is_dropped() {
    for flow in all_flows() {
        let bed = Bed::new();
        for local in [flow.local, any_address(&flow)] {
            let key = BindingKey::new(flow.protocol, local);
            bed.filter.bind(&key, row(CHANNEL)).unwrap();
        }
        let sources: &[&str] = if flow.local.is_ipv4() {
            &[
                "127.0.0.1",
                "127.9.9.9",
                "0.0.0.0",
                "224.0.0.1",
                "255.255.255.255",
            ]
        } else {
            &["::", "::1", "ff02::1", "::ffff:10.0.0.1"]
        };
        let own = flow.local.ip();
        let sources = sources.iter().map(|text| text.parse().unwrap());
        for source in sources.chain([own]) {
            let mut frame = Frame::received(&flow);
            frame.source.set_ip(source);
            let dropped = outcome(SHOT, &["drop_martian"]);
            assert_eq!(filter(&bed, &frame.build()), dropped, "{flow} {source}");
        }
        assert!(bed.records().is_empty());
        // The kernel has checked what the server injects.
        let mut frame = Frame::received(&flow);
        frame.source.set_ip(own);
        let outcome = bed.run("inject_filter", &frame.build());
        assert_eq!(outcome, self::outcome(SHOT, &["delivered"]), "{flow}");
    }
}

#[test]
fn options_and_extension_headers_are_walked_over() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let frame = Frame::received(&flow).build_with_options();
        assert_eq!(
            filter(&bed, &frame),
            outcome(SHOT, &["delivered"]),
            "{flow}"
        );
    }
}

#[test]
fn an_icmp_error_reaches_the_owner_and_the_kernel() {
    for flow in all_flows() {
        for cause in [Cause::PortUnreachable, Cause::TooBig { mtu: 1280 }] {
            let bed = bed_with(&flow);
            let frame = Frame::sent(&flow, OWN_MAC).build_error_about(cause);
            assert_eq!(
                filter(&bed, &frame),
                outcome(UNSPEC, &["delivered_icmp_error"])
            );
            let records = bed.records();
            assert_eq!(records[0].0.flags, RecordHeader::ICMP_ERROR);
            assert_eq!(records[0].0.slot, 77);
            assert_eq!(records[0].1, frame);
        }
    }
}

#[test]
fn an_icmp_error_about_a_bound_ports_datagram_reaches_its_owner() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = Bed::new();
    bed.filter
        .bind(&BindingKey::new(flow.protocol, flow.local), row(CHANNEL))
        .unwrap();
    let frame = Frame::sent(&flow, OWN_MAC).build_error_about(Cause::PortUnreachable);
    assert_eq!(
        filter(&bed, &frame),
        outcome(UNSPEC, &["delivered_icmp_error"])
    );
    let expected = RecordHeader::ICMP_ERROR | RecordHeader::BINDING;
    assert_eq!(bed.records()[0].0.flags, expected);
}

#[test]
fn an_icmp_error_about_a_strangers_packet_is_left_to_the_kernel() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    let mut sent = Frame::sent(&flow, OWN_MAC);
    sent.source.set_port(81);
    let frame = sent.build_error_about(Cause::HostUnreachable);
    assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_unclaimed"]));
}

#[test]
fn other_icmp_and_other_protocols_are_left_to_the_kernel() {
    for flow in flows(Protocol::Tcp) {
        let bed = bed_with(&flow);
        let base = Frame::received(&flow);
        let echo = IcmpMessage::EchoRequest(Echo {
            identifier: 1,
            sequence: 1,
            data: b"ping",
        });
        let mut message = vec![0; echo.emitted_len()];
        echo.emit_v4(&mut message);
        let icmp = if flow.local.is_ipv4() { 1 } else { 58 };
        if icmp == 58 {
            message[0] = 128;
        }
        for frame in [base.around(icmp, &message), base.around(47, &message)] {
            assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_protocol"]));
        }
    }
}

#[test]
fn headers_that_are_cut_short_or_inconsistent_are_left_to_the_kernel() {
    for flow in all_flows() {
        let bed = bed_with(&flow);
        let whole = Frame::received(&flow).build();
        let ip_header = if flow.local.is_ipv4() { 20 } else { 40 };
        let mut wrong_version = whole.clone();
        wrong_version[14] ^= 0xf0;
        // For IPv4, a header length beyond the frame; for IPv6, no length at all.
        let mut wrong_length = whole.clone();
        wrong_length[14] |= 0x0f;
        let mut malformed = vec![&whole[..14 + ip_header + 3], &wrong_version];
        if flow.local.is_ipv4() {
            malformed.push(&wrong_length);
        }
        for frame in malformed {
            assert_eq!(
                filter(&bed, frame),
                outcome(UNSPEC, &["pass_malformed"]),
                "{flow}"
            );
        }
    }
}

#[test]
fn an_endless_chain_of_extension_headers_is_left_to_the_kernel() {
    let [_, flow] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    let frame = Frame::received(&flow).around(0, &[0; 128]);
    assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_malformed"]));
}

#[test]
fn what_is_not_ip_is_left_to_the_kernel() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    let mut frame = Frame::received(&flow).build();
    frame[12..14].copy_from_slice(&[0x08, 0x06]);
    assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_not_ip"]));
}

#[test]
fn frames_to_other_stations_and_to_groups_are_left_to_the_kernel() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    for mac in [[2, 9, 9, 9, 9, 9], [1, 0, 0x5e, 0, 0, 1], [0xff; 6]] {
        let frame = Frame {
            destination_mac: MacAddr(mac),
            ..Frame::received(&flow)
        }
        .build();
        assert_eq!(filter(&bed, &frame), outcome(UNSPEC, &["pass_not_to_host"]));
    }
}

#[test]
fn a_full_ring_drops_and_counts_for_its_own_channel_only() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow);
    let frame = Frame {
        payload: 3000,
        ..Frame::received(&flow)
    }
    .build();
    let mut delivered = 0;
    while filter(&bed, &frame) == outcome(SHOT, &["delivered"]) {
        delivered += 1;
    }
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["drop_ring_full"]));
    let doorbell = bed.doorbell();
    assert_eq!((doorbell.delivered, doorbell.overflow), (delivered, 2));
    assert_eq!(bed.records().len() as u64, delivered);
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["delivered"]));
}

#[test]
fn a_row_to_a_removed_channel_drops_rather_than_wakes_the_kernel() {
    let [flow, _] = flows(Protocol::Tcp);
    let mut bed = bed_with(&flow);
    bed.filter.remove_channel(CHANNEL).unwrap();
    bed.filter.map_builder().await_removal(CHANNEL);
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["drop_no_channel"]));
    bed.filter.steer(&flow, row(ChannelId(u32::MAX))).unwrap();
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["drop_no_channel"]));
}

#[test]
fn the_number_of_a_removed_channel_can_be_used_again() {
    let [flow, _] = flows(Protocol::Tcp);
    let mut bed = bed_with(&flow);
    bed.filter.remove_channel(CHANNEL).unwrap();
    bed.filter.create_channel(CHANNEL, 0).unwrap();
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["delivered"]));
}

#[test]
fn a_channel_beyond_the_limit_is_refused() {
    let refused = Bed::new().filter.create_channel(ChannelId(8), 0);
    assert!(matches!(
        refused,
        Err(crate::ChannelError::OutOfRange(ChannelId(8)))
    ));
}

#[test]
fn a_sleeping_owner_is_woken_once() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    bed.set_doorbell(Doorbell::ASLEEP);
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), outcome(SHOT, &["delivered"]));
    assert_eq!(bed.doorbell().state, Doorbell::AWAKE);
    assert_eq!(bed.records().len(), 1);
}

#[test]
fn an_owner_that_sleeps_on_its_tap_gets_the_frame_there_until_it_says_otherwise() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    bed.set_doorbell(Doorbell::ASLEEP_ON_TAP);
    let frame = Frame::received(&flow).build();
    for _ in 0..2 {
        assert_eq!(
            filter(&bed, &frame),
            outcome(REDIRECT, &["delivered_on_tap"])
        );
    }
    assert_eq!(bed.doorbell().state, Doorbell::ASLEEP_ON_TAP);
    assert_eq!(bed.doorbell().delivered, 2);
    assert!(bed.records().is_empty());

    let error = Frame::sent(&flow, OWN_MAC).build_error_about(Cause::HostUnreachable);
    assert_eq!(
        filter(&bed, &error),
        outcome(UNSPEC, &["delivered_icmp_error"])
    );
    assert_eq!(bed.records().len(), 1);
}

#[test]
fn a_reinjected_frame_reaches_the_new_owner_whatever_its_mac_address() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow);
    let frame = Frame {
        destination_mac: OWN_MAC,
        ..Frame::received(&flow)
    }
    .build();
    assert_eq!(
        bed.run("inject_filter", &frame),
        outcome(SHOT, &["delivered"])
    );
    assert_eq!(bed.records().len(), 1);
}

#[test]
fn a_reinjected_frame_that_nobody_claims_is_dropped() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = Bed::new();
    let frame = Frame {
        destination_mac: OWN_MAC,
        ..Frame::received(&flow)
    }
    .build();
    let expected = outcome(SHOT, &["drop_unclaimed", "pass_unclaimed"]);
    assert_eq!(bed.run("inject_filter", &frame), expected);
}
